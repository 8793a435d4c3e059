"""Minima of many functions on the unit ball at once, in four stages.

- A sample selects the basins
- The spectral projected gradient (Birgin, Martinez, Raydan 2000: Barzilai-Borwein steps, projected
  on the ball) reaches a smooth minimum to rounding
- A pattern search without derivatives goes on where the gradients end
- Where the gradient does not vanish, at a kink, Shor's r-algorithm follows the kink (Shor 1985;
  Stetsyuk 2017): subgradient steps in a space that is dilated along the difference of two
  subgradients
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from ctrans.base.shapes import PerBatch, Vectors
from ctrans.control.admissible import length
from ctrans.control.hjb.requests import check_values
from solvers import ConfigError, shown

PerProblem = Float[Tensor, " rows"]
"""A number for each problem."""

FromBall = Float[Tensor, "width rank"]
"""A linear map from the ball."""

Terminal = Callable[[Tensor], Tensor]
"""A terminal cost G: from states (..., width) to values (...), differentiable almost everywhere."""

BallPoints = Float[Tensor, "rows rank"]
"""One point of the unit ball for each problem."""

SAMPLES_PER_START = 32
NEIGHBOURS = 8
DESCENT_STEPS = 3000
"""A limit for the hardest rows. A row leaves the loop when it has converged, mostly after 10 to 50
steps.
"""
MEMORY = 3
"""A step must bring g below the largest of the last MEMORY values. This freedom keeps
Barzilai-Borwein steps fast.
"""
ARMIJO = 1e-4
"""By how much, as a share of |dw|^2/s."""
GROW = 10.0
"""The largest factor of an accepted step's size."""
SHRINK = 0.25
"""The factor of a rejected step's size."""
STRIDE = 0.1
"""The longest step, about the sample's spacing: a longer one may leave the basin of its start."""
SEARCH_RADIUS = 0.05
"""The first r of the pattern search."""
SEARCH_STEPS = 400
KINK_RANK = 64
"""The largest rank in which kinks are followed: the time grows as its cube."""
KINK_STEPS = (0.2, 0.02)
"""The r-algorithm runs with each of these first steps. The long one converges sooner; the short one
stays in its basin.
"""
KINK_ROUNDS = 3
"""It starts again, with the space as it was, where it got lower: in one of 10 cases of rank 8 the
first round ended 3e-6 above the minimum.
"""
DILATION = 0.5
"""The factor by which the space shrinks along the difference of two subgradients."""
LONGER = 1.1
"""The factor of the step after every third one in the same direction."""


@dataclass(frozen=True)
class Problems:
    """g_k(w) = G(z_k + A w) for many base points z_k: functions on the unit ball, minimised in
    parallel.
    """

    cost: Terminal
    base: Float[Tensor, "rows width"]
    map: FromBall

    def __call__(self, w: Float[Tensor, " rows *many rank"]) -> Float[Tensor, " rows *many"]:
        base = self.base.reshape(len(self.base), *[1] * (w.ndim - 2), -1)
        return self.cost(base + w @ self.map.T)

    def slope(self, w: BallPoints) -> tuple[PerProblem, BallPoints]:
        """g(w) and its gradient."""
        with torch.enable_grad():
            w = w.detach().requires_grad_()
            # the second term gives a G that ignores its argument a gradient
            values = self(w) + 0 * w.sum(-1)
            (slope,) = torch.autograd.grad(values.sum(), w)
        return values.detach(), slope

    def of(self, rows: Tensor) -> Problems:
        """The problems of these rows."""
        return replace(self, base=self.base[rows])


def finite_values(cost: Terminal, x: Vectors) -> PerBatch:
    """G(x). Raises ConfigError if it has the wrong shape or is not finite."""
    if not callable(cost):
        raise ConfigError(f"the terminal cost is {shown(cost)}: give a function of states")
    values = cost(x)
    check_values("the terminal cost", values, x)
    if not torch.isfinite(values).all():
        raise ConfigError(
            "the terminal cost is not finite at some of the states: give a G that is finite"
            " wherever a token can get"
        )
    return values


class Minimum(NamedTuple):
    """g(w) and w of each problem."""

    value: PerProblem
    w: BallPoints


def minimise(
    cost: Terminal, base: Float[Tensor, "rows width"], map: FromBall, starts: int
) -> Minimum:
    """min over |w| <= 1 of G(z_k + A w) for each row z_k of `base`. The lowest of the descents from
    `starts` points each goes through the later stages.
    """
    problems = Problems(cost, base, map)
    w = starting_points(problems, starts)
    repeated = Problems(cost, base.repeat_interleave(starts, 0), map)
    w = descend(repeated, w.flatten(0, 1)).reshape(w.shape)
    return along_kinks(problems, search(problems, _take(w, problems(w).argmin(-1))))


def project(w: Float[Tensor, "*rows rank"]) -> Float[Tensor, "*rows rank"]:
    """w / max(|w|, 1), the nearest point of the unit ball."""
    return w / length(w).unsqueeze(-1).clamp(min=1)


