"""Paths of two factors of a map, for a penalty on both: values with outputs, units with what they
write.

- Attention at fixed rows A_h: f = sum_h A_h X V_h'O_h'
- Units: f = phi(X W_1')W_2'
- Gated and squared units, which grow like R^3

`ctrans.control.decay_threshold` has the theory of their thresholds, and
`ctrans.control.shown_factors` reads a path off a map.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ctrans.base.shapes import UnbatchedRows
from ctrans.control.admissible import length
from ctrans.control.ascent import ascend, noise
from ctrans.control.reachable_rows import bound_over_rows
from ctrans.control.scales import at_unit_size, product
from ctrans.dynamics.fields import (
    Activation,
)

STARTS = 16
"""Random directions of a unit, in addition to those along which X and P have most in common."""
FIRST_STEPS = 20
"""Steps of the ascents over a unit's direction from all starts."""
KEPT = 4
"""The best of these ascents, which continue."""
UNIT_STEPS = 60
"""Steps of those that continue."""
UNITS = 16
"""The number of units in an ascent. Each unit grows separately, so more units are only more starts.
"""
SURE = 1000.0
"""A gain counts if it exceeds the rounding of its sum by this factor."""


@dataclass(frozen=True, eq=False)
class ValuePath:
    """f = sum_h A_h X V_g'O_h' at attention rows A_h.

    - `mixed`: A_h X
    - `head`: the number of rows of V_g
    - `groups`: the index g of the values V_g of each head h; None if each head has its own
    - `tokens`: X, with a column of ones if the map has biases, where queries and keys make the
      rows; None for rows that are fixed
    """

    mixed: Float[Tensor, "heads tokens width"]
    head: int
    groups: tuple[int, ...] | None = None
    tokens: Float[Tensor, "tokens width_or_more"] | None = None

    def shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        heads, _, width = self.mixed.shape
        return (len(set(self.head_groups)), self.head, width), (heads, width, self.head)

    def velocity(self, inner: Tensor, outer: Tensor) -> UnbatchedRows:
        return (self.mixed @ inner[list(self.head_groups)].mT @ outer.mT).sum(0)

    homogeneous = True
    input_size = 1.0

    def threshold(self, P: UnbatchedRows) -> tuple[float, float]:
        """max over g of |[(A_h X)'P for the heads h of g, side by side]|_2: the O_h of a group are
        one factor. This is exact for these rows. For all rows it is at most sqrt(heads of g) times
        what one head's can be.

        With P' = Q T its columns are those of (A_h X)'T' rotated by Q', so there are at most as
        many as tokens.
        """
        P, p_size = at_unit_size(P)
        mixed, x_size = at_unit_size(self.mixed)
        t = torch.linalg.qr(P.mT, mode="r").R
        norms = []
        for group in set(self.head_groups):
            heads = [head for head, of_head in enumerate(self.head_groups) if of_head == group]
            stacked = (t @ mixed[heads]).flatten(0, 1)
            norms.append(spectral_norm(stacked))
        threshold = product(max(norms), x_size, p_size)
        if self.tokens is None:
            return threshold, threshold
        bound = product(self._root_of_heads, bound_over_rows(self.tokens, P), p_size)
        if math.isnan(bound):
            bound = math.inf
        return threshold, _not_below(bound, threshold, P)

    def sure(self, P: UnbatchedRows) -> float:
        """inf: lam* is finite."""
        return math.inf

    def uncancelled(self, P: UnbatchedRows) -> float:
        x = self.mixed.flatten(0, -2) if self.tokens is None else self.tokens
        return product(self._root_of_heads, _sum_of_lengths(P), float(length(x.double()).amax()))

    @property
    def _root_of_heads(self) -> float:
        """The root of the most heads that share their values."""
        return math.sqrt(max(Counter(self.head_groups).values()))

    def in_double(self) -> tuple[ValuePath, float]:
        """The path in float64 at X of unit size, and that size: f is linear in X."""
        mixed, size = at_unit_size(self.mixed.double())
        return replace(self, mixed=mixed, tokens=None), size

    @property
    def head_groups(self) -> tuple[int, ...]:
        """The index of the values of each head."""
        if self.groups is None:
            return tuple(range(len(self.mixed)))
        return self.groups


