"""Starts a run: from its first iteration, or from its last checkpoint."""

from __future__ import annotations

import logging
import os
import shlex
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from ctrans.base.option import defaults_of
from ctrans.dynamics.fields.tables import takes
from ctrans.dynamics.residual import RESIDUALS
from ctrans.model.checkpoint import BEST, CONFIG, digest, load
from ctrans.model.config import GPTConfig
from ctrans.model.gpt import GPT
from ctrans.model.sums import GENERATIONS, are_of_two_runs
from ctrans.model.weights_file import sha256_of
from ctrans.training import log
from ctrans.training.adjoint_error import check_adjoint
from ctrans.training.compiled import compile_objective
from ctrans.training.data import TRAIN, VALIDATION, Data, share_of
from ctrans.training.execution import UNKNOWN, Execution
from ctrans.training.loop import TrainingRun
from ctrans.training.objective import Objective
from ctrans.training.optimiser import OPTIMISERS
from ctrans.training.parallel import Parallel
from ctrans.training.processes import Processes
from ctrans.training.removal import make_room
from ctrans.training.run_checkpoint import restore
from ctrans.training.run_directory import RunDirectory
from ctrans.training.settings import MAY_CHANGE, OF_EXPERTS, TrainConfig
from ctrans.training.training_state import Progress, State, read_state
from solvers import ConfigError

LOGGER = logging.getLogger("ctrans.training")
MODELS = (CONFIG, "ckpt.pt", ".metadata")
"""Files of models by which commands read a directory: of ctrans or Hugging Face, of nanoGPT, and
of distributed checkpoints.
"""


def anew(
    model: GPT,
    config: TrainConfig,
    data: Data,
    store: RunDirectory,
    parallel: Parallel,
    processes: Processes,
    *,
    source: Mapping[str, Any],
    overwrite: bool = False,
    execution: Execution = UNKNOWN,
) -> tuple[TrainingRun, Progress]:
    """A new run, ready for `carry_out`.

    Raises ConfigError if the directory has a run and `overwrite` is False, if it holds a model that
    is no run's, if the data or something that is no file have the name of a file of the run, or
    if the data are too few for a batch, have tokens outside of the vocabulary, or
    cannot be shared evenly. Then it removes nothing.
    """
    check_source_stays(store, source)
    check_files(store)
    if overwrite:
        check_no_model(store)
        store = store.beside()
    else:
        check_free(store)
    check_data(model, config, data, processes)
    fingerprint = data.fingerprint()
    run_name = digest(
        {
            **asdict(model.config),
            **asdict(config),
            "fingerprint": fingerprint,
            "weights": sha256_of(model.state_dict()),
        }
    )
    state = State(Progress(), config, dict(source), fingerprint, execution, run_name)
    run = assemble(model, state, data, store, parallel, processes)
    if processes.first:
        with store.changing():
            store.directory.mkdir(parents=True, exist_ok=True)
            if overwrite:
                store.take_place()
                log.set_aside(store.directory, store.other_generation, store.checkpoints.name)
            store.forget_base()  # of a run that was killed before its first checkpoint
            log.forget_unsaved(store.directory)
    return run, state.progress


def check_free(store: RunDirectory) -> None:
    """Raises ConfigError if a run would replace another run, or other files of the same names, or
    if commands that get the directory would read a model there.
    """
    if store.exists:
        raise ConfigError(
            f"{str(store.directory)!r} has a run already: continue it with --resume, remove it with"
            " --overwrite, or choose another --out"
        )
    check_no_model(store)
    log_path = store.directory / log.LOG
    paths = [store.directory / BEST]
    if log_path.is_file() and log.unsaved(store.directory):
        # of a run that ended before its first checkpoint
        paths += log.others(store.directory)
    elif log_path.is_file() and log_path.stat().st_size == 0:
        paths.append(store.directory / log.MONITOR)
    else:
        paths += [store.directory / name for name in log.RECORDS]
    for path in paths:
        if os.path.lexists(path):
            raise ConfigError(
                f"a run would replace {str(path)!r}: move it away, or choose another --out"
            )


def check_source_stays(store: RunDirectory, source: Mapping[str, Any]) -> None:
    """Raises ConfigError for data in a file that a run in the directory writes or removes."""
    paths = [Path(source[name]) for name in ("file", "bin") if source.get(name) is not None]
    paths += [path / name for path in paths for name in (TRAIN, VALIDATION)]
    home = Path(os.path.realpath(store.directory))
    written = {home / name for name in (*log.RECORDS, *log.RESULTS, *GENERATIONS)}
    for path in paths:
        place = Path(os.path.realpath(path))
        if written & {place, *place.parents}:
            raise ConfigError(
                f"a run in {str(store.directory)!r} would remove its data, {str(path)!r}: choose"
                " another --out"
            )


