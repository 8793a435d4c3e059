"""The algebraically reversible form of any one-step method (McCallum and Foster, arXiv 2410.11648).

With Psi_h(t, x) what one step of the method adds to x, the scheme carries a pair (y, z), both x0 at
the start:

    y1 = lambda y + (1 - lambda) z + Psi_h(t, z)            z1 = z - Psi_{-h}(t1, y1)

Both lines can be inverted: z = z1 + Psi_{-h}(t1, y1) and then y = (y1 - (1 - lambda) z - Psi_h(t,
z))/lambda. y has the method's order.

**Stability.** For x' = a x and w = a h the method multiplies x by R(w), and the scheme multiplies
the pair (y, z) by the matrix

    [      lambda                R(w) - lambda       ]        Q = R(-w) - 1
    [ -lambda Q        1 - Q (R(w) - lambda) ]

with determinant lambda and trace tr = 1 + lambda - Q (R(w) - lambda). Both eigenvalues lie inside
the unit circle if |tr - lambda conj(tr)| < 1 - lambda^2. On the real axis this is 0 < Q (R(w) -
lambda) < 2 (1 + lambda). So decay needs R(w) > lambda: a step may not damp by more than lambda. One
eigenvalue is near R(w); the other, lambda/R(w), is the growth of y - z.

**No scheme of this kind both damps and inverts accurately.** The determinant is lambda whatever the
field, so the backward pass magnifies rounding errors by 1/lambda a step. If the field damps by
exp(-a T) in all, a stable forward pass has lambda^N < exp(-a T). The backward pass then magnifies
rounding errors by more than exp(a T). A smaller lambda only moves the limit. Over x' = -x on [0,
20], rk4 with 100 steps gives 178 with lambda = 0.99, 1.2e-2 with 0.9 and 2.05e-9 with 0.7 (exact
2.06e-9); 0.7^100 is 3e-16. In float32, whose rounding is 6e-8, 1,000 steps with lambda = 0.99
magnify it to 1e-3 before any damping of the field. The same argument holds for reversible Heun
(Kidger et al. 2021) and MALI (Zhuang et al. 2021). Therefore the forward pass checks |y - z|, and
the backward pass checks the initial state.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from solvers.capture import aside
from solvers.checked import checked
from solvers.method import Method, Pair, Pull
from solvers.run import Run, Step, Stopped
from solvers.segment import Segment
from solvers.solution import Status

TOLERANCES_APART = 10.0
"""The largest |y - z| in an adaptive solve, in tolerances: the solve's error is about as large,
amplified by the field.
"""
PART_APART = 0.5
"""The largest |y - z| over the state or its last step, for several fixed steps in a segment, where
y and z both approximate the ODE's state.
"""
MOST_APART = 2.0
"""The same for a single step, where the pair may be a discrete model of its own: a growing mode has
|y - z| above 2 |y|, with z near -1.3 y.
"""
REFUSALS = 3
"""The most attempts in a row, each shorter, that leave y and z too far apart."""
REFUSALS_IN_SEGMENT = 100
"""The most such attempts in a segment."""

Finish = Callable[[Step, Tensor, Tensor], Tensor | None]
"""(step, x, increment) -> the next x, or None to ask an adaptive method for a shorter step."""


class Incremental(Method, Protocol):
    """A one-step method that also returns its steps: x1 = x + increment(step, x)."""

    def increment(self, step: Step, x: Tensor, run: Run) -> Tensor:
        """Psi: what one step adds to x, without error estimate and before projection. The step may
        run backward.
        """

    def walk(self, segment: Segment, x: Tensor, run: Run, finish: Finish) -> Tensor:
        """Integrates over the segment in the method's own steps. `finish(step, x, increment)`
        returns each next x.
        """


@checked
@dataclasses.dataclass(frozen=True)
class ReversibleScheme:
    """The reversible form of a one-step method, as a method: `advance` moves y, and the run carries
    z across segments.

    Adaptive steps keep |y - z| within 10 tolerances, in the norm of the error. With fixed steps,
    `run.apart` is the RMS of y - z over that of y or of the last step, over its limit. Above 1 the
    solve has failed.
    """

    method: Incremental
    coupling: float

    @property
    def order(self) -> int:
        """The order of the plain method."""
        return self.method.order

    @property
    def adaptive(self) -> bool:
        """Whether it chooses its own steps, by the error estimate of Psi_h(t, z)."""
        return self.method.adaptive

    def advance(self, segment: Segment, x: Tensor, run: Run) -> Tensor:
        """y at the segment's end. Raises Stopped if the method cannot get there, or if y and z are
        too far apart.
        """
        y = x
        z = x
        if run.partner is not None:
            z = run.partner
        refusals = 0
        refusals_in_segment = 0

        def finish(step: Step, z: Tensor, increment: Tensor) -> Tensor | None:
            nonlocal y, refusals, refusals_in_segment
            y1 = y + (1 - self.coupling) * (z - y) + increment
            z1 = z - self.method.increment(back(step), y1, run)
            if self._apart(y1, z1, increment, run):
                refusals += 1
                refusals_in_segment += 1
                too_many = refusals == REFUSALS or refusals_in_segment == REFUSALS_IN_SEGMENT
                if too_many or not self.adaptive:
                    raise Stopped(Status.PAIR_APART, step.start, y)
                return None
            refusals = 0
            y = run.accept(segment, step.end, y1)
            return z1

        run.partner = self.method.walk(segment, z, run, finish)
        return y

    def _apart(self, y: Tensor, z: Tensor, increment: Tensor, run: Run) -> bool:
        """Whether the pair is too far apart to continue. Fixed steps check at the end, since each
        check waits for the device.
        """
        if self.adaptive:
            with torch.no_grad():
                distance = float(run.size(y - z, y, z))
            return math.isfinite(distance) and distance > TOLERANCES_APART
        length = torch.linalg.vector_norm
        limit = MOST_APART
        if run.steps > 1:
            limit = PART_APART
        with aside(), torch.no_grad():
            apart = length(y - z) / (limit * torch.maximum(length(y), length(increment)))
            if run.apart is None:
                run.apart = apart
            else:
                run.apart = torch.fmax(run.apart, apart)
        return run.watch and bool(apart > 1)

    def step_back(
        self, step: Step, pair: Pair, cotangents: Pair, pull: Pull, run: Run
    ) -> tuple[Pair, Pair]:
        """The pair before the step and (dL/dy, dL/dz) there, from those after it."""
        y, z = pair
        p, q = cotangents
        psi, pulled = pull(partial(self.method.increment, back(step), run=run), y, -q)
        z = z + psi
        p = p + pulled
        psi, pulled = pull(partial(self.method.increment, step, run=run), z, p)
        y = z + (y - z - psi) / self.coupling
        return (y, z), (self.coupling * p, q + (1 - self.coupling) * p + pulled)


def back(step: Step) -> Step:
    """The step in the other direction."""
    return Step(step.segment, step.end, step.start, -step.h)
