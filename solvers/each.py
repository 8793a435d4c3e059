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

import torch
from torch import Tensor

from solvers.changes import check_kept, graph_version, is_same_state, version_of
from solvers.errors import ConfigError, SolveError, shown
from solvers.first_step import guessed_step, probe_step
from solvers.method import Method
from solvers.methods import get_method
from solvers.request import check_state
from solvers.rounding import coarse_clock, short_segment
from solvers.rows import GOOD, NON_FINITE, RowAttempts
from solvers.run import Run, check_like, real_type
from solvers.runge_kutta import RungeKutta, weighted
from solvers.segment import Segment, check_segments
from solvers.solution import ADVICE, Stats, Status, forced_steps
from solvers.step_control import StepControl
from solvers.transforms import batched, in_forward_mode


@dataclasses.dataclass(frozen=True)
class EachSolution:
    """x1[i] is the last state of row i, `status[i]` how it ended, `stats[i]` its cost. `segment[i]`
    and `time[i]` say where it broke. `unresolved[i]` is "" or, of a row that reached its end, the
    warning of steps that the type of the time does not resolve. `too_short` is "", or what to do
    about the segment in which the first broken row's step became too small.
    """

    x1: Tensor
    status: tuple[Status, ...]
    stats: tuple[Stats, ...]
    segment: tuple[int | None, ...]
    time: tuple[float | None, ...]
    unresolved: tuple[str, ...] = ()
    too_short: str = ""

    @property
    def warnings(self) -> tuple[str, ...]:
        """One sentence for each problem of rows that reached their end, as those of a `Solution`,
        with the first of these rows. Stiffness is not looked for.
        """
        sentences = []
        forced = [i for i, stats in enumerate(self.stats) if stats.forced > 0]
        if forced:
            stats = self.stats[forced[0]]
            sentences.append(
                f"{len(forced)} of {len(self.stats)} rows; row {forced[0]}:"
                f" {forced_steps(stats.forced, stats.accepted)}"
            )
        unresolved = [i for i, sentence in enumerate(self.unresolved) if sentence]
        if unresolved:
            sentences.append(
                f"{len(unresolved)} of {len(self.stats)} rows; row {unresolved[0]}:"
                f" {self.unresolved[unresolved[0]]}"
            )
        return tuple(sentences)

    @property
    def message(self) -> str:
        """One sentence on how the rows ended, with the first one that broke."""
        broken = [i for i, status in enumerate(self.status) if not status.good]
        if not broken:
            return str(Status.SUCCESS.value)
        i = broken[0]
        status = self.status[i]
        place = f"segment {self.segment[i]} at t = {self.time[i]:.6g}"
        return (
            f"{len(broken)} of {len(self.status)} rows broke; row {i}: {status.value} in {place}:"
            f" {self.too_short or ADVICE[status]}"
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
) -> EachSolution:
    """`solve` for each row x0[i] alone, by an explicit adaptive method of the package. The rows
    take their steps in parallel.

    A field gets the times as t of shape (rows, 1, .., 1), which broadcasts with x of (rows, ..). It
    must treat each row independently. Finished rows are left out, so it gets any subset of the
    rows, in order. Data of a row belongs into the state, with derivative 0. The same holds for
    projections. All parameters are those of `solve`. The step control holds for every row: its norm
    is that of a row, and `max_steps` counts each row's attempts in a segment.

    `EachSolution.warnings` has the warnings of a `Solution` but for two: of stiffness, and of what
    rounding to the state's type loses of many fixed steps.

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
        raise ConfigError(
            f"method {method!r} has no steps by row: use an explicit adaptive method of the"
            " package, as tsit5"
        )
    if step_control is None:
        step_control = StepControl()
    control = step_control.with_tolerances(rtol, atol)
    for name, tolerance in (("rtol", control.rtol), ("atol", control.atol)):
        if tolerance is not None and not isinstance(tolerance, Real):
            raise ConfigError(
                f"{name} = {shown(tolerance)}: give one number, for all entries of a row"
            )
    limits = control.limits(chosen, method, x0)
    has_rows = x0.dim() > 0
    learned = any(segment.learned for segment in segments)
    if not has_rows or learned or batched() or in_forward_mode():
        raise ConfigError(
            "steps by row need a state whose first axis are the rows, times that are not learned,"
            " and no vmap or forward mode: use `solve`"
        )
    run = Run(1, copies=True, **limits)
    rows = RowAttempts(len(x0))
    x = x0
    for k, segment in enumerate(segments):
        x = _Batch(chosen, segment, k, run, x, rows).advance()
    solution = EachSolution(x, *rows.results())
    solution = dataclasses.replace(solution, unresolved=_unresolved(segments, solution))
    solution = dataclasses.replace(solution, too_short=_too_short(segments, solution))
    if throw and not all(status.good for status in solution.status):
        raise SolveError(solution.message, solution)
    return solution


def _too_short(segments: Sequence[Segment], solution: EachSolution) -> str:
    for status, k in zip(solution.status, solution.segment, strict=True):
        if status is Status.STEP_UNDERFLOW and k is not None:
            return short_segment(segments[k])
        if not status.good:
            break
    return ""


def _unresolved(segments: Sequence[Segment], solution: EachSolution) -> tuple[str, ...]:
    """Each row's warning of steps that the type of the time does not resolve."""
    # many rows take the same number of steps
    by_steps = {
        accepted: coarse_clock(segments, solution.x1.dtype, accepted)
        for accepted in {stats.accepted for stats in solution.stats}
    }
    return tuple(
        by_steps[stats.accepted] if status.good else ""
        for status, stats in zip(solution.status, solution.stats, strict=True)
    )


