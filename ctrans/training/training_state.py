"""The train.json of a checkpoint: progress, settings, and the source of the data."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ctrans.base.given_files import read_json
from ctrans.base.json_values import is_step
from ctrans.model.sums import STATE
from ctrans.training.execution import UNKNOWN, Execution, execution_in
from ctrans.training.settings import TrainConfig, check_names, from_saved
from solvers import ConfigError, shown


@dataclass(frozen=True)
class Progress:
    """The progress of a run: all on which its rest depends, besides weights, optimiser, settings
    and data.

    - `first`, `best`: validation losses in nats
    - `above`: the number of last evaluations in a row that lie too far above the first
    - `good`: the iteration of the last evaluation that does not
    """

    step: int = 0
    first: float | None = None
    best: float | None = None
    best_step: int | None = None
    above: int = 0
    good: int = 0

    def evaluated(self, loss: float, margin: float) -> Progress:
        """The progress with one more validation loss. The loss is good if it is at most the first
        plus the margin.
        """
        first = self.first
        if first is None:
            first = loss
        above = self.above + 1
        good = self.good
        if loss <= first + margin:
            above = 0
            good = self.step
        best = self.best
        best_step = self.best_step
        if best is None or loss < best:
            best = loss
            best_step = self.step
        return Progress(self.step, first, best, best_step, above, good)


@dataclass(frozen=True)
class State:
    """The train.json of a checkpoint: progress and settings of the run, the source of its data and
    their fingerprint, and how the run was executed.

    - `run`: names the run, as the first row of its log does, by a digest of its settings, its data
      and its first weights; "" for one of an earlier version
    - `lineage`: names how the run went on, by a digest of the settings that it was given anew, as
      their rows of the log have it; "" if there are none
    - `beside`: further files of a watcher, by name, saved next to it
    """

    progress: Progress
    config: TrainConfig
    source: dict[str, Any]
    fingerprint: str
    execution: Execution = UNKNOWN
    run: str = ""
    lineage: str = ""
    beside: Mapping[str, str] = field(default_factory=dict)

    def write(self, directory: Path) -> None:
        """Writes the files to the directory of a checkpoint."""
        saved = {name: value for name, value in asdict(self).items() if name in SAVED}
        (directory / STATE).write_text(json.dumps(saved, indent=1))
        for name, text in self.beside.items():
            (directory / name).write_text(text)


ESSENTIAL = ("progress", "config", "source", "fingerprint")
NAMES = ("run", "lineage")
SAVED = (*ESSENTIAL, "execution", *NAMES)
"""The keys of train.json. The first checkpoints have the essential ones."""
LOSSES = ("first", "best")


def read_state(directory: Path) -> State:
    """Reads the state. Raises ConfigError for a file that is missing, damaged, or has an unknown
    key or a value of another type.
    """
    path = directory / STATE
    content = read_json(path)
    try:
        progress, settings, source, fingerprint = (content[name] for name in ESSENTIAL)
        if not isinstance(progress, dict) or not isinstance(settings, dict):
            raise TypeError("a table is no mapping")
    except (ValueError, TypeError, KeyError):
        raise ConfigError(f"{str(path)!r} is no training state of ctrans") from None
    check_names(progress, Progress, f"key in {STATE}")
    for name, value in progress.items():
        if name in LOSSES:
            fits = _is_loss(value)
            allowed = "a number or null"
        else:
            fits = is_step(value) or (name == "best_step" and value is None)
            allowed = "a step"
        if not fits:
            raise ConfigError(
                f"{name} = {shown(value)} in {str(path)!r}: give {allowed}, or restore the file"
            )
    if not isinstance(source, dict) or not all(
        isinstance(value, str | None) for value in source.values()
    ):
        raise ConfigError(
            f"source = {shown(source)} in {str(path)!r}: give names and paths, or restore the file"
        )
    execution = execution_in(content.get("execution", {}), path)
    names = {name: content.get(name, "") for name in NAMES}
    for name, value in names.items():
        if not isinstance(value, str):
            raise ConfigError(
                f"{name} = {shown(value)} in {str(path)!r}: give a text, or restore the file"
            )
    return State(
        Progress(**progress), from_saved(settings), source, fingerprint, execution, **names
    )


def _is_loss(value: Any) -> bool:
    return value is None or (type(value) in (int, float) and abs(value) <= sys.float_info.max)
