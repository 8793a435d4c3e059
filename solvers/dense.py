"""States at any times: interpolated inside the steps during a solve, or afterwards from the stored
steps.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from itertools import pairwise
from numbers import Real

import torch
from torch import Tensor

from solvers.changes import is_equal
from solvers.errors import ConfigError, shown
from solvers.learned_time import learned_tensor
from solvers.march import Gradient
from solvers.method import Method, has_capability
from solvers.run import Accepted
from solvers.segment import Segment
from solvers.transforms import batched

Times = Sequence[float] | Tensor


def check_times(
    times: Times, segments: Sequence[Segment], method: Method, gradient: Gradient
) -> list[float]:
    """The times as numbers, in the order of integration.

    Raises ConfigError for times that are not finite numbers in that order and within the segments,
    and for times that require a gradient. Also for segments that turn back or have learned times,
    and for methods and gradients without states inside their steps.
    """
    listed = times
    if learned_tensor(times) is not None:
        raise ConfigError(
            "times require a gradient, which states at given times do not have: give"
            " times.detach(), use save='curve' or odeint, or make each time a segment's end with"
            " save='segments'"
        )
    if isinstance(times, Tensor) and times.dim() == 1:
        listed = times.detach().tolist()
    if (
        not isinstance(listed, Sequence)
        or not all(isinstance(t, Real) and math.isfinite(t) for t in listed)
        or not listed
    ):
        raise ConfigError(
            f"times = {shown(times)}: give a list of finite numbers, or a tensor of one axis"
        )
    start = segments[0].start
    end = segments[-1].end
    sign = check_one_way(segments)
    if any(sign * (b - a) <= 0 for a, b in pairwise(listed)):
        raise ConfigError(
            "the times are not strictly in the order in which the segments pass them: sort them"
        )
    if sign * (listed[0] - start) < 0 or sign * (end - listed[-1]) < 0:
        raise ConfigError(
            f"the times from {listed[0]:g} to {listed[-1]:g} leave the segments, from {start:g} to"
            f" {end:g}"
        )
    if not has_capability(method, "dense") or not has_capability(gradient, "dense"):
        raise ConfigError(
            "states at any times need a method whose tableau has dense output, as tsit5, dopri5 or"
            " rk4, and gradient='backprop' or 'adjoint': use these, or make each time a segment's"
            " end and save='segments'"
        )
    return [float(t) for t in listed]


def check_one_way(segments: Sequence[Segment]) -> float:
    """1 for segments that go forward in time, -1 for backward ones. Raises ConfigError if they turn
    back or have learned times.
    """
    sign = math.copysign(1.0, segments[-1].end - segments[0].start)
    if any(sign * (segment.end - segment.start) < 0 for segment in segments):
        raise ConfigError(
            "the segments turn back in time, so a given time may have several states: solve them"
            " one by one"
        )
    if any(segment.learned for segment in segments):
        raise ConfigError(
            "states at given times have no derivative by learned times: make each time a"
            " segment's end"
        )
    return sign


class Curve:
    """t -> x(t), by the interpolants of a solve's steps. It collects them as an observer.

    t is a tensor of any shape; the axes of x(t) start with those of t. At a segment's end, x(t) is
    the state before the next one's `enter`. Raises ConfigError for a method without interpolants,
    for kinds of gradient other than backprop, and for times outside the solve.
    """

    def __init__(self, segments: Sequence[Segment], method: Method, gradient: Gradient):
        self._sign = check_one_way(segments)
        if (
            not has_capability(method, "dense")
            or gradient.detached
            or not has_capability(gradient, "dense")
            or batched()
        ):
            raise ConfigError(
                "save='curve' needs a method whose tableau has dense output, as tsit5, dopri5 or"
                " rk4, gradient='backprop' and no vmap"
            )
        self._ends = [self._sign * segments[0].start]
        self._steps: list[Accepted] = []
        self._states: list[Tensor] = []

    def note(self, accepted: Accepted) -> None:
        """Stores an accepted step, with the state that its interpolant has at its end."""
        # evaluates the inner stages now: the field may have other weights later
        state = _inside(accepted, accepted.step.end)
        self._steps.append(accepted)
        self._states.append(state.detach())
        self._ends.append(self._sign * accepted.step.end)

    def ended(self, time: float) -> None:
        """Sets the last time, at which an event may have ended the solve inside the last step."""
        self._ends[-1] = self._sign * time

    def __call__(self, t: Tensor | float) -> Tensor:
        try:
            t = torch.as_tensor(t, dtype=torch.float64)
        except (TypeError, ValueError, RuntimeError):
            raise ConfigError(f"t = {shown(t)}: give a time, or a tensor of times") from None
        x = torch.stack([self._at(time) for time in t.reshape(-1)])
        return x.reshape(*t.shape, *x.shape[1:])

    def _at(self, t: Tensor) -> Tensor:
        time = self._sign * float(t.detach())
        if not self._ends[0] <= time <= self._ends[-1]:
            first = self._sign * self._ends[0]
            last = self._sign * self._ends[-1]
            raise ConfigError(
                f"t = {float(t.detach()):g} is outside the solve, which goes from {first:g} to"
                f" {last:g}"
            )
        k = max(0, bisect_left(self._ends, time) - 1)
        accepted = self._steps[k]
        if accepted.step.segment.project is not None:
            with torch.no_grad():
                state = _inside(accepted, accepted.step.end)
            if not is_equal(self._states[k], state):
                raise ConfigError(
                    "the segment's project has other values than in the solve, so the curve would"
                    " mix both: solve again, or read the curve before the weights change"
                )
        return _inside(accepted, t)


def _inside(accepted: Accepted, t: Tensor | float) -> Tensor:
    assert accepted.inside is not None, (
        "a method that does not tell the states inside its steps was refused"
    )
    return accepted.inside(t)
