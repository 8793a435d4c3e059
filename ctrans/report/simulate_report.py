"""How a simulation is shown: a table and a picture by depth."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from matplotlib.figure import Figure
from rich import box
from rich.table import Table

from ctrans.report.axes import bound_style, bound_styles, legend_below, mark_places, show_at_least_a_decade, title_above
from ctrans.report.fit import shown_rows
from ctrans.report.placement_style import colour, equation, marker
from ctrans.stability.forward.simulation import Simulation


def number(value: float | None) -> str:
    """Three significant digits, two where there is an exponent; or a dash."""
    if value is None:
        return "–"
    text = f"{value:.3g}"
    return f"{value:.1e}" if "e" in text else text


def simulation_table(simulation: Simulation, rows: int = 7) -> Table:
    """Rows by depth, evenly thinned to about that many; the ends are always shown."""
    s = simulation
    cost = f"{s.evaluations} evaluations, {s.accepted} steps, {s.rejected} rejected, {s.seconds:.2f} s"
    if s.used is not None and max(s.used) > 1 + 1e-9:
        cost += "\nabove the bound of the exact solution: the method does not resolve the ODE; take more steps"
    for warning in s.warnings:
        cost += f"\n{warning}"
    if s.unreferenced is not None:
        cost += f"\nthe ODE to compare with could not be solved to the end, so distances end (–): {s.unreferenced}"
    if s.unbounded is not None:
        cost += f"\n{s.unbounded}"
    elif s.bounds is not None and s.bounds.seed_note:
        cost += f"\npaper: {s.bounds.seed_note}"
    table = Table(
        title=f"{s.placement}: {equation(s.placement).partition(', v = ')[0]}",
        caption=cost,
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
    )
    table.title_style, table.title_justify, table.caption_justify = "bold", "left", "left"
    columns: dict[str, Callable[[int], str]] = {
        "seg": str,
        "t": lambda k: number(s.times[k]),
        "mean|x|": lambda k: number(s.mean_abs[k]),
        "var": lambda k: number(s.variance[k]),
        "rms": lambda k: number(s.rms[k]),
        "paper": lambda k: number(None if s.bounds is None or s.bounds.seed_mean_abs is None else s.bounds.seed_mean_abs[k]),
        "bound": lambda k: number(None if s.bounds is None else s.bounds.mean_abs[k]),
        "used": lambda k: _share(None if s.used is None else s.used[k]),
        "drift": lambda k: number(None if s.drift is None or k == 0 else s.drift[k - 1]),
        "discrete": lambda k: number(s.discrete_distance[k] if k < len(s.discrete_distance) else None),
    }
    if not s.discrete:
        columns["method"] = lambda k: number(s.distance[k])
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    for k in shown_rows(len(s.times), rows):
        table.add_row(*(value(k) for value in columns.values()))
    return table


def _share(used: float | None) -> str:
    """A share as a percentage, as a multiple where it is large; or a dash."""
    return number(None) if used is None else f"{used:.0%}" if used < 10 else f"{used:.1g}x"


def simulation_figure(simulations: Sequence[Simulation], title: str) -> Figure:
    """Mean absolute value, variance, and the discrete model's distance to its ODE by depth-time: measured solid, bounds
    dashed.
    """
    figure = Figure(figsize=(13, 4.6), layout="constrained")
    growth, spread, distance = figure.subplots(1, 3)
    styles = bound_styles([None if s.bounds is None else s.bounds.mean_abs for s in simulations])
    for i, (s, dashes) in enumerate(zip(simulations, styles, strict=True)):
        style = {"color": colour(s.placement), "linewidth": 1.4}
        marks = {"marker": marker(s.placement), "markersize": 4, "markevery": mark_places(i, len(s.times))}
        growth.plot(s.times, s.mean_abs, label=s.placement, **style, **marks)
        spread.plot(s.times, s.variance, **style, **marks)
        if s.bounds is not None:
            growth.plot(s.times, s.bounds.mean_abs, linestyle=dashes, **style)
            spread.plot(s.times, s.bounds.variance, linestyle=dashes, **style)
        known = [(t, d) for t, d in zip(s.times, s.discrete_distance, strict=False) if d]
        if known:
            distance.plot(*zip(*known, strict=True), **style, **marks)
    for axes, name, unit in (
        (growth, "hidden states", "mean |x| over their entries"),
        (spread, "their variance", "variance of a token's entries, mean over tokens"),
        (distance, "the discrete model and its ODE", "distance, as a share of |X_ODE|"),
    ):
        axes.set(xlabel="depth-time t", yscale="log", title=name, ylabel=unit)
        show_at_least_a_decade(axes)
        axes.grid(alpha=0.25)
    if any(s.bounds is not None for s in simulations):
        growth.plot([], [], color="black", linestyle=bound_style(0, 2), label="bound (dashes without marks)")
    legend_below(figure, *growth.get_legend_handles_labels())
    title_above(figure, title)
    return figure
