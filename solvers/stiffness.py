"""Detects that stability, not accuracy, bounds the steps of an explicit method: the problem is
stiff for it.

The last two stages of a step evaluate the field at nearly one time and at two states. So

    rho = |k_s - k_(s-1)| / |x_s - x_(s-1)|

estimates the size of the Jacobian's leading eigenvalue without an evaluation. On the negative real
axis the method is stable up to h rho = z. Stability bounds the steps that stay near z: they are far
more accurate than requested, or rejected repeatedly. The counts are those of Hairer and Wanner,
Solving ODEs II, IV.2: 15 such steps without 6 others in a row between them.

The same h rho says when a field is not stiff: accuracy bounds steps that are far below z and hardly
ever rejected. A method of low order needs many of them at a tight tolerance, N = O(tol^(-1/p)).
"""

from __future__ import annotations

import dataclasses

STARTED = 50
"""The first accepted steps are not checked: a solve that is over by then costs too little for a
warning.
"""
BOUNDED = 15
"""So many steps that stability bounds make a problem stiff."""
EASY = 6
"""So many other steps in a row begin the count again."""
NEAR = 0.9
"""A step counts from this part of the stability interval on: the controller's steps oscillate about
its end.
"""


FAR = 0.1
"""Accuracy bounds a step below this part of the stability interval."""
SELDOM = 0.1
"""The largest share of rejected steps of a smooth field: where it jumps, about half are."""


@dataclasses.dataclass
class Stiffness:
    """Counts the steps of one solve that stability bounds. `room` is z/(h rho) of the last step:
    how much longer stability would let it be.
    """

    bounded: int = 0
    easy: int = 0
    room: float = 1.0

    def found(self, product: float, interval: float) -> bool:
        """Whether an accepted step with h rho = product reaches the limit of such steps."""
        self.room = 1.0
        if product > 0:
            self.room = interval / product
        if product > NEAR * interval:
            self.bounded += 1
            self.easy = 0
        else:
            self.easy += 1
            if self.easy == EASY:
                self.bounded = 0
        return self.bounded == BOUNDED

    def bounded_by_accuracy(self, accepted: int, rejected: int) -> bool:
        """Whether accuracy alone bounds the present steps: the field is smooth and not stiff."""
        return self.room * FAR > 1 and rejected <= SELDOM * accepted
