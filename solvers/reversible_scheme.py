"""The algebraically reversible form of any one-step method (McCallum and Foster, arXiv 2410.11648).

With Psi_h(t, x) what one step of the method adds to x, the scheme carries a pair (y, z), both x0 at the start:

    y1 = lambda y + (1 - lambda) z + Psi_h(t, z)            z1 = z - Psi_{-h}(t1, y1)

Both lines can be solved for what went in, z = z1 + Psi_{-h}(t1, y1) and then y = (y1 - (1 - lambda) z - Psi_h(t, z))/lambda.
y has the method's order.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Protocol

from torch import Tensor

from solvers.method import Method, Pair, Pull
from solvers.run import Run, Step
from solvers.segment import Segment


class Incremental(Method, Protocol):
    """A one-step method that gives its steps away: x1 = x + increment(step, x)."""

    def increment(self, step: Step, x: Tensor, run: Run) -> Tensor:
        """Psi: what one step adds to x, without error estimate and before projection. The step may run backward."""

    def walk(self, segment: Segment, x: Tensor, run: Run, finish: Callable[[Step, Tensor, Tensor], Tensor]) -> Tensor:
        """Goes over the segment in the method's own steps; `finish(step, x, increment)` makes each next x."""


@dataclasses.dataclass(frozen=True)
class ReversibleScheme:
    """The reversible form of a one-step method as a method: `advance` moves y, and the run carries z across segments."""

    method: Incremental
    coupling: float

    @property
    def order(self) -> int:
        """The order of the method it is made of."""
        return self.method.order

    @property
    def adaptive(self) -> bool:
        """Whether it chooses its own steps, by the error estimate of Psi_h(t, z)."""
        return self.method.adaptive

    def advance(self, segment: Segment, x: Tensor, run: Run) -> Tensor:
        """y at the segment's end. Raises Stopped where the method cannot get there."""
        y, z = x, x if run.partner is None else run.partner

        def finish(step: Step, z: Tensor, increment: Tensor) -> Tensor:
            nonlocal y
            y = run.accept(segment, step.end, y + (1 - self.coupling) * (z - y) + increment)
            return z - self.method.increment(back(step), y, run)

        run.partner = self.method.walk(segment, z, run, finish)
        return y

    def undo(self, step: Step, pair: Pair, cotangents: Pair, pull: Pull, run: Run) -> tuple[Pair, Pair]:
        """The pair before the step and (dL/dy, dL/dz) there, from those after it."""
        (y, z), (p, q) = pair, cotangents
        psi, pulled = pull(partial(self.method.increment, back(step), run=run), y, -q)
        z, p = z + psi, p + pulled
        psi, pulled = pull(partial(self.method.increment, step, run=run), z, p)
        y = z + (y - z - psi) / self.coupling
        return (y, z), (self.coupling * p, q + (1 - self.coupling) * p + pulled)


def back(step: Step) -> Step:
    """The same step the other way."""
    return Step(step.segment, step.end, step.start, -step.h)
