"""Decay of an output norm's gains and offsets: with it H is finite though they are trained."""

from __future__ import annotations

import dataclasses
import math

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from ctrans.control.admissible import ROUNDING, Supremum, Verdict, check_positive, length, ratio
from ctrans.control.ascent import Chart
from ctrans.control.ellipsoids import Ellipsoid, EllipsoidSlice, SphereImage
from ctrans.control.gain_slope import best_gains, gain_slope, has_offset, unit
from ctrans.norm import Norm, SphereNorm
from solvers import ConfigError


@dataclasses.dataclass(frozen=True, eq=False)
class GainDecay(Supremum):
    """sup over u, gamma and beta of -<P, beta + gamma * u_j> - lam/2 (|gamma|^2 + |beta|^2), u_j any point of the norm's sphere.

    H(P) = (kappa^2 + |sum_j p_j|^2)/(2 lam), kappa the maximum of sqrt(d) sum_j |C(gamma * p_j)| over |gamma| = 1 (without the
    second term where the norm has no offset). The gains that attain it are kappa/lam times the best ones, the offset is
    -sum_j p_j/lam. For RMSNorm these are the best to rounding. For LayerNorm kappa has local maxima and `support` is the best
    that was found: H is between it and `ceiling`, lower^2/(2 lam) and upper^2/(2 lam) of `gain_slope`, which meet where it is proven.
    """

    norm: SphereNorm
    gain_decay: float

    def __post_init__(self) -> None:
        check_positive("gain_decay", self.gain_decay)
        check_decays(self.norm)

    @property
    def image(self) -> SphereImage:
        """The norm's image at its own gains, whose coordinates serve here too."""
        return (EllipsoidSlice if self.norm.centred else Ellipsoid)(self.norm)

    @property
    def words(self) -> str:
        return f"{self.image.words}, any gamma and beta; running cost {self.gain_decay:g}/2 (|gamma|^2 + |beta|^2)"

    @property
    def verdict(self) -> Verdict:
        return "well-posed"

    def check(self, P: Tensor) -> None:
        self.image.check(P)

    def gains(self, P: Float[Tensor, "*batch tokens width"]) -> tuple[Tensor, Tensor]:
        """gamma and beta that attain H, of shape (*batch, 1, width)."""
        self.check(P)
        best = best_gains(self.norm, P.detach()).gamma.unsqueeze(-2)
        kappa = math.sqrt(self.norm.width) * length(self.norm.centre(best * P)).sum(-1)[..., None, None]
        drift = P.sum(-2, keepdim=True) if has_offset(self.norm) else torch.zeros_like(best)
        return kappa / self.gain_decay * best, -drift / self.gain_decay

    def support(self, P: Float[Tensor, "*batch tokens width"]) -> Float[Tensor, "*batch"]:
        gamma, beta = self.gains(P)
        return self.gain_decay / 2 * (gamma.square() + beta.square()).sum((-2, -1))

    def maximizer(self, P: Float[Tensor, "*batch tokens width"]) -> Float[Tensor, "*batch tokens width"]:
        gamma, beta = self.gains(P)
        w = self.norm.centre(gamma * P)
        return beta - math.sqrt(self.norm.width) * gamma * ratio(w, length(w).unsqueeze(-1))

    def ties(self, P: Float[Tensor, "*batch tokens width"]) -> Bool[Tensor, "*batch tokens"]:
        gamma, _ = self.gains(P)
        scaled = gamma * P
        alone = length(self.norm.centre(scaled)) <= ROUNDING * torch.finfo(P.dtype).eps * length(scaled)
        return alone | self.gains_tie(P).unsqueeze(-1)

    def gains_tie(self, P: Float[Tensor, "*batch tokens width"]) -> Bool[Tensor, "*batch"]:
        return best_gains(self.norm, P.detach()).tied

    def kkt(self, P: Float[Tensor, "*batch tokens width"], f: Float[Tensor, "*batch tokens width"]) -> Float[Tensor, "*batch"]:
        """lam gamma = -sum_j p_j * u_j at the gains and points that make f, and how far f is from theirs; relative."""
        gamma, beta = self.gains(P)
        w = self.norm.centre(gamma * P)
        u = -math.sqrt(self.norm.width) * ratio(w, length(w).unsqueeze(-1))
        off = ratio((f - beta - gamma * u).flatten(-2).norm(dim=-1), f.flatten(-2).norm(dim=-1))
        error = (self.gain_decay * gamma + (P * u).sum(-2, keepdim=True)).norm(dim=(-2, -1))
        return torch.maximum(off, ratio(error, self.gain_decay * gamma.norm(dim=(-2, -1))))

    def chart(self, P: Float[Tensor, "tokens width"]) -> Chart:
        """Rows of raw output. For given u the best gains are -sum_j p_j * u_j/lam: an ascent over both together would crawl.

        There are local maxima, and guesses: what is best at random gains.
        """
        self.check(P)
        inner = self.image.chart(P)
        beta = -P.sum(0) / self.gain_decay if has_offset(self.norm) else torch.zeros_like(P[0])

        def made(x: Tensor) -> tuple[Tensor, Tensor]:
            u = self.norm.standardize(x)
            gamma = -(P * u).sum(-2, keepdim=True) / self.gain_decay
            return gamma, beta + gamma * u

        def cost(x: Tensor, f: Tensor) -> Tensor:
            return self.gain_decay / 2 * (made(x)[0].square().sum((-2, -1)) + beta.square().sum())

        def guess(gamma: Tensor) -> Tensor:
            w = self.norm.centre(gamma * P)
            # a token without costate may go anywhere, but a norm without eps knows no direction of 0
            w = torch.where(length(w).unsqueeze(-1) > 0, -w, self.norm.centre(gamma))
            return math.sqrt(self.norm.width) * inner.spread * unit(w)

        return Chart(
            P,
            P.shape,
            axes=(-2, -1),
            degree=None,
            velocity=lambda x: made(x)[1],
            cost=cost,
            spread=inner.spread,
            guess=guess if self.norm.centred or self.norm.width == 1 else None,
            joint=True,
        )

    def ceiling(self, P: Float[Tensor, "tokens width"]) -> float:
        return gain_slope(self.norm, P).upper ** 2 / (2 * self.gain_decay)


def check_decays(norm: Norm) -> None:
    """ConfigError for a norm whose gains' decay has no closed form here: it has none to train, shares one, or is no sphere's."""
    if norm.gains == "none":
        raise ConfigError(
            f"{type(norm).__name__} has no gains or offsets that could decay: leave gain_decay out, as H is finite whatever is trained"
        )
    if norm.gains != "each" or not isinstance(norm, SphereNorm):
        raise ConfigError(
            f"no closed form is known here for a decay of the gains of {type(norm).__name__}: leave gain_decay out; kinetic applies"
        )
