"""`ctrans train`."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ctrans.base.json_values import plain
from ctrans.base.threads import choose_threads, flops
from ctrans.cli.ending import check_outputs, print_page, result_of, save_json, write_result
from ctrans.cli.exits import Exit
from ctrans.cli.other_depths import check_depths, losses_at
from ctrans.cli.plugins import digest_of_plugins
from ctrans.cli.request import check_exclusive, command_of
from ctrans.cli.say import say, say_if_read
from ctrans.cli.train_monitor import check_monitored, watched_run
from ctrans.cli.train_options import TrainRequest
from ctrans.model.checkpoint import BEST, LAST
from ctrans.model.config import GPTConfig
from ctrans.model.gpt import GPT
from ctrans.model.remarks import remarks_on
from ctrans.report.contents import page_of_table
from ctrans.report.files import write_atomic
from ctrans.report.picture import pictures
from ctrans.report.progress import bar_words, evaluation_line, progress_bar
from ctrans.report.sections import Page, decoded
from ctrans.report.tensorboard import check_tensorboard, tensorboard
from ctrans.training import log
from ctrans.training.loop import Ending, Observer, Outcome, TrainingRun, carry_out
from ctrans.training.monitor.reactions import check_reactions
from ctrans.training.processes import get_device, restarts
from ctrans.training.run_directory import PLACES, RunDirectory
from ctrans.training.start_from import start_from
from ctrans.training.train import Plan, begun, plan, plan_to_resume
from ctrans.training.trained import measured
from ctrans.training.training_state import Progress
from solvers import ConfigError

SIGNALLED = 128
"""A run that signal n interrupts is saved and exits with this plus n, as in shells."""
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
    request = request.as_before(planned.execution)
    planned = _with_options(planned, request)
    _set_threads(request, planned)
    with begun(planned, get_device(request.device)) as (run, progress):
        first = run.processes.first
        step = progress.step
        iterations = run.config.iterations
        if first and not request.quiet:
            for remark in remarks_on(run.model.config):
                say_if_read(f"Note: {remark}.")
        if first and step and not request.quiet:
            if step == iterations:
                say_if_read(
                    f"Nothing to do: {step} of {iterations} iterations are done. Raise --iterations"
                    " to continue."
                )
            else:
                say_if_read(f"Continuing from step {step} of {iterations}.")
        with (
            _observer(request, run, progress) as observe,
            watched_run(request, run, progress) as watched,
        ):
            outcome = carry_out(replace(watched, observe=observe), progress)
            watched.watch.end(outcome)
        if first:
            run.store.check_ours()
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
    if not request.resume or request.monitor is False:
        check_monitored(request)
    check_outputs(request, request.out, other_files=[*PLACES, *log.RECORDS])
    if request.overwrite and request.origin is not None:
        check_origin_stays(request.origin, request.out)


def check_origin_stays(origin: Path, out: Path) -> None:
    """Raises ConfigError if the model that a run starts from is in the run that it overwrites."""
    place = Path(os.path.realpath(origin))
    run = RunDirectory(Path(os.path.realpath(out)))
    if place == run.directory or place.is_relative_to(run.checkpoints):
        raise ConfigError(
            f"--overwrite would remove {str(origin)!r}, the model of --from: choose another --out"
        )


def _plan(request: TrainRequest) -> Plan:
    """The run that the options describe, new or resumed."""
    if request.resume and (RunDirectory(request.out).exists or not restarts()):
        moved_data = None
        if {"file", "bin", "task"} & request.typed:
            moved_data = request.source
        flags = {str(parameter.name): parameter.opts[0] for parameter in command.params}
        return plan_to_resume(
            request.out,
            request.typed_options,
            moved_data,
            parallel=request.parallel,
            flags=flags,
        )
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


def _with_options(planned: Plan, request: TrainRequest) -> Plan:
    """The plan with this command's options that are no settings. Raises ConfigError for those that
    this machine cannot do.
    """
    if request.use_tensorboard:
        check_tensorboard()
    check_depths(request.eval_depth, planned.architecture, planned.config)
    execution = replace(
        planned.execution,
        tensorboard=bool(request.use_tensorboard),
        eval_depth=request.eval_depth,
        plugins=digest_of_plugins(),
    )
    return replace(planned, execution=execution)


def _set_threads(request: TrainRequest, planned: Plan) -> None:
    """Sets the number of threads: --threads, that of the run to resume, or the number that the
    model and its micro-batch need.
    """
    if request.threads is not None:
        torch.set_num_threads(request.threads)
        processors = os.cpu_count() or 1
        if request.threads > processors and "threads" not in request.typed and not request.quiet:
            say_if_read(
                f"Note: the run goes on with {request.threads} threads as before, and this machine"
                f" has {processors} processors. --threads {processors} may be faster, with other"
                " last bits."
            )
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
                say_if_read(evaluation_line(row, iterations))

        yield observe


def _result(
    request: TrainRequest, run: TrainingRun, outcome: Outcome, seconds: float
) -> dict[str, Any]:
    summary = log.summary(log.read(run.store.directory))
    last_evaluation = summary.last_evaluation
    curves = dict(summary.curves)
    progress = outcome.progress
    as_trained = request.as_trained(run.model.config, run.config)
    options = request.shown(**as_trained)
    if request.resume:  # defaults of other options say nothing about this run
        names = request.typed | as_trained.keys()
        options = {name: value for name, value in options.items() if name in names}
    begins = result_of(request, options, run.processes.device)
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
    run.store.check_ours()
    result_with_table, page = _with_table({**result, "other_depths": losses})
    write_result(request, run.store.directory, result_with_table, page)
    if not request.quiet:
        for depth, loss in losses.items():
            say_if_read(f"Validation loss at depth {depth}: {loss:.4f}")


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
    names = (LAST, BEST, log.LOG, log.RESULT, *drawn)
    # a run that diverged before its first iteration has no checkpoint
    written = [f"{directory}/{name}" for name in names if os.path.lexists(directory / name)]
    print_page(request, page, written)
    if outcome.ending is not Ending.FINISHED:
        advice = ADVICE[run.store.exists, outcome.ending].format(rate=run.config.learning_rate / 2)
        say(f"{outcome.ending.value}: {outcome.message}; {advice} --out {directory}", error=True)
