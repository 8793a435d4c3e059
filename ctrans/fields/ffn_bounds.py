"""Bounds and Lipschitz constants of plain and gated FFNs from their matrices, for maps of this
package and of other libraries.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from ctrans.fields.activations import Activation
from ctrans.fields.protocols import TokenBound
from ctrans.fields.spectral_norm import spectral_norm

AT_ONCE = 2**22
"""Entries of a matrix that are converted to float64 at once."""


class Affine(NamedTuple):
    """W x + b."""

    weight: Float[Tensor, "out in"]
    bias: Float[Tensor, " out"] | None = None

    def parts(self) -> tuple[Tensor, ...]:
        """The rows of the matrix in groups that are converted at once."""
        weight = self.weight.detach()
        parts: tuple[Tensor, ...] = weight.split(max(AT_ONCE // weight.shape[1], 1))
        return parts

    def rows(self) -> Float[Tensor, " out"]:
        """The length of each row of the matrix, in float64."""
        return torch.cat([torch.linalg.vector_norm(part.double(), dim=-1) for part in self.parts()])

    def offsets(self) -> Float[Tensor, " out"]:
        """b in float64, 0 if there is none."""
        weight = self.weight
        return weight.new_zeros(len(weight), dtype=torch.float64) if self.bias is None else self.bias.detach().double()

    def largest(self, radius: float) -> float:
        """max over rows k of |w_k| r + |b_k|, the largest entry of W x + b for |x| <= r; inf for r
        = inf.
        """
        return float((self.rows() * radius + self.offsets().abs()).max()) if radius < math.inf else math.inf


def plain_bound(up: Affine, down: Affine, activation: Activation) -> TokenBound:
    """f(x) = W_2 phi(W_1 x + b_1) + b_2.

    |f(x)| <= |W_2|_2 (|W_1|_2 r + |b_1|) + |b_2| if abs(phi(z)) <= abs(z). If abs(phi(z)) <= z^2,
    then |phi(z)| <= |z * z|, which has the bound of a gate equal to W_1.
    """
    if activation.degree == 2:
        return _through(down, _product_bound(up, up))
    outer = spectral_norm(down.weight)
    return TokenBound(outer * spectral_norm(up.weight), outer * length(up.bias) + length(down.bias))


def plain_lipschitz(
    up: Affine, down: Affine, activation: Activation, radius: float = math.inf, *, printed: bool = False
) -> float:
    """L = Lip(phi) |W_2|_2 |W_1|_2 (Emadi, proof of theorem 5.2, with phi's own slope; `printed`
    takes 1).

    If phi's slope grows, it is taken at the largest entry of W_1 x + b_1 for |x| <= r.
    """
    slope = 1.0 if printed else activation.slope * (up.largest(radius) if activation.degree == 2 else 1.0)
    return slope * spectral_norm(down.weight) * spectral_norm(up.weight)


def gated_bound(gate: Affine, up: Affine, down: Affine) -> TokenBound:
    """f(x) = W_d (phi(z) * w) + b_d, z = W_g x + b_g, w = W_u x + b_u, abs(phi(z)) <= abs(z).
    |phi(z) * w| is at most each of

    - max_k |z_k| |w| <= (max_k |g_k| r + max_k |b_g,k|) (|W_u|_2 r + |b_u|), with g_k, u_k the rows
      of W_g, W_u,
    - |z| max_k |w_k|, the same with the two exchanged,
    - |q| r^2 + |(|g_k| |b_u,k| + |u_k| |b_g,k|)_k| r + |b_g * b_u|, q_k = (|g_k| |u_k| + |<g_k,
      u_k>|)/2.

    The result is the one that grows least. In the third, (g'x)(u'x) = x' S x for S = (g u' + u
    g')/2, whose eigenvalues are (<g, u> +- |g| |u|)/2.
    """
    return _through(down, _product_bound(gate, up))


def gated_lipschitz(gate: Affine, up: Affine, down: Affine, slope: float, radius: float = math.inf) -> float:
    """L = |W_d|_2 (Lip(phi) |W_g|_2 |w|_r + |z|_r |W_u|_2) for tokens no longer than r.

    The Jacobian is W_d (diag(w * phi'(z)) W_g + diag(phi(z)) W_u). |z|_r and |w|_r are
    `Affine.largest`.
    """
    entries = slope * spectral_norm(gate.weight) * up.largest(radius) + gate.largest(radius) * spectral_norm(up.weight)
    return spectral_norm(down.weight) * entries


class FFNMaps(NamedTuple):
    """The linear maps of an FFN and its activation; `gate` is None for a plain one."""

    gate: Affine | None
    up: Affine
    down: Affine
    phi: Activation

    def bound(self) -> TokenBound:
        """`plain_bound`, or `gated_bound`."""
        if self.gate is None:
            return plain_bound(self.up, self.down, self.phi)
        return gated_bound(self.gate, self.up, self.down)

    def lipschitz(self, radius: float = math.inf, *, printed: bool = False) -> float:
        """`plain_lipschitz`, or `gated_lipschitz`; `printed` takes the slope of phi as 1."""
        if self.gate is None:
            return plain_lipschitz(self.up, self.down, self.phi, radius, printed=printed)
        return gated_lipschitz(self.gate, self.up, self.down, 1.0 if printed else self.phi.slope, radius)


def length(vector: Tensor | None) -> float:
    """|b|, 0 for None."""
    return 0.0 if vector is None else float(torch.linalg.vector_norm(vector.detach().double()))


def _through(down: Affine, inner: TokenBound) -> TokenBound:
    outer = spectral_norm(down.weight)
    return TokenBound(outer * inner.gain, outer * inner.offset + length(down.bias), outer * inner.curvature)


def _product_bound(gate: Affine, up: Affine) -> TokenBound:
    """|z * w|, as in `gated_bound`."""
    gates, ups = gate.rows(), up.rows()
    g_0, u_0 = gate.offsets(), up.offsets()
    whole_gate, whole_up = (spectral_norm(gate.weight), length(g_0)), (spectral_norm(up.weight), length(u_0))
    entry_gate, entry_up = (float(gates.max()), float(g_0.abs().max())), (float(ups.max()), float(u_0.abs().max()))
    mixed = gates * u_0.abs() + ups * g_0.abs()
    overlaps = torch.cat(list(_overlaps(gate, up)))
    return min(
        _times(entry_gate, whole_up),
        _times(whole_gate, entry_up),
        TokenBound(length(mixed), length(g_0 * u_0), length((gates * ups + overlaps.abs()) / 2)),
        key=lambda bound: (bound.curvature, bound.gain, bound.offset),
    )


def _overlaps(gate: Affine, up: Affine) -> Iterator[Tensor]:
    """<g_k, u_k> for each row."""
    for g, u in zip(gate.parts(), up.parts(), strict=True):
        yield (g.double() * u.double()).sum(-1)


def _times(first: tuple[float, float], second: tuple[float, float]) -> TokenBound:
    """(a r + b) (c r + d)."""
    (a, b), (c, d) = first, second
    return TokenBound(a * d + b * c, b * d, a * c)
