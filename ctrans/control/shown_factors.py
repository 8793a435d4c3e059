"""The path of two factors that a map shows, tested by what the map computes.

A wrong path would give a wrong penalty in silence. So the output has to grow in proportion to the
values that the heads show; heads with one value matrix count as one, by the parameters that they
read and not by their present values; and two heads with one output matrix, or units with one matrix
for both factors, have no path.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from dataclasses import field as dataclasses_field
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ctrans.base.shapes import SequenceRows
from ctrans.control.decay_paths import (
    UNITS,
    CubicPath,
    Path,
    UnitsPath,
    ValuePath,
    with_ones,
)
from ctrans.control.reachable_rows import FlatRows, best_rows
from ctrans.dynamics.fields import (
    ExposesHeads,
    HasOutputProjection,
    HasUnits,
    SumOfMaps,
    why_not,
)
from ctrans.dynamics.fields.protocols import HeadMatrices, Units
from ctrans.dynamics.fields.scaled_linear import scaled_parts
from solvers import ConfigError

MANY_TIMES = 1e8
"""A factor of values by which their effect on the output must grow."""
LINEAR = 1e-2
"""How closely, as a share."""


@dataclass(frozen=True)
class Factors:
    """What a test of a foreign model's blocks at large weights found, by segment.

    - `unlike`: why its maps do not compute with the matrices that they show
    - `bounded`: segments whose output does not grow with their weights
    - `further`: segments of blocks with parameters that are in no linear map, and may be a further
      factor, such as gains
    - `otherwise`: why a finite H of a segment's map and norms is not its own: its block computes
      something else than they do, or a norm does not bound large inputs
    - `untested`: why no verdict of a segment could be tested at large weights
    - `tolerance`: how closely the model was read, as a share
    - `missed`: how far the output of each segment's map was from what its matrices show, as a share
      of the size of its terms
    - `outside`: parts of the model that are in no segment and may be sublayers, and why
    """

    unlike: dict[int, str] = dataclasses_field(default_factory=dict)
    bounded: frozenset[int] = frozenset()
    further: frozenset[int] = frozenset()
    otherwise: dict[int, str] = dataclasses_field(default_factory=dict)
    untested: dict[int, str] = dataclasses_field(default_factory=dict)
    tolerance: float = 0.0
    missed: dict[int, float] = dataclasses_field(default_factory=dict)
    outside: dict[str, str] = dataclasses_field(default_factory=dict)


@runtime_checkable
class TestsFactors(Protocol):
    """A foreign model that can test its blocks at large weights."""

    def factors(self, states: Sequence[Tensor]) -> Factors:
        """What the test found, at these states before each segment."""


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
        _check_two_matrices(field)
        path = _path_of_units(field.units(), x)
        if path is not None:
            return path
    if isinstance(field, SumOfMaps):
        raise ConfigError(
            "its attention and FFN act in parallel, and a penalty is known of one map at a time"
        )
    raise ConfigError(
        f"{type(field).__name__} shows neither heads nor units that grow, so its decaying factors"
        f" are unknown{why_not(field)}: give it `probabilities(x)` and `heads`, or `units()`"
    )


@torch.no_grad()
def shown_velocity(field: object, x: SequenceRows) -> FlatRows | None:
    """What the path of a map without biases computes at its own factors; None for a map without a
    path, or whose factors are not shown.
    """
    try:
        path = path_of(field, x)
    except ConfigError:
        return None
    if isinstance(field, ExposesHeads) and isinstance(path, ValuePath):
        heads = list(field.head_matrices())
        return path.velocity(*_factors(heads, path))
    maps = getattr(field, "maps", None)
    if maps is None or isinstance(path, ValuePath):
        return None
    inner = maps.up.weight
    if maps.gate is not None:
        inner = torch.cat([maps.gate.weight, maps.up.weight])
    return path.velocity(inner, maps.down.weight)


def velocity_at_rows(
    field: Any, path: ValuePath, rows: Tensor, x: SequenceRows
) -> Float[Tensor, "batch*tokens width"]:
    """What the heads' values and outputs make of given attention rows."""
    heads = list(field.head_matrices())
    return replace(path, mixed=_averaged(rows, x)).velocity(*_factors(heads, path))


def _factors(heads: Sequence[HeadMatrices], path: ValuePath) -> tuple[Tensor, Tensor]:
    """The values of each group, and the outputs of each head."""
    groups = path.head_groups
    inner = torch.stack([heads[groups.index(group)].value for group in sorted(set(groups))])
    return inner, torch.stack([head.out for head in heads])


@torch.no_grad()
def _path_of_heads(field: Any, x: SequenceRows) -> ValuePath:
    heads = list(field.head_matrices())
    are_views = _are_views(heads, field)
    groups, groups_of_outputs = _groups_of(field)
    if len(set(groups_of_outputs)) < len(heads):
        raise ConfigError(
            f"two heads of {type(field).__name__} write by the same matrix, so its decaying factors"
            " are not those of each head"
        )
    path = ValuePath(_mixed(field, x), len(heads[0].value), groups, x.flatten(0, -2))
    if are_views:
        without, missed = _by_scaled_values(field, heads, x)
    else:
        without, missed = _by_scaled_states(field, heads, x, path)
    if missed > LINEAR:
        raise ConfigError(
            f"the output of {type(field).__name__} does not grow in proportion to its values, so"
            " its decaying factors are unknown: it clips or normalises them, or reads more weights"
        )
    if has_inner_bias(field) or _has_offset(field, without):
        path = replace(path, tokens=with_ones(x.flatten(0, -2)))
    return path


