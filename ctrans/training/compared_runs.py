"""Where two runs of one seed part: the first step of their logs, and the first tensor of their
checkpoints.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ctrans.base.json_values import is_number
from ctrans.examine.comparison.model_comparison import WeightDifference
from ctrans.examine.comparison.weight_pairs import pairs_of
from ctrans.examine.comparison.weight_relations import relation_of
from ctrans.interop.stored_weights import read_numbers, stored_weights
from ctrans.measure.measured import Answer, Measured, Value
from ctrans.measure.measures import MEASURES, Measure
from ctrans.model.checkpoint import load, load_config
from ctrans.model.sums import OPTIMISER
from ctrans.training.log import LOG, check_of_run, read
from ctrans.training.run_directory import RunDirectory
from ctrans.training.training_state import read_state

FIGURES = {
    "learning_rate": "the schedules part there",
    "loss": "the update before it, or the batch, differs",
    "gradient_norm": "the forward passes agree, and the backward passes part",
    "validation_loss": "the weights differ, or the evaluation",
}
"""The figures of a step in the order in which they are computed, and what it says that one is the
first that differs.
"""
FAR = 0.01
"""Losses that differ by this share are far apart."""
MEASURES.add(
    "ctrans compare",
    {
        "step of parting": Measure(
            formula="the first step at which a figure of the two runs' logs differs",
            topic="Where two models part",
            subject="models",
            decimals=0,
        )
    },
)


@dataclass(frozen=True)
class RunParting:
    """Where two runs part.

    - `steps`: how many steps both logs have
    - `step`, `figure`, `values`: the first figure that differs; None, "" and () for none
    - `far`: the first step at which the losses differ by more than `FAR`
    - `settings`: settings that differ, with both values
    - `equal_until`: the last checkpoint of both up to which all tensors are equal; None for none
    - `checkpoint`: the first checkpoint of both with a tensor that differs; None for none
    - `tensors`: those that differ there, in the order of the model, then those of the optimiser
    - `equal_tensors`: how many are equal there
    """

    steps: int
    step: int | None
    figure: str
    values: tuple[Any, ...]
    far: int | None
    settings: dict[str, tuple[Any, Any]]
    equal_until: int | None
    checkpoint: int | None
    tensors: tuple[WeightDifference, ...]
    equal_tensors: int


def is_run(path: Path) -> bool:
    """Whether the path is the directory of a run, with its log and a checkpoint."""
    return (path / LOG).is_file() and bool(RunDirectory(path).steps())


def parting_of(first: Path, second: Path) -> RunParting:
    """Where two runs part. Raises ConfigError for a checkpoint that cannot be read, and for a log
    of another run than the checkpoints beside it.
    """
    for path in (first, second):
        _check_log(path)
    rows = list(_common_rows(first, second))
    step, figure, values = _first_difference(rows)
    runs = (RunDirectory(first), RunDirectory(second))
    common = sorted(set(runs[0].steps()) & set(runs[1].steps()))
    equal_until = None
    saved = None
    for saved in common:
        places = (runs[0].step_directory(saved), runs[1].step_directory(saved))
        tensors, equal = _tensors(*places)
        if tensors:
            break
        equal_until = saved
    else:
        tensors = ()
        equal = 0
    return RunParting(
        steps=len({row["step"] for row, _ in rows}),
        step=step,
        figure=figure,
        values=values,
        far=next((row["step"] for row, other in rows if _is_far(row, other)), None),
        settings=_settings(*(run.step_directory(run.steps()[-1]) for run in runs)),
        equal_until=equal_until,
        checkpoint=saved if tensors else None,
        tensors=tensors,
        equal_tensors=equal,
    )


def _check_log(path: Path) -> None:
    run = RunDirectory(path)
    state = read_state(run.step_directory(run.steps()[-1]))
    check_of_run(path, run.checkpoints.name, state)


def _common_rows(first: Path, second: Path) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Rows of the same step and figures of both logs, in order."""
    others: dict[tuple[Any, ...], dict[str, Any]] = {}
    for row in read(second):
        others.setdefault(_key(row), row)
    for row in read(first):
        other = others.get(_key(row))
        if other is not None and isinstance(row.get("step"), int):
            yield row, other


