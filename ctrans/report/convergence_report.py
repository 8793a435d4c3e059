"""How measured orders are shown: a table and a log-log picture."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure
from rich import box
from rich.table import Table

from ctrans.model.orders import Convergence
from ctrans.report.axes import legend_below
from ctrans.report.placement_style import colour, marker


def convergence_table(results: Sequence[Convergence]) -> Table:
    """A row for each method or splitting, a column for each placement: measured order (formal order in the second column)."""
    placements = list(dict.fromkeys(r.placement for r in results))
    table = Table(title="measured order of convergence", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    table.title_style, table.title_justify = "bold", "left"
    for name in ("limit", "method", "formal"):
        table.add_column(name, no_wrap=True)
    for name in placements:
        table.add_column(name, justify="right", no_wrap=True)
    orders = {(r.limit, r.method, r.placement): r for r in results}
    for limit, method, formal in dict.fromkeys((r.limit, r.method, r.formal) for r in results):
        table.add_row(limit, method, str(formal), *(f"{orders[limit, method, p].order:.2f}" for p in placements))
    return table


def convergence_figure(results: Sequence[Convergence]) -> Figure:
    """Relative error against steps per segment (or blocks), one panel for each method, slopes of the formal order in grey."""
    panels = list(dict.fromkeys((r.limit, r.method, r.formal) for r in results))
    columns = min(4, len(panels))
    rows = -(-len(panels) // columns)
    figure = Figure(figsize=(3.4 * columns, 3.1 * rows + 0.5), layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False)
    for axes, (limit, method, formal) in zip(grid.flat, panels, strict=False):
        mine = [r for r in results if (r.limit, r.method) == (limit, method)]
        for r in mine:
            axes.loglog(r.sizes, r.errors, color=colour(r.placement), marker=marker(r.placement), markersize=4, label=r.placement)
        n = np.array(mine[0].sizes, dtype=float)
        level = 1.6 * max(r.errors[0] for r in mine)
        axes.loglog(n, level * (n / n[0]) ** -formal, color="0.6", linestyle=":", linewidth=2)
        axes.set(title=f"{limit}: {method}, order {formal}", xlabel="steps per segment" if limit == "substeps" else "blocks")
        axes.grid(alpha=0.25)
    for axes in grid.flat[len(panels) :]:
        axes.set_visible(False)
    for axes in grid[:, 0]:
        axes.set_ylabel("relative error")
    legend_below(figure, *grid.flat[0].get_legend_handles_labels(), most=7)
    return figure
