"""How predictions are shown beside what training gave."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure
from rich import box
from rich.table import Table

from benchmarks.prediction.evaluation import FACTOR, OUTCOMES, PREDICTED, Evaluated, WithinPlacement

STRONGEST = 8
"""Figures that a table shows for each outcome, besides the baselines."""
WITHIN = 5
"""Figures that are shown for each placement alone."""
NAMED = 6
"""Points of the picture that have their family's name beside them."""
COLOURS = ("#332288", "#88ccee", "#117733", "#ddcc77", "#882255", "#44aa99", "#aa4499", "0.5")
"""By table (Paul Tol's "muted")."""


def a_table(title: str, *columns: str) -> Table:
    """A table with that title, its first column to the left."""
    table = Table(title=title, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    table.title_style, table.title_justify = "bold", "left"
    for i, name in enumerate(columns):
        table.add_column(name, justify="left" if i == 0 else "right", no_wrap=i > 0)
    return table


def shown(value: float | None, digits: int = 4) -> str:
    """The number with so many digits, a dash where it is not known."""
    return "–" if value is None or math.isnan(value) else f"{value:.{digits}g}"


def correlations_table(title: str, found: Evaluated) -> Table:
    """For each outcome the predictor, the figures that order best, and all baselines."""
    table = a_table(
        f"Spearman's rho, {title}", "outcome", "figure", "architectures", "rho", "95%", ""
    )
    for outcome in OUTCOMES:
        mine = [
            each
            for each in found.correlations
            if each.outcome == outcome and not math.isnan(each.rho)
        ]
        mine.sort(key=lambda each: (each.figure != PREDICTED, each.baseline, -abs(each.rho)))
        plain = [each for each in mine if not each.baseline][: STRONGEST + 1]
        for each in plain + [each for each in mine if each.baseline]:
            interval = f"{shown(each.low, 2)} to {shown(each.high, 2)}"
            table.add_row(
                outcome,
                each.figure,
                str(each.count),
                shown(each.rho, 2),
                interval,
                "baseline" if each.baseline else "",
            )
    return table


def within_table(found: Sequence[WithinPlacement]) -> Table:
    """For each placement the figures that order its architectures in both parts, the strongest
    first.
    """
    parts = list(found[0].parts)
    columns = [text for part in parts for text in (f"rho, {part}", "of")]
    table = a_table("largest stable rate within one placement", "placement", "figure", *columns)
    for placement in dict.fromkeys(each.placement for each in found):
        for each in [each for each in found if each.placement == placement][:WITHIN]:
            cells = [
                text
                for part in parts
                for text in (shown(each.parts[part].rho, 2), str(each.parts[part].count))
            ]
            table.add_row(json.loads(placement), each.parts[parts[0]].figure, *cells)
    return table


def calibration_words(found: Evaluated) -> str:
    """How far off predicted rates are."""
    worst = sorted(found.families.items(), key=lambda each: -abs(each[1]))[:3]
    names = ", ".join(
        f"{family} ({10**error:.2g} times)" for family, error in worst if not math.isnan(error)
    )
    alike = ", ".join(
        f"{json.loads(placement)} {shown(each.rho, 2)} ({each.count})"
        for placement, each in found.by_placement.items()
        if not math.isnan(each.rho)
    )
    nothing = (
        f" {len(found.unlearned)} more learned nothing at any rate, and are left out."
        if found.unlearned
        else ""
    )
    return (
        f"Predicted largest stable rates are within a factor of {FACTOR:g} for {found.within:.0%}"
        f" of the architectures, and {found.covered:.0%} of the measured ones are in the interval."
        f" The median rate of its placement is within the factor for {found.usual:.0%}, that of pre"
        f" for {found.always_pre:.0%}. Deviation: a factor of {10**found.deviation:.2g}. Within one"
        f" placement rho is: {alike or 'unknown'}. Farthest off: {names}.{nothing}"
    )


def prediction_figure(found: Evaluated) -> Figure:
    """Measured against predicted largest stable rates, a colour for each table that families are
    from; grey within the factor, and the `NAMED` families that are farthest off by name.
    """
    figure = Figure(figsize=(7.5, 5.2), layout="constrained")
    axes = figure.subplots()
    groups = list(dict.fromkeys(family.split()[0] for family in found.families))
    for i, group in enumerate(groups):
        mine = [
            (j, point)
            for j, point in enumerate(found.points)
            if point["family"].split()[0] == group
        ]
        axes.plot(
            [10 ** _apart(j, point) for j, point in mine],
            [10 ** point["predicted"] for _, point in mine],
            "osv^DPX*"[i % 8],
            color=COLOURS[i % len(COLOURS)],
            markersize=5,
            linestyle="none",
            label=group.replace("_", " "),
        )
    measured = [point["measured"] for point in found.points]
    middle = (min(measured) + max(measured)) / 2
    for j, point in sorted(enumerate(found.points), key=lambda each: -abs(_error(each[1])))[:NAMED]:
        place, side = (
            (10 ** _apart(j, point), 10 ** point["predicted"]),
            (1 if point["measured"] < middle else -1),
        )
        said: dict[str, Any] = {
            "textcoords": "offset points",
            "fontsize": 7,
            "color": "0.3",
            "ha": "left" if side > 0 else "right",
        }
        axes.annotate(point["family"].replace("_", " "), place, (4 * side, 4), **said)
    ends = [10 ** (min(measured) - 0.3), 10 ** (max(measured) + 0.3)]
    axes.plot(ends, ends, color="0.3", linewidth=1, label="predicted = measured")
    axes.fill_between(
        ends,
        [end / FACTOR for end in ends],
        [end * FACTOR for end in ends],
        color="0.92",
        zorder=0,
        label=f"within a factor of {FACTOR:g}",
    )
    axes.set(
        xscale="log",
        yscale="log",
        xlabel="largest stable learning rate, measured (points of one rate are set apart a little)",
        ylabel="predicted from the initial weights",
    )
    figure.legend(
        loc="outside right upper",
        fontsize=8,
        frameon=False,
        title="changed in the family",
        title_fontsize=8,
    )
    return figure


def _apart(j: int, point: Mapping[str, Any]) -> float:
    """log10 of the measured rate, which takes few values, moved a little."""
    return float(point["measured"]) + 0.02 * (j % 9 - 4)


def _error(point: Mapping[str, Any]) -> float:
    error = float(point["predicted"]) - float(point["measured"])
    return 0.0 if math.isnan(error) else error
