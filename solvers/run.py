"""The state of one solve: its request, cost and records, and the step size carried from segment to
segment.
"""

from __future__ import annotations

import cmath
import dataclasses
import math
import weakref
from collections.abc import Callable, Sequence
from itertools import takewhile
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from solvers.changes import (
    CHANGED_VALUE,
    advice_on,
    copy_on_cpu,
    has_changed,
    has_graph,
    is_equal,
    owned,
    owned_state,
    unshared,
    version_of,
)
from solvers.controller import StepSize
from solvers.error_norm import Norm, rms
from solvers.errors import ConfigError
from solvers.increments import Increments
from solvers.segment import Segment
from solvers.solution import Solution, Stats, Status, TightTolerances
from solvers.stiffness import Stiffness

Save = Literal["ends", "segments", "steps", "curve"]

REQUEST = (
    "steps",
    "rtol",
    "atol",
    "max_steps",
    "watch",
    "save",
    "first_step",
    "min_step",
    "max_step",
    "norm",
    "controlled",
)
"""The fields of a `Run` that are its request. The others are results."""


class Stopped(Exception):  # noqa: N818 - a signal inside the package, which `march` turns into a Status
    """A method cannot continue, or an observer ends the solve: the status, time and state there."""

    def __init__(self, status: Status, time: float, x: Tensor):
        super().__init__(status.value)
        self.status = status
        self.time = time
        self.x = x


class Step(NamedTuple):
    """An accepted step: its segment, its start and end, and the signed length that it used."""

    segment: Segment
    start: float
    end: float
    h: float


class Saved(NamedTuple):
    """A saved state, and the number of accepted steps before it."""

    time: float
    x: Tensor
    steps: int


class Accepted(NamedTuple):
    """A step as observers see it: the states at its ends, dx/dt at its start, and the state at a
    time inside it.

    The last two are None for a method that does not provide them.
    """

    step: Step
    before: Tensor
    after: Tensor
    slope: Tensor | None = None
    inside: Callable[[Tensor | float], Tensor] | None = None


Observer = Callable[[Accepted], object]
"""Sees each accepted step. Raises Stopped to end the solve."""


