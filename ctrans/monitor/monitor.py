"""`Monitor`: one object beside a training loop, told of every step before the optimiser makes it."""

from __future__ import annotations

import collections
import contextlib
import logging
import math
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from ctrans.findings import Finding
from ctrans.monitor.alarms import Watch
from ctrans.monitor.gauge_table import Figures, measures_of
from ctrans.monitor.gauges import Gauges, in_a_line
from ctrans.monitor.log import LogWriter
from ctrans.monitor.log_lines import Header, Report
from ctrans.monitor.memory import Memory, into_past, of_past, of_steps, of_weights, packed, steps_of, unpacked, weights_of
from ctrans.monitor.past import Past
from ctrans.monitor.past_checks import gradient_spike
from ctrans.monitor.probes import Held, probe
from ctrans.monitor.reactions import Reactions, distributed
from ctrans.monitor.reductions import detached, host_numbers, norm_of
from ctrans.monitor.settings import ToldFigures, settings_and_opening
from ctrans.monitor.sites import as_it_was, is_compiled, sites_of
from solvers import ConfigError

LOGGER = logging.getLogger("ctrans.monitor")


class Monitor:
    """Watches a training: `alarms = monitor.step(loss, optimizer)`, after `backward` and before
    `optimizer.step`.

    - `model`: what trains: a model of ctrans, one of `transformers`, or any module that
      `open_model` opens. Make the monitor before the model is sharded
    - `every` to `compiled`: the settings, which `MonitorSettings` explains
    - `blocks` to `heads`: options of `open_model`, for a module that it needs help with

    It changes no bit of the training: random numbers, modes and gradients are as without it; and
    what goes wrong with a figure, a probe or a report is told and does not reach the training. In
    several processes each one makes a monitor, and all tell the same steps; the first one writes.
    Raises ConfigError for what cannot be opened or is no setting.
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
        save: Callable[[Finding], object] | None = None,
        told: Sequence[ToldFigures] = (),
        tensorboard: bool = False,
        start: int = 0,
        total: int | None = None,
        memory: Mapping[str, Any] | None = None,
        clip: float | None = None,
        scale: Callable[[], float] | None = None,
        unscaled: bool = False,
        compiled: bool | None = None,
        blocks: str | None = None,
        attention: str | Sequence[str] | None = None,
        ffn: str | Sequence[str] | None = None,
        embed: Callable[[Tensor], Tensor] | None = None,
        head: Callable[[Tensor], Any] | None = None,
        loss: Any = None,
        example: Any = None,
        heads: int | None = None,
    ):
        options = {name: value for name, value in locals().items() if name not in ("self", "model")}
        self.settings, opening = settings_and_opening(options)
        opening = {name: value for name, value in opening.items() if value is not None}
        given = self.settings
        self.watch = Watch(given.limits)
        self.sites = sites_of(model, **opening)
        self.compiled = is_compiled(model) if given.compiled is None else given.compiled
        self.gauges = Gauges(self.sites)
        self.held = None if given.held is None else Held(*given.held)
        self.first_process = not distributed() or torch.distributed.get_rank() == 0
        self.reactions = Reactions(given.react, self.sites.root, given.directory, given.save)
        self.alarms: list[Finding] = []
        self._told = list(given.told)
        self._step, self._time, self._timed = given.start, time.perf_counter(), given.start
        self._anew = given.start + 1
        """The step that has a report whatever `every` is; none where it goes on with a memory."""
        self._waiting: list[tuple[int, Any, Any]] = []
        self._skips: collections.deque[tuple[int, float]] = collections.deque(maxlen=256)
        self._then: Memory | None = None
        at_first = [1 if site.attention is not None else 0 for site in self.sites.sites]
        self.past = Past([site.place for site in self.sites.sites], at_first, self.sites.vocabulary)
        self._writer: LogWriter | None = None
        if given.tensorboard and given.directory is not None and self.first_process:
            self._told.append(_tensorboard(given.directory, given.start))
        if given.memory is not None:
            self._remember(given.memory)
        self._arm_for(given.start + 1)

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
    ) -> list[Finding]:
        """The alarms that are new, on steps that report; none on the others.

        - `loss`: of this step, None where it is not known
        - `optimizer`: the one that is about to step, for the learning rate and Adam's moments
        - `gradient_norm`: where it is known, as from `clip_grad_norm_`, without a scaler's scale;
          without it a report has its own
        - `batch`: what a compiled model was called with: a tensor, or a tuple or mapping of
          arguments
        """
        self._then = self.memory() if "save" in self.reactions.asked and self._reports(self._step + 1) else None
        self._step += 1
        step = self._step
        self.reactions.go_on(optimizer)
        self._waiting.append((step, detached(loss), detached(gradient_norm)))
        alarms: list[Finding] = []
        with self._only_looking(step):
            if self._reports(step):
                alarms = self._report(step, optimizer, batch)
            if self._reports(step + 1):
                self.gauges.sample_weights()
        with self._only_looking(step):
            if "skip" in self.reactions.asked:  # after a report, which tells the gradients that are left out
                self._skip_spikes(step, gradient_norm)
        self._then = None
        self._arm_for(step + 1)
        return alarms

    def memory(self) -> Memory:
        """What `Monitor(..., start=step, memory=...)` goes on from to the bit, as plain JSON: to be
        saved with a checkpoint.

        While the training is told of a danger (`save`) it is that of before the step, as the
        weights are.
        """
        if self._then is not None:
            return self._then
        losses, norms = ([each[i] for each in self._waiting] for i in (1, 2))
        known = [[loss is not None, norm is not None] for _, loss, norm in self._waiting]
        return {
            "step": self._step,
            "waiting": [[step, *which] for (step, _, _), which in zip(self._waiting, known, strict=True)],
            "waiting_losses": packed(host_numbers(losses)),
            "waiting_norms": packed(host_numbers(norms)),
            "past": of_past(self.past),
            "skips": of_steps(self._skips),
            "alarms": self.watch.memory(),
            "factor": self.reactions.factor,
            "weights": of_weights(self.gauges.updates.before),
        }

    def note(self, step: int, *, loss: float | None = None, gradient_norm: float | None = None) -> None:
        """What is known of a step when it is over, for trainers that tell it late: alarms know it
        from the next report on.
        """
        self._waiting.append((step, loss, gradient_norm))

    def close(self, words: str = "finished") -> None:
        """Takes the hooks away and ends the log. A log without an end is that of a run that goes
        on, or was killed.
        """
        self.gauges.disarm()
        if self._writer is not None:
            self._writer.end(self._step, words)
            self._writer = None

    def __enter__(self) -> Monitor:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close("finished" if kind is None else f"{kind.__name__}: {' '.join(str(error).split())[:200]}")

    def _remember(self, memory: Mapping[str, Any]) -> None:
        if memory.get("step") != self.settings.start:
            raise ConfigError(
                f"memory is of step {memory.get('step')} and start = {self.settings.start}: give that of the same step"
            )
        losses, norms = unpacked(memory["waiting_losses"]), unpacked(memory["waiting_norms"])
        for (step, has_loss, has_norm), loss, norm in zip(memory["waiting"], losses, norms, strict=True):
            self._waiting.append((step, loss if has_loss else None, norm if has_norm else None))
        into_past(self.past, memory["past"])
        self._skips.extend(steps_of(memory["skips"]))
        self.watch.remember(memory["alarms"])
        self.reactions.factor = float(memory["factor"])
        self.gauges.updates.before = weights_of(memory["weights"], next(self.sites.root.parameters()).device)
        self._anew = 0

    @contextlib.contextmanager
    def _only_looking(self, step: int) -> Iterator[None]:
        """What goes wrong inside is told, and the training goes on; but for a request that can only
        be wrong, at the first report.

        All exceptions: what stands in a model that nobody here has seen, or in a logger of
        somebody's, is not known, and a training is worth more than a report of it.
        """
        try:
            yield
        except Exception as error:
            if isinstance(error, ConfigError) and step == self.settings.start + 1:
                raise
            LOGGER.warning("step %d: no report: %s", step, in_a_line(error))
            self.gauges.disarm()

    def _reports(self, step: int) -> bool:
        return step % self.settings.every == 0 or step == self._anew

    def _arm_for(self, step: int) -> None:
        if self._reports(step) and not self.compiled:
            self.gauges.arm()

    def _report(self, step: int, optimizer: torch.optim.Optimizer | None, batch: Any) -> list[Finding]:
        self.gauges.disarm()
        if not self.gauges.seen and batch is not None:
            self._look(batch)
        probed = self._probe(step, optimizer)
        given = self.settings
        scale = None if given.scale is None else given.scale()
        figures = self.gauges.read(optimizer, given.clip, scale, unscaled=given.unscaled)
        figures.update(self._run_figures(step, optimizer, figures))
        for name, measure in measures_of("run").items():
            try:
                figures[name] = float(measure(figures))
            except Exception as error:  # all exceptions: a function of somebody's must not end a training
                self.gauges.unknown[f"the gauge {name}"] = in_a_line(error)
        self.past.heads = self.gauges.heads or self.past.heads
        self.past.half = self.gauges.half
        self.past.add(step, figures, self.gauges.broken)
        alarms = self.watch.look(self.past)
        self.alarms.extend(alarms)
        self._write(Report(step, figures, dict(self.gauges.unknown)), alarms, probed)
        self.reactions.to(alarms, step, optimizer)
        return alarms

    def _run_figures(self, step: int, optimizer: torch.optim.Optimizer | None, figures: Figures) -> Figures:
        """What is known without looking into the model."""
        waiting, self._waiting = self._waiting, []
        losses = host_numbers([loss for _, loss, _ in waiting])
        norms = host_numbers([norm for _, _, norm in waiting])
        lost = [(step, loss) for (step, known, _), loss in zip(waiting, losses, strict=True) if known is not None]
        self.past.losses.extend(lost)
        given = [(step, norm) for (step, _, known), norm in zip(waiting, norms, strict=True) if known is not None]
        if self.settings.scale is not None:  # what overflows in the scale is its scaler's business
            given = [(step, norm) for step, norm in given if math.isfinite(norm)]
        self.past.norms.extend(given)
        now = time.perf_counter()
        found: Figures = {"loss": lost[-1][1], "highest_loss": _largest([loss for _, loss in lost])} if lost else {}
        if step > self._timed:
            found["seconds"] = (now - self._time) / (step - self._timed)
        self._time, self._timed = now, step
        if given:
            found["highest_gradient_norm"] = _largest([norm for _, norm in given])
            if given[-1][0] == step:
                found["gradient_norm"] = given[-1][1]
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
        """One more pass, uncompiled and forward only, of a quarter of what the model was called
        with.
        """
        root = self.sites.root
        self.gauges.arm(looking=True)
        try:
            with as_it_was(root), torch.no_grad(), torch.compiler.set_stance("force_eager"):
                root.eval()
                args, kwargs = _part(batch)
                root(*args, **kwargs)
        finally:
            self.gauges.disarm()

    def _probe(self, step: int, optimizer: torch.optim.Optimizer | None) -> dict[str, Any] | None:
        nothing = [None] * len(self.sites.sites)
        self.gauges.map_bounds = [*nothing]
        every = self.settings.probe_every
        if every is None or self.held is None or (step != self._anew and step % every >= self.settings.every):
            return None
        started = time.perf_counter()
        found = probe(self.sites, self.held, optimizer)
        self._time += time.perf_counter() - started  # no step's own
        self.gauges.map_bounds = found.pop("map_bounds", nothing)
        numbers = {name: value for name, value in found.items() if isinstance(value, float)}
        self.past.probes.append((step, numbers))
        return found

    def _write(self, report: Report, alarms: Sequence[Finding], probed: Mapping[str, Any] | None) -> None:
        if not self.first_process:
            return
        if self.settings.directory is not None:
            if self._writer is None:
                self._writer = LogWriter(self.settings.directory, self._header(report), self.settings.start)
            self._writer.report(report)
            for alarm in alarms:
                self._writer.finding(report.step, alarm)
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
            self.settings.every,
            self.settings.total,
            unseen,
        )


def summarised(figures: Figures) -> dict[str, float]:
    """Figures as plain numbers: those by depth by their least, median and largest, as
    'rms/largest'.
    """
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
    """The first quarter of a batch's sequences, as arguments: of every tensor that has as many rows
    as the first one.
    """
    args = () if isinstance(batch, Mapping) else tuple(batch) if isinstance(batch, (tuple, list)) else (batch,)
    kwargs = dict(batch) if isinstance(batch, Mapping) else {}
    count = next((len(each) for each in (*args, *kwargs.values()) if isinstance(each, Tensor) and each.dim()), 0)

    def cut(each: Any) -> Any:
        fits = isinstance(each, Tensor) and each.dim() > 0 and len(each) == count
        return each[: max(1, count // 4)] if fits else each

    return tuple(map(cut, args)), {name: cut(each) for name, each in kwargs.items()}


def _tensorboard(directory: Path, start: int) -> ToldFigures:
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(directory), purge_step=start + 1)

    def told(step: int, figures: Mapping[str, float]) -> None:
        for name, value in figures.items():
            writer.add_scalar(f"monitor/{name}", value, step)
        writer.flush()

    return told


def _largest(values: Sequence[float]) -> float:
    """The largest; nan or inf where there is one."""
    return next((value for value in values if not math.isfinite(value)), max(values))
