"""A training run from Python, planned and carried out as `ctrans train` does it.

>>> trained = train(GPTConfig(placement="pre"), TrainConfig(iterations=500), "book.txt", out="out/book")
>>> trained.model, trained.progress.best
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ctrans.model.checkpoint import load_config
from ctrans.model.config import GPTConfig
from ctrans.model.gpt import GPT, check_buildable
from ctrans.training import log
from ctrans.training.data import Given, read_source, source_of
from ctrans.training.loop import Ending, Observer, Outcome, TrainingRun, carry_out, unobserved
from ctrans.training.parallel import get_parallel
from ctrans.training.processes import Processes, processes
from ctrans.training.run_directory import RunDirectory
from ctrans.training.run_start import anew, check_continues, check_experts, check_low_rank, check_warm_up, resumed, with_settings
from ctrans.training.settings import TrainConfig, check_names
from ctrans.training.training_state import Progress, read_state
from ctrans.weights.low_rank import adapt

Begin = Callable[[Processes], tuple[TrainingRun, Progress]]
"""What begins a run when this process knows its place among the others."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """A run that can begin: its architecture, settings and directory, and what begins it. All that
    can be checked is.
    """

    architecture: GPTConfig
    config: TrainConfig
    directory: RunDirectory
    parallel: str
    begin: Begin


@dataclasses.dataclass(frozen=True, eq=False)
class Trained:
    """A run that has ended: its parts, among them the model, and how it ended."""

    run: TrainingRun
    outcome: Outcome

    @property
    def model(self) -> GPT:
        """The model as the run left it; the best one is at `directory / "best"`."""
        return self.run.model

    @property
    def ending(self) -> Ending:
        """Whether it is finished, or was interrupted, or diverged; `outcome.message` says why."""
        return self.outcome.ending

    @property
    def progress(self) -> Progress:
        """How far it came, and its first and best validation losses."""
        return self.outcome.progress

    @property
    def directory(self) -> Path:
        """Where its checkpoints and its log are."""
        return self.run.store.directory

    @property
    def rows(self) -> list[log.Row]:
        """Its log: a row for each iteration."""
        return list(log.read(self.directory))


def train(
    model: GPTConfig | GPT,
    config: TrainConfig | None = None,
    data: Given = None,
    *,
    out: str | Path,
    overwrite: bool = False,
    parallel: str = "none",
    device: str | torch.device = "cpu",
    observe: Observer = unobserved,
) -> Trained:
    """Trains a GPT on J = cross-entropy + kinetic/2 int |v|^2 dt, and keeps checkpoints and a log
    in a directory.

    - `model`: an architecture, whose weights are drawn from the settings' seed, or a model to go on
      from, which is changed
    - `config`: all settings, each checked; `TrainConfig()` if None
    - `data`: a path (a text, or a directory with nanoGPT's train.bin and val.bin), a text's bytes,
      `Data`, or None for the text that Python ships
    - `out`: the run's directory; `overwrite` removes a run that is there
    - `parallel`: "none", or "ddp" or "fsdp" under torchrun
    - `observe`: called with every row of the log, in the first process

    Ctrl-C and SIGTERM end the run after the iteration under way, with a checkpoint: see
    `Trained.ending`. Raises ConfigError for what cannot be, before anything is written.
    """
    return carry_out_plan(
        plan(model, TrainConfig() if config is None else config, data, out=out, overwrite=overwrite, parallel=parallel),
        device=device,
        observe=observe,
    )


def resume(
    out: str | Path,
    data: Given = None,
    *,
    parallel: str = "none",
    device: str | torch.device = "cpu",
    observe: Observer = unobserved,
    **changes: Any,
) -> Trained:
    """Goes on with the run in that directory from its last checkpoint, exactly.

    - `data`: only where they have moved, or were given as `Data` or bytes
    - `changes`: settings of `TrainConfig` that may change, as `iterations=5000` or
      `learning_rate=1e-3`

    The rest is as `train` has it. Raises ConfigError where there is no run, a checkpoint is
    damaged, or a setting contradicts it.
    """
    check_names(changes)
    planned = plan_to_resume(out, changes, data, parallel=parallel)
    return carry_out_plan(planned, device=device, observe=observe)


def plan(
    model: GPTConfig | GPT, config: TrainConfig, data: Given, *, out: str | Path, overwrite: bool = False, parallel: str = "none"
) -> Plan:
    """A new run, its weights drawn; arguments and errors as `train`."""
    architecture, directory = (model.config if isinstance(model, GPT) else model), RunDirectory(Path(out))
    way = get_parallel(parallel, config)
    check_buildable(architecture, config.seed)
    check_warm_up(architecture, config)
    check_experts(architecture, config)
    check_low_rank(model, config)
    source, tokens = source_of(data, architecture.context)
    directory.check_writable()
    weights = model if isinstance(model, GPT) else GPT(architecture, seed=config.seed)
    if config.low_rank:
        adapt(weights, [sublayer.field for sublayer in weights.depth.sublayers], config.low_rank, seed=config.seed)
    begin = partial(anew, weights, config, tokens, directory, way, source=source, overwrite=overwrite)
    return Plan(architecture, config, directory, parallel, begin)


def plan_to_resume(
    out: str | Path,
    given: Mapping[str, Any],
    data: Given = None,
    *,
    parallel: str = "none",
    flags: Mapping[str, str] | None = None,
) -> Plan:
    """A run that is taken up again; arguments and errors as `resume`.

    `given` may also have fields of the architecture, as long as they agree with the run's; `flags`
    are the options that errors name.
    """
    store = RunDirectory(Path(out))
    directory = store.verified_last()
    state, architecture = read_state(directory), load_config(directory)
    known = {**dataclasses.asdict(architecture), **dataclasses.asdict(state.config)}
    check_continues(known, {name: value for name, value in given.items() if name in known}, flags or {})
    state = with_settings(state, given)
    check_warm_up(architecture, state.config)
    if data is None:
        tokens = read_source(state.source, architecture.context)
    else:  # the data may have moved: their fingerprint tells whether they are the same
        source, tokens = source_of(data, architecture.context)
        state = dataclasses.replace(state, source=source)
    begin = partial(resumed, state, tokens, store, get_parallel(parallel, state.config))
    return Plan(architecture, state.config, store, parallel, begin)


@contextlib.contextmanager
def begun(planned: Plan, device: torch.device) -> Iterator[tuple[TrainingRun, Progress]]:
    """Inside, the run's directory is locked, and this process is ready to talk to the others."""
    with contextlib.ExitStack() as stack:
        here = stack.enter_context(processes(planned.parallel, device))
        if here.first:
            stack.enter_context(planned.directory.locked())
        yield planned.begin(here)


def carry_out_plan(planned: Plan, *, device: str | torch.device = "cpu", observe: Observer = unobserved) -> Trained:
    """Begins the run and trains to its end."""
    with begun(planned, torch.device(device)) as (run, progress):
        run = dataclasses.replace(run, observe=observe)
        return Trained(run, carry_out(run, progress))