def check_files(store: RunDirectory) -> None:
    """Raises ConfigError for a directory, or what else is no file, in the place of a file of the
    run.
    """
    for name in (*log.RECORDS, *log.RESULTS):
        path = store.directory / name
        if path.exists() and not path.is_file():
            raise ConfigError(
                f"{str(path)!r} has the name of a file of the run, and is no file: move it away"
            )


def check_no_model(store: RunDirectory) -> None:
    """Raises ConfigError if the directory holds a model that is no run's, which commands would read
    in place of the run.
    """
    for name in MODELS:
        if os.path.lexists(store.directory / name):
            raise ConfigError(
                f"{str(store.directory)!r} holds a model, {name}, which commands would read in"
                " place of the run: choose another --out"
            )


def check_warm_up(architecture: GPTConfig, config: TrainConfig) -> None:
    """Raises ConfigError for a temperature warm-up of attention without a temperature."""
    if config.temperature_start is not None and not takes(
        "attention", architecture.attention, "temperature"
    ):
        raise ConfigError(
            f"temperature_start = {config.temperature_start}: attention {architecture.attention!r}"
            " has no temperature, leave it out"
        )


def check_experts(architecture: GPTConfig, config: TrainConfig) -> None:
    """Raises ConfigError for settings of a mixture of experts without one."""
    defaults = defaults_of(TrainConfig)
    if not takes("ffn", architecture.ffn, "experts"):
        for name in OF_EXPERTS:
            if getattr(config, name) != defaults[name]:
                raise ConfigError(
                    f"{name} = {getattr(config, name):g} has no meaning for ffn"
                    f" {architecture.ffn!r}: leave it out, or choose ffn moe"
                )


def check_low_rank(model: GPT | GPTConfig, config: TrainConfig) -> None:
    """Raises ConfigError for low-rank updates of an untrained model, or of normalised weights."""
    if config.low_rank == 0:
        return
    if not isinstance(model, GPT):
        raise ConfigError(
            f"low_rank = {config.low_rank} updates a trained model: give one (--from RUN), or leave"
            " it out to train all weights"
        )
    if RESIDUALS[model.config.residual].unit_weights:
        raise ConfigError(
            f"low_rank = {config.low_rank}: residual {model.config.residual!r} keeps weights on"
            " spheres, which updates would leave; leave it out"
        )


def check_data(model: GPT, config: TrainConfig, data: Data, processes: Processes) -> None:
    """Raises ConfigError if the data are too few for an iteration, have tokens outside of the
    vocabulary, or cannot be shared evenly.
    """
    share_of(config.batch, processes.world)
    data.check_batch(config.batch * config.accumulate)
    if processes.first:
        data.check_vocabulary(model.config.vocab_size)


def resumed(
    state: State,
    data: Data,
    store: RunDirectory,
    parallel: Parallel,
    processes: Processes,
    *,
    execution: Execution = UNKNOWN,
) -> tuple[TrainingRun, Progress]:
    """The run at the checkpoint of `state` (see `RunDirectory.verified_last`), ready for
    `carry_out`.

    It logs the settings that differ from the saved ones, and warns of an execution with other bits.
    Raises ConfigError for other data, for
    fewer iterations than the run has made, or for a batch that the processes cannot share evenly.
    """
    progress = state.progress
    directory = store.step_directory(progress.step)
    check_files(store)
    _check_is_last(store, directory, progress.step)
    if not data.matches(state.fingerprint):
        raise ConfigError(
            f"the data differ from those of the run in {str(store.directory)!r}: give the same data"
        )
    if state.config.iterations < progress.step:
        raise ConfigError(
            f"iterations = {state.config.iterations}, and the run has made {progress.step}: give"
            " more, or start again with --overwrite"
        )
    if processes.first:
        # before anything is removed, as checkpoints of the run after one of others
        log.check_of_run(store.directory, store.checkpoints.name, state)
    model = load(directory, merge=False)
    check_data(model, state.config, data, processes)
    others_best = _best_of_another(store, progress, directory)
    if processes.first and others_best is not None:
        LOGGER.warning(
            "%r is a checkpoint of another run, and not the best one of this run: it gets another"
            " name, and the run goes on without a best checkpoint",
            str(others_best),
        )
        with store.changing():
            make_room(others_best)
    processes.wait()
    if progress.best_step not in store.steps():  # the best checkpoint was damaged
        progress = replace(progress, best=None, best_step=None)
    saved_state = read_state(directory)
    saved = asdict(saved_state.config)
    changes = {name: value for name, value in asdict(state.config).items() if value != saved[name]}
    lineage = state.lineage
    if changes:
        lineage = digest({"before": lineage, "step": progress.step, "settings": changes})
    state = replace(state, execution=execution, lineage=lineage)
    run = assemble(model, state, data, store, parallel, processes)
    restore(directory, run.model, run.optimiser)
    if processes.first:
        execution.warn_if_other_than(saved_state.execution)
        with store.changing():
            # a monitor keeps the other log, if the run has one
            others = log.others(store.directory)
            log.keep_others(path for path in others if path.name == log.LOG)
            store.settle(progress.step, best=progress.best_step, good=progress.good)
            log.bring_back(store.directory, store.checkpoints.name)
        log.cut(store.directory, progress.step)
        if changes:
            row = {"step": progress.step, "settings": changes, log.LINEAGE: lineage}
            log.append(store.directory, row)
    processes.wait()
    return run, progress


