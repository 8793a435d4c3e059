"""Every row of a batch as a solve of its own: its own times, steps, status and statistics, the field evaluated for all of them at once.

One norm over a batch lets its average pass: of 10,000 rows one that moves fast may be wrong by 87 tolerances, and one NaN ends all. Here
each row's steps are chosen by its own error, by the rule that `solve` uses, so that a row is what it is alone, to rounding.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from solvers.controller import StepSize
from solvers.deprecated import with_old_keywords
from solvers.errors import ConfigError, SolveError
from solvers.method import Method
from solvers.methods import get_method
from solvers.request import check_segments, check_state
from solvers.run import Run, as_tensors, check_like, representable
from solvers.runge_kutta import RungeKutta, guessed_step, probe_step, too_short
from solvers.segment import Segment
from solvers.solution import ADVICE, Stats, Status
from solvers.step_control import StepControl
from solvers.transforms import batched, in_forward_mode


@dataclasses.dataclass(frozen=True)
class EachSolution:
    """x1[i] is where row i came, `status[i]` how it ended, `stats[i]` what it cost; `segment[i]` and `time[i]` say where it broke."""

    x1: Tensor
    status: tuple[Status, ...]
    stats: tuple[Stats, ...]
    segment: tuple[int | None, ...]
    time: tuple[float | None, ...]

    @property
    def message(self) -> str:
        """One sentence on how the rows ended, by the first that did not get to the end."""
        broken = [i for i, status in enumerate(self.status) if not status.good]
        if not broken:
            return str(Status.SUCCESS.value)
        i = broken[0]
        return (
            f"{len(broken)} of {len(self.status)} rows broke; row {i}: {self.status[i].value} in segment {self.segment[i]} at "
            f"t = {self.time[i]:.6g}: {ADVICE[self.status[i]]}"
        )


def solve_each(
    segments: Sequence[Segment],
    x0: Tensor,
    *,
    method: str | Method = "tsit5",
    rtol: float | None = None,
    atol: float | None = None,
    step_control: StepControl | None = None,
    throw: bool = True,
    **old: Any,
) -> EachSolution:
    """As `solve` for each row x0[i] alone, by an explicit adaptive method of the package: the rows take their steps side by side.

    A field gets the times as t of shape (rows, 1, .., 1), which broadcasts with x of (rows, ..), and must treat each row by itself; rows
    that are done are left out, so it meets any of them, in order (what a row has of its own belongs into the state, with derivative 0).
    Projections are applied to rows likewise. All parameters are those of `solve`. The step control holds for every row alike:
    its norm is that of a row, and `max_steps` counts each row's attempts in a segment.

    Gradients are those of `backprop`: steps are first tried without a graph, and those accepted taken again with it, so that a row that
    breaks spoils no gradient; `stats` leave that out. A row that breaks keeps its last state. Steps are chosen row by row in Python,
    which costs some microseconds a row and step.

    Raises SolveError, with the EachSolution, where a row breaks (with `throw=False` it is returned), ConfigError for requests that make
    no sense, other methods, learned times, vmap and forward mode.
    """
    check_segments(segments)
    check_state(x0)
    chosen = get_method(method)
    if not (isinstance(chosen, RungeKutta) and chosen.adaptive and not chosen.implicit):
        raise ConfigError(f"method {method!r} has no steps by row: use an explicit adaptive method of the package, as tsit5")
    control = with_old_keywords("solve_each", step_control or StepControl(), old).with_tolerances(rtol, atol)
    limits = control.limits(chosen, method, x0)
    if isinstance(limits["rtol"], Tensor) or isinstance(limits["atol"], Tensor):
        raise ConfigError("steps by row have one tolerance for all entries: give rtol and atol as numbers")
    if x0.dim() == 0 or any(segment.learned for segment in segments) or batched() or in_forward_mode():
        raise ConfigError(
            "steps by row need a state whose first axis are the rows, times that are not learned, and no vmap or forward mode: use `solve`"
        )
    run = Run(1, **limits)
    rows = [_Row(i) for i in range(len(x0))]
    x = x0
    for k, segment in enumerate(segments):
        x = _Batch(chosen, segment, k, run).advance(x, [row for row in rows if row.status is Status.SUCCESS])
    solution = EachSolution(
        x,
        tuple(row.status for row in rows),
        tuple(row.stats for row in rows),
        tuple(row.segment for row in rows),
        tuple(row.time for row in rows),
    )
    if throw and not all(status.good for status in solution.status):
        raise SolveError(solution.message, solution)
    return solution


@dataclasses.dataclass
class _Row:
    """What a row carries: its place in the batch, and of one segment its time, its attempts and the error of the last."""

    place: int
    status: Status = Status.SUCCESS
    stats: Stats = dataclasses.field(default_factory=Stats)
    segment: int | None = None
    time: float | None = None
    size: StepSize | None = None
    t: float = 0.0
    attempts: int = 0
    error: float = 0.0

    def breaks(self, status: Status, segment: int) -> None:
        self.status, self.segment, self.time = status, segment, self.t


class _Batch:
    """The rows on one segment. `x` and `first` hold the state and its slope of those that are going, `rows` whose they are."""

    def __init__(self, method: RungeKutta, segment: Segment, k: int, run: Run):
        self.method, self.segment, self.k, self.run = method, segment, k, run
        self.sign = math.copysign(1.0, segment.end - segment.start)

    def advance(self, x: Tensor, rows: list[_Row]) -> Tensor:
        """The whole batch at the segment's end."""
        whole, sound = x, _sound(x)
        for row in rows:
            row.t, row.attempts, row.error = self.segment.start, 0, 0.0
            if not sound[row.place]:
                row.breaks(Status.NON_FINITE, self.k)
        rows = [row for row in rows if row.status is Status.SUCCESS]
        if not rows:
            return x
        x = x[torch.tensor([row.place for row in rows], device=x.device)]
        if self.segment.enter is not None:
            x, before = self.segment.enter(x), x
            check_like("enter", x, before)
        first = self._slope([row.t for row in rows], x, rows)
        self._begin(x, first, rows)
        while rows:
            proposals = [cast(StepSize, row.size).propose(abs(self.segment.end - row.t)) for row in rows]
            rows, x, first, proposals, whole = self._leave_broken(rows, x, first, proposals, whole)
            if not rows:
                break
            ends, steps = [], []
            for row, (size, last) in zip(rows, proposals, strict=True):
                end = self.segment.end if last else representable(row.t + self.sign * size, x.dtype)
                steps.append(self.sign * size if last or end == row.t else end - row.t)
                ends.append(end)
            with torch.no_grad():
                x1, slope, errors = self._step(rows, ends, steps, x, first)
            going = [self._judge(row, size, error) for row, (size, _), error in zip(rows, proposals, errors, strict=True)]
            accepted = [i for i, good in enumerate(going) if good]
            if not accepted:
                continue
            which = torch.tensor(accepted, device=x.device)
            taken = [rows[i] for i in accepted]
            new_ends = [ends[i] for i in accepted]
            if torch.is_grad_enabled():
                x1, slope, _ = self._step(taken, new_ends, [steps[i] for i in accepted], x[which], first[which], count=False)
            else:
                x1, slope = x1[which], slope[which]
            projected = x1 if self.segment.project is None else self.segment.project(x1)
            check_like("project", projected, x1)
            for row, end in zip(taken, new_ends, strict=True):
                row.t = end
            more = [j for j, row in enumerate(taken) if row.t != self.segment.end]
            if more and not (self.method.tableau.reuses_last_stage and projected is x1):
                some = torch.tensor(more, device=x.device)
                again = self._slope([taken[j].t for j in more], projected[some], [taken[j] for j in more])
                slope = slope.index_put((some,), again)
            x, first = x.index_put((which,), projected), first.index_put((which,), slope)
            rows, x, first, whole = self._leave(rows, [row.t == self.segment.end for row in rows], x, first, whole)
        return whole

    @torch.no_grad()
    def _begin(self, x: Tensor, first: Tensor, rows: list[_Row]) -> None:
        """A first step for rows that have none, as `solve` finds it."""
        if all(row.size is not None for row in rows):
            return
        sizes = [self.run.first_step] * len(rows)
        if self.run.first_step is None:
            span = abs(self.segment.end - self.segment.start)
            scale = self.run.atol + self.run.rtol * x.abs()
            slopes = self._norms(first / scale)
            probes = [probe_step(size, slope, span) for size, slope in zip(self._norms(x / scale), slopes, strict=True)]
            h = self._by_row([self.sign * probe for probe in probes], x)
            bend = (
                self._velocity([row.t + self.sign * p for row, p in zip(rows, probes, strict=True)], x + h * first, rows) - first
            )
            curvatures = [norm / probe for norm, probe in zip(self._norms(bend / scale), probes, strict=True)]
            sizes = [guessed_step(*of, span, self.method.order) for of in zip(slopes, curvatures, probes, strict=True)]
        for row, size in zip(rows, sizes, strict=True):
            assert size is not None, "given, or found"
            q = self.method.tableau.error_order
            row.size = StepSize(self.method.controller, q, size, self.run.min_step, self.run.max_step)

    def _norms(self, e: Tensor) -> list[float]:
        found: list[float] = torch.func.vmap(self.run.norm)(e).tolist()
        return found

    def _by_row(self, numbers: list[float], x: Tensor) -> Tensor:
        """A number for each row, in a shape that broadcasts with x."""
        return torch.tensor(numbers, dtype=x.dtype, device=x.device).reshape(-1, *[1] * (x.dim() - 1))

    def _leave_broken(
        self, rows: list[_Row], x: Tensor, first: Tensor, proposals: list[tuple[float, bool]], whole: Tensor
    ) -> tuple[list[_Row], Tensor, Tensor, list[tuple[float, bool]], Tensor]:
        """The rows that can go on, after those that cannot are told why, as an adaptive solve is."""
        for row, (size, last), good in zip(rows, proposals, _sound(first), strict=True):
            finite = math.isfinite(row.error)
            if not (finite or good) or (not last and too_short(size, row.t)):
                row.breaks(Status.STEP_UNDERFLOW if finite else Status.NON_FINITE, self.k)
            elif row.attempts == self.run.max_steps:
                row.breaks(Status.TOO_MANY_STEPS, self.k)
            elif not finite and size <= self.run.min_step:
                row.breaks(Status.NON_FINITE, self.k)
        broken = [row.status is not Status.SUCCESS for row in rows]
        proposals = [proposal for proposal, gone in zip(proposals, broken, strict=True) if not gone]
        rows, x, first, whole = self._leave(rows, broken, x, first, whole)
        return rows, x, first, proposals, whole

    def _leave(
        self, rows: list[_Row], gone: list[bool], x: Tensor, first: Tensor, whole: Tensor
    ) -> tuple[list[_Row], Tensor, Tensor, Tensor]:
        """The rows that go on; the states of the others go into the whole."""
        if not any(gone):
            return rows, x, first, whole
        out = [i for i, flag in enumerate(gone) if flag]
        stay = [i for i, flag in enumerate(gone) if not flag]
        places = torch.tensor([rows[i].place for i in out], device=x.device)
        whole = whole.index_put((places,), x[torch.tensor(out, device=x.device)])
        kept = torch.tensor(stay, dtype=torch.long, device=x.device)
        return [rows[i] for i in stay], x[kept], first[kept], whole

    def _judge(self, row: _Row, size: float, error: float) -> bool:
        row.attempts, row.error = row.attempts + 1, error
        good = cast(StepSize, row.size).judge(size, error)
        row.stats.accepted += good
        row.stats.rejected += not good
        row.stats.forced += good and error > 1
        return good

    def _slope(self, times: list[float], x: Tensor, rows: list[_Row]) -> Tensor:
        """dx/dt; with a graph for the rows alone that can go on from there, since a zero times what is not finite is not zero."""
        with torch.no_grad():
            v = self._velocity(times, x, rows)
        if not torch.is_grad_enabled():
            return v
        sound = [i for i, good in enumerate(_sound(v)) if good]
        which = torch.tensor(sound, dtype=torch.long, device=x.device)
        return v.index_put((which,), self._velocity([times[i] for i in sound], x[which], [])) if sound else v

    def _velocity(self, times: list[float], x: Tensor, rows: list[_Row]) -> Tensor:
        for row in rows:
            row.stats.evaluations += 1
        low, high = self.run.inside(self.segment, x.dtype)
        told = torch.stack(list(as_tensors([min(max(t, low), high) for t in times], x.dtype))).to(x.device)
        v = self.segment.field(told.reshape(-1, *[1] * (x.dim() - 1)), x)
        check_like("field", v, x)
        return v

    def _step(
        self, rows: list[_Row], ends: list[float], steps: list[float], x: Tensor, first: Tensor, count: bool = True
    ) -> tuple[Tensor, Tensor, list[float]]:
        """x1, the last stage and each row's error of one attempt by each row."""
        tableau = self.method.tableau
        h = self._by_row(steps, x)
        stages = [first]
        for i in range(1, len(tableau.b)):
            c = tableau.c[i]
            times = [end if c == 1 else row.t + c * (end - row.t) for row, end in zip(rows, ends, strict=True)]
            stages.append(self._velocity(times, x + _combined(h, tableau.a[i], stages), rows if count else []))
        x1 = x + _combined(h, tableau.b, stages)
        with torch.no_grad():
            scale = self.run.atol + self.run.rtol * torch.maximum(x.abs(), x1.abs())
            estimates = [_combined(h, weights, stages) / scale for weights in tableau.error_weights]
            norms = zip(*(self._norms(e) for e in estimates), strict=True)
        return x1, stages[-1], [tableau.error(of_row) for of_row in norms]


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
