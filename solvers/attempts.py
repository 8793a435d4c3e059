"""The attempts of an adaptive method on one segment: which step to try next, and when to give
up.
"""

from __future__ import annotations

import dataclasses
import math

import torch

from solvers.controller import StepSize
from solvers.run import Step, representable
from solvers.segment import Segment
from solvers.solution import Stats, Status

SHORTEST = 1e-150
"""A step this short does not advance the time even at t = 0."""


@dataclasses.dataclass
class Attempts:
    """The number of attempts, the size of the latest one, and the error of the latest result."""

    segment: Segment
    step_size: StepSize
    stats: Stats
    most: int
    count: int = 0
    size: float = math.inf
    error: float = 0.0

    def next(self, t: float, dtype: torch.dtype, sound: bool) -> tuple[Step, Status | None]:
        """The next step to try from t, and why the solve breaks there, or None.

        `sound` says that the latest error or the slope at t is finite.
        """
        before = self.size
        end = self.segment.end
        finite = math.isfinite(self.error)
        self.size, last = self.step_size.propose(abs(end - t))
        h = math.copysign(self.size, end - t)
        if not last and (end := representable(t + h, dtype)) != t:
            h = end - t
        status = None
        if not sound or (
            not last and self.size <= max(4 * math.ulp(t), SHORTEST)
        ):  # the time hardly advances
            if finite:
                status = Status.STEP_UNDERFLOW
            else:
                status = Status.NON_FINITE
        elif not finite and before <= self.step_size.shortest:
            status = Status.NON_FINITE
        elif self.count == self.most:
            status = Status.TOO_MANY_STEPS
        self.count += 1
        return Step(self.segment, t, end, h), status

    def judge(self, error: float, refused: bool = False) -> bool:
        """Whether the latest attempt, with that error, is accepted. Sets the next size, and counts
        what was rejected or forced. A step may be `refused` for other reasons.
        """
        self.error = error
        good = self.step_size.judge(self.size, math.inf if refused else error)
        self.stats.rejected += not good
        self.stats.forced += good and error > 1
        return good
