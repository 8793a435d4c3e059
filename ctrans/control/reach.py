"""Where the remaining segments of a model can take its tokens: the set that Hopf and Lax minimise
over.

Behind an output norm the admissible velocities V_k of segment k do not depend on the state, and
fast changes between them average to any point of their convex hull. So the states within reach of
X are

    X + sum_k h_k conv(V_k),

a sum over the segments that are left, of lengths h_k. It has a closed-form support function and
maximiser: those of its terms. Without an output norm velocities are unbounded, and a token reaches
every state; inside a norm around the state it reaches every point of that norm's image.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ctrans.base.shapes import PerBatch, Vectors
from ctrans.dynamics.depth import Depth
from ctrans.dynamics.norm import Norm
from ctrans.dynamics.sublayer import Sublayer
from solvers import ConfigError


@dataclass(frozen=True, eq=False)
class Leg:
    """A segment of length h whose velocities are gain W N_out(..)."""

    sublayer: Sublayer
    length: float

    @property
    def norm(self) -> Norm:
        """The output norm, which bounds the velocities."""
        norm = self.sublayer.output_norm
        assert norm is not None, "the segment's velocities are bounded"
        return norm

    def displacement(self, P: Vectors) -> Vectors:
        """h v* with v* = argmin <P, v>, the closed-form maximiser of H(P) = sup -<P, v>."""
        best = self.norm.maximizer(-self.sublayer.pulled(P))
        return self.length * self.sublayer.joined(best, P)

    def hamiltonian(self, P: Vectors) -> PerBatch:
        """h H(P), for each token."""
        return self.length * self.norm.support(-self.sublayer.pulled(P))

    def centre(self, x: Vectors) -> Vectors:
        """The displacement by the centre of the set."""
        return self.length * self.sublayer.joined(self.norm.beta.expand_as(x), x)

    def radius(self) -> float:
        """h max_c |gain W gamma|_c sqrt(d): a ball of this radius around the centre has the set in
        it, as |u| <= sqrt(d) for every norm.
        """
        gain = self.norm.gamma.detach()
        if self.sublayer.residual.gains is not None:
            gain = gain * self.sublayer.residual.gains.detach()
        return float(
            self.length * abs(self.sublayer.gain) * gain.abs().amax() * self.norm.width**0.5
        )


@dataclass(frozen=True, eq=False)
class ReachableSet:
    """The states within reach of X by the segments that are left.

    - `legs`: bounded segments, X + sum_k h_k conv(V_k)
    - `everywhere`: a segment without a bound is among them, so every state is within reach
    - `image`: with `everywhere`, the norm around the state on whose image the states then lie
    """

    legs: tuple[Leg, ...]
    everywhere: bool = False
    image: Norm | None = None

    def extreme(self, x: Vectors, P: Vectors) -> Vectors:
        """The point within reach of X with the least <P, z>: X + sum_k h_k v_k*."""
        z = x
        for leg in self.legs:
            z = z + leg.displacement(P)
        return z

    def hamiltonian(self, P: Vectors) -> PerBatch:
        """sum_k h_k H_k(P), for each token: <P, x> less it is the least <P, z> within reach."""
        total = torch.zeros_like(P[..., 0])
        for leg in self.legs:
            total = total + leg.hamiltonian(P)
        return total

    def ball(self, x: Vectors) -> tuple[Vectors, float]:
        """The centre and radius of a ball that has all states within reach, if these are not
        everywhere.
        """
        centre = x
        radius = 0.0
        for leg in self.legs:
            centre = centre + leg.centre(x)
            radius += leg.radius()
        return centre, radius


def reaches(depth: Depth) -> list[ReachableSet]:
    """What each state X_0, .., X_K of a model has within reach; that of X_K is the point itself.

    Raises ConfigError for a state with several streams, a residual that moves towards a norm's
    image, and a norm around the state with bounded segments around it: their reach is no such sum.
    """
    later = ReachableSet(())
    found = [later]
    for sublayer, h in zip(reversed(depth.sublayers), reversed(depth.lengths), strict=True):
        later = _before(sublayer, h, later)
        found.insert(0, later)
    return found


def _before(sublayer: Sublayer, h: float, later: ReachableSet) -> ReachableSet:
    """What is within reach before a segment, from what is after it."""
    if later.everywhere:
        return later
    if sublayer.residual.jumps or sublayer.image is not None:
        raise ConfigError(
            f"the residual {type(sublayer.residual).__name__} does not move a token by a sum of"
            " free velocities: what is within reach has no closed form"
        )
    bounded = sublayer.output_norm is not None
    if sublayer.state_norm is not None and (bounded or later.legs):
        raise ConfigError(
            "a norm around the state is next to segments with bounded velocities: what is within"
            " reach has no closed form"
        )
    if sublayer.state_norm is not None:
        return ReachableSet((), everywhere=True, image=sublayer.state_norm)
    if not bounded:
        return ReachableSet((), everywhere=True)
    return ReachableSet(_joined(Leg(sublayer, h), later.legs))


def _joined(leg: Leg, legs: Sequence[Leg]) -> tuple[Leg, ...]:
    """The legs with one more. Equal sets are one leg of their lengths' sum."""
    for k, other in enumerate(legs):
        if _same_set(leg.sublayer, other.sublayer):
            merged = Leg(other.sublayer, other.length + leg.length)
            return (*legs[:k], merged, *legs[k + 1 :])
    return (leg, *legs)


def _same_set(first: Sublayer, second: Sublayer) -> bool:
    """Whether two segments have the same admissible velocities."""
    norm = first.output_norm
    other = second.output_norm
    assert norm is not None, "the segment's velocities are bounded"
    assert other is not None, "the segment's velocities are bounded"
    kinds_differ = type(norm) is not type(other) or norm.extra_repr() != other.extra_repr()
    if kinds_differ or first.gain != second.gain:
        return False
    pairs = [(norm.gamma, other.gamma), (norm.beta, other.beta)]
    gains = (first.residual.gains, second.residual.gains)
    if (gains[0] is None) != (gains[1] is None):
        return False
    if gains[0] is not None and gains[1] is not None:
        pairs.append((gains[0], gains[1]))
    return all(torch.equal(a, b) for a, b in pairs)