@dataclass(frozen=True, eq=False)
class UnitsPath:
    """f = phi(X W_1')W_2': units a phi(<w, x>). With `bias` units have a bias too."""

    x: UnbatchedRows
    activation: Activation
    units: int
    out: int
    bias: bool = False

    def shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return (self.units, self.x.shape[-1]), (self.out, self.units)

    def velocity(self, inner: Tensor, outer: Tensor) -> UnbatchedRows:
        return self.activation(self.x @ inner.mT) @ outer.mT

    def threshold(self, P: UnbatchedRows) -> tuple[float, float]:
        """The best found of c |P'max(X w, 0)| over |w| = 1, and the bound c (|P'X|_2 +
        |P|_2|X|_2)/2, of (X, 1) with a bias.
        """
        growth = self.activation.at_infinity
        x, x_size = at_unit_size(self.x)
        p, p_size = at_unit_size(P)
        _, vt = product_svd(p, x)
        generator = torch.Generator().manual_seed(0)
        random = noise(P, generator, STARTS, self.x.shape[-1])
        longest = length(P).topk(min(STARTS, len(P))).indices
        directions = torch.cat([vt[:STARTS], -vt[:STARTS], random, x[longest]])

        def project(w: Tensor) -> Tensor:
            unit: Tensor = nn.functional.normalize(w, dim=-1)
            return unit

        def payoff(w: Tensor) -> Tensor:
            reached: Tensor = torch.linalg.vector_norm((x @ w.mT).clamp_min(0).mT @ p, dim=-1)
            return reached

        first_ascents = ascend(payoff, project(directions), (-1,), project, steps=FIRST_STEPS)
        best = first_ascents.z[first_ascents.best.topk(KEPT).indices]
        ascents = ascend(payoff, best, (-1,), project, steps=UNIT_STEPS)
        found = product(growth, x_size, p_size, float(ascents.best.amax()))
        tokens = self.x.double()
        if self.bias:
            tokens = with_ones(tokens)
        tokens, tokens_size = at_unit_size(tokens)
        precise, _ = product_svd(p.double(), tokens)
        bound = (float(precise[0]) + spectral_norm(p.double()) * spectral_norm(tokens)) / 2
        bound = product(growth, bound, tokens_size, p_size)
        return found, _not_below(bound, found, P)

    def sure(self, P: UnbatchedRows) -> float:
        """inf: lam* is finite."""
        return math.inf

    def uncancelled(self, P: UnbatchedRows) -> float:
        x = self.x.double()
        if self.bias:
            x = with_ones(x)
        x, x_size = at_unit_size(x)
        p, p_size = at_unit_size(P.double())
        terms = float((length(p) * length(x)).sum())
        return product(self.activation.at_infinity, terms, x_size, p_size)

    def in_double(self) -> tuple[UnitsPath, float]:
        """The path in float64; at X of unit size, with that size, if f is homogeneous in X."""
        x, size = self.x.double(), 1.0
        if self.homogeneous:
            x, size = at_unit_size(x)
        return replace(self, x=x), size

    @property
    def homogeneous(self) -> bool:
        return self.activation.homogeneous

    @property
    def input_size(self) -> float:
        return _root_mean_square(self.x)