def starting_points(problems: Problems, starts: int) -> Float[Tensor, "rows starts rank"]:
    """The lowest local minima of g on a Sobol sample of the ball, each compared with its
    `NEIGHBOURS` nearest points.

    If there are fewer than `starts`, the lowest other points follow.
    """
    rank = problems.map.shape[-1]
    sobol_points: Callable[..., Tensor] = torch.quasirandom.SobolEngine(rank).draw  # type: ignore[no-untyped-call, unused-ignore]  # torch gives it no types
    sobol = sobol_points(SAMPLES_PER_START * starts, dtype=torch.float64)
    points = project(2 * sobol - 1).to(problems.base)
    near = torch.cdist(points, points).topk(NEIGHBOURS + 1, largest=False).indices
    values = finite_values(problems.cost, problems.base.unsqueeze(1) + points @ problems.map.T)
    span = values.amax(-1, keepdim=True) - values.amin(-1, keepdim=True)
    minimal = values <= values[:, near].amin(-1)
    minima_first = torch.where(minimal, values, values + 2 * span)
    return points[minima_first.topk(starts, largest=False).indices]


def descend(problems: Problems, w: BallPoints) -> BallPoints:
    """Steps from w towards P(w - s grad g), s = |dw|^2/<dw, dgrad>, accepted if g falls enough
    (Armijo). Returns the lowest point found.
    """
    # a smaller move changes a smooth g by less than rounding
    resolution = torch.finfo(w.dtype).eps ** 0.6
    tiny = torch.finfo(w.dtype).tiny
    rows = torch.arange(len(w), device=w.device)
    value, slope = problems.slope(w)
    result = w.clone()
    lowest = value.clone()
    recent = value.unsqueeze(-1).repeat(1, MEMORY)
    size = 1 / length(slope).clamp(min=tiny)
    for step in range(DESCENT_STEPS):
        full = project(w - size.unsqueeze(-1) * slope) - w
        fraction = STRIDE / length(full).clamp(min=STRIDE)
        trial = w + fraction.unsqueeze(-1) * full
        trial_value, trial_slope = problems.slope(trial)
        move = trial - w
        turn = trial_slope - slope
        squared_length = move.square().sum(-1)
        curvature = (move * turn).sum(-1)
        accept = trial_value <= recent.amax(-1) - ARMIJO * squared_length / (fraction * size)
        secant = torch.where(curvature > 0, squared_length / curvature, math.inf)
        size = torch.where(accept, secant.minimum(GROW * size), SHRINK * size)
        w = torch.where(accept.unsqueeze(-1), trial, w)
        slope = torch.where(accept.unsqueeze(-1), trial_slope, slope)
        value = torch.where(accept, trial_value, value)
        recent[:, step % MEMORY] = value
        better = value < lowest[rows]
        lowest[rows[better]] = value[better]
        result[rows[better]] = w[better]
        moving = squared_length.sqrt() > resolution
        if not moving.any():
            break
        rows = rows[moving]
        w = w[moving]
        value = value[moving]
        slope = slope[moving]
        size = size[moving]
        recent = recent[moving]
        problems = problems.of(moving)
    return result


def search(problems: Problems, w: BallPoints) -> Minimum:
    """The end of a pattern search: the best of w +- r e_i, projected, or r halved, until r is below
    rounding.
    """
    eye = torch.eye(w.shape[-1], dtype=w.dtype, device=w.device)
    pattern = torch.cat([eye, -eye])
    value = problems(w)
    result = Minimum(value.clone(), w.clone())
    rows = torch.arange(len(w), device=w.device)
    radius = torch.full_like(value, SEARCH_RADIUS)
    for _ in range(SEARCH_STEPS):
        trials = project(w.unsqueeze(-2) + radius[:, None, None] * pattern)
        best, index = problems(trials).min(-1)
        better = best < value
        w = torch.where(better.unsqueeze(-1), _take(trials, index), w)
        value = torch.minimum(value, best)
        radius = torch.where(better, radius, radius / 2)
        result.value[rows] = value
        result.w[rows] = w
        moving = radius > torch.finfo(w.dtype).eps
        if not moving.any():
            break
        rows = rows[moving]
        w = w[moving]
        value = value[moving]
        radius = radius[moving]
        problems = problems.of(moving)
    return result


def along_kinks(problems: Problems, minimum: Minimum) -> Minimum:
    """The minimum, lowered by the r-algorithm where it is at a kink."""
    if problems.map.shape[-1] > KINK_RANK:
        return minimum
    result = Minimum(minimum.value.clone(), minimum.w.clone())
    steepness = _steepness_at_kinks(problems, minimum)
    rows = steepness.nonzero().squeeze(-1)
    for _ in range(KINK_ROUNDS):
        if len(rows) == 0:
            break
        before = result.value[rows]
        lower = _from_both_steps(problems.of(rows), Minimum(before, result.w[rows]))
        result.value[rows] = lower.value
        result.w[rows] = lower.w
        rounding = torch.finfo(before.dtype).eps * (before.abs() + steepness[rows])
        rows = rows[before - lower.value > 64 * rounding]
    return result


