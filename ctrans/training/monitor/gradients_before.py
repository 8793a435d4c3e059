"""Whether gradients were reset before a backward pass of a training loop."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn


class GradientNorms(NamedTuple):
    """The norms of the gradients of these weights, by id. The others have none."""

    weights: list[int]
    norms: Tensor


def gradient_norms(root: nn.Module) -> GradientNorms | None:
    """The norms of all gradients of a model's weights. None for weights of which a part is
    elsewhere: their gradients are there, too; and for sparse ones.
    """
    weights, gradients = [], []
    for weight in root.parameters():
        if hasattr(weight, "to_local") or hasattr(weight, "_fsdp_flattened"):
            return None
        if weight.grad is not None:
            weights.append(id(weight))
            gradients.append(weight.grad)
    if any(gradient.is_sparse for gradient in gradients):
        return None
    if not gradients:
        return GradientNorms([], torch.empty(0))
    norms = [norm.to(gradients[0].device) for norm in torch._foreach_norm(gradients)]
    return GradientNorms(weights, torch.stack(norms))


def stepped_weights(root: nn.Module, optimizer: torch.optim.Optimizer | None) -> set[int]:
    """The ids of the model's weights that the optimiser has; of all if it has none of them, as
    where it steps copies. `zero_grad` of an optimiser leaves the gradients of the others.
    """
    own = {id(weight) for weight in root.parameters()}
    if optimizer is None:
        return own
    stepped = {id(weight) for group in optimizer.param_groups for weight in group["params"]}
    return own & stepped or own


def are_reset(before: GradientNorms | None, stepped: set[int]) -> bool | Tensor:
    """Whether none of these weights had a gradient other than 0."""
    if before is None:
        return False
    places = [i for i, weight in enumerate(before.weights) if weight in stepped]
    if not places:
        return True
    return (before.norms[places] == 0).all()
