"""Value functions by the Hopf-Lax formula: the minimum over the set that a token can reach, in
any width.

The Hamiltonian of a norm's image does not depend on the state, so a token's best path is straight.
The value of a state is the least terminal cost G within reach. The formula needs no grid. It takes
G's minimum over many affine images of the unit ball at once (`ctrans.control.hjb.ball_minimum`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ctrans.base.option import Range
from ctrans.base.shapes import BatchMask, PerBatch, PerChannel, TokenRows, Vectors
from ctrans.control.admissible import check_rows, length, ratio
from ctrans.control.hjb.ball_minimum import FromBall, Terminal, finite_values, minimise
from ctrans.control.hjb.requests import (
    WIDTHS,
    check_ball,
    check_device,
    check_dtype,
    check_remaining,
    check_states,
    is_number,
)
from ctrans.dynamics.norm import SphereNorm
from solvers import ConfigError, shown

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

    It is never below the minimum. For a smooth G it is the minimum to rounding if the lowest of
    `starts` descents is in the basin of the global one: raise `starts` for a G that oscillates
    within reach. Only a curved valley with a flat floor ends early: within 1e-6 in space, 1e-4 in a
    set 50 times longer than wide.

    At kinks there is no proof. For convex G of up to 128 linear pieces, in sets of rank up to 32,
    the error was below 1e-11 of G's slope times the reach. Kinks are not followed in sets of rank
    above `KINK_RANK`.

    Takes any width, keeps x's dtype and device, and has no gradient. Raises ConfigError for a
    negative or infinite time, mismatched widths, and a G of wrong shape or not finite within reach.
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
