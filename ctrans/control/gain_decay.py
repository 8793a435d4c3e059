"""Decay of an output norm's gains and offsets: with it H is finite though they are trained."""

from __future__ import annotations

import dataclasses
import math

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from ctrans.control.admissible import Posedness, Supremum, check_positive, length, ratio
from ctrans.control.ascent import Chart
from ctrans.control.gain_slope import has_offset, unit
from ctrans.control.norm_image import NormImage
from ctrans.control.sets_by_norm import image_of
from ctrans.control.trained_gains import TrainedGains, trained_gains
from ctrans.norm import Norm


@dataclasses.dataclass(frozen=True, eq=False)
class GainDecay(Supremum):
    """sup over u, gamma and beta of -<P, beta + gamma * u_j> - lam/2 (|gamma|^2 + |beta|^2), u_j any point of the image before gains.

    H(P) = (kappa^2 + |sum_j p_j|^2)/(2 lam), kappa the maximum over |gamma| = 1 of the image's H at beta = 0 (without the second term
    where the norm has no offset): sqrt(d) sum_j |C(gamma * p_j)| behind a sphere norm, over groups the root of the sum of their
    kappa_g^2, |a| with a_i = sum_j abs(p_ji) behind a box, sum_j |p_j| for one gain. The gains that attain it are kappa/lam times the
    best ones (`TrainedGains`), the offset is -sum_j p_j/lam. For LayerNorm kappa has local maxima and `support` is the best that was
    found: H is between it and `ceiling`, lower^2/(2 lam) and upper^2/(2 lam) of the slope in gains, which meet where it is proven.
    """

    norm: Norm
    gain_decay: float

    def __post_init__(self) -> None:
        check_positive("gain_decay", self.gain_decay)
        trained_gains(self.norm)

    @property
    def image(self) -> NormImage:
        """The norm's image at its own gains."""
        return image_of(self.norm)

    @property
    def trained(self) -> TrainedGains:
        """The norm's gains, whatever they are."""
        return trained_gains(self.norm)

    @property
    def words(self) -> str:
        return f"{self.image.words}, any gamma and beta; running cost {self.gain_decay:g}/2 (|gamma|^2 + |beta|^2)"

    @property
    def verdict(self) -> Posedness:
        return "well-posed"

    @property
    def attained(self) -> bool:
        return self.norm.attained

    def check(self, P: Tensor) -> None:
        self.image.check(P)

    def gains(self, P: Float[Tensor, "*batch tokens width"]) -> tuple[Tensor, Tensor]:
        """gamma and beta that attain H, of shape (*batch, 1, width)."""
        self.check(P)
        best = self.trained.best(P.detach()).gamma.unsqueeze(-2)
        kappa = -(P * best * self.trained.points(P, best)).sum((-2, -1))[..., None, None]
        drift = P.sum(-2, keepdim=True) if has_offset(self.norm) else torch.zeros_like(best)
        return kappa / self.gain_decay * best, -drift / self.gain_decay

    def support(self, P: Float[Tensor, "*batch tokens width"]) -> Float[Tensor, "*batch"]:
        gamma, beta = self.gains(P)
        return self.gain_decay / 2 * (gamma.square() + beta.square()).sum((-2, -1))

    def maximizer(self, P: Float[Tensor, "*batch tokens width"]) -> Float[Tensor, "*batch tokens width"]:
        gamma, beta = self.gains(P)
        return beta + gamma * self.trained.points(P, gamma)

    def ties(self, P: Float[Tensor, "*batch tokens width"]) -> Bool[Tensor, "*batch tokens"]:
        gamma, _ = self.gains(P)
        return self.trained.alone(P, gamma) | self.gains_tie(P).unsqueeze(-1)

    def gains_tie(self, P: Float[Tensor, "*batch tokens width"]) -> Bool[Tensor, "*batch"]:
        return self.trained.best(P.detach()).tied

    def kkt(self, P: Float[Tensor, "*batch tokens width"], f: Float[Tensor, "*batch tokens width"]) -> Float[Tensor, "*batch"]:
        """lam gamma = -sum_j p_j * u_j at the gains and points that make f, and how far f is from theirs; relative."""
        gamma, beta = self.gains(P)
        u = self.trained.points(P, gamma)
        off = ratio((f - beta - gamma * u).flatten(-2).norm(dim=-1), f.flatten(-2).norm(dim=-1))
        error = (self.gain_decay * gamma + self.trained.allowed((P * u).sum(-2, keepdim=True))).norm(dim=(-2, -1))
        return torch.maximum(off, ratio(error, self.gain_decay * gamma.norm(dim=(-2, -1))))

    def chart(self, P: Float[Tensor, "tokens width"]) -> Chart:
        """Rows of raw output. For given u the best gains are -sum_j p_j * u_j/lam: an ascent over both together would crawl.

        There are local maxima, and guesses: what is best at random gains.
        """
        self.check(P)
        trained = self.trained
        spread = self.image.spread if trained.spread is None else trained.spread
        beta = -P.sum(0) / self.gain_decay if has_offset(self.norm) else torch.zeros_like(P[0])

        def made(x: Tensor) -> tuple[Tensor, Tensor]:
            u = trained.standardize(x)
            gamma = -trained.allowed((P * u).sum(-2, keepdim=True)) / self.gain_decay
            return gamma, beta + gamma * u

        def cost(x: Tensor, f: Tensor) -> Tensor:
            return self.gain_decay / 2 * (made(x)[0].square().sum((-2, -1)) + beta.square().sum())

        def guess(gamma: Tensor) -> Tensor:
            u = trained.points(P, gamma)
            # a token without costate may go anywhere, but a norm without eps knows no direction of 0
            u = torch.where(length(u).unsqueeze(-1) > 0, u, trained.points(-torch.ones_like(P), gamma))
            return math.sqrt(self.norm.width) * spread * unit(u)

        return Chart(
            P,
            P.shape,
            axes=(-2, -1),
            degree=None,
            velocity=lambda x: made(x)[1],
            cost=cost,
            project=trained.inside,
            spread=spread,
            guess=guess if trained.guesses else None,
            joint=True,
        )

    def ceiling(self, P: Float[Tensor, "tokens width"]) -> float:
        slope = self.image.slope_in_gains(P)
        assert slope is not None, "the norm has gains to train"
        return slope.upper**2 / (2 * self.gain_decay)
