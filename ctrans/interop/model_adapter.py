"""A model that runs blocks, as `Imported` uses it: what gives the first block its state, what the
blocks get, what follows them.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ctrans.depth import Depth
from ctrans.interop.anatomy import Anatomy
from ctrans.interop.attention_rows import IMPLEMENTATION
from ctrans.interop.block_calls import Call, StateForm, recorded_until
from ctrans.interop.find_blocks import blocks_at
from ctrans.interop.recognise import Structure, alike, make_of, recognise
from ctrans.interop.recorded_calls import watched, without_fast_path
from ctrans.weights.on_demand import has_weights_on_demand
from solvers import ConfigError

REMEMBERED = 8
"""For how many shapes of the state the contexts are kept."""
OUTPUTS = ("logits", "prediction_logits", "last_hidden_state")
"""What a head's output is called, in order of preference."""


class ModelAdapter(ABC):
    """A model around its blocks.

    - `family`: what kind of model it is, in a word
    - `context`: the longest sequence, None where the model does not say
    - `vocabulary`: how many tokens it embeds; 0 where it reads something else
    - `row`: one of its inputs, as in the example by which its structure was read
    """

    family: str
    context: int | None
    vocabulary: int
    row: Tensor
    blocks_path: str
    own_calls: tuple[bool, ...]
    """How its blocks' parts are found, as in `recognise`."""

    def __init__(self, model: nn.Module, anatomy: Anatomy):
        self.model: Any = model
        self.anatomy, self.form = anatomy, StateForm()
        self.padding: Tensor | None = None
        """Which tokens of the sequences are padding (0) and which are text (1), where
        `Imported.padded` says so.
        """

    @abstractmethod
    def predicts(self) -> bool:
        """Whether its output is logits of tokens, one row for each."""

    @abstractmethod
    def embed(self, tokens: Tensor) -> Tensor:
        """X_0 (*batch, tokens, width)."""

    @abstractmethod
    def outputs(self, x: Tensor) -> Any:
        """All that the model returns where its last block's state is x (batch, tokens, width)."""

    @abstractmethod
    def run_like(self, x: Tensor) -> object:
        """A forward pass whose blocks get states of x's shape, where only the shape matters."""

    @abstractmethod
    def block_calls(self) -> list[Call]:
        """How the model calls each block for the example."""

    def check(self, depth: Depth) -> None:  # noqa: B027 most models need none
        """Raises ConfigError where the output of that depth, at dt = 1, is not the model's own to
        rounding.
        """

    def blocks(self) -> list[nn.Module]:
        """The blocks, as they are in the model now."""
        return blocks_at(self.model, self.blocks_path)

    def structures(self) -> tuple[list[Structure], Tensor]:
        """Every block's structure, and a state (batch, tokens, width) as the example gives it to
        the first.
        """
        found: list[Structure] = []
        known: dict[object, tuple[nn.Module, Structure]] = {}
        with without_fast_path():
            calls = self.block_calls()
            each = not has_weights_on_demand(self.model)  # or, where running a block takes long, the first of its make
            for i, (block, call) in enumerate(zip(self.blocks(), calls, strict=True)):
                key = i if each else make_of(block)
                if key in known:
                    found.append(alike(*known[key], block, self.anatomy))
                    continue
                try:
                    found.append(recognise(block, call, self.anatomy, self.form, self.own_calls))
                except ConfigError as error:
                    raise error if not i else ConfigError(f"block {i}, unlike those before it: {error}") from None
                known[key] = block, found[-1]
        self.tokens, self._like = calls[0].x.shape[-2], torch.zeros_like(calls[0].x[0])
        return found, calls[0].x

    def like(self) -> Tensor:
        """A state (tokens, width) of the least length at which tokens can be told apart, of the
        model's type; zeros.
        """
        return self._like

    def tensor(self, output: Any) -> Tensor | None:
        """The tensor that is meant by what the model returns, sequences first: logits, or the last
        state; None where there is none.
        """
        found = tensor_in(output)
        return self.form.turned(found) if found is not None and found.dim() > 1 else found

    def contexts(self, structures: Sequence[Structure]) -> Contexts:
        """What the model gives its blocks besides the state."""
        paths: list[str | None] = []
        for block, structure in zip(self.blocks(), structures, strict=True):
            names = {part: path for path, part in block.named_modules()}
            paths.append(names[structure.called] if structure.own_calls and structure.called is not None else None)
        return Contexts(self, tuple(paths))

    def contexts_for(self, x: Tensor, paths: Sequence[str | None]) -> list[dict[str, Any]]:
        """For each block the keyword arguments of its attention, for states of x's shape: the call
        of the module at that path, or what the block itself is given.
        """
        blocks = self.blocks()
        called = {i: block.get_submodule(path) for i, (block, path) in enumerate(zip(blocks, paths, strict=True)) if path}
        contexts: list[dict[str, Any]] = [{} for _ in blocks]
        with torch.no_grad():
            if called:
                with watched({str(i): part for i, part in called.items()}) as calls:
                    self.run_like(x)
                for call in calls:
                    contexts[int(call.path)] = {"call": call.template.alone(call.x)}
            if len(called) < len(blocks):
                of_blocks = recorded_until(blocks, len(blocks) - 1, lambda: self.run_like(x), self.form)
                contexts = [own or call.context for own, call in zip(contexts, of_blocks, strict=True)]
        return contexts

    def padding_for(self, x: Tensor) -> dict[str, Tensor]:
        """The library's argument for states or token ids x of the padded sequences, or of several
        copies of all of them, one after the other.

        Raises ConfigError where x is of other sequences.
        """
        mask = self.padding
        if mask is None:
            return {}
        copies, rest = divmod(len(x), len(mask))
        if rest or x.shape[1] != mask.shape[1]:
            raise ConfigError(
                f"the padding mask is of {len(mask)} sequences of {mask.shape[1]} tokens, and {len(x)} of {x.shape[1]} are "
                "looked at: give one row for each"
            )
        return {"attention_mask": mask.to(x.device).repeat(copies, 1)}

    def __deepcopy__(self, memo: dict[int, Any]) -> ModelAdapter:
        """Itself, or for a copy of the model the same around the copy."""
        model = memo.get(id(self.model))
        if model is None:
            return self
        other = copy.copy(self)
        other.model = model
        return other


