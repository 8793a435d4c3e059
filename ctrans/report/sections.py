"""How a command's result is shown: an answer, then chapters of words, tables, charts and findings.

A command describes its result once, as these values. `terminal`, `picture` and `html` render them.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from ctrans.base.printable import printable
from ctrans.measure.findings import SEVERITY_MARKS as SEVERITY_MARKS
from ctrans.measure.findings import Mark as Mark
from ctrans.measure.findings import in_words
from ctrans.measure.measured import Answer as Answer
from solvers import AnyFloat, ConfigError, shown

JSONObject = Mapping[str, Any]
"""An object of a command's JSON."""
MOST_FINDINGS = 1_000
"""At most so many findings are shown together; the JSON has all."""
EMPTY = ("–", "")
"""Texts of cells in which there is nothing."""


@dataclass(frozen=True)
class Cell:
    """A table's cell. `value` is what it is sorted by; without one it is sorted by its text."""

    text: str
    value: AnyFloat | None = None
    mark: Mark = ""

    def __post_init__(self) -> None:
        if not isinstance(self.text, str):
            raise ValueError(f"{self.text!r} is no text")


@dataclass(frozen=True)
class Column:
    """A column's heading in words, what its figures mean, and their formula.

    A terminal shows the formula, and a column that is a `detail`, with --verbose only. The cells of
    a column of `descriptions` are descriptions: a page leaves out those that stand above.
    """

    name: str
    meaning: str = ""
    symbol: str = ""
    detail: bool = False
    descriptions: bool = False

    @property
    def legend(self) -> str:
        """Meaning and formula."""
        return "; ".join(filter(None, (self.meaning, self.symbol)))


@dataclass(frozen=True)
class Table:
    """A table. Without --verbose a terminal shows about `rows_shown` of its rows, evenly spread; 0
    is all of them.

    With `alternate` it shows rows of two kinds that take turns, such as attention and FFN.
    """

    title: str
    columns: Sequence[Column]
    rows: Sequence[Sequence[Cell]]
    meaning: str = ""
    rows_shown: int = 0
    alternate: bool = False

    @property
    def all_columns(self) -> Sequence[Column]:
        """The columns in which some row has something."""
        of_both_kinds = (False, True)
        return self.only(*of_both_kinds).columns

    def only(self, *details: bool) -> Table:
        """The first column, and of those that are a detail or not, as asked, the ones in which some
        row has something.
        """
        chosen = [
            k
            for k, column in enumerate(self.columns)
            if k == 0
            or (column.detail in details and any(row[k].text not in EMPTY for row in self.rows))
        ]
        rows = [[row[k] for k in chosen] for row in self.rows]
        return replace(self, columns=[self.columns[k] for k in chosen], rows=rows)


@dataclass(frozen=True)
class Line:
    """A model's figures along a chart's axis. A `bound` is what theory allows, not what was
    measured.

    `low` and `high` are the ends of an interval around each figure. `shade` gives each point of a
    chart of points its colour. A `placement` that is None means that the line is no model: it gets
    a colour of its own. A bound that is `predicted` is no bound but a slope that theory says. A
    `local` line is no model but a part of this chart alone, such as a check.
    """

    model: str
    x: Sequence[AnyFloat]
    y: Sequence[AnyFloat | None]
    placement: str | None = None
    bound: bool = False
    predicted: bool = False
    local: bool = False
    low: Sequence[AnyFloat | None] = ()
    high: Sequence[AnyFloat | None] = ()
    shade: Sequence[AnyFloat] = ()

    def __post_init__(self) -> None:
        figures = [
            *self.x,
            *self.shade,
            *(value for value in (*self.y, *self.low, *self.high) if value is not None),
        ]
        are_numbers = all(isinstance(figure, (int, float)) for figure in figures)
        if len(self.x) != len(self.y) or not are_numbers:
            raise ConfigError(f"{self.model}: a line needs a number for each place")
        if not isinstance(self.placement, str | None):
            raise ConfigError(f"{self.model}: {shown(self.placement)} is no placement")


