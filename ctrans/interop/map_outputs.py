"""The modules of a foreign model that return the output of a map. A monitor reads the map's output
there during training.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence, Set
from typing import Any

from torch import Tensor, nn

from ctrans.interop.residual_scale import ScaledOutput


def itself(x: Tensor) -> Tensor:
    """x."""
    return x


@dataclasses.dataclass(frozen=True, eq=False)
class MapOutput:
    """A module whose output y gives a part tail(y) of a raw velocity."""

    module: nn.Module
    tail: Callable[[Tensor], Tensor] = itself

    def velocity(self, args: Sequence[Any], y: Tensor) -> Tensor:
        """The part of r where the module got `args` and returned y."""
        return self.tail(y)


def map_outputs(chain: Any, model_modules: Set[nn.Module]) -> list[MapOutput]:
    """The model's own modules in a chain of stages, each with the function that is still applied to
    its output.
    """
    scaled = [stage for stage in chain.stages if isinstance(stage, ScaledOutput)]
    tail: Callable[[Tensor], Tensor] = itself
    if scaled:
        tail = scaled[0]
    outputs = []
    for stage in chain.stages:
        if isinstance(stage, ScaledOutput):
            continue
        module = _module_within(stage, model_modules)
        if module is not None:
            outputs.append(MapOutput(module, tail))
    return outputs


def _module_within(stage: nn.Module, model_modules: Set[nn.Module]) -> nn.Module | None:
    """The model's own module that a stage is or holds; the first of several."""
    if stage in model_modules:
        return stage
    return next((part for part in stage.modules() if part in model_modules), None)


ROUTER_NAMES = ("gate", "router")
"""Usual names of the map that chooses experts, next to `experts`."""


def router_in(maps: Sequence[nn.Module]) -> nn.Module | None:
    """The module that chooses experts in the first of the maps that has experts; None if there is
    none or its name is unknown.
    """
    for module in maps:
        for part in module.modules():
            if hasattr(part, "experts"):
                return _router_of(part)
    return None


def _router_of(experts: nn.Module) -> nn.Module | None:
    for name in ROUTER_NAMES:
        router = getattr(experts, name, None)
        if isinstance(router, nn.Module):
            return router
    return None
