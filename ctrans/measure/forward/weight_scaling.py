"""A sublayer with scaled weights."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ctrans.base.shapes import TokenRows
from ctrans.dynamics.depth import Depth
from ctrans.dynamics.fields import AroundMap, Scalable
from ctrans.dynamics.sublayer import Sublayer
from solvers import ConfigError, look_up

FACTORS = (1.0, 10.0, 100.0, 1000.0)


@dataclasses.dataclass(frozen=True)
class Scaling:
    """A way to scale weights by c: the kind of map, whether f becomes exactly c f for any phi, and
    whether the weights are inside the map, which then scales them itself.
    """

    kind: str
    exact: bool
    inside: bool


class Times(AroundMap):
    """c f(x): the map with its last linear map, weight and bias, times c. It shares f and does not
    change f's weights.
    """

    def __init__(self, field: nn.Module, c: float | Tensor):
        super().__init__(field)
        self.c = c

    def forward(self, x: TokenRows) -> TokenRows:
        y: Tensor = self.field(x)
        return self.c * y


# In Kan, W and V are the output and the value matrix, W1 and W2 those of the FFN.
SCALINGS: dict[str, Scaling] = {
    "W": Scaling("attention", exact=True, inside=False),
    "V": Scaling("attention", exact=True, inside=True),
    "WV": Scaling("attention", exact=True, inside=True),
    "W2": Scaling("ffn", exact=True, inside=False),
    "W1": Scaling("ffn", exact=False, inside=True),
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
        fitting = ", ".join(
            name for name, choice in SCALINGS.items() if choice.kind == sublayer.kind
        )
        raise ConfigError(
            f"scaling {scaling!r} is for {rule.kind} sublayers, this one is {sublayer.kind}: choose"
            f" {fitting}"
        )
    field = sublayer.field
    if not rule.inside:
        twin = times(sublayer, c)
    elif isinstance(field, Scalable) and scaling in field.scalings:
        twin = sublayer.with_field(field.scaled(scaling, c))
    else:
        raise ConfigError(
            f"a field of type {type(field).__name__} has no scaling {scaling!r} of the weights"
            " inside it: choose W or W2"
        )
    for role in ("input_norm", "output_norm", "state_norm"):
        norm = getattr(twin, role)
        if norm is not None and eps is not None:
            setattr(twin, role, norm.with_eps(eps))
    return twin


def times(sublayer: Sublayer, c: float | Tensor) -> Sublayer:
    """f -> c f, c a number or one number per lane of the batch. All weights are shared."""
    return sublayer.with_field(Times(sublayer.field, c))


def maps_are_known(depth: Depth) -> bool:
    """Whether c times a sublayer's output is that of its last map times c. A part that is read by
    its sums x + f(x) may have a norm behind that map, or change x too.
    """
    return all(sublayer.kind != "part" for sublayer in depth.sublayers)


def log_slope(x: Sequence[float], y: Sequence[float | None]) -> float:
    """k of the least-squares fit log y = k log x + constant; nan if a y is missing or not
    positive.
    """
    if any(value is None or not 0 < value < math.inf for value in y) or len(y) < 2:
        return math.nan
    a = torch.tensor(x, dtype=torch.float64).log()
    b = torch.tensor(y, dtype=torch.float64).log()
    a = a - a.mean()
    return float((a * b).sum() / a.square().sum())