@dataclasses.dataclass
class Run:
    """The request of one solve, as methods read it, and the results that they write.

    - `steps`: for fixed-step methods
    - `rtol`, `atol`: for adaptive methods; numbers, or tensors in the state's shape
    - `first_step`, `min_step`, `max_step`, `max_steps`: bounds of an adaptive method's steps
    - `norm`: measures errors. `controlled` is the shape of the leading entries of a flat state that
      the norm gets; None means all entries
    - `watch`: check each accepted state for non-finite entries; `check`: check the last one only
    - `save`: which states to save
    - `stats`, `saved`: the cost and the saved states
    - `step_size`: of an adaptive method; the next segment continues with it
    - `pending_times`: the times inside the solve whose states are still to be saved, in the order
      of integration
    - `clock`: the times of the segments' ends as tensors. Making them one by one costs an Euler
      step 1%
    - `limits`: for the ends of a segment, the first and last time at which its field may be
      evaluated
    - `trace`: the accepted steps of the package's own methods, which a backward pass repeats
    - `partner`: the second state of a reversible scheme. `apart` is the largest distance of the two
      states over its limit
    - `observers`: see each accepted step
    - `event`: the number of the event that ended the solve, and its time
    - `tight`: what is known of tolerances that ended it
    - `copies`: each value of the field is copied, because it is used after its step, or because the
      field was seen to write to the memory of an earlier value
    - `increments`: records what rounding loses of fixed steps, where that may be much
    """

    steps: int
    rtol: float | Tensor
    atol: float | Tensor
    max_steps: int
    watch: bool = False
    check: bool = True
    save: Save = "ends"
    first_step: float | None = None
    min_step: float = 0.0
    max_step: float = math.inf
    norm: Norm = rms
    controlled: tuple[int, ...] | None = None
    stats: Stats = dataclasses.field(default_factory=lambda: Stats())
    step_size: StepSize | None = None
    stiffness: Stiffness = dataclasses.field(default_factory=lambda: Stiffness())
    partner: Tensor | None = None
    apart: Tensor | None = None
    pending_times: Sequence[float] = ()
    clock: dict[float, Tensor] = dataclasses.field(default_factory=dict)
    limits: dict[tuple[float, float], tuple[float, float]] = dataclasses.field(default_factory=dict)
    trace: list[Step] = dataclasses.field(default_factory=list)
    saved: list[Saved] = dataclasses.field(default_factory=list)
    observers: Sequence[Observer] = ()
    event: tuple[int, Tensor] | None = None
    tight: TightTolerances | None = None
    copies: bool = False
    increments: Increments | None = None
    _last_velocity: tuple[weakref.ref[Tensor], int | None] | None = None
    _is_first_evaluation: bool = True

    def again(self, **changes: Any) -> Run:
        """A new run with the same request, except for the changes."""
        request = {name: getattr(self, name) for name in REQUEST}
        return Run(**{**request, **changes})

    def velocity(
        self, segment: Segment, t: float | Tensor, x: Tensor, *, kept: bool = True
    ) -> Tensor:
        """`evaluated`, counted. A time given as a number is moved inside the segment."""
        self.stats.evaluations += 1
        if not isinstance(t, Tensor):
            low, high = self.inside(segment, x.dtype)
            if t < low:
                t = low
            elif t > high:
                t = high
            t = as_tensor(t, x.dtype)
        return self.evaluated(segment, t, x, kept=kept)

    def evaluated(self, segment: Segment, t: Tensor, x: Tensor, *, kept: bool = True) -> Tensor:
        """field(t, x), not counted. `kept` says that the value is used after the next evaluation.

        Raises ConfigError if it is not like the state, and if the field changed the state or an
        earlier value in place.
        """
        given = unshared(x)
        before = version_of(given)
        copy = None
        if self._is_first_evaluation and given is x:
            copy = copy_on_cpu(given)
        self._is_first_evaluation = False
        try:
            v = segment.acting(t, given)
        except RuntimeError as error:
            advice = advice_on(error)
            if advice is None:
                raise
            raise ConfigError(advice) from error
        check_like("field", v, x)
        if has_changed(given, before) or not is_equal(copy, given):
            raise ConfigError(
                "the field changed its state x in place: compute with a copy, as x.clone(), or with"
                " operations that return new tensors"
            )
        if self._last_velocity is not None:
            reference, version = self._last_velocity
            earlier = reference()
            if earlier is not None and has_changed(earlier, version):
                raise ConfigError(CHANGED_VALUE)
        if self.copies:
            return owned(v)
        if kept:
            v = unshared(v)
            if has_graph(v):
                self._last_velocity = (weakref.ref(v), version_of(v))
        return v

    def start(self, segment: Segment, t: float, x: Tensor) -> Tensor | float:
        """The time at which an Euler step begins. It is not moved inside the segment, except from
        the later end.
        """
        if t >= segment.domain[1]:
            return t
        if t in self.clock:
            return self.clock[t]
        return as_tensor(t, x.dtype)

    def inside(self, segment: Segment, dtype: torch.dtype) -> tuple[float, float]:
        """The first and the last time at which a field may be evaluated: one ulp of the time's type
        inside the segment.

        If no number lies between the ends, these are the ends.
        """
        ends = segment.domain
        if ends not in self.limits:
            earlier, later = (representable(end, dtype) for end in ends)
            low = neighbour(earlier, later, dtype)
            high = neighbour(later, earlier, dtype)
            if low <= high:
                self.limits[ends] = (low, high)
            else:
                self.limits[ends] = ends
        return self.limits[ends]

    def set_clock(self, segments: Sequence[Segment], dtype: torch.dtype) -> None:
        """Makes the tensors of the times at which the segments start and end."""
        times = [segment.start for segment in segments] + [segments[-1].end]
        tensors = torch.tensor(times, dtype=real_type(dtype), device="cpu").unbind()
        self.clock = dict(zip(times, tensors, strict=True))

    def accept(
        self, segment: Segment, t: float, x: Tensor, accepted: Accepted | None = None
    ) -> Tensor:
        """Completes a step: projects its result, counts it, shows it to the observers, and saves it
        with `save="steps"`.
        """
        self.stats.accepted += 1
        if segment.project is not None:
            projected = segment.project(x)  # may work in place: nothing else needs x
            check_like("project", projected, x)
            x = owned_state(projected, x)
        if self.watch and not finite(x):
            raise Stopped(Status.NON_FINITE, t, x)
        if accepted is not None:
            for observer in self.observers:
                observer(accepted._replace(after=x))
        if self.save == "steps":
            self.keep(t, x)
        return x

    def counted(self, x: Tensor) -> Tensor:
        """The entries that the error norm measures."""
        if self.controlled is None:
            return x
        return x[: math.prod(self.controlled)].view(self.controlled)

    def size(self, error: Tensor, *states: Tensor) -> Tensor:
        """The norm of error/(atol + rtol max(abs states)). It is nan where a state is not finite:
        against an infinite one, no error is too large.
        """
        measured = []
        for x in (error, *states):
            entries = self.counted(x)
            if entries.dtype.itemsize < 4:  # tolerances vanish in half precision
                entries = entries.float()
            measured.append(entries)
        largest = measured[1].abs()
        for entries in measured[2:]:
            largest = torch.maximum(largest, entries.abs())
        counted = torch.sub(measured[0], largest, alpha=0)
        return self.norm(counted / (self.atol + self.rtol * largest))

    def measure(self, x: Tensor) -> float:
        """The norm as a number. Waits for the device."""
        return float(self.norm(x))

    def passed(self, start: float, end: float) -> list[float]:
        """The pending times inside a step, which are then no longer pending."""
        if start < end:
            passed = list(takewhile(lambda time: time <= end, self.pending_times))
        else:
            passed = list(takewhile(lambda time: time >= end, self.pending_times))
        self.pending_times = self.pending_times[len(passed) :]
        return passed

    def solution(
        self,
        x: Tensor,
        status: Status = Status.SUCCESS,
        segment: int | None = None,
        time: float | None = None,
    ) -> Solution:
        """The solution that ends in x, with the saved states."""
        event: int | None = None
        event_time: Tensor | None = None
        if self.event is not None:
            event, event_time = self.event
        times = tuple(saved.time for saved in self.saved)
        states = tuple(saved.x for saved in self.saved)
        return Solution(
            x,
            times,
            states,
            status,
            self.stats,
            segment,
            time,
            event,
            event_time,
            tight=self.tight,
        )

    def note_tight_tolerances(self, order: int) -> None:
        """Records that accuracy alone, not the field, bounds the present steps of a method of that
        order, if so.
        """
        stats = self.stats
        if stats.stiff_at is None and self.stiffness.bounded_by_accuracy(
            stats.accepted, stats.rejected
        ):
            self.tight = TightTolerances(order, self.stiffness.room)

    def keep(self, t: float, x: Tensor) -> None:
        """Saves a state for the solution."""
        self.saved.append(Saved(t, x, self.stats.accepted))


