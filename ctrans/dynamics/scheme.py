"""How to integrate a depth. Only this file defines that one Euler step per segment is the discrete
Transformer.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import torch

from ctrans.base.shapes import TokenRows
from ctrans.dynamics.depth import Depth, check_count
from solvers import (
    METHODS,
    ConfigError,
    Gradient,
    Method,
    Norm,
    Segment,
    Solution,
    StepControl,
    checked,
    shown,
)
from solvers.error_norm import get_norm
from solvers.gradients import get_gradient
from solvers.methods import get_method
from solvers.request import check_solver
from solvers.reversible import Reversible
from solvers.solve import solve
from solvers.step_control import check_unused_options

METHOD_WORDS = ", ".join(
    [
        "euler (with one step: the discrete model)",
        *(name for name in METHODS if name != "euler" and ":" not in name),
        "or torchdiffeq:NAME",
    ]
)
"""The methods, for help texts."""
MOST_STEPS = 10**6
"""The largest number of steps of a segment. With more, rounding grows faster than the error falls.
"""


_WHOLE_GRAPH: ContextVar[bool] = ContextVar("_WHOLE_GRAPH", default=False)


@contextlib.contextmanager
def whole_graph() -> Iterator[None]:
    """Inside, ODE blocks keep their whole graph: schemes compute with the gradient `backprop`, if
    their own has the same forward pass.

    An analysis reads states within a solve, and stops passes in the middle. A solve that drops its
    graph shows neither.
    """
    token = _WHOLE_GRAPH.set(True)
    try:
        yield
    finally:
        _WHOLE_GRAPH.reset(token)


@checked
@dataclasses.dataclass(frozen=True)
class Scheme:
    """How to compute X_T from X_0, with `method`, `steps`, `rtol`, `atol`, `gradient` and `norm` as
    in `solvers.solve`. The default is the discrete model.

    `gradient` matters even without gradients: `reversible` has its own forward scheme. Raises
    ConfigError for unknown names, invalid numbers, and a norm of the error for a method without an
    error estimate.
    """

    method: str | Method = "euler"
    steps: int = 1
    rtol: float | None = None
    atol: float | None = None
    gradient: str | Gradient = "backprop"
    norm: str | Norm | None = None

    def __post_init__(self) -> None:
        if isinstance(self.steps, int) and self.steps > MOST_STEPS:
            check_count("steps", self.steps, MOST_STEPS)
        # the state's dtype is not known yet
        self.check_numbers(torch.float64)
        get_gradient(self.gradient)
        if self.norm is not None:
            get_norm(self.norm)
        check_unused_options(get_method(self.method), {"norm": self.norm}, self.method)

    @property
    def discrete(self) -> bool:
        """Whether this is the discrete Transformer: one Euler step per segment."""
        return get_method(self.method) == METHODS["euler"] and self.steps == 1

    @property
    def evaluates_once(self) -> bool:
        """Whether each field is evaluated exactly once, which a field that writes to a cache
        needs.
        """
        return self.discrete and self.gradient == "backprop"

    def check_numbers(self, dtype: torch.dtype) -> Method:
        """The method. Raises ConfigError for invalid numbers, and for tolerances below the dtype's
        precision.
        """
        return check_solver(self.method, self.steps, self.rtol, self.atol, dtype)[0]

    def check(self, depth: Depth, dtype: torch.dtype = torch.float64) -> None:
        """Raises ConfigError if the gradient does not work with the method and the depth's
        segments, or the numbers with the dtype.
        """
        gradient = get_gradient(self.gradient)
        method = self.check_numbers(dtype)
        # the solver only sees a map of the state, as a norm around it is one
        if depth.sublayers[0].streams > 1 and getattr(gradient, "inverts", False):
            raise ConfigError(
                f"gradient {shown(self.gradient)} cannot go back through the mixing of the state's"
                f" {depth.sublayers[0].streams} streams before each segment: use gradient"
                " 'checkpoint', or a residual of one stream"
            )
        gradient.check(method, self.segments(depth))

    def segments(self, depth: Depth, *, continuous: bool | None = None) -> list[Segment]:
        """The depth's own steps for the discrete model, and its ODE otherwise. `continuous`
        overrides this.
        """
        if continuous is None:
            continuous = not self.discrete
        return depth.segments(continuous=continuous)

    def request(self, max_steps: int | None = None) -> dict[str, Any]:
        """The arguments of `solvers.solve` for this scheme."""
        control = StepControl(self.rtol, self.atol, self.norm, max_steps=max_steps)
        gradient = self.gradient
        if _WHOLE_GRAPH.get() and not isinstance(get_gradient(gradient), Reversible):
            gradient = "backprop"
        return {
            "method": self.method,
            "steps": self.steps,
            "gradient": gradient,
            "step_control": control,
        }

    def solve(self, depth: Depth, x0: TokenRows) -> Solution:
        """The solution over all segments, with its ends saved. Raises as `solvers.solve`."""
        return solve(self.segments(depth), x0, **self.request())

    def last_state(self, depth: Depth, x0: TokenRows) -> TokenRows:
        """X_T. Raises SolveError if an integration fails. The discrete model never raises it."""
        if not self.evaluates_once:
            return self.solve(depth, x0).x1
        x1: TokenRows = depth(x0)
        return x1


DISCRETE = Scheme()


def trajectory(
    depth: Depth,
    x0: TokenRows,
    *,
    method: str | Method = "euler",
    steps: int = 1,
    rtol: float | None = None,
    atol: float | None = None,
    gradient: str | Gradient = "backprop",
    norm: str | Norm | None = None,
    continuous: bool | None = None,
    throw: bool = True,
    max_steps: int | None = None,
    progress: Callable[[int], None] | None = None,
) -> Solution:
    """X at depth-time 0 and at the end of each segment, by any method of `solvers.METHODS`.

    Euler with one step is the discrete model, bit for bit. All others integrate the ODE.

    - `method`, `steps`, `rtol`, `atol`, `gradient`, `norm`, `max_steps`, `progress`: as in
      `solvers.solve`
    - `continuous`: whether to integrate the ODE with any method; it matters only with a norm around
      the state
    - `throw`: whether a failure raises SolveError; otherwise the solution's status shows it
    """
    scheme = Scheme(method, steps, rtol, atol, gradient, norm)
    segments = scheme.segments(depth, continuous=continuous)
    return solve(
        segments, x0, **scheme.request(max_steps), save="segments", throw=throw, progress=progress
    )
