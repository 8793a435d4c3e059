"""Recorded calls of a module, which can be repeated with other states."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

CACHES = ("cache", "past_key_values", "past_key_value", "layer_past", "cache_params")
"""Arguments that carry keys and values of an earlier call. Repeated calls must not fill them."""
STATE = object()
"""Placeholder of the state in a recorded call."""


@dataclass(frozen=True, eq=False)
class Template:
    """A call with a placeholder wherever the state was passed: attention may get it as query, key
    and value.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def mapped(self, change: Callable[[Any], Any]) -> Template:
        """The call with `change` applied to each argument."""
        return Template(
            tuple(map(change, self.args)),
            {name: change(value) for name, value in self.kwargs.items()},
        )

    def with_state(self, x: Tensor) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of the call with x as the state."""

        def filled(value: Any) -> Any:
            if value is STATE:
                return x
            return value

        call = self.mapped(filled)
        return call.args, call.kwargs


@dataclass(eq=False)
class RecordedCall:
    """One call of a module: its path, its arguments and its output."""

    path: str
    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any = None

    @cached_property
    def x(self) -> Any:
        """The state: the first floating-point tensor that the module got; None if there is none."""
        for value in (*self.args, *self.kwargs.values()):
            if isinstance(value, Tensor) and value.is_floating_point():
                return value
        return None

    @cached_property
    def template(self) -> Template:
        """The call without its state."""

        def without_state(value: Any) -> Any:
            if value is self.x:
                return STATE
            return value

        kwargs = dict(self.kwargs)
        for name in CACHES:
            if name in kwargs:
                kwargs[name] = None
        return Template(self.args, kwargs).mapped(without_state)

    @property
    def y(self) -> Any:
        """The first tensor of the output."""
        return first_tensor(self.output)

    def again(self, x: Tensor) -> Any:
        """The first tensor that the module returns if this call is repeated with the state x."""
        args, kwargs = self.template.with_state(x)
        return first_tensor(self.module(*args, **kwargs))


@contextmanager
def watched(
    parts: Mapping[str, nn.Module], *, copies: bool = False
) -> Iterator[list[RecordedCall]]:
    """Inside, records each call of the parts, in the order in which the calls begin. With `copies`,
    the tensors are cloned, because later code may change them in place.
    """
    calls: list[RecordedCall] = []
    begun: list[RecordedCall] = []

    def recorded(value: Any) -> Any:
        if copies:
            return tree_map_only(Tensor, Tensor.clone, value)
        return value

    def before(path: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        begun.append(RecordedCall(path, module, *recorded((args, kwargs))))
        calls.append(begun[-1])

    def after(module: nn.Module, args: Any, output: Any) -> None:
        begun.pop().output = recorded(output)

    handles = [
        part.register_forward_pre_hook(partial(before, path), with_kwargs=True)
        for path, part in parts.items()
    ]
    handles += [part.register_forward_hook(after) for part in parts.values()]
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()


def first_tensor(output: Any) -> Any:
    """The output of a module if it is a tensor, or the first tensor in it."""
    if isinstance(output, Tensor):
        return output
    if isinstance(output, (tuple, list)):
        parts = list(output)
    elif isinstance(output, Mapping):
        parts = list(output.values())
    else:
        parts = []
    return next((part for part in parts if isinstance(part, Tensor)), None)


@contextmanager
def without_fast_path() -> Iterator[None]:
    """Inside, torch's own Transformer layers call their submodules and not one fused kernel."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(value=False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)
