"""A map's paths of two factors, for a penalty on both: values with outputs, units with what they
write.

- Attention at fixed rows A_h: f = sum_h A_h X V_h'O_h'
- Units: f = phi(X W_1')W_2'
- Gated and squared units, which grow like R^3

`ctrans.control.decay_threshold` has the theory of their thresholds.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ctrans.base.shapes import SequenceRows, UnbatchedRows
from ctrans.control.admissible import length, ratio
from ctrans.control.ascent import ascend, noise
from ctrans.control.reachable_rows import FlatRows, best_rows, bound_over_rows
from ctrans.dynamics.fields import (
    Activation,
    ExposesHeads,
    HasOutputProjection,
    HasUnits,
    why_not,
)
from ctrans.dynamics.fields.protocols import HeadMatrices, Units
from ctrans.dynamics.fields.scaled_linear import scaled_parts
from solvers import ConfigError

STARTS = 16
"""Random directions of a unit, in addition to those along which X and P have most in common."""
UNIT_STEPS = 200
"""Steps of the ascent over a unit's direction."""
UNITS = 16
"""The number of units in an ascent. Each unit grows separately, so more units are only more starts.
"""
MANY_TIMES = 1e4
"""A factor of values by which their effect on the output must grow."""
LINEAR = 1e-2
"""How closely, as a share."""
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
        return (len(set(self._groups)), self.head, width), (heads, width, self.head)

    def velocity(self, inner: Tensor, outer: Tensor) -> UnbatchedRows:
        return (self.mixed @ inner[list(self._groups)].mT @ outer.mT).sum(0)

    homogeneous = True
    input_size = 1.0

    def threshold(self, P: UnbatchedRows) -> tuple[float, float]:
        """max over g of |[(A_h X)'P for the heads h of g, side by side]|_2: the O_h of a group are
        one factor. This is exact for these rows. For all rows it is at most sqrt(heads of g) times
        what one head's can be.

        With P' = Q T its columns are those of (A_h X)'T' rotated by Q', so there are at most as
        many as tokens.
        """
        t = torch.linalg.qr(P.mT, mode="r").R
        norms = []
        for group in set(self._groups):
            heads = [head for head, of_head in enumerate(self._groups) if of_head == group]
            stacked = (t @ self.mixed[heads]).flatten(0, 1)
            norms.append(float(torch.linalg.matrix_norm(stacked, 2)))
        threshold = max(norms)
        if self.tokens is None:
            return threshold, threshold
        most_heads = max(Counter(self._groups).values())
        bound = math.sqrt(most_heads) * bound_over_rows(self.tokens, P)
        return threshold, max(threshold, bound)

    @property
    def _groups(self) -> tuple[int, ...]:
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
        _, vt = product_svd(P, self.x)
        generator = torch.Generator().manual_seed(0)
        random = noise(P, generator, STARTS, self.x.shape[-1])
        longest = length(P).topk(min(STARTS, len(P))).indices
        directions = torch.cat([vt[:STARTS], -vt[:STARTS], random, self.x[longest]])

        def project(w: Tensor) -> Tensor:
            return ratio(w, length(w).unsqueeze(-1))

        def payoff(w: Tensor) -> Tensor:
            return length((self.x @ w.mT).clamp_min(0).mT @ P)

        ascents = ascend(payoff, project(directions), (-1,), project, steps=UNIT_STEPS)
        found = growth * float(ascents.best.amax())
        tokens = self.x.double()
        if self.bias:
            tokens = with_ones(tokens)
        spectral = partial(torch.linalg.matrix_norm, ord=2)
        precise, _ = product_svd(P.double(), tokens)
        bound = (precise[0] + spectral(P.double()) * spectral(tokens)) / 2
        return found, max(found, growth * float(bound))

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
        generator = torch.Generator().manual_seed(0)
        shape, _ = self.shapes()
        inner = noise(P, generator, UNITS * shape[0], shape[1])
        first, last = (self.x @ inner.mT).chunk(2, -1)
        if self.gate is None:
            hidden = first.clamp_min(0).square()
        else:
            hidden = first.clamp_min(0) * last  # the limit of phi(r z)/r, but for its factor
        gains = (hidden.mT @ P).abs().amax(-1)
        rounding = torch.finfo(P.dtype).eps * length(hidden.mT) * P.norm()
        if (gains > SURE * rounding).any():
            return math.inf, math.inf
        is_zero = not P.any() or not (self.bias or self.x.any())
        return 0.0, 0.0 if is_zero else math.inf

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
- `threshold(P)`: lam* of P, a lower bound by factors that were found and an upper bound
- `homogeneous`: whether f grows exactly like r^2 with r times the factors, so a finite H is 0
- `input_size`: the root mean square of what the inner factor meets, 1 if its size does not matter.
  Small inputs need large factors until f grows as it does at infinity
