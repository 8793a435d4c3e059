"""Bounds and Lipschitz constants of plain and gated FFNs from their matrices, for maps of this
package and of other libraries.
"""

from __future__ import annotations

import abc
import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from ctrans.dynamics.fields.activations import Activation
from ctrans.dynamics.fields.protocols import TokenBound
from ctrans.dynamics.fields.spectral_norm import spectral_norm

PerOutput = Float[Tensor, " out"]
"""A number for each output."""

AT_ONCE = 2**22
"""Entries of a matrix that are converted to float64 at once."""


class Affine(NamedTuple):
    """W x + b."""

    weight: Float[Tensor, "out in"]
    bias: PerOutput | None = None

    def parts(self) -> tuple[Tensor, ...]:
        """The rows of the matrix in groups that are converted at once."""
        weight = self.weight.detach()
        parts: tuple[Tensor, ...] = weight.split(max(AT_ONCE // weight.shape[1], 1))
        return parts

    def rows(self) -> PerOutput:
        """The length of each row of the matrix, in float64."""
        return torch.cat([torch.linalg.vector_norm(part.double(), dim=-1) for part in self.parts()])

    def split(self, sizes: list[int]) -> list[Affine]:
        """The maps of these numbers of rows."""
        weights = self.weight.split(sizes)
        if self.bias is None:
            return [Affine(weight) for weight in weights]
        offsets = self.bias.split(sizes)
        return [Affine(weight, bias) for weight, bias in zip(weights, offsets, strict=True)]

    def offsets(self) -> PerOutput:
        """b in float64, 0 if there is none."""
        weight = self.weight
        if self.bias is None:
            return weight.new_zeros(len(weight), dtype=torch.float64)
        return self.bias.detach().double()

    def largest(self, radius: float) -> float:
        """max over rows k of |w_k| r + |b_k|, the largest entry of W x + b for |x| <= r; inf for r
        = inf.
        """
        if radius < math.inf:
            return float((self.rows() * radius + self.offsets().abs()).max())
        return math.inf


class FFNMaps(NamedTuple):
    """The linear maps of an FFN and its activation phi. `gate` is None for a plain one.

    Plain: f(x) = W_2 phi(W_1 x + b_1) + b_2. Gated: f(x) = W_d (phi(z) * w) + b_d, z = W_g x + b_g,
    w = W_u x + b_u.
    """

    gate: Affine | None
    up: Affine
    down: Affine
    phi: Activation

    def features(self, x: Float[Tensor, "*batch width"]) -> Float[Tensor, "*batch hidden"]:
        """phi(W_1 x + b_1), or phi(z) * w."""
        if self.gate is None:
            return self.phi(F.linear(x, *self.up))
        return self.phi(F.linear(x, *self.gate)) * F.linear(x, *self.up)

    def bound(self) -> TokenBound:
        """Plain: |f(x)| <= |W_2|_2 (|W_1|_2 r + |b_1|) + |b_2| if abs(phi(z)) <= abs(z). If
        abs(phi(z)) <= z^2, then |phi(z)| <= |z * z|, which has the bound of a gate equal to W_1.

        Gated, abs(phi(z)) <= abs(z): |W_d|_2 times the bound on |z * w|, plus |b_d|. |z * w| is at
        most each of

        - max_k |z_k| |w| <= (max_k |g_k| r + max_k |b_g,k|) (|W_u|_2 r + |b_u|), with g_k, u_k the
          rows of W_g, W_u,
        - |z| max_k |w_k|, the same with the two exchanged,
        - |q| r^2 + |(|g_k| |b_u,k| + |u_k| |b_g,k|)_k| r + |b_g * b_u|, q_k = (|g_k| |u_k| + |<g_k,
          u_k>|)/2.

        The result is the one that grows least. In the third, (g'x)(u'x) = x' S x for S = (g u' + u
        g')/2, whose eigenvalues are (<g, u> +- |g| |u|)/2.
        """
        outer = spectral_norm(self.down.weight)
        last_offset = length(self.down.bias)
        if self.gate is None and self.phi.degree == 1:
            gain = outer * spectral_norm(self.up.weight)
            return TokenBound(gain, outer * length(self.up.bias) + last_offset)
        if self.gate is None:
            inner = _product_bound(self.up, self.up)
        else:
            inner = _product_bound(self.gate, self.up)
        offset = outer * inner.offset + last_offset
        return TokenBound(outer * inner.gain, offset, outer * inner.curvature)

    def lipschitz(self, radius: float = math.inf, *, printed: bool = False) -> float:
        """Plain: L = Lip(phi) |W_2|_2 |W_1|_2 (Emadi, proof of theorem 5.2, with phi's own slope;
        `printed` takes 1). If phi's slope grows, it is taken at the largest entry of W_1 x + b_1
        for |x| <= r.

        Gated: L = |W_d|_2 (Lip(phi) |W_g|_2 |w|_r + |z|_r |W_u|_2) for tokens no longer than r. The
        Jacobian is W_d (diag(w * phi'(z)) W_g + diag(phi(z)) W_u). |z|_r and |w|_r are
        `Affine.largest`.
        """
        if printed:
            slope = 1.0
        else:
            slope = self.phi.slope
        outer = spectral_norm(self.down.weight)
        if self.gate is None:
            if self.phi.degree == 2 and not printed:
                slope *= self.up.largest(radius)
            return slope * outer * spectral_norm(self.up.weight)
        through_gate = slope * spectral_norm(self.gate.weight) * self.up.largest(radius)
        through_up = self.gate.largest(radius) * spectral_norm(self.up.weight)
        return outer * (through_gate + through_up)


class BoundedFFN(nn.Module, abc.ABC):
    """The bound and the Lipschitz constant of an FFN, from its `maps`.

    A subclass of nn.Module, so that FSDP can exchange the class of an FFN.
    """

    @property
    @abc.abstractmethod
    def maps(self) -> FFNMaps:
        """Its linear maps and its activation."""

    def bound(self) -> TokenBound:
        """|f(x)_i| <= gain r + offset + curvature r^2 (see `FFNMaps.bound`)."""
        return self.maps.bound()

    def lipschitz(self, radius: float = math.inf, *, printed: bool = False) -> float:
        """A Lipschitz constant for tokens no longer than `radius` (see `FFNMaps.lipschitz`)."""
        return self.maps.lipschitz(radius, printed=printed)


def length(vector: Tensor | None) -> float:
    """|b|, 0 for None."""
    if vector is None:
        return 0.0
    return float(torch.linalg.vector_norm(vector.detach().double()))


def _product_bound(gate: Affine, up: Affine) -> TokenBound:
    """|z * w|, as in `FFNMaps.bound`."""
    gates = gate.rows()
    ups = up.rows()
    g_0 = gate.offsets()
    u_0 = up.offsets()
    whole_gate = (spectral_norm(gate.weight), length(g_0))
    whole_up = (spectral_norm(up.weight), length(u_0))
    entry_gate = (float(gates.max()), float(g_0.abs().max()))
    entry_up = (float(ups.max()), float(u_0.abs().max()))
    mixed = gates * u_0.abs() + ups * g_0.abs()
    # <g_k, u_k>
    overlaps = torch.cat(
        [
            (gate_rows.double() * up_rows.double()).sum(-1)
            for gate_rows, up_rows in zip(gate.parts(), up.parts(), strict=True)
        ]
    )
    return min(
        _times(entry_gate, whole_up),
        _times(whole_gate, entry_up),
        TokenBound(length(mixed), length(g_0 * u_0), length((gates * ups + overlaps.abs()) / 2)),
        key=lambda bound: (bound.curvature, bound.gain, bound.offset),
    )


def _times(first: tuple[float, float], second: tuple[float, float]) -> TokenBound:
    """(a r + b) (c r + d)."""
    a, b = first
    c, d = second
    return TokenBound(a * d + b * c, b * d, a * c)
