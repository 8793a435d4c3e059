"""How predictions are shown beside what training gave."""

from __future__ import annotations

import math

from matplotlib.figure import Figure
from rich.table import Table

from ctrans.report.study_report import HUES, a_table, shown
from ctrans.study.prediction.evaluation import FACTOR, OUTCOMES, PREDICTED, Evaluated

STRONGEST = 8
"""Figures that a table shows for each outcome, besides the baselines."""


def correlations_table(title: str, found: Evaluated) -> Table:
    """For each outcome the predictor, the figures that order best, and all baselines."""
    table = a_table(f"Spearman's rho, {title}", "outcome", "figure", "architectures", "rho", "95%", "")
    for outcome in OUTCOMES:
        mine = [each for each in found.correlations if each.outcome == outcome and not math.isnan(each.rho)]
        mine.sort(key=lambda each: (each.figure != PREDICTED, each.baseline, -abs(each.rho)))
        plain = [each for each in mine if not each.baseline][: STRONGEST + 1]
        for each in plain + [each for each in mine if each.baseline]:
            interval = f"{shown(each.low, 2)} to {shown(each.high, 2)}"
            table.add_row(
                outcome, each.figure, str(each.count), shown(each.rho, 2), interval, "baseline" if each.baseline else ""
            )
    return table


def calibration_words(found: Evaluated) -> str:
    """How far off predicted rates are."""
    worst = sorted(found.families.items(), key=lambda each: -abs(each[1]))[:3]
    names = ", ".join(f"{family} ({10**error:.2g} times)" for family, error in worst if not math.isnan(error))
    return (
        f"Predicted largest stable rates are within a factor of {FACTOR:g} for {found.within:.0%}; that of pre, for all, is for "
        f"{found.always_pre:.0%}. Deviation: a factor of {10**found.deviation:.2g}. Farthest off: {names}."
    )


def prediction_figure(found: Evaluated) -> Figure:
    """Measured against predicted largest stable rates, a colour for each family; grey within the factor."""
    figure = Figure(figsize=(8.5, 5.4), layout="constrained")
    axes = figure.subplots()
    families = list(found.families)
    for i, family in enumerate(families):
        mine = [point for point in found.points if point["family"] == family]
        # measured rates are few values: points of one are set apart a little
        axes.plot(
            [10 ** (point["measured"] + 0.02 * (j % 5 - 2)) for j, point in enumerate(mine)],
            [10 ** point["predicted"] for point in mine],
            "osv^D"[i % 5],
            color=HUES[i % len(HUES)],
            markersize=4,
            label=family,
        )
    measured = [point["measured"] for point in found.points]
    ends = [10 ** (min(measured) - 0.3), 10 ** (max(measured) + 0.3)]
    axes.plot(ends, ends, color="0.3", linewidth=1)
    axes.fill_between(ends, [end / FACTOR for end in ends], [end * FACTOR for end in ends], color="0.9")
    axes.set(
        xscale="log", yscale="log", xlabel="largest stable learning rate, measured", ylabel="predicted from the initial weights"
    )
    figure.legend(loc="outside right upper", fontsize=6, frameon=False, ncols=1)
    return figure
