"""torchdiffeq's methods, run segment by segment. Its assertions become statuses."""

from __future__ import annotations

import dataclasses
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from solvers.errors import ConfigError
from solvers.method import ADAPTIVE, FIXED
from solvers.run import Run, Stopped, finite
from solvers.segment import Segment
from solvers.solution import Status

NAMES = (
    "dopri8",
    "dopri5",
    "bosh3",
    "fehlberg2",
    "adaptive_heun",
    "euler",
    "midpoint",
    "heun2",
    "heun3",
    "rk4",
    "explicit_adams",
    "implicit_adams",
    "fixed_adams",
    "scipy_solver",
)
"""torchdiffeq is imported where one of them runs: it imports scipy, which takes a quarter of a
second.
"""
# torchdiffeq fails by a bare assert; its message contains these words.
ASSERTED = {
    "underflow in dt": Status.STEP_UNDERFLOW,
    "non-finite": Status.NON_FINITE,
    "max_num_steps": Status.TOO_MANY_STEPS,
}


@dataclasses.dataclass(frozen=True)
class TorchDiffEq:
    """`torchdiffeq.odeint` with that method, one call for each segment: no step crosses a switch,
    and no field is evaluated beyond it.
    """

    name: str

    @property
    def order(self) -> int:
        """The formal order that torchdiffeq states (4 for its multistep methods)."""
        return int(getattr(self._solver, "order", 4))

    @property
    def adaptive(self) -> bool:
        """Whether it chooses its own steps."""
        from torchdiffeq._impl.solvers import AdaptiveStepsizeODESolver

        return issubclass(self._solver, AdaptiveStepsizeODESolver) or self.name == "scipy_solver"

    @property
    def options(self) -> frozenset[str]:
        """The options of `solve` that it uses. scipy does not show its steps."""
        if self.name == "scipy_solver":
            return frozenset({"rtol", "atol"})
        if self.adaptive:
            return ADAPTIVE
        return FIXED

    @property
    def _solver(self) -> Any:
        from torchdiffeq._impl.odeint import SOLVERS

        return SOLVERS[self.name]

    def advance(self, segment: Segment, x: Tensor, run: Run) -> Tensor:
        """The state at the segment's end. Raises Stopped if torchdiffeq fails."""
        if self.name == "scipy_solver" and x.requires_grad and torch.is_grad_enabled():
            raise ConfigError(
                "torchdiffeq:scipy_solver leaves torch and has the gradient 'adjoint' only: ask for"
                " it, or use torchdiffeq:dopri5"
            )
        if segment.project is None:
            return self._call(segment, segment.start, segment.end, run.steps, x, run)
        if self.adaptive:
            raise ConfigError(
                f"torchdiffeq:{self.name} cannot project the state after each accepted step: use"
                " dopri5 or tsit5"
            )
        for start, end in pairwise(segment.times(run.steps)):
            x = self._call(segment, start, end, 1, x, run)
        return x

    def _call(
        self, segment: Segment, t0: float, t1: float, steps: int, x: Tensor, run: Run
    ) -> Tensor:
        if self.name == "scipy_solver" and not finite(x):
            raise Stopped(Status.NON_FINITE, t0, x)
        if any(
            isinstance(given, Tensor) and given.shape != x.shape for given in (run.rtol, run.atol)
        ):
            raise ConfigError(
                f"torchdiffeq:{self.name} with gradient 'adjoint' has no tolerances by entry: give"
                " one number, or use tsit5"
            )
        field = _Watched(segment, run, t0, t1, x, self._solver.valid_callbacks())
        times = torch.tensor([t0, t1], dtype=torch.float64, device=x.device)
        options: dict[str, Any] = {}
        if not self.adaptive:
            options = {
                "grid_constructor": lambda f, y, t: torch.linspace(
                    t[0], t[-1], steps + 1, dtype=t.dtype, device=t.device
                )
            }
            if self.name.endswith("_adams"):
                options["max_order"] = (
                    self.order + 1
                )  # its own default, 12, is unstable at ordinary steps
        elif self.name != "scipy_solver":
            options = {"step_t": times[1:].clone(), "max_num_steps": run.max_steps}
            options["norm"] = lambda x: run.norm(run.counted(x))
        tolerances: dict[str, Any] = {"rtol": run.rtol, "atol": run.atol}
        if self.name == "scipy_solver":  # which takes entries of a vector, and no tensors
            tolerances = {
                k: given.reshape(-1).cpu().numpy() if isinstance(given, Tensor) else given
                for k, given in tolerances.items()
            }
        try:
            from torchdiffeq import odeint

            x1 = odeint(field, x, times, **tolerances, method=self.name, options=options)[-1]
        except AssertionError as error:
            status = next(
                (status for words, status in ASSERTED.items() if words in str(error)), None
            )
            if status is None:
                raise
            if finite(field.state):
                status = status
            else:
                status = Status.NON_FINITE
            raise Stopped(status, field.time, field.state) from None
        return run.accept(segment, t1, x1)


class _Watched(torch.nn.Module):
    """The field as torchdiffeq calls it: counted, with times inside the segment. It also records
    accepted steps.
    """

    def __init__(
        self, segment: Segment, run: Run, t0: float, t1: float, x: Tensor, callbacks: set[str]
    ):
        super().__init__()
        for name in callbacks & {
            "callback_step",
            "callback_reject_step",
        }:  # torchdiffeq warns of callbacks that a method never calls
            setattr(self, name, getattr(self, f"_{name}"))
        self._segment = segment
        self._run = run
        low, high = run.inside(segment, x.dtype)
        self._low = max(min(t0, t1), low)
        self._high = min(max(t0, t1), high)
        self.time = t0
        self.state = x

    def forward(self, t: Tensor, x: Tensor) -> Tensor:
        return self._run.velocity(self._segment, t.clamp(self._low, self._high), x)

    def _callback_step(self, t: Tensor, x: Tensor, h: Tensor) -> None:
        # called before each attempt: at a new time, the step before was accepted
        if float(t.detach()) != self.time:
            if t.requires_grad and self._run.save == "steps":
                # its step sizes depend on the parameters; a saved state is at a fixed time
                x = x - self._run.velocity(self._segment, t.detach(), x.detach()).detach() * (
                    t - t.detach()
                ).to(x.dtype)
            self._run.accept(self._segment, float(t.detach()), x)
        self.time = float(t.detach())
        self.state = x

    def _callback_reject_step(self, t: Tensor, x: Tensor, h: Tensor) -> None:
        self._run.stats.rejected += 1
