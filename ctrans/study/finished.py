"""A run of a study that ended, and the row of the database that has it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

from ctrans.base.printable import printable
from ctrans.model.config import GPTConfig
from ctrans.study.description import PlannedRun
from ctrans.study.run_key import BEFORE
from ctrans.study.training import RunResult
from ctrans.training.settings import TrainConfig
from solvers import ConfigError

OBJECTS = ("model", "training", "curve", "trained", "environment")
"""Columns of a run's row that are JSON."""
Row = dict[str, Any]
"""A row by the names of its columns."""


@dataclasses.dataclass(frozen=True)
class Finished:
    """A run of the store, as its last try left it. Losses are validation losses in nats, None for a
    missing or not finite one.
    """

    key: str
    run: PlannedRun
    result: RunResult
    commit: str
    finished: str
    tries: int = 1

    @property
    def losses(self) -> list[float | None]:
        """The validation losses; the first one is before the first step."""
        return [finite(row["validation_loss"]) for row in self.result.evaluations]

    @property
    def first(self) -> float | None:
        """The loss before the first step."""
        return next(iter(self.losses), None)

    @property
    def last(self) -> float | None:
        """The loss at the end; None for a run that did not finish."""
        if self.result.ending == "finished" and self.losses:
            return self.losses[-1]
        return None

    @property
    def best(self) -> float | None:
        """The lowest loss."""
        return min((loss for loss in self.losses if loss is not None), default=None)


FinishedRuns = Sequence[Finished]


def finite(value: Any) -> float | None:
    """The value if it is a finite number, else None."""
    if isinstance(value, (int, float)) and abs(value) < float("inf"):
        return float(value) + 0.0  # SQLite keeps no -0.0
    return None


def row_of(finished: Finished) -> Row:
    """The row of a run."""
    run = finished.run
    result = finished.result
    return {
        "key": finished.key,
        "case": run.case,
        "seed": run.training.seed,
        "learning_rate": float(run.training.learning_rate),
        "model": json.dumps(dataclasses.asdict(run.model)),
        "training": json.dumps(dataclasses.asdict(run.training)),
        "ending": result.ending,
        "message": printable(result.message),
        "first_loss": finished.first,
        "last_loss": finished.last,
        "best_loss": finished.best,
        "steps": max((row.get("step", 0) for row in result.curve), default=0),
        "seconds": float(result.seconds),
        "curve": json.dumps(result.curve),
        "trained": json.dumps(result.trained),
        "environment": json.dumps(result.environment),
        "commit": finished.commit,
        "finished": finished.finished,
    }


def finished_of(row: Row) -> Finished:
    """The run of a row. Raises ConfigError for a field that this ctrans does not have."""
    objects = {name: json.loads(value) for name, value in row.items() if name in OBJECTS}
    measure = tuple(objects["trained"].get("asked", ()))
    varied = json.loads(row["case"])
    run = planned_run(objects["model"], objects["training"], varied, measure, row["commit"])
    result = RunResult(
        row["ending"],
        row["message"],
        objects["curve"],
        row["seconds"],
        objects["environment"],
        objects["trained"],
    )
    return Finished(row["key"], run, result, row["commit"], row["finished"])


def planned_run(
    model: dict[str, Any],
    training: dict[str, Any],
    varied: dict[str, Any],
    measure: tuple[str, ...],
    commit: str,
) -> PlannedRun:
    """A stored run, with the fields that are newer than it. Raises ConfigError for a field that
    this ctrans does not have.
    """
    configs: dict[str, Any] = {}
    for kind, cls, stored in (("model", GPTConfig, model), ("training", TrainConfig, training)):
        settings = {**BEFORE[kind], **stored}
        gone = settings.keys() - {field.name for field in dataclasses.fields(cls)}
        if gone:
            message = (
                f"the study has runs with {min(gone)}, which this ctrans does not know: read it"
                " with the ctrans that wrote it"
            )
            if commit:
                message = f"{message}, commit {commit}"
            raise ConfigError(message)
        configs[kind] = cls(**settings)
    return PlannedRun(**configs, varied=varied, measure=measure)
