"""`Monitor`: one object beside a training loop, told of every step before the optimiser makes it."""

from __future__ import annotations

import collections
import dataclasses
import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from ctrans.depth import check_count
from ctrans.monitor.alarms import Alarm, Watch
from ctrans.monitor.checks import gradient_spike
from ctrans.monitor.gauges import Figures, Gauges, norm_of
from ctrans.monitor.log import Header, LogWriter, Report
from ctrans.monitor.past import Past
from ctrans.monitor.probes import Held, probe
from ctrans.monitor.reactions import Reactions
from ctrans.monitor.sites import as_it_was, is_compiled, sites_of
from solvers import ConfigError

Told = Callable[[int, Mapping[str, float]], object]
"""Told of a report: its step, and figures by name, those by depth as their least, median and largest."""


class Monitor:
    """Watches a training: `alarms = monitor.step(loss, optimizer)`, after `backward` and before `optimizer.step`.

    - `model`: what trains: a model of ctrans, one of `transformers`, or any module that `open_model` opens, whose options `opening`
      are (`example`, `blocks`, `attention`, `ffn`, ...). Make the monitor before the model is wrapped or sharded
    - `every`: steps between reports, of which the first step has one. Between them nothing is hooked
    - `out`: the directory of its log, which `ctrans watch` shows; nothing is written without
    - `probe_every`: steps between probes, each a walk on the `held` batch of (tokens, targets); never by default
    - `limits`: of alarms, as {"attention logits grow": {"limit": 100}} (see `ALARMS`)
    - `react`: names of `REACTIONS`; none by default. `save` is called with the alarm in place of writing the weights to `out`
    - `told`: functions that get every report, for another logger; `tensorboard` writes its files to `out`
    - `start`, `total`: the step that the training goes on from, and how many it will have
    - `clip`: the norm to which gradients are cut after `step` is told, where they are: Adam's second moments are of cut ones
    - `compiled`: whether the model's passes are compiled. A compiler's graph has no hooks: `step` is then to be given the `batch` that
      the model was called with, its arguments, and a quarter of its sequences is looked at once more, uncompiled, forward only. None
      finds out

    It changes no bit of the training: random numbers, modes and gradients are as without it. In several processes each one makes a
    monitor; the first one writes. Raises ConfigError for what cannot be opened or is no number.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        every: int = 50,
        out: str | Path | None = None,
        probe_every: int | None = None,
        held: tuple[Tensor, Tensor] | None = None,
        limits: Mapping[str, Mapping[str, float]] | None = None,
        react: Collection[str] = (),
        save: Callable[[Alarm], object] | None = None,
        told: Sequence[Told] = (),
        tensorboard: bool = False,
        start: int = 0,
        total: int | None = None,
        compiled: bool | None = None,
        clip: float | None = None,
        **opening: Any,
    ):
        self.every, self.probe_every = check_count("every", every), probe_every
        if probe_every is not None:
            check_count("probe_every", probe_every)
            if held is None:
                raise ConfigError("probe_every needs a batch to walk on: give held=(tokens, targets)")
        self.watch, self.clip = Watch(limits), clip
        self.sites = sites_of(model, **opening)
        self.compiled = is_compiled(model) if compiled is None else compiled
        self.gauges = Gauges(self.sites)
        self.held = None if held is None else Held(*held)
        self.out = None if out is None else Path(out)
        self.first_process = not _distributed() or torch.distributed.get_rank() == 0
        self.reactions = Reactions(react, self.sites.root, self.out, save)
        self.alarms: list[Alarm] = []
        self._told = list(told)
        self._step, self._time, self._timed = start, time.perf_counter(), start
        self._waiting: list[tuple[int, Any, Any]] = []
        self._skips: collections.deque[tuple[int, float]] = collections.deque(maxlen=256)
        heads = [1 if site.attention is not None else 0 for site in self.sites.sites]
        self.past = Past([site.place for site in self.sites.sites], heads, self.sites.vocabulary)
        self._writer: LogWriter | None = None
        self._start, self._total = start, total
        if tensorboard and self.out is not None and self.first_process:
            self._told.append(_tensorboard(self.out, start))
        self._arm_for(start + 1)

    @property
    def stopped(self) -> bool:
        """Whether a reaction asks for the end of the training."""
        return self.reactions.stopped

    def step(
        self,
        loss: Tensor | float | None,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        gradient_norm: Tensor | float | None = None,
        batch: Any = None,
    ) -> list[Alarm]:
        """The alarms that are new, on steps that report; none on the others.

        - `loss`: of this step, None where it is not known
        - `optimizer`: the one that is about to step, for the learning rate and Adam's moments
        - `gradient_norm`: where it is known, as from `clip_grad_norm_`; without it a report has its own
        - `batch`: what a compiled model was called with: a tensor, or a tuple or mapping of arguments
        """
        self._step += 1
        step = self._step
        self._waiting.append((step, _kept(loss), _kept(gradient_norm)))
        alarms: list[Alarm] = []
        if "skip" in self.reactions.asked:
            self._skip_spikes(step, gradient_norm)
        if self._reports(step):
            alarms = self._report(step, optimizer, batch)
        if self._reports(step + 1):
            self.gauges.sample_weights()
        self._arm_for(step + 1)
        return alarms

    def note_gradient_norm(self, step: int, norm: float) -> None:
        """The gradient norm of a step that is over, for trainers that tell it late."""
        self.past.norms.append((step, norm))

    def close(self, words: str = "finished") -> None:
        """Takes the hooks away and ends the log. A log without an end is that of a run that goes on, or was killed."""
        self.gauges.disarm()
        if self._writer is not None:
            self._writer.end(self._step, words)
            self._writer = None

    def __enter__(self) -> Monitor:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close("finished" if kind is None else f"{kind.__name__}: {' '.join(str(error).split())[:200]}")

    def _reports(self, step: int) -> bool:
        return step % self.every == 0 or step == self._start + 1

    def _arm_for(self, step: int) -> None:
        if self._reports(step) and not self.compiled:
            self.gauges.arm()

    def _report(self, step: int, optimizer: torch.optim.Optimizer | None, batch: Any) -> list[Alarm]:
        self.gauges.disarm()
        if not self.gauges.seen and batch is not None:
            self._look(batch)
        probed = self._probe(step, optimizer)
        figures = self.gauges.read(optimizer, self.clip)
        figures.update(self._run_figures(step, optimizer, figures))
        self._know_heads(figures)
        self.past.half = self.gauges.half
        self.past.add(step, figures, self.gauges.broken)
        alarms = self.watch.look(self.past)
        self.alarms.extend(alarms)
        self._write(Report(step, figures), alarms, probed)
        self.reactions.to(alarms, step, optimizer)
        return alarms

    def _run_figures(self, step: int, optimizer: torch.optim.Optimizer | None, figures: Figures) -> Figures:
        """What is known without looking into the model."""
        waiting, self._waiting = self._waiting, []
        losses = _numbers([loss for _, loss, _ in waiting])
        norms = _numbers([norm for _, _, norm in waiting])
        lost = [(step, loss) for (step, known, _), loss in zip(waiting, losses, strict=True) if known is not None]
        self.past.losses.extend(lost)
        given = [(step, norm) for (step, _, known), norm in zip(waiting, norms, strict=True) if known is not None]
        self.past.norms.extend(given)
        now = time.perf_counter()
        found: Figures = {"loss": lost[-1][1], "highest_loss": _largest([loss for _, loss in lost])} if lost else {}
        if step > self._timed:
            found["seconds"] = (now - self._time) / (step - self._timed)
        self._time, self._timed = now, step
        if given:
            found |= {"gradient_norm": given[-1][1], "highest_gradient_norm": _largest([norm for _, norm in given])}
        if optimizer is not None:
            found["learning_rate"] = max(float(group["lr"]) for group in optimizer.param_groups) * self.reactions.factor
        return found

    def _skip_spikes(self, step: int, gradient_norm: Tensor | float | None) -> None:
        grads = [p.grad for p in self.sites.root.parameters() if p.grad is not None]
        norm = float(norm_of(grads) if gradient_norm is None else gradient_norm)
        alone = Past([], [], 0)
        alone.norms.extend([*self._skips, (step, norm)])
        limits = {**self.watch.limits["gradient spike"], "recent": 1}
        if not math.isfinite(norm) or gradient_spike(alone, limits) is not None:
            self.reactions.skip(step)
        else:
            self._skips.append((step, norm))

    def _look(self, batch: Any) -> None:
        """One more pass, uncompiled and forward only, of a quarter of what the model was called with."""
        root = self.sites.root
        self.gauges.arm(looking=True)
        try:
            with as_it_was(root), torch.no_grad(), torch.compiler.set_stance("force_eager"):
                root.eval()
                args, kwargs = _part(batch)
                root(*args, **kwargs)
        finally:
            self.gauges.disarm()

    def _know_heads(self, figures: Figures) -> None:
        """How many heads each attention has, as its first scores show."""
        counts = self.gauges.heads
        if counts is not None:
            self.past.heads = counts

    def _probe(self, step: int, optimizer: torch.optim.Optimizer | None) -> dict[str, Any] | None:
        nothing = [None] * len(self.sites.sites)
        self.gauges.map_bounds = [*nothing]
        if self.probe_every is None or self.held is None or (step != self._start + 1 and step % self.probe_every >= self.every):
            return None
        started = time.perf_counter()
        found = probe(self.sites, self.held, optimizer)
        self._time += time.perf_counter() - started  # no step's own
        self.gauges.map_bounds = found.pop("map_bounds", nothing)
        numbers = {name: value for name, value in found.items() if isinstance(value, float)}
        self.past.probes.append((step, numbers))
        return found

    def _write(self, report: Report, alarms: Sequence[Alarm], probed: Mapping[str, Any] | None) -> None:
        if not self.first_process:
            return
        if self.out is not None:
            if self._writer is None:
                self._writer = LogWriter(self.out, self._header(report), self._start)
            self._writer.report(report)
            for alarm in alarms:
                self._writer.alarm(report.step, dataclasses.asdict(alarm))
            if probed is not None:
                self._writer.probe(report.step, probed)
        if self._told:
            summary = summarised(report.figures)
            for told in self._told:
                told(report.step, summary)

    def _header(self, report: Report) -> Header:
        sites = self.sites.sites
        unseen = (
            "" if "rms" in report.figures else "no pass through the depth was seen: for a compiled model give step its batch="
        )
        return Header(
            self.sites.said,
            [site.place for site in sites],
            [site.kind for site in sites],
            self.past.heads,
            self.every,
            self._total,
            unseen,
        )


def summarised(figures: Figures) -> dict[str, float]:
    """Figures as plain numbers: those by depth by their least, median and largest, as 'rms/largest'."""
    found: dict[str, float] = {}
    for name, value in figures.items():
        if not isinstance(value, list):
            found[name] = value
            continue
        known = sorted(each for each in value if math.isfinite(each))
        if known:
            found |= {f"{name}/least": known[0], f"{name}/median": known[len(known) // 2], f"{name}/largest": known[-1]}
    return found


def _part(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The first quarter of a batch's sequences, as arguments: of every tensor that has as many rows as the first one."""
    args = () if isinstance(batch, Mapping) else tuple(batch) if isinstance(batch, (tuple, list)) else (batch,)
    kwargs = dict(batch) if isinstance(batch, Mapping) else {}
    count = next((len(each) for each in (*args, *kwargs.values()) if isinstance(each, Tensor) and each.dim()), 0)

    def cut(each: Any) -> Any:
        fits = isinstance(each, Tensor) and each.dim() > 0 and len(each) == count
        return each[: max(1, count // 4)] if fits else each

    return tuple(map(cut, args)), {name: cut(each) for name, each in kwargs.items()}


def _tensorboard(directory: Path, start: int) -> Told:
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(directory), purge_step=start + 1)

    def told(step: int, figures: Mapping[str, float]) -> None:
        for name, value in figures.items():
            writer.add_scalar(f"monitor/{name}", value, step)
        writer.flush()

    return told


def _distributed() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def _kept(value: Tensor | float | None) -> Any:
    """A number that stays where it is until a report moves it."""
    if isinstance(value, Tensor):
        value = value.detach()
        value = value.full_tensor() if hasattr(value, "full_tensor") else value
        return value.reshape(()).clone() if value.numel() == 1 else value.float().mean()
    return value


def _numbers(values: Sequence[Any]) -> list[float]:
    """All of them on the host, those on a device in one move; nan for what is None."""
    there = [(i, value) for i, value in enumerate(values) if isinstance(value, Tensor)]
    found = [math.nan if value is None or isinstance(value, Tensor) else float(value) for value in values]
    if there:
        moved = torch.stack([value.float() for _, value in there]).tolist()
        for (i, _), number in zip(there, moved, strict=True):
            found[i] = number
    return found


def _largest(values: Sequence[float]) -> float:
    """The largest; nan or inf where there is one."""
    return next((value for value in values if not math.isfinite(value)), max(values))