@dataclass(frozen=True)
class Plot:
    """Figures against depth, or against what `x` says in words with its unit. `log` is how the
    vertical axis starts.

    - `kind`: "lines", "bars" or "points"
    - `frames`: the lines' figures y at other moments by name, such as training steps. On a page a
      slider called `over` moves between them, and a picture shows moment against x as a map.
      `lines` is the last moment.
    - `events`: vertical lines, each with its place and a word, such as an alarm
    - `limits`: below the first and above the second a figure is outside of its limits. A map shows
      that by its colours.
    """

    title: str
    x: str
    y: str
    lines: Sequence[Line]
    meaning: str = ""
    log: bool = True
    log_x: bool = False
    kind: Literal["lines", "bars", "points"] = "lines"
    frames: Mapping[str, Sequence[Sequence[AnyFloat | None]]] = field(default_factory=dict)
    over: str = "Moment"
    events: Sequence[tuple[AnyFloat, str]] = ()
    limits: tuple[float | None, float | None] = (None, None)

    @property
    def signed(self) -> bool:
        """Whether some figure is below 0, so that a logarithmic axis cannot show it."""
        return any(value < 0 for line in self.lines for value in line.y if value is not None)


@dataclass(frozen=True)
class Words:
    """A paragraph, and a list of `lines` below it."""

    text: str
    lines: Sequence[str] = ()


@dataclass(frozen=True)
class Token:
    """A token's text on a colour, and its figure in words."""

    text: str
    colour: str
    figure: str


@dataclass(frozen=True)
class ColouredText:
    """Tokens in their order."""

    title: str
    tokens: Sequence[Token]
    meaning: str = ""


@dataclass(frozen=True)
class Findings:
    """Findings of a model as JSON objects, the most severe first; `title` names the model where
    there are several. Of more than `MOST_FINDINGS` it has the first, and `left_out` says so.
    """

    findings: Sequence[JSONObject]
    title: str = ""
    left_out: str = ""

    def __post_init__(self) -> None:
        if len(self.findings) > MOST_FINDINGS:
            left_out = f"the first {MOST_FINDINGS:,} of {len(self.findings):,}; the JSON has all"
            object.__setattr__(self, "left_out", left_out)
            object.__setattr__(self, "findings", self.findings[:MOST_FINDINGS])
        for finding in self.findings:
            finding_rows(finding)  # raises for figures of another type
            if not isinstance(finding["severity"], str):
                raise ValueError(f"{finding['severity']!r} is no severity")

    @property
    def heading(self) -> str:
        """The model, where there are several, and what was left out."""
        return ": ".join(filter(None, (self.title, self.left_out)))


Section = Answer | Words | Table | Plot | ColouredText | Findings


@dataclass(frozen=True)
class Chapter:
    """A heading and its parts. A `folded` chapter is closed on a page, and a terminal shows it with
    --verbose only. A terminal shows a `glossary`, which says what words and figures mean, with
    --explain only.

    `picture` names the PNG file, without its suffix, that holds the chapter's charts.
    """

    title: str
    parts: Sequence[Section]
    folded: bool = False
    glossary: bool = False
    picture: str = ""

    @property
    def charts(self) -> list[Plot]:
        """The charts among its parts."""
        return [part for part in self.parts if isinstance(part, Plot)]

    @property
    def shown(self) -> Chapter:
        """The chapter without parts that have nothing to show."""
        return replace(self, parts=[part for part in self.parts if _has_content(part)])


def _has_content(part: Section) -> bool:
    if isinstance(part, Table):
        return bool(part.rows)
    if isinstance(part, Plot):
        return any(line.y for line in part.lines)
    return not isinstance(part, Findings) or bool(part.findings)


@dataclass(frozen=True)
class Page:
    """A title, a line on what was looked at, chapters with the answer first, and the results that
    they were made of.
    """

    title: str
    subject: str
    chapters: Sequence[Chapter]
    results: JSONObject

    @property
    def answers(self) -> list[Answer]:
        """The answer of each command, in the order of the chapters."""
        return [
            part for chapter in self.chapters for part in chapter.parts if isinstance(part, Answer)
        ]


