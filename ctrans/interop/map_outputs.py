"""The modules of a foreign model that return the output of a map. A monitor reads the map's output
there during training.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence, Set
from typing import Any

from torch import Tensor, nn

from ctrans.interop.multihead import UnfoldedAttention
from ctrans.interop.recorded_calls import CalledAs, own_module
from ctrans.interop.residual_scale import ScaledOutput


def itself(x: Tensor) -> Tensor:
    """x."""
    return x


@dataclasses.dataclass(frozen=True, eq=False)
class MapOutput:
    """A module whose output y gives a part tail(y) of a raw velocity.

    With `adds`, the module has already added a second state to its output (Bloom), and `velocity`
    subtracts it.
    """

    module: nn.Module
    tail: Callable[[Tensor], Tensor] = itself
    adds: bool = False

    def velocity(self, args: Sequence[Any], y: Tensor) -> Tensor:
        """The part of r where the module got `args` and returned y."""
        if self.adds:
            given = [
                x
                for x in args
                if isinstance(x, Tensor) and x.is_floating_point() and x.shape == y.shape
            ]
            other = next((x for x in given if x is not given[0]), None)
            if other is None:
                y = y
            else:
                y = y - other.detach()
        return self.tail(y)


def map_outputs(chain: Any, own: Set[nn.Module]) -> list[MapOutput]:
    """The model's own modules in a chain of stages, each with the function that is still applied to
    its output.
    """
    scaled = [stage for stage in chain.stages if isinstance(stage, ScaledOutput)]
    tail = scaled[0] if scaled else itself
    stages = [
        (stage, _own_within(stage, own))
        for stage in chain.stages
        if not isinstance(stage, ScaledOutput)
    ]
    return [
        MapOutput(part, tail, isinstance(stage, CalledAs))
        for stage, part in stages
        if part is not None
    ]


def _own_within(stage: nn.Module, own: Set[nn.Module]) -> nn.Module | None:
    """The model's own module that a stage is or holds; the first of several."""
    if isinstance(stage, UnfoldedAttention):  # torch's attention calls its last map as a function
        return next((part for part in own if getattr(part, "out_proj", None) is stage.out), None)
    if own_module(stage) in own:
        return own_module(stage)
    return next((part for part in stage.modules() if part in own), None)


ROUTER_NAMES = ("gate", "router")
"""Usual names of the map that chooses experts, next to `experts`."""


def router_in(maps: Sequence[nn.Module]) -> nn.Module | None:
    """The module that chooses experts in the first of the maps that has experts; None if there is
    none or its name is unknown.
    """
    for part in (inner for each in maps for inner in each.modules()):
        if hasattr(part, "experts"):
            return next(
                (
                    router
                    for name in ROUTER_NAMES
                    if isinstance(router := getattr(part, name, None), nn.Module)
                ),
                None,
            )
    return None
