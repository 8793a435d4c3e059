"""The result of a solve: its states, its status and its cost."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable
from typing import Any

from torch import Tensor

from solvers.tree import State


class Status(enum.Enum):
    """How a solve ended. A message starts with the value."""

    SUCCESS = "reached the end"
    NON_FINITE = "the state became non-finite"
    STEP_UNDERFLOW = "the step became too small to advance the time"
    TOO_MANY_STEPS = "the step limit was reached"
    PAIR_APART = "the two states of the reversible scheme drifted apart"
    NOT_SOLVED = "Newton's method did not find a stage of an implicit step"
    EVENT = "an event ended the solve"
    STEADY = "a steady state was reached"

    @property
    def good(self) -> bool:
        """Whether the solve ended at the end, at an event or at a steady state."""
        return self in (Status.SUCCESS, Status.EVENT, Status.STEADY)


ADVICE: dict[Status, str] = {
    Status.NON_FINITE: (
        "take a smaller dt or more steps, or a placement with bounded velocities; check x0, the"
        " weights and the field's values there"
    ),
    Status.STEP_UNDERFLOW: (
        "the field is singular, not smooth or too stiff there, or the tolerances are below what the"
        " dtype resolves: raise rtol and atol, use float64, or declare the switch as a"
        " segment's end"
    ),
    Status.TOO_MANY_STEPS: (
        "raise rtol and atol (or max_steps of `StepControl`): a field that needs so many steps is"
        " stiff or not smooth there, or the tolerances are tight for the method's order; a method"
        " of fixed steps always gets to the end"
    ),
    Status.NOT_SOLVED: (
        "the field is not smooth there, or the steps are too long for it: bound them by max_step of"
        " `StepControl`, take more steps, declare a switch as a segment's end, or use an explicit"
        " method"
    ),
    Status.PAIR_APART: (
        "the field damps faster than a reversible scheme can follow, or the steps are too coarse:"
        " use gradient='checkpoint', Reversible(coupling=0.9) or less, or smaller steps"
    ),
}


STIFF_ADVICE = (
    "the field is stiff there, and stability bounds the steps of this explicit method: an implicit"
    " method, as esdirk4, may take fewer; or raise max_steps of `StepControl`"
)


@dataclasses.dataclass
class Stats:
    """The cost of a solve: field evaluations, accepted and rejected steps.

    `forced` counts accepted steps whose error is larger than the tolerances allow, because
    `min_step` allowed no shorter step. `stiff_at` is the time from which stability, not accuracy,
    bounds the steps of an explicit adaptive method (`solvers.stiffness`), or None.
    """

    evaluations: int = 0
    accepted: int = 0
    rejected: int = 0
    forced: int = 0
    stiff_at: float | None = None

    def __add__(self, later: Stats) -> Stats:
        """The cost of two solves, one after the other. `stiff_at` is the first one found."""
        stiff_at = self.stiff_at
        if stiff_at is None:
            stiff_at = later.stiff_at
        return Stats(
            self.evaluations + later.evaluations,
            self.accepted + later.accepted,
            self.rejected + later.rejected,
            self.forced + later.forced,
            stiff_at,
        )


def forced_steps(forced: int, accepted: int) -> str:
    """The warning of steps that `min_step` forced."""
    return (
        f"{forced} of {accepted} steps have an error above the tolerance, because min_step allowed"
        " no shorter ones: lower it, or raise rtol and atol"
    )


HIGH = 5
"""The order from which no other method takes far longer steps."""


@dataclasses.dataclass(frozen=True)
class TightTolerances:
    """Tolerances that need more steps than a solve may take, of a smooth field that is not stiff.

    - `order`: that of the method
    - `room`: how many times longer stability would let the steps be
    """

    order: int
    room: float

    @property
    def advice(self) -> str:
        """What to change, in words."""
        choices = "raise rtol and atol (or max_steps of `StepControl`)"
        if self.order < HIGH:
            choices += ", or choose a method of higher order, as tsit5"
        return (
            f"the tolerances are tight for a method of order {self.order}, and the field is not"
            f" stiff (stability allows steps {self.room:.2g} times as long): {choices}"
        )


@dataclasses.dataclass(frozen=True)
class Solution:
    """The result of `solve`. Its states have the structure of the initial one: one tensor, or
    several.

    - `x1`: the last state reached, finite or not
    - `states`: the states that `save` selects, at `times`. "ends": the initial and the last state.
      "segments": the initial state and the state at each segment's end. "steps": the same at each
      accepted step's end
    - `segment`, `time`: where the solve broke, or where an event or a steady state ended it. None
      after success
    - `event`, `event_time`: the number of the event that ended the solve, and its time as a
      0-dimensional float64 tensor. Gradients flow through it as through the states
    - `tight`: why the step limit was reached, if the tolerances alone are the reason
    - `too_short`: what to do about the segment in which the step became too small, if it has too
      few times for steps; else ""
    - `unresolved`: the warnings of steps that the types of state and time do not resolve
    - `curve(t)`, with save="curve": the states at the times t, a number or a tensor of any shape.
      The axes of t come first. The method's own interpolation gives them, from its steps, which the
      solution keeps

    A solve that broke holds the states up to there. With "ends" these are the initial state and the
    state at the start of the segment that broke.
    """

    x1: State
    times: tuple[float, ...]
    states: tuple[State, ...]
    status: Status
    stats: Stats
    segment: int | None = None
    time: float | None = None
    event: int | None = None
    event_time: Tensor | None = None
    curve: Callable[[Any], State] | None = None
    tight: TightTolerances | None = None
    unresolved: tuple[str, ...] = ()
    too_short: str = ""

    @property
    def warnings(self) -> tuple[str, ...]:
        """One sentence for each problem of a solve that reached its end."""
        sentences = []
        if self.stats.forced > 0:
            sentences.append(forced_steps(self.stats.forced, self.stats.accepted))
        if self.stats.stiff_at is not None:
            sentences.append(
                f"from t = {self.stats.stiff_at:.6g} on, stability and not accuracy bounds the"
                " steps of this explicit method, which took"
                f" {self.stats.accepted + self.stats.rejected}: the field is stiff there; an"
                " implicit method, as esdirk4, may take fewer"
            )
        return (*sentences, *self.unresolved)

    @property
    def message(self) -> str:
        """One sentence on how the solve ended: what happened, where, and what to try."""
        if self.status is Status.SUCCESS:
            return str(self.status.value)
        ending = str(self.status.value)
        if self.event is not None:
            ending += f" (event {self.event})"
        ending += f" in segment {self.segment} at t = {self.time:.6g}"
        if self.status.good:
            return ending
        if self.status is Status.TOO_MANY_STEPS:
            if self.tight is not None:
                return f"{ending}: {self.tight.advice}"
            if self.stats.stiff_at is not None:
                return f"{ending}: {STIFF_ADVICE}"
        return f"{ending}: {self.too_short or ADVICE[self.status]}"
