"""The picture of `pde_study`: a front at finite speed above, a value function that goes flat below."""

from __future__ import annotations

from matplotlib.axes import Axes
from matplotlib.collections import QuadMesh
from matplotlib.figure import Figure, SubFigure
from torch import Tensor

from ctrans.control.hjb_study import PDEStudy
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
    _draw_front(upper, study)
    _draw_relaxation(middle, study)
    errors, spreads = lower.subplots(1, 2, width_ratios=(1, 1.1))
    _draw_errors(errors, study)
    _draw_spreads(spreads, study)
    return figure


def _draw_front(figure: SubFigure, study: PDEStudy) -> None:
    grid = study.front.grid
    along = " and ".join(f"{speed:.2f}" for speed in grid.speeds)
    title = f"Bounded velocities: the front $\\Phi$ = {LEVEL:g} moves at finite speed (at most {along} along the axes)"
    figure.suptitle(title, weight="bold")
    axes = figure.subplots(1, len(grid.times), sharey=True)
    for axis, time, values, exact in zip(axes, grid.times, grid.values, study.front.exact, strict=True):
        image = _draw_field(axis, study, values)
        _draw_contour(axis, study, values, "white", "solid")
        _draw_contour(axis, study, exact, "black", "dashed")
        axis.set_title(f"t = {time:.2f}" + (" = T:  $\\Phi$ = G" if time == study.horizon else ""))
    axes[0].plot([], [], color="white", label=f"grid ({study.scheme})")
    axes[0].plot([], [], color="black", linestyle="dashed", label="Hopf-Lax")
    axes[0].legend(loc="upper right", fontsize=8, facecolor="0.7", framealpha=0.9)
    axes[0].set_ylabel("$x_2$")
    figure.colorbar(image, ax=axes, label="$\\Phi(x, t)$", pad=0.01)


def _draw_relaxation(figure: SubFigure, study: PDEStudy) -> None:
    relaxation = study.relaxation
    title = f"Velocities in the ball |v| $\\leq$ R, at t = {relaxation.time:.2f}: $\\Phi$ goes flat as R grows"
    figure.suptitle(title, weight="bold")
    axes = figure.subplots(1, len(relaxation.radii), sharey=True, squeeze=False)[0]
    for axis, radius, values in zip(axes, relaxation.radii, relaxation.values, strict=True):
        image = _draw_field(axis, study, values)
        _draw_contour(axis, study, values, "white", "solid")
        axis.set_title(f"R = {radius:g}:  max $\\Phi$ - min $\\Phi$ = {float(values.amax() - values.amin()):.2f}")
    axes[0].set_ylabel("$x_2$")
    figure.colorbar(image, ax=axes, label="$\\Phi(x, t)$", pad=0.01)


def _draw_errors(axis: Axes, study: PDEStudy) -> None:
    front, grid = study.front, study.front.grid
    remaining = [study.horizon - time for time in grid.times[1:]]
    axis.semilogy(remaining, front.largest_error[1:].tolist(), "o-", color=RADIUS_COLOURS[-1], label="largest")
    axis.semilogy(remaining, front.mean_error[1:].tolist(), "s-", color=RADIUS_COLOURS[1], label="mean")
    axis.axhline(max(grid.grid.spacing), color="0.5", linestyle="dotted", label="grid spacing")
    axis.set(xlabel="time to go, T - t", ylabel="|grid - Hopf-Lax|", title="Bounded velocities: the two solutions agree")
    axis.tick_params(axis="y", which="minor", labelsize=7)
    axis.legend(fontsize=9)
    axis.grid(alpha=0.3)


def _draw_spreads(axis: Axes, study: PDEStudy) -> None:
    relaxation, horizon = study.relaxation, study.horizon
    spread = relaxation.spread.tolist()
    for radius, colour in zip(relaxation.radii, _cycle(len(relaxation.radii)), strict=True):
        times = [horizon - reach / radius for reach in relaxation.reaches]
        axis.plot(times, spread, color=colour, linewidth=1.8, label=f"|v| $\\leq$ {radius:g}")
    axis.plot(
        [0, horizon, horizon], [0, 0, spread[0]], color=PLAIN[1], linestyle="dashed", label="whole space:\nflat, jumps at T"
    )
    bounded = study.front.exact.flatten(1)
    axis.plot(
        study.front.grid.times,
        (bounded.amax(1) - bounded.amin(1)).tolist(),
        "s--",
        color=PLAIN[2],
        label="bounded,\nas above",
    )
    axis.set(xlabel="depth-time t", ylabel="max $\\Phi$ - min $\\Phi$", title="How much the value still depends on the state")
    axis.set_xlim(-0.02 * horizon, 1.02 * horizon)
    axis.legend(fontsize=9, loc="center left", bbox_to_anchor=(1.01, 0.5))
    axis.grid(alpha=0.3)


def _cycle(count: int) -> list[str]:
    return [RADIUS_COLOURS[k % len(RADIUS_COLOURS)] for k in range(count)]


def _draw_field(axis: Axes, study: PDEStudy, values: Tensor) -> QuadMesh:
    first, second = (nodes.cpu().numpy() for nodes in study.front.grid.grid.axes)
    low, high = float(study.front.exact.amin()), float(study.front.exact.amax())
    image = axis.pcolormesh(first, second, values.T.cpu().numpy(), shading="nearest", cmap=FIELD_COLOURS, vmin=low, vmax=high)
    axis.set(xlabel="$x_1$", aspect="equal", xlim=(first[0], first[-1]), ylim=(second[0], second[-1]))
    axis.locator_params(axis="x", nbins=4, prune="upper")
    return image


def _draw_contour(axis: Axes, study: PDEStudy, values: Tensor, colour: str, style: str) -> None:
    if not values.amin() < LEVEL < values.amax():  # a flat value function has no front
        return
    first, second = (nodes.cpu().numpy() for nodes in study.front.grid.grid.axes)
    axis.contour(first, second, values.T.cpu().numpy(), levels=[LEVEL], colors=colour, linestyles=style, linewidths=1.4)
