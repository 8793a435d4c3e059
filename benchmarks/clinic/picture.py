"""The picture of the clinic's table: shares with their 95% intervals, and what the issue asked
for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from benchmarks.clinic.judging import wilson
from benchmarks.clinic.report import (
    fault_of,
    first,
    found,
    loud,
    needs_cure,
    outcome_of,
    placed,
    share,
)

Row = Mapping[str, Any]
COLOURS = {"model": "#4477aa", "training": "#ee6677"}


def measures(rows: Sequence[Row]) -> list[tuple[str, str, int, int, float]]:
    """Name, kind, hits, number and target of each share; misses first."""
    made = []
    for kind in COLOURS:
        own = [
            row
            for row in rows
            if row["fault"] and row["kind"] == kind and row["ending"] != "does not fit"
        ]
        told = [row for row in own if found(row) and row["arms"] and needs_cure(row)]
        placeable = [row for row in own if fault_of(row).place and found(row)]
        outcomes = [outcome_of(row, "advice") for row in told]
        healthy = [row for row in rows if not row["fault"]]
        alarmed = [row for row in healthy if loud(row["findings" if kind == "model" else "alarms"])]
        made += [
            ("not found", kind, sum(not found(row) for row in own), len(own), 0.03),
            ("right cause not first", kind, sum(not first(row) for row in own), len(own), 0.15),
            (
                "wrong place, of those found",
                kind,
                sum(not placed(row) for row in placeable),
                len(placeable),
                0.10,
            ),
            (
                "not healed by the advice, of those found",
                kind,
                len(outcomes) - outcomes.count("healed"),
                len(outcomes),
                0.20,
            ),
            (
                "harmed by the advice, of those found",
                kind,
                outcomes.count("harm"),
                len(outcomes),
                0.01,
            ),
            ("healthy, and an alarm above note", kind, len(alarmed), len(healthy), 0.02),
        ]
    return sorted(made, key=lambda each: [name for name, *_ in made].index(each[0]))


def draw(rows: Sequence[Row], path: Path, title: str) -> None:
    """Writes the picture."""
    figure = Figure(figsize=(9, 4.6), layout="constrained")
    axes = figure.subplots()
    made = measures(rows)
    names = list(dict.fromkeys(name for name, *_ in made))
    for name, kind, hits, of, target in made:
        y = names.index(name) + (0.18 if kind == "training" else -0.18)
        low, high = wilson(hits, of)
        at = hits / max(1, of)
        errors = [[100 * max(0.0, at - low)], [100 * max(0.0, high - at)]]
        axes.errorbar(
            [100 * at],
            [y],
            xerr=errors,
            fmt="o",
            color=COLOURS[kind],
            capsize=3,
            label=f"faults of {kind}s",
        )
        axes.text(101, y, share(hits, of).split(" (")[0], va="center", fontsize=8)
        axes.plot(
            [100 * target] * 2,
            [names.index(name) - 0.35, names.index(name) + 0.35],
            color="0.3",
            linewidth=1,
        )
    axes.plot([], [], color="0.3", linewidth=1, label="most that the trial asked for")
    axes.set(
        yticks=range(len(names)),
        yticklabels=names,
        xlim=(-2, 100),
        xlabel="share in %, with 95% intervals",
        title=title,
    )
    axes.invert_yaxis()
    handles, labels = axes.get_legend_handles_labels()
    axes.legend(
        *zip(
            *dict(zip(labels, zip(handles, labels, strict=True), strict=True)).values(), strict=True
        ),
        loc="lower right",
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
