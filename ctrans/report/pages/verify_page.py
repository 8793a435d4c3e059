"""What `ctrans verify` shows: every statement of the theory, and whether it holds as printed."""

from __future__ import annotations

from collections import Counter
from typing import Any

from ctrans.base.theory_sections import SECTIONS
from ctrans.report.sections import (
    Answer,
    Cell,
    Chapter,
    Column,
    Findings,
    JSONObject,
    Mark,
    Table,
    table,
)

MARKS: dict[str, Mark] = {
    "as printed": "good",
    "sharpened": "good",
    "corrected": "note",
    "new": "good",
    "violated": "bad",
}
FEW = 12
"""A terminal lists up to so many statements one by one; --verbose lists more."""
VERDICT = Column(
    "verdict",
    "as printed: the source's form holds; corrected: it fails and another form holds; sharpened: it"
    " holds, and so does a stronger form; new: no source states it; violated: a form that should"
    " hold does not",
)
COLUMNS = (
    "statement",
    VERDICT,
    "what holds",
    Column("source", detail=True),
    Column("printed form", "as the source prints it", detail=True),
    Column("fate of the printed form", detail=True),
    Column(
        "reached",
        "the worst case: measured/bound − 1 for a bound, so that −0.1 is 10% of slack; a relative"
        " difference for an equality; how far a slope, order or mean lies outside its range,"
        " negative inside",
    ),
    "cases",
    Column("seconds", detail=True),
)


def chapters(models: JSONObject, result: JSONObject) -> list[Chapter]:
    """How many statements hold, by section; then every statement."""
    several = len(models) > 1
    statements = [
        (f"{name}: {key}" if several else key, found)
        for name, each in models.items()
        for key, found in each["statements"].items()
    ]
    found = [finding for each in models.values() for finding in each.get("findings") or []]
    sections = list(dict.fromkeys(each["section"] for _, each in statements))
    tables = [
        table(
            COLUMNS,
            [_row(name, each) for name, each in statements if each["section"] == k],
            f"{k}. {SECTIONS[k]}",
        )
        for k in sections
    ]
    return [
        Chapter("Summary", [_answer(statements), _by_section(statements)]),
        Chapter("Violated", [Findings(found)]),
        Chapter("Statements", tables, folded=len(statements) > FEW),
    ]


def _answer(statements: list[tuple[str, Any]]) -> Answer:
    counts = Counter(each["verdict"] for _, each in statements)
    many = f"{len(statements)} statement{'s' * (len(statements) != 1)}"
    words = ", ".join(f"{count} {verdict}" for verdict, count in counts.items())
    seconds = sum(each["seconds"] for _, each in statements)
    if counts["violated"]:
        names = ", ".join(name for name, each in statements if each["verdict"] == "violated")
        return Answer(f"{counts['violated']} of {many} did not hold: {names}.", "bad")
    return Answer(
        f"No counterexample was found to any of {many} ({words}; {seconds:.0f} s). This is no proof"
        " of them.",
        "good",
    )


def _by_section(statements: list[tuple[str, Any]]) -> Table:
    verdicts = [
        verdict for verdict in MARKS if any(each["verdict"] == verdict for _, each in statements)
    ]
    rows = []
    for k in dict.fromkeys(each["section"] for _, each in statements):
        counts = Counter(each["verdict"] for _, each in statements if each["section"] == k)
        cells = (
            Cell(str(counts[v] or "–"), float(counts[v]), MARKS[v] if v == "violated" else "")
            for v in verdicts
        )
        rows.append([f"{k}. {SECTIONS[k]}", *cells])
    meanings = dict(part.split(": ", 1) for part in VERDICT.meaning.split("; "))
    return table(["section", *(Column(v, meanings.get(v, "")) for v in verdicts)], rows)


def _row(name: str, each: JSONObject) -> list[Any]:
    seed = each["seed"]
    if seed is None or not each["printed"]:
        fate = None
    elif seed["holds"]:
        fate = "holds"
    else:
        fate = f"fails: {seed['words']}"
    verdict = Cell(each["verdict"], mark=MARKS[each["verdict"]])
    found = each["corrected"]
    return [
        *(name, verdict, each["says"], each["source"], each["printed"], fate),
        *(found["excess"], found["cases"], each["seconds"]),
    ]
