"""What was measured: one tidy table for all commands.

A row is a value of a measure, with the model, and where it is of: depth, head, step, or a place in
words. What could not be measured is in `missing`, with the reason. The JSON of every command has
this table, and every page is drawn from it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property
from typing import Any

from ctrans.base.from_json import from_json
from ctrans.base.printable import printable
from ctrans.measure.findings import Finding, Mark
from solvers import ConfigError
from solvers.errors import shown

SCHEMA = 2
"""The version of the JSON. Version 1 had a form of its own for each command."""


@dataclass(frozen=True)
class Value:
    """A row of the table.

    - `model`, `measure`: names; `measure` is an entry of `ctrans.measure.measures.MEASURES`
    - `value`: the figure; nan is unknown, None for a figure in `words` alone
    - `error`: the standard error or the tolerance of an estimate
    - `depth`: the number of the state X_k or of the segment, both from 0
    - `head`: the number of the head within the sublayer
    - `step`: the training step, or the size along which a measure of scope `size` varies
    - `place`: where it is, in words, where depth and head do not say
    - `words`: the figure in words
    """

    model: str
    measure: str
    value: float | None
    depth: int | None = None
    head: int | None = None
    step: float | None = None
    error: float | None = None
    place: str = ""
    words: str = ""

    @property
    def known(self) -> bool:
        return self.value is not None and not math.isnan(self.value)


COLUMNS = tuple(column.name for column in fields(Value))


@dataclass(frozen=True)
class Answer:
    """What was found, in one sentence that a reader understands who does not know the theory."""

    text: str
    mark: Mark = ""


@dataclass(frozen=True)
class Measured:
    """The result of a command: values, and what is said about them.

    - `values`: the rows
    - `missing`: by model and measure, why a figure was not measured
    - `answers`: the answer, in a sentence for each model or one for all
    - `findings`: by model, figures outside of their limits, the most severe first
    - `notes`: by model, remarks in sentences; "" is of all
    - `reasons`: by model, longer explanations, which a terminal shows with --verbose
    - `styles`: by model, its placement, which chooses the colour of its lines
    """

    values: tuple[Value, ...] = ()
    missing: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    answers: tuple[Answer, ...] = ()
    findings: Mapping[str, Sequence[Finding]] = field(default_factory=dict)
    notes: Mapping[str, Sequence[str]] = field(default_factory=dict)
    reasons: Mapping[str, Sequence[str]] = field(default_factory=dict)
    styles: Mapping[str, str] = field(default_factory=dict)

    @cached_property
    def models(self) -> list[str]:
        """The names of the models, in their order."""
        named = (*(value.model for value in self.values), *self.findings, *self.missing)
        return list(dict.fromkeys(named))

    @cached_property
    def measures(self) -> list[str]:
        """The measures that have a value, in their order."""
        return list(dict.fromkeys(value.measure for value in self.values))

    def of(self, measure: str, model: str | None = None) -> list[Value]:
        """The rows of a measure, of one model or of all."""
        return self._rows.get((measure, model), [])

    @cached_property
    def _rows(self) -> dict[tuple[str, str | None], list[Value]]:
        """The rows by measure and model, and by measure alone."""
        rows: dict[tuple[str, str | None], list[Value]] = {}
        for value in self.values:
            rows.setdefault((value.measure, value.model), []).append(value)
            rows.setdefault((value.measure, None), []).append(value)
        return rows

    def series(self, measure: str, model: str) -> list[float | None]:
        """The values of a measure of a model in their order."""
        return [value.value for value in self.of(measure, model)]

    def as_json(self) -> dict[str, Any]:
        """JSON values: the table by columns, and the rest as objects."""
        columns = {name: [getattr(value, name) for value in self.values] for name in COLUMNS}
        return {
            "schema": SCHEMA,
            "answers": [asdict(answer) for answer in self.answers],
            "values": columns,
            "missing": self.missing,
            "findings": {model: list(several) for model, several in self.findings.items()},
            "notes": self.notes,
            "reasons": self.reasons,
            "styles": self.styles,
        }


def measured_in(table: Mapping[str, Any]) -> Measured:
    """The table that `Measured.as_json` made. Raises ConfigError for another object."""
    columns = table.get("values")
    if table.get("schema") != SCHEMA or not isinstance(columns, Mapping):
        raise ConfigError(
            f"measured = {shown(table)} is no table of schema {SCHEMA}: make the result anew"
        )
    if set(columns) != set(COLUMNS) or len({len(list(column)) for column in columns.values()}) > 1:
        raise ConfigError(
            f"measured.values has the columns {', '.join(columns)}: it needs {', '.join(COLUMNS)},"
            " of one length"
        )
    rows = zip(*(columns[name] for name in COLUMNS), strict=True)
    objects = [dict(zip(COLUMNS, row, strict=True)) for row in rows]
    return from_json(Measured, {**table, "values": objects})


def along_depth(
    model: str, measure: str, values: Iterable[float | None], start: int = 0
) -> Iterator[Value]:
    """Rows of a measure with a figure at each depth from `start`; those that are None are left
    out.
    """
    for depth, value in enumerate(values, start):
        if value is not None:
            yield Value(model, measure, value, depth=depth)


def joined(results: Mapping[str, Measured]) -> Measured:
    """Several results as one. With several, each model's name begins with that of its result."""
    if len(results) == 1:
        return next(iter(results.values()))
    renamed = [_renamed(result, label) for label, result in results.items()]
    return Measured(
        values=tuple(value for result in renamed for value in result.values),
        missing={model: reasons for result in renamed for model, reasons in result.missing.items()},
        answers=tuple(answer for result in renamed for answer in result.answers),
        findings={
            model: findings for result in renamed for model, findings in result.findings.items()
        },
        notes={model: lines for result in renamed for model, lines in result.notes.items()},
        reasons={model: lines for result in renamed for model, lines in result.reasons.items()},
        styles={model: style for result in renamed for model, style in result.styles.items()},
    )


