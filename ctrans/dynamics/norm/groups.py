"""RMSNorm of each group of channels, such as a head. The image is a product of ellipsoids."""

from __future__ import annotations

import copy
import math

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from ctrans.base.option import Count
from ctrans.base.shapes import BatchMask, Matrices, PerBatch, Vectors
from ctrans.dynamics.norm.norm import (
    DividingNorm,
    GainParameters,
    Norm,
    check_bias,
    check_norm,
    row_length,
)
from ctrans.dynamics.norm.spheres import SphereOf
from solvers import ConfigError


class GroupRMSNorm(GainParameters, DividingNorm):
    """z_g = gamma_g * x_g/sqrt(mean(x_g^2) + eps) for each of G groups of m = d/G channels (for
    heads: RetNet, Qwen's QK-norm).

    The support function of a product of sets is the sum of theirs, each attained separately: H(P) =
    sum_j sum_g sqrt(m) |gamma_g * p_jg|.
    """

    image = "ellipsoids"
    options = frozenset({"norm_groups"})

    def __init__(
        self,
        width: Count,
        eps: float = 1e-5,
        *,
        bias: bool = False,
        norm_groups: Count | None = None,
    ):
        """`norm_groups` is G; None is two, or one for an odd width."""
        super().__init__()
        check_bias("GroupRMSNorm", bias=bias)
        self.width, self.eps = check_norm(width, eps)
        if norm_groups is not None:
            groups = norm_groups
        elif width % 2 == 0:
            groups = 2
        else:
            groups = 1
        if isinstance(groups, bool) or not isinstance(groups, int) or groups < 1 or width % groups:
            raise ConfigError(
                f"norm_groups = {groups!r}: give a whole number that divides the width {width}"
            )
        self.groups = groups
        self.group_width = width // groups
        self.make_gains(width, bias=bias)

    @property
    def parts(self) -> list[SphereOf]:
        """Each group's norm, with its gains."""
        return [
            SphereOf(gamma, torch.zeros_like(gamma), self.eps)
            for gamma in self.gamma.split(self.group_width)
        ]

    def forward(self, x: Vectors) -> Vectors:
        return (
            F.rms_norm(self.apart(x), (self.group_width,), None, self.eps).flatten(-2) * self.weight
        )

    def apart(self, x: Vectors) -> Float[Tensor, "*batch groups each"]:
        """x_g."""
        groups: Tensor = x.unflatten(-1, (self.groups, self.group_width))
        return groups

    def sigma(self, x: Vectors) -> Float[Tensor, "*batch sizes"]:
        """sigma_g = sqrt(mean(x_g^2) + eps)."""
        return (self.apart(x).square().mean(-1) + self.eps).sqrt()

    def standardize(self, x: Vectors) -> Vectors:
        """x_hat_g = x_g/sigma_g; |x_hat_g|^2 = m for eps = 0, below m otherwise."""
        return (self.apart(x) / self.sigma(x).unsqueeze(-1)).flatten(-2)

    def support(self, p: Vectors) -> PerBatch:
        """sum_g sqrt(m) |gamma_g * p_g|."""
        return math.sqrt(self.group_width) * self._lengths(p).sum(-1)

    def maximizer(self, p: Vectors) -> Vectors:
        """z_g = sqrt(m) gamma_g * w_g/|w_g|, w = gamma * p. Where w_g = 0 every point ties, and the
        rule is RMSNorm's.
        """
        groups = zip(self.parts, p.split(self.group_width, -1), strict=True)
        return torch.cat([part.maximizer(p_g) for part, p_g in groups], -1)

    def ties(self, p: Vectors) -> BatchMask:
        """Where gamma_g * p_g = 0 for a group, to rounding of the whole."""
        lengths = self._lengths(p)
        return (lengths <= 8 * torch.finfo(p.dtype).eps * lengths.amax(-1, keepdim=True)).any(-1)

    def shortfall(self, p: Vectors, radius: float) -> PerBatch:
        """sum_g |w_g| (sqrt(m) - s/sqrt(s^2/m + eps)), s = r/sqrt(G): each group's input has the
        same length.
        """
        share = radius / math.sqrt(self.groups)
        if share:
            reached = share / math.sqrt(share**2 / self.group_width + self.eps)
        else:
            reached = 0.0
        return (math.sqrt(self.group_width) - reached) * self._lengths(p).sum(-1)

    def constraint_violation(self, z: Vectors) -> PerBatch:
        """The largest violation of a group."""
        groups = zip(self.parts, z.split(self.group_width, -1), strict=True)
        violations = [part.constraint_violation(z_g) for part, z_g in groups]
        return torch.stack(violations).amax(0)

    def jacobian(self, x: Vectors) -> Matrices:
        """J has the blocks diag(gamma_g)/sigma_g (I - x_hat_g x_hat_g'/m), and 0 between groups."""
        groups = zip(self.parts, x.split(self.group_width, -1), strict=True)
        rows = []
        for k, (part, x_g) in enumerate(groups):
            before = k * self.group_width
            after = self.width - (k + 1) * self.group_width
            rows.append(F.pad(part.jacobian(x_g), (before, after)))
        return torch.cat(rows, -2)

    def slope(self, x: Vectors) -> PerBatch:
        """max_g max|gamma_g|/sigma_g >= |J(x)|_2."""
        return (self.apart(self.gamma).abs().amax(-1) / self.sigma(x)).amax(-1)

    def tangent(self, x: Vectors, f: Vectors) -> Vectors:
        """v_g = gamma_g * (q_g - u_g (u_g.q_g)/(u_g.u_g)), q = f/gamma, u = x/gamma: RMSNorm's
        formula in each group.
        """
        gamma = self._invertible_gain()
        u = self.apart(x / gamma)
        q = self.apart(f / gamma)
        along = (u * q).sum(-1, keepdim=True) / (u * u).sum(-1, keepdim=True)
        return gamma * (q - u * along).flatten(-2)

    def retract(self, y: Vectors) -> Vectors:
        """R(y)_g = gamma_g * w_g sqrt(m)/|w_g|, w = y/gamma. NaN where a w_g = 0."""
        gamma = self._invertible_gain()
        w = self.apart(y / gamma)
        return gamma * (w * (math.sqrt(self.group_width) / row_length(w, keepdim=True))).flatten(-2)

    def normals(self, x: Vectors) -> Float[Tensor, "*batch width normals"]:
        """u_g/gamma_g in group g and 0 outside, for each g."""
        u = self.apart(self.coordinates(x) / self.gamma)
        same_group = torch.eye(self.groups, dtype=x.dtype, device=x.device)
        return (u.unsqueeze(-1) * same_group.unsqueeze(-2)).flatten(-3, -2)

    def outside_domain(self, x: Vectors) -> BatchMask:
        """Where a u_g = 0."""
        return (row_length(self.apart(self.coordinates(x))) == 0).any(-1)

    def with_eps(self, eps: float) -> Norm:
        twin = copy.copy(self)
        twin.eps = eps
        return twin

    def _lengths(self, p: Tensor) -> Tensor:
        """|gamma_g * p_g|."""
        return row_length(self.apart(self.gamma * p))
