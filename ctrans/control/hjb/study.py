"""Value functions in the plane: for bounded velocities, and for the whole space as a limit of
balls.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from ctrans.base.option import NOT_NEGATIVE, Range
from ctrans.base.shapes import PerBatch, Vectors
from ctrans.control.admissible import length
from ctrans.control.hjb import Grid, ValueFunction, solve_hjb
from ctrans.control.hjb.hopf_lax import BallImage, hopf_lax, velocity_ball
from ctrans.control.hjb.requests import numbers_of
from ctrans.control.hjb.synthesis import Synthesis, synthesis
from solvers import ConfigError, shown

HORIZON = 1.0
"""T."""
HALF_WIDTH = 2.0
"""Half of the square's side."""
SCHEME = "weno5"
"""How the grid takes derivatives."""
STARTS = 4
"""Descents per node: two targets make two basins."""
STRIDE = 4
"""The spread over the square is taken at every fourth node."""
REACHES = 25
"""For so many distances that velocities can cover."""
POINTS = Range(3, 1001)
"""Points per side."""
MOST_RADII = 64
ARROWS = 11
"""The feedback is taken at so many points per side."""
PATHS = 12
"""So many optimal paths start on a circle."""
CIRCLE = 0.85 * HALF_WIDTH
"""Its radius."""


@dataclass(frozen=True)
class NearestTarget:
    """G(x) = min_k |x - a_k|: the distance to the nearest target, as for steering tokens to their
    classes.
    """

    targets: tuple[tuple[float, ...], ...] = ((-0.9, 0.5), (0.8, -0.6))

    def __call__(self, x: Vectors) -> PerBatch:
        return length(x.unsqueeze(-2) - x.new_tensor(self.targets)).amin(-1)


@dataclass(frozen=True)
class PDEStudy:
    """The result of `pde_study`; `ctrans.report.hjb_figure.draw` draws it.

    - `front`: the value function of the bounded velocities by the grid; `exact`: that by Hopf-Lax,
      at the same nodes and times
    - `values`: the exact values for velocities in a ball of each of `radii`, at `time`
    - `spread[k]`: max - min of Phi over the square for a ball of velocities at distance
      `reaches[k]`. Phi depends on R and t only through the distance R (T - t). So the spread serves
      all radii: it is that at t = T - reaches[k]/R
    """

    front: ValueFunction
    exact: Float[Tensor, " times *space"]
    radii: tuple[float, ...]
    time: float
    values: Float[Tensor, " radii *space"]
    reaches: tuple[float, ...]
    spread: Float[Tensor, " reaches"]
    bounded: tuple[Synthesis, ...]
    balls: tuple[Synthesis, ...]

    @property
    def mean_error(self) -> Float[Tensor, " times"]:
        """The mean of abs(front - exact), at each time, over the nodes that no velocity takes out
        of the grid by T.

        At the other nodes the error is that of the extrapolation, not of the scheme. It is nan if
        there is no such node.
        """
        return torch.stack([error.mean() for error in self._errors()])

    @property
    def largest_error(self) -> Float[Tensor, " times"]:
        """The largest abs(front - exact), at each time, over the same nodes."""
        largest = []
        for error in self._errors():
            if error.numel() > 0:
                largest.append(error.amax())
            else:
                largest.append(error.mean())
        return torch.stack(largest)

    def _errors(self) -> list[Float[Tensor, " nodes"]]:
        masks = [self.front.untouched(time) for time in self.front.times]
        pairs = zip(masks, self.front.values - self.exact, strict=True)
        return [difference[mask].abs() for mask, difference in pairs]

    def summary(self) -> dict[str, object]:
        """The study's numbers without the fields, for JSON."""
        return {
            "horizon": HORIZON,
            "scheme": SCHEME,
            "points": self.front.grid.points,
            "steps": self.front.steps,
            "speeds": self.front.speeds,
            "times": self.front.times,
            "mean_error": self.mean_error.tolist(),
            "largest_error": self.largest_error.tolist(),
            "radii": self.radii,
            "radius_spread": [float(values.amax() - values.amin()) for values in self.values],
            "reaches": self.reaches,
            "spread": self.spread.tolist(),
            "radius_speed": [float(ball.speeds.amax()) for ball in self.balls],
        }


