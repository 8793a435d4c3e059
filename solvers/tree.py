"""States of several tensors, in tuples, named tuples, lists and dictionaries, which may be nested,
as one flat tensor.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
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
    found: list[Any] = []
    mapped(found.append, state)
    return found


def mapped(function: Callable[[Any], Any], state: Any) -> Any:
    """The same structure with function(leaf) in place of each leaf."""
    if isinstance(state, (tuple, list)):
        parts = [mapped(function, part) for part in state]
        if hasattr(state, "_fields"):
            return type(state)(*parts)
        return type(state)(parts)
    if isinstance(state, dict):
        made = copy.copy(state)  # keeps the attributes of a subclass
        made.update({key: mapped(function, part) for key, part in state.items()})
        return made
    return function(state)


class Tree:
    """The structure of a state: `flat` concatenates the entries of its tensors, `parts` is the
    inverse.

    Raises ConfigError unless the structure holds tensors of one type on one device, and for one
    that contains itself.
    """

    def __init__(self, state: object, what: str = "the initial state"):
        try:
            found = leaves(state)
        except RecursionError:
            raise ConfigError(
                f"{what} contains itself or is nested too deep: give a tensor, or a flat list of"
                " tensors"
            ) from None
        if not found or not all(isinstance(leaf, Tensor) for leaf in found):
            raise ConfigError(
                f"{what} is {type(state).__name__}: give a tensor, or tuples, lists and"
                " dictionaries of tensors"
            )
        if len({leaf.dtype for leaf in found}) > 1 or len({leaf.device for leaf in found}) > 1:
            raise ConfigError(
                f"the tensors of {what} have several types or devices: convert them to one"
            )
        self.shapes = [leaf.shape for leaf in found]
        self.sizes = [math.prod(shape) for shape in self.shapes]
        places = iter(range(len(found)))
        self.places = mapped(lambda _: next(places), state)

    def flat(self, what: str, state: object) -> Tensor:
        """The entries of all tensors. Raises ConfigError if `what` returned another structure or
        other shapes.
        """
        found = list(_alongside(self.places, state))
        if [getattr(leaf, "shape", None) for leaf in found] != self.shapes:
            raise ConfigError(
                f"{what} returned {type(state).__name__} for a state of {len(self.shapes)} tensors:"
                " return the same structure with the same shapes"
            )
        return torch.cat([leaf.reshape(-1) for leaf in found])

    def spread(self, given: object) -> Tensor:
        """A number, or a tensor that broadcasts, for each tensor, as one flat tensor. Raises
        RuntimeError or TypeError if they do not fit.
        """
        parts = zip(_alongside(self.places, given), self.shapes, strict=True)
        return torch.cat([torch.as_tensor(part).expand(shape).reshape(-1) for part, shape in parts])

    def parts(self, y: Tensor) -> Any:
        """The structure with the entries of the last axis of y. The axes before it stay in
        front.
        """
        cut = torch.split(y, self.sizes, dim=-1)
        return mapped(lambda i: cut[i].reshape((*y.shape[:-1], *self.shapes[i])), self.places)

    def on_parts(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function for a flat state, its last argument."""
        return lambda *given: function(*given[:-1], self.parts(given[-1]))

    def flat_map(self, what: str, function: Callable[..., Any]) -> Callable[..., Tensor]:
        """The same for a function whose value is a state too."""
        on_parts = self.on_parts(function)
        return lambda *given: self.flat(what, on_parts(*given))

    def norm(self, norm: Callable[[Any], Tensor], named: bool) -> Callable[[Tensor], Tensor]:
        """A norm of the flat state: the largest value of a named norm over its tensors, or your own
        norm of the structure.
        """
        if not named:
            return self.on_parts(norm)
        return lambda e: torch.stack(
            [norm(part) for part in leaves(self.parts(e)) if part.numel()]
        ).max()


def _alongside(places: object, state: Any) -> Iterator[Any]:
    """The leaves of a state that has the structure of the places; None where it has not."""
    if isinstance(places, (tuple, list)):
        # for a named tuple, the field may return a plain tuple
        alike = isinstance(state, tuple if isinstance(places, tuple) else list) and len(
            state
        ) == len(places)
        for i, part in enumerate(places):
            yield from _alongside(part, state[i] if alike else None)
    elif isinstance(places, dict):
        alike = isinstance(state, dict) and state.keys() == places.keys()
        for key, part in places.items():
            yield from _alongside(part, state[key] if alike else None)
    else:
        yield state
