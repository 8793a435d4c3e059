"""How a run begins: anew, or from its last checkpoint."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from typing import Any

from ctrans.fields.tables import takes
from ctrans.model.checkpoint import BEST, load
from ctrans.model.config import GPTConfig
from ctrans.model.gpt import GPT
from ctrans.residual import RESIDUALS
from ctrans.training import log
from ctrans.training.data import Data, share_of
from ctrans.training.loop import TrainingRun
from ctrans.training.objective import Objective
from ctrans.training.parallel import Parallel
from ctrans.training.processes import Processes
from ctrans.training.run_checkpoint import restore
from ctrans.training.run_directory import RunDirectory
from ctrans.training.settings import MAY_CHANGE, OF_EXPERTS, TrainConfig
from ctrans.training.training_state import Progress, State, read_state
from solvers import ConfigError


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
) -> tuple[TrainingRun, Progress]:
    """A run from its first iteration on, ready for `carry_out`.

    Raises ConfigError where the directory has a run already and `overwrite` does not allow to
    remove it, and where the data do not suffice for a batch, have tokens that the model does not
    know, or cannot be shared evenly. Nothing is removed then.
    """
    if not overwrite:
        check_free(store)
    store = store.beside() if overwrite else store
    check_data(model, config, data, processes)
    state = State(Progress(), config, dict(source), data.fingerprint())
    run = assemble(model, state, data, store, parallel, processes)
    if processes.first:
        with store.changing():
            store.directory.mkdir(parents=True, exist_ok=True)
            store.forget_base()  # of a run that was killed before it had a checkpoint
            if overwrite:
                store.prune(-1, set())  # of one that was to overwrite this run, and was killed
                log.set_aside(store.directory, RunDirectory(store.directory).checkpoints.name)
            (store.directory / log.LOG).unlink(missing_ok=True)
    return run, state.progress


def check_free(store: RunDirectory) -> None:
    """Raises ConfigError where a run would replace something: another run, or files that have its
    files' names.
    """
    if store.exists:
        raise ConfigError(
            f"{str(store.directory)!r} has a run already: go on with it by --resume, remove it by --overwrite, or choose another --out"
        )
    for path in (store.directory / BEST, store.directory / log.LOG):
        if os.path.lexists(path) and not (path.name == log.LOG and path.is_file() and log.unsaved(path.parent)):
            raise ConfigError(f"a run would replace {str(path)!r}: move it away, or choose another --out")


def check_warm_up(architecture: GPTConfig, config: TrainConfig) -> None:
    """Raises ConfigError for a temperature warm-up of attention that has no temperature."""
    if config.temperature_start is not None and not takes("attention", architecture.attention, "temperature"):
        raise ConfigError(
            f"temperature_start = {config.temperature_start}: attention {architecture.attention!r} has no temperature, leave it out"
        )


def check_experts(architecture: GPTConfig, config: TrainConfig) -> None:
    """Raises ConfigError for settings of a mixture of experts where there is none."""
    defaults = {field.name: field.default for field in dataclasses.fields(TrainConfig)}
    if not takes("ffn", architecture.ffn, "experts"):
        for name in OF_EXPERTS:
            if getattr(config, name) != defaults[name]:
                raise ConfigError(
                    f"{name} = {getattr(config, name):g} has no meaning for ffn {architecture.ffn!r}: leave it out, or choose ffn moe"
                )


def check_low_rank(model: GPT | GPTConfig, config: TrainConfig) -> None:
    """Raises ConfigError for updates of low rank of what is no trained model, or of weights that
    are no free matrices.
    """
    if config.low_rank == 0:
        return
    begins = f"low_rank = {config.low_rank}"
    if not isinstance(model, GPT):
        raise ConfigError(f"{begins} updates a trained model: give one (--from RUN), or leave it out to train all weights")
    if RESIDUALS[model.config.residual].unit_weights:
        raise ConfigError(
            f"{begins}: weights of residual {model.config.residual!r} are kept on spheres, which updates leave; leave it out"
        )


def check_data(model: GPT, config: TrainConfig, data: Data, processes: Processes) -> None:
    """Raises ConfigError where the data do not suffice for an iteration, do not suit the model, or
    cannot be shared evenly.
    """
    share_of(config.batch, processes.world)
    data.check_batch(config.batch * config.accumulate)
    if processes.first:
        data.check_vocabulary(model.config.vocab_size)


def resumed(
    state: State, data: Data, store: RunDirectory, parallel: Parallel, processes: Processes
) -> tuple[TrainingRun, Progress]:
    """The run as it was at the checkpoint that `state` was read from (see
    `RunDirectory.verified_last`), ready for `carry_out`.

    The settings that differ from the saved ones become a row of the log. Raises ConfigError for
    other data than it was started with, fewer iterations than are done, or a batch that the
    processes cannot share evenly.
    """
    progress, directory = state.progress, store.step_directory(state.progress.step)
    if store.last.resolve() != directory.resolve():
        raise ConfigError(f"the run in {str(store.directory)!r} has gone on since it was read: try again")
    if data.fingerprint() != state.fingerprint:
        raise ConfigError(
            f"the data are not those that the run in {str(store.directory)!r} was started with: give it the same ones"
        )
    if state.config.iterations < progress.step:
        raise ConfigError(
            f"iterations = {state.config.iterations}, and {progress.step} are done: give more, or start anew with --overwrite"
        )
    model = load(directory, merge=False)
    check_data(model, state.config, data, processes)
    if progress.best_step not in store.steps():  # it was damaged, and the run goes on from another
        progress = dataclasses.replace(progress, best=None, best_step=None)
    changes = differences(read_state(directory).config, state.config)
    run = assemble(model, state, data, store, parallel, processes)
    restore(directory, run.model, run.optimiser)
    if processes.first:
        with store.changing():
            store.settle(progress.step, best=progress.best_step, good=progress.good)
            log.bring_back(store.directory, store.checkpoints.name)
        log.cut(store.directory, progress.step)
        if changes:
            log.append(store.directory, {"step": progress.step, "settings": changes})
    processes.wait()
    return run, progress


def differences(saved: TrainConfig, config: TrainConfig) -> dict[str, Any]:
    """The settings that differ from the saved ones."""
    before = dataclasses.asdict(saved)
    return {name: value for name, value in dataclasses.asdict(config).items() if value != before[name]}


def assemble(model: GPT, state: State, data: Data, store: RunDirectory, parallel: Parallel, processes: Processes) -> TrainingRun:
    """The run's parts put together: the model on its device, its objective compiled and spread, and
    an optimiser.
    """
    config = state.config
    if parallel.sharded and RESIDUALS[model.config.residual].unit_weights:
        raise ConfigError(
            f"residual {model.config.residual!r} normalises whole matrices, which no process has: choose --parallel ddp"
        )
    model = model.to(device=processes.device, dtype=config.weight_dtype)
    objective = Objective(model, config)
    if config.compile:
        objective.compile()
    module = parallel.wrap(objective, processes.device)
    optimiser = config.make_optimiser(model.parameters(), processes.device)
    return TrainingRun(model, module, optimiser, data, config, store, state, parallel, processes)


def check_continues(saved: Mapping[str, Any], given: Mapping[str, Any], flags: Mapping[str, str]) -> None:
    """Raises ConfigError where a setting that is given contradicts the saved one, naming the option
    that `flags` has for it.
    """
    for name, value in given.items():
        if name not in MAY_CHANGE and saved[name] != value:
            raise ConfigError(
                f"{flags.get(name, name)} {value} contradicts the run to resume, which has {saved[name]}: "
                "leave the option out, or start another run with another --out"
            )


def with_settings(state: State, given: Mapping[str, Any]) -> State:
    """The state with those of its settings changed that may change."""
    changed = {name: value for name, value in given.items() if name in MAY_CHANGE}
    return dataclasses.replace(state, config=dataclasses.replace(state.config, **changed))
