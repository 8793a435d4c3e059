"""What every norm brings: z = beta + gamma * u(x) with u(x) in a bounded set, and that set's
geometry as methods.

Whether a Hamiltonian behind a norm is finite, and attained, follows from these methods alone:
`support` is H, `maximizer` what has it, `attained` whether an input reaches that, and `shortfall`
how near inputs of a length come where none does.
"""

from __future__ import annotations

import abc
import math
from typing import Any, ClassVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from solvers import ConfigError
from solvers.deprecated import adopt_old_members, old_member

OLD_MEMBERS = {"residual": "constraint_violation", "undo": "preimage", "off_copies": "outside_domain"}
"""Names of methods in the version before."""


class Norm(nn.Module, abc.ABC):
    """z = beta + gamma * u(x) for each token x (a row of width d), where u(x) = `standardize`(x) is
    no longer than sqrt(d).

    The *image* is what x can be sent to, for eps = 0; `support`, `maximizer`, `ties` and `residual`
    are of its closure.
    """

    width: int
    has_offset: ClassVar[bool] = False
    """Whether such a norm may have an offset beta, which `bias` then asks for when it is made."""
    options: ClassVar[frozenset[str]] = frozenset()
    """Fields of `NormOptions` that it takes when it is made, beside width, eps and bias."""
    gains: ClassVar[str] = "each"
    """What of gamma is trained: "each" entry, "one" number that all share, or "none"."""
    degree: int | None = None
    """k with N(c x) - beta = c^k (N(x) - beta) for c > 0 and eps = 0; None where there is none."""
    no_tangent: ClassVar[str] = "has no surface to move on"
    """Why the image has no tangent space and no retraction, where it has none: a norm around the
    state is then the discrete model's.
    """

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        adopt_old_members(cls, {old: new for old, new in OLD_MEMBERS.items() if old in vars(cls)})

    @property
    @abc.abstractmethod
    def image(self) -> str:
        """What kind of set the image is, a name of `ctrans.control.sets_by_norm.IMAGES`: ellipsoid,
        slice, ellipsoids, box or ball.
        """

    @property
    @abc.abstractmethod
    def gamma(self) -> Float[Tensor, " width"]:
        """The gain gamma."""

    @property
    def beta(self) -> Float[Tensor, " width"]:
        """The offset beta (zeros where the norm has none)."""
        return torch.zeros_like(self.gamma)

    @abc.abstractmethod
    def standardize(self, x: Float[Tensor, "*batch width"]) -> Float[Tensor, "*batch width"]:
        """u(x), before gain and offset."""

    @property
    @abc.abstractmethod
    def attained(self) -> bool:
        """Whether every p has an input x with <p, N(x)> = support(p)."""

    @property
    @abc.abstractmethod
    def reaches_inside(self) -> bool:
        """Whether N also reaches the inside of its image, which matters as soon as velocities cost
        something.
        """

    @property
    def centred(self) -> bool:
        """Whether it removes a token's mean."""
        return False

    @property
    def divides(self) -> bool:
        """Whether it divides by the size `sigma`(x) of a token, or of its groups."""
        return False

    def sigma(self, x: Float[Tensor, "*batch width"]) -> Float[Tensor, "*batch sizes"]:
        """What it divides by, of the token or of each of its groups. Raises ConfigError where it
        divides by nothing.
        """
        raise ConfigError(f"{type(self).__name__} divides a token by nothing: choose a norm that does, as rmsnorm")

    @property
    def undefined_at_zero(self) -> bool:
        """Whether N(0) is not defined."""
        return False

    @abc.abstractmethod
    def support(self, p: Float[Tensor, "*batch width"]) -> Float[Tensor, "*batch"]:
        """sup over x of <p, N(x)>, for eps = 0."""

    @abc.abstractmethod
    def maximizer(self, p: Float[Tensor, "*batch width"]) -> Float[Tensor, "*batch width"]:
        """The z of the image's closure with <p, z> = support(p); where several have it, the one
        that the norm's rule picks.
        """

    @abc.abstractmethod
    def ties(self, p: Float[Tensor, "*batch width"]) -> Bool[Tensor, "*batch"]:
        """Where more than one point of the closure has it, to rounding."""

    @abc.abstractmethod
    def shortfall(self, p: Float[Tensor, "*batch width"], radius: float) -> Float[Tensor, "*batch"]:
        """At least support(p) - max of <p, N(x)> over |x - c| <= radius, u(c) = 0: the rate at
        which it is approached.
        """

    @abc.abstractmethod
    def constraint_violation(self, z: Float[Tensor, "*batch width"]) -> Float[Tensor, "*batch"]:
        """How far z is from the closure of the image, as a violation of its equations; 0 exactly on
        it.
        """

    @abc.abstractmethod
    def jacobian(self, x: Float[Tensor, "*batch width"]) -> Float[Tensor, "*batch width width"]:
        """The dense derivative dz/dx of each token, exact for eps > 0 too."""

    @abc.abstractmethod
    def slope(self, x: Float[Tensor, "*batch width"]) -> Float[Tensor, "*batch"]:
        """At least |J(x)|_2 of each token."""

    @property
    @abc.abstractmethod
    def steepest(self) -> float:
        """At least |J(x)|_2 at every x; inf where there is no such number."""

    @property
    def level(self) -> float:
        """g + b = max|gamma| + max|beta|: no token of the image has a larger RMS, and no larger
        mean absolute value.
        """
        return float(self.gamma.detach().abs().max()) + float(self.beta.detach().abs().max())

    @property
    def half_diameter(self) -> float:
        """max|gamma|: two tokens of the image are at most 2 sqrt(d) times that apart."""
        return float(self.gamma.detach().abs().max())

    def forward(self, x: Float[Tensor, "*batch width"]) -> Float[Tensor, "*batch width"]:
        return self.gamma * self.standardize(x) + self.beta

    def tangent(self, x: Float[Tensor, "*batch width"], f: Float[Tensor, "*batch width"]) -> Float[Tensor, "*batch width"]:
        """The part of f tangent to the image at x. Raises ConfigError where the image has no
        tangent spaces.
        """
        raise self.no_ode()

    def retract(self, y: Float[Tensor, "*batch width"]) -> Float[Tensor, "*batch width"]:
        """R(y), back onto the image, the identity on it. Raises ConfigError where the image has no
        tangent spaces.
        """
        raise self.no_ode()

    def normals(self, x: Float[Tensor, "*batch width"]) -> Float[Tensor, "*batch width normals"]:
        """What the tangent space at x, of the scaled copy of the image through it, is orthogonal
        to. Raises ConfigError likewise.
        """
        raise self.no_ode()

    def outside_domain(self, x: Float[Tensor, "*batch width"]) -> Bool[Tensor, "*batch"]:
        """Where x is on no scaled copy of the image. Raises ConfigError likewise."""
        raise self.no_ode()

    @property
    def has_tangent(self) -> bool:
        """Whether the image has tangent spaces and a retraction, so that a norm around the state
        has an ODE.
        """
        return type(self).tangent is not Norm.tangent

    def with_eps(self, eps: float) -> Norm:
        """The norm with eps in place of its own, sharing its parameters; itself where it has none."""
        return self

    def linear_parameters(self) -> dict[str, Float[Tensor, "..."]]:
        """What N(x) is linear in, of its own parameters: each name with the factor that it stands
        for.
        """
        offset = self.beta.data_ptr()
        named = dict(self.named_parameters())
        return {name: self.beta if value.data_ptr() == offset else self.gamma for name, value in named.items()}

    def coordinates(self, z: Float[Tensor, "*batch width"]) -> Float[Tensor, "*batch width"]:
        """u = Gamma^-1 (z - beta), what z comes from before gain and offset.

        Raises ConfigError where a gain is zero: u is then not determined by z.
        """
        return (z - self.beta) / self._invertible_gain()

    def _invertible_gain(self) -> Tensor:
        """Gamma, where the image has a tangent space to rounding: beside gains below eps times the
        largest, x - beta is lost.
        """
        gamma = self.gamma
        size = gamma.detach().abs()
        if bool((size <= torch.finfo(gamma.dtype).eps * size.max()).any()):
            i, kind = int(size.argmin()), str(gamma.dtype).removeprefix("torch.")
            raise ConfigError(
                f"gamma[{i}] = {float(gamma[i]):.2g}: the norm's image is flat there, in {kind}, and has no tangent space or "
                "retraction; use a larger gain, or the discrete model, whose step needs neither"
            )
        return gamma

    def no_ode(self) -> ConfigError:
        """Why there is no ODE with this norm around the state, where there is none."""
        return ConfigError(
            f"{type(self).__name__} around the state {self.no_tangent}, so that N(X + dt f(X)) is no step of an ODE: use the discrete "
            "model (euler, one step), or a norm whose image is a surface, as rmsnorm"
        )


