"""How a run begins: anew, or from its last checkpoint."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from ctrans.checkpoint import load
from ctrans.gpt import GPT
from ctrans.training import log
from ctrans.training.data import Data
from ctrans.training.loop import Run
from ctrans.training.objective import Objective
from ctrans.training.optimiser import make_optimiser
from ctrans.training.parallel import Parallel
from ctrans.training.processes import Processes
from ctrans.training.saved import Progress, State
from ctrans.training.settings import MAY_CHANGE, TrainConfig
from ctrans.training.sharded import restore
from ctrans.training.store import Store
from solvers import ConfigError


def anew(
    model: GPT,
    config: TrainConfig,
    data: Data,
    store: Store,
    parallel: Parallel,
    processes: Processes,
    *,
    source: Mapping[str, Any],
    overwrite: bool = False,
) -> tuple[Run, Progress]:
    """A run from its first iteration on, ready for `train`.

    Raises ConfigError where the directory has a run already and `overwrite` does not allow to remove it, and where the data do
    not suffice for a batch or have tokens that the model does not know.
    """
    if store.exists and not overwrite:
        raise ConfigError(
            f"{str(store.directory)!r} has a run already: go on with it by --resume, remove it by --overwrite, or choose another --out"
        )
    data.check_batch(config.batch * config.accumulate)
    if processes.first:
        data.check_vocabulary(model.config.vocab_size)
    state = State(Progress(), config, dict(source), data.fingerprint())
    run = assemble(model, state, data, store, parallel, processes)
    if processes.first:
        store.clear()
        (store.directory / log.LOG).unlink(missing_ok=True)
    return run, state.progress


def resumed(state: State, data: Data, store: Store, parallel: Parallel, processes: Processes) -> tuple[Run, Progress]:
    """The run as it was at the checkpoint that `state` was read from (see `Store.verified_last`), ready for `train`.

    Raises ConfigError for other data than it was started with, or fewer iterations than are done.
    """
    progress, directory = state.progress, store.step_directory(state.progress.step)
    if data.fingerprint() != state.fingerprint:
        raise ConfigError(
            f"the data are not those that the run in {str(store.directory)!r} was started with: give it the same ones"
        )
    if state.config.iterations < progress.step:
        raise ConfigError(
            f"iterations = {state.config.iterations}, and {progress.step} are done: give more, or start anew with --overwrite"
        )
    run = assemble(load(directory), state, data, store, parallel, processes)
    restore(directory, run.model, run.optimiser)
    if processes.first:
        store.settle(progress.step, progress.best_step)
        log.cut(store.directory, progress.step)
    processes.wait()
    return run, progress


def assemble(model: GPT, state: State, data: Data, store: Store, parallel: Parallel, processes: Processes) -> Run:
    """The run's parts put together: the model on its device, its objective compiled and spread, and an optimiser."""
    config = state.config
    model = model.to(device=processes.device, dtype=config.weight_dtype)
    objective = Objective(model, config)
    if config.compile:
        objective.compile()
    module = parallel.wrap(objective, processes.device)
    optimiser = make_optimiser(
        config.optimiser,
        model.parameters(),
        learning_rate=config.learning_rate,
        betas=(config.beta1, config.beta2),
        weight_decay=config.weight_decay,
        device=processes.device,
    )
    return Run(model, module, optimiser, data, config, store, state, parallel, processes)


def check_continues(saved: Mapping[str, Any], given: Mapping[str, Any], flags: Mapping[str, str]) -> None:
    """Raises ConfigError where a setting that is given contradicts the saved one, naming the option that `flags` has for it."""
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
