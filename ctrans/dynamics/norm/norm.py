"""The base class of norms: z = beta + gamma * u(x) with u(x) in a bounded set, and the geometry of
its image as methods.

These methods determine whether a Hamiltonian with a norm is finite and attained: `support` is H,
`maximizer` is where it is reached, `attained` says whether an input reaches it, and `shortfall` how
close inputs of a given length come otherwise.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ctrans.base.option import COUNT, WEIGHT, Range
from ctrans.base.shapes import BatchMask, Matrices, PerBatch, PerChannel, Vectors
from solvers import ConfigError


class Norm(nn.Module, ABC):
    """z = beta + gamma * u(x) for each token x (a row of width d), where u(x) = `standardize`(x) is
    no longer than sqrt(d).

    The *image* is the set of values for eps = 0. `support`, `maximizer`, `ties` and
    `constraint_violation` refer to its closure.
    """

    width: int
    has_offset: ClassVar[bool] = False
    """Whether `bias` may give the norm an offset beta."""
    options: ClassVar[frozenset[str]] = frozenset()
    """Fields of `NormOptions` that its constructor takes, besides width, eps and bias."""
    gains: ClassVar[str] = "each"
    """The trained part of gamma: "each" entry, "one" number that all share, or "none"."""
    degree: int | None = None
    """k with N(c x) - beta = c^k (N(x) - beta) for c > 0 and eps = 0; None if there is none."""
    centred = False
    """Whether it removes a token's mean."""
    divides = False
    """Whether it divides by the size `sigma`(x) of a token, or of its groups."""
    no_tangent: ClassVar[str] = "has no surface to move on"
    """Why the image has no tangent space and no retraction, if so. A norm around the state then has
    the discrete model only.
    """

    @property
    @abstractmethod
    def image(self) -> str:
        """The kind of set, a name of `ctrans.control.sets_by_norm.IMAGES`: ellipsoid, slice,
        ellipsoids, box or ball.
        """

    @property
    @abstractmethod
    def gamma(self) -> PerChannel:
        """The gain gamma."""

    @property
    def beta(self) -> PerChannel:
        """The offset beta (zeros if there is none)."""
        return torch.zeros_like(self.gamma)

    @abstractmethod
    def standardize(self, x: Vectors) -> Vectors:
        """u(x), before gain and offset."""

    @property
    @abstractmethod
    def attained(self) -> bool:
        """Whether every p has an input x with <p, N(x)> = support(p)."""

    @property
    @abstractmethod
    def reaches_inside(self) -> bool:
        """Whether N also reaches the interior of its image. This matters if velocities have a
        cost.
        """

    def sigma(self, x: Vectors) -> Float[Tensor, "*batch sizes"]:
        """The size by which it divides a token, or each of its groups. Raises ConfigError if it
        does not divide.
        """
        raise ConfigError(
            f"{type(self).__name__} does not divide a token by its size: choose a norm that does,"
            " as rmsnorm"
        )

    @property
    def undefined_at_zero(self) -> bool:
        """Whether N(0) is not defined."""
        return False

    @abstractmethod
    def support(self, p: Vectors) -> PerBatch:
        """sup over x of <p, N(x)>, for eps = 0."""

    @abstractmethod
    def maximizer(self, p: Vectors) -> Vectors:
        """A z in the closure of the image with <p, z> = support(p). If there are several, the
        norm's rule selects one.
        """

    @abstractmethod
    def ties(self, p: Vectors) -> BatchMask:
        """Where several points of the closure maximise <p, z>, to rounding."""

    @abstractmethod
    def shortfall(self, p: Vectors, radius: float) -> PerBatch:
        """An upper bound on support(p) - max of <p, N(x)> over |x - c| <= radius, u(c) = 0."""

    @abstractmethod
    def constraint_violation(self, z: Vectors) -> PerBatch:
        """The largest violation of the equations of the image's closure by z; exactly 0 on it."""

    @abstractmethod
    def jacobian(self, x: Vectors) -> Matrices:
        """The dense derivative dz/dx of each token, exact for eps > 0 too."""

    @abstractmethod
    def slope(self, x: Vectors) -> PerBatch:
        """An upper bound on |J(x)|_2 for each token."""

    @property
    @abstractmethod
    def steepest(self) -> float:
        """An upper bound on |J(x)|_2 for all x; inf if there is none."""

    @property
    def level(self) -> float:
        """g + b = max|gamma| + max|beta|: an upper bound on the RMS, and on the mean absolute
        value, of tokens of the image.
        """
        return self.half_diameter + float(self.beta.detach().abs().max())

    @property
    def half_diameter(self) -> float:
        """max|gamma|: two tokens of the image are at most 2 sqrt(d) times that apart."""
        return float(self.gamma.detach().abs().max())

    def forward(self, x: Vectors) -> Vectors:
        return self.gamma * self.standardize(x) + self.beta

    def tangent(self, x: Vectors, f: Vectors) -> Vectors:
        """The part of f tangent to the image at x. Raises ConfigError if the image has no tangent
        spaces.
        """
        raise self.no_ode()

    def retract(self, y: Vectors) -> Vectors:
        """R(y), a point on the image; the identity on it. Raises ConfigError if the image has no
        tangent spaces.
        """
        raise self.no_ode()

    def normals(self, x: Vectors) -> Float[Tensor, "*batch width normals"]:
        """Vectors that span the normal space at x of the scaled copy of the image through x. Raises
        ConfigError as `tangent`.
        """
        raise self.no_ode()

    def outside_domain(self, x: Vectors) -> BatchMask:
        """Where x is on no scaled copy of the image. Raises ConfigError as `tangent`."""
        raise self.no_ode()

    @property
    def has_tangent(self) -> bool:
        """Whether the image has tangent spaces and a retraction, so that a norm around the state
        has an ODE.
        """
        return type(self).tangent is not Norm.tangent

    def with_eps(self, eps: float) -> Norm:
        """The norm with another eps and the same parameters. Norms without eps return
        themselves.
        """
        return self

    def linear_parameters(self) -> dict[str, Float[Tensor, "..."]]:
        """The parameters in which N(x) is linear: each name with its factor, gamma or beta."""
        factors = {}
        for name, parameter in self.named_parameters():
            if parameter.data_ptr() == self.beta.data_ptr():
                factors[name] = self.beta
            else:
                factors[name] = self.gamma
        return factors

    def coordinates(self, z: Vectors) -> Vectors:
        """u = Gamma^-1 (z - beta), the value before gain and offset.

        Raises ConfigError if a gain is zero: z does not determine u.
        """
        return (z - self.beta) / self._invertible_gain()

    def _invertible_gain(self) -> Tensor:
        """Gamma. Raises ConfigError if a gain is below eps times the largest: x - beta is then lost
        to rounding.
        """
        gamma = self.gamma
        size = gamma.detach().abs()
        if (size <= torch.finfo(gamma.dtype).eps * size.max()).any():
            i = int(size.argmin())
            precision = str(gamma.dtype).removeprefix("torch.")
            raise ConfigError(
                f"gamma[{i}] = {float(gamma[i]):.2g}: the norm's image is flat there, in"
                f" {precision}, and has no tangent space or retraction; use a larger gain, or the"
                " discrete model, whose step needs neither"
            )
        return gamma

    def no_ode(self) -> ConfigError:
        """The error that explains why a norm of this kind around the state has no ODE."""
        return ConfigError(
            f"{type(self).__name__} around the state {self.no_tangent}, so that N(X + dt f(X)) is"
            " no step of an ODE: use the discrete model (euler, one step), or a norm whose image"
            " is a surface, as rmsnorm"
        )


