"""The step-size controller of adaptive methods: proportional-integral, and carried from segment to segment."""

from __future__ import annotations

import dataclasses
import math

SHRINK, GROW = 0.2, 10.0
ACCEPTED, REJECTED = 0.95, 0.9
"""Safety factors of the next step after an accepted and after a rejected one."""
DAMPING = 0.3
"""Weight of the proportional part."""
STRETCH = 1.08
"""How much a step may exceed the proposal to reach a segment's end: the safety factors leave that room, and it saves a step."""


@dataclasses.dataclass
class StepController:
    """h_next = h * clip(0.95 err^(-1/q) * min(1, err_prev/err)^(0.3/q), 1, 10) after a step with err <= 1.

    `err` is the RMS of the error estimate over atol + rtol max(abs x, abs x1); with err > 1 the step is rejected and repeated
    with h * max(0.2, 0.9 err^(-1/q)). q is the order of the error estimate plus one. The proportional part holds back while
    errors grow. A switch of field does not reset the controller: neighbouring segments of a model ask for similar steps, and a
    rejection now and then costs less than restarting every time.
    """

    q: int
    step: float
    error: float = 1.0

    def propose(self, remaining: float) -> tuple[float, bool]:
        """The next step's size, and whether it ends the segment. The last two steps are equal, so that no sliver is left."""
        pieces = max(1, math.ceil(remaining / (STRETCH * self.step)))
        return (remaining / pieces if pieces <= 2 else self.step), pieces == 1

    def judge(self, size: float, error: float) -> bool:
        """Whether a step of that size with that error is accepted; sets the next proposal."""
        if not error <= 1:  # a nan is no good error
            self.step = size * (max(SHRINK, REJECTED * error ** (-1 / self.q)) if math.isfinite(error) else SHRINK)
            return False
        error = max(error, 1e-10)
        factor = ACCEPTED * error ** (-1 / self.q) * min(1.0, self.error / error) ** (DAMPING / self.q)
        # a step cut short by its segment's end says nothing against the longer one that was proposed
        self.step = max(self.step, size * min(GROW, factor))
        self.error = error
        return True
