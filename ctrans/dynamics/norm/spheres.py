"""Norms that divide a token by its size: the image is an ellipsoid, or its slice through the
centre.

Each maps a token x (a row of width d) to z = gamma * x_hat + beta with x_hat = C x / sigma and
sigma^2 = mean((C x)^2) + eps. C is the centring I - 11'/d for LayerNorm and the identity for the
others. The norms differ otherwise only in their gains and offsets, so each formula below holds for
all, with C.

For eps = 0 the image of RMSNorm is the ellipsoid |Gamma^-1 (z - beta)|^2 = d. The image of
LayerNorm is its slice 1' Gamma^-1 (z - beta) = 0, because x_hat has mean zero (Kan, Lemma 1,
corrected). For eps > 0 the values lie strictly inside.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from ctrans.base.shapes import BatchMask, Matrices, PerBatch, PerChannel, Vectors
from ctrans.dynamics.norm.norm import (
    DividingNorm,
    GainParameters,
    Norm,
    check_bias,
    check_norm,
    row_length,
)
from solvers import checked


class SphereNorm(DividingNorm):
    """A norm z = gamma * x_hat + beta over the last axis, x_hat on the sphere of radius sqrt(d),
    with its geometry as methods.

    A subclass defines the centring, gamma, beta and the forward pass. The geometry follows from
    these. C removes the mean if it is `centred` (LayerNorm), else it is the identity (RMSNorm).
    """

    @property
    def image(self) -> str:
        if self.centred:
            return "slice"
        return "ellipsoid"

    def centre(self, x: Vectors) -> Vectors:
        """C x: x minus its mean over the width, or x itself."""
        if self.centred:
            return x - x.mean(-1, keepdim=True)
        return x

    def standardize(self, x: Vectors) -> Vectors:
        """x_hat = C x / sigma, before gain and offset; |x_hat|^2 = d for eps = 0, below d
        otherwise.
        """
        return self.centre(x) / self.sigma(x)

    def sigma(self, x: Vectors) -> Float[Tensor, "*batch sizes"]:
        """sigma = sqrt(mean((C x)^2) + eps) + a."""
        sigma = (self.centre(x).square().mean(-1, keepdim=True) + self.eps).sqrt()
        if self.added:
            return sigma + self.added
        return sigma

    def preimage(self, u: Vectors) -> Vectors:
        """x = u sqrt(eps/(1 - |u|^2/d)), or u a/(1 - |u|/sqrt(d)), whose x_hat is u = C u, |u|^2 <
        d; for one of eps and a > 0.
        """
        square = u.square().mean(-1, keepdim=True)
        if self.added:
            return u * (self.added / (1 - square.sqrt()))
        return u * (self.eps / (1 - square)).sqrt()

    def constraint_violation(self, z: Vectors) -> PerBatch:
        """The largest violation of the image's equations (eps = 0) by z; exactly 0 on the image.

        With u = Gamma^-1 (z - beta): max of abs(|u|^2/d - 1) and, for LayerNorm, abs(1'u)/d. Zero
        gains flatten the set. There z_i = beta_i is required, and the coordinates u_i, which z does
        not determine, may take any value that satisfies the equations.
        """
        gamma = self.gamma
        hidden = gamma == 0
        offset = z - self.beta
        u = torch.where(hidden, 0.0, offset / torch.where(hidden, 1.0, gamma))
        free = int(hidden.sum())
        # what the hidden coordinates must contribute to |u|^2
        spare = self.width - u.square().sum(-1)
        # and to 1'u, with the opposite sign
        total = u.sum(-1)
        flat = torch.where(hidden, offset, 0.0).abs().amax(-1)
        if free == 0 and self.centred:
            violations = [spare.abs() / self.width, total.abs() / self.width]
        elif free == 0:
            violations = [spare.abs() / self.width]
        elif not self.centred:
            violations = [(-spare).clamp(min=0) / self.width, flat]
        elif free == 1:
            violations = [(spare - total.square()).abs() / self.width, flat]
        else:
            violations = [(total.square() / free - spare).clamp(min=0) / self.width, flat]
        return torch.stack(violations).amax(0)

    def tangent(self, x: Vectors, f: Vectors) -> Vectors:
        """v = Gamma (q - u (u.q)/(u.u)), q = C Gamma^-1 f: the part of f tangent to the image at x.

        A state with velocity v stays on the image (Kan, eq. 132 and Prop. 12, corrected by C for
        LayerNorm). Away from the image, v is tangent to the scaled copy of the image through x.
        Raises ConfigError if a gain is zero.
        """
        gamma = self._invertible_gain()
        u = (x - self.beta) / gamma
        q = self.centre(f / gamma)
        along = (u * q).sum(-1, keepdim=True) / (u * u).sum(-1, keepdim=True)
        return gamma * (q - u * along)

    def retract(self, y: Vectors) -> Vectors:
        """R(y) = beta + Gamma w sqrt(d)/|w|, w = C Gamma^-1 (y - beta): a point on the image; the
        identity on it.

        NaN where w = 0, since every point of the image is then equally near. Raises ConfigError if
        a gain is zero.
        """
        gamma = self._invertible_gain()
        w = self.centre((y - self.beta) / gamma)
        return self.beta + gamma * w * (math.sqrt(self.width) / row_length(w, keepdim=True))

    def normals(self, x: Vectors) -> Float[Tensor, "*batch width normals"]:
        """u/gamma and, for LayerNorm, 1/gamma."""
        u = self.coordinates(x)
        if self.centred:
            columns = [u, torch.ones_like(u)]
        else:
            columns = [u]
        return torch.stack(columns, -1) / self.gamma.unsqueeze(-1)

    def outside_domain(self, x: Vectors) -> BatchMask:
        """Where u = 0 or, for LayerNorm, u has a mean above sqrt(machine eps) of its size."""
        u = self.coordinates(x)
        size: Tensor = torch.linalg.vector_norm(u, dim=-1)
        tilt: Tensor = torch.linalg.vector_norm(u - self.centre(u), dim=-1)
        return (tilt > math.sqrt(torch.finfo(u.dtype).eps) * size) | (size == 0)

    def jacobian(self, x: Vectors) -> Matrices:
        """J = diag(gamma)/sigma (C - sigma/(sigma - a) x_hat x_hat'/d), the dense derivative dz/dx
        of each token; exact for eps > 0 too.

        |J|_2 <= max|gamma|/sigma, and J(c x) = J(x)/c for eps = 0, c > 0 (Kan, Lemma 9 without its
        error; Emadi, Lemma A.1).
        """
        x_hat = self.standardize(x)
        sigma = self.sigma(x).unsqueeze(-1)
        eye = torch.eye(self.width, dtype=x.dtype, device=x.device)
        if self.centred:
            centring = eye - 1 / self.width
        else:
            centring = eye
        along = sigma / (sigma - self.added) * x_hat.unsqueeze(-1)
        inner = centring - along * x_hat.unsqueeze(-2) / self.width
        return self.gamma.unsqueeze(-1) * inner / sigma

    def support(self, p: Vectors) -> PerBatch:
        """max over the image of <p, z> = sqrt(d) |C(gamma * p)|_2 + <p, beta> for each token (eps =
        0).
        """
        return math.sqrt(self.width) * self.length(p) + p @ self.beta

    def maximizer(self, p: Vectors) -> Vectors:
        """argmax over the image of <p, z> = beta + sqrt(d) gamma * w/|w|, w = C(gamma * p) (eps =
        0).

        Where w = 0 every point of the image ties (see `ties`). The rule is then u = sqrt(d/2) (1,
        -1, 0, ...), which lies on both norms' images. At width 1 it is 1, and 0 if the norm is
        centred, whose image is beta alone.
        """
        # centred twice: if gamma * p is nearly constant, the rounding of the first mean matters
        w = self.centre(self.centre(self.gamma * p))
        tie = self.ties(p).unsqueeze(-1)
        length = torch.where(tie, 1.0, row_length(w, keepdim=True))
        direction = torch.where(tie, self._tie_direction(p), w / length)
        return self.beta + self.gamma * (math.sqrt(self.width) * direction)

    def ties(self, p: Vectors) -> BatchMask:
        """Where C(gamma * p) = 0 to rounding (8 eps |gamma * p|): every point of the image
        maximises <p, z>.
        """
        return self.length(p) <= 8 * torch.finfo(p.dtype).eps * row_length(self.gamma * p)

    def shortfall(self, p: Vectors, radius: float) -> PerBatch:
        """|w| (sqrt(d) - r/(sqrt(r^2/d + eps) + a)) at x = r w/|w|, w = C(gamma * p), exactly:
        about |w| sqrt(d) eps d/(2 r^2) for a = 0, and |w| d a/r for eps = 0.
        """
        if radius:
            reached = radius / (math.sqrt(radius**2 / self.width + self.eps) + self.added)
        else:
            reached = 0.0
        return (math.sqrt(self.width) - reached) * self.length(p)

    def length(self, p: Vectors) -> PerBatch:
        """|C(gamma * p)|."""
        return row_length(self.centre(self.gamma * p))

    def slope(self, x: Vectors) -> PerBatch:
        """max|gamma|/sigma >= |J(x)|_2, as |C - x_hat x_hat'/d|_2 <= 1."""
        return (self.gamma.abs().max() / self.sigma(x)).squeeze(-1)

    def with_eps(self, eps: float) -> Norm:
        return WithEps(self, eps)

    def _tie_direction(self, like: Tensor) -> Tensor:
        direction = torch.zeros(self.width, dtype=like.dtype, device=like.device)
        if self.width == 1 and self.centred:
            return direction
        direction[:2] = direction.new_tensor([1.0, -1.0])[: self.width]
        length: Tensor = torch.linalg.vector_norm(direction)
        return direction / length


@checked
class LayerNorm(GainParameters, SphereNorm):
    """LN(x) = gamma * (x - mean(x)) / sqrt(var(x) + eps) + beta, over the last axis of the given
    width.

    With `bias=False` beta is zero.
    """

    centred = True
    has_offset = True

    def __init__(self, width: int, eps: float = 1e-5, *, bias: bool = True):
        super().__init__()
        self.width, self.eps = check_norm(width, eps)
        self.make_gains(width, bias=bias)

    def forward(self, x: Vectors) -> Vectors:
        return F.layer_norm(x, (self.width,), self.weight, self.bias, self.eps)


@checked
class RMSNorm(GainParameters, SphereNorm):
    """RMSNorm(x) = gamma * x / sqrt(mean(x^2) + eps), over the last axis of the given width; beta =
    0.
    """

    def __init__(self, width: int, eps: float = 1e-5, *, bias: bool = False):
        super().__init__()
        check_bias("RMSNorm", bias=bias)
        self.width, self.eps = check_norm(width, eps)
        self.make_gains(width, bias=bias)

    def forward(self, x: Vectors) -> Vectors:
        return F.rms_norm(x, (self.width,), self.weight, self.eps)


class WithEps(SphereNorm):
    """Another sphere norm with a different eps and the same gamma and beta."""

    def __init__(self, norm: SphereNorm, eps: float):
        super().__init__()
        self.norm = norm
        self.width = norm.width
        self.eps = eps
        self.centred = norm.centred

    @property
    def gains(self) -> str:  # type: ignore[override]  # a class's, and here an object's
        return self.norm.gains

    def linear_parameters(self) -> dict[str, Float[Tensor, "..."]]:
        return {f"norm.{name}": value for name, value in self.norm.linear_parameters().items()}

    @property
    def gamma(self) -> PerChannel:
        return self.norm.gamma

    @property
    def beta(self) -> PerChannel:
        return self.norm.beta


class SphereOf(SphereNorm):
    """The sphere norm with given gains, offsets and eps and without centring, for a part of a token
    or for tensors without training.
    """

    def __init__(self, gamma: PerChannel, beta: PerChannel, eps: float):
        super().__init__()
        self.width = len(gamma)
        self.eps = eps
        # a tuple: a module would register a parameter as its own
        self._gains_and_offsets = (gamma, beta)

    @property
    def gamma(self) -> PerChannel:
        gamma, _ = self._gains_and_offsets
        return gamma

    @property
    def beta(self) -> PerChannel:
        _, beta = self._gains_and_offsets
        return beta
