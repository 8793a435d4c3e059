"""A page on which no description and no finding stands twice.

The chapters of a command describe each table and chart by itself, as a terminal shows them. A page
shows them all together, so it says each thing where it first stands.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from ctrans.measure.findings import SEVERITIES
from ctrans.report.sections import (
    Cell,
    Chapter,
    Column,
    Findings,
    JSONObject,
    Page,
    Plot,
    Section,
    Table,
    finding_rows,
)

ABOVE = Cell("above")
"""Stands for a description that the page has already."""
OF_PLACES = ("where", "also")
"""Parts of a finding that say where it is, after the model's name."""


@dataclass(frozen=True)
class Card:
    """A finding, once for all models that have it: `rows` has lines of text by what they say."""

    check: str
    severity: str
    rows: Mapping[str, Sequence[str]]


@dataclass(frozen=True)
class Cards:
    """The findings of a chapter, the most severe first, and of which models some are left out."""

    cards: Sequence[Card]
    left_out: Sequence[str] = ()


@dataclass(frozen=True)
class ShownTable:
    """A table, and those meanings of its columns that stand nowhere above it: by what they mean,
    the names of the columns.
    """

    table: Table
    meanings: Mapping[str, Sequence[str]]


@dataclass(frozen=True)
class ShownPlot:
    """A chart, and its description, which is empty where it stands above."""

    plot: Plot
    meaning: str


PagePart = Section | Cards | ShownTable | ShownPlot


def parts_of(page: Page) -> list[list[PagePart]]:
    """The parts of each chapter, without what the page has said before."""
    said: set[str] = set()
    return [list(_parts_of(chapter, said)) for chapter in page.chapters]


def _parts_of(chapter: Chapter, said: set[str]) -> Iterable[PagePart]:
    findings = [part for part in chapter.parts if isinstance(part, Findings)]
    for part in chapter.parts:
        if isinstance(part, Findings):
            if part is findings[0]:
                left_out = [part.heading for part in findings if part.left_out]
                yield Cards(cards_of(findings), left_out)
        elif isinstance(part, Table):
            table = _without(part, said)
            yield ShownTable(table, _meanings(table, said))
        elif isinstance(part, Plot):
            meaning = "" if part.meaning in said else part.meaning
            said.add(part.meaning)
            yield ShownPlot(part, meaning)
        else:
            yield part


def _without(table: Table, said: set[str]) -> Table:
    """The table, where cells with a description that stands above say so."""
    describing = [k for k, column in enumerate(table.columns) if column.descriptions]
    rows = []
    for row in table.rows:
        cells = list(row)
        for k in describing:
            if cells[k].text in said:
                cells[k] = ABOVE
            elif cells[k].text != "–":
                said.add(cells[k].text)
        rows.append(cells)
    return replace(table, rows=rows)


def _meanings(table: Table, said: set[str]) -> dict[str, list[str]]:
    """The columns' meanings that stand nowhere above, each with the names of its columns."""
    meanings: dict[str, list[str]] = {}
    described = [column for column in table.all_columns if column.legend]
    for column in described:
        if _description(column) not in said:
            meanings.setdefault(column.legend, []).append(column.name)
    said.update(map(_description, described))
    return meanings


def _description(column: Column) -> str:
    return column.meaning or column.symbol


def cards_of(findings: Sequence[Findings]) -> list[Card]:
    """A card for each finding. One that several models have is one card, and says what differs by
    model.
    """
    groups: dict[tuple[object, ...], list[tuple[str, Mapping[str, str]]]] = {}
    for part in findings:
        earlier: Counter[tuple[object, ...]] = Counter()  # a model may have a finding several times
        for finding in part.findings:
            rows = _rows_of(finding, part.title)
            said = [rows.get(name) for name in ("limit", "impact", "fix")]
            kind = (finding["check"], finding["severity"], *said)
            groups.setdefault((*kind, earlier[kind]), []).append((part.title, rows))
            earlier[kind] += 1
    cards = [
        Card(str(check), str(severity), _merged(of_models))
        for (check, severity, *_), of_models in groups.items()
    ]
    return sorted(cards, key=_severity)


def _severity(card: Card) -> int:
    order: Sequence[str] = SEVERITIES
    return order.index(card.severity) if card.severity in order else 0


def _rows_of(finding: JSONObject, model: str) -> dict[str, str]:
    """The finding in words, its places without the model's name."""
    rows = finding_rows(finding)
    for name in OF_PLACES:
        if model and name in rows:
            rows[name] = rows[name].replace(f"{model}, ", "")
    return rows


def _merged(of_models: Sequence[tuple[str, Mapping[str, str]]]) -> dict[str, list[str]]:
    """Lines of text by what they say: one line where all models have the same, else one for each
    text, with the models that have it.
    """
    merged: dict[str, list[str]] = {}
    models = list(dict.fromkeys(model for model, _ in of_models if model))
    if models:
        merged["model" if len(models) == 1 else "models"] = ["; ".join(models)]
    for name in dict.fromkeys(name for _, rows in of_models for name in rows):
        models_of: dict[str, list[str]] = {}
        for model, rows in of_models:
            models_of.setdefault(rows.get(name, ""), []).append(model)
        if len(models_of) == 1 or len(models) < 2:
            merged[name] = list(filter(None, models_of))
        else:
            merged[name] = [
                f"{'; '.join(having)}: {text}" for text, having in models_of.items() if text
            ]
    return merged
