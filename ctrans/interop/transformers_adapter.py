"""How a model is run around its blocks: what gives the first block its state, and what is made of the last one's."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from ctrans.depth import Depth
from ctrans.interop.anatomy import Anatomy, find_blocks
from ctrans.interop.block_calls import StateForm, intercepted, recorded, recorded_until
from ctrans.interop.contexts import Contexts, LibraryContexts, Padding
from ctrans.interop.example_inputs import example_of, main_input, reads_tokens, stand_in
from ctrans.interop.find_sequence import find_sequence, form_of_blocks
from ctrans.interop.recognise import Structure, alike, make_of, recognise_by_any
from ctrans.weights.on_demand import has_weights_on_demand
from solvers import ConfigError

OUTPUTS = ("logits", "prediction_logits", "last_hidden_state")
"""What a head's output is called, in order of preference."""


@runtime_checkable
class ModelAdapter(Protocol):
    """A model that runs blocks."""

    @property
    def model(self) -> nn.Module: ...

    @property
    def family(self) -> str:
        """What kind of model it is, in a word."""

    @property
    def context(self) -> int | None:
        """The longest sequence, None where the model does not say."""

    @property
    def vocabulary(self) -> int:
        """How many tokens it embeds; 0 where it reads something else."""

    @property
    def reads(self) -> Sequence[int]:
        """The shape of one of its inputs, as in the example by which it was seen."""

    @property
    def row(self) -> Tensor:
        """One of its inputs, as in the example by which it was seen."""

    def predicts(self) -> bool:
        """Whether its output is logits of tokens, one row for each."""

    def like(self) -> Tensor:
        """A state (tokens, width) of the least length at which tokens can be told apart, of the model's type; zeros."""

    def blocks(self) -> list[nn.Module]:
        """The blocks, as they are found in the model now."""

    def structures(self) -> tuple[list[Structure], Tensor]:
        """Every block's structure, and a state (batch, tokens, width) as an example gives it to the first."""

    def contexts(self, structures: Sequence[Structure]) -> Contexts:
        """What the model gives its blocks besides the state."""

    def embed(self, tokens: Tensor) -> Tensor:
        """X_0 (*batch, tokens, width)."""

    def outputs(self, x: Tensor) -> Any:
        """All that the model returns where its last block's state is x (batch, tokens, width)."""

    def tensor(self, output: Any) -> Tensor | None:
        """The tensor that is meant by that, sequences first: logits, or the last state; None where there is none."""

    def check(self, depth: Depth) -> None:
        """Raises ConfigError where the output of that depth, at dt = 1, is not the model's own to rounding."""


def tensor_in(output: Any) -> Tensor | None:
    """The logits, or whatever tensor a model returns that is meant by what it returns; None where there is none.

    Of a tuple the first tensor of numbers with axes, as a loss may stand before it; of a dictionary without a name that is known the
    only one.
    """
    if isinstance(output, Mapping):
        named = next((output[name] for name in OUTPUTS if name in output), None)
        others = [part for part in output.values() if _of_numbers(part)]
        return named if named is not None or len(others) != 1 else others[0]
    if isinstance(output, (tuple, list)):
        return next((part for part in output if _of_numbers(part)), None)
    return (
        output if isinstance(output, Tensor) else next((v for n in OUTPUTS if (v := getattr(output, n, None)) is not None), None)
    )


def _of_numbers(part: Any) -> bool:
    return isinstance(part, Tensor) and part.is_floating_point() and part.dim() > 0


def seen(structure: Structure, x: Tensor) -> Structure:
    """The structure, its maps knowing which linear maps they end in, as seen at that state."""
    attention, *others = structure.chains
    attention.find_last(x, **structure.context)
    for ffn in others:
        ffn.find_last(x)
    return structure


@contextlib.contextmanager
def at_block(i: int) -> Iterator[None]:
    """Says which block it is that is not recognised, where those before it were."""
    try:
        yield
    except ConfigError as error:
        if not i:
            raise
        raise ConfigError(f"block {i}, unlike those before it: {error}") from None


