"""The state of one solve as it goes from segment to segment: request, cost, records and the step carried along."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from solvers.controller import StepSize
from solvers.errors import ConfigError
from solvers.segment import Segment
from solvers.solution import Stats, Status

Save = Literal["ends", "segments", "steps"]

TIME_TYPES = frozenset({torch.float32, torch.float64})
"""A field gets the time in the state's type if it is one of these, else in float32: half precision cannot tell steps apart."""


class Stopped(Exception):  # noqa: N818 - a signal inside the package, turned into a Status before anybody sees it
    """A method cannot go on: the reason, the time and the state at which it stopped."""

    def __init__(self, status: Status, time: float, x: Tensor):
        super().__init__(status.value)
        self.status, self.time, self.x = status, time, x


class Step(NamedTuple):
    """An accepted step: the segment it lies in, its start and end, and its signed length as it was used."""

    segment: Segment
    start: float
    end: float
    h: float


class Saved(NamedTuple):
    """A state that was asked for, and how many accepted steps lead to it."""

    time: float
    x: Tensor
    steps: int


@dataclasses.dataclass
class Run:
    """What every method needs to know of the solve it serves, and what it reports back.

    `steps` is for fixed-step methods, `rtol` and `atol` for adaptive ones. `step_size` outlives a segment: an adaptive method
    takes the step it had reached into the next one. With `watch`, each accepted state is checked for non-finite entries.
    `clock` has the times that a solve is sure to need as tensors, made at once: one by one they cost an Euler step 1%.
    `trace` holds the accepted steps of the package's own methods, which a backward pass goes through again. `partner` is the
    second state of a reversible scheme, `apart` how far the two were from each other at worst, over what is allowed.
    `controlled` limits the error norm to that many leading entries of a flat state.
    """

    steps: int
    rtol: float
    atol: float
    max_steps: int
    watch: bool = False
    save: Save = "ends"
    controlled: int | None = None
    stats: Stats = dataclasses.field(default_factory=Stats)
    step_size: StepSize | None = None
    partner: Tensor | None = None
    apart: Tensor | None = None
    clock: dict[float, Tensor] = dataclasses.field(default_factory=dict)
    trace: list[Step] = dataclasses.field(default_factory=list)
    saved: list[Saved] = dataclasses.field(default_factory=list)

    def again(self, **changes: Any) -> Run:
        """A fresh run with the same request, but for the changes."""
        request = {name: getattr(self, name) for name in ("steps", "rtol", "atol", "max_steps", "watch", "save", "controlled")}
        return Run(**{**request, **changes})

    def velocity(self, segment: Segment, t: float | Tensor, x: Tensor) -> Tensor:
        """field(t, x), counted; ConfigError where its shape is not the state's."""
        self.stats.evaluations += 1
        if not isinstance(t, Tensor):
            t = self.clock[t] if t in self.clock else as_tensors([t], x.dtype)[0]
        v = segment.field(t, x)
        if not isinstance(v, Tensor):
            raise ConfigError(f"the field returned {type(v).__name__}: dx/dt must be a tensor of x's shape")
        if v.shape != x.shape:
            raise ConfigError(
                f"the field returned shape {tuple(v.shape)} for a state of shape {tuple(x.shape)}: dx/dt must match x"
            )
        return v

    def set_clock(self, segments: Sequence[Segment], dtype: torch.dtype) -> None:
        """Makes the times at which segments start and end, for a state of that type."""
        times = [segment.start for segment in segments] + [segments[-1].end]
        self.clock = dict(zip(times, as_tensors(times, dtype), strict=True))

    def accept(self, segment: Segment, t: float, x: Tensor) -> Tensor:
        """Takes the step's result: projects it, counts it, and records it if asked to."""
        self.stats.accepted += 1
        if segment.project is not None:
            x = segment.project(x)
        if self.watch and not finite(x):
            raise Stopped(Status.NON_FINITE, t, x)
        if self.save == "steps":
            self.keep(t, x)
        return x

    def counted(self, x: Tensor) -> Tensor:
        """The entries that enter the error norm."""
        return x if self.controlled is None else x[: self.controlled]

    def size(self, error: Tensor, *states: Tensor) -> float:
        """The RMS of an error over what the tolerances allow for these states, atol + rtol max(abs states)."""
        # tolerances vanish in half precision
        counted = [self.counted(x).float() if x.dtype.itemsize < 4 else self.counted(x) for x in (error, *states)]
        largest = functools.reduce(torch.maximum, (x.abs() for x in counted[1:]))
        return rms(counted[0] / (self.atol + self.rtol * largest))

    def keep(self, t: float, x: Tensor) -> None:
        """Saves a state for the solution."""
        self.saved.append(Saved(t, x, self.stats.accepted))


def as_tensors(times: Sequence[float], dtype: torch.dtype) -> Sequence[Tensor]:
    """Times as fields get them: 0-dimensional, for a state of that type.

    On the CPU whatever the state's device: such a tensor mixes with all of them and costs no transfer.
    """
    return torch.tensor(times, dtype=dtype if dtype in TIME_TYPES else torch.float32, device="cpu").unbind()


def rms(x: Tensor) -> float:
    """The root of the mean square of all entries. Waits for the device."""
    return float(torch.linalg.vector_norm(x)) / math.sqrt(x.numel())


def finite(x: Tensor) -> bool:
    """Whether all entries are finite. Waits for the device."""
    # one that is not makes the sum so; a sum that overflows by itself is looked at again
    return math.isfinite(float(x.detach().sum())) or bool(torch.isfinite(x).all())
