"""`ctrans train`."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import sys
import time
from collections.abc import Iterator, Mapping
from typing import Any

import click
import torch
from rich.console import Console
from torch import Tensor

from ctrans.cli.ending import check_json, result_of, save_json, write_json
from ctrans.cli.other_depths import check_depths, losses_at
from ctrans.cli.request import command_of, get_device
from ctrans.cli.train_options import TrainRequest
from ctrans.findings import Finding
from ctrans.model.gpt import GPT
from ctrans.monitor import Monitor
from ctrans.monitor.log_lines import plain_numbers
from ctrans.monitor.memory import MEMORY, memory_in
from ctrans.monitor.reactions import check_reactions
from ctrans.report.contents import page_of
from ctrans.report.files import write_atomic
from ctrans.report.picture import pictures
from ctrans.report.progress import bar_words, evaluation_line, progress_bar
from ctrans.report.tensorboard import check_tensorboard, tensorboard
from ctrans.report.terminal import show
from ctrans.threads import choose_threads, flops
from ctrans.training import log
from ctrans.training.loop import Advice, Ending, Observer, Outcome, TrainingRun, carry_out
from ctrans.training.processes import restarts
from ctrans.training.run_directory import KEEP, RunDirectory
from ctrans.training.start_from import start_from
from ctrans.training.train import Plan, begun, plan, plan_to_resume
from ctrans.training.training_state import Progress
from solvers import ConfigError

SIGNALLED = 128
"""Exit code of a run that signal n stopped: this plus n, as shells have it. The run is saved, and
not finished.
"""
HELD = 2
"""So many windows of the validation text are the monitor's held batch."""
ADVICE = {
    (True, Ending.INTERRUPTED): "go on with --resume",
    (True, Ending.STOPPED): "go on with --resume, and a lower --learning-rate, as {rate:g}, where that is what helps,",
    (True, Ending.DIVERGED): "go on from its last good checkpoint with --resume and a lower --learning-rate, as {rate:g},",
    (False, Ending.DIVERGED): "nothing was saved: start again with other settings,",
}
"""What to do about a run that has or has not a checkpoint and ended like that; --out follows."""


@command_of(TrainRequest, "train")
def command(request: TrainRequest) -> None:
    """Train a GPT of any placement, through its ODE or as the discrete Transformer.

    The directory gets checkpoints (links last and best; other commands take the directory as
    --checkpoint), log.jsonl, train.json and loss.png. Ctrl-C, SIGTERM or SIGHUP saves the run and
    exits with 130, 143 or 129. A run that diverges exits with 1; last is then its last good
    checkpoint.

    \b
    ctrans train
    ctrans train --placement pre --dt 0.1 --file book.txt --iterations 5000 --out out/book
    ctrans train --resume --out out/book
    ctrans train --task digits --placement post --iterations 300 --out out/digits
    ctrans train --from out/book --depth 8 --iterations 500 --out out/book-8
    ctrans train --from out/book --depth 8 --low-rank 4 --iterations 500 --out out/book-8-low
    ctrans train --method rk4 --gradient checkpoint --kinetic 0.01
    torchrun --nproc-per-node 2 -m ctrans train --parallel ddp --batch 32
    """
    _check_places(request)
    started = time.perf_counter()
    planned = _plan(request)
    _set_threads(request, planned)
    with begun(planned, get_device(request.device)) as (run, progress):
        first = run.processes.first
        if first and progress.step and not request.quiet:
            _say(_going_on(progress.step, run.config.iterations))
        with _observer(request, run, progress) as observe, _watched(request, run, progress) as watched:
            outcome = carry_out(dataclasses.replace(watched, observe=observe), progress)
        if first:
            result = _result(request, run, outcome, time.perf_counter() - started)
            _show(request, result, run, outcome)
    if first:  # outside: the other processes need not wait
        _add_depths(request, result, run, finished=outcome.ending is Ending.FINISHED)
    if outcome.ending is Ending.INTERRUPTED:
        raise SystemExit(SIGNALLED + outcome.signal)
    if outcome.ending in (Ending.DIVERGED, Ending.STOPPED):
        raise SystemExit(1)