def _check_is_last(store: RunDirectory, directory: Path, step: int) -> None:
    """Raises ConfigError if `last` does not lead to the directory of this step's checkpoint."""
    place = store.last.resolve()
    if place == directory.resolve():
        return
    if read_state(place).progress.step == step:
        link = shlex.quote(str(store.last))
        commands = f"ln -sfn {directory.relative_to(store.directory)} {link}"
        if not os.path.lexists(directory):
            commands = f"mv {shlex.quote(str(place))} {shlex.quote(str(directory))} && {commands}"
        raise ConfigError(
            f"{str(place)!r} has the checkpoint of step {step}, and its name says another step; to"
            f" go on from step {step}: {commands}"
        )
    raise ConfigError(
        f"the run in {str(store.directory)!r} has continued since it was read: try again"
    )


def _best_of_another(store: RunDirectory, progress: Progress, last: Path) -> Path | None:
    """The checkpoint in the place of the best one if it is of another run; else None."""
    best = progress.best_step
    if best is None or best == progress.step or best not in store.steps():
        return None
    place = store.step_directory(best)
    if are_of_two_runs(place, last):
        return place
    return None


def assemble(
    model: GPT,
    state: State,
    data: Data,
    store: RunDirectory,
    parallel: Parallel,
    processes: Processes,
) -> TrainingRun:
    """Makes a run of its parts: moves the model to its device, compiles and wraps its objective,
    and makes an optimiser. Raises ConfigError for an adjoint whose gradients are far off.
    """
    config = state.config
    if parallel.sharded:
        check_shardable(model, config)
    model = model.to(device=processes.device, dtype=config.weight_dtype)
    objective = Objective(model, config)
    check_adjoint(objective, data, processes.device)
    if config.compile:
        compile_objective(objective)
    module = parallel.wrap(objective, processes.device)
    optimiser = config.make_optimiser(model.parameters(), model=model)
    return TrainingRun(model, module, optimiser, data, config, store, state, parallel, processes)


def check_shardable(model: GPT, config: TrainConfig) -> None:
    """Raises ConfigError if the optimiser or the residual normalises whole matrices."""
    if OPTIMISERS[config.optimiser].orthogonal:
        part = f"optimiser {config.optimiser!r}"
    elif RESIDUALS[model.config.residual].unit_weights:
        part = f"residual {model.config.residual!r}"
    else:
        return
    raise ConfigError(
        f"{part} normalises whole matrices, and no process has them: choose --parallel ddp"
    )


def check_continues(
    saved: Mapping[str, Any], settings: Mapping[str, Any], flags: Mapping[str, str]
) -> None:
    """Raises ConfigError for a setting that contradicts the saved one. `flags` are the options of
    the settings.
    """
    for name, value in settings.items():
        if name not in MAY_CHANGE and saved[name] != value:
            raise ConfigError(
                f"{flags.get(name, name)} {value} contradicts the run to resume, which has"
                f" {saved[name]}: leave the option out, or start another run with another --out"
            )


def with_settings(state: State, settings: Mapping[str, Any]) -> State:
    """The state with these settings, of those in `MAY_CHANGE`."""
    changed = {name: value for name, value in settings.items() if name in MAY_CHANGE}
    return replace(state, config=replace(state.config, **changed))