def together(*tables: Measured) -> Measured:
    """The rows of several tables about the same models, as one table."""
    missing: dict[str, dict[str, str]] = {}
    findings: dict[str, list[Finding]] = {}
    notes: dict[str, list[str]] = {}
    explanations: dict[str, list[str]] = {}
    for table in tables:
        for model, reasons in table.missing.items():
            missing.setdefault(model, {}).update(reasons)
        for model, lines in table.reasons.items():
            explanations.setdefault(model, []).extend(lines)
        for model, several in table.findings.items():
            findings.setdefault(model, []).extend(several)
        for model, lines in table.notes.items():
            several_lines = notes.setdefault(model, [])
            several_lines += [line for line in lines if line not in several_lines]
    return Measured(
        values=tuple(value for table in tables for value in table.values),
        missing=missing,
        answers=tuple(answer for table in tables for answer in table.answers),
        findings=findings,
        notes=notes,
        reasons=explanations,
        styles={model: style for table in tables for model, style in table.styles.items()},
    )


def escaped(table: Measured) -> Measured:
    """The table with names of models and places `printable`: they may come from users' files."""
    return Measured(
        values=tuple(
            replace(
                value,
                model=printable(value.model),
                place=printable(value.place),
                words=printable(value.words),
            )
            for value in table.values
        ),
        missing={
            printable(model): {name: printable(why) for name, why in reasons.items()}
            for model, reasons in table.missing.items()
        },
        answers=tuple(replace(answer, text=printable(answer.text)) for answer in table.answers),
        findings={
            printable(model): [
                replace(finding, place=printable(finding.place), figure=printable(finding.figure))
                for finding in findings
            ]
            for model, findings in table.findings.items()
        },
        notes={
            printable(model): [printable(line) for line in lines]
            for model, lines in table.notes.items()
        },
        reasons={
            printable(model): [printable(line) for line in lines]
            for model, lines in table.reasons.items()
        },
        styles={printable(model): style for model, style in table.styles.items()},
    )


def _renamed(result: Measured, label: str) -> Measured:
    def name(model: str) -> str:
        return ": ".join(part for part in (label, model) if part)

    return Measured(
        values=tuple(replace(value, model=name(value.model)) for value in result.values),
        missing={name(model): reasons for model, reasons in result.missing.items()},
        answers=tuple(replace(answer, text=name(answer.text)) for answer in result.answers),
        findings={name(model): findings for model, findings in result.findings.items()},
        notes={name(model): lines for model, lines in result.notes.items()},
        reasons={name(model): lines for model, lines in result.reasons.items()},
        styles={name(model): style for model, style in result.styles.items()},
    )
