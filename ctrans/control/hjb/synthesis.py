"""The optimal synthesis: the best velocity of every state, and the paths that it leads along.

For velocities in a convex set V that does not depend on the state, paths are straight, and end at
the Hopf-Lax minimum of the terminal cost.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from ctrans.base.shapes import Vectors
from ctrans.control.admissible import length
from ctrans.control.hjb.ball_minimum import Terminal
from ctrans.control.hjb.hopf_lax import BallImage, PathEnds, hopf_lax_ends

LEVELS = 16
"""Shares of V that are tried for closer ends."""
TIE = 1e-9
"""Values that differ by this share are equal."""


@torch.no_grad()
def value_slopes(terminal: Terminal, paths: PathEnds) -> Vectors:
    """grad Phi(x, t) = grad G(z) for the end z of the best path from x; 0 where z is inside of what
    x can reach (Danskin).

    Where several ends are best, Phi has a kink, and the slope is that of one side.
    """
    with torch.enable_grad():
        z = paths.ends.detach().requires_grad_()
        # the second term gives a G that ignores its argument a gradient
        values = terminal(z) + 0 * z.sum(-1)
        (slopes,) = torch.autograd.grad(values.sum(), z)
    return torch.where(paths.inside.unsqueeze(-1), 0.0, slopes)


@dataclass(frozen=True)
class Synthesis:
    """The optimal feedback and optimal paths from depth-time t to T.

    - `velocities`: V; `remaining`: T - t
    - `states`, `feedback`: v*(x, t) = argmax over V of -<grad Phi, v> at some states. It is nan
      where grad Phi = 0: there every velocity is optimal at t
    - `starts`, `ends`: straight optimal paths, at constant velocity. If several ends are best, it
      is one of the closest, to `LEVELS` levels
    """

    velocities: BallImage
    remaining: float
    states: Float[Tensor, "states width"]
    feedback: Float[Tensor, "states width"]
    starts: Float[Tensor, "paths width"]
    ends: Float[Tensor, "paths width"]

    @property
    def speeds(self) -> Float[Tensor, " paths"]:
        """|z - x|/(T - t) of each path."""
        return length(self.ends - self.starts) / self.remaining


def synthesis(
    terminal: Terminal,
    states: Float[Tensor, "states width"],
    path_starts: Float[Tensor, "paths width"],
    remaining: float,
    velocities: BallImage,
    *,
    starts: int = 8,
) -> Synthesis:
    """The feedback at the states, and the paths from `path_starts`. `starts` and errors as in
    `hopf_lax`.
    """
    from_states = hopf_lax_ends(terminal, states, remaining, velocities, starts=starts)
    slopes = value_slopes(terminal, from_states)
    best = velocities.maximizer(slopes.unsqueeze(-2)).squeeze(-2)
    is_flat = (slopes == 0).all(-1, keepdim=True)
    ends = _closest_ends(terminal, path_starts, remaining, velocities, starts)
    return Synthesis(
        velocities=velocities,
        remaining=remaining,
        states=states,
        feedback=torch.where(is_flat, math.nan, best),
        starts=path_starts,
        ends=ends,
    )


def _closest_ends(
    terminal: Terminal,
    x: Float[Tensor, "paths width"],
    remaining: float,
    velocities: BallImage,
    starts: int,
) -> Float[Tensor, "paths width"]:
    """The best ends within the smallest share of V around its centre that has any."""
    best = hopf_lax_ends(terminal, x, remaining, velocities, starts=starts)
    ends = best.ends.clone()
    allowed = best.values + TIE * (1 + best.values.abs())
    for level in range(LEVELS - 1, 0, -1):
        smaller = replace(velocities, map=velocities.map * level / LEVELS)
        closer = hopf_lax_ends(terminal, x, remaining, smaller, starts=starts)
        ties = closer.values <= allowed
        if not ties.any():
            break
        ends[ties] = closer.ends[ties]
    return ends
