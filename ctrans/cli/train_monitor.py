"""The monitor of `ctrans train`, new or of a resumed run."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ctrans.cli.say import say_if_read
from ctrans.cli.train_options import TrainRequest
from ctrans.measure.findings import Finding
from ctrans.report.files import to_json
from ctrans.training.loop import Advice, Ending, Outcome, TrainingRun, Watcher
from ctrans.training.monitor import Monitor
from ctrans.training.monitor.memory import MEMORY, OPTIONS, memory_in, options_in
from ctrans.training.monitor.reactions import check_reactions
from ctrans.training.run_directory import KEEP
from ctrans.training.training_state import Progress
from solvers import ConfigError

MONITOR_OPTIONS = ("every", "probe_every", "react")
"""The options of the monitor that a resumed run keeps."""
HELD = 2
"""Windows of the validation text in the monitor's fixed batch."""


def check_monitored(request: TrainRequest) -> None:
    """Raises ConfigError for options of the monitor in a run without one."""
    for name in ("probe_every", "react"):
        if name in request.typed and not request.monitor:
            raise ConfigError(
                f"--{name.replace('_', '-')} is an option of the monitor: add --monitor, or leave"
                " it out"
            )


@contextmanager
def watched_run(
    request: TrainRequest, run: TrainingRun, progress: Progress
) -> Iterator[TrainingRun]:
    """Gives the run, with a monitor if the user asked for one, or the resumed run had one."""
    options = _monitor_options(request, run, progress.step)
    if options is None:
        yield run
        return
    watching = MonitoredRun(request, run, progress.step, options)
    with watching.monitor:
        yield replace(run, watch=watching)


def _monitor_options(
    request: TrainRequest, run: TrainingRun, step: int
) -> Mapping[str, Any] | None:
    """The options of the run's monitor: those that were typed, those that a resumed run had, and
    the defaults, in this order. None without a monitor.
    """
    saved = options_in(run.store.step_directory(step)) if request.resume else None
    was_monitored = saved is not None
    if request.monitor is False or not (request.monitor or was_monitored):
        check_monitored(request)
        return None
    options = {name: getattr(request, name) for name in MONITOR_OPTIONS}
    for name, value in (saved or {}).items():
        if name in options and name not in request.typed:
            options[name] = value
    check_reactions(options["react"])
    if was_monitored and not request.monitor and run.processes.first and not request.quiet:
        say_if_read(
            f"The monitor goes on with a report every {options['every']} iterations;"
            " --no-monitor ends it."
        )
    return options


class MonitoredRun(Watcher):
    """A run's watcher with a monitor of these options. Alarms are printed at once, and the
    monitor's memory and options are saved with every checkpoint.
    """

    def __init__(
        self, request: TrainRequest, run: TrainingRun, step: int, options: Mapping[str, Any]
    ):
        self.run = run
        self.quiet = request.quiet
        self.options = options
        self._before: Mapping[str, str] | None = None
        tokens, targets = run.data.validation_windows(HELD)
        self.monitor = Monitor(
            run.model,
            **options,
            out=run.store.directory,
            held=(tokens.to(run.processes.device), targets.to(run.processes.device)),
            save=self._save,
            start=step,
            memory=memory_in(run.store.step_directory(step), step),
            total=run.config.iterations,
            compiled=run.config.compile,
            clip=run.config.clip,
            tensorboard=bool(request.use_tensorboard),
        )
        self.monitor.name_run(run.state.run)

    def before_step(
        self, loss: Tensor, norm: Tensor, optimiser: torch.optim.Optimizer, tokens: Tensor
    ) -> Advice:
        """The advice of the monitor's reactions, empty without reactions."""
        self._before = None
        monitor = self.monitor
        skipped = len(monitor.reactions.skipped)
        stopped = monitor.stopped
        batch = None
        if self.run.config.compile:
            batch = tokens.to(self.run.processes.device)
        alarms = monitor.step(loss, optimiser, gradient_norm=norm, batch=batch)
        if self.run.processes.first and not self.quiet:
            for alarm in alarms:
                say_if_read(str(alarm))
        reason_to_stop = ""
        if monitor.stopped > stopped:
            dangers = [alarm.check for alarm in alarms if alarm.severity != "note"]
            reason_to_stop = dangers[0] if dangers else "another process saw a danger"
        return Advice(len(monitor.reactions.skipped) > skipped, self._before, reason_to_stop)

    def files(self) -> Mapping[str, str]:
        """The monitor's memory, and its options."""
        memory = {**self.monitor.memory(), OPTIONS: dict(self.options)}
        return {MEMORY: json.dumps(memory, allow_nan=False)}

    def end(self, outcome: Outcome) -> None:
        """Ends the monitor's log with how the run ended."""
        words = outcome.ending.value
        if outcome.message.startswith(words):
            words = outcome.message
        elif outcome.ending is not Ending.FINISHED:
            words += f": {outcome.message}"
        self.monitor.close(words)

    def _save(self, alarm: Finding) -> None:
        if self._before is None:
            self._before = {**self.files(), KEEP: to_json(alarm)}
