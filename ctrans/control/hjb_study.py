"""Value functions in the plane: for bounded velocities, and for the whole space as a limit of
balls.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

from ctrans.control.hjb import Grid, ValueFunction, solve_hjb
from ctrans.control.hopf_lax import BallImage, Terminal, hopf_lax, velocity_ball
from ctrans.control.shapes import PerBatch
from solvers import ConfigError

STARTS = 4
"""Descents per node: two targets make two basins."""
STRIDE, REACHES = 4, 25
"""The spread over the square is taken at every fourth node, for 25 distances that velocities can
cover.
"""


@dataclasses.dataclass(frozen=True)
class NearestTarget:
    """G(x) = min_k |x - a_k|: the distance to the nearest target, as for steering tokens to their
    classes.
    """

    targets: tuple[tuple[float, ...], ...] = ((-0.9, 0.5), (0.8, -0.6))

    def __call__(self, x: Float[Tensor, "*batch width"]) -> PerBatch:
        distances: Tensor = torch.linalg.vector_norm(x.unsqueeze(-2) - x.new_tensor(self.targets), dim=-1)
        return distances.amin(-1)


@dataclasses.dataclass(frozen=True)
class Front:
    """Bounded velocities: the value function by the grid and by Hopf-Lax, at the same nodes and
    times.

    Errors are over the nodes that no velocity takes out of the grid by T. At the other nodes the
    error is that of the extrapolation, not of the scheme. Errors are nan if there is no such node.
    """

    grid: ValueFunction
    exact: Float[Tensor, " times *space"]

    @property
    def mean_error(self) -> Float[Tensor, " times"]:
        """The mean of abs(grid - exact), at each time."""
        return torch.stack([error.mean() for error in self._errors()])

    @property
    def largest_error(self) -> Float[Tensor, " times"]:
        """max abs(grid - exact), at each time."""
        return torch.stack([error.amax() if error.numel() else error.mean() for error in self._errors()])

    def _errors(self) -> list[Float[Tensor, " nodes"]]:
        masks = [self.grid.untouched(time) for time in self.grid.times]
        pairs = zip(masks, self.grid.values - self.exact, strict=True)
        return [difference[mask].abs() for mask, difference in pairs]


@dataclasses.dataclass(frozen=True)
class Relaxation:
    """Velocities in a ball of radius R: exact values at `time` for each of `radii`, and the spread
    of Phi over the square.

    Phi depends on R and t only through the distance R (T - t). So `spread[k]`, max - min of Phi at
    distance `reaches[k]`, serves all radii: it is the spread at t = T - reaches[k]/R.
    """

    radii: tuple[float, ...]
    time: float
    values: Float[Tensor, " radii *space"]
    reaches: tuple[float, ...]
    spread: Float[Tensor, " reaches"]


@dataclasses.dataclass(frozen=True)
class PDEStudy:
    """The result of `pde_study`; `ctrans.report.hjb_figure.draw` draws it."""

    terminal: Terminal
    velocities: BallImage
    horizon: float
    scheme: str
    front: Front
    relaxation: Relaxation

    def summary(self) -> dict[str, object]:
        """The study's numbers without the fields, for JSON."""
        front, relaxation = self.front, self.relaxation
        return {
            "horizon": self.horizon,
            "scheme": self.scheme,
            "points": list(front.grid.grid.points),
            "steps": front.grid.steps,
            "speeds": list(front.grid.speeds),
            "times": list(front.grid.times),
            "mean_error": front.mean_error.tolist(),
            "largest_error": front.largest_error.tolist(),
            "radii": list(relaxation.radii),
            "radius_spread": [float(values.amax() - values.amin()) for values in relaxation.values],
            "reaches": list(relaxation.reaches),
            "spread": relaxation.spread.tolist(),
        }


def pde_study(
    velocities: BallImage,
    *,
    terminal: Terminal | None = None,
    horizon: float = 1.0,
    half_width: float = 2.0,
    points: int = 81,
    radii: tuple[float, ...] = (1.0, 4.0, 8.0, 16.0),
    scheme: str = "weno5",
    progress: Callable[[float], None] | None = None,
) -> PDEStudy:
    """Phi(x, t) on a square for the given velocities and for balls of radius R.

    - `velocities`: the image of a norm of width 2
    - `terminal`: G, the distance to the nearest target if None
    - `horizon`: T
    - `half_width`, `points`: the square is [-half_width, half_width]^2, with so many points per
      side
    - `radii`: R of the balls
    - `scheme`: how the grid takes derivatives, a name of `SCHEMES`
    - `progress(t)`: called during the grid's solve

    (a) `velocities` (of `peri` or `output`: `velocity_hull(norm)`, width 2): Phi at t = T, 2T/3,
    T/3, 0 by the grid and by Hopf-Lax. Its level sets move at finite speed. (b) The ball R: Phi at
    t = 3T/4, and its spread over the square. Phi is flat as soon as R (T - t) takes every state to
    a target; so for the whole space it is flat for every t < T (Kan, Theorem 2).

    Raises ConfigError for a width other than 2, and without radii.
    """
    if len(velocities.centre) != 2:
        raise ConfigError(f"velocities of width {len(velocities.centre)}: the study is drawn in the plane, give width 2")
    if not radii:
        raise ConfigError("no radii for the balls of velocities: give at least one")
    terminal = NearestTarget() if terminal is None else terminal
    centre = velocities.centre
    grid = Grid((-half_width,) * 2, (half_width,) * 2, (points,) * 2, dtype=centre.dtype, device=centre.device)
    front = _front(velocities, terminal, grid, horizon, scheme, progress)
    return PDEStudy(terminal, velocities, horizon, scheme, front, _relaxation(terminal, grid, horizon, radii))


def _front(
    velocities: BallImage, terminal: Terminal, grid: Grid, horizon: float, scheme: str, progress: Callable[[float], None] | None
) -> Front:
    times = tuple(horizon * k / 3 for k in (3, 2, 1, 0))
    by_grid = solve_hjb(velocities, terminal, grid, times, horizon=horizon, scheme=scheme, progress=progress)
    exact = [hopf_lax(terminal, grid.nodes, horizon - time, velocities, starts=STARTS) for time in times]
    return Front(by_grid, torch.stack(exact))


def _relaxation(terminal: Terminal, grid: Grid, horizon: float, radii: tuple[float, ...]) -> Relaxation:
    def values(radius: float, remaining: float, nodes: Tensor) -> Tensor:
        return hopf_lax(terminal, nodes, remaining, velocity_ball(radius, 2, dtype=grid.dtype, device=grid.device), starts=STARTS)

    time, nodes = 0.75 * horizon, grid.nodes
    fields = torch.stack([values(radius, horizon - time, nodes) for radius in radii])
    diagonal = math.hypot(*(high - low for low, high in zip(grid.low, grid.high, strict=True)))
    reaches = tuple(diagonal * k / (REACHES - 1) for k in range(REACHES))
    samples = [values(1.0, reach, nodes[::STRIDE, ::STRIDE]) for reach in reaches]
    return Relaxation(radii, time, fields, reaches, torch.stack([sample.amax() - sample.amin() for sample in samples]))
