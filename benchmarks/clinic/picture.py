"""The picture of the second trial: shares with their 95% intervals, what was asked for, and what
other tools found of the same patients.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from benchmarks.clinic import second_judging as judge
from benchmarks.clinic.judging import wilson
from benchmarks.clinic.peer_report import peer_shares
from benchmarks.clinic.report import loud
from benchmarks.clinic.second_report import controls, needing, of_kind

Row = Mapping[str, Any]
COLOURS = {"model": "#4477aa", "training": "#ee6677"}


@dataclasses.dataclass(frozen=True)
class Point:
    """A share of the patients of a kind. `target` is what the trial asked for, None without one."""

    name: str
    kind: str
    hits: int
    of: int
    target: float | None = None


def points(rows: Sequence[Row], of_peers: Sequence[Row]) -> list[Point]:
    made = []
    for kind, said in (("model", "findings"), ("training", "alarms")):
        sick = of_kind(needing(rows), kind)
        told = [row for row in sick if judge.found(row)]
        healthy = controls(rows)
        made += [
            Point("found", kind, sum(map(judge.found, sick)), len(sick), 0.9),
            Point("right cause first", kind, sum(map(judge.cause_first, sick)), len(sick), 0.8),
            Point("healed, of those found", kind, sum(map(judge.healed, told)), len(told), 0.8),
            Point("harmed, of those found", kind, sum(map(judge.harmed, told)), len(told), 0.01),
            Point(
                "healthy, and something above note",
                kind,
                sum(loud(row[said]) for row in healthy),
                len(healthy),
                0.02,
            ),
        ]
    made += [
        Point(f"found by {share.peer}", share.kind, share.hits, share.of)
        for share in peer_shares(rows, of_peers)
    ]
    return made


def draw(rows: Sequence[Row], of_peers: Sequence[Row], path: Path) -> None:
    """Writes the picture."""
    figure = Figure(figsize=(9, 5), layout="constrained")
    axes = figure.subplots()
    made = points(rows, of_peers)
    names = list(dict.fromkeys(point.name for point in made))
    for point in made:
        y = names.index(point.name) + (0.18 if point.kind == "training" else -0.18)
        low, high = wilson(point.hits, point.of)
        at = point.hits / max(1, point.of)
        axes.errorbar(
            [100 * at],
            [y],
            xerr=[[100 * max(0.0, at - low)], [100 * max(0.0, high - at)]],
            fmt="o",
            color=COLOURS[point.kind],
            capsize=3,
            label=f"faults of {point.kind}s",
        )
        axes.text(101, y, f"{point.hits} of {point.of}", va="center", fontsize=8)
        if point.target is not None:
            line = [names.index(point.name) - 0.35, names.index(point.name) + 0.35]
            axes.plot([100 * point.target] * 2, line, color="0.3", linewidth=1)
    axes.plot([], [], color="0.3", linewidth=1, label="what the trial asked for")
    axes.set(
        yticks=range(len(names)),
        yticklabels=names,
        xlim=(-2, 100),
        xlabel="share in %, with 95% intervals",
        title="Sealed faults that need a fix, in small Transformers",
    )
    axes.invert_yaxis()
    labelled = dict(zip(*axes.get_legend_handles_labels()[::-1], strict=True))
    figure.legend(labelled.values(), labelled.keys(), loc="outside lower center", ncols=3)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
