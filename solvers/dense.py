"""States at any times: interpolated inside the steps as these are taken, at no further evaluation."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from itertools import pairwise
from numbers import Real

from torch import Tensor

from solvers.errors import ConfigError
from solvers.gradients import Gradient
from solvers.method import Method
from solvers.segment import Segment
from solvers.solution import Solution

Times = Sequence[float] | Tensor


def check_times(times: Times, segments: Sequence[Segment], method: Method, gradient: Gradient) -> list[float]:
    """The times as numbers, in the order in which the segments pass them.

    Raises ConfigError for times that are not finite numbers in that order and within the segments, for segments that turn back or
    have learned times, and for methods and gradients that do not know the states inside their steps.
    """
    given = times.detach().tolist() if isinstance(times, Tensor) and times.dim() == 1 else times
    if not isinstance(given, Sequence) or not all(isinstance(t, Real) and math.isfinite(t) for t in given) or not given:
        raise ConfigError(f"times = {times!r}: give a list of finite numbers, or a tensor of one axis")
    start, end = segments[0].start, segments[-1].end
    sign = math.copysign(1.0, end - start)
    if any(sign * (segment.end - segment.start) < 0 for segment in segments):
        raise ConfigError("the segments turn back in time, so that states at given times are not one: solve them in turn")
    if any(segment.learned for segment in segments):
        raise ConfigError("states at given times do not follow ends that are learned: make each time a segment's end")
    if any(sign * (b - a) <= 0 for a, b in pairwise(given)):
        raise ConfigError("the times are not strictly in the order in which the segments pass them: sort them")
    if sign * (given[0] - start) < 0 or sign * (end - given[-1]) < 0:
        raise ConfigError(f"the times from {given[0]:g} to {given[-1]:g} leave the segments, from {start:g} to {end:g}")
    if not getattr(method, "dense", False) or not getattr(gradient, "dense", False):
        raise ConfigError(
            "states at any times need a method whose tableau has dense output, as tsit5, dopri5 or rk4, and gradient='backprop' or "
            "'adjoint': use these, or make each time a segment's end and save='segments'"
        )
    return [float(t) for t in given]


def at_times(solution: Solution, times: Sequence[float]) -> Solution:
    """A solution that got to its end, with the states at the times, of all those saved: the initial one, those inside, the last."""
    found = dict(zip(solution.times, solution.states, strict=True))
    return dataclasses.replace(solution, times=tuple(times), states=tuple(found[t] for t in times))
