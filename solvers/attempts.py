"""The attempts of an adaptive method on one segment: which step to try next, and when to give
up.
"""

from __future__ import annotations

import dataclasses
import math

import torch

from solvers.controller import StepSize
from solvers.run import Step, step_end
from solvers.segment import Segment
from solvers.solution import Stats, Status

SHORTEST = 1e-150
"""A step this short does not advance the time even at t = 0."""


@dataclasses.dataclass
class Attempts:
    """The attempts on one segment, of which `most` are allowed: their number, the size of the
    latest one, and the error of the latest result.
    """

    segment: Segment
    step_size: StepSize
    stats: Stats
    most: int
    count: int = 0
    size: float = math.inf
    error: float = 0.0

    def next(self, t: float, dtype: torch.dtype, *, sound: bool) -> tuple[Step, Status | None]:
        """The next step to try from t, and why the solve breaks there, or None.

        `sound` says that the latest error or the slope at t is finite.
        """
        previous_size = self.size
        error_is_finite = math.isfinite(self.error)
        end = self.segment.end
        self.size, ends_the_segment = self.step_size.propose(abs(end - t))
        h = math.copysign(self.size, end - t)
        hardly_advances = False
        if not ends_the_segment:
            hardly_advances = self.size <= max(4 * math.ulp(t), SHORTEST)
            end = step_end(t, h, dtype)
            if end != t:
                h = end - t
        status = None
        if not sound or hardly_advances:
            if error_is_finite:
                status = Status.STEP_UNDERFLOW
            else:
                status = Status.NON_FINITE
        elif not error_is_finite and previous_size <= self.step_size.shortest:
            status = Status.NON_FINITE
        elif self.count == self.most:
            status = Status.TOO_MANY_STEPS
        self.count += 1
        return Step(self.segment, t, end, h), status

    def judge(self, error: float, *, refused: bool = False) -> bool:
        """Whether the latest attempt, with that error, is accepted. Sets the next size, and counts
        what was rejected or forced. A step may be `refused` for other reasons.
        """
        self.error = error
        if refused:
            accepted = self.step_size.judge(self.size, math.inf)
        else:
            accepted = self.step_size.judge(self.size, error)
        if not accepted:
            self.stats.rejected += 1
        elif error > 1:
            self.stats.forced += 1
        return accepted
