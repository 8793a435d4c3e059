"""Whether a module has the derivatives of the maps that were read in it: `detach`, `no_grad` or a
backward pass of its own changes them without changing a number of the forward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from ctrans.dynamics.depth import Depth
from ctrans.interop.probe_weights import random_states
from ctrans.interop.tolerances import difference, tolerance
from solvers import ConfigError


def check_gradients(
    model: nn.Module,
    depth: Depth,
    own: Callable[[], Tensor | None],
    rebuilt: Callable[[], Tensor | None],
) -> None:
    """Raises ConfigError if derivatives of the module's own output differ from those of the output
    that was rebuilt from its parts: those by the smallest weight of each sublayer.

    A module whose output has no derivatives at all passes: it says so where a loss is needed.
    """
    weights = _smallest_weights(depth)
    if not weights:
        return
    parameters = list(model.parameters())
    before = [parameter.requires_grad for parameter in parameters]
    try:
        for parameter in parameters:
            if parameter.is_floating_point():
                parameter.requires_grad_()
        with torch.enable_grad():
            of_own = _gradients(own(), weights)
            of_rebuilt = _gradients(rebuilt(), weights)
    finally:
        for parameter, required in zip(parameters, before, strict=True):
            parameter.requires_grad_(required)
    if of_own is None or of_rebuilt is None:
        return
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for weight, found, expected in zip(weights, of_rebuilt, of_own, strict=True):
        if found is None or not found.any() or not found.isfinite().all():
            continue
        if expected is None or difference(found, expected) > tolerance(found.dtype) ** 0.5:
            raise ConfigError(
                f"{type(model).__name__} gives its weight {names.get(id(weight), 'of a block')!r}"
                " another gradient than its maps have: it stops or changes gradients between them"
                " (detach, no_grad, or a backward pass of its own), which costates would not see"
            )


def _smallest_weights(depth: Depth) -> list[Tensor]:
    """Of each sublayer the weight with the fewest entries."""
    smallest: dict[int, Tensor] = {}
    for sublayer in depth.sublayers:
        weights = [
            weight
            for weight in sublayer.parameters()
            if weight.is_floating_point() and not weight.is_meta and not weight.is_inference()
        ]
        if weights:
            weight = min(weights, key=lambda weight: weight.numel())
            smallest[id(weight)] = weight
    return list(smallest.values())


def _gradients(y: Tensor | None, weights: Sequence[Tensor]) -> tuple[Tensor | None, ...] | None:
    """The derivatives of <random numbers, y>; None if y has none."""
    if y is None or not y.requires_grad:
        return None
    product = (random_states(y.detach()) * y).sum()
    return torch.autograd.grad(product, weights, allow_unused=True)
