"""What a solve returns: the state, how it went and what it cost."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable
from typing import Any

from torch import Tensor

from solvers.tree import State


class Status(enum.Enum):
    """How a solve ended. The value is the sentence that a message starts with."""

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
        """Whether the solve ended where it was asked to: at the end, at an event or at a steady
        state.
        """
        return self in (Status.SUCCESS, Status.EVENT, Status.STEADY)


ADVICE: dict[Status, str] = {
    Status.NON_FINITE: "take a smaller dt or more steps, or a placement with bounded velocities; check x0, the weights and "
    "the field's values there",
    Status.STEP_UNDERFLOW: "the field is singular, not smooth or too stiff there, or the tolerances are below what the dtype "
    "resolves: raise rtol and atol, use float64, or declare the switch as a segment's end",
    Status.TOO_MANY_STEPS: "raise rtol and atol (or max_steps of `StepControl`): a field that needs so many steps is stiff or not "
    "smooth there; a method of fixed steps always gets to the end",
    Status.NOT_SOLVED: "the field is not smooth there, or the steps are too long for it: bound them by max_step of "
    "`StepControl`, take more steps, declare a switch as a segment's end, or use an explicit method",
    Status.PAIR_APART: "the field damps faster than a reversible scheme can follow, or the steps are too coarse: use "
    "gradient='checkpoint', Reversible(coupling=0.9) or less, or smaller steps",
}


@dataclasses.dataclass
class Stats:
    """What a solve cost: field evaluations, accepted and rejected steps; and what is to be known of
    its accuracy.

    `forced` of the accepted steps have a larger error than the tolerances allow, since `min_step`
    let none be shorter. `stiff_at` is the time from which stability and not accuracy bounds the
    steps of an explicit adaptive method (`solvers.stiffness`), or None.
    """

    evaluations: int = 0
    accepted: int = 0
    rejected: int = 0
    forced: int = 0
    stiff_at: float | None = None

    def __add__(self, later: Stats) -> Stats:
        """What two solves cost together, one after the other; stiff from where the first of them
        is.
        """
        return Stats(
            self.evaluations + later.evaluations,
            self.accepted + later.accepted,
            self.rejected + later.rejected,
            self.forced + later.forced,
            later.stiff_at if self.stiff_at is None else self.stiff_at,
        )


@dataclasses.dataclass(frozen=True)
class Solution:
    """The result of `solve`. Its states are built as the initial one: one tensor, or several in
    their structure.

    `x1` is the last state reached, finite or not. `states` are what `save` asked for, with their
    `times`: the initial and last state ("ends"), the initial state and the one at each segment's
    end ("segments"), or at each accepted step's end ("steps"). A solve that broke off keeps what it
    had (with "ends", the start and the state at the start of the segment that broke); `segment` and
    `time` then say where it broke (they are None after success).

    With "curve", `curve(t)` are the states at the times t, a number or a tensor of any shape, whose
    axes come first, from the start to where the solve ended: the method's own interpolation inside
    its steps, which are kept.

    A solve that an event or a steady state ended has its last state there, `segment` and `time` say
    where, and `event` is the event's number, `event_time` its time as a 0-dimensional float64
    tensor that is differentiated as the states are.
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

    @property
    def warnings(self) -> tuple[str, ...]:
        """What is to be known of a solve that got to its end, a sentence each."""
        found = []
        if self.stats.forced:
            found.append(
                f"{self.stats.forced} of {self.stats.accepted} steps have an error above the tolerance, since min_step allowed none "
                "shorter: lower it, or raise rtol and atol"
            )
        if self.stats.stiff_at is not None:
            found.append(
                f"from t = {self.stats.stiff_at:.6g} on stability and not accuracy bounds the steps of this explicit method, which took "
                f"{self.stats.accepted + self.stats.rejected}: the field is stiff there, and an implicit one, as esdirk4, may take fewer"
            )
        return tuple(found)

    @property
    def message(self) -> str:
        """One sentence on how the solve ended: what, where, and what to try."""
        if self.status is Status.SUCCESS:
            return str(self.status.value)
        which = "" if self.event is None else f" (event {self.event})"
        where = f"{self.status.value}{which} in segment {self.segment} at t = {self.time:.6g}"
        return where if self.status.good else f"{where}: {ADVICE[self.status]}"