def _mixed(field: Any, x: SequenceRows) -> Float[Tensor, "heads batch*tokens width"]:
    """A_h X of all sequences."""
    return _averaged(field.probabilities(x), x)


def _averaged(rows: Tensor, x: SequenceRows) -> Float[Tensor, "heads batch*tokens width"]:
    averages = rows @ x.unsqueeze(-3)
    return averages.transpose(0, -3).flatten(1, -2)


def _groups_of(field: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The index of the values of each head, and that of its outputs, among the distinct ones.

    Heads may show copies of a parameter, and separate parameters may be equal. So the matrices of
    the map are random while they are compared. They are put back to the bit.
    """
    matrices = [weight.data for weight in field.parameters() if weight.dim() > 1]
    kept = [matrix.clone() for matrix in matrices]
    generator = torch.Generator().manual_seed(0)
    try:
        for matrix in matrices:
            drawn = torch.randn(matrix.shape, generator=generator, dtype=torch.float64)
            matrix.copy_(drawn)
        heads = list(field.head_matrices())
        values = _same([head.value.clone() for head in heads])
        outputs = _same([head.out.clone() for head in heads])
    finally:
        for matrix, before in zip(matrices, kept, strict=True):
            matrix.copy_(before)
    return values, outputs


def _same(matrices: Iterable[Tensor]) -> tuple[int, ...]:
    """The number of each matrix among those that are not equal."""
    distinct: list[Tensor] = []
    numbers = []
    for matrix in matrices:
        for number, other in enumerate(distinct):
            if torch.equal(matrix, other):
                numbers.append(number)
                break
        else:
            numbers.append(len(distinct))
            distinct.append(matrix)
    return tuple(numbers)


def _are_views(heads: Sequence[HeadMatrices], field: Any) -> bool:
    """Whether values are views of the map's parameters, so that writing to them changes the map."""
    storages = {weight.untyped_storage().data_ptr() for weight in field.parameters()}
    return all(head.value.untyped_storage().data_ptr() in storages for head in heads)


def _by_scaled_values(
    field: Any, heads: Sequence[HeadMatrices], x: SequenceRows
) -> tuple[Tensor, float]:
    """The output without values, and how far it is from growing with them, as a share.

    With values c V the output is A + c B, so that f(c) - f(0) = c (f(1) - f(0)). A product of norms
    or a clip breaks this.
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
    return without, largest_share(many - without - expected, expected)


def _by_scaled_states(
    field: Any, heads: Sequence[HeadMatrices], x: SequenceRows, path: ValuePath
) -> tuple[Tensor, float]:
    """The same where values are copies, which cannot be written: the output at 0, and how far that
    at c X is from the values and outputs that the heads show, at the rows of c X.
    """
    without = field(torch.zeros_like(x))
    large = MANY_TIMES * x
    expected = replace(path, mixed=_mixed(field, large)).velocity(*_factors(heads, path))
    found = (field(large) - without).flatten(0, -2)
    return without, largest_share(found - expected, expected)


def largest_share(missed: Tensor, expected: Tensor) -> float:
    """The largest entry of what was missed, as a share of the largest that was expected; 0 if
    nothing was missed.
    """
    size = float(missed.abs().amax())
    if size == 0:
        return 0.0
    largest = float(expected.abs().amax())
    if largest == 0:
        return math.inf
    return size / largest


def _has_offset(field: Any, without: Tensor) -> bool:
    """Whether the output without values is more than the bias of the output projection: values
    may have a bias then, although the heads do not show it.
    """
    rest = without
    if isinstance(field, HasOutputProjection) and field.output_projection.bias is not None:
        rest = without - field.output_projection.bias
    rounding = math.sqrt(torch.finfo(without.dtype).eps)
    return float(rest.abs().amax()) > rounding * (1 + float(without.abs().amax()))


def _check_two_matrices(field: object) -> None:
    """Raises ConfigError for units whose two factors are one matrix."""
    if not isinstance(field, nn.Module):
        return
    matrices = [weight for weight in field.parameters() if weight.dim() > 1]
    if len({weight.untyped_storage().data_ptr() for weight in matrices}) == 1:
        raise ConfigError(
            f"{type(field).__name__} has one matrix where two factors decay: a penalty is paid"
            " once for both, so the one that is needed is unknown"
        )


def _path_of_units(units: Units, x: SequenceRows) -> Path | None:
    """None for a gate that stays bounded. Raises ConfigError for an activation whose limit is not
    the one that it names.
    """
    number = min(UNITS, units.number)
    phi = units.activation
    if not phi.has_its_limit():
        raise ConfigError(
            "its activation phi does not grow as it names it: phi(r z)/r to c max(z, 0), with c its"
            " `at_infinity`, or phi(r z)/r^2 to c max(z, 0)^2 for degree 2. For no other is a"
            " penalty known"
        )
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
    return has_output_bias(field) or has_inner_bias(field)


def has_output_bias(field: object) -> bool:
    """Whether the last linear map has a bias."""
    return isinstance(field, HasOutputProjection) and field.output_projection.bias is not None


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
