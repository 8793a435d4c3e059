"""Calls of a model's blocks: the state and, by name, the other arguments (masks, positions). They
are recorded while the model runs.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ctrans.interop.foreign_errors import FOREIGN_ERRORS, named_error
from ctrans.interop.recorded_calls import CACHES, watched
from solvers import ConfigError


@dataclass(frozen=True)
class Call:
    """One call of a block: the state x, the name of its argument, and the other arguments by their
    names in the signature.

    If the state is an entry of a mapping, `around` is that mapping and `key` the entry's name.
    """

    x: Tensor
    context: dict[str, Any]
    argument: str = ""
    around: Mapping[str, Any] | None = None
    key: str = ""

    def given(self, x: Tensor) -> Any:
        """The state argument of the block with x in place of the recorded state."""
        if self.around is None:
            return x
        return {**self.around, self.key: x}


def bind(kind: type[Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
    """The call of a block of that class, its arguments named by the signature of forward. The state
    is the first argument that can be one.
    """
    names = _arguments(kind)  # type: ignore[arg-type]  # classes are hashable
    named = dict(zip(names, args, strict=False)) | kwargs
    argument = next((name for name in names if is_state(named.get(name))), names[0])
    value = named.pop(argument)
    if isinstance(value, Mapping):
        keys = [key for key, part in value.items() if is_state(part)]
        if len(keys) == 1:
            return Call(value[keys[0]], named, argument, around=value, key=keys[0])
    return Call(value, named, argument)


def is_state(value: object) -> bool:
    """Whether the value is a floating-point tensor (batch, tokens, width)."""
    return isinstance(value, Tensor) and value.dim() == 3 and value.is_floating_point()


@dataclass(frozen=True)
class StateForm:
    """How a block returns its state: alone or as a part of its output, and whether tokens are the
    first axis.

    `length` is that of a returned tuple that holds only the state and None.
    """

    part: int | str | None = None
    tokens_first: bool = False
    length: int | None = None

    def turned(self, x: Tensor) -> Tensor:
        """Swaps the first two axes if the model puts tokens first; its own inverse."""
        if self.tokens_first:
            return x.transpose(0, 1)
        return x

    def read(self, output: Any) -> Tensor:
        """The state in the output of a block."""
        if self.part is None:
            return self.turned(output)
        return self.turned(output[self.part])

    def put(self, output: Any, x: Tensor) -> Any:
        """The output of a block with x as the state."""
        if self.part is None:
            return self.turned(x)
        if self.length is not None:
            output = (None,) * self.length
        if isinstance(output, (tuple, list)):
            parts = list(output)
            for i in range(len(parts)):
                if i == self.part:
                    parts[i] = self.turned(x)
            return type(output)(parts)
        return {**output, self.part: self.turned(x)}


def form_of(output: Any, x: Tensor) -> StateForm | None:
    """Where a block's output holds a state of the shape of x; None if it holds none or several."""
    if isinstance(output, Tensor):
        if output.shape == x.shape:
            return StateForm()
        return None
    if isinstance(output, (tuple, list)):
        parts = dict(enumerate(output))
    elif isinstance(output, dict):
        parts = dict(output)
    else:
        parts = {}
    fitting = [key for key, value in parts.items() if is_state(value) and value.shape == x.shape]
    if len(fitting) != 1:
        return None
    state = fitting[0]
    rest_is_none = all(value is None for key, value in parts.items() if key != state)
    if isinstance(output, tuple) and rest_is_none:
        return StateForm(state, length=len(parts))
    return StateForm(state)


@dataclass(frozen=True)
class Running:
    """A block as a function of its state (batch, tokens, width) alone, in the context of one of its
    calls.
    """

    block: nn.Module
    call: Call
    form: StateForm = StateForm()

    def __call__(self, x: Tensor) -> Any:
        x = self.form.turned(x)
        named = self.call.context
        kind = type(self.block)
        parameter = inspect.signature(kind.forward).parameters[self.call.argument]
        first_argument = _arguments(kind)[0]  # type: ignore[arg-type]  # a class is hashable
        keyword_only = parameter.kind is parameter.KEYWORD_ONLY
        state = self.call.given(x.clone())  # a block may change its input in place
        if self.call.argument == first_argument and not keyword_only:
            output = self.block(state, **named)
        else:
            output = self.block(**{self.call.argument: state}, **named)
        if self.form.part is None and not isinstance(output, Tensor):
            return output
        return self.form.read(output)


@functools.cache
def _arguments(kind: type[Any]) -> tuple[str, ...]:
    """The parameter names of a module's forward, without self."""
    parameters = inspect.signature(kind.forward).parameters
    return tuple(name for name, p in parameters.items() if p.kind is not p.VAR_KEYWORD)[1:]


