"""States of several tensors, in tuples, named tuples, lists and dictionaries, which may be nested,
as one flat tensor.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from solvers.errors import ConfigError

if TYPE_CHECKING:
    State = Tensor  # nearly every state is one; others keep their structure
else:
    State = Any


def leaves(state: object) -> list[Any]:
    """The leaves of the structure, in order; those of a dictionary in the order of its keys."""
    in_order: list[Any] = []
    mapped(in_order.append, state)
    return in_order


def mapped(function: Callable[[Any], Any], state: Any) -> Any:
    """The same structure with function(leaf) in place of each leaf."""
    if isinstance(state, (tuple, list)):
        parts = [mapped(function, part) for part in state]
        if hasattr(state, "_fields"):
            return type(state)(*parts)
        return type(state)(parts)
    if isinstance(state, dict):
        mapped_state = copy.copy(state)  # keeps the attributes of a subclass
        mapped_state.update({key: mapped(function, part) for key, part in state.items()})
        return mapped_state
    return function(state)


class Tree:
    """The structure of a state: `flat` concatenates the entries of its tensors, `parts` is the
    inverse.

    Raises ConfigError unless the structure holds tensors of one type on one device, and for one
    that contains itself.
    """

    def __init__(self, state: object, what: str = "the initial state"):
        try:
            tensors = leaves(state)
        except RecursionError:
            raise ConfigError(
                f"{what} contains itself or is nested too deep: give a tensor, or a flat list of"
                " tensors"
            ) from None
        if not tensors or not all(isinstance(leaf, Tensor) for leaf in tensors):
            raise ConfigError(
                f"{what} is {type(state).__name__}: give a tensor, or tuples, lists and"
                " dictionaries of tensors"
            )
        dtypes = {tensor.dtype for tensor in tensors}
        devices = {tensor.device for tensor in tensors}
        if len(dtypes) > 1 or len(devices) > 1:
            raise ConfigError(
                f"the tensors of {what} have several types or devices: convert them to one"
            )
        self.shapes = [tensor.shape for tensor in tensors]
        self.sizes = [math.prod(shape) for shape in self.shapes]
        places = iter(range(len(tensors)))
        self.places = mapped(lambda _: next(places), state)

    def flat(self, what: str, state: object) -> Tensor:
        """The entries of all tensors. Raises ConfigError if `what` returned another structure or
        other shapes.
        """
        tensors = list(_alongside(self.places, state))
        if [getattr(leaf, "shape", None) for leaf in tensors] != self.shapes:
            raise ConfigError(
                f"{what} returned {type(state).__name__} for a state of {len(self.shapes)} tensors:"
                " return the same structure with the same shapes"
            )
        return torch.cat([tensor.reshape(-1) for tensor in tensors])

    def spread(self, values: object) -> Tensor:
        """A number, or a tensor that broadcasts, for each tensor, as one flat tensor. Raises
        RuntimeError or TypeError if they do not fit.
        """
        flat_parts = []
        for part, shape in zip(_alongside(self.places, values), self.shapes, strict=True):
            flat_parts.append(torch.as_tensor(part).expand(shape).reshape(-1))
        return torch.cat(flat_parts)

    def parts(self, y: Tensor) -> Any:
        """The structure with the entries of the last axis of y. The axes before it stay in
        front.
        """
        cut = torch.split(y, self.sizes, dim=-1)
        return mapped(lambda i: cut[i].reshape((*y.shape[:-1], *self.shapes[i])), self.places)

    def on_parts(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function for a flat state, its last argument."""
        return lambda *arguments: function(*arguments[:-1], self.parts(arguments[-1]))

    def flat_map(self, what: str, function: Callable[..., Any]) -> Callable[..., Tensor]:
        """The same for a function whose value is a state too."""
        on_parts = self.on_parts(function)
        return lambda *arguments: self.flat(what, on_parts(*arguments))

    def norm(self, norm: Callable[[Any], Tensor], *, named: bool) -> Callable[[Tensor], Tensor]:
        """A norm of the flat state: the largest value of a named norm over its tensors, or your own
        norm of the structure.
        """
        if not named:
            return self.on_parts(norm)

        def largest(e: Tensor) -> Tensor:
            norms = [norm(part) for part in leaves(self.parts(e)) if part.numel() > 0]
            return torch.stack(norms).max()

        return largest


def _alongside(places: object, state: Any) -> Iterator[Any]:
    """The leaves of a state that has the structure of the places; None where it has not."""
    if isinstance(places, (tuple, list)):
        if isinstance(places, tuple):
            # for a named tuple, the field may return a plain tuple
            alike = isinstance(state, tuple)
        else:
            alike = isinstance(state, list)
        parts: Sequence[Any] = [None] * len(places)
        if alike and len(state) == len(places):
            parts = state
        for place, part in zip(places, parts, strict=True):
            yield from _alongside(place, part)
    elif isinstance(places, dict):
        alike = isinstance(state, dict) and state.keys() == places.keys()
        for key, place in places.items():
            part = None
            if alike:
                part = state[key]
            yield from _alongside(place, part)
    else:
        yield state
