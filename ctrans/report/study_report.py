"""How a study is shown: a table of its cases and a picture of loss against learning rate, and tables of a preset's verdict."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from rich import box
from rich.markup import escape
from rich.table import Table

from ctrans.placement import PLACEMENTS
from ctrans.report.axes import MOST_LINES
from ctrans.report.placement_style import colour, marker
from ctrans.study.cost import Cost
from ctrans.study.database import Finished
from ctrans.study.outcomes import LEARNED, by_case, by_rate, end_loss


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


def case_name(case: Mapping[str, object]) -> str:
    """What varies, in words: "placement pre, dt 0.1"."""
    return ", ".join(f"{name} {value}" for name, value in case.items()) or "all"


def outcomes_table(runs: Sequence[Finished], outcomes: Mapping[str, Mapping[str, float | None]]) -> Table:
    """A row for each case; where all vary the same fields the first column is headed by them and has their values alone."""
    cases = by_case(runs)
    fields = {tuple(each[0].run.varied) for each in cases.values()}
    common = ", ".join(min(fields)) if len(fields) == 1 else ""
    table = a_table(
        "outcomes by case", common or "case", "runs", "diverged", "best loss", "its lr", "largest stable lr", "sensitivity"
    )
    for case, each in cases.items():
        found, varied = outcomes.get(case, {}), each[0].run.varied
        table.add_row(
            escape(", ".join(map(str, varied.values())) if common else case_name(varied)),
            shown(found.get("runs")),
            shown(found.get("diverged")),
            shown(found.get("best loss")),
            shown(found.get("best learning rate"), 3),
            shown(found.get("largest stable learning rate"), 3),
            shown(found.get("sensitivity"), 3),
        )
    return table


def plateau_words(runs: Sequence[Finished], outcomes: Mapping[str, Mapping[str, float | None]], frequencies: float) -> str:
    """Which cases ended no lower than what token frequencies alone are worth: between them their losses tell nothing."""
    names = [
        case_name(each[0].run.varied)
        for case, each in by_case(runs).items()
        if (best := outcomes.get(case, {}).get("best loss")) is None or best > frequencies - LEARNED
    ]
    said = f"Token frequencies alone are worth {shown(frequencies)} nats a token"
    if not names:
        return f"{said}: every case learned more."
    if len(names) == len(outcomes):
        return f"{said}, and no case ended more than {LEARNED:g} below it: the losses tell nothing; train longer."
    return f"{said}. No more than {LEARNED:g} below it ended {'; '.join(names)}: between such cases losses tell nothing."


def cost_table(whole: Cost, left: Cost, workers: int) -> Table:
    """What a study costs in all, and what of it is left."""
    table = a_table("what it costs here", "", "in all", "left")
    table.add_row("runs", f"{whole.runs:,}", f"{left.runs:,}")
    table.add_row("tokens", f"{whole.tokens:.3g}", f"{left.tokens:.3g}")
    table.add_row("floating-point operations", f"{whole.flops:.3g}", f"{left.flops:.3g}")
    table.add_row("processor hours", f"{whole.processor_hours:.3g}", f"{left.processor_hours:.3g}")
    table.add_row(f"hours with {workers} processes", f"{whole.hours(workers):.3g}", f"{left.hours(workers):.3g}")
    return table


def rates_figure(runs: Sequence[Finished], title: str) -> Figure:
    """Validation loss at the end against learning rate: a line through the mean over seeds for each case, a point for each seed.

    More cases than `MOST_LINES` are rows of a heat map.
    """
    cases = list(by_case(runs).values())
    if len(cases) > MOST_LINES:
        return _rates_map(cases, title)
    figure = Figure(figsize=(8, 4.6), layout="constrained")
    axes = figure.subplots()
    looks = case_looks([each[0].run.varied for each in cases])
    for each, look in zip(cases, looks, strict=True):
        rates = by_rate(each)
        means = [statistics.fmean(map(end_loss, same)) for same in rates.values()]
        (line,) = axes.plot(list(rates), means, markersize=4, label=case_name(each[0].run.varied), **look)
        for rate, same in rates.items():
            axes.plot([rate] * len(same), [end_loss(run) for run in same], "o", color=line.get_color(), alpha=0.35, markersize=3)
    axes.set(title=title, xlabel="learning rate", ylabel="validation loss at the end (nats)", xscale="log")
    axes.grid(alpha=0.25)
    if cases:
        figure.legend(loc="outside right upper", frameon=False, fontsize=8, title="case")
    return figure


def _rates_map(cases: Sequence[Sequence[Finished]], title: str) -> Figure:
    """A row for each case, a column for each learning rate, the mean loss over seeds as a colour."""
    rates = sorted({rate for each in cases for rate in by_rate(each)})
    values = np.full((len(cases), len(rates)), math.nan)
    for i, each in enumerate(cases):
        for rate, same in by_rate(each).items():
            values[i, rates.index(rate)] = statistics.fmean(map(end_loss, same))
    figure = Figure(figsize=(4.5 + 0.5 * len(rates), 2 + 0.22 * len(cases)), layout="constrained")
    axes = figure.subplots()
    image = axes.imshow(values, aspect="auto", interpolation="nearest", cmap="cividis")
    figure.colorbar(image, ax=axes, label="validation loss at the end (nats)")
    axes.set_yticks(range(len(cases)), [case_name(each[0].run.varied) for each in cases], fontsize=7)
    axes.set_xticks(range(len(rates)), [f"{rate:.1g}" for rate in rates])
    axes.set(title=f"{title}; white is not measured", xlabel="learning rate")
    return figure


HUES = ("#332288", "#88ccee", "#117733", "#ddcc77", "#882255", "#44aa99", "#aa4499")
"""Colours of cases that are told apart by something else than their placement (Paul Tol's "muted")."""
MARKS = "osD^vPX"


def case_looks(varied: Sequence[Mapping[str, object]]) -> list[dict[str, Any]]:
    """Colour and mark of each case: its placement's where all differ in that, else one of its own."""
    placements = [str(each.get("placement")) for each in varied]
    if len(set(placements)) == len(varied) and all(name in PLACEMENTS for name in placements):
        return [{"color": colour(name), "marker": marker(name)} for name in placements]
    return [{"color": HUES[i % len(HUES)], "marker": MARKS[i % len(MARKS)]} for i in range(len(varied))]
