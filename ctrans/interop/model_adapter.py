"""A foreign model around its depth, as `Imported` uses it: the first state, the parts between
states, what they read beside them, and the output.
"""

from __future__ import annotations

import copy
import inspect
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from typing import Any

from torch import Tensor, nn

from ctrans.dynamics.depth import Depth
from ctrans.interop.anatomy import Anatomy
from ctrans.interop.block_structure import Structure
from solvers import ConfigError, version_of

REMEMBERED = 8
"""For how many shapes of the state the contexts are cached."""
OUTPUTS = ("logits", "prediction_logits", "last_hidden_state")
"""Names of a head's output, in order of preference."""


class ModelAdapter(ABC):
    """A model around its depth.

    - `family`: the kind of model, in a word
    - `context`: the longest sequence, None if the model does not state it
    - `vocabulary`: the number of tokens that it embeds; 0 if it reads other inputs
    - `row`: one input of the example by which its structure was read
    """

    family: str
    context: int | None
    vocabulary: int
    row: Tensor
    tokens: int
    """The number of tokens in a state of the example."""
    _like: Tensor
    apart: Collection[int] = ()
    """Which of its output's tensors are no function of the last state alone."""
    knows_its_inputs: bool = True
    """Whether `embed` refuses inputs for which it computes otherwise than for the example."""
    takes_padding: bool = False
    """Whether `padding_for` gives arguments of its forward."""
    notes: tuple[str, ...] = ()
    """What is said of the model besides what its maps do not show."""

    is_opening: bool = False
    """Whether it is being read, so that its weights stay as they are."""

    def __init__(self, model: nn.Module, anatomy: Anatomy):
        self.model: Any = model
        self.anatomy = anatomy
        self.padding: Tensor | None = None
        """Which tokens are padding (0) and which are text (1), inside of `Imported.padded`."""
        self.text: Tensor | None = None
        """Which tokens of the example its padding mask leaves; None if all, or if it has none."""
        self.like_padding = 0
        """How many tokens of the example look like padding that no mask hides."""
        self.read_by_none = 0
        """How many tokens of the example a mask hides from all others that is part of the code."""

    def versions(self) -> tuple[tuple[int, int | None], ...]:
        """Which tensors its weights are, and how often each was written; none while it is read."""
        if self.is_opening:
            return ()
        weights = (*self.model.parameters(), *self.model.buffers())
        return tuple((id(weight), version_of(weight)) for weight in weights)

    @abstractmethod
    def predicts(self) -> bool:
        """Whether its output is logits of tokens, one row for each token."""

    @abstractmethod
    def embed(self, tokens: Tensor) -> Tensor:
        """X_0 (*batch, tokens, width)."""

    def stacked_vectors(self) -> set[int]:
        """The ids of the parameters that are known as stacks of vectors, not as matrices."""
        return set()

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

    def check(self, depth: Depth) -> None:  # noqa: B027 most models need none
        """Raises ConfigError if the output of that depth at dt = 1 differs from the model's by more
        than rounding.
        """

    @abstractmethod
    def blocks(self) -> list[nn.Module]:
        """The modules that the structures are of: the blocks that the model has now, or itself for
        each.
        """

    @abstractmethod
    def structures(self) -> tuple[list[Structure], Tensor]:
        """The structure of each block, and the state (batch, tokens, width) of the example before
        the first block.
        """

    @abstractmethod
    def block_context(self, block: int, x: Tensor) -> dict[str, Any]:
        """What the model gives that block besides its state x (batch, tokens, width), such as masks
        and rotary embeddings: keyword arguments of its attention.
        """

    @abstractmethod
    def forget(self) -> None:
        """Clears what is cached of the model's weights; call it after they change."""

    def like(self) -> Tensor:
        """Zeros (tokens, width) of the model's dtype, with as many tokens as the example has."""
        return self._like

    def tensor(self, output: Any) -> Tensor | None:
        """The main tensor of the model's output, sequences first: logits or the last state; None if
        there is none.
        """
        return tensor_in(output)

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
            # without them the library counts the padding before the text too, or by ids alone
            positions = (mask.cumsum(1) - 1).clamp(min=0)
            padding_index = self._padding_index_of_positions()
            if padding_index is not None:  # such a table counts from the row behind it
                positions = mask * mask.cumsum(1) + padding_index
            arguments["position_ids"] = positions.to(x.device).repeat(copies, 1)
        return arguments

    def _takes_positions(self) -> bool:
        return "position_ids" in inspect.signature(self.model.forward).parameters

    def _padding_index_of_positions(self) -> int | None:
        """The row for padding in a table of positions, as RoBERTa's has; None without such a
        table.
        """
        rows = (
            part.padding_idx
            for path, part in self.model.named_modules()
            if isinstance(part, nn.Embedding) and "position" in path
        )
        return next((row for row in rows if row is not None), None)

    def __deepcopy__(self, memo: dict[int, Any]) -> ModelAdapter:
        """The same adapter if a field is copied alone; an adapter around the copy if the model
        itself is copied.
        """
        model = memo.get(id(self.model))
        if model is None:
            return self
        adapter = copy.copy(self)
        adapter.model = model
        return adapter


def context_of(config: Any) -> int | None:
    """The longest sequence by a config of `transformers`; None if it states none, or no number."""
    longest = getattr(config, "max_position_embeddings", None)
    if type(longest) is int and longest > 0:
        return longest
    return None


def tensor_in(output: Any) -> Tensor | None:
    """The logits or last hidden state in a model's output; None if there is none.

    In a tuple it is the first floating-point tensor with axes, as a scalar loss may come first. In
    a mapping without a known name it is the only one of logits; the first tensor if none is of
    logits.
    """
    if isinstance(output, Tensor):
        return output
    if isinstance(output, (tuple, list)):
        return next((part for part in output if _of_numbers(part)), None)
    if isinstance(output, Mapping):
        name = name_in(output)
        return None if name is None else output[name]
    entries = (getattr(output, name, None) for name in OUTPUTS)
    return next((entry for entry in entries if entry is not None), None)


def name_in(output: Mapping[Any, Any]) -> Any:
    """The name of `tensor_in` a mapping; None if there is none."""
    for name in OUTPUTS:
        if output.get(name) is not None:
            return name
    names = [name for name, part in output.items() if _of_numbers(part)]
    of_logits = [name for name in names if str(name).endswith("logits")]
    if of_logits:
        return of_logits[0] if len(of_logits) == 1 else None
    return next(iter(names), None)


def _of_numbers(part: Any) -> bool:
    return isinstance(part, Tensor) and part.is_floating_point() and part.dim() > 0
