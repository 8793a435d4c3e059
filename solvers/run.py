"""The state of one solve as it goes from segment to segment: request, cost, records and the step
carried along.
"""

from __future__ import annotations

import cmath
import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from solvers.controller import StepSize
from solvers.error_norm import Norm, rms
from solvers.errors import ConfigError
from solvers.segment import Segment
from solvers.solution import Stats, Status
from solvers.stiffness import Stiffness

Save = Literal["ends", "segments", "steps", "curve"]

TIME_TYPES = {torch.float64: torch.float64, torch.complex128: torch.float64}
"""The type in which a field gets the time, by the state's: else float32, since half precision
cannot tell steps apart.
"""


REQUEST = ("steps", "rtol", "atol", "max_steps", "watch", "save", "first_step", "min_step", "max_step", "norm", "controlled")
"""What of a run is asked for; the rest is what it found."""


class Stopped(Exception):  # noqa: N818 - a signal inside the package, turned into a Status before anybody sees it
    """A method cannot go on: the reason, the time and the state at which it stopped."""

    def __init__(self, status: Status, time: float, x: Tensor):
        super().__init__(status.value)
        self.status, self.time, self.x = status, time, x


class Step(NamedTuple):
    """An accepted step: the segment it lies in, its start and end, and its signed length as it was
    used.
    """

    segment: Segment
    start: float
    end: float
    h: float


class Saved(NamedTuple):
    """A state that was asked for, and how many accepted steps lead to it."""

    time: float
    x: Tensor
    steps: int


class Accepted(NamedTuple):
    """A step as those see it who look on: the states at its ends, dx/dt at its start, and the state
    at a time inside it.

    The last two are None of a method that does not tell them.
    """

    step: Step
    before: Tensor
    after: Tensor
    slope: Tensor | None = None
    inside: Callable[[Tensor], Tensor] | None = None


Observer = Callable[[Accepted], None]
"""Looks on at every accepted step; raises Stopped to end the solve."""


@dataclasses.dataclass
class Run:
    """What every method needs to know of the solve it serves, and what it reports back.

    `steps` is for fixed-step methods, `rtol` and `atol` for adaptive ones: numbers, or tensors in
    the state's shape. `step_size` outlives a segment: an adaptive method takes the step it had
    reached into the next one. With `watch`, each accepted state is checked for non-finite entries,
    else with `check` the last one. `wanted` are the times inside at which states are asked for, in
    the order in which they are passed. `clock` has the times that a solve is sure to need as
    tensors, made at once: one by one they cost an Euler step 1%. `trace` holds the accepted steps
    of the package's own methods, which a backward pass goes through again. `partner` is the second
    state of a reversible scheme, `apart` how far the two were from each other at worst, over what
    is allowed. `first_step`, `min_step` and `max_step` bound an adaptive method's steps. `norm`
    measures errors; `controlled` is the shape of the leading entries of a flat state that it is
    given, or None for all of it. `observers` look on at every accepted step of one run, and `event`
    is the number of the event that ended it and its time.
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
    wanted: Sequence[float] = ()
    clock: dict[float, Tensor] = dataclasses.field(default_factory=dict)
    limits: dict[tuple[float, float], tuple[float, float]] = dataclasses.field(default_factory=dict)
    trace: list[Step] = dataclasses.field(default_factory=list)
    saved: list[Saved] = dataclasses.field(default_factory=list)
    observers: Sequence[Observer] = ()
    event: tuple[int, Tensor] | None = None

    def again(self, **changes: Any) -> Run:
        """A fresh run with the same request, but for the changes."""
        return Run(**{**{name: getattr(self, name) for name in REQUEST}, **changes})

    def velocity(self, segment: Segment, t: float | Tensor, x: Tensor) -> Tensor:
        """field(t, x), counted; ConfigError where it is not like the state. A time that is a number
        is moved inside the segment.
        """
        self.stats.evaluations += 1
        if not isinstance(t, Tensor):
            low, high = self.inside(segment, x.dtype)
            t = as_tensor(low if t < low else high if t > high else t, x.dtype)
        v = segment.field(t, x)
        check_like("field", v, x)
        return v

    def start(self, segment: Segment, t: float, x: Tensor) -> Tensor | float:
        """The time at which an Euler step begins: as it is, unless it is a segment's later end."""
        assert segment.domain is not None, "every segment knows it"
        if t >= segment.domain[1]:
            return t
        return self.clock[t] if t in self.clock else as_tensor(t, x.dtype)

    def inside(self, segment: Segment, dtype: torch.dtype) -> tuple[float, float]:
        """The first and the last time at which a field may be evaluated: one ulp of the time's type
        inside the segment.

        Where no number lies between the ends, these.
        """
        ends = segment.domain
        assert ends is not None, "every segment knows it"
        if ends not in self.limits:
            low, high = (representable(end, dtype) for end in ends)
            inner = neighbour(low, high, dtype), neighbour(high, low, dtype)
            self.limits[ends] = inner if inner[0] <= inner[1] else ends
        return self.limits[ends]

    def set_clock(self, segments: Sequence[Segment], dtype: torch.dtype) -> None:
        """Makes the times at which segments start and end, for a state of that type."""
        times = [segment.start for segment in segments] + [segments[-1].end]
        self.clock = dict(zip(times, as_tensors(times, dtype), strict=True))

    def accept(self, segment: Segment, t: float, x: Tensor, seen: Accepted | None = None) -> Tensor:
        """Takes the step's result: projects it, counts it, shows it to those who look on, and
        records it if asked to.
        """
        self.stats.accepted += 1
        if segment.project is not None:
            x, before = segment.project(x), x
            check_like("project", x, before)
        if self.watch and not finite(x):
            raise Stopped(Status.NON_FINITE, t, x)
        if seen is not None:
            for observer in self.observers:
                observer(seen._replace(after=x))
        if self.save == "steps":
            self.keep(t, x)
        return x

    def counted(self, x: Tensor) -> Tensor:
        """The entries that enter the error norm."""
        return x if self.controlled is None else x[: math.prod(self.controlled)].view(self.controlled)

    def size(self, error: Tensor, *states: Tensor) -> float:
        """The norm of an error over what the tolerances allow for these states, atol + rtol max(abs
        states).
        """
        # tolerances vanish in half precision
        counted = [self.counted(x).float() if x.dtype.itemsize < 4 else self.counted(x) for x in (error, *states)]
        largest = functools.reduce(torch.maximum, (x.abs() for x in counted[1:]))
        return self.measure(counted[0] / (self.atol + self.rtol * largest))

    def measure(self, x: Tensor) -> float:
        """The norm as a number. Waits for the device."""
        return float(self.norm(x))

    def passed(self, start: float, end: float) -> list[float]:
        """The wanted times of a step that are not served yet."""
        served = 0
        while served < len(self.wanted) and (self.wanted[served] <= end if start < end else self.wanted[served] >= end):
            served += 1
        found, self.wanted = list(self.wanted[:served]), self.wanted[served:]
        return found

    def keep(self, t: float, x: Tensor) -> None:
        """Saves a state for the solution."""
        self.saved.append(Saved(t, x, self.stats.accepted))