class DividingNorm(Norm):
    """A norm that divides a token, or each group of its channels, by sigma = sqrt(mean square +
    eps) + a: u(x) = x_hat. a is `added`, 0 for all norms of this package.

    For eps = a = 0, N(x) is on the boundary of the image for every x; otherwise in its interior.
    """

    eps: float
    added = 0.0
    degree = 0
    divides = True

    @property
    def attained(self) -> bool:
        """True for eps = 0: otherwise |x_hat|^2 < d."""
        return not self.reaches_inside

    @property
    def reaches_inside(self) -> bool:
        return self.eps > 0 or self.added > 0

    @property
    def undefined_at_zero(self) -> bool:
        return not self.reaches_inside

    @property
    def steepest(self) -> float:
        """max|gamma|/(sqrt(eps) + a) (Emadi, lemma A.1, for a = 0); inf for eps = a = 0."""
        smallest_sigma = math.sqrt(self.eps) + self.added
        if smallest_sigma == 0:
            return math.inf
        return self.half_diameter / smallest_sigma


class GainParameters(nn.Module):
    """gamma and beta as parameters, `weight` and `bias`, initialised at 1 and 0. Without `bias`
    beta stays 0.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None

    def make_gains(self, width: int, *, bias: bool) -> None:
        """Makes the parameters."""
        self.weight = nn.Parameter(torch.ones(width))
        if bias:
            self.bias = nn.Parameter(torch.zeros(width))
        else:
            self.bias = None

    @property
    def gamma(self) -> PerChannel:
        return self.weight

    @property
    def beta(self) -> PerChannel:
        if self.bias is None:
            return torch.zeros_like(self.weight)
        return self.bias


class ConstantGain(nn.Module):
    """gamma = c in every channel, without parameters."""

    gains = "none"
    constant: float

    def make_constant(self, width: int, constant: float) -> None:
        """Sets c."""
        self.constant = constant
        self.register_buffer("one", torch.ones(width), persistent=False)

    @property
    def gamma(self) -> PerChannel:
        one = self.get_buffer("one")
        return self.constant * one


def row_length(x: Vectors, *, keepdim: bool = False) -> Float[Tensor, "..."]:
    """|x|_2 of each row. Rows whose squares would overflow or lose digits are scaled by their
    largest entry first; all others have the bits of `torch.linalg.vector_norm`.
    """
    largest = x.detach().abs().amax(-1, keepdim=True)
    if x.dtype == torch.float64:
        precision = torch.finfo(torch.float64)
    else:
        precision = torch.finfo(torch.float32)
    low = math.sqrt(precision.tiny) / precision.eps
    high = math.sqrt(precision.max / x.shape[-1])
    in_range = (largest > low) & (largest < high)
    unscaled = in_range | (largest == 0) | ~largest.isfinite()
    unit = torch.where(unscaled, 1.0, largest)
    length: Tensor = torch.linalg.vector_norm(x / unit, dim=-1, keepdim=True) * unit
    if keepdim:
        return length
    return length.squeeze(-1)


def check_norm(width: int, eps: float) -> tuple[int, float]:
    """Width and eps. Raises ConfigError unless the width is at least 1 and eps is between 0
    and 1e37: beyond float32 it would make all rows zero.
    """
    COUNT.check("width", width, whole=True)
    Range(0, WEIGHT.high, "a number from 0 to 1e37, such as 1e-5").check("eps", eps)
    return width, float(eps)


def check_bias(name: str, *, bias: bool) -> None:
    """Raises ConfigError if `bias` is set for a norm without offset."""
    if bias:
        raise ConfigError(f"{name} has no offset beta: leave bias out, or choose 'layernorm'")
