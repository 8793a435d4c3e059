"""What `ctrans families` shows: what is known of each family of models, and what is not and why."""

from __future__ import annotations

import operator
from typing import Any

from ctrans.report.sections import Answer, Cell, Chapter, Column, JSONObject, Words, table

COLUMNS = (
    Column("family", "the name in a config's model_type"),
    "reads",
    Column(
        "placement",
        "where norms act; `at once`: attention and FFN as one step; dt: lengths of its steps where"
        " they are not 1",
    ),
    Column(
        "scores known",
        "whether attention's scores and heads are known, which Emadi's bounds need",
        "theta",
    ),
    Column("size known", "whether it is known how large each map's output can be", "bound"),
    Column(
        "weights known",
        "whether each map's matrices are known, which statements on initialisation need",
    ),
    Column(
        "last map known",
        "whether each map ends in a known linear map, which Hamiltonians over weights and growth"
        " laws need",
    ),
    Column("norm", detail=True),
    Column("attention", detail=True),
    Column("FFN", detail=True),
)
KNOWN = ("theta", "bounds", "matrices", "last")


models = operator.itemgetter("families")


def chapters(models: JSONObject, result: JSONObject) -> list[Chapter]:
    """All families in one table; what is not known, and which cannot be opened, in words."""
    asked = bool((result.get("options") or {}).get("names"))
    opened = {name: each for name, each in models.items() if each["supported"]}
    refused = [
        Words(f"{name}: refused. {each['refused']}")
        for name, each in models.items()
        if not each["supported"]
    ]
    details = [
        Words(f"{name}: {_parts(each)}", [f"not known: {why}" for why in each["unread"]])
        for name, each in opened.items()
    ]
    answer = Answer(
        f"ctrans opens {len(opened)} of {len(models)} families.", "good" if opened else "note"
    )
    return [
        Chapter(
            "Families",
            [answer, table(COLUMNS, [_row(name, each) for name, each in models.items()])],
        ),
        Chapter("Cannot be opened", refused),
        Chapter("What each is made of, and what is not known", details, folded=not asked),
    ]


def _parts(each: JSONObject) -> str:
    maps = " and ".join(
        name for name in (each["attention"], each["ffn"]) if name and name != "none"
    )
    return (
        f"{each['opened']}, {maps}{' at once, as one segment' if each['parallel'] else ''},"
        f" {each['norm']}"
    )


def _row(name: str, each: JSONObject) -> list[Any]:
    if not each["supported"]:
        return [name, each["reads"], Cell("refused", mark="bad"), *[None] * (len(COLUMNS) - 3)]
    lengths = "".join(f" dt {length:g}" for length in each["lengths"] if each["lengths"] != [1.0])
    placement = f"{each['placement'] or ''}{' at once' if each['parallel'] else ''}{lengths}"
    known = [Cell("yes" if each[key] else "no", mark="" if each[key] else "note") for key in KNOWN]
    return [
        name,
        each["reads"],
        Cell(placement),
        *known,
        each["norm"],
        each["attention"],
        each["ffn"],
    ]
