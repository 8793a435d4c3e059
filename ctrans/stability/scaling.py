"""Scaling a sublayer's weights: how its sensitivity, and the hidden state of the model, follow."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ctrans.depth import Depth
from ctrans.stability.backward import TOLERANCE, sublayer_sensitivity, trajectory
from ctrans.stability.forward import moments
from ctrans.sublayer import Attention, Sublayer
from solvers import ConfigError
from solvers.errors import look_up

FACTORS = (1.0, 10.0, 100.0, 1000.0)


@runtime_checkable
class HasLast(Protocol):
    """A map that ends in a linear one: f(x) = last(features(x))."""

    @property
    def last(self) -> nn.Linear: ...


@dataclasses.dataclass(frozen=True)
class Scaling:
    """A way to scale weights by c: of which map, how, and whether f becomes exactly c f whatever phi is."""

    kind: str
    exact: bool
    apply: Callable[[Any, float], None]


def scale_last(field: nn.Module, c: float) -> None:
    """f -> c f by the weight and bias of the last linear map; ConfigError for a map that does not show it (`last`)."""
    if not isinstance(field, HasLast):
        raise ConfigError(
            f"cannot scale a field of type {type(field).__name__}: give it the attribute `last`, its last linear map"
        )
    _scale(field.last, c)


def _scale_values(field: Attention, c: float) -> None:
    """V -> c V with its bias, and the bias of W, which acts after: f -> c f."""
    for parameter in (field.qkv.weight, field.qkv.bias):
        if parameter is not None:
            parameter.chunk(3)[2].mul_(c)
    if field.out.bias is not None:
        field.out.bias.mul_(c)


def _scale_both(field: Attention, c: float) -> None:
    _scale_values(field, math.sqrt(c))
    scale_last(field, math.sqrt(c))


def _scale(linear: nn.Linear, c: float) -> None:
    linear.weight.mul_(c)
    if linear.bias is not None:
        linear.bias.mul_(c)


# Kan's W and V are the output and the value matrix, his W1 and W2 the FFN's.
SCALINGS: dict[str, Scaling] = {
    "W": Scaling("attention", True, scale_last),
    "V": Scaling("attention", True, _scale_values),
    "WV": Scaling("attention", True, _scale_both),
    "W2": Scaling("ffn", True, scale_last),
    "W1": Scaling("ffn", False, lambda field, c: _scale(field.up, c)),
}


@torch.no_grad()
def scaled(sublayer: Sublayer, scaling: str, c: float, *, eps: float | None = None) -> Sublayer:
    """A copy of the sublayer with those weights, and the biases that act after them, times c; `eps` replaces that of its norms.

    Raises ConfigError for an unknown scaling or one of the other kind of map.
    """
    rule = look_up("scaling", scaling, SCALINGS)
    if rule.kind != sublayer.kind:
        fitting = ", ".join(name for name, each in SCALINGS.items() if each.kind == sublayer.kind)
        raise ConfigError(f"scaling {scaling!r} is for {rule.kind} sublayers, this one is {sublayer.kind}: choose {fitting}")
    twin = copy.deepcopy(sublayer)
    rule.apply(twin.field, c)
    for norm in (twin.input_norm, twin.output_norm, twin.state_norm):
        if norm is not None and eps is not None:
            norm.eps = eps
    return twin


@dataclasses.dataclass(frozen=True)
class Slope:
    """S(c) = |dv/dX|_2 with the weights scaled by c, and the slope of log S against log c over all c; nan where S is unknown."""

    scaling: str
    factors: list[float]
    values: list[float | None]
    slope: float


def sensitivity_slope(
    sublayer: Sublayer,
    x: Float[Tensor, "*batch tokens width"],
    scaling: str,
    *,
    factors: Sequence[float] = FACTORS,
    eps: float | None = 0.0,
    tolerance: float = TOLERANCE,
) -> Slope:
    """d log S / d log c: 1 where nothing normalises f, 0 behind an output norm (Kan, propositions 7 and 8; theory, section 7).

    `eps` is put in place of the norms' own, because with eps > 0 the invariance fails where f is not large against it. Scaling
    W1 is invariant only for a positively homogeneous phi without bias; its slope falls to 0 as phi saturates to one.
    """
    found = [sublayer_sensitivity(scaled(sublayer, scaling, c, eps=eps), x, tolerance=tolerance).value for c in factors]
    return Slope(scaling, list(factors), found, log_slope(factors, found))


def log_slope(x: Sequence[float], y: Sequence[float | None]) -> float:
    """k of the least-squares fit log y = k log x + constant; nan where a y is missing or not positive."""
    if any(value is None or not 0 < value < math.inf for value in y) or len(y) < 2:
        return math.nan
    a, b = torch.tensor(x, dtype=torch.float64).log(), torch.tensor(y, dtype=torch.float64).log()
    a = a - a.mean()
    return float((a * b).sum() / a.square().sum())


@dataclasses.dataclass(frozen=True)
class WeightScaling:
    """Moments of X_D with every sublayer's last linear map times c, and the slope of log MA against log c over the largest two.

    Slope 1: the state follows the weights (`pre`). 0: the norms hold it (`peri`, `output`, and any norm around the state).
    """

    factors: list[float]
    mean_abs: list[float]
    variance: list[float]
    slope: float


@torch.no_grad()
def weight_scaling(
    depth: Depth, x0: Float[Tensor, "*batch tokens width"], *, factors: Sequence[float] = FACTORS
) -> WeightScaling:
    """MA and Var of X_D as functions of c, f_k -> c f_k in every segment, input fixed; inf or nan where the state overflows."""
    ends = []
    for c in factors:
        twin = copy.deepcopy(depth)
        for sublayer in twin.sublayers:
            scale_last(sublayer.field, c)
        ends.append(moments(trajectory(twin, x0)[-1]))
    mean_abs = [end.mean_abs for end in ends]
    return WeightScaling(list(factors), mean_abs, [end.variance for end in ends], log_slope(factors[-2:], mean_abs[-2:]))