def _key(row: dict[str, Any]) -> tuple[Any, ...]:
    return (row.get("step"), *(name for name in FIGURES if name in row))


def _first_difference(
    rows: Sequence[tuple[dict[str, Any], dict[str, Any]]],
) -> tuple[int | None, str, tuple[Any, ...]]:
    for row, other in rows:
        for name in FIGURES:
            if row.get(name) != other.get(name):
                return row["step"], name, (row.get(name), other.get(name))
    return None, "", ()


def _is_far(row: dict[str, Any], other: dict[str, Any]) -> bool:
    loss: Any = row.get("loss")
    of_other: Any = other.get("loss")
    if not (is_number(loss) and is_number(of_other)):
        return bool(loss != of_other)
    return bool(abs(loss - of_other) > FAR * abs(loss))


def _settings(first: Path, second: Path) -> dict[str, tuple[Any, Any]]:
    """The settings of the architecture and the training that differ between two checkpoints."""
    one, other = (
        asdict(load_config(place)) | asdict(read_state(place).config) for place in (first, second)
    )
    return {
        name: (one.get(name), other.get(name))
        for name in [*one, *(name for name in other if name not in one)]
        if one.get(name) != other.get(name)
    }


@torch.no_grad()
def _tensors(first: Path, second: Path) -> tuple[tuple[WeightDifference, ...], int]:
    """The tensors of two checkpoints that differ, and how many are equal."""
    pairs, _ = pairs_of(load(first), load(second))
    named = [(pair.first_name, pair.first, pair.second, "the model") for pair in pairs]
    states = [place / OPTIMISER for place in (first, second)]
    if all(path.is_file() for path in states):
        one, other = (read_numbers(stored_weights([path])) for path in states)
        named += [(name, one[name], other[name], "the optimiser") for name in one if name in other]
    found = []
    for name, tensor, of_other, part in named:
        if tensor.is_floating_point():
            relation = relation_of(tensor, of_other)
            if relation.kind != "equal":
                found.append(
                    WeightDifference(
                        name, name, part, relation.words, relation.kind, relation.distance
                    )
                )
    return tuple(found), len(named) - len(found)


def answer(first: str, second: str, found: RunParting) -> Answer:
    """Where the runs part, in a few sentences."""
    texts = []
    if found.steps == 0:
        texts.append(
            f"The logs of {first} and {second} have no step in common, so no loss is compared"
        )
    elif found.step is None:
        texts.append(
            f"The logs of {first} and {second} are equal at all {found.steps} common steps"
        )
    else:
        one, other = found.values
        texts.append(
            f"The runs {first} and {second} part at step {found.step}: {found.figure} is {one} and"
            f" {other}, so that {FIGURES[found.figure]}"
        )
    if found.far is not None and found.far != found.step:
        texts.append(f"Their losses differ by more than 1% from step {found.far} on")
    if found.settings:
        listed = ", ".join(
            f"{name} {one} and {other}" for name, (one, other) in found.settings.items()
        )
        texts.append(f"Their settings differ: {listed}")
    if found.tensors:
        tensor = found.tensors[0]
        total = len(found.tensors) + found.equal_tensors
        texts.append(
            f"At step {found.checkpoint}, the first checkpoint of both that differs,"
            f" {len(found.tensors)} of {total} tensors do. The first is {tensor.name} of"
            f" {tensor.part}: {tensor.relation}"
        )
        if found.equal_until is not None:
            texts.append(f"At step {found.equal_until} all tensors are equal")
    elif found.equal_until is not None:
        texts.append(
            f"All tensors of their common checkpoints are equal, up to {found.equal_until}"
        )
    else:
        texts.append("They have no checkpoint of the same step, so no tensor is compared")
    text = ". ".join(texts) + "."
    if found.step is not None or found.tensors:
        return Answer(text, "bad")
    if found.steps == 0:
        return Answer(text, "note")
    return Answer(text, "good")


def with_runs(table: Measured, first: str, second: str, found: RunParting) -> Measured:
    """The table of two models with what their runs' logs say before it."""
    values = list(table.values)
    if found.step is not None:
        values.append(Value(f"{first} to {second}", "step of parting", float(found.step)))
    answers = (answer(first, second, found), *table.answers)
    return replace(table, values=tuple(values), answers=answers)
