"""Norms that squash each entry. The image is an open box, so H is finite, and no velocity attains
it.
"""

from __future__ import annotations

import math
from abc import abstractmethod

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ctrans.base.shapes import AnyShape, BatchMask, Matrices, PerBatch, Vectors
from ctrans.dynamics.norm.norm import GainParameters, Norm, check_norm
from ctrans.dynamics.norm.options import check_size

ALPHA = 0.5
"""The initial alpha (Zhu et al. 2025)."""


class BoxNorm(Norm):
    """A norm whose image is the box of all z with abs(z_i - beta_i) at most abs(gamma_i), or its
    inside.
    """

    image = "box"

    def support(self, p: Vectors) -> PerBatch:
        """sum_i abs(gamma_i p_i) + <p, beta>: each entry at an end of its interval."""
        return (self.gamma * p).abs().sum(-1) + p @ self.beta

    def maximizer(self, p: Vectors) -> Vectors:
        """beta + gamma * sign(gamma * p), a corner of the closed box. Where gamma_i p_i = 0 the
        sign is 1.
        """
        return self.beta + self.gamma * torch.where(self.gamma * p >= 0, 1.0, -1.0)

    def ties(self, p: Vectors) -> BatchMask:
        """Where an entry with a gain does not affect <p, z>, to rounding of the largest."""
        size = (self.gamma * p).abs()
        unseen = size <= 8 * torch.finfo(p.dtype).eps * size.amax(-1, keepdim=True)
        return (unseen & (self.gamma != 0)).any(-1)

    def constraint_violation(self, z: Vectors) -> PerBatch:
        """The distance of u from the closed box, max(0, abs(u_i) - 1), and abs(z_i - beta_i) where
        gamma_i = 0.
        """
        flat = self.gamma == 0
        offset = (z - self.beta).abs()
        outside = (offset / torch.where(flat, 1.0, self.gamma.abs()) - 1).clamp_min(0)
        return torch.where(flat, offset, outside).amax(-1)


