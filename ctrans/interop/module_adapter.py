"""Any `nn.Module` around its depth. It runs on an example input, which also serves as a placeholder
where only the state's shape matters.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, nn

from ctrans.dynamics.depth import Depth
from ctrans.interop.anatomy import Anatomy
from ctrans.interop.block_calls import observed, tensors_in
from ctrans.interop.example_inputs import Example, fits, ids_checked, sequence_axes
from ctrans.interop.foreign_errors import FOREIGN_ERRORS, named_error
from ctrans.interop.hidden_tokens import like_padding, text_of, text_of_pass
from ctrans.interop.model_adapter import ModelAdapter, tensor_in
from ctrans.interop.recorded_calls import without_fast_path
from ctrans.interop.refused_inputs import fix_of, of_length, why_refused
from ctrans.interop.tolerances import difference, tolerance
from solvers import ConfigError, shown

Embed = Callable[[Tensor], Tensor]
Head = Callable[[Tensor], Any]


class ModuleAdapter(ModelAdapter):
    """A module of unknown kind. Its parts, first state and output are found by running it on the
    example.

    - `example`: an input, or keyword arguments of forward, whose first takes the place of tokens. A
      mapping that does not fit the signature is passed as the one argument
    - `embed`, `head`: replace what the module computes before its first state and behind the last
    """

    family = "module"
    context: int | None = None

    def __init__(
        self,
        model: nn.Module,
        anatomy: Anatomy,
        example: Example,
        embed: Embed | None = None,
        head: Head | None = None,
    ):
        super().__init__(model, anatomy)
        self.own_embed = embed
        self.own_head = head
        # the user's embed or head may differ from the module's
        self.knows_its_inputs = embed is not None or head is not None
        if isinstance(example, Mapping) and len(example) == 1:
            inner = next(iter(example.values()))
            if isinstance(inner, Mapping):
                example = inner  # the one argument is a mapping
        self.named: dict[str, Any] | None = None
        if isinstance(example, Mapping):
            self.named = dict(example)
        self.as_one = self.named is not None and not fits(model, self.named)
        if self.named:
            main = next(iter(self.named.values()))
        else:
            main = example
        if not isinstance(main, Tensor) or main.dim() < 2 or main.numel() == 0:
            raise ConfigError(
                f"example=: {shown(main)} is no batch of inputs: give a tensor whose first axis"
                " counts sequences or images, or the keyword arguments of a forward pass with such"
                " a tensor first. One sequence is a batch as example[None]. Modules that read one"
                " sequence alone, without an axis of sequences, are not read"
            )
        self.example = main
        self._is_trying = False
        self.tokens_first = False
        self.output_has_tokens_first = False
        self._sequence_axes: Mapping[str, int] = {}
        with ids_checked(model, main):
            self._sequence_axes = sequence_axes(self.named or {}, len(main), self._runs_with)
            self._find()
        self.row = self.example[0]
        if main.is_floating_point():
            self.vocabulary = 0
        else:
            self.vocabulary = self._vocabulary()

    def tensor(self, output: Any) -> Tensor | None:
        tensor = tensor_in(output)
        if tensor is not None and tensor.dim() > 1 and self.output_has_tokens_first:
            return tensor.transpose(0, 1)
        return tensor

    def predicts(self) -> bool:
        if not self.vocabulary:
            return False
        with torch.no_grad():
            y = self.tensor(self.outputs(self._like.unsqueeze(0)))
        if y is None or y.dim() != 3 or y.shape[-1] != self.vocabulary:
            return False
        return y.shape[1] in (1, len(self.row))  # others are of another sequence, as a decoder's

    def run_like(self, x: Tensor) -> object:
        return self.run(self.shaped(x))

    def run(self, tokens: Tensor) -> Any:
        """A forward pass on these inputs, with the example's other arguments for as many sequences.

        Inputs are converted to the module's current dtype and device. Raises ConfigError for any
        error of the module.
        """
        try:
            return self._output_for(tokens)
        except ConfigError:
            raise
        except FOREIGN_ERRORS as error:
            dtype = str(self._like_the_weights(tokens).dtype).removeprefix("torch.")
            shape = tuple(tokens.shape)
            if self.tokens_first:
                shape = (shape[1], shape[0], *shape[2:])
            inputs = f"a tensor {shape} of {dtype}"
            if self.tokens_first:
                inputs += ", turned from (sequences, tokens),"
            others = list(self.named or {})[1:]
            if others:
                inputs += f" with {', '.join(others)} as in the example"
            fix = fix_of(len(tokens), len(self.example), others)
            reason = self._why_refused(tokens, error) or fix
            raise ConfigError(
                f"example=: {type(self.model).__name__} does not run on {inputs}"
                f" ({named_error(error)}): {reason}"
            ) from error

    def _why_refused(self, tokens: Tensor, error: Exception) -> str | None:
        """What the module's parts say of the error that it raises for these inputs."""
        if self._is_trying:
            return None
        count: int | None = None
        if tokens.dim() == 2 or (tokens.dim() == 3 and tokens.is_floating_point()):
            count = tokens.shape[1]

        def run(length: int) -> object:
            indices = torch.arange(length, device=tokens.device) % tokens.shape[1]
            with torch.no_grad():
                return self._output_for(tokens.index_select(1, indices), length)

        return why_refused(self.model, error, count, run)

    def _output_for(self, tokens: Tensor, length: int | None = None) -> Any:
        """The module's output for these inputs, and the example's other arguments. They are cut or
        repeated to `length` tokens along each axis that has as many as the example.
        """
        batch = tokens
        if self.tokens_first:
            batch = tokens.transpose(0, 1)
        # a copy of its own, in the module's order: the input itself may be the first state
        batch = self._like_the_weights(batch).clone(memory_format=torch.contiguous_format)
        with without_fast_path():
            if self.named is None:
                return self.model(batch)
            names = list(self.named)
            arguments = {names[0]: batch}
            for name in names[1:]:
                value = self._as_many(
                    self.named[name], len(tokens), self._sequence_axes.get(name, 0)
                )
                if length is not None:
                    value = of_length(value, self.example.shape[1], length)
                arguments[name] = self._like_the_weights(value)
            if self.as_one:
                return self.model(arguments)
            return self.model(**arguments, **self.padding_for(tokens))

    @abstractmethod
    def _find(self) -> None:
        """Finds its parts, and the axes of its states and outputs."""

    @abstractmethod
    def _start(self, tokens: Tensor) -> Tensor:
        """The first state for these inputs."""

    @abstractmethod
    def _embedded(self, tokens: Tensor) -> Tensor:
        """The first state for these inputs. Raises ConfigError where the module computes otherwise
        for them than for its example.
        """

    @abstractmethod
    def _outputs(self, x: Tensor) -> Any:
        """What the module returns if its last state is x."""

    def embed(self, tokens: Tensor) -> Tensor:
        axes = self.example.dim() - 1
        lead = tokens.shape[: tokens.dim() - axes]
        flat = tokens.reshape(-1, *tokens.shape[tokens.dim() - axes :])
        if self.own_embed is None:
            x = self._embedded(flat)
        else:
            x = self.own_embed(flat)
        # a copy: a view of learned latents would change with them, and need gradients as they do
        return x.reshape(*lead, *x.shape[1:]).clone()

    def outputs(self, x: Tensor) -> Any:
        if self.own_head is not None:
            return self.own_head(x)
        return self._outputs(x)

    def shaped(self, x: Tensor) -> Tensor:
        """An input whose first state has the shape of x: rows of the example, cut or repeated to
        the length.
        """
        rows: Tensor = self._as_many(self.example, len(x))
        tokens = x.shape[-2]
        if tokens == self.tokens:
            return rows
        for axis in range(1, rows.dim()):
            length = rows.shape[axis]
            with_as_many_more = tokens + length - self.tokens
            in_proportion = round(tokens * length / self.tokens)
            for new_length in dict.fromkeys((with_as_many_more, in_proportion)):
                if new_length <= 0:
                    continue
                indices = torch.arange(new_length, device=rows.device) % length
                cut: Tensor = rows.index_select(axis, indices)
                state = self._first_state(cut)
                if state is not None and state.shape[-2] == tokens:
                    return cut
        raise ConfigError(
            f"{type(self.model).__name__} reads its example as {self.tokens} tokens, and the"
            f" example cannot be cut or repeated to {tokens} tokens: give states, or an example=,"
            " of that length"
        )

    def check(self, depth: Depth) -> None:
        """Raises ConfigError if the rebuilt output differs from the module's on the example, as
        where a head reads the input.
        """
        self._check_output(depth, self.example)
        self.find_text(depth)

    def find_text(self, depth: Depth) -> None:
        """Finds which tokens of the example its padding mask leaves, or the module's own."""
        x0 = self.embed(self.example)
        if self.named is not None:
            others = dict(list(self.named.items())[1:])
            self.text = text_of(others, depth, x0)
        if self.text is None:
            alone = self.named is None or len(self.named) == 1
            self.text, self.read_by_none = text_of_pass(
                self.run, self.example, depth, x0, alone=alone
            )
        if self.text is None:
            self.like_padding = like_padding(self.example, depth, x0)

    def _check_output(self, depth: Depth, tokens: Tensor) -> None:
        output = self.run(tokens)
        rebuilt_output = self.outputs(depth(self.embed(tokens)))
        expected = self.tensor(output)
        rebuilt = self.tensor(rebuilt_output)
        if expected is None or rebuilt is None:
            return
        if self.own_embed is not None or self.own_head is not None:
            return  # the user's embed or head may differ from the module's
        miss = difference(rebuilt, expected)
        if not miss <= tolerance(expected.dtype):
            raise ConfigError(
                f"head=: the output of {type(self.model).__name__} does not depend on its last"
                f" state alone (relative difference {miss:.1g}), as when a head reads the"
                " input again: give head=, a function of that state"
            )
        pairs = zip(tensors_in(output), tensors_in(rebuilt_output), strict=False)
        for i, (x, y) in enumerate(pairs):
            if torch.equal(x, y):
                continue
            if not difference(x.double(), y.double()) <= tolerance(expected.dtype):
                self.apart = {*self.apart, i}

    def _vocabulary(self) -> int:
        """The number of rows of the embedding table that reads the example's ids; the largest if
        several do.
        """
        tables = [part for part in self.model.modules() if isinstance(part, nn.Embedding)]
        rolled = self.example.roll(1, -1)
        with torch.no_grad():
            calls = observed(tables, lambda: self.run(self.example), copies=True)
            calls_for_rolled = observed(tables, lambda: self.run(rolled), copies=True)
        sorted_ids = self.example.sort(-1).values
        reading = []
        changing = []
        for table in tables:
            inputs = [x for x, _ in calls[table]]
            rolled_inputs = [x for x, _ in calls_for_rolled[table]]
            if any(_are_sorted_as(x, sorted_ids) for x in inputs):
                reading.append(table)
            if any(
                x.shape == y.shape and not torch.equal(x, y)
                for x, y in zip(inputs, rolled_inputs, strict=False)
            ):
                changing.append(table)
        certain = [table for table in changing if table in reading]
        tables_of_ids = certain or changing or reading
        return max((table.num_embeddings for table in tables_of_ids), default=0)

    def _find_output_axes(self) -> None:
        """Finds whether the module's output counts tokens before sequences: by the axis that grows
        with another sequence.
        """
        if not self.tokens_first:
            return
        try:
            with torch.no_grad(), self._trying():
                before = tensor_in(self.run(self.example))
                after = tensor_in(self.run(torch.cat([self.example, self.example[:1]])))
        except (*FOREIGN_ERRORS, ConfigError):
            return
        if before is None or after is None or before.dim() < 2 or before.dim() != after.dim():
            return
        grown = [after.shape[axis] - before.shape[axis] for axis in (0, 1)]
        if grown in ([1, 0], [0, 1]):
            self.output_has_tokens_first = grown == [0, 1]

    def _like_the_weights(self, value: Any) -> Any:
        floats = (weight for weight in self.model.parameters() if weight.is_floating_point())
        like = next(floats, None)
        if like is None or not isinstance(value, Tensor):
            return value
        if value.is_floating_point():
            return value.to(like.device, like.dtype)
        return value.to(like.device)

    def _as_many(self, value: Any, count: int, axis: int = 0) -> Any:
        """A tensor repeated to `count` along that axis, if it counts sequences."""
        if isinstance(value, Tensor) and value.dim() and value.shape[axis] == len(self.example):
            indices = torch.arange(count, device=value.device) % len(self.example)
            return value.index_select(axis, indices)
        return value

    def _runs_with(self, axes: Mapping[str, int]) -> bool:
        """Whether the module runs on one more sequence, with these axes of `sequence_axes`."""
        self._sequence_axes = axes
        with suppress(*FOREIGN_ERRORS), torch.no_grad(), self._trying():
            self.run(self._as_many(self.example, len(self.example) + 1))
            return True
        return False

    def _first_state(self, tokens: Tensor) -> Tensor | None:
        """The state that the first block gets for these inputs; None if the module does not run on
        them.
        """
        with suppress(*FOREIGN_ERRORS), torch.no_grad(), self._trying():
            return self._start(tokens)
        return None

    @contextmanager
    def _trying(self) -> Iterator[None]:
        """Inside, an error of the module is an answer, whose reason nobody reads."""
        before = self._is_trying
        self._is_trying = True
        try:
            yield
        finally:
            self._is_trying = before


def _are_sorted_as(x: Tensor, sorted_ids: Tensor) -> bool:
    """Whether x has the same ids in each row, in any order."""
    if x.shape != sorted_ids.shape:
        return False
    return torch.equal(x.sort(-1).values.to(sorted_ids), sorted_ids)
