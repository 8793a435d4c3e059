"""Solves each row of a batch on its own: own times, steps, status and statistics. The field is
evaluated for all rows at once.

One norm over a batch controls its average: of 10,000 rows, one that moves fast may be wrong by 87
tolerances, and one NaN ends the solve. Here each row's own error chooses its steps, by the rule of
`solve`. So each row has the result of a solve of its own, to rounding.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from numbers import Real

import torch
from torch import Tensor

from solvers.attempts import Attempts
from solvers.checked import checked
from solvers.controller import StepSize
from solvers.errors import ConfigError, SolveError, shown
from solvers.method import Method
from solvers.methods import get_method
from solvers.request import check_state
from solvers.run import Run, Step, check_like, real_type
from solvers.runge_kutta import RungeKutta, guessed_step, probe_step
from solvers.segment import Segment, check_segments
from solvers.solution import ADVICE, Stats, Status
from solvers.step_control import StepControl
from solvers.transforms import batched, in_forward_mode


@dataclasses.dataclass(frozen=True)
class EachSolution:
    """x1[i] is the last state of row i, `status[i]` how it ended, `stats[i]` its cost. `segment[i]`
    and `time[i]` say where it broke.
    """

    x1: Tensor
    status: tuple[Status, ...]
    stats: tuple[Stats, ...]
    segment: tuple[int | None, ...]
    time: tuple[float | None, ...]

    @property
    def message(self) -> str:
        """One sentence on how the rows ended, with the first one that broke."""
        broken = [i for i, status in enumerate(self.status) if not status.good]
        if not broken:
            return str(Status.SUCCESS.value)
        i = broken[0]
        return (
            f"{len(broken)} of {len(self.status)} rows broke; row {i}: {self.status[i].value} in segment {self.segment[i]} at "
            f"t = {self.time[i]:.6g}: {ADVICE[self.status[i]]}"
        )


@checked
def solve_each(
    segments: Sequence[Segment],
    x0: Tensor,
    *,
    method: str | Method = "tsit5",
    rtol: float | None = None,
    atol: float | None = None,
    step_control: StepControl | None = None,
    throw: bool = True,
) -> EachSolution:
    """`solve` for each row x0[i] alone, by an explicit adaptive method of the package. The rows
    take their steps in parallel.

    A field gets the times as t of shape (rows, 1, .., 1), which broadcasts with x of (rows, ..). It
    must treat each row independently. Finished rows are left out, so it gets any subset of the
    rows, in order. Data of a row belongs into the state, with derivative 0. The same holds for
    projections. All parameters are those of `solve`. The step control holds for every row: its norm
    is that of a row, and `max_steps` counts each row's attempts in a segment.

    Gradients are those of `backprop`. Steps are first tried without a graph, and accepted steps are
    repeated with it; `stats` do not count the repetition. So a row that breaks affects no other
    gradient. It keeps its last state. The step sizes are chosen row by row in Python, which costs
    some microseconds for each row and step.

    Raises SolveError, with the EachSolution, if a row breaks (with `throw=False` it is returned).
    Raises ConfigError for invalid requests, other methods, learned times, vmap and forward mode.
    """
    check_segments(segments)
    check_state(x0)
    chosen = get_method(method)
    if not (isinstance(chosen, RungeKutta) and chosen.adaptive and not chosen.implicit):
        raise ConfigError(f"method {method!r} has no steps by row: use an explicit adaptive method of the package, as tsit5")
    control = (step_control or StepControl()).with_tolerances(rtol, atol)
    for name, tolerance in (("rtol", control.rtol), ("atol", control.atol)):
        if tolerance is not None and not isinstance(tolerance, Real):
            raise ConfigError(f"{name} = {shown(tolerance)}: give one number, for all entries of a row")
    limits = control.limits(chosen, method, x0)
    if x0.dim() == 0 or any(segment.learned for segment in segments) or batched() or in_forward_mode():
        raise ConfigError(
            "steps by row need a state whose first axis are the rows, times that are not learned, and no vmap or forward mode: use `solve`"
        )
    run = Run(1, **limits)
    rows = [_Row(i) for i in range(len(x0))]
    x = x0
    for k, segment in enumerate(segments):
        x = _Batch(chosen, segment, k, run, x, [row for row in rows if row.status is Status.SUCCESS]).advance()
    found = {name: tuple(getattr(row, name) for row in rows) for name in ("status", "stats", "segment", "time")}
    solution = EachSolution(x, **found)
    if throw and not all(status.good for status in solution.status):
        raise SolveError(solution.message, solution)
    return solution


@dataclasses.dataclass
class _Row:
    """The state of a row: its index in the batch, its step size, and its time."""

    place: int
    status: Status = Status.SUCCESS
    stats: Stats = dataclasses.field(default_factory=Stats)
    segment: int | None = None
    time: float | None = None
    size: StepSize | None = None
    t: float = 0.0
    # on the present segment: all attempts, and the step of the next one
    attempts: Attempts = dataclasses.field(init=False)
    step: Step = dataclasses.field(init=False)

    def breaks(self, status: Status, segment: int) -> None:
        self.status, self.segment, self.time = status, segment, self.t


class _Batch:
    """The rows on one segment. `x` and `first` hold the state and slope of the active `rows`,
    `whole` all states.
    """

    def __init__(self, method: RungeKutta, segment: Segment, k: int, run: Run, whole: Tensor, rows: list[_Row]):
        self.method, self.segment, self.k, self.run, self.whole = method, segment, k, run, whole
        sound = _sound(whole)
        for row in rows:
            row.t = segment.start
            if not sound[row.place]:
                row.breaks(Status.NON_FINITE, k)
        self.rows = [row for row in rows if row.status is Status.SUCCESS]
        self.x = self.first = whole[self._places([row.place for row in self.rows])]

    def advance(self) -> Tensor:
        """The whole batch at the segment's end."""
        if not self.rows:
            return self.whole
        if self.segment.enter is not None:
            self.x, before = self.segment.enter(self.x), self.x
            check_like("enter", self.x, before)
        self.first = self._slope(self.rows, self.x)
        self._begin()
        while self.rows:
            for row, good in zip(self.rows, _sound(self.first), strict=True):
                row.step, broken = row.attempts.next(row.t, self.x.dtype, good or math.isfinite(row.attempts.error))
                if broken is not None:
                    row.breaks(broken, self.k)
            self._leave([row.status is not Status.SUCCESS for row in self.rows])
            if self.rows:
                self._attempt()
        return self.whole

    def _attempt(self) -> None:
        """One attempt by each row; accepted rows advance."""
        with torch.no_grad():
            x1, slope, errors = self._step(self.rows, self.x, self.first)
        accepted = [i for i, (row, error) in enumerate(zip(self.rows, errors, strict=True)) if row.attempts.judge(error)]
        if not accepted:
            return
        which = self._places(accepted)
        taken = [self.rows[i] for i in accepted]
        if torch.is_grad_enabled():
            x1, slope, _ = self._step(taken, self.x[which], self.first[which], count=False)
        else:
            x1, slope = x1[which], slope[which]
        projected = x1 if self.segment.project is None else self.segment.project(x1)
        check_like("project", projected, x1)
        for row in taken:
            row.t = row.step.end
            row.stats.accepted += 1
        more = [j for j, row in enumerate(taken) if row.t != self.segment.end]
        if more and not (self.method.tableau.reuses_last_stage and projected is x1):
            some = self._places(more)
            slope = slope.index_put((some,), self._slope([taken[j] for j in more], projected[some]))
        self.x, self.first = self.x.index_put((which,), projected), self.first.index_put((which,), slope)
        self._leave([row.t == self.segment.end for row in self.rows])

    @torch.no_grad()
    def _begin(self) -> None:
        """The attempts of each row. Those of rows without a step size begin with a first step chosen
        as by `solve`.
        """
        rows, run, x, first, segment = self.rows, self.run, self.x, self.first, self.segment
        if any(row.size is None for row in rows):
            sizes = [run.first_step] * len(rows)
            if run.first_step is None:
                span, sign = abs(segment.end - segment.start), math.copysign(1.0, segment.end - segment.start)
                scale = run.atol + run.rtol * x.abs()
                slopes = self._norms(first / scale)
                probes = [probe_step(size, slope, span) for size, slope in zip(self._norms(x / scale), slopes, strict=True)]
                h = self._by_row([sign * probe for probe in probes], x)
                times = _times(row.t + sign * probe for row, probe in zip(rows, probes, strict=True))
                bend = self._velocity(times, x + h * first, rows) - first
                curvatures = [norm / probe for norm, probe in zip(self._norms(bend / scale), probes, strict=True)]
                sizes = [guessed_step(*of, span, self.method.order) for of in zip(slopes, curvatures, probes, strict=True)]
            for row, size in zip(rows, sizes, strict=True):
                assert size is not None, "given, or found"
                row.size = self.method.step_size(size, run)
        for row in rows:
            assert row.size is not None, "begun"
            row.attempts = Attempts(segment, row.size, row.stats, run.max_steps)

    def _norms(self, e: Tensor) -> list[float]:
        found: list[float] = torch.func.vmap(self.run.norm)(e).tolist()
        return found

    def _places(self, numbers: list[int]) -> Tensor:
        return torch.tensor(numbers, dtype=torch.long, device=self.whole.device)

    def _by_row(self, numbers: list[float], x: Tensor) -> Tensor:
        """A number for each row, in a shape that broadcasts with x."""
        return torch.tensor(numbers, dtype=x.dtype, device=x.device).reshape(-1, *[1] * (x.dim() - 1))

    def _leave(self, gone: list[bool]) -> None:
        """Removes rows and stores their states in the whole."""
        if not any(gone):
            return
        out = [i for i, flag in enumerate(gone) if flag]
        stay = [i for i, flag in enumerate(gone) if not flag]
        places = self._places([self.rows[i].place for i in out])
        self.whole = self.whole.index_put((places,), self.x[self._places(out)])
        kept = self._places(stay)
        self.rows, self.x, self.first = [self.rows[i] for i in stay], self.x[kept], self.first[kept]

    def _slope(self, rows: list[_Row], x: Tensor) -> Tensor:
        """dx/dt. Only rows whose dx/dt is finite get a graph: zero times a non-finite number is not
        zero.
        """
        with torch.no_grad():
            v = self._velocity(_times(row.t for row in rows), x, rows)
        if not torch.is_grad_enabled():
            return v
        sound = [i for i, good in enumerate(_sound(v)) if good]
        which = self._places(sound)
        return v.index_put((which,), self._velocity(_times(rows[i].t for i in sound), x[which], [])) if sound else v

    def _velocity(self, times: Tensor, x: Tensor, counted: list[_Row]) -> Tensor:
        for row in counted:
            row.stats.evaluations += 1
        told = times.clamp(*self.run.inside(self.segment, x.dtype)).to(real_type(x.dtype)).to(x.device)
        v = self.segment.field(told.reshape(-1, *[1] * (x.dim() - 1)), x)
        check_like("field", v, x)
        return v

    def _step(self, rows: list[_Row], x: Tensor, first: Tensor, count: bool = True) -> tuple[Tensor, Tensor, list[float]]:
        """x1, the last stage and each row's error of one attempt by each row."""
        tableau = self.method.tableau
        h = self._by_row([row.step.h for row in rows], x)
        start, end = _times(row.t for row in rows), _times(row.step.end for row in rows)
        stages = [first]
        for c, weights in list(zip(tableau.c, tableau.a, strict=True))[1:]:
            times = end if c == 1 else start + c * (end - start)
            stages.append(self._velocity(times, x + _combined(h, weights, stages), rows if count else []))
        x1 = x + _combined(h, tableau.b, stages)
        with torch.no_grad():
            scale = self.run.atol + self.run.rtol * torch.maximum(x.abs(), x1.abs())
            estimates = [_combined(h, weights, stages) / scale for weights in tableau.error_weights]
            norms = zip(*(self._norms(e) for e in estimates), strict=True)
        return x1, stages[-1], [tableau.error(of_row) for of_row in norms]


def _times(numbers: Iterable[float]) -> Tensor:
    return torch.tensor(list(numbers), dtype=torch.float64)


def _sound(x: Tensor) -> list[bool]:
    """Which rows are finite."""
    found: list[bool] = torch.isfinite(x.detach()).reshape(len(x), -1).all(1).tolist()
    return found


def _combined(h: Tensor, weights: Sequence[float], stages: Sequence[Tensor]) -> Tensor:
    """h sum_i w_i k_i with a step h for each row."""
    total = torch.zeros_like(stages[0])
    for weight, stage in zip(weights, stages, strict=False):
        if weight:
            total = total + (h * weight) * stage
    return total
