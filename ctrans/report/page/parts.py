"""What a page is made of: chapters of words, tables and charts, all of them plain values."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

Mark = Literal["", "bad", "note", "good"]


@dataclasses.dataclass(frozen=True)
class Cell:
    """A cell's text, what it is sorted by if not that, and its mark: "bad" is outside of a limit, "good" a finding that holds."""

    text: str
    value: float | None = None
    mark: Mark = ""


@dataclasses.dataclass(frozen=True)
class Column:
    """A column's heading, and what its figures mean."""

    name: str
    meaning: str = ""


@dataclasses.dataclass(frozen=True)
class Sheet:
    """A table that sorts."""

    title: str
    columns: Sequence[Column]
    rows: Sequence[Sequence[Cell]]
    meaning: str = ""


@dataclasses.dataclass(frozen=True)
class Line:
    """One model's figures along the chart's axis; a `bound` is what theory allows, not what was measured."""

    model: str
    x: Sequence[float]
    y: Sequence[float | None]
    placement: str | None = None
    bound: bool = False


@dataclasses.dataclass(frozen=True)
class Diagram:
    """Lines against depth, or whatever `x` says in words with its unit; `log` is how the vertical axis starts.

    `frames` has the lines' figures y of other moments by name, such as training steps, between which a slider called `over` moves;
    `lines` is then the last of them.
    """

    title: str
    x: str
    y: str
    lines: Sequence[Line]
    meaning: str = ""
    log: bool = True
    log_x: bool = False
    frames: Mapping[str, Sequence[Sequence[float | None]]] = dataclasses.field(default_factory=dict)
    over: str = "Moment"


@dataclasses.dataclass(frozen=True)
class Words:
    """A paragraph; `lines` below it are shown as they are."""

    text: str
    lines: Sequence[str] = ()


@dataclasses.dataclass(frozen=True)
class Token:
    """A token's text on a colour, and its figure in words."""

    text: str
    colour: str
    figure: str


@dataclasses.dataclass(frozen=True)
class ColouredText:
    """Tokens one after the other."""

    title: str
    tokens: Sequence[Token]
    meaning: str = ""


@dataclasses.dataclass(frozen=True)
class Chapter:
    """A heading and what stands below it; `folded` is shown when asked for."""

    title: str
    parts: Sequence[Words | Sheet | Diagram | ColouredText]
    folded: bool = False


@dataclasses.dataclass(frozen=True)
class Page:
    """A page: what was asked, in a title and a line, chapters with the verdicts first, and the results that it was made of."""

    title: str
    asked: str
    chapters: Sequence[Chapter]
    results: Mapping[str, Any]


def number(value: Any) -> float | None:
    """A JSON value as a number: "inf", "-inf" and "nan" are texts there; None for what is none."""
    if isinstance(value, bool) or value is None:
        return None
    try:
        return float(value)
    except (TypeError, ValueError):
        return None


def numbers(values: Sequence[Any]) -> list[float | None]:
    """Each of them so."""
    return [number(value) for value in values]


def cell(value: Any, mark: Mark = "") -> Cell:
    """A JSON value as a cell: numbers in three digits, truths as yes and no, lists with commas, nothing as a dash."""
    if isinstance(value, bool):
        return Cell("yes" if value else "no", float(value), mark)
    known = number(value)
    if known is not None and not isinstance(value, str):
        return Cell(digits(known), known, mark)
    if known is not None and value in ("inf", "-inf", "nan"):
        return Cell({"inf": "∞", "-inf": "−∞"}.get(value, "not a number"), known if value != "nan" else None, mark)
    if value is None or value == "":
        return Cell("–", None, mark)
    if isinstance(value, (list, tuple)):
        return Cell(", ".join(cell(each).text for each in value), None, mark)
    if isinstance(value, Mapping):
        return Cell(", ".join(f"{name}: {cell(each).text}" for name, each in value.items()), None, mark)
    return Cell(str(value), None, mark)


def digits(value: float) -> str:
    """Three significant digits; whole numbers whole."""
    if math.isinf(value):
        return "∞" if value > 0 else "−∞"
    if math.isnan(value):
        return "not a number"
    if value == int(value) and abs(value) < 1e6:
        return f"{int(value):,}"
    text = f"{value:.3g}"
    return f"{value:.1e}" if "e" in text else text
