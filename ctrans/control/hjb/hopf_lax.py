"""Value functions by the Hopf-Lax formula: an exact minimum over the set that a token can reach, in
any width.

The Hamiltonian of a norm's image does not depend on the state, so a token's best path is straight.
The value of a state is the least terminal cost G within reach. The formula needs no grid. It
takes G's minimum over many affine images of the unit ball at once, in three stages:

- A sample selects the basins
- The spectral projected gradient (Birgin, Martinez, Raydan 2000: Barzilai-Borwein steps, projected
  on the ball) reaches a smooth minimum to rounding
- A pattern search without derivatives reaches minima at kinks, where gradients do not vanish
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from ctrans.base.option import Range
from ctrans.base.shapes import BatchMask, PerBatch, PerChannel, TokenRows, Vectors
from ctrans.control.admissible import check_rows, length, ratio
from ctrans.control.hjb.requests import (
    WIDTHS,
    check_ball,
    check_device,
    check_dtype,
    check_remaining,
    check_states,
    check_values,
    is_number,
)
from ctrans.dynamics.norm import SphereNorm
from solvers import ConfigError, shown

PerProblem = Float[Tensor, " rows"]
"""A number for each problem."""

FromBall = Float[Tensor, "width rank"]
"""A linear map from the ball."""

Terminal = Callable[[Tensor], Tensor]
"""A terminal cost G: from states (..., width) to values (...), differentiable almost everywhere."""

BallPoints = Float[Tensor, "rows rank"]
"""One point of the unit ball for each problem."""

STARTS = Range(1, 256)
"""Numbers of descents: the sample's distances take starts^2 8 kilobytes."""
MOST_SOBOL = torch.quasirandom.SobolEngine.MAXDIM
INSIDE = 1e-6
"""A minimum is on the ball's surface if it is as close as this to it."""
ROWS = 2048
"""Number of states that are minimised at once: keeps the samples of a piece near the cache."""


@dataclass(frozen=True)
class BallImage:
    """V = {c + M w : |w| <= 1}, a set of velocities of one token: an ellipsoid, a flat one, or a
    ball.

    `centre` is c and `map` is M. The value is the same whether a token may use only the surface (a
    norm's image) or all of V: fast changes between points of the surface average to any point
    inside.
    """

    centre: PerChannel
    map: FromBall

    def __post_init__(self) -> None:
        check_ball(self.centre, self.map)

    def check(self, P: Tensor) -> None:
        """Raises ConfigError unless P is a costate of this width and type."""
        check_rows(P, self.centre.dtype, width=len(self.centre))

    def support(self, P: TokenRows) -> PerBatch:
        """H(P) = sup over velocities in V of -<P, v> = sum_j |M' p_j| - <p_j, c>."""
        self.check(P)
        return (length(P @ self.map) - P @ self.centre).sum(-1)

    def maximizer(self, P: TokenRows) -> TokenRows:
        """v* = c - M M'p_j/|M'p_j|, which attains H(P); the centre c where M'p_j = 0, as all of V
        then does.
        """
        self.check(P)
        pulled = P @ self.map
        return self.centre - ratio(pulled, length(pulled).unsqueeze(-1)) @ self.map.mT


def velocity_hull(norm: SphereNorm) -> BallImage:
    """{beta + sqrt(d) gamma * C w : |w| <= 1}: the convex hull of a norm's image, for the
    velocities of `peri` and `output`.

    RMSNorm: the ellipsoid |Gamma^-1 (v - beta)| <= sqrt(d), C = I (Kan, eq. 99). LayerNorm: its
    slice 1' Gamma^-1 (v - beta) = 0; in width 2 that is a segment, in width 1 the point beta. Zero
    gains flatten the set.
    """
    if not isinstance(norm, SphereNorm):
        raise ConfigError(f"norm = {shown(norm)}: give one of spheres, as RMSNorm or LayerNorm")
    gamma = norm.gamma.detach()
    eye = torch.eye(norm.width, dtype=gamma.dtype, device=gamma.device)
    axes = math.sqrt(norm.width) * gamma.unsqueeze(-1) * norm.centre(eye)
    return BallImage(norm.beta.detach(), axes)


