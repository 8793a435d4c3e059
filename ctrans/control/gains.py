"""What training an output norm's gains and offsets adds: H grows in proportion to them, and this is how fast.

With w_j = C(gamma * p_j), H(P) = sqrt(d) sum_j |w_j| - <beta, sum_j p_j> is convex and homogeneous of degree 1 in (gamma, beta). So
its maximum over |gamma|^2 + |beta|^2 <= R^2 is R sqrt(kappa^2 + |sum_j p_j|^2), kappa the maximum of the first term over |gamma| = 1.

For RMSNorm |w_j|^2 = sum_i s_i p_ji^2 with s = gamma^2, and kappa is a concave programme over the simplex. For LayerNorm it is not
concave, but has the same dual bound: with M_j = diag(p_j) C diag(p_j) and any lengths l_j > 0, Cauchy-Schwarz gives
(sum_j |w_j|)^2 <= sum_j l_j gamma' (sum_j M_j/l_j) gamma <= sum_j l_j lambda_max(sum_j M_j/l_j). At l_j = |w_j| the bound is met where
gamma is the top eigenvector; that it is an eigenvector is the first-order condition. So the bound says whether a maximum is global.


What a norm's gains make of H when they are free: which are best, and which points of the image go with them.

H over the image is h(gamma) - <beta, sum_j p_j>, h convex and homogeneous of degree 1. So all that a bound or a decay of the gains
asks for is the maximum kappa of h over |gamma| = 1, and what attains it.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from ctrans.control.admissible import ROUNDING, GainSlope, check_costate, length, ratio
from ctrans.control.ascent import Map, unchanged
from ctrans.norm import GroupRMSNorm, Norm, ScaleNorm, SphereNorm, SquashNorm
from solvers import ConfigError

STARTS = 32
"""For LayerNorm, whose sum has local maxima, beside gamma_i = |p_i|, p_i entry i over the tokens. RMSNorm has none and needs no more."""
STEPS = 100
"""Of each start, before Newton's method goes on from the best."""
NEWTON = 60
"""At most: it takes about 5 where the maximum is curved, and 2/3 of the way a step where it is flat."""
SHARES = tuple(2.0**-k for k in range(6))
"""Of Newton's step: what is tried."""
FLAT = 0.25
"""Gains tie where they are optimal to the power 1/2 of the machine epsilon and differ by more than this power of it."""
APART = 0.1
"""The distance of gains from others that tie with them without a flat way between; the curvature keeps single ones closer."""


class BestGains(NamedTuple):
    """Gains of length 1 that attain kappa, and whether others do too: then H is the same for all, but not what attains it."""

    gamma: Float[Tensor, "*batch width"]
    tied: Bool[Tensor, "*batch"]


def has_offset(norm: Norm) -> bool:
    """Whether the norm has an offset to train."""
    return any(parameter.data_ptr() == norm.beta.data_ptr() for parameter in norm.parameters())


@torch.no_grad()
def gain_slope(norm: SphereNorm, P: Float[Tensor, "tokens width"]) -> GainSlope:
    """How fast H grows with gains and offsets that are bounded together, from below and from above; for RMSNorm the bounds meet."""
    check_costate(P, norm.gamma.dtype, width=norm.width)
    gamma = best_gains(norm, P).gamma
    lengths = length(norm.centre(gamma * P))
    gain = float(math.sqrt(norm.width) * lengths.sum())
    offset = float(P.sum(0).norm()) if has_offset(norm) else 0.0
    # a token without length is bounded by itself: |w_j| <= |p_j|_inf, as |gamma| = 1
    seen = lengths > ROUNDING * torch.finfo(P.dtype).eps * lengths.amax()
    top = float(torch.linalg.eigvalsh(_form(norm, P[seen], lengths[seen]))[-1].clamp_min(0))
    unseen = float(P[~seen].abs().amax(-1).sum()) if bool((~seen).any()) else 0.0
    above = math.sqrt(norm.width) * (math.sqrt(top * float(lengths[seen].sum())) + unseen)
    return GainSlope(gain, offset, math.hypot(gain, offset), math.hypot(max(gain, above), offset))


@torch.no_grad()
def best_gains(norm: SphereNorm, P: Float[Tensor, "*batch tokens width"]) -> BestGains:
    """argmax over |gamma| = 1 of sum_j |C(gamma * p_j)|, signs by rule: for RMSNorm to rounding, for LayerNorm the best of 33 starts.

    From each start gamma <- its gradient over its length, which never lets the sum fall: Frank-Wolfe's step on the unit ball, full
    because the sum is convex. It crawls where the maximum is flat or at gamma_i = 0; from the best start Newton's method goes on.
    A maximum on the sphere is one of RMSNorm's concave programme in gamma^2, so that it is the highest.
    """
    scale = P.abs().amax((-2, -1), keepdim=True)
    p = ratio(P, scale).unsqueeze(-3)
    generator = torch.Generator().manual_seed(0)
    random = torch.randn(STARTS if norm.centred else 0, P.shape[-1], generator=generator, dtype=P.dtype).to(P.device)
    gamma = unit(torch.cat([p.square().sum(-2).sqrt(), random.expand(*P.shape[:-2], *random.shape)], -2))
    for _ in range(STEPS):
        slope = _slope(norm, p, gamma)
        gamma = torch.where(length(slope).unsqueeze(-1) > 0, unit(slope), gamma)
    values = _sum(norm, p, gamma)
    first = values.argmax(-1, keepdim=True)
    best, flat = _newton(norm, p, gamma.gather(-2, first.unsqueeze(-1).expand(*first.shape, P.shape[-1])))
    near = values >= (1 - torch.finfo(P.dtype).eps ** 0.5) * _sum(norm, p, best)
    apart = torch.minimum(length(gamma - best), length(gamma + best)) > APART
    return BestGains(best.squeeze(-2), flat.squeeze(-1) | (near & apart).any(-1))


