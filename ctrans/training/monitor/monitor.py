"""`Monitor`: watches a training loop. The loop calls it before each step of the optimiser."""

from __future__ import annotations

import contextlib
import copy
import inspect
import math
import time
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from ctrans.base.as_found import as_found
from ctrans.measure.findings import Finding
from ctrans.measure.reductions import largest, norm_of, stacked_softmaxes
from ctrans.training.monitor.alarms import Watch
from ctrans.training.monitor.gauges import Gauges
from ctrans.training.monitor.hooks import in_a_line
from ctrans.training.monitor.log_lines import Report
from ctrans.training.monitor.memory import Memory, into_past, of_past, of_weights, weights_of
from ctrans.training.monitor.monitor_options import check_options
from ctrans.training.monitor.past import Past
from ctrans.training.monitor.probes import Held, probe
from ctrans.training.monitor.reactions import Reactions
from ctrans.training.monitor.report_callbacks import ReportCallback
from ctrans.training.monitor.report_writer import ReportWriter
from ctrans.training.monitor.sites import first_quarter, is_compiled, sites_of
from ctrans.training.monitor.training_measures import Figures, measures_of
from ctrans.training.monitor.updates import settings, steps_taken
from ctrans.training.monitor.waiting import (
    WITHOUT_GRADIENTS,
    WITHOUT_OPTIMIZER,
    Waiting,
    warn,
)
from solvers import AnyFloat, ConfigError, checked

OF_OPEN_MODEL = ("blocks", "attention", "ffn", "embed", "head", "loss", "example", "heads")
"""The options that `Monitor` passes on to `open_model`."""