class SquashNorm(GainParameters, BoxNorm):
    """z = gamma * phi(alpha x + s) + beta, phi odd and strictly increasing onto (-1, 1), alpha and
    s one number each.

    For alpha not 0, each entry takes all values strictly between beta_i -+ gamma_i, independently
    of the others. So sup <p, z> = sum_i abs(gamma_i p_i) + <p, beta>, at a corner of the box, and
    no input attains it (unless gamma * p = 0). For alpha = 0 the image is one point, and these are
    bounds.
    """

    has_offset = True
    options = frozenset({"norm_alpha"})
    attained = False
    """abs(phi) < 1."""
    reaches_inside = True
    no_tangent = "squashes it further each time, since N(N(x)) is not N(x)"

    def __init__(
        self, width: int, eps: float = 1e-5, *, bias: bool = True, norm_alpha: float | None = None
    ):
        """`norm_alpha` is the initial alpha. eps is checked but has no effect, since there is no
        variance.
        """
        super().__init__()
        self.width, _ = check_norm(width, eps)
        if norm_alpha is None:
            alpha = ALPHA
        else:
            alpha = check_size("norm_alpha", norm_alpha)
        self.alpha = nn.Parameter(torch.full((1,), alpha))
        self.make_gains(width, bias=bias)

    @staticmethod
    @abstractmethod
    def phi(x: AnyShape) -> AnyShape:
        """phi."""

    @staticmethod
    @abstractmethod
    def derivative(x: AnyShape) -> AnyShape:
        """phi'."""

    @staticmethod
    @abstractmethod
    def inverse(u: AnyShape) -> AnyShape:
        """phi^-1."""

    @property
    def shift(self) -> Float[Tensor, " one"]:
        """s."""
        return torch.zeros_like(self.alpha)

    @property
    def level(self) -> float:
        """RMS of abs(gamma) + abs(beta), the length of the box's farthest corner over sqrt(d)."""
        return float((self.gamma.detach().abs() + self.beta.detach().abs()).square().mean().sqrt())

    @property
    def half_diameter(self) -> float:
        """RMS of abs(gamma): the box's diagonal is 2 |gamma|_2."""
        return float(self.gamma.detach().square().mean().sqrt())

    def standardize(self, x: Vectors) -> Vectors:
        """u = phi(alpha x + s)."""
        return self.phi(self.alpha * x + self.shift)

    def preimage(self, u: Vectors) -> Vectors:
        """x = (phi^-1(u) - s)/alpha, the input with the coordinates u."""
        return (self.inverse(u) - self.shift) / self.alpha

    def shortfall(self, p: Vectors, radius: float) -> PerBatch:
        """sum_i abs(gamma_i p_i) (1 - phi(abs(alpha) r/sqrt(d))) at x = -s/alpha + r sign(alpha
        gamma * p)/sqrt(d).
        """
        reach = self.phi(self.alpha.abs() * radius / math.sqrt(self.width)).squeeze(-1)
        return (self.gamma * p).abs().sum(-1) * (1 - reach)

    def jacobian(self, x: Vectors) -> Matrices:
        """J = diag(gamma * alpha phi'(alpha x + s))."""
        return torch.diag_embed(self._slopes(x))

    def slope(self, x: Vectors) -> PerBatch:
        """max_i abs(gamma_i alpha) phi'(alpha x_i + s) = |J(x)|_2."""
        return self._slopes(x).abs().amax(-1)

    @property
    def steepest(self) -> float:
        """max|gamma| abs(alpha) phi'(0): phi' is largest at 0."""
        alpha = self.alpha.detach()
        largest_gain = self.gamma.detach().abs().amax()
        slope = largest_gain * alpha.abs() * self.derivative(torch.zeros_like(alpha))
        return float(slope.sum())

    def linear_parameters(self) -> dict[str, Float[Tensor, "..."]]:
        """Gains and offsets, but not alpha and s, which are inside phi."""
        inside = {"alpha", "offset"}
        return {
            name: value
            for name, value in super().linear_parameters().items()
            if not inside & set(name.split("."))
        }

    def _slopes(self, x: Tensor) -> Tensor:
        return self.gamma * self.alpha * self.derivative(self.alpha * x + self.shift)


class DyT(SquashNorm):
    """z = gamma * tanh(alpha x) + beta (Zhu et al. 2025). 1 - tanh(t) <= 2 exp(-2t) gives the rate
    at which inputs approach H.
    """

    @staticmethod
    def phi(x: AnyShape) -> AnyShape:
        return x.tanh()

    @staticmethod
    def derivative(x: AnyShape) -> AnyShape:
        """1 - tanh^2."""
        return 1 - x.tanh().square()

    @staticmethod
    def inverse(u: AnyShape) -> AnyShape:
        return u.atanh()


class Derf(SquashNorm):
    """z = gamma * erf(alpha x + s) + beta (Chen et al. 2025). 1 - erf(t) <= exp(-t^2) gives the
    rate at which inputs approach H.
    """

    def __init__(
        self, width: int, eps: float = 1e-5, *, bias: bool = True, norm_alpha: float | None = None
    ):
        super().__init__(width, eps, bias=bias, norm_alpha=norm_alpha)
        self.offset = nn.Parameter(torch.zeros(1))

    @property
    def shift(self) -> Float[Tensor, " one"]:
        return self.offset

    @staticmethod
    def phi(x: AnyShape) -> AnyShape:
        return x.erf()

    @staticmethod
    def derivative(x: AnyShape) -> AnyShape:
        """2/sqrt(pi) exp(-x^2)."""
        return 2 / math.sqrt(math.pi) * (-x.square()).exp()

    @staticmethod
    def inverse(u: AnyShape) -> AnyShape:
        return u.erfinv()
