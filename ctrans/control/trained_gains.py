"""What a norm's gains make of H when they are free: which are best, and which points of the image go with them.

H over the image is h(gamma) - <beta, sum_j p_j>, h convex and homogeneous of degree 1. So all that a bound or a decay of the gains
asks for is the maximum kappa of h over |gamma| = 1, and what attains it.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
import math
from collections.abc import Callable

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from ctrans.control.admissible import ROUNDING, length, ratio
from ctrans.control.ascent import Map, unchanged
from ctrans.control.gain_slope import BestGains, best_gains, unit
from ctrans.norm import GroupRMSNorm, Norm, ScaleNorm, SphereNorm, SquashNorm
from solvers import ConfigError


@dataclasses.dataclass(frozen=True, eq=False)
class TrainedGains(abc.ABC):
    """The gains of one kind of norm, as vectors over the channels: |gamma|^2 is what a decay of its parameters charges."""

    norm: Norm

    @abc.abstractmethod
    def best(self, P: Float[Tensor, "*batch tokens width"]) -> BestGains:
        """gamma of length 1 that attain kappa, and whether others do."""

    @abc.abstractmethod
    def points(
        self, P: Float[Tensor, "*batch tokens width"], gamma: Float[Tensor, "*gains 1 width"]
    ) -> Float[Tensor, "*gains tokens width"]:
        """u_j of the closed image before gains with the largest -<p_j, gamma * u_j>; 0 where every point ties."""

    @abc.abstractmethod
    def alone(
        self, P: Float[Tensor, "*batch tokens width"], gamma: Float[Tensor, "*gains 1 width"]
    ) -> Bool[Tensor, "*gains tokens"]:
        """For which tokens several points have it at these gains."""

    def allowed(self, gamma: Float[Tensor, "*batch width"]) -> Float[Tensor, "*batch width"]:
        """The nearest gains that the norm can have."""
        return gamma

    def standardize(self, z: Float[Tensor, "*batch width"]) -> Float[Tensor, "*batch width"]:
        """u of an ascent's coordinates: raw outputs through the norm's own module."""
        return self.norm.standardize(z)

    @property
    def inside(self) -> Map:
        """Returns an ascent's coordinates to where they are allowed."""
        return unchanged

    @property
    def spread(self) -> float | None:
        """The size of coordinates from which ascents begin, where it is not the image's own."""
        return None

    @property
    def guesses(self) -> bool:
        """Whether there are local maxima."""
        return False


class SphereGains(TrainedGains):
    """h = sqrt(d) sum_j |C(gamma * p_j)|: a concave programme in gamma^2 for RMSNorm, local maxima for LayerNorm."""

    norm: SphereNorm

    def best(self, P: Float[Tensor, "*batch tokens width"]) -> BestGains:
        return best_gains(self.norm, P)

    def points(
        self, P: Float[Tensor, "*batch tokens width"], gamma: Float[Tensor, "*gains 1 width"]
    ) -> Float[Tensor, "*gains tokens width"]:
        w = self.norm.centre(gamma * P)
        return -math.sqrt(self.norm.width) * ratio(w, length(w).unsqueeze(-1))

    def alone(
        self, P: Float[Tensor, "*batch tokens width"], gamma: Float[Tensor, "*gains 1 width"]
    ) -> Bool[Tensor, "*gains tokens"]:
        scaled = gamma * P
        return length(self.norm.centre(scaled)) <= ROUNDING * torch.finfo(P.dtype).eps * length(scaled)

    @property
    def guesses(self) -> bool:
        return self.norm.centred or self.norm.width == 1


class OneGain(SphereGains):
    """h = abs(g) sum_j |p_j|, gamma = g/sqrt(d) in every channel, so that |gamma| = abs(g): kappa = sum_j |p_j|."""

    def best(self, P: Float[Tensor, "*batch tokens width"]) -> BestGains:
        gamma = torch.full_like(P[..., 0, :], 1 / math.sqrt(P.shape[-1]))
        return BestGains(gamma, torch.zeros_like(gamma[..., 0], dtype=torch.bool))

    def allowed(self, gamma: Float[Tensor, "*batch width"]) -> Float[Tensor, "*batch width"]:
        return gamma.mean(-1, keepdim=True).expand_as(gamma)


