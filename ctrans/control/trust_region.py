"""Quadratic programs on a sphere or in a ball, by the secular equation, many at once.

min s'As/2 + b's over |s| = r, A diagonal, has the solution s = -(A + mu)^-1 b with mu >= -min(A)
such that |s| = r (More and Sorensen, 1983). |s| falls strictly in mu, and 1/|s| is concave, so
Newton's method on 1/|s| = 1/r climbs to the root from any point below it, quadratically.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from ctrans.base.shapes import BatchMask
from ctrans.control.admissible import ratio, rounding_of
from solvers import SolveError

Coordinates = Float[Tensor, "*batch rank"]
"""A point of each problem."""

NEWTON_STEPS = 100
"""Far more than needed: a dozen is the most observed."""


def on_sphere(
    curvature: Float[Tensor, " rank"], b: Coordinates, radius: float
) -> tuple[Coordinates, BatchMask]:
    """argmin of s'As/2 + b's over |s| = radius, A = diag(curvature), and whether it is the hard
    case.

    Hard case: b has (to rounding) nothing along the smallest curvature, and the other entries of s
    do not fill the radius. Both signs of the missing entry are then optimal. The function gives it
    to the first smallest curvature, with plus if b has no sign there.
    """
    lowest = curvature.argmin()
    s, short = _solve(curvature - curvature[lowest], b / radius, rounding_of(b))
    first = torch.arange(len(curvature), device=b.device) == lowest
    filled_by_others = torch.where(first, 0.0, s).square().sum(-1, keepdim=True)
    # the 1 avoids the root's infinite slope in the gradient elsewhere
    missing = torch.where(short, 1 - filled_by_others, 1.0).sqrt()
    filled = torch.where(first, torch.where(s >= 0, missing, -missing), s)
    return radius * torch.where(short, filled, s), short.squeeze(-1)


def in_ball(curvature: Float[Tensor, "*#batch rank"], b: Coordinates, radius: float) -> Coordinates:
    """argmin of s'As/2 + b's over |s| <= radius, A = diag(curvature) >= 0; the shortest if there
    are several.
    """
    return radius * _solve(curvature, b / radius, 0.0)[0]


def _solve(gaps: Tensor, b: Tensor, floor: float) -> tuple[Tensor, Tensor]:
    """s = -b/(gaps + t) with |s| = 1 and t > floor, or |s| < 1 at t = floor; and whether it is the
    second case.
    """
    length_of_b = torch.linalg.vector_norm(b, dim=-1, keepdim=True)
    scale = torch.maximum(gaps.amax(-1, keepdim=True), length_of_b).detach()
    gaps = ratio(gaps.expand_as(b), scale)
    b = ratio(b, scale)
    rounding = rounding_of(b)
    with torch.no_grad():
        # a lower bound of the root from each entry
        t = (b.abs() - gaps).amax(-1, keepdim=True).clamp_min(floor)
        for _ in range(NEWTON_STEPS):
            step = _newton_step(gaps, b, t, rounding)
            # a point of the surface has its root at t = 0, where steps are rounding and t too
            size = torch.linalg.vector_norm(ratio(b, gaps + t), dim=-1, keepdim=True)
            t = t + step
            if ((step <= rounding * t) | (size <= 1 + rounding)).all():
                break
        else:
            raise SolveError(
                f"the secular equation did not converge in {NEWTON_STEPS} Newton steps: use float64"
            )
    # this step is zero to rounding, but has the root's derivative in b
    t = t + _newton_step(gaps, b, t, rounding)
    s = -ratio(b, gaps + t)
    size = torch.linalg.vector_norm(s, dim=-1, keepdim=True)
    short = size < 1 - rounding
    return torch.where(short, s, s / torch.where(short, 1.0, size)), short


def _newton_step(gaps: Tensor, b: Tensor, t: Tensor, rounding: float) -> Tensor:
    """The Newton step for 1/|s(t)| = 1, and 0 if |s(t)| < 1: there is no root above t then."""
    s = ratio(b, gaps + t)
    size = torch.linalg.vector_norm(s, dim=-1, keepdim=True)
    slope = ratio(s.square(), gaps + t).sum(-1, keepdim=True)
    return torch.where(size >= 1 - rounding, ratio((size - 1) * size.square(), slope), 0.0)
