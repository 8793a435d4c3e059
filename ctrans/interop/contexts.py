"""What a model gives its blocks besides the state, and how it is made to show its attention rows."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from ctrans.interop.anatomy import Anatomy, find_blocks
from ctrans.interop.block_calls import recorded_until
from ctrans.interop.inputs import stand_in

REMEMBERED = 8
"""For how many shapes of the state the contexts are kept."""
IMPLEMENTATION, ROWS = "_attn_implementation", "eager"
"""The setting by which the library chooses how attention is computed, and its value for which attention returns its rows."""


@runtime_checkable
class Contexts(Protocol):
    """What a model gives its blocks besides the state (masks, rotary embeddings), for states of any shape.

    A copy of a field goes on asking the same model; only a copy of the model with its fields asks the copy.
    """

    @property
    def model(self) -> nn.Module: ...

    def of(self, block: int, x: Tensor) -> dict[str, Any]:
        """The context of that block for the state x (batch, tokens, width): keyword arguments of its attention."""


class LibraryContexts:
    """Those of a model of `transformers`."""

    def __init__(self, model: nn.Module, anatomy: Anatomy):
        self.model, self.anatomy = model, anatomy
        self._known: dict[tuple[Any, ...], list[dict[str, Any]]] = {}

    def of(self, block: int, x: Tensor) -> dict[str, Any]:
        """The context of that block for the state x (batch, tokens, width)."""
        # kernels differ in what masks they are given
        key = (x.shape, x.dtype, x.device, getattr(self.model.config, IMPLEMENTATION, None))
        if key not in self._known:
            blocks = find_blocks(self.model, self.anatomy)
            like = torch.zeros(x.shape, dtype=x.dtype, device=x.device)
            with torch.no_grad():
                calls = recorded_until(blocks, len(blocks) - 1, lambda: self.model(**stand_in(self.model, like)))
            if len(self._known) == REMEMBERED:
                del self._known[next(iter(self._known))]
            self._known[key] = [call.context for call in calls]
        return self._known[key][block]

    def __deepcopy__(self, memo: dict[int, Any]) -> LibraryContexts:
        model = memo.get(id(self.model))
        return self if model is None else LibraryContexts(model, self.anatomy)


@contextlib.contextmanager
def showing_rows(model: nn.Module) -> Iterator[None]:
    """Inside, the library computes attention in the way that returns the rows too."""
    parts = {id(config): config for part in model.modules() if hasattr(config := getattr(part, "config", None), IMPLEMENTATION)}
    before = [(config, getattr(config, IMPLEMENTATION)) for config in parts.values()]
    try:
        for config, _ in before:
            setattr(config, IMPLEMENTATION, ROWS)
        yield
    finally:
        for config, own in before:  # the outer ones first: setting these sets those inside
            setattr(config, IMPLEMENTATION, own)