@dataclass(frozen=True, eq=False)
class CubicPath:
    """f = (phi(X W_g') * X W_1')W_2', or max(X W_1', 0)^2 W_2' without a gate: it grows like
    R^3.
    """

    x: UnbatchedRows
    gate: Activation | None
    units: int
    out: int
    bias: bool = False

    homogeneous = False

    def shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        rows = self.units
        if self.gate is not None:
            rows = 2 * self.units
        return (rows, self.x.shape[-1]), (self.out, self.units)

    def velocity(self, inner: Tensor, outer: Tensor) -> UnbatchedRows:
        return self._units(self.x @ inner.mT) @ outer.mT

    def threshold(self, P: UnbatchedRows) -> tuple[float, float]:
        """inf if some units gain by more than rounding, so that c R^3 exceeds every lam R^2/2. If
        none of many does, lam* is not known, as less than R^3 may gain too; it is 0 if f or P is.
        """
        if self.sure(P) > SURE * torch.finfo(P.dtype).eps:
            return math.inf, math.inf
        is_zero = not P.any() or not (self.bias or self.x.any())
        return 0.0, 0.0 if is_zero else math.inf

    def sure(self, P: UnbatchedRows) -> float:
        """The largest |h'P_c|/(|h||P|) of the random units h and of the channels c: an error of P
        below it, as a share of |P|, leaves a gain.
        """
        generator = torch.Generator().manual_seed(0)
        shape, _ = self.shapes()
        inner = noise(P, generator, UNITS * shape[0], shape[1])
        x, _ = at_unit_size(self.x)
        P, _ = at_unit_size(P)
        first, last = (x @ inner.mT).chunk(2, -1)
        if self.gate is None:
            hidden = first.clamp_min(0).square()
        else:
            hidden = first.clamp_min(0) * last  # the limit of phi(r z)/r, but for its factor
        gains = (hidden.mT @ P).abs().amax(-1)
        sizes = length(hidden.mT) * P.norm()
        return float(torch.where(sizes > 0, gains / sizes, 0.0).max())

    def uncancelled(self, P: UnbatchedRows) -> float:
        """0: what is known of it, 0 or inf, has no error."""
        return 0.0

    def in_double(self) -> tuple[CubicPath, float]:
        """The path in float64."""
        return replace(self, x=self.x.double()), 1.0

    @property
    def input_size(self) -> float:
        return _root_mean_square(self.x)

    def _units(self, z: Tensor) -> Tensor:
        if self.gate is None:
            return z.clamp_min(0).square()
        gates, ups = z.chunk(2, -1)
        return self.gate(gates) * ups


Path = ValuePath | UnitsPath | CubicPath
"""A map's path of factors from its input X. All other parts of the map stay fixed.

- `shapes()`: of the inner and of the outer factors
- `velocity(inner, outer)`: the velocity that the factors make of X
- `threshold(P)`: lam* of P, a lower bound by factors that were found and an upper bound. The upper
  one is less only where the two contradict each other
- `uncancelled(P)`: an upper bound of lam* that adds up the sizes of all terms. Errors of the terms
  are shares of it: lam* itself may be small because terms cancel
- `sure(P)`: the error of P, as a share, from which an infinite lam* may be made of it; inf where
  lam* is finite
- `in_double()`: the path in float64, with X over its size where f is linear in that size
- `homogeneous`: whether f grows exactly like r^2 with r times the factors, so a finite H is 0
- `input_size`: the root mean square of what the inner factor meets, 1 if its size does not matter.
  Small inputs need large factors until f grows as it does at infinity
"""


def _not_below(bound: float, found: float, P: Tensor) -> float:
    """The bound, raised to what was found if rounding explains the difference."""
    rounding = math.sqrt(torch.finfo(P.dtype).eps)
    if bound < found <= bound * (1 + rounding):
        return found
    return bound


def _sum_of_lengths(P: UnbatchedRows) -> float:
    rows, size = at_unit_size(P.double())
    return product(float(length(rows).sum()), size)


def _root_mean_square(x: Tensor) -> float:
    largest = float(x.abs().amax())
    if largest == 0:
        return 1.0
    return largest * float((x / x.abs().amax()).square().mean().sqrt())


def with_ones(x: Tensor) -> Tensor:
    """(x, 1): a bias is one more column of the matrix that acts on x."""
    return torch.cat([x, torch.ones_like(x[..., :1])], -1)


def product_svd(
    L: Float[Tensor, "tokens rows"], R: Float[Tensor, "tokens columns"]
) -> tuple[Float[Tensor, " rank"], Float[Tensor, "rank columns"]]:
    """Singular values of L'R in falling order, and its right singular vectors; rank = min(tokens,
    rows, columns).

    With L' = Q S and R' = O T, it is Q (S T') O'. If there are fewer tokens than entries of a
    state, all intermediate matrices stay as small as L and R.
    """
    _, s = torch.linalg.qr(L.mT)
    o, t = torch.linalg.qr(R.mT)
    _, values, vt = torch.linalg.svd(s @ t.mT, full_matrices=False)
    return values, vt @ o.mT


def spectral_norm(matrix: Float[Tensor, "rows columns"]) -> float:
    """The largest singular value, as the root of the largest eigenvalue of the smaller Gram matrix:
    unlike the small ones it loses no digits so, in half of the time.
    """
    size = float(matrix.abs().amax())
    if size == 0 or not math.isfinite(size):
        return size
    scaled = matrix / size
    if scaled.shape[0] > scaled.shape[1]:
        scaled = scaled.mT
    return size * math.sqrt(float(torch.linalg.eigvalsh(scaled @ scaled.mT)[-1]))