def decoded(value: Any) -> Any:
    """A JSON value with numbers in the place of the texts "inf", "-inf" and "nan" and with all
    other text `printable`, also inside of lists and objects. Whole numbers beyond float are
    infinite.
    """
    if isinstance(value, Mapping):
        return {printable(str(name)): decoded(entry) for name, entry in value.items()}
    if isinstance(value, list):
        return [decoded(entry) for entry in value]
    if isinstance(value, int) and abs(value) > sys.float_info.max:
        if value > 0:
            return math.inf
        return -math.inf
    if not isinstance(value, str):
        return value
    if value in ("inf", "-inf", "nan"):
        return float(value)
    return printable(value)


def finite(values: Sequence[AnyFloat | None] | None) -> list[float]:
    """The values that are finite numbers."""
    if values is None:
        return []
    return [value for value in values if value is not None and math.isfinite(value)]


def percent(value: AnyFloat | None) -> str:
    """A share as a percentage, as a multiple where it is large, or a dash."""
    if value is None:
        return "–"
    if value < 10:
        return f"{float(value):.0%}"
    return f"{float(value):.1g}x"


def cell(value: Any, mark: Mark = "") -> Cell:
    """A JSON value as a cell: numbers in three digits, truths as yes and no, lists with commas,
    nothing as a dash. A cell stays as it is.
    """
    if isinstance(value, Cell):
        return value
    value = decoded(value)
    if isinstance(value, bool):
        return Cell("yes" if value else "no", float(value), mark)
    if isinstance(value, (int, float)):
        sorted_by = None if math.isnan(value) else float(value)
        return Cell(digits(value), sorted_by, mark)
    if value is None or (isinstance(value, str) and not value):
        return Cell("–", None, mark)
    if isinstance(value, (list, tuple)):
        return Cell(", ".join(cell(entry).text for entry in value), None, mark)
    if isinstance(value, Mapping):
        entries = (f"{name}: {cell(entry).text}" for name, entry in value.items())
        return Cell(", ".join(entries), None, mark)
    return Cell(str(value), None, mark)


def table(
    columns: Iterable[Any],
    rows: Iterable[Iterable[Any]],
    title: str = "",
    meaning: str = "",
    **more: Any,
) -> Table:
    """A table of JSON values and cells. A column of which nothing is to be said is its name.
    `more` are further fields of `Table`.
    """
    headings = [Column(column) if isinstance(column, str) else column for column in columns]
    cells = [[cell(value) for value in row] if isinstance(row, Iterable) else row for row in rows]
    return Table(title, headings, cells, meaning, **more)


def digits(value: AnyFloat) -> str:
    """Three significant digits; whole numbers whole."""
    if math.isinf(value):
        if value > 0:
            return "∞"
        return "−∞"
    if math.isnan(value):
        return "not a number"
    if value == int(value) and abs(value) < 1e6:
        return f"{int(value):,}"
    value = float(value)
    text = f"{value:.3g}"
    if "e" in text:
        return f"{value:.1e}"
    return text


def mark_of(findings: Sequence[JSONObject]) -> Mark:
    """The mark of several findings together: that of the most severe."""
    if any(finding["severity"] != "note" for finding in findings):
        return "bad"
    if findings:
        return "note"
    return "good"


OPTIONAL: dict[str, Any] = {
    "places": [],
    **dict.fromkeys(("step", "since", "doubling", "crossing", "seen", "texts", "values")),
}
"""Fields that not every finding has."""


def finding_rows(finding: JSONObject) -> dict[str, str]:
    """A finding in words, by what each line says."""
    try:
        return in_words({**OPTIONAL, **finding})
    except (KeyError, TypeError, ValueError, AttributeError):
        raise ConfigError(
            f"finding = {shown(finding)} is no finding of a ctrans command: give one of its results"
        ) from None
