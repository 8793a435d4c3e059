"""A segment: an interval of time on which one smooth field acts."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from itertools import pairwise
from numbers import Rational

from torch import Tensor

from solvers.errors import ConfigError

Field = Callable[[Tensor, Tensor], Tensor]
Map = Callable[[Tensor], Tensor]
Time = int | float | Fraction


@dataclasses.dataclass(frozen=True)
class Segment:
    """dx/dt = field(t, x) from t0 to t1, smooth on the closed interval.

    `field(t, x)` gets the time as a 0-dimensional tensor and returns dx/dt in x's shape. `project(x)`, if given, is applied after
    each accepted step (a Post-LN norm is such a map), and `enter(x)` once, before the first step: a state that must start
    on a manifold is put there. t1 < t0 integrates backward.

    Times may be ints, floats or fractions and are kept as exact fractions: k * Fraction(dt) to (k + 1) * Fraction(dt) has the
    length dt to the last bit, which (k + 1) * dt - k * dt in floats has not. Raises ConfigError for times that are not finite
    or are equal.
    """

    t0: Time
    t1: Time
    field: Field
    project: Map | None = None
    enter: Map | None = None

    def __post_init__(self) -> None:
        for name in ("t0", "t1"):
            object.__setattr__(self, name, _exact(name, getattr(self, name)))
        if self.t0 == self.t1:
            raise ConfigError(f"a segment from t0 = {float(self.t0):g} to the same t1 has no length: leave it out")

    @property
    def length(self) -> Fraction:
        """t1 - t0, exact; negative where the segment runs backward."""
        return Fraction(self.t1) - Fraction(self.t0)

    def time(self, step: int, steps: int) -> float:
        """The end of that step out of `steps` equal ones: t0 + (t1 - t0) step/steps, rounded once; exactly t1 for the last."""
        return float(Fraction(self.t0) + self.length * Fraction(step, steps))


def check_chain(segments: Sequence[Segment]) -> None:
    """Raises ConfigError unless there is a segment and each starts where the one before ended (to rounding)."""
    if not segments:
        raise ConfigError("no segments to solve over: give at least one Segment(t0, t1, field)")
    for k, (before, after) in enumerate(pairwise(segments)):
        end, start = float(before.t1), float(after.t0)
        if not math.isclose(end, start, rel_tol=1e-9, abs_tol=1e-9 * abs(float(before.length))):
            raise ConfigError(f"segment {k} ends at t = {end:g} but segment {k + 1} starts at t = {start:g}: make them meet")


def _exact(name: str, time: object) -> Fraction:
    try:
        return Fraction(time if isinstance(time, Rational) else float(time))  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        raise ConfigError(f"segment time {name} = {time!r} is not a finite number") from None
