"""States of several tensors, in tuples, lists, dictionaries and these nested, as one flat tensor."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from solvers.errors import ConfigError


class Tree:
    """The structure of a state and the shapes of its tensors: `flat` puts their entries one after the other, `parts` undoes it."""

    def __init__(self, state: Any):
        leaves, self.structure = tree_flatten(state)
        self.shapes = [leaf.shape for leaf in leaves]

    def flat(self, what: str, state: Any) -> Tensor:
        """The entries of all tensors; ConfigError where `what` has given another structure or other shapes."""
        leaves, structure = tree_flatten(state)
        if structure != self.structure or [getattr(leaf, "shape", None) for leaf in leaves] != self.shapes:
            raise ConfigError(
                f"{what} returned {type(state).__name__} for a state of {len(self.shapes)} tensors: return the same structure with the "
                "same shapes"
            )
        return torch.cat([leaf.reshape(-1) for leaf in leaves])

    def parts(self, y: Tensor) -> Any:
        """The structure with its tensors' entries from the last axis of y; axes before it stay in front."""
        parts = torch.split(y, [math.prod(shape) for shape in self.shapes], dim=-1)
        shaped = [part.reshape((*y.shape[:-1], *shape)) for part, shape in zip(parts, self.shapes, strict=True)]
        return tree_unflatten(shaped, self.structure)

    @staticmethod
    def leaves(state: Any) -> list[Tensor]:
        """Its tensors in order."""
        found: list[Tensor] = tree_leaves(state)
        return found
