"""A segment: an interval of time on which one smooth field acts."""

from __future__ import annotations

import copy
import dataclasses
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from decimal import Decimal
from fractions import Fraction
from itertools import pairwise
from numbers import Rational, Real

from torch import Tensor

from solvers.checked import has_numbers
from solvers.errors import ConfigError, shown
from solvers.learned_time import Clock, learned_tensor, with_learned_times
from solvers.transforms import check_not_batched

Field = Callable[[Tensor, Tensor], Tensor]
Map = Callable[[Tensor], Tensor]
Time = int | float | Fraction | Tensor
MOST = Fraction(sys.float_info.max)
"""The longest segment."""


@dataclasses.dataclass(frozen=True)
class Segment:
    """dx/dt = field(t, x) from t0 to t1, smooth on the closed interval. t1 < t0 integrates
    backward.

    - `field(t, x)` gets the time as a 0-dimensional tensor and returns dx/dt in x's shape. It is
      evaluated one ulp inside the ends, on this segment's side of a switch. So fields of several
      segments may be one function that tests `t < switch`. Euler's steps are an exception: they
      evaluate at t0, as a plain loop does
    - `project(x)`, if given, is applied after each accepted step. A Post-LN norm is such a map. It
      may return a buffer that it writes to again, which is copied
    - `enter(x)`, if given, is applied once, before the first step. It puts the state on a manifold

    Times may be ints, floats or fractions, and are kept as exact fractions. So k * Fraction(dt) to
    (k + 1) * Fraction(dt) has the length dt exactly, unlike (k + 1) * dt - k * dt in floats. A
    0-dimensional tensor that requires a gradient is a learned time: `solvers.learned_time`. It is
    kept as it is; `ends` has the exact values. Methods evaluate `acting`, the field with the
    derivatives by learned times.

    Raises ConfigError for times that are not finite or are equal, and for maps that are not
    callable.
    """

    t0: Time
    t1: Time
    field: Field
    project: Map | None = None
    enter: Map | None = None
    # computed once: exact arithmetic is slow compared with a step of a small model
    acting: Field = dataclasses.field(init=False, repr=False)
    clock: Clock | None = dataclasses.field(init=False, repr=False)
    ends: tuple[Fraction, Fraction] = dataclasses.field(init=False, repr=False)
    length: Fraction = dataclasses.field(init=False, repr=False)
    start: float = dataclasses.field(init=False, repr=False)
    end: float = dataclasses.field(init=False, repr=False)
    span: float = dataclasses.field(init=False, repr=False)
    domain: tuple[float, float] = dataclasses.field(init=False, repr=False)
    """The earlier and the later end of this segment, or of the whole of which it is a part."""

    def __post_init__(self) -> None:
        t0 = _exact("t0", self.t0)
        t1 = _exact("t1", self.t1)
        if not callable(self.field):
            raise ConfigError(
                f"a segment's field is {shown(self.field)}: give a function of time and state"
            )
        for name, function in (("project", self.project), ("enter", self.enter)):
            if function is not None and not callable(function):
                raise ConfigError(f"a segment's {name} is {shown(function)}: give a function")
        if t0 == t1:
            raise ConfigError(
                f"a segment from t0 = {float(t0):g} to the same t1 has no length: leave it out"
            )
        if float(t0) == float(t1):
            raise ConfigError(
                f"a segment from t0 = {float(t0)!r} is {float(t1 - t0):.2g} long, and its t1 is the"
                " same float64: let t start at 0, and add the rest in the field, or measure the"
                " time in another unit"
            )
        if abs(t1 - t0) > MOST:
            raise ConfigError(
                f"a segment from t0 = {float(t0):g} to t1 = {float(t1):g} is longer than float64"
                f" counts ({float(MOST):.3g}): measure the time in another unit"
            )
        acting, clock = with_learned_times(self.field, self.t0, self.t1)
        start = float(t0)
        end = float(t1)
        computed = {
            "acting": acting,
            "clock": clock,
            "t0": _kept(self.t0, t0),
            "t1": _kept(self.t1, t1),
            "ends": (t0, t1),
            "length": t1 - t0,
            "start": start,
            "end": end,
            "span": float(t1 - t0),
            "domain": (min(start, end), max(start, end)),
        }
        for name, value in computed.items():
            object.__setattr__(self, name, value)

    @property
    def learned(self) -> bool:
        """Whether t0 or t1 is a learned time. `clock` then maps a time by value to the one that
        depends on them.
        """
        return self.clock is not None

    def entered(self, x: Tensor) -> Tensor:
        """x as it is after `enter`, which gets a copy and may work in place: x is also the caller's
        initial state, or a saved one.
        """
        if self.enter is None:
            return x
        return self.enter(x.clone())

    def part(self, t0: Time, t1: Time, *, first: bool) -> Segment:
        """The part from t0 to t1. Only the `first` part applies `enter`."""
        enter = None
        if first:
            enter = self.enter
        piece = Segment(t0, t1, self.acting, self.project, enter)
        object.__setattr__(piece, "domain", self.domain)
        return piece

    def with_maps(self, **maps: Map | Field) -> Segment:
        """A copy with other maps, by name. An other `acting` replaces the whole field, with what it
        does for learned times; the clock stays.
        """
        changed = copy.copy(self)
        for name, function in maps.items():
            object.__setattr__(changed, name, function)
        return changed

    def step(self, steps: int) -> float:
        """The length of one of `steps` equal steps, rounded once. Negative if the segment runs
        backward.
        """
        if steps == 1:
            return self.span
        return float(self.length / steps)

    def times(self, steps: int) -> Iterator[float]:
        """The ends of `steps` equal steps, t0 first: t0 + length i/steps, rounded once. The last
        one is exactly t1.
        """
        yield self.start
        for i in range(1, steps):
            yield float(self.ends[0] + self.length * Fraction(i, steps))
        yield self.end

    def intervals(self, steps: int) -> Iterable[tuple[float, float]]:
        """The start and end of each of `steps` equal steps."""
        if steps == 1:
            return ((self.start, self.end),)
        return pairwise(self.times(steps))


