"""Finds the tensors that a field depends on besides the state, while it is evaluated without a
graph.

These tensors become inputs of an autograd node, so fields may be any closures. Each parameter gets
its gradient where autograd, and a distributed wrapper that listens there, expects it. The backward
pass detects what cannot be captured, such as inside a scripted function, and raises SolveError.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from solvers.errors import ConfigError, SolveError

Function = TypeVar("Function", bound=Callable[..., Any])
Captured = dict[int, list[Tensor]]
"""By a segment's number: the tensors that its maps depend on besides the state."""


class Capture(TorchFunctionMode):
    """Collects each tensor argument of a torch function that requires a gradient and was not
    computed meanwhile.

    Under no_grad no result requires a gradient, so these tensors come from outside: mostly
    parameters. A field that differentiates something itself computes tensors that require a
    gradient; they are left out.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[int, Tensor] = {}
        self._made = WeakIdKeyDictionary()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # properties of a tensor call this too, so each line costs time in small models
        self._note(args)
        if kwargs:
            self._note(kwargs.values())
            result = func(*args, **kwargs)
        else:
            result = func(*args)
        if isinstance(result, Tensor):
            self._mark(result)
        elif isinstance(result, (tuple, list)):
            for part in result:
                if isinstance(part, Tensor):
                    self._mark(part)
        return result

    def _mark(self, tensor: Tensor) -> None:
        if tensor.requires_grad and id(tensor) not in self.found:
            self._made[tensor] = None

    def _note(self, values: Iterable[Any]) -> None:
        for value in values:
            if isinstance(value, Tensor):
                if (
                    value.requires_grad
                    and not (self._made and value in self._made)
                    and not is_functorch_wrapped_tensor(value)
                ):
                    self.found[id(value)] = value
            elif isinstance(value, (tuple, list)):
                self._note(value)

    def take(self) -> list[Tensor]:
        """The tensors found since the last call."""
        captured = list(self.found.values())
        self.found = {}
        return captured


class Substitute(TorchFunctionMode):
    """Replaces certain tensors by their aliases in the arguments of every torch function."""

    def __init__(self, aliases: dict[int, Tensor]):
        super().__init__()
        self._aliases = aliases

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*self._swap(args), **self._swap(kwargs or {}))

    def _swap(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self._aliases.get(id(value), value)
        if type(value) in (tuple, list):
            return type(value)(self._swap(part) for part in value)
        if isinstance(value, dict):
            return {key: self._swap(part) for key, part in value.items()}
        return value


def check_seen(y: Tensor, inputs: Sequence[Tensor], k: int) -> None:
    """Raises SolveError if y depends on a leaf that is not among the inputs: its gradient would be
    missing.
    """
    inputs_by_id = {id(tensor) for tensor in inputs}
    for leaf in leaves_behind([y.grad_fn]):
        if id(leaf) not in inputs_by_id:
            raise SolveError(
                f"segment {k} depends on a tensor of shape {tuple(leaf.shape)} in a way that cannot"
                " be seen from outside (a scripted or custom function): use gradient='checkpoint'"
            )


def leaves_behind(nodes: Iterable[Any], ends: Iterable[Any] = ()) -> Iterator[Tensor]:
    """The leaves that autograd's nodes depend on, except through the nodes `ends`."""
    waiting = list(nodes)
    met = set(ends)
    while waiting:
        node = waiting.pop()
        leaf = getattr(node, "variable", None)
        if leaf is not None:
            yield leaf
        elif node is not None:
            following = {before for before, _ in node.next_functions} - met
            met |= following
            waiting += following


def check_unchanged(tensor: Tensor, version: int) -> None:
    """Raises SolveError if the tensor was changed in place since it had that version."""
    if tensor._version != version:
        raise _changed(f"a tensor of shape {tuple(tensor.shape)}")


def saved_by(node: Any) -> Sequence[Tensor]:
    """The tensors that autograd keeps for a node. Raises SolveError if one was changed in place."""
    try:
        saved: Sequence[Tensor] = node.saved_tensors
    except RuntimeError as error:
        if "modified by an inplace operation" not in str(error):
            raise
        raise _changed("the initial state, or another one,") from None
    return saved


def _changed(what: str) -> SolveError:
    return SolveError(
        f"{what} that the solve depends on was changed in place before its gradient was taken: take"
        " the gradient first"
    )


def aside() -> AbstractContextManager[None]:
    """Disables `Capture` and all other function modes, for work outside the maps."""
    return torch._C.DisableTorchFunction()


def autocast_state(device: str, *, cached: bool = False) -> dict[str, Any]:
    """The arguments that restore the present autocast. By default without its cache, which would
    keep weights cast without a graph.
    """
    return {
        "device_type": device,
        "dtype": torch.get_autocast_dtype(device),
        "enabled": torch.is_autocast_enabled(device),
        "cache_enabled": cached and torch.is_autocast_cache_enabled(),
    }


@contextlib.contextmanager
def without_graph(device: torch.device) -> Iterator[Capture]:
    """Disables gradients and autocast's cache, and captures the tensors that come from outside.

    Raises ConfigError if random numbers were drawn: the backward pass could not draw them again.
    """
    before = random_states(device)
    with torch.no_grad(), torch.autocast(**autocast_state(device.type)), Capture() as capture:
        yield capture
    if not all(map(torch.equal, before, random_states(device))):
        raise ConfigError(
            "a field draws random numbers (dropout?), which this gradient cannot draw again: use"
            " gradient='checkpoint', or turn them off"
        )


def random_states(device: torch.device) -> list[Tensor]:
    """The states of the generators from which a field may draw."""
    states = [torch.get_rng_state()]
    if device.type == "cuda":
        states.append(torch.cuda.get_rng_state(device))
    return states


def untraced(function: Function) -> Function:
    """The function, hidden from the compiler: code that captures tensors cannot be traced.

    `torch.compiler.disable` as a decorator would import the compiler with the package, which takes
    two seconds.
    """

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if "torch._dynamo" in sys.modules:
            return torch.compiler.disable(function)(*args, **kwargs)
        return function(*args, **kwargs)

    return cast(Function, wrapper)