def pde_study(
    velocities: BallImage, *, points: int = 81, radii: tuple[float, ...] = (1.0, 4.0, 16.0)
) -> PDEStudy:
    """Phi(x, t) on a square for the given velocities and for balls of radius R; G is the distance
    to the nearest target.

    - `velocities`: the image of a norm of width 2
    - `points`: the square has so many points per side
    - `radii`: R of the balls

    (a) `velocities` (of `peri` or `output`: `velocity_hull(norm)`, width 2): Phi at t = T, 2T/3,
    T/3, 0 by the grid and by Hopf-Lax. Its level sets move at finite speed. (b) The ball R: Phi at
    t = 3T/4, and its spread over the square. Phi is flat as soon as R (T - t) takes every state to
    a target; so for the whole space it is flat for every t < T (Kan, Theorem 2). Both with optimal
    feedback and paths.

    Raises ConfigError for a width other than 2, and without radii.
    """
    if not isinstance(velocities, BallImage):
        raise ConfigError(f"velocities = {shown(velocities)}: give a BallImage, as velocity_hull's")
    POINTS.check("points", points, whole=True)
    radii = tuple(numbers_of("radii", radii))
    centre = velocities.centre
    if len(centre) != 2:
        raise ConfigError(
            f"velocities of width {len(centre)}: the study is drawn in the plane, give width 2"
        )
    if not radii:
        raise ConfigError("no radii for the balls of velocities: give at least one")
    if len(radii) > MOST_RADII:
        raise ConfigError(f"{len(radii):,} radii: give at most {MOST_RADII}, one panel each")
    for radius in radii:
        NOT_NEGATIVE.check("radius", radius)
    terminal = NearestTarget()
    times = tuple(HORIZON * k / 3 for k in (3, 2, 1, 0))
    grid = Grid(
        low=(-HALF_WIDTH, -HALF_WIDTH),
        high=(HALF_WIDTH, HALF_WIDTH),
        points=(points, points),
        dtype=centre.dtype,
        device=centre.device,
    )
    nodes = grid.nodes
    time = 0.75 * HORIZON

    def in_ball(radius: float, remaining: float, nodes: Tensor) -> Tensor:
        ball = velocity_ball(radius, 2, dtype=grid.dtype, device=grid.device)
        return hopf_lax(terminal, nodes, remaining, ball, starts=STARTS)

    diagonal = math.hypot(*(high - low for low, high in zip(grid.low, grid.high, strict=True)))
    reaches = tuple(diagonal * k / (REACHES - 1) for k in range(REACHES))
    samples = [in_ball(1.0, reach, nodes[::STRIDE, ::STRIDE]) for reach in reaches]
    front = solve_hjb(velocities, terminal, grid, times, horizon=HORIZON, scheme=SCHEME)
    exact = [hopf_lax(terminal, nodes, HORIZON - at, velocities, starts=STARTS) for at in times]
    values = [in_ball(radius, HORIZON - time, nodes) for radius in radii]
    spread = [sample.amax() - sample.amin() for sample in samples]

    def optimal(velocities: BallImage, at: float) -> Synthesis:
        return synthesis(
            terminal,
            _arrow_places(grid),
            _circle(grid),
            HORIZON - at,
            velocities,
            starts=STARTS,
        )

    balls = [velocity_ball(radius, 2, dtype=grid.dtype, device=grid.device) for radius in radii]
    return PDEStudy(
        front=front,
        exact=torch.stack(exact),
        radii=radii,
        time=time,
        values=torch.stack(values),
        reaches=reaches,
        spread=torch.stack(spread),
        bounded=tuple(optimal(velocities, at) for at in times if at < HORIZON),
        balls=tuple(optimal(ball, time) for ball in balls),
    )


def _arrow_places(grid: Grid) -> Float[Tensor, "states 2"]:
    """A coarse grid inside of the square."""
    coarse = replace(grid, points=(ARROWS + 2, ARROWS + 2))
    return coarse.nodes[1:-1, 1:-1].reshape(-1, 2)


def _circle(grid: Grid) -> Float[Tensor, "paths 2"]:
    """Equally spaced points of a circle around 0."""
    angles = 2 * math.pi * torch.arange(PATHS, dtype=grid.dtype, device=grid.device) / PATHS
    return CIRCLE * torch.stack([angles.cos(), angles.sin()], -1)