def check_like(what: str, y: object, x: Tensor) -> None:
    """Raises ConfigError unless what a map of a segment returned is a tensor like the state, of a
    type that does not widen it.
    """
    if not isinstance(y, Tensor):
        raise ConfigError(f"the {what} returned {type(y).__name__}: {WANTED[what]} must be a tensor of x's shape")
    if y.dtype is not x.dtype and not (
        (y.dtype.is_floating_point or y.dtype.is_complex)
        and y.dtype.is_complex == x.dtype.is_complex
        and (y.dtype.itemsize < x.dtype.itemsize or torch.is_autocast_enabled(x.device.type))
    ):
        raise ConfigError(
            f"the {what} returned {dtype_name(y.dtype)} for a state of {dtype_name(x.dtype)}: return it as .to(x.dtype), or start from a "
            "state of that type"
        )
    if y.shape != x.shape:
        raise ConfigError(
            f"the {what} returned shape {tuple(y.shape)} for a state of shape {tuple(x.shape)}: {WANTED[what]} must match x"
        )
    if y.device != x.device:
        raise ConfigError(f"the {what} returned a tensor on {y.device} for a state on {x.device}: keep it there")


WANTED = {"field": "dx/dt", "project": "the projected state", "enter": "the state entered with"}


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def as_tensor(t: float, dtype: torch.dtype) -> Tensor:
    """A time as fields get it: 0-dimensional, for a state of that type.

    On the CPU whatever the state's device: such a tensor mixes with all of them and costs no
    transfer.
    """
    return torch.scalar_tensor(t, dtype=time_type(dtype), device="cpu")


def as_tensors(times: Sequence[float], dtype: torch.dtype) -> Sequence[Tensor]:
    """The same of several, made at once."""
    return torch.tensor(times, dtype=time_type(dtype), device="cpu").unbind()


def time_type(dtype: torch.dtype) -> torch.dtype:
    """The type in which a field of a state of that type gets the time."""
    return TIME_TYPES.get(dtype, torch.float32)


def neighbour(t: float, towards: float, dtype: torch.dtype) -> float:
    """The next time on the way there that a field of a state of that type can be told, after one
    that it can be told itself.
    """
    if time_type(dtype) is torch.float64 or t == towards:
        return math.nextafter(t, towards)
    up = towards > t
    if t == 0:
        return math.copysign(2.0**-149, towards)
    # of the numbers with 24 bits, those nearer to zero than a power of two are half as far apart
    mantissa, exponent = math.frexp(t)
    inward = (mantissa > 0) != up
    return t + math.copysign(math.ldexp(1.0, max(exponent - 24 - (inward and abs(mantissa) == 0.5), -149)), towards - t)


def representable(t: float, dtype: torch.dtype) -> float:
    """The nearest time that a field can be told exactly: a step to another one begins and ends
    beside the times of its stages.

    Times are carried in float64, but a field of a float32 state is told them in float32, at t = 1e5
    to d = 0.004. That moves an error estimate by up to abs(h df/dt) d sum_i abs(b_i - embedded_i),
    a sum of 0.16 for dopri5, 0.39 for bosh3 and 1.2 for tsit5, which therefore takes five times the
    steps there at a tolerance of 1e-4. With ends that are not rounded it takes as many. A field
    that knows the time from its segment's start, on Segment(0, T, ..), loses nothing.
    """
    if time_type(dtype) is torch.float64 or t == 0:
        return t
    # float32 has 24 bits, and no number below 2^-149; rounding is to even
    unit = math.ldexp(1.0, max(math.frexp(t)[1] - 24, -149))
    return round(t / unit) * unit


def finite(x: Tensor) -> bool:
    """Whether all entries are finite. Waits for the device."""
    # one that is not makes the sum so; a sum that overflows by itself is looked at again
    return cmath.isfinite(x.detach().sum().item()) or bool(torch.isfinite(x).all())
