"""Linear spaces of velocities: the whole space, tangent spaces of a norm's image, and their
sections. Without a cost H degenerates.
"""

from __future__ import annotations

import functools
import math
from abc import abstractmethod
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from ctrans.base.shapes import PerBatch, TokenMask, TokenRows, UnbatchedRows
from ctrans.control.admissible import (
    Posedness,
    VelocitySet,
    check_costate,
    length,
    ratio,
    rounding_of,
    verdict_of,
)
from ctrans.control.ascent import Chart
from ctrans.dynamics.norm import Norm
from solvers import ConfigError


class LinearSpace(VelocitySet):
    """H(P) = 0 if the orthogonal projection of P on the space is 0 (to 32 machine epsilons of P),
    else +inf.

    No velocity attains +inf: `maximizer` then raises ConfigError, and `witness` gives velocities
    along which -<P, f> grows. If H = 0 every velocity attains it, and the maximiser is f = 0.
    """

    @property
    @abstractmethod
    def _trivial(self) -> bool:
        """Whether the space holds only f = 0."""

    @abstractmethod
    def _velocity(self, raw: Tensor) -> Tensor:
        """The velocity of a sublayer's raw output."""

    @property
    def verdict(self) -> Posedness:
        return verdict_of(finite=self._trivial)

    def support(self, P: TokenRows) -> PerBatch:
        return torch.where(self.ties(P).all(-1), 0.0, math.inf).to(P.dtype)

    def maximizer(self, P: TokenRows) -> TokenRows:
        if not self.ties(P).all():
            raise ConfigError(
                f"no velocity attains H(P) = +inf over the set of {self.words}: use `witness(P, R)`"
                " for velocities along which -<P, f> grows, or make the problem well-posed with"
                " kinetic, weight_decay or radius"
            )
        return torch.zeros_like(P)

    def witness(self, P: TokenRows, radius: float) -> TokenRows:
        """f_R = -R p/|p|, p the projection of P on the space: the f of norm R with the largest -<P,
        f>, R|p|.
        """
        self.check(P)
        p = self.nearest(P)
        size = torch.linalg.vector_norm(p, dim=(-2, -1), keepdim=True)
        return -radius * ratio(p, size)

    def ties(self, P: TokenRows) -> TokenMask:
        self.check(P)
        # squares of small entries could underflow
        rows = ratio(P, P.abs().amax(-1, keepdim=True))
        return length(self.nearest(rows)) <= rounding_of(P) * length(rows)

    def residual(self, f: TokenRows) -> PerBatch:
        return ratio(length(f - self.nearest(f)), length(f)).amax(-1)

    def kkt(self, P: TokenRows, f: TokenRows, kinetic: float = 0.0) -> PerBatch:
        stationarity = ratio(length(self.nearest(P + kinetic * f)), length(P) + kinetic * length(f))
        return torch.maximum(stationarity.amax(-1), self.residual(f))

    def chart(self, P: UnbatchedRows) -> Chart:
        self.check(P)
        return Chart(P, P.shape, self._velocity, degree=1)


class WholeSpace(LinearSpace):
    """R^(n x d), if no output or state norm acts: H(P) = 0 if P = 0, else +inf (Kan, theorem 2)."""

    _trivial = False

    @property
    def words(self) -> str:
        return "all f in R^(n x d)"

    def check(self, P: Tensor) -> None:
        check_costate(P)

    def nearest(self, y: TokenRows) -> TokenRows:
        return y

    def _velocity(self, raw: Tensor) -> Tensor:
        return raw


@dataclass(frozen=True, eq=False)
class AtState(VelocitySet):
    """A set that depends on the state X at which a norm acts."""

    norm: Norm
    state: TokenRows

    def __post_init__(self) -> None:
        check_costate(self.state, self.norm.gamma.dtype, width=self.norm.width, what="state")

    def check(self, P: Tensor) -> None:
        check_costate(P, self.norm.gamma.dtype, tokens=self.state.shape[-2], width=self.norm.width)


