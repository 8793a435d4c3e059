"""The picture of `pde_study`: a front at finite speed above, a value function that goes flat
below.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure, SubFigure
from torch import Tensor

from ctrans.control.hjb.study import HORIZON, SCHEME, PDEStudy
from ctrans.report.axes import PLAIN

LEVEL = 0.25
"""The front drawn is Phi = LEVEL: the states that can still come that close to a target."""
FIELD_COLOURS = "cividis"
RADIUS_COLOURS = ("#9ecae1", "#4292c6", "#2171b5", "#08306b")


def draw(study: PDEStudy) -> Figure:
    """Rows: Phi by time for bounded velocities; Phi by R for balls of velocities; errors and
    spreads. One colour scale for all.
    """
    figure = Figure(figsize=(12.5, 10.2), layout="constrained")
    grid = figure.add_gridspec(3, 1, height_ratios=(1, 1, 0.85))
    upper, middle, lower = (figure.add_subfigure(grid[row, 0]) for row in range(3))
    front = study.front
    along = " and ".join(f"{speed:.2f}" for speed in front.speeds)
    front_title = (
        f"Bounded velocities: the front $\\Phi$ = {LEVEL:g} moves at finite speed (at most {along}"
        " along the axes)"
    )
    upper.suptitle(front_title, weight="bold")
    names = [f"t = {time:.2f}" for time in front.times]
    for i, time in enumerate(front.times):
        if time == HORIZON:
            names[i] += r" = T:  $\Phi$ = G"
    axes = _draw_fields(upper, study, names, front.values)
    for axis, exact in zip(axes, study.exact, strict=True):
        _draw_contour(axis, study, exact, "black", "dashed")
    axes[0].plot([], [], color="white", label=f"grid ({SCHEME})")
    axes[0].plot([], [], color="black", linestyle="dashed", label="Hopf-Lax")
    axes[0].legend(loc="upper right", fontsize=8, facecolor="0.7", framealpha=0.9)
    middle.suptitle(
        rf"Velocities in the ball |v| $\leq$ R, at t = {study.time:.2f}: $\Phi$ goes flat as R"
        r" grows",
        weight="bold",
    )
    spreads = [float(values.amax() - values.amin()) for values in study.values]
    names = [
        rf"R = {r:g}:  max $\Phi$ - min $\Phi$ = {s:.2f}"
        for r, s in zip(study.radii, spreads, strict=True)
    ]
    _draw_fields(middle, study, names, study.values)
    errors_axis, spreads_axis = lower.subplots(1, 2, width_ratios=(1, 1.1))
    _draw_errors(errors_axis, study)
    _draw_spreads(spreads_axis, study)
    return figure


def _draw_fields(
    figure: SubFigure, study: PDEStudy, names: Sequence[str], fields: Tensor
) -> list[Axes]:
    """A panel for each field, on one scale of colours, with its front in white."""
    first, second = (nodes.cpu().numpy() for nodes in study.front.grid.axes)
    low = float(study.exact.amin())
    high = float(study.exact.amax())
    axes: list[Axes] = figure.subplots(1, len(names), sharey=True, squeeze=False)[0].tolist()
    for axis, name, values in zip(axes, names, fields, strict=True):
        image = axis.pcolormesh(
            first,
            second,
            values.T.cpu().numpy(),
            shading="nearest",
            cmap=FIELD_COLOURS,
            vmin=low,
            vmax=high,
        )
        axis.set(
            title=name,
            xlabel="$x_1$",
            aspect="equal",
            xlim=(first[0], first[-1]),
            ylim=(second[0], second[-1]),
        )
        axis.locator_params(axis="x", nbins=4, prune="upper")
        _draw_contour(axis, study, values, "white", "solid")
    axes[0].set_ylabel("$x_2$")
    figure.colorbar(image, ax=axes, label=r"$\Phi(x, t)$", pad=0.01)
    return axes


def _draw_errors(axis: Axes, study: PDEStudy) -> None:
    front = study.front
    remaining = [HORIZON - time for time in front.times[1:]]
    axis.semilogy(
        remaining, study.largest_error[1:].tolist(), "o-", color=RADIUS_COLOURS[-1], label="largest"
    )
    axis.semilogy(
        remaining, study.mean_error[1:].tolist(), "s-", color=RADIUS_COLOURS[1], label="mean"
    )
    axis.axhline(max(front.grid.spacing), color="0.5", linestyle="dotted", label="grid spacing")
    axis.set(
        xlabel="time to go, T - t",
        ylabel="|grid - Hopf-Lax|",
        title="Bounded velocities: the two solutions agree",
    )
    axis.tick_params(axis="y", which="minor", labelsize=7)
    axis.legend(fontsize=9)
    axis.grid(alpha=0.3)


def _draw_spreads(axis: Axes, study: PDEStudy) -> None:
    spread = study.spread.tolist()
    for radius, colour in zip(study.radii, itertools.cycle(RADIUS_COLOURS), strict=False):
        times = [HORIZON - reach / radius for reach in study.reaches]
        axis.plot(times, spread, color=colour, linewidth=1.8, label=rf"|v| $\leq$ {radius:g}")
    axis.plot(
        [0, HORIZON, HORIZON],
        [0, 0, spread[0]],
        color=PLAIN[1],
        linestyle="dashed",
        label="whole space:\nflat, jumps at T",
    )
    bounded = study.exact.flatten(1)
    axis.plot(
        study.front.times,
        (bounded.amax(1) - bounded.amin(1)).tolist(),
        "s--",
        color=PLAIN[2],
        label="bounded,\nas above",
    )
    axis.set(
        xlabel="depth-time t",
        ylabel=r"max $\Phi$ - min $\Phi$",
        title="How much the value still depends on the state",
    )
    axis.set_xlim(-0.02 * HORIZON, 1.02 * HORIZON)
    axis.legend(fontsize=9, loc="center left", bbox_to_anchor=(1.01, 0.5))
    axis.grid(alpha=0.3)


def _draw_contour(axis: Axes, study: PDEStudy, values: Tensor, colour: str, style: str) -> None:
    if not values.amin() < LEVEL < values.amax():  # a flat value function has no front
        return
    first, second = (nodes.cpu().numpy() for nodes in study.front.grid.axes)
    axis.contour(
        first,
        second,
        values.T.cpu().numpy(),
        levels=[LEVEL],
        colors=colour,
        linestyles=style,
        linewidths=1.4,
    )