def own_context(call: Call, *, cached: bool) -> dict[str, Any]:
    """The call's context. Raises ConfigError for a cache, unless `cached` allows it, and for states
    of an encoder.
    """
    if not cached and any(call.context.get(key) is not None for key in CACHES):
        raise ConfigError(
            "a cache of keys and values holds one evaluation of each attention, but this ODE block"
            " makes several: pass use_cache=False (to generate() too), or use method='euler',"
            " steps=1, gradient='backprop'"
        )
    if call.context.get("encoder_hidden_states") is not None:
        raise ConfigError("cross-attention is not supported: leave encoder_hidden_states out")
    return call.context


@contextlib.contextmanager
def intercepted(
    blocks: Sequence[nn.Module], instead: Callable[[int, Call], Tensor], form: StateForm
) -> Iterator[None]:
    """Inside, block i returns instead(i, call) in place of the state that it would compute."""

    def stand_in(i: int, block: nn.Module) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            call = bind(type(block), args, kwargs)
            if isinstance(call.x, Tensor):
                call = replace(call, x=form.turned(call.x))
            x = instead(i, call)
            output = None
            if form.part is not None and form.length is None:
                # the block computes what it returns besides the state
                with torch.no_grad():
                    output = type(block).forward(block, *args, **kwargs)
            return form.put(output, x)

        return forward

    before = [vars(block).get("forward") for block in blocks]
    for i, block in enumerate(blocks):
        block.forward = stand_in(i, block)
    try:
        yield
    finally:
        for block, forward_before in zip(blocks, before, strict=True):
            del block.forward
            if forward_before is not None:
                block.forward = forward_before


def recorded(
    blocks: Sequence[nn.Module], run: Callable[[], object], form: StateForm = StateForm()
) -> list[Call]:
    """The call that `run` makes of each block, where each block returns its state unchanged. Calls
    have no caches.

    Raises ConfigError unless each block is called once with the state (batch, tokens, width) that
    the block before it returned, and unless the model accepts that state as a block's output.
    """
    calls: dict[int, Call] = {}

    def note(i: int, call: Call) -> Tensor:
        if i in calls:
            raise ConfigError(
                f"block {i} is called more than once in a forward pass: such models are not"
                " supported"
            )
        calls[i] = without_cache(call)
        return call.x

    with intercepted(blocks, note, form):
        try:
            run()
        except ConfigError:
            raise
        except FOREIGN_ERRORS as error:
            if not calls:  # the error is not from a block
                raise
            raise ConfigError(
                "the model does not run with blocks that return the state alone: its"
                f" {type(blocks[0]).__name__}s return tuples, or do more than change the state"
                f" ({named_error(error)})"
            ) from error
    if len(calls) < len(blocks):
        raise ConfigError(
            f"{len(blocks) - len(calls)} of {len(blocks)} blocks are not called in a forward pass"
        )
    for i, call in sorted(calls.items()):
        if not isinstance(call.x, Tensor) or call.x.dim() != 3:
            if isinstance(call.x, Tensor):
                state = f"of shape {tuple(call.x.shape)}"
            else:
                state = type(call.x).__name__
            raise ConfigError(
                f"block {i} gets a state {state}: states must be (batch, tokens, width)"
            )
        if not torch.equal(call.x, calls[0].x):
            raise ConfigError(
                f"the model changes the state before block {i}: each block must get the output of"
                " the one before it"
            )
    return [calls[i] for i in range(len(blocks))]


def without_cache(call: Call) -> Call:
    """The same call without keys and values of an earlier call."""
    context = dict(call.context)
    for key in CACHES:
        if key in context:
            context[key] = None
    return replace(call, context=context)


class Seen(BaseException):  # a model that catches every Exception must not catch it
    """Ends a forward pass early."""


def recorded_until(
    blocks: Sequence[nn.Module], last: int, run: Callable[[], object], form: StateForm
) -> list[Call]:
    """The calls that `run` makes of blocks 0 .. last, as `recorded`. The forward pass ends
    there.
    """
    calls: list[Call] = []

    def note(i: int, call: Call) -> Tensor:
        calls.append(call)
        if i == last:
            raise Seen
        return call.x

    with intercepted(blocks, note, form), contextlib.suppress(Seen):
        run()
    return calls


def observed(
    blocks: Iterable[nn.Module], run: Callable[[], object], *, copies: bool = False
) -> dict[nn.Module, list[tuple[Any, Any]]]:
    """For each block the state that it got and what it returned, in each call; `copies` as in
    `watched`.
    """
    states: dict[nn.Module, list[tuple[Any, Any]]] = {block: [] for block in blocks}
    with watched({str(i): block for i, block in enumerate(states)}, copies=copies) as calls:
        run()
    for call in calls:
        if call.args or call.kwargs:
            state = bind(type(call.module), call.args, call.kwargs).x
        else:
            state = None
        states[call.module].append((state, call.output))
    return states


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors in a value, or in the containers that it consists of."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
