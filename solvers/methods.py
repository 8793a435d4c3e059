"""The table of integration methods: a new one is one entry, and the order, gradient, dtype and device tests pick it up."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from torch import Tensor

from solvers import tableau
from solvers.errors import look_up
from solvers.run import Run
from solvers.runge_kutta import RungeKutta
from solvers.segment import Segment
from solvers.torchdiffeq_methods import SOLVERS, TorchDiffEq


@runtime_checkable
class Method(Protocol):
    """What `solve` asks of a method."""

    @property
    def order(self) -> int: ...

    @property
    def adaptive(self) -> bool: ...

    def advance(self, segment: Segment, x: Tensor, run: Run) -> Tensor: ...


METHODS: dict[str, Method] = {
    "euler": RungeKutta(tableau.EULER),
    "midpoint": RungeKutta(tableau.MIDPOINT),
    "heun": RungeKutta(tableau.HEUN),
    "rk4": RungeKutta(tableau.RK4),
    "dopri5": RungeKutta(tableau.DOPRI5, adaptive=True),
    "tsit5": RungeKutta(tableau.TSIT5, adaptive=True),
    **{f"torchdiffeq:{name}": TorchDiffEq(name) for name in SOLVERS},
}


def get_method(method: str | Method) -> Method:
    """The method of that name, or the method itself; ConfigError with the nearest name otherwise."""
    return method if isinstance(method, Method) else look_up("method", method, METHODS)
