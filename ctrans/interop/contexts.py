"""What a model gives its blocks besides the state, and how it is made to show its attention rows."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from ctrans.interop.anatomy import Anatomy, find_blocks
from ctrans.interop.block_calls import StateForm, recorded_until
from ctrans.interop.example_inputs import stand_in
from ctrans.interop.recorded_calls import watched
from solvers import ConfigError

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

    def forget(self) -> None:
        """What is remembered of calls with other weights is seen again."""


class Padding:
    """Which tokens of the sequences that are looked at are padding, if any: set by a model, and read wherever a forward pass is run."""

    def __init__(self) -> None:
        self.mask: Tensor | None = None

    def given(self, x: Tensor) -> dict[str, Tensor]:
        """The library's argument for states or token ids x of these sequences, or of several copies of all of them, one after the other.

        Raises ConfigError where x is of other sequences.
        """
        if self.mask is None:
            return {}
        copies, rest = divmod(len(x), len(self.mask))
        if rest or x.shape[1] != self.mask.shape[1]:
            raise ConfigError(
                f"the padding mask is of {len(self.mask)} sequences of {self.mask.shape[1]} tokens, and {len(x)} of {x.shape[1]} are "
                "looked at: give one row for each"
            )
        return {"attention_mask": self.mask.to(x.device).repeat(copies, 1)}


class LibraryContexts:
    """Those of a model of `transformers`: what each block is given, or at `paths` what the block itself gives its attention there."""

    def __init__(self, model: nn.Module, anatomy: Anatomy, form: StateForm, paths: tuple[str | None, ...], padding: Padding):
        self.model, self.anatomy, self.form, self.paths, self.padding = model, anatomy, form, paths, padding
        self._known: dict[tuple[Any, ...], list[dict[str, Any]]] = {}

    def of(self, block: int, x: Tensor) -> dict[str, Any]:
        """The context of that block for the state x (batch, tokens, width)."""
        # kernels differ in what masks they are given
        key = (x.shape, x.dtype, x.device, getattr(self.model.config, IMPLEMENTATION, None), self.padding.mask)
        if key not in self._known:
            blocks = find_blocks(self.model, self.anatomy)
            like = torch.zeros(x.shape, dtype=x.dtype, device=x.device)
            with torch.no_grad():
                found = self._seen(blocks, {**stand_in(self.model, like), **self.padding.given(like)})
            if len(self._known) == REMEMBERED:
                del self._known[next(iter(self._known))]
            self._known[key] = found
        return self._known[key][block]

    def forget(self) -> None:
        self._known.clear()

    def _seen(self, blocks: list[nn.Module], inputs: dict[str, Any]) -> list[dict[str, Any]]:
        """Every block's context in a forward pass on these inputs."""
        called = {i: block.get_submodule(path) for i, (block, path) in enumerate(zip(blocks, self.paths, strict=True)) if path}
        calls: list[dict[str, Any]] = [{} for _ in blocks]
        if called:
            with watched({str(i): part for i, part in called.items()}) as acts:
                self.model(**inputs)
            for act in acts:
                calls[int(act.path)] = {"call": act.template.alone(act.x)}
        if len(called) < len(blocks):
            last = len(blocks) - 1
            of_blocks = recorded_until(blocks, last, lambda: self.model(**inputs), self.form)
            calls = [own or call.context for own, call in zip(calls, of_blocks, strict=True)]
        return calls

    def __deepcopy__(self, memo: dict[int, Any]) -> LibraryContexts:
        model = memo.get(id(self.model))
        return self if model is None else LibraryContexts(model, self.anatomy, self.form, self.paths, self.padding)


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
