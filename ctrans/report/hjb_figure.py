"""The picture of `pde_study`: a front at finite speed under peri, a value function that goes flat
under pre. Both with the optimal feedback and optimal paths.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure, SubFigure
from torch import Tensor

from ctrans.control.hjb.study import HALF_WIDTH, HORIZON, SCHEME, PDEStudy
from ctrans.control.hjb.synthesis import Synthesis
from ctrans.report.axes import PLAIN

LEVEL = 0.25
"""The front drawn is Phi = LEVEL: the states that can still come that close to a target."""
FIELD_COLOURS = "cividis"
RADIUS_COLOURS = ("#9ecae1", "#4292c6", "#08306b")
PATH_COLOUR = "#ff6f59"
BOUNDED_SPAN = 0.25
"""The set of bounded velocities and the arrows are drawn as ways in this depth-time."""
BALL_SPAN = 0.08
"""The same for the balls."""
KEY_OF_ARROWS = r"best velocity v* (none: $\Phi$ is flat, any is best)"
MARGIN = 0.12
"""Between that set and the corner."""


def draw(study: PDEStudy) -> Figure:
    """Rows: Phi by time for bounded velocities (peri); Phi by R for balls of velocities (pre);
    errors and spreads. One colour scale for all.
    """
    figure = Figure(figsize=(11, 10.8), layout="constrained")
    grid = figure.add_gridspec(3, 1, height_ratios=(1, 1, 0.55))
    upper, middle, lower = (figure.add_subfigure(grid[row, 0]) for row in range(3))
    front = study.front
    along = " and ".join(f"{speed:.2f}" for speed in front.speeds)
    upper.suptitle(
        rf"peri, velocities in an ellipsoid: the front $\Phi$ = {LEVEL:g} moves at finite speed (at"
        f" most {along} along the axes)",
        weight="bold",
    )
    titles = []
    for time in front.times[1:]:
        titles.append(f"t = {time:.2f}: {HORIZON - time:.2f} to go")
    axes = _draw_fields(upper, study, titles, front.values[1:], study.bounded, BOUNDED_SPAN)
    for axis in axes:
        _draw_contour(axis, study, front.values[0], "white", "dotted")
    _draw_key(upper, axes[0])
    middle.suptitle(
        rf"pre, velocities in the ball |v| $\leq$ R, at t = {study.time:.2f}: $\Phi$ goes flat as R"
        " grows",
        weight="bold",
    )
    titles = []
    for radius, values, ball in zip(study.radii, study.values, study.balls, strict=True):
        spread = float(values.amax() - values.amin())
        titles.append(
            rf"R = {radius:g}: max $\Phi$ - min $\Phi$ = {spread:.2f},"
            f" |v| up to {float(ball.speeds.amax()):.1f}"
        )
    _draw_fields(middle, study, titles, study.values, study.balls, BALL_SPAN)
    errors_axis, spreads_axis = lower.subplots(1, 2, width_ratios=(1, 1.1))
    _draw_errors(errors_axis, study)
    _draw_spreads(spreads_axis, study)
    return figure


def _draw_fields(
    figure: SubFigure,
    study: PDEStudy,
    titles: Sequence[str],
    fields: Tensor,
    optimal: Sequence[Synthesis],
    span: float,
) -> list[Axes]:
    """A panel for each field, on one scale of colours, with its front in white, the feedback as
    arrows, optimal paths, and the set of velocities in a corner.
    """
    first, second = (nodes.cpu().numpy() for nodes in study.front.grid.axes)
    low = float(study.exact.amin())
    high = float(study.exact.amax())
    axes: list[Axes] = figure.subplots(1, len(titles), sharey=True, squeeze=False)[0].tolist()
    for axis, title, values, paths in zip(axes, titles, fields, optimal, strict=True):
        image = axis.pcolormesh(
            first,
            second,
            values.T.cpu().numpy(),
            shading="nearest",
            cmap=FIELD_COLOURS,
            vmin=low,
            vmax=high,
        )
        axis.set_title(title, fontsize=9.5)
        axis.set(
            xlabel="$x_1$",
            aspect="equal",
            xlim=(first[0], first[-1]),
            ylim=(second[0], second[-1]),
        )
        axis.locator_params(axis="x", nbins=4, prune="upper")
        _draw_contour(axis, study, values, "white", "solid")
        _draw_synthesis(axis, paths, span)
    axes[0].set_ylabel("$x_2$")
    figure.colorbar(image, ax=axes, label=r"$\Phi(x, t)$", pad=0.01)
    return axes


def _draw_synthesis(axis: Axes, optimal: Synthesis, span: float) -> None:
    """The feedback and the set of velocities, both as ways in a depth-time `span`, and the paths to
    T.
    """
    moving = optimal.feedback.isfinite().all(-1)
    at = optimal.states[moving].cpu()
    ways = span * optimal.feedback[moving].cpu()
    axis.quiver(
        at[:, 0].numpy(),
        at[:, 1].numpy(),
        ways[:, 0].numpy(),
        ways[:, 1].numpy(),
        angles="xy",
        scale_units="xy",
        scale=1,
        width=0.004,
        color="0.85",
    )
    lines = torch.stack([optimal.starts, optimal.ends]).cpu()
    axis.plot(lines[..., 0].numpy(), lines[..., 1].numpy(), color=PATH_COLOUR, linewidth=1.3)
    ends = lines[1]
    axis.plot(ends[:, 0].numpy(), ends[:, 1].numpy(), "o", color=PATH_COLOUR, markersize=3)
    angles = torch.linspace(0, 2 * math.pi, 121, dtype=torch.float64)
    circle = torch.stack([angles.cos(), angles.sin()], -1)
    velocities = optimal.velocities
    outline = span * (velocities.centre.cpu() + circle @ velocities.map.cpu().double().mT)
    corner = -HALF_WIDTH + MARGIN
    outline = outline - outline.amin(0) + corner
    axis.fill(
        outline[:, 0].numpy(),
        outline[:, 1].numpy(),
        facecolor="none",
        edgecolor="white",
        linewidth=1.5,
    )
    axis.text(
        corner,
        float(outline[:, 1].amax()) + MARGIN / 3,
        f"reach in time {span:g}",
        color="white",
        fontsize=7.5,
    )


def _draw_key(figure: SubFigure, axis: Axes) -> None:
    """What the lines of all panels are."""
    axis.plot([], [], color="white", label=rf"front $\Phi$ = {LEVEL:g}")
    axis.plot([], [], color="white", linestyle="dotted", label="front at t = T")
    axis.plot([], [], color=PATH_COLOUR, marker="o", markersize=3, label="best paths to T")
    axis.plot([], [], color="0.85", marker=">", linestyle="none", label=KEY_OF_ARROWS)
    figure.legend(
        loc="outside lower center", ncols=4, fontsize=8, facecolor="0.45", labelcolor="white"
    )


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
        ylabel=f"|grid ({SCHEME}) - Hopf-Lax|",
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