class GroupGains(TrainedGains):
    """h = sum_g sqrt(m) sum_j |gamma_g * p_jg|: kappa^2 = sum_g kappa_g^2, as over |gamma| = 1 groups get lengths like their kappa_g."""

    norm: GroupRMSNorm

    @functools.cached_property
    def parts(self) -> list[SphereGains]:
        return [SphereGains(part) for part in self.norm.parts]

    def best(self, P: Float[Tensor, "*batch tokens width"]) -> BestGains:
        each, gammas = [part.best(p) for part, p in zip(self.parts, self._apart(P), strict=True)], []
        for found, p in zip(each, self._apart(P), strict=True):
            gammas.append(found.gamma * length(found.gamma.unsqueeze(-2) * p).sum(-1, keepdim=True))
        seen = torch.stack([gamma.abs().amax(-1) > 0 for gamma in gammas])
        return BestGains(unit(torch.cat(gammas, -1)), (torch.stack([found.tied for found in each]) & seen).any(0))

    def points(
        self, P: Float[Tensor, "*batch tokens width"], gamma: Float[Tensor, "*gains 1 width"]
    ) -> Float[Tensor, "*gains tokens width"]:
        each = zip(self.parts, self._apart(P), self._apart(gamma), strict=True)
        return torch.cat([part.points(p, g) for part, p, g in each], -1)

    def alone(
        self, P: Float[Tensor, "*batch tokens width"], gamma: Float[Tensor, "*gains 1 width"]
    ) -> Bool[Tensor, "*gains tokens"]:
        each = zip(self.parts, self._apart(P), self._apart(gamma), strict=True)
        return torch.stack([part.alone(p, g) for part, p, g in each]).any(0)

    @property
    def guesses(self) -> bool:
        return self.norm.each == 1

    def _apart(self, x: Tensor) -> tuple[Tensor, ...]:
        groups: tuple[Tensor, ...] = x.split(self.norm.each, -1)
        return groups


class BoxGains(TrainedGains):
    """h = sum_i abs(gamma_i) a_i, a_i = sum_j abs(p_ji): kappa = |a|, at gamma = a/|a| and the corners -sign(p_j).

    An ascent's coordinates are u itself in the closed box, as only infinite inputs have its corners.
    """

    norm: SquashNorm

    def best(self, P: Float[Tensor, "*batch tokens width"]) -> BestGains:
        gamma = unit(P.abs().sum(-2))
        return BestGains(gamma, torch.zeros_like(gamma[..., 0], dtype=torch.bool))

    def points(
        self, P: Float[Tensor, "*batch tokens width"], gamma: Float[Tensor, "*gains 1 width"]
    ) -> Float[Tensor, "*gains tokens width"]:
        return -torch.sign(gamma * P)

    def alone(
        self, P: Float[Tensor, "*batch tokens width"], gamma: Float[Tensor, "*gains 1 width"]
    ) -> Bool[Tensor, "*gains tokens"]:
        size = (gamma * P).abs()
        unseen = size <= ROUNDING * torch.finfo(P.dtype).eps * size.amax((-2, -1), keepdim=True)
        return (unseen & (gamma != 0)).any(-1)

    def standardize(self, z: Float[Tensor, "*batch width"]) -> Float[Tensor, "*batch width"]:
        return z

    @property
    def inside(self) -> Map:
        return lambda z: z.clamp(-1, 1)

    @property
    def spread(self) -> float:
        return 0.5


KINDS: tuple[tuple[type[Norm], Callable[[Norm], TrainedGains]], ...] = (
    (ScaleNorm, OneGain),
    (SphereNorm, SphereGains),
    (GroupRMSNorm, GroupGains),
    (SquashNorm, BoxGains),
)
"""The first that a norm is of."""


def trained_gains(norm: Norm) -> TrainedGains:
    """The norm's. Raises ConfigError for one that has none to train, or whose best are not known."""
    if norm.gains == "none":
        raise ConfigError(
            f"{type(norm).__name__} has no gains or offsets that could decay: leave gain_decay out, as H is finite whatever is trained"
        )
    for kind, made in KINDS:
        if isinstance(norm, kind) and (norm.gains == "one") == (made is OneGain):
            return made(norm)
    raise ConfigError(
        f"no closed form is known here for a decay of the gains of {type(norm).__name__}: leave gain_decay out; kinetic applies"
    )
