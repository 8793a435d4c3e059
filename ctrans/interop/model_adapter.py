"""A foreign model around its blocks, as `Imported` uses it: the first block's state, the blocks'
other arguments, and the output.
"""

from __future__ import annotations

import copy
import inspect
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ctrans.base.as_found import as_found
from ctrans.dynamics.depth import Depth
from ctrans.dynamics.weights.on_demand import has_weights_on_demand
from ctrans.interop.anatomy import Anatomy
from ctrans.interop.attention_rows import IMPLEMENTATION
from ctrans.interop.block_calls import Call, StateForm, recorded_until
from ctrans.interop.block_structure import Structure, alike, make_of
from ctrans.interop.find_blocks import blocks_at
from ctrans.interop.recognise import recognise
from ctrans.interop.recorded_calls import watched, without_fast_path
from solvers import ConfigError

REMEMBERED = 8
"""For how many shapes of the state the contexts are cached."""
OUTPUTS = ("logits", "prediction_logits", "last_hidden_state")
"""Names of a head's output, in order of preference."""


class ModelAdapter(ABC):
    """A model around its blocks.

    - `family`: the kind of model, in a word
    - `context`: the longest sequence, None if the model does not state it
    - `vocabulary`: the number of tokens that it embeds; 0 if it reads other inputs
    - `row`: one input of the example by which its structure was read
    """

    family: str
    context: int | None
    vocabulary: int
    row: Tensor
    blocks_path: str
    apart: Collection[int] = ()
    """Which of its output's tensors are no function of the last state alone."""
    knows_its_inputs: bool = True
    """Whether `embed` refuses inputs for which it computes otherwise than for the example."""
    notes: tuple[str, ...] = ()
    """What is said of the model besides what its maps do not show."""
    own_calls: tuple[bool, ...]
    """How the parts of its blocks are found, as in `recognise`."""

    def __init__(self, model: nn.Module, anatomy: Anatomy):
        self.model: Any = model
        self.anatomy = anatomy
        self.form = StateForm()
        self._called: tuple[str | None, ...] = ()
        self._contexts: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
        self.padding: Tensor | None = None
        """Which tokens are padding (0) and which are text (1), inside of `Imported.padded`."""
        self.text: Tensor | None = None
        """Which tokens of the example its padding mask leaves; None if all, or if it has none."""
        self.like_padding = 0
        """How many tokens of the example look like padding that no mask hides."""

    @abstractmethod
    def predicts(self) -> bool:
        """Whether its output is logits of tokens, one row for each token."""

    @abstractmethod
    def embed(self, tokens: Tensor) -> Tensor:
        """X_0 (*batch, tokens, width)."""

    @abstractmethod
    def outputs(self, x: Tensor) -> Any:
        """All that the model returns if the state after its last block is x (batch, tokens,
        width).
        """

    @abstractmethod
    def run(self, tokens: Tensor) -> Any:
        """A forward pass of the model itself on these inputs."""

    @abstractmethod
    def run_like(self, x: Tensor) -> object:
        """A forward pass whose blocks get states of the shape of x. Only the shape matters."""

    @abstractmethod
    def block_calls(self) -> list[Call]:
        """The call that the model makes of each block for the example."""

    def check(self, depth: Depth) -> None:  # noqa: B027 most models need none
        """Raises ConfigError if the output of that depth at dt = 1 differs from the model's by more
        than rounding.
        """

    def blocks(self) -> list[nn.Module]:
        """The blocks that the model has now."""
        return blocks_at(self.model, self.blocks_path)

    def structures(self) -> tuple[list[Structure], Tensor]:
        """The structure of each block, and the state (batch, tokens, width) of the example before
        the first block.
        """
        structures: list[Structure] = []
        recognised: dict[object, tuple[nn.Module, Structure]] = {}
        with without_fast_path():
            calls = self.block_calls()
            # running a block on demand is slow: only the first of each build
            every_block = not has_weights_on_demand(self.model)
            for i, (block, call) in enumerate(zip(self.blocks(), calls, strict=True)):
                key: object
                if every_block:
                    key = i
                else:
                    key = make_of(block)
                if key in recognised:
                    structures.append(alike(*recognised[key], block, self.anatomy))
                    continue
                try:
                    structure = recognise(block, call, self.anatomy, self.form, self.own_calls)
                except ConfigError as error:
                    if i == 0:
                        raise error from None
                    raise ConfigError(
                        f"block {i} differs from the blocks before it: {error}"
                    ) from None
                structures.append(structure)
                recognised[key] = block, structure
        self._called = tuple(
            _path_of(structure.called, block)
            for block, structure in zip(self.blocks(), structures, strict=True)
        )
        self.tokens = calls[0].x.shape[-2]
        self._like = torch.zeros_like(calls[0].x[0])
        return structures, calls[0].x

    def like(self) -> Tensor:
        """Zeros (tokens, width) of the model's dtype, with as many tokens as the example has."""
        return self._like

    def tensor(self, output: Any) -> Tensor | None:
        """The main tensor of the model's output, sequences first: logits or the last state; None if
        there is none.
        """
        tensor = tensor_in(output)
        if tensor is not None and tensor.dim() > 1:
            return self.form.turned(tensor)
        return tensor

    def block_context(self, block: int, x: Tensor) -> dict[str, Any]:
        """What the model gives that block besides its state x (batch, tokens, width), such as masks
        and rotary embeddings: keyword arguments of its attention.
        """
        # kernels get different masks
        kernel = getattr(getattr(self.model, "config", None), IMPLEMENTATION, None)
        key = (x.shape, x.dtype, x.device, kernel, self.padding)
        if key not in self._contexts:
            contexts = self._contexts_for(x)
            if len(self._contexts) == REMEMBERED:
                oldest = next(iter(self._contexts))
                del self._contexts[oldest]
            self._contexts[key] = contexts
        return self._contexts[key][block]

    def forget(self) -> None:
        """Clears the cache of contexts; call it after the weights change."""
        self._contexts.clear()

    def _contexts_for(self, x: Tensor) -> list[dict[str, Any]]:
        """The context of each block: the call of the module that its structure names, or the
        arguments of the block itself.
        """
        blocks = self.blocks()
        called = {
            i: block.get_submodule(path)
            for i, (block, path) in enumerate(zip(blocks, self._called, strict=True))
            if path
        }
        contexts: list[dict[str, Any]] = [{} for _ in blocks]
        with as_found(self.model), torch.no_grad():
            if called:
                with watched({str(i): part for i, part in called.items()}) as calls:
                    self.run_like(x)
                for call in calls:
                    contexts[int(call.path)] = {"call": call.template.alone(call.x)}
            if len(called) < len(blocks):
                block_calls = recorded_until(
                    blocks, len(blocks) - 1, lambda: self.run_like(x), self.form
                )
                contexts = [
                    context or call.context
                    for context, call in zip(contexts, block_calls, strict=True)
                ]
        return contexts

    def padding_for(self, x: Tensor) -> dict[str, Tensor]:
        """The library's arguments for padding of x, states or token ids of the padded sequences.
        x may hold several copies of all sequences, one after the other.

        Raises ConfigError if x has other sequences.
        """
        mask = self.padding
        if mask is None:
            return {}
        copies, remainder = divmod(len(x), len(mask))
        if remainder or x.shape[1] != mask.shape[1]:
            raise ConfigError(
                f"the padding mask is for {len(mask)} sequences of {mask.shape[1]} tokens, but the"
                f" model reads {len(x)} of {x.shape[1]}: give one row for each"
            )
        arguments = {"attention_mask": mask.to(x.device).repeat(copies, 1)}
        text_behind_padding = mask[:, 1:].bool() & ~mask[:, :-1].bool()
        if text_behind_padding.any() and self._takes_positions():
            # without them the library counts the padding before the text too
            positions = (mask.cumsum(1) - 1).clamp(min=0)
            arguments["position_ids"] = positions.to(x.device).repeat(copies, 1)
        return arguments

    def _takes_positions(self) -> bool:
        """Whether the model takes the positions of tokens, counted from 0. A table with a padding
        index counts otherwise, and finds the padding by itself.
        """
        if "position_ids" not in inspect.signature(self.model.forward).parameters:
            return False
        return not any(
            isinstance(part, nn.Embedding) and part.padding_idx is not None
            for path, part in self.model.named_modules()
            if "position" in path
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> ModelAdapter:
        """The same adapter if a field is copied alone; an adapter around the copy if the model
        itself is copied.
        """
        model = memo.get(id(self.model))
        if model is None:
            return self
        adapter = copy.copy(self)
        adapter.model = model
        adapter._contexts = {}
        return adapter


def _path_of(module: nn.Module | None, block: nn.Module) -> str | None:
    """The module's path in the block; None for no module, or one elsewhere."""
    paths = [path for path, part in block.named_modules() if part is module]
    if paths:
        return str(paths[0])
    return None


def tensor_in(output: Any) -> Tensor | None:
    """The logits or last hidden state in a model's output; None if there is none.

    In a tuple it is the first floating-point tensor with axes, as a scalar loss may come first. In
    a mapping without a known name it is the only such tensor.
    """
    if isinstance(output, Tensor):
        return output
    if isinstance(output, (tuple, list)):
        return next((part for part in output if _of_numbers(part)), None)
    if isinstance(output, Mapping):
        entries = output
    else:
        entries = {name: getattr(output, name, None) for name in OUTPUTS}
    for name in OUTPUTS:
        entry: Tensor | None = entries.get(name)
        if entry is not None:
            return entry
    if not isinstance(output, Mapping):
        return None
    tensors: list[Tensor] = [part for part in output.values() if _of_numbers(part)]
    if len(tensors) == 1:
        return tensors[0]
    return None


def _of_numbers(part: Any) -> bool:
    return isinstance(part, Tensor) and part.is_floating_point() and part.dim() > 0