def _from_both_steps(problems: Problems, start: Minimum) -> Minimum:
    """The lower end of the r-algorithm's runs with each of `KINK_STEPS`."""
    runs = len(KINK_STEPS)
    tries = torch.arange(len(start.w), device=start.w.device).repeat_interleave(runs)
    steps = start.value.new_tensor(KINK_STEPS).repeat(len(start.w))
    repeated = Minimum(start.value[tries], start.w[tries])
    lower = dilated_descent(problems.of(tries), repeated, steps)
    value, index = lower.value.reshape(-1, runs).min(-1)
    return Minimum(value, _take(lower.w.reshape(len(start.w), runs, -1), index))


def _steepness_at_kinks(problems: Problems, minimum: Minimum) -> PerProblem:
    """The length of the gradient along the ball; 0 where it is none against g's changes nearby."""
    w = minimum.w
    _, slope = problems.slope(w)
    size = length(slope).clamp(min=torch.finfo(w.dtype).tiny)
    moved = project(w - STRIDE / size.unsqueeze(-1) * slope) - w
    steepness = size * length(moved) / STRIDE
    eye = torch.eye(w.shape[-1], dtype=w.dtype, device=w.device)
    near = w.unsqueeze(-2) + SEARCH_RADIUS * torch.cat([eye, -eye])
    nearby = problems(project(near)) - minimum.value.unsqueeze(-1)
    variation = nearby.abs().amax(-1) / SEARCH_RADIUS
    threshold = min(0.1, 1e3 * math.sqrt(torch.finfo(w.dtype).eps))
    return torch.where(steepness > threshold * variation, steepness, 0.0)


def dilated_descent(problems: Problems, start: Minimum, step: PerProblem) -> Minimum:
    """The lowest point of Shor's r-algorithm for g(P(u)) + c max(|u| - 1, 0), P the projection on
    the ball and c the slope at the start. Its minima are those of g on the ball.

    It steps along -B B' s for a subgradient s, until s forms an acute angle with the step. Then B
    shrinks along the difference from the last subgradient.
    """
    result = start
    u = start.w
    count, rank = u.shape
    tiny = torch.finfo(u.dtype).tiny
    _, slope = _slope_of_extension(problems, u, torch.zeros_like(start.value))
    penalty = length(slope)
    space = torch.eye(rank, dtype=u.dtype, device=u.device).repeat(count, 1, 1)
    steps_in_direction = torch.zeros_like(start.value)

    def direction(space: Tensor, slope: Tensor) -> Tensor:
        inner = (space.mT @ slope.unsqueeze(-1)).squeeze(-1)
        inner = inner / length(inner).clamp(min=tiny).unsqueeze(-1)
        return (space @ inner.unsqueeze(-1)).squeeze(-1)

    along = direction(space, slope)
    for _ in range(60 + 40 * rank):
        u = u - step.unsqueeze(-1) * along
        steps_in_direction += 1
        step = torch.where(steps_in_direction % 3 == 0, LONGER * step, step)
        new_value, new_slope = _slope_of_extension(problems, u, penalty)
        better = new_value < result.value
        result = Minimum(
            torch.where(better, new_value, result.value),
            torch.where(better.unsqueeze(-1), project(u), result.w),
        )
        turns = (new_slope * along).sum(-1) <= 0
        difference = space.mT @ (new_slope - slope).unsqueeze(-1)
        axis = difference / torch.linalg.vector_norm(difference, dim=-2, keepdim=True).clamp(
            min=tiny
        )
        shrunk = space + (DILATION - 1) * (space @ axis) @ axis.mT
        space = torch.where(turns[:, None, None], shrunk, space)
        slope = torch.where(turns.unsqueeze(-1), new_slope, slope)
        along = torch.where(turns.unsqueeze(-1), direction(space, new_slope), along)
        steps_in_direction = torch.where(turns, 0.0, steps_in_direction)
        if bool((step * length(along) < torch.finfo(u.dtype).eps).all()):
            break
    return result


def _slope_of_extension(
    problems: Problems, u: BallPoints, penalty: PerProblem
) -> tuple[PerProblem, BallPoints]:
    """g(P(u)), and a subgradient of it plus the penalty outside of the ball."""
    with torch.enable_grad():
        u = u.detach().requires_grad_()
        values = problems(project(u)) + 0 * u.sum(-1)
        (slope,) = torch.autograd.grad(values.sum(), u)
    u = u.detach()
    distance = length(u)
    outward = (penalty / distance.clamp(min=1)).unsqueeze(-1) * u
    return values.detach(), torch.where((distance > 1).unsqueeze(-1), slope + outward, slope)


def _take(points: Float[Tensor, "rows many rank"], index: Tensor) -> BallPoints:
    return points.gather(1, index[:, None, None].expand(-1, 1, points.shape[-1])).squeeze(1)