def _newton(norm: SphereNorm, p: Tensor, gamma: Tensor) -> tuple[Tensor, Tensor]:
    """The local maximum on the sphere that gamma leads to, and whether it is flat there.

    The sum of |w_j| has the gradient g and, with s_j = p_j * w_j/|w_j|, the Hessian sum_j (M_j - s_j s_j')/|w_j|; on the sphere what
    counts is the Hessian less |g| = <g, gamma>, off gamma. Negative curvature is climbed, the better of its step and g's is taken.
    """
    eps = torch.finfo(p.dtype).eps
    eye = torch.eye(p.shape[-1], dtype=p.dtype, device=p.device)
    for _ in range(NEWTON):
        w = norm.centre(gamma.unsqueeze(-2) * p)
        lengths = length(w)
        s = p * ratio(w, lengths.unsqueeze(-1))
        slope, value = s.sum(-2), lengths.sum(-1)
        tangent = slope - (slope * gamma).sum(-1, keepdim=True) * gamma
        curvature = value[..., None, None] * eye - _form(norm, p, lengths) + s.mT @ ratio(s, lengths.unsqueeze(-1))
        off = eye - gamma.unsqueeze(-1) * gamma.unsqueeze(-2)
        curvature = off @ curvature @ off + value[..., None, None] * (eye - off)
        values, vectors = torch.linalg.eigh((curvature + curvature.mT) / 2)
        flat = values[..., 0] <= eps**FLAT * value
        if bool((length(tangent) <= ROUNDING * eps * value).all()):
            break
        softest = (ROUNDING * eps * value).unsqueeze(-1)
        climb = (vectors @ ratio(vectors.mT @ tangent.unsqueeze(-1), values.abs().maximum(softest).unsqueeze(-1))).squeeze(-1)
        climb = climb / length(climb).unsqueeze(-1).clamp_min(1)
        plain = torch.where(length(slope).unsqueeze(-1) > 0, unit(slope), gamma)
        tried = torch.stack([*(unit(gamma + share * climb) for share in SHARES), plain], -2)
        heights = _sum(norm, p.unsqueeze(-4), tried)
        # among equals to rounding the longest step is the best converged
        first = (heights >= (1 - ROUNDING * eps) * heights.amax(-1, keepdim=True)).to(torch.int8).argmax(-1)
        gamma = tried.gather(-2, first[..., None, None].expand(*first.shape, 1, p.shape[-1])).squeeze(-2)
    return gamma, flat


def _slope(norm: SphereNorm, p: Tensor, gamma: Tensor) -> Tensor:
    """The gradient of sum_j |C(gamma * p_j)|."""
    w = norm.centre(gamma.unsqueeze(-2) * p)
    return (p * ratio(w, length(w).unsqueeze(-1))).sum(-2)


def _sum(norm: SphereNorm, p: Tensor, gamma: Tensor) -> Tensor:
    """sum_j |C(gamma * p_j)|."""
    return length(norm.centre(gamma.unsqueeze(-2) * p)).sum(-1)


def _form(norm: SphereNorm, p: Tensor, lengths: Tensor) -> Tensor:
    """sum_j M_j/l_j, M_j = diag(p_j) C diag(p_j); a token without length counts for nothing."""
    weighted = torch.where(lengths.unsqueeze(-1) > 0, ratio(p, lengths.unsqueeze(-1)), 0.0)
    form = torch.diag_embed((p * weighted).sum(-2))
    return form - weighted.mT @ p / norm.width if norm.centred else form


def boxed_value(
    norm: SphereNorm, P: Float[Tensor, "*batch tokens width"], gain: float, offset: float = 0.0
) -> Float[Tensor, "*batch"]:
    """sqrt(d) g sum_j |p_j| + b |sum_j p_j|_1: what bounds H over all |gamma_i| <= g and |beta_i| <= b.

    RMSNorm, which has no offset, attains it at gamma = g; LayerNorm stays below by what centring removes.
    """
    check_costate(P, width=norm.width)
    return math.sqrt(norm.width) * gain * length(P).sum(-1) + offset * P.sum(-2).abs().sum(-1)


def unit(x: Tensor) -> Tensor:
    """x/|x| of each row; 0 of 0."""
    return ratio(x, length(x).unsqueeze(-1))


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