class Contexts:
    """What a model gives its blocks besides the state (masks, rotary embeddings), for states of any
    shape.

    A copy of a field goes on asking the same model; only a copy of the model with its fields asks
    the copy.
    """

    def __init__(self, adapter: ModelAdapter, paths: tuple[str | None, ...]):
        self.adapter, self.paths = adapter, paths
        self._known: dict[tuple[Any, ...], list[dict[str, Any]]] = {}

    @property
    def model(self) -> nn.Module:
        model: nn.Module = self.adapter.model
        return model

    def of(self, block: int, x: Tensor) -> dict[str, Any]:
        """The context of that block for the state x (batch, tokens, width): keyword arguments of
        its attention.
        """
        kernel = getattr(getattr(self.model, "config", None), IMPLEMENTATION, None)  # kernels differ in what masks they are given
        key = (x.shape, x.dtype, x.device, kernel, self.adapter.padding)
        if key not in self._known:
            found = self.adapter.contexts_for(x, self.paths)
            if len(self._known) == REMEMBERED:
                del self._known[next(iter(self._known))]
            self._known[key] = found
        return self._known[key][block]

    def forget(self) -> None:
        """Drops what is remembered, as after a change of the weights."""
        self._known.clear()

    def __deepcopy__(self, memo: dict[int, Any]) -> Contexts:
        adapter = copy.deepcopy(self.adapter, memo)
        return self if adapter is self.adapter else Contexts(adapter, self.paths)


def tensor_in(output: Any) -> Tensor | None:
    """The logits, or whatever tensor a model returns that is meant by what it returns; None where
    there is none.

    Of a tuple the first tensor of numbers with axes, as a loss may stand before it; of a dictionary
    without a name that is known the only one.
    """
    if isinstance(output, Tensor):
        return output
    if isinstance(output, (tuple, list)):
        return next((part for part in output if _of_numbers(part)), None)
    entries = output if isinstance(output, Mapping) else {name: getattr(output, name, None) for name in OUTPUTS}
    named = next((entries[name] for name in OUTPUTS if entries.get(name) is not None), None)
    if named is not None or not isinstance(output, Mapping):
        return named
    numbers = [part for part in output.values() if _of_numbers(part)]
    return numbers[0] if len(numbers) == 1 else None


def _of_numbers(part: Any) -> bool:
    return isinstance(part, Tensor) and part.is_floating_point() and part.dim() > 0
