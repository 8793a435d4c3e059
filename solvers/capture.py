"""What a field depends on besides the state, found while it is evaluated without a graph.

So fields may be any closures, and what they depend on can become inputs of an autograd node: every
parameter gets its gradient where autograd, and a distributed wrapper that listens there, expects
it. What cannot be seen that way, as inside a scripted function, is noticed on the way back and
raises SolveError.
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
"""What each segment's maps depend on besides the state, by the segment's place."""


class Capture(TorchFunctionMode):
    """Notes every tensor that a torch function is given, that requires a gradient and that was not
    made meanwhile.

    Under no_grad nothing computed requires one, so these are the tensors that came from outside:
    parameters, mostly. A field that differentiates something itself makes tensors that do, which
    are left out.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[int, Tensor] = {}
        self._made = WeakIdKeyDictionary()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # a property without arguments but the tensor asks this too, so every line counts beside a
        # small model's operation
        self._note(args)
        if kwargs:
            self._note(kwargs.values())
            result = func(*args, **kwargs)
        else:
            result = func(*args)
        if isinstance(result, Tensor):
            self._mark(result)
        elif isinstance(result, (tuple, list)):
            for item in result:
                if isinstance(item, Tensor):
                    self._mark(item)
        return result

    def _mark(self, tensor: Tensor) -> None:
        if tensor.requires_grad and id(tensor) not in self.found:
            self._made[tensor] = None

    def _note(self, values: Iterable[Any]) -> None:
        for value in values:
            if isinstance(value, Tensor):
                if value.requires_grad and not (self._made and value in self._made) and not is_functorch_wrapped_tensor(value):
                    self.found[id(value)] = value
            elif isinstance(value, (tuple, list)):
                self._note(value)

    def take(self) -> list[Tensor]:
        """What was found since the last call."""
        found, self.found = list(self.found.values()), {}
        return found


class Substitute(TorchFunctionMode):
    """Gives every torch function the aliases of certain tensors in place of these."""

    def __init__(self, aliases: dict[int, Tensor]):
        super().__init__()
        self._aliases = aliases

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*self._swap(args), **self._swap(kwargs or {}))

    def _swap(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self._aliases.get(id(value), value)
        if type(value) in (tuple, list):
            return type(value)(self._swap(item) for item in value)
        return {key: self._swap(item) for key, item in value.items()} if isinstance(value, dict) else value


def check_seen(y: Tensor, inputs: Sequence[Tensor], k: int) -> None:
    """Raises SolveError where y depends on a leaf that is none of the inputs: its gradient would
    silently be missing.
    """
    known = {id(tensor) for tensor in inputs}
    nodes, met = [y.grad_fn], set()
    while nodes:
        node = nodes.pop()
        if node is None or node in met:
            continue
        met.add(node)
        leaf = getattr(node, "variable", None)
        if leaf is not None and id(leaf) not in known:
            raise SolveError(
                f"segment {k} depends on a tensor of shape {tuple(leaf.shape)} in a way that cannot be seen from outside (a scripted "
                "or custom function): use gradient='checkpoint'"
            )
        nodes.extend(before for before, _ in node.next_functions)


def aside() -> AbstractContextManager[None]:
    """Where no `Capture` looks, and nothing waits for one: for what is no map's work."""
    return torch._C.DisableTorchFunction()


def autocast_state(device: str, cached: bool = False) -> dict[str, Any]:
    """The arguments that make the present autocast again; by default without its cache, which would
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
    """No gradients, autocast as it is but without its cache, and captured what comes from outside.

    Raises ConfigError where random numbers were drawn: the way back could not draw them again.
    """
    before = _random_state(device)
    with torch.no_grad(), torch.autocast(**autocast_state(device.type)), Capture() as capture:
        yield capture
    if not torch.equal(before, _random_state(device)):
        raise ConfigError(
            "a field draws random numbers (dropout?), which this gradient would have to draw again: use gradient='checkpoint', or "
            "turn them off"
        )


def _random_state(device: torch.device) -> Tensor:
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def untraced(function: Function) -> Function:
    """The function, into which a compiler does not look; what looks for captured tensors cannot be
    traced.

    `torch.compiler.disable` as a decorator would import the compiler, two seconds, with the
    package.
    """

    @functools.wraps(function)
    def wrapper(*args: Any) -> Any:
        return (torch.compiler.disable(function) if "torch._dynamo" in sys.modules else function)(*args)

    return cast(Function, wrapper)