class TransformersAdapter:
    """A model of `transformers`: inputs and outputs have names that are known, and states may be given in place of tokens."""

    def __init__(self, model: nn.Module, anatomy: Anatomy):
        self.model: Any = model
        self.anatomy, self.form, self.padding = anatomy, StateForm(), Padding()

    @property
    def family(self) -> str:
        name: str = self.model.config.model_type
        return name

    @property
    def context(self) -> int | None:
        longest: int | None = getattr(self.model.config, "max_position_embeddings", None)
        return longest

    @property
    def vocabulary(self) -> int:
        if not reads_tokens(self.model):
            return 0
        count: int = self.model.get_input_embeddings().num_embeddings
        return count

    @property
    def reads(self) -> Sequence[int]:
        return self.row.shape

    @property
    def row(self) -> Tensor:
        example: Tensor = next(iter(example_of(self.model).values()))
        return example[0]

    def predicts(self) -> bool:
        return self.model.get_output_embeddings() is not None

    def like(self) -> Tensor:
        return self._like

    def blocks(self) -> list[nn.Module]:
        return find_blocks(self.model, self.anatomy)

    def structures(self) -> tuple[list[Structure], Tensor]:
        blocks = self._found()
        calls = recorded(blocks, self._run, self.form)
        self._like = torch.zeros_like(calls[0].x[0])
        known: dict[object, tuple[nn.Module, Structure]] = {}
        structures = []
        each = not has_weights_on_demand(self.model)  # or, where running a block is dear, the first of its make
        for i, (block, call) in enumerate(zip(blocks, calls, strict=True)):
            key = i if each else make_of(block)
            if key not in known:
                with at_block(i):
                    known[key] = block, seen(recognise_by_any(block, call, self.anatomy, self.form), call.x)
            structures.append(known[key][1] if known[key][0] is block else alike(*known[key], block, self.anatomy))
        return structures, calls[0].x

    def _run(self) -> Any:
        return self.model(**example_of(self.model))

    def _found(self) -> list[nn.Module]:
        """The blocks: of names that are known, or seen to act one after the other on one state; and how they hand it on."""
        try:
            blocks = self.blocks()
        except ConfigError as by_name:
            if self.anatomy.blocks is not None:
                raise
            try:
                path, self.form = find_sequence(self.model, self._run, None)
            except ConfigError:
                raise by_name from None
            self.anatomy = dataclasses.replace(self.anatomy, blocks=path)
            return self.blocks()
        if not has_weights_on_demand(self.model):
            form = form_of_blocks(self._run, blocks)
            if isinstance(form, str):
                raise ConfigError(f"{type(self.model).__name__}'s blocks are no sequence of blocks: {form}")
            self.form = form
        return blocks

    def contexts(self, structures: Sequence[Structure]) -> Contexts:
        paths: list[str | None] = []
        for block, structure in zip(self.blocks(), structures, strict=True):
            names = {part: path for path, part in block.named_modules()}
            paths.append(names[structure.called] if structure.own_calls and structure.called is not None else None)
        return LibraryContexts(self.model, self.anatomy, self.form, tuple(paths), self.padding)

    def embed(self, tokens: Tensor) -> Tensor:
        name, lead = main_input(self.model), tokens.shape[:-1]
        tokens = tokens.reshape(-1, tokens.shape[-1]) if reads_tokens(self.model) else tokens
        inputs = {name: tokens, **self.padding.given(tokens)}
        call = recorded_until(self.blocks(), 0, lambda: self.model(**inputs), self.form)[0]
        return call.x.reshape(*lead, *call.x.shape[-2:]) if reads_tokens(self.model) else call.x

    def outputs(self, x: Tensor) -> Any:
        with intercepted(self.blocks(), lambda i, call: x if i == 0 else call.x, self.form):
            return self.model(**stand_in(self.model, x.detach()), **self.padding.given(x), return_dict=True)

    def tensor(self, output: Any) -> Tensor | None:
        return tensor_in(output)

    def check(self, depth: Depth) -> None:
        pass  # each block was compared, and what is around them is the model itself, run on a state

    def __deepcopy__(self, memo: dict[int, Any]) -> TransformersAdapter:
        model = memo.get(id(self.model))
        if model is None:
            return self
        other = copy.copy(self)
        other.model = model
        return other
