"""How a study is shown: a table of its cases and a picture of loss against learning rate, and tables of a preset's verdict."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure
from rich import box
from rich.markup import escape
from rich.table import Table

from ctrans.study.cost import Cost
from ctrans.study.outcomes import by_case, by_rate, end_loss
from ctrans.study.store import Finished

MOST_CASES = 12
"""Lines that a picture can still tell apart."""


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
    """A row for each case."""
    table = a_table("outcomes by case", "case", "runs", "diverged", "best loss", "its lr", "largest stable lr", "sensitivity")
    for case, each in by_case(runs).items():
        found = outcomes.get(case, {})
        table.add_row(
            escape(case_name(each[0].run.varied)),
            shown(found.get("runs")),
            shown(found.get("diverged")),
            shown(found.get("best loss")),
            shown(found.get("best learning rate"), 3),
            shown(found.get("largest stable learning rate"), 3),
            shown(found.get("sensitivity"), 3),
        )
    return table


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
    """Validation loss at the end against learning rate: a line through the mean over seeds for each case, a point for each seed."""
    figure = Figure(figsize=(8, 4.6), layout="constrained")
    axes = figure.subplots()
    cases = list(by_case(runs).values())
    for each in cases[:MOST_CASES]:
        rates = by_rate(each)
        means = [statistics.fmean(map(end_loss, same)) for same in rates.values()]
        (line,) = axes.plot(list(rates), means, marker="o", markersize=3, label=case_name(each[0].run.varied))
        for rate, same in rates.items():
            axes.plot([rate] * len(same), [end_loss(run) for run in same], "o", color=line.get_color(), alpha=0.35, markersize=3)
    axes.set(title=title, xlabel="learning rate", ylabel="validation loss at the end (nats)", xscale="log")
    axes.grid(alpha=0.25)
    hidden = f"; {len(cases) - MOST_CASES} more cases are in the table" if len(cases) > MOST_CASES else ""
    if cases:
        figure.legend(loc="outside right upper", frameon=False, fontsize=8, title=f"case{hidden}")
    return figure
