"""How a solve is differentiated: each kind turns a method's `advance` into one with its own backward pass."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from solvers.errors import look_up
from solvers.run import Run
from solvers.segment import Segment

Advance = Callable[[Segment, Tensor, Run], Tensor]


def backprop(advance: Advance) -> Advance:
    """Autograd through every operation of every step: exact, with memory proportional to the number of evaluations."""
    return advance


GRADIENTS: dict[str, Callable[[Advance], Advance]] = {"backprop": backprop}


def get_gradient(name: str) -> Callable[[Advance], Advance]:
    """The gradient of that name; ConfigError with the nearest name otherwise."""
    return look_up("gradient", name, GRADIENTS)