@checked
class Monitor:
    """Watches a training. Call `alarms = monitor.step(loss, optimizer)` after `backward` and before
    `optimizer.step`.

    - `model`: the model that trains: one of ctrans, one of `transformers`, or any module that
      `open_model` opens. Make the monitor before you shard the model
    - `every`: steps between reports. The first step also has a report. The monitor puts hooks into
      the model only for steps that report, and for the batch of the step before
    - `out`: the directory of the log, which `ctrans watch` shows; None writes no log. The log of
      another training there is kept as monitor-1.jsonl, with a warning
    - `probe_every`: steps between probes, which walk the model on the batch `held`, a pair (tokens,
      targets); None makes no probes
    - `limits`: limits of alarms, such as {"attention logits grow": {"limit": 100}} (see `ALARMS`)
    - `react`: names of `REACTIONS`. The reaction "save" calls `save` with the alarm; without `save`
      it writes the weights to `out`
    - `told`: functions that get the step and the figures of each report, for other loggers
    - `tensorboard`: whether to write TensorBoard files to `out`
    - `start`, `total`: the step at which the training resumes, and its number of steps
    - `memory`: the result of `Monitor.memory()` at the step `start`. Alarms and reactions then
      continue as if the training had not stopped
    - `clip`: the norm to which you clip the gradients after `step`. Adam then sees clipped ones
    - `scale`: a function that returns the factor of the loss in `backward`, such as
      `GradScaler.get_scale`. Reports divide gradients by it, and show nan for those that overflow
    - `unscaled`: whether the gradients of the weights no longer have that factor when you call
      `step`, as after `GradScaler.unscale_`
    - `compiled`: whether the model is compiled; None finds out. A compiled graph runs no hooks.
      Give `step` the `batch`: the monitor runs a quarter of its sequences once more, uncompiled and
      forward only
    - `blocks` to `heads`: options of `open_model`

    The training stays the same to the bit: random numbers, modes and gradients do not change. An
    error in a gauge, a probe, a report or the log becomes a warning and does not stop the training.
    With several processes, make a monitor in each one and call `step` at the same steps; the first
    process writes. Raises ConfigError, when you make the monitor only, for a model that cannot be
    opened, invalid options, and a directory that cannot be written to.
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
        told: Sequence[ReportCallback] = (),
        tensorboard: bool = False,
        start: int = 0,
        total: int | None = None,
        memory: Mapping[str, Any] | None = None,
        clip: AnyFloat | None = None,
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
        check_options(options, DEFAULTS)
        self.every = every
        self.probe_every = probe_every
        self.start = start
        self.total = total
        self.clip = clip
        self.scale = scale
        self.unscaled = unscaled
        self.out: Path | None = None
        if out is not None:
            self.out = Path(out).absolute()  # the training may change its working directory
        self.watch = Watch(limits)
        opening = {name: options[name] for name in OF_OPEN_MODEL if options[name] is not None}
        self.sites = sites_of(model, **opening)
        if compiled is None:
            compiled = is_compiled(model)
        self.compiled = compiled
        self.gauges = Gauges(self.sites)
        for part in (self.gauges.passes, self.gauges.loop):
            # hooks hold no model, which may hold this monitor
            weakref.finalize(self, part.hooks.close).atexit = False
        self.held: Held | None = None
        if held is not None:
            self.held = Held(*held)
        self._writer = ReportWriter(
            self.sites,
            self.out,
            told,
            every=every,
            start=start,
            goes_on=start > 0 or memory is not None,
            total=total,
            tensorboard=tensorboard,
        )
        self.reactions = Reactions(react, self.sites.root, self.out, save)
        self.alarms: list[Finding] = []
        self._step = start
        self._last_report_time = time.perf_counter()
        self._last_report_step = start
        self._first_report = start + 1
        """The step that reports whatever `every` is; 0 after a resumption with a memory."""
        self._waiting = Waiting(scaled=scale is not None)
        self._closed = False
        self._memory_before: Memory | None = None
        places = [site.place for site in self.sites.by_depth]
        # until a pass shows the number of heads
        head_counts = [int(site.attention is not None) for site in self.sites.by_depth]
        self.past = Past(places, head_counts, self.sites.vocabulary)
        if memory is not None:
            self._remember(memory)
        self._arm_for(start + 1)

    @property
    def stopped(self) -> bool:
        """Whether a reaction asked for the end of the training."""
        return self.reactions.stopped

    def step(
        self,
        loss: Tensor | float | None,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        gradient_norm: Tensor | float | None = None,
        batch: Any = None,
    ) -> list[Finding]:
        """Returns the new alarms on a step that reports, and [] on the others.

        - `loss`: of this step; None if it is unknown
        - `optimizer`: the one that steps next, for its learning rate and Adam's moments. Without
          it, the first report logs what is not measured
        - `gradient_norm`: the norm from `clip_grad_norm_`, without a scaler's factor; without it,
          reports compute it
        - `batch`: the input of a compiled model: a tensor, or a tuple or mapping of arguments
        """
        step = self._step + 1
        alarms = list[Finding]()
        if self._closed:
            return alarms
        reports = self._reports(step)
        optimizer = self._waiting.optimizer(optimizer, step)
        self._memory_before = None
        with self._errors_as_warnings(step):
            if "save" in self.reactions.names and reports:
                self._memory_before = self.memory()
        self._step = step
        norm = self._waiting.number("gradient_norm", gradient_norm, step)
        with self._errors_as_warnings(step):
            self._waiting.add(step, self._waiting.number("loss", loss, step), norm)
            if reports:
                alarms = self._report(step, optimizer, batch, loss)
            elif self._reports(step + 1):
                self.gauges.loop.note_batch(step)
        with self._errors_as_warnings(step):
            if reports:  # even if the report failed, as other processes wait for this one
                self.reactions.react(alarms, step)
        with self._errors_as_warnings(step):
            if self._reports(step + 1):
                self.gauges.sample_weights()
        with self._errors_as_warnings(step):
            # after the report, which shows the gradients that are skipped
            if "skip" in self.reactions.names:
                self._skip(step, norm)
        self._memory_before = None
        self._arm_for(step + 1)
        return alarms

    def memory(self) -> Memory:
        """Returns what `Monitor(..., start=step, memory=...)` needs to continue to the bit, as
        plain JSON. Save it with each checkpoint.

        While the reaction "save" runs, it is the memory of before the step, as the weights are.
        """
        if self._memory_before is not None:
            return self._memory_before
        return {
            "step": self._step,
            **self._waiting.memory(),
            "past": of_past(self.past),
            "alarms": self.watch.memory(),
            "weights": of_weights(self.gauges.updates.before),
            "loop": self.gauges.loop.memory(),
        }

    def name_run(self, run: str) -> None:
        """Names the run in the header of the log, before the first step: a resumed run goes on with
        the log that has its name, and keeps one with another name.
        """
        self._writer.run = run

    def note(
        self, step: int, *, loss: float | None = None, gradient_norm: float | None = None
    ) -> None:
        """Adds figures of a step that a trainer reports late. Alarms use them from the next
        report.
        """
        self._waiting.add(step, loss, gradient_norm)

    def close(self, words: str = "finished") -> None:
        """Removes the hooks and ends the log, in `words`. Later steps do nothing, and nor does
        closing again. A log without an end is of a run that still runs, or was killed.
        """
        if self._closed:
            return
        self._closed = True
        with self._errors_as_warnings(self._step):
            self.gauges.disarm()
            self._writer.end(self._step, words)

    def __getstate__(self) -> dict[str, Any]:
        """The state of a copy, which has no hooks and writes no log."""
        return {**vars(self), "out": None, "_writer": copy.copy(self._writer)}

    def __enter__(self) -> Monitor:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self.close("finished")
        else:
            self.close(in_a_line(error))

    def _remember(self, memory: Mapping[str, Any]) -> None:
        if memory.get("step") != self.start:
            raise ConfigError(
                f"memory is of step {memory.get('step')} and start = {self.start}: give the memory"
                " of that step"
            )
        try:
            self._waiting.remember(memory)
            into_past(self.past, memory["past"])
            self.watch.remember(memory["alarms"])
            self.gauges.loop.remember(memory.get("loop", {}))
            self.gauges.updates.before = weights_of(
                memory["weights"], next(self.sites.root.parameters()).device
            )
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            raise ConfigError(
                f"memory is no result of Monitor.memory(): {in_a_line(error)}"
            ) from None
        self._first_report = 0

    @contextlib.contextmanager
    def _errors_as_warnings(self, step: int) -> Iterator[None]:
        """Logs any exception as a warning: users' models and loggers may raise anything, and a
        training must not stop for its report.
        """
        try:
            yield
        except Exception as error:
            warn(step, "no report", error)
            self.gauges.disarm()

    def _reports(self, step: int) -> bool:
        return step % self.every == 0 or step == self._first_report

    def _arm_for(self, step: int) -> None:
        if self.compiled:
            return
        if not self._reports(step):
            if self._reports(step + 1):
                self.gauges.arm_batch()
            return
        # a compiled part cannot be traced inside the mode of `PassHooks` that shows sums
        if self.sites.stream is not None and is_compiled(self.sites.root):
            return
        self.gauges.arm()

    def _report(
        self, step: int, optimizer: torch.optim.Optimizer | None, batch: Any, loss: object
    ) -> list[Finding]:
        self.gauges.disarm()
        if not self.gauges.passes.seen and batch is not None:
            self._run_eagerly(batch)
        probed = self._probe(step, optimizer)
        scale: float | None = None
        if self.scale is not None:
            scale = self.scale()
        figures = self.gauges.read(optimizer, self.clip, scale, unscaled=self.unscaled, step=step)
        if optimizer is None:
            self._waiting.say_once("optimizer", step, WITHOUT_OPTIMIZER)
        if "gradients" in self.gauges.missing:
            self._waiting.say_once("gradients", step, WITHOUT_GRADIENTS)
        figures.update(self._run_figures(step, optimizer) | stacked_softmaxes(loss))
        for name, measure in measures_of("run").items():
            try:
                figures[name] = float(measure(figures))
            except Exception as error:  # a user's function may raise anything
                self.gauges.missing[f"the gauge {name}"] = in_a_line(error)
        self.past.heads = self.gauges.heads or self.past.heads
        self.past.half = self.gauges.passes.half
        self.past.add(step, figures, self.gauges.broken)
        alarms = self.watch.look(self.past)
        self.alarms.extend(alarms)
        with self._errors_as_warnings(step):
            report = Report(step, figures, dict(self.gauges.missing))
            self._writer.write(report, alarms, probed, heads=self.past.heads)
        return alarms

    def _run_figures(self, step: int, optimizer: torch.optim.Optimizer | None) -> Figures:
        """The figures that need no hooks."""
        losses, norms = self._waiting.take()
        self.past.losses.extend(losses)
        self.past.norms.extend(norms)
        now = time.perf_counter()
        figures: Figures = {}
        if losses:
            figures["loss"] = losses[-1][1]
            figures["highest_loss"] = largest(losses)
        if step > self._last_report_step:
            figures["seconds"] = (now - self._last_report_time) / (step - self._last_report_step)
        self._last_report_time = now
        self._last_report_step = step
        if norms:
            figures["highest_gradient_norm"] = largest(norms)
            norm_step, norm = norms[-1]
            if norm_step == step:
                figures["gradient_norm"] = norm
        taken = steps_taken(optimizer)
        if taken is not None and step > 1:
            figures["optimizer_steps"] = taken / (step - 1)
        return figures | settings(optimizer)

    def _skip(self, step: int, norm: Tensor | float | None) -> None:
        if norm is None:
            norm = norm_of([p.grad for p in self.sites.root.parameters() if p.grad is not None])
        if not math.isfinite(norm):
            self.reactions.skip(step)

    def _run_eagerly(self, batch: Any) -> None:
        """Runs a quarter of the batch once more, uncompiled and forward only."""
        root = self.sites.root
        self.gauges.arm(looking=True)  # an error disarms, as any error of a report
        with as_found(root), torch.no_grad(), torch.compiler.set_stance("force_eager"):
            args, kwargs = first_quarter(batch)
            root(*args, **kwargs)
        self.gauges.disarm()

    def _probe(self, step: int, optimizer: torch.optim.Optimizer | None) -> dict[str, Any] | None:
        self.gauges.map_bounds = []
        if self.probe_every is None or self.held is None:
            return None
        # the first report since a probe is due
        is_due = step % self.probe_every < self.every
        if not is_due and step != self._first_report:
            return None
        started = time.perf_counter()
        figures = probe(self.sites, self.held, optimizer)
        self._last_report_time += time.perf_counter() - started  # a probe's time is not a step's
        self.gauges.map_bounds = figures.pop("map_bounds", [])
        numbers = {name: value for name, value in figures.items() if isinstance(value, float)}
        self.past.probes.append((step, numbers))
        return figures


DEFAULTS = {
    name: parameter.default
    for name, parameter in inspect.signature(Monitor).parameters.items()
    if name != "model"
}
"""The options of `Monitor` with their defaults."""
