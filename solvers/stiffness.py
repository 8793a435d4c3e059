"""Whether stability and not accuracy bounds the steps of an explicit method: then the problem is
stiff for it.

The last two stages of a step are values of the field at nearly one time and at two states, so that

    rho = |k_s - k_(s-1)| / |x_s - x_(s-1)|

is about the size of the Jacobian's leading eigenvalue, at no evaluation. On the negative real axis
the method is stable up to h rho = z. Steps that stay there, by far more accurate than asked for or
rejected again and again, are bounded by stability (Hairer and Wanner, Solving ODEs II, IV.2, whose
counts these are: 15 such steps without 6 others in a row between them).
"""

from __future__ import annotations

import dataclasses

STARTED = 50
"""So many accepted steps are not looked at: a solve that is over by then costs too little to be
warned of.
"""
BOUNDED, EASY = 15, 6
NEAR = 0.9
"""From which part of the stability interval on a step counts: the controller's steps go to and fro
about its end.
"""


@dataclasses.dataclass
class Stiffness:
    """Counts the steps of one solve that are as long as stability lets them be."""

    bounded: int = 0
    easy: int = 0

    def found(self, product: float, interval: float) -> bool:
        """Whether an accepted step with h rho = product is the one too many."""
        if product > NEAR * interval:
            self.bounded, self.easy = self.bounded + 1, 0
        else:
            self.easy += 1
            if self.easy == EASY:
                self.bounded = 0
        return self.bounded == BOUNDED
