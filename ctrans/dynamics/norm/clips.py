"""Clipping: the identity for small tokens, the nearest point of a ball or a box for others. The
image is compact, so H is attained.
"""

from __future__ import annotations

import abc
import math

import torch
from torch import Tensor

from ctrans.base.shapes import BatchMask, Matrices, PerBatch, Vectors
from ctrans.dynamics.norm.boxes import BoxNorm
from ctrans.dynamics.norm.norm import ConstantGain, Norm, check_bias, check_norm, row_length
from ctrans.dynamics.norm.options import check_size

RADIUS = 1.0
"""The default limit of a token's RMS, or of an entry: that of a normalised token."""


class ClipNorm(ConstantGain, Norm):
    """z = argmin |z - x| over a closed convex set of radius c about 0: N(N(x)) = N(x), Lipschitz
    with constant 1, without parameters.

    gamma = c and beta = 0 here, so u = z/c. It has no degree: it scales with x inside the set only.
    The set is the image and is closed, so the support function is attained.
    """

    options = frozenset({"norm_radius"})
    attained = True
    reaches_inside = True
    steepest = 1.0
    """A projection on a convex set does not increase distances."""
    no_tangent = "projects on a full set, and the velocity would jump at its boundary"

    def __init__(
        self, width: int, eps: float = 1e-5, *, bias: bool = False, norm_radius: float | None = None
    ):
        """`norm_radius` is c. eps is checked but has no effect, since there is no variance."""
        super().__init__()
        check_bias(type(self).__name__, bias=bias)
        self.width, _ = check_norm(width, eps)
        if norm_radius is None:
            self.radius = RADIUS
        else:
            self.radius = check_size("norm_radius", norm_radius)
        self.make_constant(self.width, self.radius)

    def standardize(self, x: Vectors) -> Vectors:
        u: Tensor = self(x) / self.radius
        return u

    @abc.abstractmethod
    def forward(self, x: Vectors) -> Vectors:
        """The projection."""

    def shortfall(self, p: Vectors, radius: float) -> PerBatch:
        """support(p) max(0, 1 - r/(c sqrt(d))): the maximiser is no longer than c sqrt(d)."""
        return self.support(p) * max(0.0, 1 - radius / (self.radius * math.sqrt(self.width)))


class ClipLength(ClipNorm):
    """z = x min(1, c sqrt(d)/|x|), the projection on the ball of radius c sqrt(d): H(P) = c sqrt(d)
    sum_j |p_j| (Cauchy-Schwarz).
    """

    image = "ball"

    def forward(self, x: Vectors) -> Vectors:
        return x * self._share(x)

    def support(self, p: Vectors) -> PerBatch:
        """c sqrt(d) |p|."""
        return self.radius * math.sqrt(self.width) * row_length(p)

    def maximizer(self, p: Vectors) -> Vectors:
        """c sqrt(d) p/|p|. For p = 0 every point ties, and the rule is 0."""
        length = row_length(p, keepdim=True)
        return self.radius * math.sqrt(self.width) * p / torch.where(length == 0, 1.0, length)

    def ties(self, p: Vectors) -> BatchMask:
        """Where p = 0."""
        return (p == 0).all(-1)

    def constraint_violation(self, z: Vectors) -> PerBatch:
        """max(0, |z|^2/(c^2 d) - 1)."""
        return ((z / self.radius).square().mean(-1) - 1).clamp_min(0)

    def jacobian(self, x: Vectors) -> Matrices:
        """J = I inside; c sqrt(d)/|x| (I - xx'/|x|^2) outside."""
        eye = torch.eye(self.width, dtype=x.dtype, device=x.device)
        square = x.square().sum(-1, keepdim=True).unsqueeze(-1)
        away = x.unsqueeze(-1) * x.unsqueeze(-2) / torch.where(square == 0, 1.0, square)
        share = self._share(x).unsqueeze(-1)
        return share * torch.where(share < 1, eye - away, eye)

    def slope(self, x: Vectors) -> PerBatch:
        """min(1, c sqrt(d)/|x|) >= |J(x)|_2."""
        return self._share(x).squeeze(-1)

    def _share(self, x: Tensor) -> Tensor:
        """min(1, c sqrt(d)/|x|)."""
        rms = x.square().mean(-1, keepdim=True)
        # the square root's slope at 0 is infinite; short tokens do not use it
        long = rms > self.radius**2
        return torch.where(long, self.radius * torch.where(long, rms, 1.0).rsqrt(), 1.0)


class ClipEntries(ClipNorm, BoxNorm):
    """z_i = min(max(x_i, -c), c), the projection on the closed box: H(P) = c sum_j |p_j|_1, entry
    by entry (hard tanh).
    """

    def forward(self, x: Vectors) -> Vectors:
        return x.clamp(-self.radius, self.radius)

    def preimage(self, u: Vectors) -> Vectors:
        """x = c u, the input with the coordinates u."""
        return self.radius * u

    def jacobian(self, x: Vectors) -> Matrices:
        """J = diag(abs(x_i) <= c)."""
        return torch.diag_embed((x.abs() <= self.radius).to(x.dtype))

    def slope(self, x: Vectors) -> PerBatch:
        """1 if an entry is inside, otherwise 0: |J(x)|_2."""
        return (x.abs() <= self.radius).any(-1).to(x.dtype)