def _check_places(request: TrainRequest) -> None:
    """ConfigError for options that exclude each other or cannot be, before anything is read or
    made.
    """
    for first, second in (("resume", "overwrite"), ("file", "bin")):
        if getattr(request, first) and getattr(request, second):
            raise ConfigError(f"--{first} and --{second} exclude each other: choose one")
    if request.origin is not None and request.resume:
        raise ConfigError("--from begins a run and --resume goes on with one: choose one")
    if request.use_tensorboard:
        check_tensorboard()
    if request.probe_every is not None and not request.monitor:
        raise ConfigError("--probe-every is the monitor's: give --monitor too, or leave it out")
    if check_reactions(request.react) and not request.monitor:
        raise ConfigError("--react is the monitor's: give --monitor too, or leave it out")
    check_json(request, request.out)


def _plan(request: TrainRequest) -> Plan:
    """The run that the options ask for, new or taken up again."""
    if request.resume and (RunDirectory(request.out).exists or not restarts()):
        moved = request.source if {"file", "bin", "task"} & request.typed else None
        flags = {str(parameter.name): parameter.opts[0] for parameter in command.params}
        planned = plan_to_resume(request.out, request.given, moved, parallel=request.parallel, flags=flags)
        check_depths(request.eval_depth, planned.architecture, planned.config)
        return planned
    config = request.settings
    model = request.model if request.origin is None else start_from(request.origin, _architecture(request))
    check_depths(request.eval_depth, model.config if isinstance(model, GPT) else model, config)
    return plan(model, config, request.source, out=request.out, overwrite=request.overwrite, parallel=request.parallel)


def _architecture(request: TrainRequest) -> dict[str, Any]:
    """The options of the architecture that were typed."""
    return {name: value for name, value in request.given.items() if name in request.config}


def _set_threads(request: TrainRequest, planned: Plan) -> None:
    """As many threads as --threads says, or as the model and its micro-batch are worth: the same
    when the run is taken up again.
    """
    if request.threads is not None:
        torch.set_num_threads(request.threads)
    elif get_device(request.device).type == "cpu":
        model, config = planned.architecture, planned.config
        choose_threads(flops(model.width, config.batch, model.context), config.weight_dtype.itemsize)


def _going_on(step: int, iterations: int) -> str:
    if step == iterations:
        return f"Nothing to do: {step} of {iterations} iterations are done; give more by --iterations."
    return f"Going on from step {step} of {iterations}."


@contextlib.contextmanager
def _observer(request: TrainRequest, run: TrainingRun, progress: Progress) -> Iterator[Observer]:
    """What each row of the log is shown by: the bar, a line per evaluation, TensorBoard."""
    with contextlib.ExitStack() as stack:
        iterations = run.config.iterations
        advance = stack.enter_context(progress_bar("train", iterations, progress.step))
        wanted = request.use_tensorboard and run.processes.first
        write = stack.enter_context(tensorboard(run.store.directory, progress.step)) if wanted else None

        def observe(row: log.Row) -> None:
            if write is not None:
                write(row)
            if "tokens_per_second" in row:
                advance(bar_words(row))
            if "validation_loss" in row and not request.quiet:
                _say(evaluation_line(row, iterations))

        yield observe


@contextlib.contextmanager
def _watched(request: TrainRequest, run: TrainingRun, progress: Progress) -> Iterator[TrainingRun]:
    """The run with a monitor, where one is asked for; its alarms are said as they come."""
    if not request.monitor:
        yield run
        return
    watching = MonitoredRun(request, run, progress.step)
    with watching.monitor:
        yield dataclasses.replace(run, watch=watching)


