"""How a preset's verdict is shown: effects with their intervals, beside what the runs did."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.markup import escape
from rich.table import Table

from ctrans.report.axes import MOST_LINES, PLAIN
from ctrans.report.study_report import a_table, case_looks, case_name, shown
from ctrans.study.database import Finished
from ctrans.study.outcomes import by_case, by_rate, end_loss
from ctrans.study.presets.claim import Verdict
from ctrans.study.presets.figures import FIGURES

WORDS = {True: "holds", False: "refuted", None: "open"}
COLOURS = {True: PLAIN[0], False: PLAIN[1], None: "0.5"}


def effects_table(verdict: Verdict) -> Table:
    """A row for each effect that the claim says is positive."""
    table = a_table("effects, positive where the claim holds; 95% over seeds", "effect", "of", "seeds", "mean", "interval", "")
    for each in verdict.effects:
        interval = "all seeds alike" if each.low == each.high else f"{shown(each.low, 3)} to {shown(each.high, 3)}"
        table.add_row(escape(each.says), each.figure, str(each.seeds), shown(each.mean, 3), interval, WORDS[each.holds])
    return table


def verdict_figure(runs: Sequence[Finished], verdict: Verdict, title: str) -> Figure:
    """Left what the runs did: moments by depth where they were measured, else loss by learning rate or by step. Right the effects."""
    figure = Figure(figsize=(12, 4.8), layout="constrained")
    left, right = figure.subplots(1, 2)
    every = list(by_case(runs).values())
    cases = every[:MOST_LINES]
    draw = (
        _moments
        if any(_moments_of(run) for run in runs)
        else _rates
        if any(len(by_rate(each)) > 1 for each in cases)
        else _curves
    )
    looks = case_looks([each[0].run.varied for each in cases])
    for each, look in zip(cases, looks, strict=True):
        draw(left, each, look["color"])
    left.grid(alpha=0.25)
    if cases:
        hidden = f"{len(every) - len(cases)} more cases are in the table" if len(every) > len(cases) else None
        left.legend(fontsize=7, frameon=False, title=hidden, title_fontsize=7)
    for i, effect in enumerate(reversed(verdict.effects)):
        colour = COLOURS[effect.holds]
        right.plot([effect.low, effect.high], [i, i], color=colour, linewidth=3)
        right.plot([effect.mean], [i], "o", color=colour)
        right.annotate(f"{effect.says}: {WORDS[effect.holds]}", (0.01, i + 0.16), xycoords=("axes fraction", "data"), fontsize=8)
    right.axvline(0.0, color="0.3", linewidth=1)
    kinds = list(dict.fromkeys(effect.figure for effect in verdict.effects))
    right.set(yticks=[], ylim=(-0.5, len(verdict.effects)), xlabel="effect: " + "; ".join(FIGURES[kind][0] for kind in kinds))
    right.xaxis.label.set_fontsize(8)
    figure.suptitle(f"{title}: {verdict.verdict}")
    return figure


def _moments_of(run: Finished) -> dict[str, Any] | None:
    found = run.result.trained.get("after", {}).get("moments")
    return found if isinstance(found, dict) else None


def _moments(axes: Axes, runs: Sequence[Finished], colour: str) -> None:
    """Mean absolute entry of the trained models' states by segment; a line for each seed."""
    label: str | None = case_name(runs[0].run.varied)
    for found in filter(None, map(_moments_of, runs)):
        axes.plot(found["mean_abs"], color=colour, alpha=0.8, label=label)
        label = None
    axes.set(xlabel="segments", ylabel="mean|X|, trained", yscale="log")


def _rates(axes: Axes, runs: Sequence[Finished], colour: str) -> None:
    rates = by_rate(runs)
    axes.plot(
        list(rates), [statistics.fmean(map(end_loss, same)) for same in rates.values()], color=colour, marker="o", markersize=3
    )
    axes.lines[-1].set_label(case_name(runs[0].run.varied))
    axes.set(xlabel="learning rate", ylabel="validation loss at the end (nats)", xscale="log")


def _curves(axes: Axes, runs: Sequence[Finished], colour: str) -> None:
    label: str | None = case_name(runs[0].run.varied)
    for run in runs:
        rows = [row for row in run.result.evaluations if isinstance(row["validation_loss"], float)]
        axes.plot([row["step"] for row in rows], [row["validation_loss"] for row in rows], color=colour, alpha=0.7, label=label)
        label = None
    axes.set(xlabel="iteration", ylabel="validation loss (nats)")
