"""The page of `ctrans families`: what is known of each family of models, and what is not and why."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ctrans.report.sections import Cell, Chapter, Column, Table, Words, cell

COLUMNS = (
    Column("family", "the name in a config's model_type"),
    Column("reads"),
    Column("placement", "where norms act; dt are the lengths of its steps where they are not 1"),
    Column("norm"),
    Column("attention"),
    Column("FFN"),
    Column("at once", "whether attention and FFN act at once, as one segment"),
    Column("theta", "whether attention's scores and heads are known, of which Emadi's bounds are"),
    Column("bound", "whether it is known how large each map can be"),
    Column("weights", "whether each map's matrices are known, of which statements on initialisation are"),
    Column("last", "whether each map ends in a known linear map, of which Hamiltonians over weights and growth laws are"),
)
KNOWN = ("theta", "bounds", "matrices", "last")


def chapters(models: Mapping[str, Any], result: Mapping[str, Any]) -> list[Chapter]:
    """All families in one table; what is not known, and what is refused, in words."""
    supported = sum(bool(each["supported"]) for each in models.values())
    said = Words(f"{supported} of {len(models)} families are opened; the others are refused by name.")
    why = [[Cell(name), Cell(text)] for name, each in models.items() for text in _why(each)]
    unknown = Table("", [Column("family"), Column("why")], why)
    table = Table("", COLUMNS, [_row(name, each) for name, each in models.items()])
    return [
        Chapter("What is known", [said, table]),
        *([Chapter("What is not known, and why", [unknown], folded=True)] if why else []),
    ]


def _row(name: str, each: Mapping[str, Any]) -> list[Cell]:
    if not each["supported"]:
        return [Cell(name), cell(each["reads"]), Cell("refused", mark="bad"), *[cell(None)] * (len(COLUMNS) - 3)]
    lengths = [length for length in each["lengths"] if length != 1]
    placement = f"{each['placement']}{f', dt {cell(lengths).text}' if lengths else ''}"
    known = [cell(each[key], "" if each[key] else "note") for key in KNOWN]
    return [
        Cell(name),
        cell(each["reads"]),
        Cell(placement),
        *(cell(each[key]) for key in ("norm", "attention", "ffn", "parallel")),
        *known,
    ]


def _why(each: Mapping[str, Any]) -> list[str]:
    return [str(text) for text in each["unread"]] if each["supported"] else [f"refused: {each['refused']}"]
