"""`ctrans train`."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ctrans.base.json_values import plain
from ctrans.base.threads import choose_threads, flops
from ctrans.cli.ending import check_json, print_page, result_of, save_json, write_result
from ctrans.cli.exits import Exit
from ctrans.cli.other_depths import check_depths, losses_at
from ctrans.cli.request import check_exclusive, command_of
from ctrans.cli.say import discard_stdout, say
from ctrans.cli.train_options import TrainRequest
from ctrans.measure.findings import Finding
from ctrans.model.config import GPTConfig
from ctrans.model.gpt import GPT
from ctrans.model.remarks import remarks_on
from ctrans.report.contents import page_of_table
from ctrans.report.files import to_json, write_atomic
from ctrans.report.picture import pictures
from ctrans.report.progress import bar_words, evaluation_line, progress_bar
from ctrans.report.sections import Page, decoded
from ctrans.report.tensorboard import check_tensorboard, tensorboard
from ctrans.training import log
from ctrans.training.loop import Advice, Ending, Observer, Outcome, TrainingRun, Watcher, carry_out
from ctrans.training.monitor import Monitor
from ctrans.training.monitor.memory import MEMORY, memory_in
from ctrans.training.monitor.reactions import check_reactions
from ctrans.training.processes import get_device, restarts
from ctrans.training.run_directory import KEEP, RunDirectory
from ctrans.training.start_from import start_from
from ctrans.training.train import Plan, begun, plan, plan_to_resume
from ctrans.training.trained import measured
from ctrans.training.training_state import Progress
from solvers import ConfigError

SIGNALLED = 128
"""A run that signal n interrupts is saved and exits with this plus n, as in shells."""
HELD = 2
"""Windows of the validation text in the monitor's fixed batch."""
ADVICE = {
    (True, Ending.INTERRUPTED): "continue it with --resume",
    (True, Ending.STOPPED): (
        "continue it with --resume, and a lower --learning-rate, as {rate:g}, if that can help,"
    ),
    (True, Ending.DIVERGED): (
        "continue it from its last good checkpoint with --resume and a lower --learning-rate, as"
        " {rate:g},"
    ),
    (False, Ending.DIVERGED): "nothing was saved: start again with other settings,",
}
"""What to do, by whether the run has a checkpoint and how it ended. The message ends with --out."""


@command_of(TrainRequest, "train")
def command(request: TrainRequest) -> None:
    """Train a GPT of any placement, through its ODE or as the discrete Transformer.

    The directory gets log.jsonl, train.json, loss.png and checkpoints with the links last and best.
    Other commands take it as --checkpoint. Ctrl-C, SIGTERM or SIGHUP saves the run and exits with
    130, 143 or 129. A run that diverges exits with 1, and last is then its last good checkpoint.

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
        step = progress.step
        iterations = run.config.iterations
        if first and not request.quiet:
            for remark in remarks_on(run.model.config):
                _say(f"Note: {remark}.")
        if first and step and not request.quiet:
            if step == iterations:
                _say(
                    f"Nothing to do: {step} of {iterations} iterations are done. Raise --iterations"
                    " to continue."
                )
            else:
                _say(f"Continuing from step {step} of {iterations}.")
        with (
            _observer(request, run, progress) as observe,
            _watched(request, run, progress) as watched,
        ):
            outcome = carry_out(replace(watched, observe=observe), progress)
        if first:
            result = _result(request, run, outcome, time.perf_counter() - started)
            _show(request, result, run, outcome)
    if first:  # after the run, so that the other processes do not wait
        _add_depths(request, result, run, finished=outcome.ending is Ending.FINISHED)
    if outcome.ending is Ending.INTERRUPTED:
        raise Exit(SIGNALLED + outcome.signal)
    if outcome.ending in (Ending.DIVERGED, Ending.STOPPED):
        raise Exit(1)


def _check_places(request: TrainRequest) -> None:
    """Raises ConfigError for options that exclude each other, before ctrans reads or writes
    files.
    """
    check_exclusive(request, ("resume", "overwrite"), ("file", "bin"), ("origin", "resume"))
    if request.use_tensorboard:
        check_tensorboard()
    check_reactions(request.react)
    monitor_options = []
    if request.probe_every is not None:
        monitor_options.append("probe-every")
    if request.react:
        monitor_options.append("react")
    if monitor_options and not request.monitor:
        raise ConfigError(
            f"--{monitor_options[0]} is an option of the monitor: add --monitor, or leave it out"
        )
    check_json(request, request.out)


def _plan(request: TrainRequest) -> Plan:
    """The run that the options describe, new or resumed."""
    if request.resume and (RunDirectory(request.out).exists or not restarts()):
        moved_data = None
        if {"file", "bin", "task"} & request.typed:
            moved_data = request.source
        flags = {str(parameter.name): parameter.opts[0] for parameter in command.params}
        planned = plan_to_resume(
            request.out,
            request.typed_options,
            moved_data,
            parallel=request.parallel,
            flags=flags,
        )
        check_depths(request.eval_depth, planned.architecture, planned.config)
        return planned
    config = request.settings
    model: GPTConfig | GPT
    if request.origin is None:
        model = request.model
    else:
        changes = {
            name: value for name, value in request.typed_options.items() if name in request.config
        }
        model = start_from(request.origin, changes)
    architecture = model.config if isinstance(model, GPT) else model
    check_depths(request.eval_depth, architecture, config)
    return plan(
        model,
        config,
        request.source,
        out=request.out,
        overwrite=request.overwrite,
        parallel=request.parallel,
    )


def _set_threads(request: TrainRequest, planned: Plan) -> None:
    """Sets the number of threads: --threads, or the number that the model and its micro-batch need.
    A resumed run gets the same number.
    """
    if request.threads is not None:
        torch.set_num_threads(request.threads)
    elif get_device(request.device).type == "cpu":
        model = planned.architecture
        config = planned.config
        choose_threads(
            flops(model.width, config.batch, model.context), config.weight_dtype.itemsize
        )


@contextmanager
def _observer(request: TrainRequest, run: TrainingRun, progress: Progress) -> Iterator[Observer]:
    """Gives the function that shows a row of the log: the progress bar, a line for each evaluation,
    TensorBoard.
    """
    with ExitStack() as stack:
        iterations = run.config.iterations
        advance = stack.enter_context(progress_bar("train", iterations, progress.step))
        write = None
        if request.use_tensorboard and run.processes.first:
            write = stack.enter_context(tensorboard(run.store.directory, progress.step))

        def observe(row: log.Row) -> None:
            if write is not None:
                write(row)
            if "tokens_per_second" in row:
                advance(bar_words(row))
            if "validation_loss" in row and not request.quiet:
                _say(evaluation_line(row, iterations))

        yield observe


@contextmanager
def _watched(request: TrainRequest, run: TrainingRun, progress: Progress) -> Iterator[TrainingRun]:
    """Gives the run, with a monitor if the user asked for one."""
    if not request.monitor:
        yield run
        return
    watching = MonitoredRun(request, run, progress.step)
    with watching.monitor:
        yield replace(run, watch=watching)


class MonitoredRun(Watcher):
    """A run's watcher with a monitor. Alarms are printed at once, and the monitor's memory is
    saved with every checkpoint.
    """

    def __init__(self, request: TrainRequest, run: TrainingRun, step: int):
        self.run = run
        self.quiet = request.quiet
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
                _say(str(alarm))
        reason_to_stop = ""
        if monitor.stopped > stopped:
            dangers = [alarm.check for alarm in alarms if alarm.severity != "note"]
            reason_to_stop = dangers[0] if dangers else "another process saw a danger"
        return Advice(len(monitor.reactions.skipped) > skipped, self._before, reason_to_stop)

    def files(self) -> Mapping[str, str]:
        """The monitor's memory."""
        return {MEMORY: json.dumps(self.monitor.memory(), allow_nan=False)}

    def _save(self, alarm: Finding) -> None:
        if self._before is None:
            self._before = {**self.files(), KEEP: to_json(alarm)}


