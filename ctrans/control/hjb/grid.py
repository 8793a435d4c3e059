"""The HJB equation -dPhi/dt + H(grad Phi) = 0, Phi(x, T) = G(x), on a grid in 1 to 4 dimensions.

For validation: a grid in d dimensions has N^d points, too many for a hidden state. Closed forms
serve any width: `support` of the admissible set, and `hopf_lax`. The solver takes any Hamiltonian
that does not depend on the state.

The upwind schemes are entries of one table: first-order differences and WENO-5, each with its time
stepping.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from ctrans.control.hjb.ball_minimum import Terminal, finite_values
from ctrans.control.hjb.requests import (
    check_axis,
    check_device,
    check_dtype,
    check_hamiltonian,
    check_step_count,
    check_stepping,
    check_values,
    checked_times,
    counts_of,
    numbers_of,
)
from solvers import ConfigError, RungeKutta, Segment, shown
from solvers.errors import unknown
from solvers.explicit_tableaus import EULER
from solvers.solve import solve
from solvers.tableau import tableau

OnGrid = Float[Tensor, "*space"]
"""A number for each node."""

LARGEST_WIDTH = 4
SECANTS = 30
"""Number of secants that bound H's derivatives, each twice as long as the one before. The longest
leave an error of 2^-30.
"""


@runtime_checkable
class Hamiltonian(Protocol):
    """H(P) = sup over admissible velocities f of -<P, f>, convex in P. Every admissible set and
    `BallImage` is one.
    """

    def support(self, P: Tensor, /) -> Tensor: ...


@dataclasses.dataclass(frozen=True)
class Grid:
    """The nodes low_i + k (high_i - low_i)/(points_i - 1), k = 0 .. points_i - 1, in each of 1 to 4
    dimensions.

    Raises ConfigError for axes that the dtype does not resolve, and for more nodes than
    `requests.MOST_NODES`.
    """

    low: tuple[float, ...]
    high: tuple[float, ...]
    points: tuple[int, ...]
    dtype: torch.dtype = torch.float64
    device: torch.device | str = "cpu"

    def __post_init__(self) -> None:
        check_dtype(self.dtype)
        check_device(self.device)
        object.__setattr__(self, "points", counts_of(self.points))
        for name in ("low", "high"):
            object.__setattr__(self, name, tuple(numbers_of(name, getattr(self, name))))
        width = len(self.points)
        if not 1 <= width <= LARGEST_WIDTH:
            raise ConfigError(
                f"a grid of dimension {width}: give 1 to {LARGEST_WIDTH} dimensions, as grids have"
                " N^d points; or use the closed form, `support` for H and `hopf_lax` for Phi"
            )
        if len(self.low) != width or len(self.high) != width:
            raise ConfigError(
                f"low {self.low} and high {self.high}: give one entry for each dimension of points"
                f" {self.points}"
            )
        for low, high, count in zip(self.low, self.high, self.points, strict=True):
            check_axis(low, high, count, self.dtype)

    @property
    def axes(self) -> tuple[Float[Tensor, " _"], ...]:
        """The coordinates of the nodes along each dimension."""
        ends = zip(self.low, self.high, self.points, strict=True)
        return tuple(
            torch.linspace(low, high, count, dtype=self.dtype, device=self.device)
            for low, high, count in ends
        )

    @property
    def spacing(self) -> tuple[float, ...]:
        """The distance between neighbouring nodes along each dimension."""
        return tuple(
            (high - low) / (count - 1)
            for low, high, count in zip(self.low, self.high, self.points, strict=True)
        )

    @property
    def nodes(self) -> Float[Tensor, "*space width"]:
        """All nodes as states of that width."""
        return torch.stack(torch.meshgrid(*self.axes, indexing="ij"), -1)


@dataclasses.dataclass(frozen=True)
class ValueFunction:
    """Phi(x, t) at the nodes of a grid: `values[k]` at depth-time `times[k]`.

    `speeds` are the scheme's bounds on the velocities along each axis, `steps` is its number of
    steps.
    """

    grid: Grid
    times: tuple[float, ...]
    values: Float[Tensor, " times *space"]
    horizon: float
    speeds: tuple[float, ...]
    steps: int

    def untouched(self, time: float) -> Bool[Tensor, "*space"]:
        """The nodes that no velocity takes out of the grid by T: the grid's edges do not affect
        their value at that time.

        At the other nodes the extrapolation over the edges replaces the part of G outside.
        """
        mask = torch.ones(self.grid.points, dtype=torch.bool, device=self.grid.device)
        for axis, (nodes, speed) in enumerate(zip(self.grid.axes, self.speeds, strict=True)):
            travel = speed * (self.horizon - time)
            inside = (nodes - travel >= self.grid.low[axis]) & (
                nodes + travel <= self.grid.high[axis]
            )
            along_axis = [1] * mask.ndim
            along_axis[axis] = -1
            mask &= inside.reshape(along_axis)
        return mask


@torch.no_grad()
def solve_hjb(
    hamiltonian: Hamiltonian,
    terminal: Terminal,
    grid: Grid,
    times: Sequence[float],
    *,
    horizon: float,
    scheme: str = "weno5",
    cfl: float = 0.75,
    compiled: bool = False,
    progress: Callable[[float], None] | None = None,
) -> ValueFunction:
    """-dPhi/dt + H(grad Phi) = 0, Phi(x, T) = G(x), solved backward from T = `horizon` to each of
    `times` (depth-time).

    Method of lines: one-sided derivatives p-, p+ by `scheme`, the Lax-Friedrichs Hamiltonian H((p-
    + p+)/2) - sum_i a_i (p+_i - p-_i)/2 (Crandall, Lions 1984; Osher, Shu 1991), and the scheme's
    time stepping with dt sum_i a_i/h_i <= `cfl` <= 1. a_i bounds abs(dH/dp_i), see `speeds`. Beyond
    the edges Phi is extrapolated linearly.

    - `hamiltonian`, `terminal`: H of the slopes, and G of the grid's points
    - `grid`: the points, equally spaced along each axis
    - `times`, `horizon`: the times of the result, in [0, T], and T
    - `scheme`: a name of `SCHEMES`
    - `cfl`: the step as a share of the longest stable one
    - `compiled`: by `torch.compile`, which takes half a minute for each grid and H, and then runs
      2 to 4 times as fast (`docs/why/speed.md`). It needs a C++ compiler
    - `progress(t)`: called with the depth-time reached, after each step

    The error in L1 is of the scheme's order, at most 3 (time), where Phi is smooth, and about 1
    where it has kinks. Raises ConfigError for an unknown scheme, times outside [0, T], a cfl
    outside (0, 1], and an infinite H (there is no HJB equation: cut the set off with
    `velocity_ball`). Also for more steps of time than `requests.MOST_STEPS`, or more work than
    `requests.MOST_NODE_STEPS`, before the first step.
    """
    if not isinstance(grid, Grid):
        raise ConfigError(f"grid = {shown(grid)}: give a Grid(low, high, points)")
    check_hamiltonian(hamiltonian)
    times = checked_times(times, horizon, math.prod(grid.points))
    if not isinstance(scheme, str) or scheme not in SCHEMES:
        raise unknown("scheme", scheme, SCHEMES)
    check_stepping(cfl, compiled, progress)
    rule = SCHEMES[scheme]
    phi = finite_values(terminal, grid.nodes)
    bounds = speeds(hamiltonian, phi, grid)
    spacing = grid.spacing

    def slope(t: Tensor, phi: Tensor) -> Tensor:
        sides = [one_sided(rule, phi, axis, h) for axis, h in enumerate(spacing)]
        middle = torch.stack([(below + above) / 2 for below, above in sides], -1)
        H = hamiltonian.support(middle.unsqueeze(-2))
        for speed, (below, above) in zip(bounds, sides, strict=True):
            H = torch.sub(H, above - below, alpha=speed / 2)
        return H

    if compiled:
        slope = torch.compile(slope)
    rate = sum(speed / h for speed, h in zip(bounds, spacing, strict=True))
    intervals = list(pairwise(sorted({horizon, *times}, reverse=True)))
    steps_wanted = [max(1.0, (start - end) * rate / cfl) for start, end in intervals]
    check_step_count(sum(steps_wanted), phi.numel(), bounds, cfl)
    saved = {horizon: phi}
    total_steps = 0
    for (start, end), wanted in zip(intervals, steps_wanted, strict=True):
        steps = math.ceil(wanted)
        marks = [*(start + (end - start) * k / steps for k in range(steps)), end]
        segments = [Segment(a, b, slope) for a, b in pairwise(marks)]
        report = _by_time(progress, marks)
        phi = solve(segments, phi, method=rule.method, progress=report).x1
        saved[end] = phi
        total_steps += steps
    return ValueFunction(
        grid=grid,
        times=tuple(times),
        values=torch.stack([saved[time] for time in times]),
        horizon=horizon,
        speeds=bounds,
        steps=total_steps,
    )


def _by_time(
    progress: Callable[[float], None] | None, marks: Sequence[float]
) -> Callable[[int], None] | None:
    """The progress of `solve`, which counts segments, as the depth-time reached."""
    if progress is None:
        return None

    def report(segment: int) -> None:
        progress(marks[segment + 1])

    return report


def speeds(hamiltonian: Hamiltonian, phi: OnGrid, grid: Grid) -> tuple[float, ...]:
    """a_i = min over s of (max_c H(c +- s e_i) - m)/s >= abs(dH/dp_i) at every possible slope.

    The slopes are those of the box abs(p_i) <= r_i, r_i the largest abs(dPhi/dx_i) of the given
    values, c its corners. Those at T suffice: H does not depend on x, so a Lipschitz constant of
    Phi never grows. By convexity H is at most its largest value at the corners, at least m = 2 H(0)
    - max_c H(c), and its derivative is at most the secant's slope, for every s > 0. For bounded
      velocities long secants give a_i, the largest velocity along the axis, to 1e-8. For a
      quadratic H short secants give a value some 3 times too large. Raises ConfigError if H is
      infinite.
    """
    check_hamiltonian(hamiltonian)
    eye = torch.eye(phi.ndim, dtype=phi.dtype, device=phi.device)
    slopes = torch.stack(
        [phi.diff(dim=axis).abs().amax() / h for axis, h in enumerate(grid.spacing)]
    )
    signs = torch.cartesian_prod(*[slopes.new_tensor([-1, 1])] * phi.ndim)
    corners = slopes * signs.reshape(-1, phi.ndim)
    largest = slopes.amax()
    shortest = torch.where(largest > 0, largest, 1.0)
    lengths = shortest * 2.0 ** torch.arange(SECANTS, device=phi.device)
    # (length, sign, axis, corner, width)
    moves = lengths[:, None, None, None, None] * torch.stack([eye, -eye])[:, :, None, :]

    def value(p: Tensor) -> Tensor:
        values = hamiltonian.support(p.unsqueeze(-2))
        check_values("the Hamiltonian's support", values, p)
        return values

    least = 2 * value(torch.zeros_like(slopes)) - value(corners).amax()
    largest_on_secants = value(corners + moves).amax((1, 3))
    bound = ((largest_on_secants - least) / lengths[:, None]).amin(0)
    if not bool(torch.isfinite(bound).all()):
        raise ConfigError(
            "the Hamiltonian is infinite off P = 0: the admissible velocities are unbounded and the"
            " problem is degenerate, so there is no HJB equation to solve; cut the velocities off"
            " with velocity_ball(R), or add a running cost"
        )
    return tuple(bound.tolist())


TVD_RK3 = RungeKutta(tableau(3, [[], [1], ["1/4", "1/4"]], ["1/6", "1/6", "2/3"]))
"""Shu and Osher (1988): each stage is a convex combination of Euler steps, so it stays monotone at
Euler's step.
"""


Sides = tuple[Tensor, Tensor]
"""The derivatives from below and from above."""


def upwind(slopes: Tensor, axis: int) -> Sides:
    """The nearest difference on each side, order 1. With Lax-Friedrichs the scheme is monotone, so
    it cannot overshoot.
    """
    return _but_last(slopes, axis, 1), _from(slopes, axis, 1)


def weno5(slopes: Tensor, axis: int) -> Sides:
    """sum_k w_k phi_k, three parabolas' derivatives weighted by smoothness: order 5 where smooth
    (Jiang, Peng 2000).

    From each side phi_k is that of three neighbours among the five nearest differences s. w_k is
    proportional to (0.1, 0.6, 0.3)_k/(S_k + eps)^2, from the far side inward; eps is 1e-6 times the
    largest of the five squared (Osher, Fedkiw 2003), so the weights do not depend on the units of x
    and Phi. Both sides use the S_k of the same triples. In terms of e = diff(s) they and phi_k take
    the fewest operations.
    """
    count = slopes.shape[axis] - 5
    e = slopes.diff(dim=axis)
    d = _but_last(e, axis, 1)
    f = _from(e, axis, 1)
    bend = torch.sub(f, d).square_().mul_(13 / 12)
    # S_k of a triple that the node sees at its right end, in its middle and at its left end
    at_right = torch.add(bend, torch.sub(d, f, alpha=3).square_(), alpha=0.25)
    at_middle = torch.add(bend, (d + f).square_(), alpha=0.25)
    at_left = torch.add(bend, torch.sub(f, d, alpha=3).square_(), alpha=0.25)
    size = slopes.abs()
    pairs = torch.maximum(_but_last(size, axis, 1), _from(size, axis, 1))
    fours = torch.maximum(_but_last(pairs, axis, 2), _from(pairs, axis, 2))
    largest = torch.maximum(_but_last(fours, axis, 1), _from(size, axis, 4))
    # the last term only keeps a flat field's weights finite, in float32 too
    floor = largest.square_().mul_(1e-6).add_(1e-15)

    def blend(
        node: int, eps: int, parabolas: Sequence[tuple[Tensor, int, int, float, int, float]]
    ) -> Tensor:
        """s + sum_k w_k (p e_i + q e_j)/(6 sum_k w_k), of S and its index, i, p, j, q."""
        total = torch.zeros_like(at(floor, eps))
        weights = torch.zeros_like(at(floor, eps))
        for share, (smoothness, k, i, p, j, q) in zip((1, 6, 3), parabolas, strict=True):
            w = (at(smoothness, k) + at(floor, eps)).square_().reciprocal_().mul_(share)
            total.addcmul_(w, torch.add(p * at(e, i), at(e, j), alpha=q))
            weights += w
        return torch.addcdiv(at(slopes, node), total, weights, value=1 / 6)

    def at(z: Tensor, k: int) -> Tensor:
        return z.narrow(axis, k, count)

    below = blend(
        2, 0, ((at_right, 0, 1, 5, 0, -2), (at_middle, 1, 1, 1, 2, 2), (at_left, 2, 2, 4, 3, -1))
    )
    above = blend(
        3, 1, ((at_left, 3, 3, -5, 4, 2), (at_middle, 2, 2, -2, 3, -1), (at_right, 1, 2, -4, 1, 1))
    )
    return below, above


def _from(z: Tensor, axis: int, first: int) -> Tensor:
    return z.narrow(axis, first, z.shape[axis] - first)


def _but_last(z: Tensor, axis: int, count: int) -> Tensor:
    return z.narrow(axis, 0, z.shape[axis] - count)


@dataclasses.dataclass(frozen=True)
class UpwindScheme:
    """A rule for the derivatives from both sides: `sides` of the differences along an axis, with
    `ghosts` further ones at each end.

    `order` is the derivative's order where Phi is smooth, `ghosts` the number of points it needs
    beyond the grid's edge. `method` is the time stepping, total-variation diminishing.
    """

    sides: Callable[[Tensor, int], Sides]
    ghosts: int
    order: int
    method: RungeKutta


SCHEMES: dict[str, UpwindScheme] = {
    "upwind": UpwindScheme(upwind, ghosts=1, order=1, method=RungeKutta(EULER)),
    "weno5": UpwindScheme(weno5, ghosts=3, order=5, method=TVD_RK3),
}


def one_sided(
    scheme: UpwindScheme, values: OnGrid, axis: int, spacing: float
) -> tuple[OnGrid, OnGrid]:
    """(p-, p+): the derivatives along an axis from below and from above.

    Beyond the edges the values continue linearly, with the slope of the outermost cell.
    """
    count = values.shape[axis]
    inner = values.diff(dim=axis) / spacing
    first = inner.narrow(axis, 0, 1)
    last = inner.narrow(axis, count - 2, 1)
    slopes = torch.cat([first] * scheme.ghosts + [inner] + [last] * scheme.ghosts, axis)
    return scheme.sides(slopes, axis)
