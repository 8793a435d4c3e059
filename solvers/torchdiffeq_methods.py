"""torchdiffeq's methods, run segment by segment. Its assertions become statuses."""

from __future__ import annotations

import dataclasses
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from solvers.errors import ConfigError
from solvers.method import ADAPTIVE, FIXED
from solvers.run import Run, Stopped, dtype_name, finite
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
STATUS_BY_ASSERTION = {
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
        if self.name == "scipy_solver" and x.dtype.itemsize < 4:
            raise ConfigError(
                f"torchdiffeq:scipy_solver cannot solve in {dtype_name(x.dtype)}: keep the state in"
                " float32 (autocast does), or use torchdiffeq:dopri5"
            )
        if self.name == "scipy_solver" and not finite(x):
            raise Stopped(Status.NON_FINITE, t0, x)
        for tolerance in (run.rtol, run.atol):
            if isinstance(tolerance, Tensor) and tolerance.shape != x.shape:
                raise ConfigError(
                    f"torchdiffeq:{self.name} with gradient 'adjoint' has no tolerances by entry:"
                    " give one number, or use tsit5"
                )
        field = _Watched(segment, run, t0, t1, x, self._solver.valid_callbacks())
        times = torch.tensor([t0, t1], dtype=torch.float64, device=x.device)
        options = self._its_options(times, steps, run)
        rtol: Any = run.rtol
        atol: Any = run.atol
        if self.name == "scipy_solver":
            rtol = _without_tensor(run.rtol)
            atol = _without_tensor(run.atol)
        try:
            from torchdiffeq import odeint

            states = odeint(
                field, x, times, rtol=rtol, atol=atol, method=self.name, options=options
            )
        except AssertionError as error:
            status = _status_of(error)
            if status is None:
                raise
            if not finite(field.state):
                status = Status.NON_FINITE
            raise Stopped(status, field.time, field.state) from None
        return run.accept(segment, t1, states[-1])

    def _its_options(self, times: Tensor, steps: int, run: Run) -> dict[str, Any]:
        """torchdiffeq's options for that many steps between the two times."""
        if self.name == "scipy_solver":
            return {}
        if self.adaptive:
            return {
                "step_t": times[1:].clone(),
                "max_num_steps": run.max_steps,
                "norm": lambda x: run.norm(run.counted(x)),
            }
        options: dict[str, Any] = {
            "grid_constructor": lambda f, y, t: torch.linspace(
                t[0], t[-1], steps + 1, dtype=t.dtype, device=t.device
            )
        }
        if self.name.endswith("_adams"):
            # its own default, 12, is unstable at ordinary steps
            options["max_order"] = self.order + 1
        return options


def _without_tensor(tolerance: float | Tensor) -> Any:
    """A tolerance as scipy takes it: a number, or the entries of a vector."""
    if isinstance(tolerance, Tensor):
        return tolerance.reshape(-1).cpu().numpy()
    return tolerance


def _status_of(error: AssertionError) -> Status | None:
    """The status for one of torchdiffeq's assertions, or None for any other."""
    for words, status in STATUS_BY_ASSERTION.items():
        if words in str(error):
            return status
    return None


class _Watched(torch.nn.Module):
    """The field as torchdiffeq calls it: counted, with times inside the segment. It also records
    accepted steps.
    """

    def __init__(
        self, segment: Segment, run: Run, t0: float, t1: float, x: Tensor, callbacks: set[str]
    ):
        super().__init__()
        # torchdiffeq warns of callbacks that a method never calls
        if "callback_step" in callbacks:
            self.callback_step = self._callback_step
        if "callback_reject_step" in callbacks:
            self.callback_reject_step = self._callback_reject_step
        self._segment = segment
        self._run = run
        low, high = run.inside(segment, x.dtype)
        self._low = max(min(t0, t1), low)
        self._high = min(max(t0, t1), high)
        self.time = t0
        self.state = x

    def forward(self, t: Tensor, x: Tensor) -> Tensor:
        v = self._run.velocity(self._segment, t.clamp(self._low, self._high), x)
        # Under autocast a field returns bfloat16, in which numpy has no arrays. torchdiffeq keeps
        # several values, so each must be a tensor of its own.
        return v.to(x.dtype, copy=True)

    def _callback_step(self, t: Tensor, x: Tensor, h: Tensor) -> None:
        # called before each attempt: at a new time, the step before was accepted
        time = float(t.detach())
        if time != self.time:
            if t.requires_grad and self._run.save == "steps":
                # its step sizes depend on the parameters; a saved state is at a fixed time
                slope = self._run.velocity(self._segment, t.detach(), x.detach()).detach()
                x = x - slope * (t - t.detach()).to(x.dtype)
            self._run.accept(self._segment, time, x)
        self.time = time
        self.state = x

    def _callback_reject_step(self, t: Tensor, x: Tensor, h: Tensor) -> None:
        self._run.stats.rejected += 1