class DividingNorm(Norm):
    """A norm that divides a token, or each group of its channels, by sigma = sqrt(mean square +
    eps): u(x) = x_hat.

    For eps = 0 it is on the edge of its image for every x; otherwise strictly inside, anywhere.
    """

    eps: float
    degree = 0

    @property
    def attained(self) -> bool:
        """For eps = 0: otherwise |x_hat|^2 < d."""
        return not self.reaches_inside

    @property
    def reaches_inside(self) -> bool:
        return self.eps > 0

    @property
    def divides(self) -> bool:
        return True

    @property
    def undefined_at_zero(self) -> bool:
        return not self.reaches_inside

    @property
    def steepest(self) -> float:
        """max|gamma|/sqrt(eps) (Emadi, lemma A.1); inf for eps = 0."""
        return float(worst_gain(self).detach()) / math.sqrt(self.eps) if self.eps else math.inf


class GainParameters(nn.Module):
    """gamma and beta as parameters, `weight` and `bias`, 1 and 0 at first; without `bias` beta
    stays 0.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None

    def make_gains(self, width: int, bias: bool) -> None:
        """Makes the parameters."""
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width)) if bias else None

    @property
    def gamma(self) -> Float[Tensor, " width"]:
        return self.weight

    @property
    def beta(self) -> Float[Tensor, " width"]:
        return torch.zeros_like(self.weight) if self.bias is None else self.bias


class ConstantGain(nn.Module):
    """gamma = c in every channel, with nothing to train."""

    gains = "none"
    constant: float

    def make_constant(self, width: int, constant: float) -> None:
        """Sets c."""
        self.constant = constant
        self.register_buffer("one", torch.ones(width), persistent=False)

    @property
    def gamma(self) -> Float[Tensor, " width"]:
        one: Tensor = self.get_buffer("one")
        return self.constant * one


for _old, _new in OLD_MEMBERS.items():
    setattr(Norm, _old, old_member(_old, _new))


def check_norm(width: int, eps: float) -> tuple[int, float]:
    """Width and eps; ConfigError unless the width is at least 1 and eps a finite number of at least
    0.
    """
    if isinstance(width, bool) or not isinstance(width, int) or width < 1:
        raise ConfigError(f"width = {width!r}: give a whole number of at least 1")
    if isinstance(eps, bool) or not isinstance(eps, (int, float)) or not 0 <= eps < math.inf:
        raise ConfigError(f"eps = {eps!r}: give a finite number of at least 0, such as 1e-5")
    return width, float(eps)


def check_bias(name: str, bias: bool) -> None:
    """ConfigError where an offset is asked of a norm that has none."""
    if bias:
        raise ConfigError(f"{name} has no offset beta: leave bias out, or choose 'layernorm'")


def worst_gain(norm: Norm) -> Tensor:
    """max|gamma|."""
    return norm.gamma.abs().max()