def check_like(what: str, y: object, x: Tensor) -> None:
    """Raises ConfigError unless a segment's map returned a tensor of the state's shape, on its
    device, in a type that does not widen it.
    """
    if not isinstance(y, Tensor):
        raise ConfigError(
            f"the {what} returned {type(y).__name__}: {VALUES[what]} must be a tensor of x's shape"
        )
    becomes_the_state = what != "field" and not torch.is_autocast_enabled(x.device.type)
    if y.dtype is not x.dtype and (becomes_the_state or not _may_stand_for(y.dtype, x)):
        raise ConfigError(
            f"the {what} returned {dtype_name(y.dtype)} for a state of {dtype_name(x.dtype)}:"
            " return it as .to(x.dtype), or start from a state of that type"
        )
    if y.shape != x.shape:
        raise ConfigError(
            f"the {what} returned shape {tuple(y.shape)} for a state of shape {tuple(x.shape)}:"
            f" {VALUES[what]} must match x"
        )
    if y.device != x.device:
        raise ConfigError(
            f"the {what} returned a tensor on {y.device} for a state on {x.device}: keep it there"
        )


VALUES = {"field": "dx/dt", "project": "the projected state", "enter": "the state entered with"}
"""What each map of a segment returns."""


def _may_stand_for(dtype: torch.dtype, x: Tensor) -> bool:
    """Whether a map of the state x may return that other type: one that is as real as x, and
    narrower. Under autocast it may also be wider.
    """
    is_of_kind = dtype.is_floating_point or dtype.is_complex
    if not is_of_kind or dtype.is_complex != x.dtype.is_complex:
        return False
    return dtype.itemsize < x.dtype.itemsize or torch.is_autocast_enabled(x.device.type)


