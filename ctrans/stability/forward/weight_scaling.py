"""A sublayer with scaled weights."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ctrans.fields import AroundMap, Scalable
from ctrans.norm import Norm
from ctrans.sublayer import Sublayer
from solvers import ConfigError
from solvers.errors import look_up

FACTORS = (1.0, 10.0, 100.0, 1000.0)


@dataclasses.dataclass(frozen=True)
class Scaling:
    """A way to scale weights by c: the kind of map, whether f becomes exactly c f for any phi, and
    the function that scales the map.
    """

    kind: str
    exact: bool
    of: Callable[[nn.Module, float], nn.Module]


class Times(AroundMap):
    """c f(x): the map with its last linear map, weight and bias, times c. It shares f and does not
    change f's weights.
    """

    def __init__(self, field: nn.Module, c: float | Tensor):
        super().__init__(field)
        self.c = c

    def forward(self, x: Float[Tensor, "*batch tokens width"]) -> Float[Tensor, "*batch tokens width"]:
        y: Tensor = self.field(x)
        return self.c * y


def _inside(name: str) -> Callable[[nn.Module, float], nn.Module]:
    """Scaling of weights inside a map, by the map's own method `scaled`."""

    def of(field: nn.Module, c: float) -> nn.Module:
        if not (isinstance(field, Scalable) and name in field.scalings):
            raise ConfigError(
                f"a field of type {type(field).__name__} has no scaling {name!r} of the weights inside it: choose W or W2"
            )
        return field.scaled(name, c)

    return of


# In Kan, W and V are the output and the value matrix, W1 and W2 those of the FFN.
SCALINGS: dict[str, Scaling] = {
    "W": Scaling("attention", True, Times),
    "V": Scaling("attention", True, _inside("V")),
    "WV": Scaling("attention", True, _inside("WV")),
    "W2": Scaling("ffn", True, Times),
    "W1": Scaling("ffn", False, _inside("W1")),
}


@torch.no_grad()
def scaled(sublayer: Sublayer, scaling: str, c: float, *, eps: float | None = None) -> Sublayer:
    """The sublayer with these weights, and the biases that act after them, times c. `eps` replaces
    that of its norms.

    The given sublayer does not change, and shares the weights that are not scaled. Raises
    ConfigError if the scaling is unknown, is for the other kind of map, or is not supported by the
    map.
    """
    rule = look_up("scaling", scaling, SCALINGS)
    if rule.kind != sublayer.kind:
        fitting = ", ".join(name for name, each in SCALINGS.items() if each.kind == sublayer.kind)
        raise ConfigError(f"scaling {scaling!r} is for {rule.kind} sublayers, this one is {sublayer.kind}: choose {fitting}")
    return _with(sublayer, rule.of(sublayer.field, c), eps)


def times(sublayer: Sublayer, c: float | Tensor) -> Sublayer:
    """f -> c f, c a number or one number per lane of the batch. All weights are shared."""
    return _with(sublayer, Times(sublayer.field, c), None)


def _with(sublayer: Sublayer, field: nn.Module, eps: float | None) -> Sublayer:
    def norm(own: Norm | None) -> Norm | None:
        return own if own is None or eps is None else own.with_eps(eps)

    twin = sublayer.with_field(field)
    for role in ("input_norm", "output_norm", "state_norm"):
        setattr(twin, role, norm(getattr(sublayer, role)))
    return twin


def log_slope(x: Sequence[float], y: Sequence[float | None]) -> float:
    """k of the least-squares fit log y = k log x + constant; nan if a y is missing or not positive."""
    if any(value is None or not 0 < value < math.inf for value in y) or len(y) < 2:
        return math.nan
    a, b = torch.tensor(x, dtype=torch.float64).log(), torch.tensor(y, dtype=torch.float64).log()
    a = a - a.mean()
    return float((a * b).sum() / a.square().sum())