class _Batch:
    """The rows on segment k. `x` and `first` hold the state and slope of the active rows, which are
    `at` these places in `states`, the states of all rows.
    """

    def __init__(
        self,
        method: RungeKutta,
        segment: Segment,
        k: int,
        run: Run,
        states: Tensor,
        rows: RowAttempts,
    ):
        self.method = method
        self.segment = segment
        self.k = k
        self.run = run
        self.states = states
        self.rows = rows
        self.at = _indices(rows.status == GOOD)
        self.x = states[self.at.to(states.device)]
        self.first = self.x  # until `advance` evaluates it
        rows.enter(self.at, segment.start)
        self._end(torch.where(_finite_rows(self.x), GOOD, NON_FINITE))

    def advance(self) -> Tensor:
        """The states of all rows at the segment's end."""
        if len(self.at) == 0:
            return self.states
        if self.segment.enter is not None:
            entered = self.segment.entered(self.x)
            check_like("enter", entered, self.x)
            self.x = entered
        self.first = self._slope(self.at, self.x)
        self._begin()
        while len(self.at) > 0:
            finite_slope = _finite_rows(self.first)
            self._end(self.rows.next(self.at, self.run, self.segment, self.x.dtype, finite_slope))
            if len(self.at) > 0:
                self._attempt()
        return self.states

    def _attempt(self) -> None:
        """One attempt by each row; accepted rows advance."""
        rows = self.rows
        with torch.no_grad():
            x1, slope, errors = self._step(self.at, self.x, self.first)
        accepted = rows.judge(self.at, errors, self.method, self.run)
        if not accepted.any():
            return
        which = self._device_indices(accepted)
        at = self.at[accepted]
        if torch.is_grad_enabled():
            x1, slope, _ = self._step(at, self.x[which], self.first[which], counted=False)
        else:
            x1 = x1[which]
            slope = slope[which]
        before = version_of(x1)
        projected = x1
        if self.segment.project is not None:
            projected = self.segment.project(x1)
        check_like("project", projected, x1)
        rows.t[at] = rows.end[at]
        rows.accepted[at] += 1
        continuing = rows.t[at] != self.segment.end
        is_same = is_same_state(self.segment, projected, x1, before)
        slope_is_known = self.method.tableau.reuses_last_stage and is_same
        if continuing.any() and not slope_is_known:
            indices = self._device_indices(continuing)
            next_slope = self._slope(at[continuing], projected[indices])
            slope = slope.index_put((indices,), next_slope)
        self.x = self.x.index_put((which,), projected)
        self.first = self.first.index_put((which,), slope)
        self._leave(rows.t[self.at] == self.segment.end)

    @torch.no_grad()
    def _begin(self) -> None:
        """A first step, as chosen by `solve`, of the rows without a step size."""
        rows = self.rows
        run = self.run
        x = self.x
        first = self.first
        segment = self.segment
        if not rows.proposed[self.at].isnan().any():
            return
        if run.first_step is not None:
            rows.proposed[self.at] = run.first_step
            return
        span = abs(segment.end - segment.start)
        sign = math.copysign(1.0, segment.end - segment.start)
        scale = run.atol + run.rtol * x.abs()
        speeds = self._norms(first / scale).tolist()
        sizes = self._norms(x / scale).tolist()
        probes = [probe_step(size, speed, span) for size, speed in zip(sizes, speeds, strict=True)]
        h = sign * torch.tensor(probes, dtype=torch.float64, device="cpu")
        probed = self._velocity(rows.t[self.at] + h, x + self._by_row(h, x) * first, self.at)
        bend = probed - first
        curvatures = (self._norms(bend / scale) / h.abs()).tolist()
        guesses = [
            guessed_step(speed, curvature, probe, span, self.method.order)
            for speed, curvature, probe in zip(speeds, curvatures, probes, strict=True)
        ]
        rows.proposed[self.at] = h.new_tensor(guesses)

    def _norms(self, e: Tensor) -> Tensor:
        norms: Tensor = torch.func.vmap(self.run.norm)(e)
        return norms.to("cpu", torch.float64)

    def _device_indices(self, chosen: Tensor) -> Tensor:
        return _indices(chosen).to(self.states.device)

    def _by_row(self, numbers: Tensor, x: Tensor) -> Tensor:
        """A number for each row, in a shape that broadcasts with x."""
        return _as_column(numbers.to(x.device, x.dtype), x)

    def _end(self, status: Tensor) -> None:
        """Ends the rows whose number in `ENDS` is not good."""
        self.rows.status[self.at] = status
        self.rows.segment[self.at] = self.k
        self._leave(status != GOOD)

    def _leave(self, gone: Tensor) -> None:
        """Removes rows from the active ones and stores their states."""
        if not gone.any():
            return
        places = self.at[gone].to(self.states.device)
        last_states = self.x[self._device_indices(gone)]
        self.states = self.states.index_put((places,), last_states)
        staying = self._device_indices(~gone)
        self.at = self.at[~gone]
        self.x = self.x[staying]
        self.first = self.first[staying]

    def _slope(self, at: Tensor, x: Tensor) -> Tensor:
        """dx/dt. Only rows whose dx/dt is finite get a graph: zero times a non-finite number is not
        zero.
        """
        with torch.no_grad():
            v = self._velocity(self.rows.t[at], x, at)
        if not torch.is_grad_enabled():
            return v
        finite = _finite_rows(v)
        if not finite.any():
            return v
        which = self._device_indices(finite)
        return v.index_put((which,), self._velocity(self.rows.t[at[finite]], x[which]))

    def _velocity(self, times: Tensor, x: Tensor, counted_rows: Tensor | None = None) -> Tensor:
        if counted_rows is not None:
            self.rows.evaluations[counted_rows] += 1
        low, high = self.run.inside(self.segment, x.dtype)
        field_times = times.clamp(low, high).to(real_type(x.dtype)).to(x.device)
        return self.run.evaluated(self.segment, _as_column(field_times, x), x)

    def _step(
        self, at: Tensor, x: Tensor, first: Tensor, *, counted: bool = True
    ) -> tuple[Tensor, Tensor, Tensor]:
        """x1, the last stage and each row's error of one attempt by each row."""
        tableau = self.method.tableau
        start = self.rows.t[at]
        end = self.rows.end[at]
        h = self._by_row(self.rows.h[at], x)
        counted_rows = None
        if counted:
            counted_rows = at
        stages = [first]
        versions = [graph_version(first)]
        for i in range(1, len(tableau.b)):
            node = tableau.c[i]
            if node == 1:
                times = end
            else:
                times = start + node * (end - start)
            state = x + h * weighted(1, tableau.a[i], stages)
            stages.append(self._velocity(times, state, counted_rows))
            versions.append(graph_version(stages[-1]))
        check_kept(stages, versions)
        x1 = x + h * weighted(1, tableau.b, stages)
        with torch.no_grad():
            largest = torch.maximum(x.abs(), x1.abs())
            scale = self.run.atol + self.run.rtol * largest
            norms = []
            for weights in tableau.error_weights:
                error = h * weighted(1, weights, stages)
                # nan against an infinite state, as in `Run.size`
                compared = torch.sub(error, largest, alpha=0)
                norms.append(self._norms(compared / scale))
        if len(norms) == 1:
            return x1, stages[-1], norms[0]
        errors = [tableau.error(row_norms) for row_norms in torch.stack(norms, 1).tolist()]
        return x1, stages[-1], start.new_tensor(errors)


def _finite_rows(x: Tensor) -> Tensor:
    """Which rows are finite."""
    return torch.isfinite(x.detach()).reshape(len(x), math.prod(x.shape[1:])).all(1).cpu()


def _as_column(numbers: Tensor, x: Tensor) -> Tensor:
    """A number for each row, with x's number of axes."""
    return numbers.reshape(-1, *[1] * (x.dim() - 1))


def _indices(chosen: Tensor) -> Tensor:
    return chosen.nonzero().squeeze(1)
