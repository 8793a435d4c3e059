"""One run of a study: a training as of `ctrans train`, without checkpoints."""

from __future__ import annotations

import dataclasses
import platform
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ctrans import __version__
from ctrans.model.gpt import GPT
from ctrans.study.description import PlannedRun
from ctrans.study.measures import measured
from ctrans.training import log
from ctrans.training.data import Data
from ctrans.training.loop import Ending, Outcome, TrainingRun, carry_out
from ctrans.training.parallel import PARALLEL
from ctrans.training.processes import Processes
from ctrans.training.run_directory import RunDirectory
from ctrans.training.run_start import anew, check_low_rank, check_warm_up
from solvers import ConfigError, SolveError

CPU = torch.device("cpu")
MEASURED = (
    "step",
    "loss",
    "gradient_norm",
    "validation_loss",
    "growth",
    "largest",
    "theta",
    "diverged",
)
"""The keys of the log's rows that a study keeps."""
FAILED = "failed"
"""The ending of a run that raised an error, which is its message."""


@dataclasses.dataclass(frozen=True)
class RunResult:
    """The result of a run.

    - `ending`: a value of `Ending`, or "failed"
    - `curve`: a row for each iteration; those with a `validation_loss` are evaluations
    - `seconds`: processor time over all threads, which other work on the machine does not change
    - `trained`: the measures that were `asked` for, of the model `before`, and `after` if it
      finished
    """

    ending: str
    message: str
    curve: list[log.Row]
    seconds: float
    environment: dict[str, Any]
    trained: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def evaluations(self) -> list[log.Row]:
        """The rows with a validation loss."""
        return [row for row in self.curve if "validation_loss" in row]


def environment(device: torch.device = CPU) -> dict[str, Any]:
    """The versions and the hardware on which a result depends, besides its configuration."""
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    else:
        name = platform.processor() or platform.machine()
    return {
        "ctrans": __version__,
        "torch": torch.__version__,
        "device": name,
        "threads": torch.get_num_threads(),
    }


UNKEPT = dataclasses.replace(PARALLEL["none"], saves=False)


def begin(run: PlannedRun, data: Data, directory: Path, device: torch.device = CPU) -> TrainingRun:
    """The run, ready for the training loop, with its log in that directory."""
    check_warm_up(run.model, run.training)
    check_low_rank(run.model, run.training)
    model = GPT(run.model, seed=run.training.seed)
    started, _ = anew(
        model, run.training, data, RunDirectory(directory), UNKEPT, Processes(device), source={}
    )
    return started


def train_run(run: PlannedRun, data: Data, device: torch.device = CPU) -> RunResult:
    """Trains the run. Divergence is a result, and so is an error, with the ending "failed"."""
    started = time.process_time()
    with tempfile.TemporaryDirectory(prefix="ctrans-study-") as name:
        try:
            begun = begin(run, data, Path(name), device)
            before = measured(run.measure, begun.model, data)
            outcome = carry_out(begun, begun.state.progress)
            return result_of(run, begun, outcome, before, started)
        except Exception as error:  # of any kind: an error of one run must not end the study
            if isinstance(error, (ConfigError, SolveError)):
                message = str(error)
            else:
                message = f"{type(error).__name__}: {error}"
            curve = curve_of(Path(name))
            return RunResult(
                FAILED, message, curve, time.process_time() - started, environment(device)
            )


def result_of(
    run: PlannedRun,
    trained: TrainingRun,
    outcome: Outcome,
    before: Mapping[str, Any],
    started: float,
) -> RunResult:
    """The result of a training that ended, with its measures and the processor time since
    `started`. Raises SolveError if the log of a finished one lacks steps.
    """
    curve = curve_of(trained.store.directory)
    after = {}
    if outcome.ending is Ending.FINISHED:
        if [row["step"] for row in curve] != list(range(run.training.iterations + 1)):
            raise SolveError(
                f"the log of the training has {len(curve)} of {run.training.iterations + 1} steps:"
                f" something removed {str(trained.store.directory)!r} while it ran"
            )
        after = measured(run.measure, trained.model, trained.data)
    measures = {}
    if run.measure:
        measures = {"asked": list(run.measure), "before": before, "after": after}
    return RunResult(
        ending=outcome.ending.value,
        message=outcome.message,
        seconds=time.process_time() - started,
        curve=curve,
        environment={
            **environment(trained.processes.device),
            "frequencies_loss": trained.data.frequencies_loss(),
        },
        trained=measures,
    )


def curve_of(directory: Path) -> list[log.Row]:
    """The rows of the log with the keys in `MEASURED`."""
    return [{key: row[key] for key in MEASURED if key in row} for row in log.read(directory)]
