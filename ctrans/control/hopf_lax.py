"""Value functions by the Hopf-Lax formula: an exact minimum over the set that a token can reach, in any width.

The Hamiltonian of a norm's image does not depend on the state. So the best a token can do is to move straight, and the value of a
state is the least terminal cost within reach. No grid is involved, and the width is free.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

from ctrans.control.ball_minimum import finite_values, minimise
from ctrans.norm import SphereNorm
from solvers import ConfigError

Terminal = Callable[[Tensor], Tensor]
"""A terminal cost G: from states (..., width) to values (...), differentiable almost everywhere."""

ROWS = 2048
"""How many states are minimised at once: keeps the samples of a piece near the cache."""


@dataclasses.dataclass(frozen=True)
class BallImage:
    """V = {c + M w : |w| <= 1}, a set of velocities of one token: an ellipsoid, a flat one, or a ball.

    `centre` is c and `map` is M. Whether a token may use the surface only (a norm's image) or all of V makes no difference to the
    value: changing fast between points of the surface averages to any point inside.
    """

    centre: Float[Tensor, " width"]
    map: Float[Tensor, "width rank"]

    def support(self, P: Float[Tensor, "*batch tokens width"]) -> Float[Tensor, "*batch"]:
        """H(P) = sup over velocities in V of -<P, v> = sum_j |M' p_j| - <p_j, c>."""
        values: Tensor = (torch.linalg.vector_norm(P @ self.map, dim=-1) - P @ self.centre).sum(-1)
        return values


def velocity_hull(norm: SphereNorm) -> BallImage:
    """{beta + sqrt(d) gamma * C w : |w| <= 1}: the convex hull of a norm's image, the velocities of `peri` and `output`.

    RMSNorm: the ellipsoid |Gamma^-1 (v - beta)| <= sqrt(d), C = I (Kan, eq. 99). LayerNorm: its slice 1' Gamma^-1 (v - beta) = 0;
    in width 2 that is a segment, in width 1 the point beta. Zero gains flatten the set.
    """
    gamma = norm.gamma.detach()
    eye = torch.eye(norm.width, dtype=gamma.dtype, device=gamma.device)
    return BallImage(norm.beta.detach(), math.sqrt(norm.width) * gamma.unsqueeze(-1) * norm.centre(eye))


def velocity_ball(
    radius: float, width: int, *, dtype: torch.dtype = torch.float64, device: torch.device | str = "cpu"
) -> BallImage:
    """{v : |v| <= R}: the whole space (`none`, `pre`) cut off at R. As R grows, the value function goes flat (Kan, Theorem 2)."""
    if not 0 <= radius < math.inf:
        raise ConfigError(
            f"radius = {radius!r}: give a finite one of at least 0; in the limit, the whole space, the value is inf G"
        )
    return BallImage(torch.zeros(width, dtype=dtype, device=device), radius * torch.eye(width, dtype=dtype, device=device))


@torch.no_grad()
def hopf_lax(
    terminal: Terminal, x: Float[Tensor, "*batch width"], remaining: float, velocities: BallImage, *, starts: int = 8
) -> Float[Tensor, "*batch"]:
    """Phi(x, t) = min {G(z) : z in x + (T - t) V}, with `remaining` = T - t in depth-time.

    To rounding, minima at kinks included, provided one of `starts` descents begins in the basin of the global minimum: raise
    `starts` for a G that oscillates within reach. Only a curved valley with a flat floor ends early: within 1e-6 in space, 1e-4
    in a set 50 times longer than wide. Any width; x's dtype and device; no gradient.
    Raises ConfigError for a negative or infinite time, mismatched widths, and a G of wrong shape or not finite within reach.
    """
    _check(terminal, x, remaining, velocities, starts)
    if remaining == 0:
        return terminal(x)
    rows = (x + remaining * velocities.centre.to(x)).reshape(-1, x.shape[-1])
    reach = remaining * velocities.map.to(x)
    pieces = [rows[start : start + ROWS] for start in range(0, len(rows), ROWS)]
    return torch.cat([minimise(terminal, piece, reach, starts) for piece in pieces]).reshape(x.shape[:-1])


def _check(terminal: Terminal, x: Tensor, remaining: float, velocities: BallImage, starts: int) -> None:
    if not 0 <= remaining < math.inf:
        raise ConfigError(f"the remaining time T - t = {remaining!r} must be finite and at least 0: ask for times t up to T")
    if x.shape[-1] != len(velocities.centre):
        raise ConfigError(f"states of width {x.shape[-1]} with velocities of width {len(velocities.centre)}: make them equal")
    if starts < 1:
        raise ConfigError(f"starts = {starts!r}: give at least 1")
    finite_values(terminal, x)