def _say(line: str) -> None:
    """Prints a line. The run continues if stdout is closed, as by `head` or a closed terminal."""
    if not sys.stdout.writable():
        return
    try:
        say(line)
    except OSError:
        discard_stdout()


def _result(
    request: TrainRequest, run: TrainingRun, outcome: Outcome, seconds: float
) -> dict[str, Any]:
    rows = list(log.read(run.store.directory))
    evaluations = [row for row in rows if "validation_loss" in row]
    progress = outcome.progress
    curves = log.curves(rows)
    options = request.shown()
    if request.resume:  # the checkpoint has the other settings: see "model" and "training"
        options = {name: value for name, value in options.items() if name in request.typed}
    begins = result_of(request, options, run.processes.device)
    last_evaluation: Mapping[str, Any] = evaluations[-1] if evaluations else {}
    return {
        **begins,
        "environment": {**begins["environment"], "processes": run.processes.world},
        "ending": outcome.ending.value,
        "message": outcome.message,
        "step": progress.step,
        "model": run.model.config,
        "training": run.config,
        "parameters": sum(parameter.numel() for parameter in run.model.parameters()),
        "trained_parameters": sum(
            parameter.numel() for parameter in run.model.parameters() if parameter.requires_grad
        ),
        "first_validation_loss": progress.first,
        "validation_loss": last_evaluation.get("validation_loss"),
        "best_validation_loss": progress.best,
        "best_step": progress.best_step,
        "accuracy": last_evaluation.get("accuracy"),
        "losses": {name: curves.pop(name) for name in ("training", "validation")},
        "curves": curves,
        "other_depths": {},
        **run.data.floors(),
        "seconds": seconds,
    }


def _add_depths(
    request: TrainRequest, result: dict[str, Any], run: TrainingRun, *, finished: bool
) -> None:
    """Evaluates a finished run at other depths, and writes the result with these losses."""
    depths = request.eval_depth if finished else ()
    losses = losses_at(depths, run)
    result_with_table, page = _with_table({**result, "other_depths": losses})
    write_result(request, run.store.directory, result_with_table, page)
    if not request.quiet:
        for depth, loss in losses.items():
            _say(f"Validation loss at depth {depth}: {loss:.4f}")


def _with_table(result: Mapping[str, Any]) -> tuple[dict[str, Any], Page]:
    """The result with its table of measured values, in JSON's types, and its page."""
    plain_result: dict[str, Any] = plain(result)
    table = measured({"": decoded(plain_result)})
    with_table = plain({**plain_result, "measured": table.as_json()})
    return with_table, page_of_table(with_table, table)


def _show(
    request: TrainRequest, result: dict[str, Any], run: TrainingRun, outcome: Outcome
) -> None:
    """Writes the figures and the JSON, but not to stdout, and prints how the run ended."""
    directory = run.store.directory
    result_with_table, page = _with_table(result)
    save_json(request, directory, result_with_table)
    drawn = pictures(page)
    for name, make in drawn.items():
        write_atomic(directory / name, make())
    names = ("last", "best", "log.jsonl", "train.json", *drawn)
    print_page(request, page, [f"{directory}/{name}" for name in names])
    if outcome.ending is not Ending.FINISHED:
        advice = ADVICE[run.store.exists, outcome.ending].format(rate=run.config.learning_rate / 2)
        say(f"{outcome.ending.value}: {outcome.message}; {advice} --out {directory}", error=True)
