"""Solves each row of a batch on its own: own times, steps, status and statistics. The field is
evaluated for all rows at once.

One norm over a batch controls its average: of 10,000 rows, one that moves fast may be wrong by 87
tolerances, and one NaN ends the solve. Here each row's own error chooses its steps, by the rule of
`solve`. So each row has the result of a solve of its own, to rounding.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from numbers import Real
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from solvers.attempts import SHORTEST
from solvers.checked import checked
from solvers.controller import SHORTER, SMALLEST, STRETCH, for_arrays
from solvers.errors import ConfigError, SolveError, shown
from solvers.method import Method
from solvers.methods import get_method
from solvers.request import check_state
from solvers.run import Run, check_like, real_type
from solvers.runge_kutta import RungeKutta, guessed_step, probe_step, weighted
from solvers.segment import Segment, check_segments
from solvers.solution import ADVICE, Stats, Status
from solvers.step_control import StepControl
from solvers.transforms import batched, in_forward_mode

Places = NDArray[np.int64]
Flags = NDArray[np.bool_]


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
    gradient. It keeps its last state. A controller of your own is called for each row and step,
    which costs some microseconds.

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
    run, rows = Run(1, **limits), _Rows(len(x0))
    x = x0
    for k, segment in enumerate(segments):
        x = _Batch(chosen, segment, k, run, x, rows).advance()
    solution = EachSolution(x, tuple(rows.status), rows.stats, tuple(rows.segment), tuple(rows.time))
    if throw and not all(status.good for status in solution.status):
        raise SolveError(solution.message, solution)
    return solution


class _Rows:
    """How far each row is, what its `StepSize` and `Attempts` hold, and how it ended, as arrays over
    all rows.
    """

    def __init__(self, count: int):
        self.status, self.segment, self.time = np.full(count, Status.SUCCESS), np.full(count, None), np.full(count, None)
        self.evaluations, self.accepted, self.rejected, self.forced = np.zeros((4, count), dtype=int)
        self.t, self.end, self.h = np.zeros((3, count))
        self.proposed, self.refused, self.errors = np.full(count, math.nan), np.full(count, math.inf), np.ones((2, count))
        # on the present segment
        self.count, self.size, self.error = np.zeros(count, dtype=int), np.zeros(count), np.zeros(count)

    @property
    def stats(self) -> tuple[Stats, ...]:
        costs = (self.evaluations, self.accepted, self.rejected, self.forced)
        return tuple(Stats(*each) for each in zip(*(cost.tolist() for cost in costs), strict=True))

    def enter(self, at: Places, start: float) -> None:
        self.t[at], self.count[at], self.size[at], self.error[at] = start, 0, math.inf, 0.0

    def next(self, at: Places, run: Run, segment: Segment, dtype: torch.dtype, sound: Flags) -> Any:
        """The next step of each row, as by `Attempts.next`: the status, good where it goes on."""
        t, before, finite = self.t[at], self.size[at], np.isfinite(self.error[at])
        step = np.clip(self.proposed[at], run.min_step, run.max_step)
        left, refused = np.abs(segment.end - t), self.refused[at]
        pieces = np.maximum(1, np.ceil(np.minimum(3, left / np.minimum(STRETCH * step, run.max_step))))
        pieces += (left / pieces >= refused) & (refused > run.min_step)
        size, last = np.where(pieces <= 2, left / pieces, step), pieces == 1
        h = np.copysign(size, segment.end - t)
        near = t + h
        if real_type(dtype) is torch.float32:
            near = near.astype(np.float32).astype(float)
        self.end[at], self.h[at] = np.where(last, segment.end, near), np.where(last | (near == t), h, near - t)
        lost = ~(sound | np.isfinite(self.error[at])) | (~last & (size <= np.maximum(4 * np.spacing(np.abs(t)), SHORTEST)))
        ways = [lost & finite, lost | (~finite & (before <= run.min_step)), self.count[at] == run.max_steps]
        self.proposed[at], self.size[at] = step, size
        self.count[at] += 1
        kinds: Any = [Status.STEP_UNDERFLOW, Status.NON_FINITE, Status.TOO_MANY_STEPS, Status.SUCCESS]
        return np.select(ways, kinds[:-1], kinds[-1])

    def judge(self, at: Places, error: NDArray[np.float64], method: RungeKutta, run: Run) -> Flags:
        """Which attempts are accepted, as by `Attempts.judge`."""
        rule, q, size = for_arrays(method.controller), method.tableau.error_order, self.size[at]
        good = (error <= 1) | ((size <= run.min_step) & np.isfinite(error))
        self.error[at] = error
        self.rejected[at[~good]] += 1
        self.forced[at[good & (error > 1)]] += 1
        bad, fine = at[~good], at[good]
        self.proposed[bad] = np.minimum(rule.rejected(size[~good], error[~good], q), SHORTER * size[~good])
        self.refused[bad] = size[~good]
        latest = np.maximum(error[good], SMALLEST)
        self.proposed[fine] = rule.accepted(size[good], self.proposed[fine], (latest, *self.errors[:, fine]), q)
        self.errors[:, fine], self.refused[fine] = (latest, self.errors[0, fine]), math.inf
        return good


class _Batch:
    """The rows on one segment. `x` and `first` hold the state and slope of the active rows, which are
    `at` these places in `whole`, all states.
    """

    def __init__(self, method: RungeKutta, segment: Segment, k: int, run: Run, whole: Tensor, rows: _Rows):
        self.method, self.segment, self.k, self.run, self.whole, self.rows = method, segment, k, run, whole, rows
        self.at = np.flatnonzero(rows.status == Status.SUCCESS)
        self.x = self.first = whole[torch.from_numpy(self.at).to(whole.device)]
        rows.enter(self.at, segment.start)
        self._end(np.array([Status.NON_FINITE, Status.SUCCESS])[_sound(self.x).astype(int)])

    def advance(self) -> Tensor:
        """The whole batch at the segment's end."""
        if not len(self.at):
            return self.whole
        if self.segment.enter is not None:
            self.x, before = self.segment.enter(self.x), self.x
            check_like("enter", self.x, before)
        self.first = self._slope(self.at, self.x)
        self._begin()
        while len(self.at):
            self._end(self.rows.next(self.at, self.run, self.segment, self.x.dtype, _sound(self.first)))
            if len(self.at):
                self._attempt()
        return self.whole

    def _attempt(self) -> None:
        """One attempt by each row; accepted rows advance."""
        with torch.no_grad():
            x1, slope, errors = self._step(self.at, self.x, self.first)
        good = self.rows.judge(self.at, errors, self.method, self.run)
        if not good.any():
            return
        which, taken = self._places(good), self.at[good]
        if torch.is_grad_enabled():
            x1, slope, _ = self._step(taken, self.x[which], self.first[which], count=False)
        else:
            x1, slope = x1[which], slope[which]
        projected = x1 if self.segment.project is None else self.segment.project(x1)
        check_like("project", projected, x1)
        self.rows.t[taken] = self.rows.end[taken]
        self.rows.accepted[taken] += 1
        more = self.rows.t[taken] != self.segment.end
        if more.any() and not (self.method.tableau.reuses_last_stage and projected is x1):
            some = self._places(more)
            slope = slope.index_put((some,), self._slope(taken[more], projected[some]))
        self.x, self.first = self.x.index_put((which,), projected), self.first.index_put((which,), slope)
        self._leave(self.rows.t[self.at] == self.segment.end)

    @torch.no_grad()
    def _begin(self) -> None:
        """A first step, as chosen by `solve`, of the rows without a step size."""
        rows, run, x, first, segment = self.rows, self.run, self.x, self.first, self.segment
        if not np.isnan(rows.proposed[self.at]).any():
            return
        if run.first_step is not None:
            rows.proposed[self.at] = run.first_step
            return
        span, sign = abs(segment.end - segment.start), math.copysign(1.0, segment.end - segment.start)
        scale = run.atol + run.rtol * x.abs()
        slopes = self._norms(first / scale).tolist()
        probes = [probe_step(size, slope, span) for size, slope in zip(self._norms(x / scale).tolist(), slopes, strict=True)]
        h = sign * np.array(probes)
        bend = self._velocity(rows.t[self.at] + h, x + self._by_row(h, x) * first, self.at) - first
        curvatures = (self._norms(bend / scale) / np.array(probes)).tolist()
        rows.proposed[self.at] = [
            guessed_step(*of, span, self.method.order) for of in zip(slopes, curvatures, probes, strict=True)
        ]

    def _norms(self, e: Tensor) -> NDArray[np.float64]:
        return np.array(torch.func.vmap(self.run.norm)(e).tolist())

    def _places(self, chosen: Flags) -> Tensor:
        return torch.from_numpy(np.flatnonzero(chosen)).to(self.whole.device)

    def _by_row(self, numbers: NDArray[np.float64], x: Tensor) -> Tensor:
        """A number for each row, in a shape that broadcasts with x."""
        return torch.from_numpy(numbers).to(x.device, x.dtype).reshape(-1, *[1] * (x.dim() - 1))

    def _end(self, status: Any) -> None:
        """Ends the rows whose status is not good."""
        broken = status != Status.SUCCESS
        out = self.at[broken]
        self.rows.status[out], self.rows.segment[out], self.rows.time[out] = status[broken], self.k, self.rows.t[out].tolist()
        self._leave(broken)

    def _leave(self, gone: Flags) -> None:
        """Removes rows and stores their states in the whole."""
        if not gone.any():
            return
        places = torch.from_numpy(self.at[gone]).to(self.whole.device)
        self.whole = self.whole.index_put((places,), self.x[self._places(gone)])
        kept = self._places(~gone)
        self.at, self.x, self.first = self.at[~gone], self.x[kept], self.first[kept]

    def _slope(self, at: Places, x: Tensor) -> Tensor:
        """dx/dt. Only rows whose dx/dt is finite get a graph: zero times a non-finite number is not
        zero.
        """
        with torch.no_grad():
            v = self._velocity(self.rows.t[at], x, at)
        if not torch.is_grad_enabled():
            return v
        sound = _sound(v)
        which = self._places(sound)
        return v.index_put((which,), self._velocity(self.rows.t[at[sound]], x[which])) if sound.any() else v

    def _velocity(self, times: NDArray[np.float64], x: Tensor, counted: Places | None = None) -> Tensor:
        if counted is not None:
            self.rows.evaluations[counted] += 1
        told = torch.from_numpy(times).clamp(*self.run.inside(self.segment, x.dtype)).to(real_type(x.dtype)).to(x.device)
        v = self.segment.field(told.reshape(-1, *[1] * (x.dim() - 1)), x)
        check_like("field", v, x)
        return v

    def _step(self, at: Places, x: Tensor, first: Tensor, count: bool = True) -> tuple[Tensor, Tensor, NDArray[np.float64]]:
        """x1, the last stage and each row's error of one attempt by each row."""
        tableau, start, end = self.method.tableau, self.rows.t[at], self.rows.end[at]
        h, stages = self._by_row(self.rows.h[at], x), [first]
        for c, weights in list(zip(tableau.c, tableau.a, strict=True))[1:]:
            times = end if c == 1 else start + c * (end - start)
            stages.append(self._velocity(times, x + h * weighted(1, weights, stages), at if count else None))
        x1 = x + h * weighted(1, tableau.b, stages)
        with torch.no_grad():
            scale = self.run.atol + self.run.rtol * torch.maximum(x.abs(), x1.abs())
            norms = [self._norms(h * weighted(1, weights, stages) / scale) for weights in tableau.error_weights]
        errors = norms[0] if len(norms) == 1 else np.array([tableau.error(of_row) for of_row in zip(*norms, strict=True)])
        return x1, stages[-1], errors


def _sound(x: Tensor) -> Flags:
    """Which rows are finite."""
    found: Flags = torch.isfinite(x.detach()).reshape(len(x), math.prod(x.shape[1:])).all(1).cpu().numpy()
    return found
