"""Any `nn.Module` around its blocks. It runs on an example input, which also serves as a
placeholder where only the state's shape matters.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ctrans.dynamics.depth import Depth
from ctrans.interop.anatomy import Anatomy
from ctrans.interop.block_calls import (
    Call,
    Running,
    StateForm,
    intercepted,
    observed,
    recorded_until,
    tensors_in,
    without_cache,
)
from ctrans.interop.block_parts import token_axis_is_first
from ctrans.interop.example_inputs import Example
from ctrans.interop.find_blocks import block_list_by_calls
from ctrans.interop.foreign_errors import FOREIGN_ERRORS, named_error
from ctrans.interop.model_adapter import ModelAdapter
from ctrans.interop.recorded_calls import without_fast_path
from ctrans.interop.tolerances import difference, tolerance
from solvers import ConfigError, shown

Embed = Callable[[Tensor], Tensor]
Head = Callable[[Tensor], Any]


class ModuleAdapter(ModelAdapter):
    """A module of unknown kind. Its blocks, first state and output are found by running it on the
    example.

    - `example`: an input, or keyword arguments of forward, whose first takes the place of tokens. A
      mapping that does not fit the signature is passed as the one argument
    - `embed`, `head`: replace what the module computes before its blocks and after them
    """

    family, context = "module", None
    own_calls = (True,)

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
        if (
            isinstance(example, Mapping)
            and len(example) == 1
            and isinstance(inner := next(iter(example.values())), Mapping)
        ):
            example = inner  # the one argument is a mapping
        self.named = dict(example) if isinstance(example, Mapping) else None
        self.as_one = self.named is not None and not _fits(model, self.named)
        if self.named:
            main = next(iter(self.named.values()))
        else:
            main = example
        if not isinstance(main, Tensor) or main.dim() < 2:
            raise ConfigError(
                f"example=: {shown(main)} is no batch of inputs: give a tensor whose first axis"
                " counts sequences or images, or the keyword arguments of a forward pass with such"
                " a tensor first. One sequence is a batch as example[None]"
            )
        self.example = main
        self.tokens_first = False
        self._find()
        self.row = self.example[0]
        if main.is_floating_point():
            self.vocabulary = 0
        else:
            self.vocabulary = self._vocabulary()

    def _find(self) -> None:
        """Finds its blocks and the axes of its states."""
        self.blocks_path, self.form = block_list_by_calls(
            self.model, lambda: self.run(self.example), self.anatomy.blocks
        )
        self._find_axes()

    def predicts(self) -> bool:
        if not self.vocabulary:
            return False
        with torch.no_grad():
            y = self.tensor(self.outputs(self._like.unsqueeze(0)))
        return y is not None and y.dim() == 3 and y.shape[-1] == self.vocabulary

    def block_calls(self) -> list[Call]:
        return [without_cache(call) for call in self._calls(self.example)]

    def run_like(self, x: Tensor) -> object:
        return self.run(self.shaped(x))

    def run(self, tokens: Tensor) -> Any:
        """A forward pass on these inputs, with the example's other arguments for as many sequences.

        Inputs are converted to the module's current dtype and device. Raises ConfigError for any
        error of the module.
        """
        given = self._like_the_weights(tokens.transpose(0, 1) if self.tokens_first else tokens)
        others = list(self.named or {})[1:]
        try:
            with without_fast_path():
                if self.named is None:
                    return self.model(given)
                rest = {
                    name: self._like_the_weights(self._as_many(self.named[name], len(tokens)))
                    for name in others
                }
                arguments = {next(iter(self.named)): given, **rest}
                if self.as_one:
                    return self.model(arguments)
                return self.model(**arguments)
        except ConfigError:
            raise
        except FOREIGN_ERRORS as error:
            read = f"a tensor {tuple(given.shape)} of {str(given.dtype).removeprefix('torch.')}"
            if others:
                beside = f" with {', '.join(others)} as in the example"
            else:
                beside = ""
            raise ConfigError(
                f"example=: {type(self.model).__name__} does not run on {read}{beside}"
                f" ({named_error(error)}): give an input that it accepts"
            ) from error

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

    def _embedded(self, tokens: Tensor) -> Tensor:
        calls = self._calls(tokens)
        self._check_contexts(calls)
        return calls[0].x

    def outputs(self, x: Tensor) -> Any:
        if self.own_head is not None:
            return self.own_head(x)
        last = len(self.blocks()) - 1
        with intercepted(self.blocks(), lambda i, call: x if i == last else call.x, self.form):
            return self.run(self.shaped(x))

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
            for wanted in dict.fromkeys(
                (tokens + length - self.tokens, round(tokens * length / self.tokens))
            ):
                if wanted > 0:
                    cut: Tensor = rows.index_select(
                        axis, torch.arange(wanted, device=rows.device) % length
                    )
                    state = self._first_state(cut)
                    if state is not None and state.shape[-2] == tokens:
                        return cut
        raise ConfigError(
            f"{type(self.model).__name__} reads its example as {self.tokens} tokens, and the"
            f" example cannot be cut or repeated to {tokens} tokens: give states, or an example=,"
            " of that length"
        )

    def check(self, depth: Depth) -> None:
        """Raises ConfigError if the rebuilt states or the output differ from the module's, on the
        example or on the reversed example.

        They differ if blocks get arguments computed from the input, or if a head reads the input.
        """
        for tokens in (self.example, self.example.flip(-1)):
            self._check_states(depth, tokens)
            self._check_output(depth, tokens)

    def _check_states(self, depth: Depth, tokens: Tensor) -> None:
        """Checks that the sublayers map each block's state to its output, and that this is the next
        block's state.
        """
        blocks = self.blocks()
        per_block = depth.per_block
        with torch.no_grad():
            calls = observed(blocks, lambda: self.run(tokens), copies=True)
        before: Tensor | None = None
        for i, block in enumerate(blocks):
            ((given, output),) = calls[block]
            x = self.form.turned(given)
            y = self.form.read(output)
            if before is not None and not torch.equal(x, before):
                raise ConfigError(
                    f"blocks=: {type(self.model).__name__} changes the state between block {i - 1}"
                    f" and block {i}: make the change a part of a block"
                )
            before = y
            rebuilt = x
            for k in range(i * per_block, (i + 1) * per_block):
                rebuilt = depth.sublayers[k].step(rebuilt, depth.lengths[k])
            miss = difference(rebuilt, y)
            if not miss <= tolerance(y.dtype):
                raise ConfigError(
                    f"blocks=: block {i} ({type(block).__name__}) returns another state than the"
                    f" maps found in it (relative difference {miss:.1g}). It may limit large"
                    " states, skip some tokens, or get an argument computed from the input, such"
                    " as a padding mask: its maps must depend on the state alone"
                )

    def _check_output(self, depth: Depth, tokens: Tensor) -> None:
        outputs = self.run(tokens), self.outputs(depth(self.embed(tokens)))
        whole, rebuilt = map(self.tensor, outputs)
        if (
            whole is None
            or rebuilt is None
            or self.own_embed is not None
            or self.own_head is not None
        ):
            return  # the user's embed or head may differ from the module's
        miss = difference(rebuilt, whole)
        if not miss <= tolerance(whole.dtype):
            raise ConfigError(
                f"head=: the output of {type(self.model).__name__} does not depend on its last"
                f" block's state alone (relative difference {miss:.1g}), as when a head reads the"
                " input again: give head=, a function of that state"
            )
        for i, (x, y) in enumerate(zip(*map(tensors_in, outputs), strict=False)):
            if not (
                torch.equal(x, y) or difference(x.double(), y.double()) <= tolerance(whole.dtype)
            ):
                self.apart = {*self.apart, i}

    def _calls(self, tokens: Tensor) -> list[Call]:
        """The calls that the module makes of its blocks for these inputs."""
        blocks = self.blocks()
        return recorded_until(blocks, len(blocks) - 1, lambda: self.run(tokens), self.form)

    def _check_contexts(self, calls: Sequence[Call]) -> None:
        """Raises ConfigError if blocks get arguments that differ from those for an example of the
        same shape.
        """
        if not any(tensors_in(call.arguments_but_the_state) for call in calls):
            return
        for call, like in zip(calls, self._calls(self.shaped(calls[0].x)), strict=True):
            for name, value in call.arguments_but_the_state.items():
                found = tensors_in(value)
                expected = tensors_in(like.arguments_but_the_state.get(name))
                if len(found) != len(expected) or not all(map(torch.equal, found, expected)):
                    raise ConfigError(
                        f"{type(self.model).__name__} gives its blocks another {name} for these"
                        " inputs than for its example, as when it computes a padding mask from the"
                        " tokens. Its maps are known only for the example's arguments: give"
                        " similar inputs, such as inputs without padding"
                    )

    def _vocabulary(self) -> int:
        """The number of rows of the embedding table that reads the example's ids; the largest if
        several do.
        """
        tables = [part for part in self.model.modules() if isinstance(part, nn.Embedding)]
        with torch.no_grad():
            first, second = (
                observed(tables, partial(self.run, ids), copies=True)
                for ids in (self.example, self.example.roll(1, -1))
            )
        ids = self.example.sort(-1).values
        read = []
        changed = []
        for table in tables:
            given, other = ([x for x, _ in calls[table]] for calls in (first, second))
            if any(
                x.shape == ids.shape and torch.equal(x.sort(-1).values.to(ids), ids) for x in given
            ):
                read.append(table)
            if any(
                x.shape == y.shape and not torch.equal(x, y)
                for x, y in zip(given, other, strict=False)
            ):
                changed.append(table)
        return max(
            (
                part.num_embeddings
                for part in [part for part in changed if part in read] or changed or read
            ),
            default=0,
        )

    def _find_axes(self) -> None:
        """Finds the order of the states' axes, by the axis along which the first block mixes; and
        puts sequences first in the example.
        """
        block = self.blocks()[0]
        call = without_cache(
            recorded_until([block], 0, lambda: self.run(self.example), self.form)[0]
        )
        with without_fast_path():
            first = token_axis_is_first(Running(block, call, self.form), call.x)
        self.form = StateForm(self.form.part, tokens_first=first)
        if self.example.dim() > 1 and self._grown(0) != (1, 0) and self._grown(1) == (1, 0):
            self.example = self.example.transpose(0, 1)
            self.tokens_first = True

    def _grown(self, axis: int) -> tuple[int, int] | None:
        """By how much the sequences and tokens of the first state grow if the example grows by one
        along that axis.
        """
        before = self._first_state(self.example)
        after = self._first_state(torch.cat([self.example, self.example.narrow(axis, 0, 1)], axis))
        if before is None or after is None:
            return None
        return after.shape[0] - before.shape[0], after.shape[1] - before.shape[1]

    def _like_the_weights(self, value: Any) -> Any:
        like = next((p for p in self.model.parameters() if p.is_floating_point()), None)
        if like is None or not isinstance(value, Tensor):
            return value
        if value.is_floating_point():
            return value.to(like.device, like.dtype)
        return value.to(like.device)

    def _as_many(self, value: Any, count: int) -> Any:
        """A tensor repeated to `count` along its first axis, if that axis counts sequences."""
        if isinstance(value, Tensor) and value.dim() and len(value) == len(self.example):
            return value[torch.arange(count, device=value.device) % len(value)]
        return value

    def _first_state(self, tokens: Tensor) -> Tensor | None:
        """The state that the first block gets for these inputs; None if the module does not run on
        them.
        """
        try:
            with torch.no_grad():
                return self._start(tokens)
        except FOREIGN_ERRORS:
            return None

    def _start(self, tokens: Tensor) -> Tensor | None:
        calls = recorded_until(self.blocks(), 0, lambda: self.run(tokens), self.form)
        if calls:
            return calls[0].x
        return None


def _fits(model: nn.Module, named: Mapping[str, Any]) -> bool:
    """Whether these can be keyword arguments of its forward."""
    try:
        inspect.signature(model.forward).bind(**named)
        return True
    except TypeError:
        return False