"""


def _root_mean_square(x: Tensor) -> float:
    size = float(x.square().mean().sqrt())
    return size or 1.0


def path_of(field: object, x: SequenceRows) -> Path:
    """The path of two factors of a map at its input x.

    Raises ConfigError for a map that shows no factors, or that has a scale by channel as a third
    factor.
    """
    if scaled_parts(field):
        raise ConfigError(
            "a scale by channel follows its last linear map: a third factor, outside the decay of"
            " the two"
        )
    if isinstance(field, ExposesHeads):
        return _path_of_heads(field, x)
    if isinstance(field, HasUnits):
        path = _path_of_units(field.units(), x)
        if path is not None:
            return path
    raise ConfigError(
        f"{type(field).__name__} shows neither heads nor units that grow, so its decaying factors"
        f" are unknown{why_not(field)}: give it `probabilities(x)` and `heads`, or `units()`"
    )


def _path_of_heads(field: ExposesHeads, x: SequenceRows) -> ValuePath:
    heads = list(field.head_matrices())
    _check_linear_in_values(field, heads, x)
    addresses = [head.value.data_ptr() for head in heads]
    distinct = list(dict.fromkeys(addresses))
    groups = tuple(distinct.index(address) for address in addresses)
    mixed = (field.probabilities(x) @ x.unsqueeze(-3)).transpose(0, -3).flatten(1, -2)
    tokens = x.flatten(0, -2)
    if has_inner_bias(field):
        tokens = with_ones(tokens)
    return ValuePath(mixed, len(heads[0].value), groups, tokens)


@torch.no_grad()
def _check_linear_in_values(field: Any, heads: Sequence[HeadMatrices], x: SequenceRows) -> None:
    """Raises ConfigError for an attention whose output does not grow with its values, as one that
    clips them.

    With values c V the output is A + c B, so that f(c) - f(0) = c (f(1) - f(0)).
    """
    values = list({head.value.data_ptr(): head.value.data for head in heads}.values())
    kept = [value.clone() for value in values]
    outputs = []
    try:
        for factor in (0.0, 1.0, MANY_TIMES):
            for value, before in zip(values, kept, strict=True):
                value.copy_(factor * before)
            outputs.append(field(x))
    finally:
        for value, before in zip(values, kept, strict=True):
            value.copy_(before)
    without, once, many = outputs
    expected = MANY_TIMES * (once - without)
    missed = (many - without - expected).abs().amax()
    if float(missed) > LINEAR * float(expected.abs().amax()):
        raise ConfigError(
            f"the output of {type(field).__name__} does not grow in proportion to its values, so"
            " its decaying factors are unknown: it clips or normalises them"
        )


def _path_of_units(units: Units, x: SequenceRows) -> Path | None:
    """None for a gate that stays bounded."""
    number = min(UNITS, units.number)
    phi = units.activation
    tokens = x.flatten(0, -2)
    if units.gated and (phi.degree != 1 or phi.at_infinity == 0):
        return None
    if units.gated:
        return CubicPath(tokens, phi, number, x.shape[-1], units.bias)
    if phi.degree == 1:
        return UnitsPath(tokens, phi, number, x.shape[-1], units.bias)
    return CubicPath(tokens, None, number, x.shape[-1], units.bias)


def has_inner_bias(field: object) -> bool:
    """Whether values or units have a bias. A map that does not say so, and no output projection,
    may have one if any of its parameters is a bias.
    """
    if isinstance(field, HasUnits):
        return field.units().bias
    if isinstance(field, ExposesHeads) and any(
        head.value_offset is not None for head in field.head_matrices()
    ):
        return True
    if isinstance(field, HasOutputProjection) or not isinstance(field, nn.Module):
        return False
    return any(name.endswith("bias") for name, _ in field.named_parameters())


def has_bias(field: object) -> bool:
    """Whether values, units or outputs have a bias."""
    if isinstance(field, HasOutputProjection) and field.output_projection.bias is not None:
        return True
    return has_inner_bias(field)


def with_ones(x: Tensor) -> Tensor:
    """(x, 1): a bias is one more column of the matrix that acts on x."""
    return torch.cat([x, torch.ones_like(x[..., :1])], -1)


@torch.no_grad()
def with_best_rows(path: Path, field: object, x: SequenceRows, P: FlatRows) -> Path:
    """The path of an attention with the rows for which the found threshold is largest; others as
    they are.
    """
    if not isinstance(path, ValuePath) or not isinstance(field, ExposesHeads):
        return path
    best = path
    largest_found, _ = path.threshold(P)
    for mixed in best_rows(field, x, P):
        tried = replace(path, mixed=mixed, tokens=None)
        found, _ = tried.threshold(P)
        if found > largest_found:
            best = replace(path, mixed=mixed)
            largest_found = found
    return best


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
