"""Upwind schemes as entries of one table: first-order differences and WENO-5, each with a time step that suits it."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from solvers import RungeKutta
from solvers.tableau import EULER, tableau

TVD_RK3 = RungeKutta(tableau(3, [[], [1], ["1/4", "1/4"]], ["1/6", "1/6", "2/3"]))
"""Shu and Osher (1988): each stage is a convex combination of Euler steps, so it keeps Euler's monotonicity at the same step."""


def upwind(v: Sequence[Tensor]) -> Tensor:
    """The nearest difference on that side, order 1: with Lax-Friedrichs a monotone scheme, so it cannot overshoot."""
    return v[0]


def weno5(v: Sequence[Tensor]) -> Tensor:
    """sum_k w_k phi_k, three parabolas' derivatives weighed by smoothness: order 5 where smooth (Jiang, Peng 2000).

    v are the five nearest differences, from the far side inward. w_k is proportional to (0.1, 0.6, 0.3)_k/(S_k + eps)^2; eps is
    1e-6 times the largest of the v squared (Osher, Fedkiw 2003), so that the weights do not depend on the units of x and Phi.
    """
    a, b, c, d, e = v
    largest = functools.reduce(torch.maximum, (slope.abs() for slope in v))
    floor = 1e-6 * largest.square() + 1e-15  # the last term only keeps a flat field's weights finite, in float32 too
    far = 0.1 / (13 / 12 * (a - 2 * b + c).square() + (a - 4 * b + 3 * c).square() / 4 + floor).square()
    mid = 0.6 / (13 / 12 * (b - 2 * c + d).square() + (b - d).square() / 4 + floor).square()
    near = 0.3 / (13 / 12 * (c - 2 * d + e).square() + (3 * c - 4 * d + e).square() / 4 + floor).square()
    total = far * (2 * a - 7 * b + 11 * c) + mid * (-b + 5 * c + 2 * d) + near * (2 * c + 5 * d - e)
    return total / (6 * (far + mid + near))


@dataclasses.dataclass(frozen=True)
class UpwindScheme:
    """A rule for the derivative from one side: `derivative` of the 2 `ghosts` - 1 differences nearest to a point on that side.

    `order` is the derivative's order where Phi is smooth, `ghosts` the number of points it needs beyond the grid's edge, and
    `method` the time stepping, total-variation diminishing in either case.
    """

    derivative: Callable[[Sequence[Tensor]], Tensor]
    ghosts: int
    order: int
    method: RungeKutta


SCHEMES: dict[str, UpwindScheme] = {
    "upwind": UpwindScheme(upwind, ghosts=1, order=1, method=RungeKutta(EULER)),
    "weno5": UpwindScheme(weno5, ghosts=3, order=5, method=TVD_RK3),
}


def one_sided(
    scheme: UpwindScheme, values: Float[Tensor, "*space"], axis: int, spacing: float
) -> tuple[Float[Tensor, "*space"], Float[Tensor, "*space"]]:
    """(p-, p+): the derivatives along an axis from below and from above.

    Beyond the edges the values are extrapolated linearly, that is with the slope of the outermost cell.
    """
    count = values.shape[axis]
    inner = values.diff(dim=axis) / spacing
    first, last = inner.narrow(axis, 0, 1), inner.narrow(axis, count - 2, 1)
    slopes = torch.cat([first] * scheme.ghosts + [inner] + [last] * scheme.ghosts, axis)
    windows = [slopes.narrow(axis, k, count) for k in range(2 * scheme.ghosts)]
    return scheme.derivative(windows[:-1]), scheme.derivative(windows[:0:-1])
