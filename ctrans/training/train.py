"""Training runs from Python, as `ctrans train` makes them.

>>> config = TrainConfig(iterations=500)
>>> trained = train(GPTConfig(placement="pre"), config, "book.txt", out="out/book")
>>> trained.model, trained.progress.best
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch

from ctrans.dynamics.weights.low_rank import adapt
from ctrans.model.checkpoint import load_config
from ctrans.model.config import GPTConfig
from ctrans.model.gpt import GPT
from ctrans.model.size import check_buildable
from ctrans.training import log
from ctrans.training.data_sources import Given, read_source, source_of
from ctrans.training.execution import UNKNOWN, Execution
from ctrans.training.loop import Ending, Observer, Outcome, TrainingRun, carry_out, unobserved
from ctrans.training.parallel import get_parallel
from ctrans.training.processes import Processes, get_device, processes
from ctrans.training.run_directory import RunDirectory
from ctrans.training.run_start import (
    anew,
    check_continues,
    check_experts,
    check_low_rank,
    check_warm_up,
    resumed,
    with_settings,
)
from ctrans.training.settings import TrainConfig, check_names
from ctrans.training.training_state import Progress, read_state


@runtime_checkable
class Begin(Protocol):
    """Starts a planned run in its directory, which this process has locked."""

    def __call__(
        self, *, store: RunDirectory, processes: Processes, execution: Execution
    ) -> tuple[TrainingRun, Progress]: ...


@dataclass(frozen=True)
class Plan:
    """A checked run that can start: its architecture, settings and directory, and the function that
    starts it. The execution of a resumed run is that of its checkpoint.
    """

    architecture: GPTConfig
    config: TrainConfig
    directory: RunDirectory
    parallel: str
    begin: Begin
    execution: Execution = UNKNOWN


@dataclass(frozen=True, eq=False)
class Trained:
    """A run that has ended: its parts and its outcome."""

    run: TrainingRun
    outcome: Outcome

    @property
    def model(self) -> GPT:
        """The model at the end of the run. The best one is at `directory / "best"`."""
        return self.run.model

    @property
    def ending(self) -> Ending:
        """How the run ended; `outcome.message` has the reason."""
        return self.outcome.ending

    @property
    def progress(self) -> Progress:
        """Its last step, and its first and best validation losses."""
        return self.outcome.progress

    @property
    def directory(self) -> Path:
        """The directory of its checkpoints and its log."""
        return self.run.store.directory

    @property
    def rows(self) -> list[log.Row]:
        """The rows of its log, one for each iteration."""
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
    """Trains a GPT on J = cross-entropy + kinetic/2 int |v|^2 dt, and writes checkpoints and a log
    to a directory.

    - `model`: an architecture, with weights from the settings' seed, or a model, which is trained
      in place
    - `config`: the settings; `TrainConfig()` if None
    - `data`: a path (a text, or a directory with nanoGPT's train.bin and val.bin), a text's bytes,
      `Data`, or None for the text that Python ships
    - `out`: the run's directory; `overwrite` replaces a run in it
    - `parallel`: "none", or "ddp" or "fsdp" under torchrun
    - `observe`: called with each row of the log, in the first process

    Ctrl-C and SIGTERM end the run after the present iteration, with a checkpoint: see
    `Trained.ending`. Raises ConfigError for invalid arguments, before it writes anything.
    """
    place = Path(out).absolute()  # `observe` may change the working directory
    return carry_out_plan(
        plan(
            model, config or TrainConfig(), data, out=place, overwrite=overwrite, parallel=parallel
        ),
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
    """Continues the run in that directory from its last checkpoint, exactly.

    - `data`: needed if they have moved, or you gave them as `Data` or bytes
    - `changes`: settings of `TrainConfig` that may change, such as `iterations=5000` or
      `learning_rate=1e-3`

    Other arguments are those of `train`. Raises ConfigError if there is no run, its checkpoint is
    damaged, or a setting contradicts it.
    """
    check_names(changes)
    planned = plan_to_resume(Path(out).absolute(), changes, data, parallel=parallel)
    return carry_out_plan(planned, device=device, observe=observe)


def plan(
    model: GPTConfig | GPT,
    config: TrainConfig,
    data: Given,
    *,
    out: str | Path,
    overwrite: bool = False,
    parallel: str = "none",
) -> Plan:
    """Plans a new run. Arguments and errors are those of `train`."""
    if isinstance(model, GPT):
        architecture = model.config
    else:
        architecture = model
    directory = RunDirectory(Path(out))
    way = get_parallel(parallel, config)
    check_buildable(architecture, config.seed)
    check_warm_up(architecture, config)
    check_experts(architecture, config)
    check_low_rank(model, config)
    source, tokens = source_of(data, architecture.context)
    directory.check_writable()
    if isinstance(model, GPT):
        weights = model
    else:
        weights = GPT(architecture, seed=config.seed)
    if config.low_rank:
        adapt(
            weights,
            [sublayer.field for sublayer in weights.depth.sublayers],
            config.low_rank,
            seed=config.seed,
        )
    begin = partial(anew, weights, config, tokens, parallel=way, source=source, overwrite=overwrite)
    return Plan(architecture, config, directory, parallel, begin)


def plan_to_resume(
    out: str | Path,
    changes: Mapping[str, Any],
    data: Given = None,
    *,
    parallel: str = "none",
    flags: Mapping[str, str] | None = None,
) -> Plan:
    """Plans to resume a run. Arguments and errors are those of `resume`.

    `changes` may also have fields of the architecture that agree with the run's. `flags` are the
    options that errors name, by setting.
    """
    store = RunDirectory(Path(out))
    directory = store.verified_last()
    state = read_state(directory)
    architecture = load_config(directory)
    saved = {**asdict(architecture), **asdict(state.config)}
    settings = {name: value for name, value in changes.items() if name in saved}
    check_continues(saved, settings, flags or {})
    state = with_settings(state, changes)
    check_warm_up(architecture, state.config)
    if data is None:
        tokens = read_source(state.source, architecture.context)
    else:  # the data may have moved; their fingerprint is compared later
        source, tokens = source_of(data, architecture.context)
        state = replace(state, source=source)
    begin = partial(resumed, state, tokens, parallel=get_parallel(parallel, state.config))
    return Plan(architecture, state.config, store, parallel, begin, state.execution)


@contextlib.contextmanager
def begun(planned: Plan, device: torch.device) -> Iterator[tuple[TrainingRun, Progress]]:
    """Connects the processes, locks the run's directory, and starts the run."""
    with contextlib.ExitStack() as stack:
        here = stack.enter_context(processes(planned.parallel, device))
        directory = planned.directory
        if here.first:
            directory = stack.enter_context(directory.locked())
        execution = replace(
            planned.execution,
            threads=torch.get_num_threads(),
            processes=here.world,
            device=str(device),
        )
        yield planned.begin(store=directory, processes=here, execution=execution)


def carry_out_plan(planned: Plan, *, device: str | torch.device, observe: Observer) -> Trained:
    """Starts the run and trains to its end."""
    with begun(planned, get_device(str(device))) as (run, progress):
        run = replace(run, observe=observe)
        return Trained(run, carry_out(run, progress))