def velocity_ball(
    radius: float,
    width: int,
    *,
    dtype: torch.dtype = torch.float64,
    device: torch.device | str = "cpu",
) -> BallImage:
    """{v : |v| <= R}: the whole space (`none`, `pre`) cut off at R. As R grows, the value function
    becomes flat (Kan, Theorem 2).
    """
    WIDTHS.check("width", width, whole=True)
    check_dtype(dtype)
    check_device(device)
    if not is_number(radius) or not 0 <= radius < math.inf:
        raise ConfigError(
            f"radius = {shown(radius)}: give a finite one of at least 0; in the limit, the whole"
            " space, the value is inf G"
        )
    return BallImage(
        torch.zeros(width, dtype=dtype, device=device),
        radius * torch.eye(width, dtype=dtype, device=device),
    )


@torch.no_grad()
def hopf_lax(
    terminal: Terminal, x: Vectors, remaining: float, velocities: BallImage, *, starts: int = 8
) -> PerBatch:
    """Phi(x, t) = min {G(z) : z in x + (T - t) V}, with `remaining` = T - t in depth-time.

    Exact to rounding, also at kinks, if one of `starts` descents begins in the basin of the global
    minimum: raise `starts` for a G that oscillates within reach. Only a curved valley with a flat
    floor ends early: within 1e-6 in space, 1e-4 in a set 50 times longer than wide. Takes any
    width, keeps x's dtype and device, and has no gradient. Raises ConfigError for a negative or
    infinite time, mismatched widths, and a G of wrong shape or not finite within reach.
    """
    if remaining == 0:
        _check(terminal, x, remaining, velocities, starts)
        return terminal(x)
    return hopf_lax_ends(terminal, x, remaining, velocities, starts=starts).values


@dataclass(frozen=True)
class PathEnds:
    """Where optimal paths end.

    - `values`: Phi(x, t) = G(z)
    - `ends`: z, the state at T. The straight path to it has the velocity (z - x)/(T - t)
    - `inside`: whether z is inside of the reachable set, so that a slower path gets there too.
      There grad Phi = 0. Elsewhere grad Phi = grad G(z), where Phi is differentiable
    """

    values: PerBatch
    ends: Vectors
    inside: BatchMask


@torch.no_grad()
def hopf_lax_ends(
    terminal: Terminal, x: Vectors, remaining: float, velocities: BallImage, *, starts: int = 8
) -> PathEnds:
    """argmin {G(z) : z in x + (T - t) V}, with the limits and errors of `hopf_lax`. One minimiser,
    if there are several. Also raises ConfigError at t = T.
    """
    _check(terminal, x, remaining, velocities, starts)
    if remaining == 0:
        raise ConfigError("no time remains, so every path ends where it is: give remaining > 0")
    rows = (x + remaining * velocities.centre.to(x)).reshape(-1, x.shape[-1])
    reach = remaining * velocities.map.to(x)
    pieces = [rows[start : start + ROWS] for start in range(0, len(rows), ROWS)]
    minima = [minimise(terminal, piece, reach, starts) for piece in pieces]
    w = torch.cat([minimum.w for minimum in minima])
    values = torch.cat([minimum.value for minimum in minima])
    return PathEnds(
        values=values.reshape(x.shape[:-1]),
        ends=(rows + w @ reach.mT).reshape(x.shape),
        inside=(length(w) < 1 - INSIDE).reshape(x.shape[:-1]),
    )


def _check(
    terminal: Terminal, x: Tensor, remaining: float, velocities: BallImage, starts: int
) -> None:
    check_remaining(remaining)
    if not isinstance(velocities, BallImage):
        raise ConfigError(
            f"velocities = {shown(velocities)}: give a BallImage, as by velocity_ball"
        )
    check_states(x)
    if x.shape[-1] != len(velocities.centre):
        raise ConfigError(
            f"states of width {x.shape[-1]} with velocities of width {len(velocities.centre)}: make"
            " them equal"
        )
    STARTS.check("starts", starts, whole=True)
    if velocities.map.shape[-1] > MOST_SOBOL:
        raise ConfigError(
            f"velocities of rank {velocities.map.shape[-1]}: give a set of rank at most"
            f" {MOST_SOBOL}"
        )
    finite_values(terminal, x)


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
    """min over |w| <= 1 of G(z_k + A w) for each row z_k of `base`, from `starts` starting points
    each.
    """
    problems = Problems(cost, base, map)
    w = starting_points(problems, starts)
    repeated = Problems(cost, base.repeat_interleave(starts, 0), map)
    w = descend(repeated, w.flatten(0, 1)).reshape(w.shape)
    return search(problems, _take(w, problems(w).argmin(-1)))


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


def _take(points: Float[Tensor, "rows many rank"], index: Tensor) -> BallPoints:
    return points.gather(1, index[:, None, None].expand(-1, 1, points.shape[-1])).squeeze(1)