class MonitoredRun:
    """A run's `Watcher`: a monitor, whose alarms are said as they come, and whose memory is saved
    with every checkpoint.
    """

    def __init__(self, request: TrainRequest, run: TrainingRun, step: int):
        self.run, self.quiet = run, request.quiet
        self._before: Mapping[str, str] | None = None
        tokens, targets = run.data.validation_windows(HELD)
        self.monitor = Monitor(
            run.model,
            every=request.every,
            out=run.store.directory,
            probe_every=request.probe_every,
            held=(tokens.to(run.processes.device), targets.to(run.processes.device)),
            react=request.react,
            save=self._save,
            start=step,
            memory=memory_in(run.store.step_directory(step), step),
            total=run.config.iterations,
            compiled=run.config.compile,
            clip=run.config.clip,
            tensorboard=request.use_tensorboard,
        )

    def before_step(self, loss: Tensor, norm: Tensor, optimiser: torch.optim.Optimizer, tokens: Tensor) -> Advice:
        """What the monitor's reactions ask for; nothing where none were given."""
        self._before = None
        monitor, reactions = self.monitor, self.monitor.reactions
        skipped, stopped = len(reactions.skipped), monitor.stopped
        batch = tokens.to(self.run.processes.device) if self.run.config.compile else None
        alarms = monitor.step(loss, optimiser, gradient_norm=norm, batch=batch)
        if self.run.processes.first and not self.quiet:
            for alarm in alarms:
                _say(str(alarm))
        why = next((alarm.check for alarm in alarms if alarm.severity != "note"), "another process saw a danger")
        return Advice(len(reactions.skipped) > skipped, self._before, why * (monitor.stopped > stopped), reactions.factor)

    def files(self) -> Mapping[str, str]:
        """The monitor's memory."""
        return {MEMORY: json.dumps(self.monitor.memory(), allow_nan=False)}

    def _save(self, alarm: Finding) -> None:
        if self._before is None:
            told = json.dumps(plain_numbers(alarm), indent=1)
            self._before = {**self.files(), KEEP: told}


def _say(words: str) -> None:
    """Prints the words, until nobody reads them any more, as behind head or when a terminal is
    closed: the run goes on.
    """
    try:
        click.echo(words)
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _result(request: TrainRequest, run: TrainingRun, outcome: Outcome, seconds: float) -> dict[str, Any]:
    rows = list(log.read(run.store.directory))
    evaluations = [row for row in rows if "validation_loss" in row]
    progress, curves = outcome.progress, log.curves(rows)
    shown = request.shown()
    if request.resume:  # it has its settings from its checkpoint, under "model" and "training", but for what was typed anew
        shown = {name: value for name, value in shown.items() if name in request.typed}
    begins = result_of(request, shown, run.processes.device)
    return {
        **begins,
        "environment": {**begins["environment"], "processes": run.processes.world},
        "ending": outcome.ending.value,
        "message": outcome.message,
        "step": progress.step,
        "model": run.model.config,
        "training": run.config,
        "parameters": sum(parameter.numel() for parameter in run.model.parameters()),
        "trained_parameters": sum(parameter.numel() for parameter in run.model.parameters() if parameter.requires_grad),
        "first_validation_loss": progress.first,
        "validation_loss": evaluations[-1]["validation_loss"] if evaluations else None,
        "best_validation_loss": progress.best,
        "best_step": progress.best_step,
        "accuracy": evaluations[-1].get("accuracy") if evaluations else None,
        "losses": {name: curves.pop(name) for name in ("training", "validation")},
        "curves": curves,
        "other_depths": {},
        "seconds": seconds,
    }


def _add_depths(request: TrainRequest, result: dict[str, Any], run: TrainingRun, *, finished: bool) -> None:
    """Evaluates a finished run at other depths, and writes and prints what the result is then."""
    losses = losses_at(request.eval_depth if finished else (), run)
    write_json(request, run.store.directory, {**result, "other_depths": losses})
    if not request.quiet:
        for depth, loss in losses.items():
            _say(f"Validation loss at depth {depth}: {loss:.4f}")


def _show(request: TrainRequest, result: dict[str, Any], run: TrainingRun, outcome: Outcome) -> None:
    """Writes the picture and the JSON, but not yet to stdout, and prints how the run ended."""
    directory = run.store.directory
    page = page_of({request.command: json.loads(save_json(request, directory, result))})
    drawn = pictures(page)
    for name, make in drawn.items():
        write_atomic(directory / name, make())
    if not request.quiet:
        console = Console()
        show(page, console, verbose=request.verbose)
        written = ", ".join(f"{directory}/{name}" for name in ("last", "best", "log.jsonl", "train.json", *drawn))
        console.print(f"Written: {written}", soft_wrap=True, markup=False, highlight=False)
    if outcome.ending is not Ending.FINISHED:
        advice = ADVICE[run.store.exists, outcome.ending].format(rate=run.config.learning_rate / 2)
        click.echo(f"ctrans: {outcome.ending.value}: {outcome.message}; {advice} --out {directory}", err=True)
