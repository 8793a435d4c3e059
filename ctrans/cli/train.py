"""`ctrans train`."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import click
import torch
from click.core import ParameterSource
from rich.console import Console

from ctrans.cli import options
from ctrans.cli.other_depths import check_depths, losses_at
from ctrans.cli.train_options import (
    ARCHITECTURE,
    DEFAULTS,
    GPT2_VOCABULARY,
    SETTINGS,
    data_options,
    model_options,
    run_options,
    setting_options,
)
from ctrans.depth import check_count
from ctrans.model.checkpoint import load_config
from ctrans.model.config import GPTConfig
from ctrans.model.gpt import GPT, check_buildable
from ctrans.model.text import VOCABULARY, read_text
from ctrans.report.files import check_writable, png, write_atomic
from ctrans.report.progress import progress_bar
from ctrans.report.tensorboard import check_tensorboard, tensorboard
from ctrans.report.train_report import bar_words, evaluation_line, loss_figure
from ctrans.threads import choose_threads, flops
from ctrans.training import log
from ctrans.training.data import Data, from_bin, from_text
from ctrans.training.loop import Ending, Observer, Outcome, TrainingRun, train
from ctrans.training.parallel import get_parallel
from ctrans.training.processes import Processes, processes, restarts
from ctrans.training.run_directory import RunDirectory
from ctrans.training.run_start import anew, check_continues, resumed, with_settings
from ctrans.training.settings import TrainConfig
from ctrans.training.training_state import Progress, read_state
from solvers import ConfigError

Begin = Callable[[Processes], tuple[TrainingRun, Progress]]
SIGNALLED = 128
"""Exit code of a run that signal n stopped: this plus n, as shells have it. The run is saved, and not finished."""
ADVICE = {
    (True, Ending.INTERRUPTED.value): "go on with --resume",
    (True, Ending.DIVERGED.value): "go on from its last good checkpoint with --resume and a lower --learning-rate, as {rate:g},",
    (False, Ending.DIVERGED.value): "nothing was saved: start again with other settings,",
}
"""What to do about a run that has or has not a checkpoint and ended like that; --out follows."""


@click.command("train", context_settings={"default_map": DEFAULTS})
@model_options
@data_options
@setting_options()
@run_options
@options.json_option
def command(json_path: str | None, **settings: Any) -> None:
    """Train a GPT of any placement, through its ODE or as the discrete Transformer.

    The directory gets checkpoints (links last and best; other commands take the directory as --checkpoint), log.jsonl,
    train.json and loss.png. Ctrl-C, SIGTERM or SIGHUP saves and exits with 130, 143 or 129; a run that diverges exits with 1, and last
    is then its last good checkpoint.

    \b
    ctrans train
    ctrans train --placement pre --dt 0.1 --file book.txt --iterations 5000 --out out/book
    ctrans train --resume --out out/book
    ctrans train --method rk4 --gradient checkpoint --kinetic 0.01
    torchrun --nproc-per-node 2 -m ctrans train --parallel ddp --batch 32
    """
    _check_places(settings, json_path)
    started = time.perf_counter()
    begin = _plan(settings)
    with contextlib.ExitStack() as stack:
        here = stack.enter_context(processes(settings["parallel"], options.get_device(settings["device"])))
        if here.first:
            stack.enter_context(RunDirectory(settings["out"]).locked())
        run, progress = begin(here)
        if here.first and progress.step and json_path != "-":
            _say(_going_on(progress.step, run.config.iterations))
        with _observer(settings, run, progress, quiet=json_path == "-") as observe:
            outcome = train(dataclasses.replace(run, observe=observe), progress)
        if here.first:
            result = _result(settings, run, outcome, time.perf_counter() - started)
            _show(result, run, json_path)
    if here.first:  # outside: the other processes need not wait
        _add_depths(result, settings["eval_depth"] if outcome.ending is Ending.FINISHED else (), run, json_path)
    if outcome.ending is Ending.INTERRUPTED:
        raise SystemExit(SIGNALLED + outcome.signal)
    if outcome.ending is Ending.DIVERGED:
        raise SystemExit(1)


def _check_places(settings: dict[str, Any], json_path: str | None) -> None:
    """ConfigError for options that exclude each other or cannot be, before anything is read or made."""
    for first, second in (("resume", "overwrite"), ("file", "bin")):
        if settings[first] and settings[second]:
            raise ConfigError(f"--{first} and --{second} exclude each other: choose one")
    if settings["threads"] is not None:
        check_count("threads", settings["threads"])
    if settings["use_tensorboard"]:
        check_tensorboard()
    if json_path not in (None, "-"):
        check_writable(Path(json_path).parent)


def _plan(settings: dict[str, Any]) -> Begin:
    """What begins the run that the options ask for, new or taken up again, when this process knows its place among the others."""
    store = RunDirectory(settings["out"])
    if settings["resume"] and (store.exists or not restarts()):
        return _plan_to_resume(settings, store)
    model, config = _architecture(settings), TrainConfig(seed=settings["seed"], **{name: settings[name] for name in SETTINGS})
    parallel = get_parallel(settings["parallel"], config)
    check_buildable(model, config.seed)
    check_depths(settings["eval_depth"], model, config)
    _set_threads(settings, model, config)
    source = _source(settings)
    data = _data(source, model.context)
    check_writable(store.directory)
    weights = GPT(model, seed=config.seed)
    return partial(anew, weights, config, data, store, parallel, source=source, overwrite=settings["overwrite"])


def _plan_to_resume(settings: dict[str, Any], store: RunDirectory) -> Begin:
    directory = store.verified_last()
    state, saved = read_state(directory), load_config(directory)
    context = click.get_current_context()
    flags = {str(parameter.name): parameter.opts[0] for parameter in context.command.params}
    given = _given(settings)
    known = {**dataclasses.asdict(saved), **dataclasses.asdict(state.config)}
    check_continues(known, {name: value for name, value in given.items() if name in known}, flags)
    state = with_settings(state, given)
    check_depths(settings["eval_depth"], saved, state.config)
    _set_threads(settings, saved, state.config)
    if state.source.keys() & given.keys():  # the data may have moved: their fingerprint tells whether they are the same
        state = dataclasses.replace(state, source=_source(settings))
    parallel = get_parallel(settings["parallel"], state.config)
    return partial(resumed, state, _data(state.source, saved.context), store, parallel)


def _set_threads(settings: dict[str, Any], model: GPTConfig, config: TrainConfig) -> None:
    """As many threads as --threads says, or as the model and its micro-batch are worth: the same when the run is taken up again."""
    if settings["threads"] is not None:
        torch.set_num_threads(settings["threads"])
    elif torch.device(settings["device"]).type == "cpu":
        choose_threads(flops(model.width, config.batch, model.context), config.weight_dtype.itemsize)


def _given(settings: dict[str, Any]) -> dict[str, Any]:
    """The options that were typed."""
    source = click.get_current_context().get_parameter_source
    return {name: value for name, value in settings.items() if source(name) is ParameterSource.COMMANDLINE}


def _going_on(step: int, iterations: int) -> str:
    if step == iterations:
        return f"Nothing to do: {step} of {iterations} iterations are done; give more by --iterations."
    return f"Going on from step {step} of {iterations}."


def _architecture(settings: dict[str, Any]) -> GPTConfig:
    default = GPT2_VOCABULARY if settings["bin"] else VOCABULARY
    vocabulary = default if settings["vocab_size"] is None else settings["vocab_size"]
    return GPTConfig(vocabulary, **{name: settings[name] for name in ARCHITECTURE})


def _source(settings: dict[str, Any]) -> dict[str, Any]:
    """Where the data come from, so that a resumed run finds them from any directory."""
    return {name: None if settings[name] is None else str(settings[name].absolute()) for name in ("file", "bin")}


def _data(source: dict[str, Any], context: int) -> Data:
    if source["bin"] is not None:
        return from_bin(source["bin"], context)
    return from_text(read_text(source["file"]), context, "the text" if source["file"] is None else repr(source["file"]))


@contextlib.contextmanager
def _observer(settings: dict[str, Any], run: TrainingRun, progress: Progress, *, quiet: bool) -> Iterator[Observer]:
    """What each row of the log is shown by: the bar, a line per evaluation, TensorBoard."""
    with contextlib.ExitStack() as stack:
        iterations = run.config.iterations
        advance = stack.enter_context(progress_bar("train", iterations, progress.step))
        wanted = settings["use_tensorboard"] and run.processes.first
        write = stack.enter_context(tensorboard(run.store.directory, progress.step)) if wanted else None

        def observe(row: log.Row) -> None:
            if write is not None:
                write(row)
            if "tokens_per_second" in row:
                advance(bar_words(row))
            if "validation_loss" in row and not quiet:
                _say(evaluation_line(row, iterations))

        yield observe


def _say(words: str) -> None:
    """Prints the words, until nobody reads them any more, as behind head or when a terminal is closed: the run goes on."""
    try:
        click.echo(words)
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _result(settings: dict[str, Any], run: TrainingRun, outcome: Outcome, seconds: float) -> dict[str, Any]:
    rows = list(log.read(run.store.directory))
    evaluations = [row for row in rows if "validation_loss" in row]
    progress = outcome.progress
    return {
        "command": "train",
        # a resumed run has its settings from its checkpoint, under "model" and "training", but for what was typed anew
        "options": options.printable(_given(settings) if settings["resume"] else settings),
        "environment": {**options.environment(run.processes.device), "processes": run.processes.world},
        "ending": outcome.ending.value,
        "message": outcome.message,
        "step": progress.step,
        "model": run.model.config,
        "training": run.config,
        "parameters": sum(parameter.numel() for parameter in run.model.parameters()),
        "first_validation_loss": progress.first,
        "validation_loss": evaluations[-1]["validation_loss"] if evaluations else None,
        "best_validation_loss": progress.best,
        "best_step": progress.best_step,
        "other_depths": {},
        "seconds": seconds,
    }


def _add_depths(result: dict[str, Any], depths: Sequence[int], run: TrainingRun, json_path: str | None) -> None:
    """Evaluates at those depths, and writes and prints what a result is then."""
    result["other_depths"] = losses_at(depths, run)
    options.write_json(result, json_path, run.store.directory, "train")
    if json_path != "-":
        for depth, loss in result["other_depths"].items():
            _say(f"Validation loss at depth {depth}: {loss:.4f}")


def _show(result: dict[str, Any], run: TrainingRun, json_path: str | None) -> None:
    """Writes the picture and the JSON, but not yet to stdout, and prints how the run ended."""
    directory = run.store.directory
    model, progress = run.model.config, result["best_step"]
    title = (
        f"{model.placement}, {model.depth} blocks, width {model.width}, dt = {model.dt:g}, {result['parameters']:,} parameters"
    )
    write_atomic(directory / "loss.png", png(loss_figure(list(log.read(directory)), title)))
    options.write_json(result, None if json_path == "-" else json_path, directory, "train")
    if json_path != "-":
        console = Console()
        if progress is not None:
            console.print(f"Best validation loss {result['best_validation_loss']:.4f} at step {progress}.", soft_wrap=True)
        written = ", ".join(f"{directory}/{name}" for name in ("last", "best", "log.jsonl", "train.json", "loss.png"))
        console.print(f"{title}. Written: {written}", soft_wrap=True)
    if result["ending"] != Ending.FINISHED.value:
        advice = ADVICE[run.store.exists, result["ending"]].format(rate=run.config.learning_rate / 2)
        click.echo(f"ctrans: {result['ending']}: {result['message']}; {advice} --out {directory}", err=True)
