"""Activations against width after t updates, as a table, a picture and a sentence that says no more than was measured."""

from __future__ import annotations

import math
from collections.abc import Sequence

from matplotlib.figure import Figure
from rich import box
from rich.table import Table

from ctrans.report.axes import legend_below
from ctrans.training.coordinate_check import Coordinates, Power, powers

MOST_LINES = 7
"""Places in a panel of the picture; of more, some that lie evenly along the depth, the logits among them."""
SURE = 2.0
"""An exponent is told from 0 where it is so many standard errors off."""


def coordinate_table(found: Sequence[Coordinates], places: Sequence[str]) -> Table:
    """A line for each place: k of size ~ width^k at the start and at the end, and of change ~ width^k after each update."""
    end = found[-1].t
    table = Table(title="k of mean |entry| ~ width^k", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    table.title_style, table.title_justify = "bold", "left"
    columns = [("size at the start", powers(found[0].sizes)), (f"size after {end}", powers(found[-1].sizes))]
    columns += [(f"change after {each.t}", powers(each.changes)) for each in found[1:]]
    table.add_column("place", no_wrap=True)
    for name, _ in columns:
        table.add_column(name, justify="right", no_wrap=True)
    for k, place in enumerate(places):
        table.add_row(place, *(str(column[k]) for _, column in columns))
    return table


def coordinate_words(found: Sequence[Coordinates], places: Sequence[str], widths: Sequence[int]) -> str:
    """What was measured of the place whose change grows most with the width after the last update, and of what range."""
    last = found[-1]
    grown = [(power, place) for power, place in zip(powers(last.changes), places, strict=True) if not math.isnan(power.exponent)]
    if not grown:
        return "no place changed at every width, or one is not finite: no exponent can be given"
    power, place = max(grown, key=lambda each: each[0].exponent)
    after = f"after {last.t} update{'s' * (last.t != 1)}, from width {min(widths)} to {max(widths)}"
    return f"most at {place}: its change {growth_words(power)} {after}"


def growth_words(power: Power) -> str:
    """The exponent in words; not told from 0 where it is within two standard errors. Of two widths, which have no error, it is told as it
    is.
    """
    how = f"width^{power}"
    unsure = SURE * power.error if not math.isnan(power.error) else 0.0
    if abs(power.exponent) <= unsure:
        return f"is not told from standing still ({how})"
    return f"{'grows' if power.exponent > 0 else 'shrinks'} like {how}"


def coordinate_figure(found: Sequence[Coordinates], places: Sequence[str]) -> Figure:
    """Sizes at the start, and changes after the last update, against the width, a line for each place."""
    shown = _evenly(len(places))
    figure = Figure(figsize=(9.0, 4.4), layout="constrained")
    left, right = figure.subplots(1, 2)
    panels = ((left, found[0].sizes, "at the start"), (right, found[-1].changes, f"change after {found[-1].t} updates"))
    for axes, values, title in panels:
        widths = list(values)
        for line, k in enumerate(shown):
            axes.loglog(widths, [values[width][k] for width in widths], marker="osv^Dx+"[line], markersize=4, label=places[k])
        axes.set(title=title, xlabel="width", ylabel="mean |entry|")
        axes.set_xticks(widths, [str(width) for width in widths], minor=False)
        axes.minorticks_off()
        axes.grid(alpha=0.25)
    legend_below(figure, *left.get_legend_handles_labels(), most=MOST_LINES)
    return figure


def _evenly(count: int) -> list[int]:
    lines = min(count, MOST_LINES)
    return sorted({round(i * (count - 1) / max(1, lines - 1)) for i in range(lines)})
