"""The step-size controller of adaptive methods: proportional-integral, and carried from segment to segment."""

from __future__ import annotations

import dataclasses
import math

SAFETY, SHRINK, GROW = 0.9, 0.2, 10.0
STRETCH = 1.05
"""How much a step may exceed the proposal to reach a segment's end: the safety factor leaves that room, and it saves a step."""


@dataclasses.dataclass
class StepController:
    """h_next = h * safety * err^-(1/q - 0.75 beta) * err_prev^beta, beta = 0.2/q, factor within [0.2, 10] (Hairer, Wanner, IV.2).

    `err` is the RMS of the error estimate over atol + rtol max(abs x, abs x1): a step is accepted at err <= 1. q is the order of
    the error estimate plus one. A switch of field does not reset the controller: neighbouring segments of a model ask for
    similar steps, and a rejection costs less than restarting every time.
    """

    q: int
    step: float
    error: float = 1.0

    def propose(self, remaining: float) -> tuple[float, bool]:
        """The next step's size, and whether it ends the segment. What remains is cut evenly, so that no sliver is left."""
        pieces = max(1, math.ceil(remaining / (STRETCH * self.step)))
        return remaining / pieces, pieces == 1

    def judge(self, size: float, error: float) -> bool:
        """Whether a step of that size with that error is accepted; sets the next proposal."""
        if not error <= 1:  # a nan is no good error
            factor = max(SHRINK, SAFETY * error ** (-1 / self.q)) if math.isfinite(error) else SHRINK
            self.step = size * min(factor, 1.0)
            return False
        beta = 0.2 / self.q
        error = max(error, 1e-10)
        factor = SAFETY * error ** (0.75 * beta - 1 / self.q) * self.error**beta
        factor = min(GROW, max(SHRINK, factor))
        # a step cut short by its segment's end says nothing against the longer one that was proposed
        self.step = max(size * factor, self.step if factor >= 1 else 0.0)
        self.error = max(error, 1e-4)
        return True