@dataclass(frozen=True, eq=False)
class TangentSpace(LinearSpace, AtState):
    """{gamma * q_j : u_j'q_j = 0, 1'q_j = 0 (LayerNorm)}, u_j = (x_j - beta)/gamma: tangent to the
    norm's image at X.

    H(P) = 0 if each p_j is in the span of u_j/gamma and 1/gamma, the image's normals at x_j, else
    +inf (Kan, appendix J). Raises ConfigError if a gain is zero, or if X is on no scaled copy of
    the image: it has no tangent there.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        outside = self.norm.outside_domain(self.state)
        if outside.any():
            raise ConfigError(
                f"{int(outside.sum())} tokens of the state are on no scaled copy of the norm's"
                " image, so nothing is tangent there: pass a state that the norm has been applied"
                " to, or norm.retract(state)"
            )

    @property
    def words(self) -> str:
        conditions = "u_j'q_j = 0"
        if self.norm.centred:
            conditions += ", 1'q_j = 0"
        if self.norm.image == "ellipsoids":
            conditions += " in each group"
        return f"f_j = gamma * q_j, {conditions}, u_j = (x_j - beta)/gamma"

    @functools.cached_property
    def _normals(self) -> Float[Tensor, "*batch tokens width normals"]:
        """An orthonormal basis of the span of u_j/gamma and, for LayerNorm, 1/gamma."""
        basis: Tensor = torch.linalg.qr(self.norm.normals(self.state)).Q.detach()
        return basis

    @property
    def _trivial(self) -> bool:
        return self._normals.shape[-1] == self.norm.width

    def nearest(self, y: TokenRows) -> TokenRows:
        return y - (self._normals @ (self._normals.mT @ y.unsqueeze(-1))).squeeze(-1)

    def _velocity(self, raw: Tensor) -> Tensor:
        return self.norm.tangent(self.state.expand_as(raw), raw)


@dataclass(frozen=True, eq=False)
class TangentSection(TangentSpace):
    """{T S f}, T the projection on the tangent space at X and S that on the `active` channels: H(P)
    = 0 if S T'P = 0.

    It is orthogonal to the tangent space's normals n and to those w in the inactive channels with
    <w, gamma^2 * n> = 0. For them T'w = w, as T = Gamma Pi Gamma^-1 with Pi the projection off
    gamma * n, so S T'w = 0.
    """

    active: Bool[Tensor, " width"]

    @property
    def words(self) -> str:
        return f"{super().words}, made by {int(self.active.sum())} of {self.norm.width} channels"

    @functools.cached_property
    def _normals(self) -> Float[Tensor, "*batch tokens width directions"]:
        """Orthonormal, or 0, columns that span the orthogonal complement of the section."""
        normals = self.norm.normals(self.state).detach()
        # the unit vectors of the inactive channels, and gamma^2 * n there
        inactive = torch.diag((~self.active).to(normals))[:, ~self.active]
        scaled = inactive.mT @ (self.norm.gamma.detach().square().unsqueeze(-1) * normals)
        off_scaled = torch.eye(scaled.shape[-2]).to(scaled) - scaled @ torch.linalg.pinv(scaled)
        w = inactive @ off_scaled
        columns = torch.cat([ratio(normals, length(normals.mT).unsqueeze(-2)), w], -1)
        svd = torch.linalg.svd(columns, full_matrices=False)
        rounding = len(self.active) * rounding_of(columns)
        basis: Tensor = svd.U * (rounding < svd.S).unsqueeze(-2)
        return basis

    @property
    def _trivial(self) -> bool:
        return bool((self._normals.any(-2).sum(-1) == self.norm.width).all())

    def _velocity(self, raw: Tensor) -> Tensor:
        return super()._velocity(torch.where(self.active, raw, 0.0))