def check_segments(segments: Sequence[Segment]) -> None:
    """Raises ConfigError unless the segments are a list of at least one, and each starts where the
    previous one ends, to rounding.
    """
    if not isinstance(segments, Sequence) or isinstance(segments, str):
        raise ConfigError(
            f"the segments are a {type(segments).__name__}, which may not be iterable twice: give a"
            " list"
        )
    if not all(isinstance(segment, Segment) for segment in segments):
        raise ConfigError(
            "the segments are not all of type Segment: make them by Segment(t0, t1, field)"
        )
    if not segments:
        raise ConfigError("no segments to solve over: give at least one Segment(t0, t1, field)")
    for k, (before, after) in enumerate(pairwise(segments)):
        gap = abs(before.end - after.start)
        if gap > 1e-9 * max(abs(before.end), abs(before.end - before.start)):
            raise ConfigError(
                f"segment {k} ends at t = {before.end:g} but segment {k + 1} starts at t ="
                f" {after.start:g}: make them meet"
            )


def _kept(time: Time, exact: Fraction) -> Time:
    """The time as a segment keeps it: a learned one as it is, so that a copy with other options has
    its derivative too.
    """
    if learned_tensor(time) is None:
        return exact
    return time


def _exact(name: str, time: object) -> Fraction:
    check_not_batched(f"segment time {name}", time)
    try:
        if isinstance(time, Tensor) and has_numbers(time) and time.dim() == 0:
            time = time.detach().item()
        if not isinstance(time, (Real, Decimal)) or isinstance(time, bool):
            raise TypeError
        if not isinstance(time, Rational):
            time = float(time)
        exact = Fraction(time)
        float(exact)  # raises OverflowError if it is too large
        return exact
    except (TypeError, ValueError, OverflowError):
        raise ConfigError(f"segment time {name} = {shown(time)} is not a finite number") from None