def dtype_name(dtype: torch.dtype) -> str:
    """The name without "torch.", such as "float32"."""
    return str(dtype).removeprefix("torch.")


CPU = torch.device("cpu")
"""The device of times. By its name torch finds it anew each time, for 2% of a small step of rk4."""


def as_tensor(t: float, dtype: torch.dtype) -> Tensor:
    """The time as fields get it: 0-dimensional, in the type for a state of that dtype.

    It is on the CPU for all states: a 0-dimensional CPU tensor combines with every device without a
    transfer.
    """
    return torch.scalar_tensor(t, dtype=real_type(dtype), device=CPU)


def real_type(dtype: torch.dtype) -> torch.dtype:
    """The type in which the field of a state of that dtype gets the time, and in which errors are
    compared with tolerances. Half precision cannot resolve either.
    """
    if dtype in (torch.float64, torch.complex128):
        return torch.float64
    return torch.float32


def neighbour(t: float, towards: float, dtype: torch.dtype) -> float:
    """The next time towards another one, in the type in which fields get it. t must be
    representable in it.
    """
    if real_type(dtype) is torch.float64 or t == towards:
        return math.nextafter(t, towards)
    if t == 0:
        return math.copysign(2.0**-149, towards)
    # below a power of two, float32 numbers are half as far apart as above it: both round to the
    # next
    return representable(t + math.copysign(0.6 * _spacing(t), towards - t), dtype)


def representable(t: float, dtype: torch.dtype) -> float:
    """The nearest time that a field gets exactly, so that a step's ends agree with the times of its
    stages.

    Times are float64, but a field of a float32 state gets them in float32; at t = 1e5 the spacing
    is d = 0.004. The rounding moves an error estimate by up to abs(h df/dt) d sum_i abs(b_i -
    embedded_i). The sum is 0.16 for dopri5, 0.39 for bosh3 and 1.2 for tsit5, which then needs five
    times the steps at a tolerance of 1e-4. With rounded ends it needs no more steps than in
    float64. A field that gets the time from its segment's start, with Segment(0, T, ..), loses
    nothing.
    """
    if real_type(dtype) is torch.float64 or t == 0:
        return t
    unit = _spacing(t)
    return round(t / unit) * unit  # to even


def step_end(t: float, h: float, dtype: torch.dtype) -> float:
    """The end of a step of about h from t: `representable` if that at most halves or doubles h.

    A shorter step ends between the times that a field gets exactly. Rounded, it would not advance
    the time at all, or far too much.
    """
    end = t + h
    rounded = representable(end, dtype)
    ahead = math.copysign(1.0, h) * (rounded - t)
    if 0.5 * abs(h) <= ahead <= 2 * abs(h):
        return rounded
    return end


def _spacing(t: float) -> float:
    """The distance from t != 0 to the next larger float32 number: 24 bits, and none below
    2^-149.
    """
    return math.ldexp(1.0, max(math.frexp(t)[1] - 24, -149))


def finite(x: Tensor) -> bool:
    """Whether all entries are finite. Waits for the device."""
    # a non-finite entry makes the sum non-finite; a sum may also overflow by itself
    return cmath.isfinite(x.detach().sum().item()) or bool(torch.isfinite(x).all())
