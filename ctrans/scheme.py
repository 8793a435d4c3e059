"""How a depth is integrated. That one Euler step per segment is the discrete Transformer is said
here and nowhere else.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from ctrans.depth import Depth, check_count
from solvers import METHODS, Gradient, Method, Norm, Segment, Solution, StepControl, get_norm, solve
from solvers.gradients import get_gradient
from solvers.methods import get_method
from solvers.request import check_solver
from solvers.step_control import check_unused_options

METHOD_WORDS = ", ".join(
    [
        "euler (with one step: the discrete model)",
        *(name for name in METHODS if name != "euler" and ":" not in name),
        "or torchdiffeq:NAME",
    ]
)
"""The methods, for a help text."""
MOST_STEPS = 10**6
"""Steps of a segment: beyond these rounding grows faster than the error falls, and nobody waits for
the end.
"""


@dataclasses.dataclass(frozen=True)
class Scheme:
    """X_T from X_0: `method`, `steps`, `rtol`, `atol`, `gradient` and `norm` as `solvers.solve`
    takes them. The default is the discrete model.

    `gradient` matters without a gradient too: `reversible` computes by a scheme of its own. Raises
    ConfigError when made for names that are in no table, numbers that make no sense, and a norm of
    the error for a method that estimates none.
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
        # which tolerances a dtype resolves is known when a state comes
        self.check_numbers(torch.float64)
        get_gradient(self.gradient)
        if self.norm is not None:
            get_norm(self.norm)
        check_unused_options(get_method(self.method), {"norm": self.norm}, self.method)

    @property
    def discrete(self) -> bool:
        """Whether it is the discrete Transformer: one Euler step per segment."""
        return get_method(self.method) == METHODS["euler"] and self.steps == 1

    @property
    def evaluates_once(self) -> bool:
        """Whether every field is evaluated once and never again, as what a field writes into a
        cache demands.
        """
        return self.discrete and self.gradient == "backprop"

    def check_numbers(self, dtype: torch.dtype) -> Method:
        """The method. Raises ConfigError for tolerances below what the dtype resolves, and all that
        is wrong with the numbers.
        """
        return check_solver(self.method, self.steps, self.rtol, self.atol, dtype)[0]

    def check(self, depth: Depth, dtype: torch.dtype = torch.float64) -> None:
        """Raises ConfigError where the gradient does not work for the method and the depth's
        segments, or numbers for the dtype.
        """
        get_gradient(self.gradient).check(self.check_numbers(dtype), self.segments(depth))

    def segments(self, depth: Depth, continuous: bool | None = None) -> list[Segment]:
        """The depth's own steps for the discrete model, its ODE for everything else; `continuous`
        overrides that choice.
        """
        return depth.segments(continuous=not self.discrete if continuous is None else continuous)

    def request(self, max_steps: int | None = None) -> dict[str, Any]:
        """The arguments of `solvers.solve` that ask for this scheme."""
        control = StepControl(self.rtol, self.atol, self.norm, max_steps=max_steps)
        return {"method": self.method, "steps": self.steps, "gradient": self.gradient, "step_control": control}

    def solve(self, depth: Depth, x0: Float[Tensor, "*batch tokens width"]) -> Solution:
        """The solution over all segments, its ends saved; errors are those of `solvers.solve`."""
        return solve(self.segments(depth), x0, **self.request())

    def last_state(self, depth: Depth, x0: Float[Tensor, "*batch tokens width"]) -> Float[Tensor, "*batch tokens width"]:
        """X_T. Raises SolveError where an integration fails; the discrete model always has a
        result.
        """
        return depth(x0) if self.evaluates_once else self.solve(depth, x0).x1


DISCRETE = Scheme()


def trajectory(
    depth: Depth,
    x0: Float[Tensor, "*batch tokens width"],
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
    """X at depth-time 0 and at every segment's end, one more state than there are segments, by any
    method of `solvers.METHODS`.

    Euler with one step is the discrete model, bit for bit. Everything else integrates the ODE.

    - `method`, `steps`, `rtol`, `atol`, `gradient`, `norm`, `max_steps`, `progress`: as
      `solvers.solve` takes them
    - `continuous`: whether the ODE is integrated whatever the method, which matters only where a
      norm stands around the state
    - `throw`: whether a failure raises SolveError; otherwise the solution's status says it
    """
    scheme = Scheme(method, steps, rtol, atol, gradient, norm)
    segments = scheme.segments(depth, continuous)
    return solve(segments, x0, **scheme.request(max_steps), save="segments", throw=throw, progress=progress)
