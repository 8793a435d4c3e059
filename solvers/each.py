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

from solvers.attempts import SHORTEST
from solvers.controller import SHORTER, SMALLEST, STRETCH, for_tensors
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

ENDS = (Status.SUCCESS, Status.STEP_UNDERFLOW, Status.NON_FINITE, Status.TOO_MANY_STEPS)
"""The ways in which a row ends, by number."""
GOOD, UNDERFLOW, NON_FINITE, TOO_MANY = range(4)


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
            f"{len(broken)} of {len(self.status)} rows broke; row {i}: {self.status[i].value} in"
            f" segment {self.segment[i]} at t = {self.time[i]:.6g}: {ADVICE[self.status[i]]}"
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
    control = (step_control or StepControl()).with_tolerances(rtol, atol)
    for name, tolerance in (("rtol", control.rtol), ("atol", control.atol)):
        if tolerance is not None and not isinstance(tolerance, Real):
            raise ConfigError(
                f"{name} = {shown(tolerance)}: give one number, for all entries of a row"
            )
    limits = control.limits(chosen, method, x0)
    if (
        x0.dim() == 0
        or any(segment.learned for segment in segments)
        or batched()
        or in_forward_mode()
    ):
        raise ConfigError(
            "steps by row need a state whose first axis are the rows, times that are not learned,"
            " and no vmap or forward mode: use `solve`"
        )
    run = Run(1, **limits)
    rows = _Rows(len(x0))
    x = x0
    for k, segment in enumerate(segments):
        x = _Batch(chosen, segment, k, run, x, rows).advance()
    solution = EachSolution(x, *rows.results())
    if throw and not all(status.good for status in solution.status):
        raise SolveError(solution.message, solution)
    return solution


class _Rows:
    """How far each row is, what its `StepSize` and `Attempts` hold, and how it ended, as tensors
    over all rows on the CPU. `at` are numbers of rows.
    """

    def __init__(self, count: int):
        def filled(value: float) -> Tensor:
            return torch.full((count,), value, dtype=torch.float64, device="cpu")

        (
            self.status,
            self.segment,
            self.evaluations,
            self.accepted,
            self.rejected,
            self.forced,
            self.count,
        ) = torch.zeros(7, count, dtype=torch.long, device="cpu")
        self.t, self.end, self.h, self.proposed, self.refused = map(
            filled, (0, 0, 0, math.nan, math.inf)
        )
        self.errors = torch.stack([filled(1), filled(1)])
        # on the present segment, as `count`, the number of attempts
        self.size = filled(math.inf)
        self.error = filled(0)

    def results(
        self,
    ) -> tuple[
        tuple[Status, ...], tuple[Stats, ...], tuple[int | None, ...], tuple[float | None, ...]
    ]:
        """Those of an `EachSolution`."""
        status = tuple(ENDS[k] for k in self.status.tolist())
        costs = (self.evaluations, self.accepted, self.rejected, self.forced)
        stats = tuple(Stats(*each) for each in torch.stack(costs, 1).tolist())
        broken = [not each.good for each in status]
        segments, times = (
            tuple(value if bad else None for value, bad in zip(of.tolist(), broken, strict=True))
            for of in (self.segment, self.t)
        )
        return status, stats, segments, times

    def enter(self, at: Tensor, start: float) -> None:
        self.t[at], self.count[at], self.size[at], self.error[at] = start, 0, math.inf, 0.0

    def next(
        self, at: Tensor, run: Run, segment: Segment, dtype: torch.dtype, sound: Tensor
    ) -> Tensor:
        """The next step of each row, as by `Attempts.next`, and its number in `ENDS`."""
        t = self.t[at]
        before = self.size[at]
        finite = self.error[at].isfinite()
        step = self.proposed[at].clamp(run.min_step, run.max_step)
        left = (segment.end - t).abs()
        refused = self.refused[at]
        pieces = (left / (STRETCH * step).clamp(max=run.max_step)).clamp(max=3).ceil().clamp(min=1)
        pieces = pieces + ((left / pieces >= refused) & (refused > run.min_step))
        size = torch.where(pieces <= 2, left / pieces, step)
        last = pieces == 1
        h = torch.copysign(size, segment.end - t)
        near = (t + h).to(real_type(dtype)).double()
        self.end[at], self.h[at] = (
            torch.where(last, segment.end, near),
            torch.where(last | (near == t), h, near - t),
        )
        ulp = torch.nextafter(t.abs(), torch.full_like(t, math.inf)) - t.abs()
        lost = ~(sound | finite) | (~last & (size <= (4 * ulp).clamp(min=SHORTEST)))
        ends = torch.where(self.count[at] == run.max_steps, TOO_MANY, GOOD)
        ends = torch.where(
            ~finite & (lost | (before <= run.min_step)),
            NON_FINITE,
            torch.where(lost, UNDERFLOW, ends),
        )
        self.proposed[at], self.size[at] = step, size
        self.count[at] += 1
        return ends

    def judge(self, at: Tensor, error: Tensor, method: RungeKutta, run: Run) -> Tensor:
        """Which attempts are accepted, as by `Attempts.judge`."""
        rule = for_tensors(method.controller)
        q = method.tableau.error_order
        size = self.size[at]
        good = (error <= 1) | ((size <= run.min_step) & error.isfinite())
        bad = at[~good]
        fine = at[good]
        self.error[at] = error
        self.rejected[bad] += 1
        self.forced[at[good & (error > 1)]] += 1
        shorter = rule.rejected(size[~good], error[~good], q)
        self.proposed[bad], self.refused[bad] = (
            torch.minimum(shorter, SHORTER * size[~good]),
            size[~good],
        )
        latest = error[good].clamp(min=SMALLEST)
        self.proposed[fine] = rule.accepted(
            size[good], self.proposed[fine], (latest, *self.errors[:, fine]), q
        )
        self.errors[:, fine], self.refused[fine] = (
            torch.stack((latest, self.errors[0, fine])),
            math.inf,
        )
        return good


class _Batch:
    """The rows on one segment. `x` and `first` hold the state and slope of the active rows, which
    are `at` these places in `whole`, all states.
    """

    def __init__(
        self, method: RungeKutta, segment: Segment, k: int, run: Run, whole: Tensor, rows: _Rows
    ):
        self.method = method
        self.segment = segment
        self.k = k
        self.run = run
        self.whole = whole
        self.rows = rows
        self.at = _places(rows.status == GOOD)
        self.x = self.first = whole[self.at.to(whole.device)]
        rows.enter(self.at, segment.start)
        self._end(torch.where(_sound(self.x), GOOD, NON_FINITE))

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
            self._end(
                self.rows.next(self.at, self.run, self.segment, self.x.dtype, _sound(self.first))
            )
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
        which = self._places(good)
        taken = self.at[good]
        if torch.is_grad_enabled():
            x1, slope, _ = self._step(taken, self.x[which], self.first[which], count=False)
        else:
            x1 = x1[which]
            slope = slope[which]
        if self.segment.project is None:
            projected = x1
        else:
            projected = self.segment.project(x1)
        check_like("project", projected, x1)
        self.rows.t[taken] = self.rows.end[taken]
        self.rows.accepted[taken] += 1
        more = self.rows.t[taken] != self.segment.end
        if more.any() and not (self.method.tableau.reuses_last_stage and projected is x1):
            some = self._places(more)
            slope = slope.index_put((some,), self._slope(taken[more], projected[some]))
        self.x, self.first = (
            self.x.index_put((which,), projected),
            self.first.index_put((which,), slope),
        )
        self._leave(self.rows.t[self.at] == self.segment.end)

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
        slopes = self._norms(first / scale).tolist()
        probes = [
            probe_step(size, slope, span)
            for size, slope in zip(self._norms(x / scale).tolist(), slopes, strict=True)
        ]
        h = sign * torch.tensor(probes, dtype=torch.float64, device="cpu")
        bend = self._velocity(rows.t[self.at] + h, x + self._by_row(h, x) * first, self.at) - first
        curvatures = (self._norms(bend / scale) / h.abs()).tolist()
        guesses = [
            guessed_step(*of, span, self.method.order)
            for of in zip(slopes, curvatures, probes, strict=True)
        ]
        rows.proposed[self.at] = h.new_tensor(guesses)

    def _norms(self, e: Tensor) -> Tensor:
        found: Tensor = torch.func.vmap(self.run.norm)(e)
        return found.to("cpu", torch.float64)

    def _places(self, chosen: Tensor) -> Tensor:
        return _places(chosen).to(self.whole.device)

    def _by_row(self, numbers: Tensor, x: Tensor) -> Tensor:
        """A number for each row, in a shape that broadcasts with x."""
        return numbers.to(x.device, x.dtype).reshape(-1, *[1] * (x.dim() - 1))

    def _end(self, status: Tensor) -> None:
        """Ends the rows whose number in `ENDS` is not good."""
        self.rows.status[self.at], self.rows.segment[self.at] = status, self.k
        self._leave(status != GOOD)

    def _leave(self, gone: Tensor) -> None:
        """Removes rows and stores their states in the whole."""
        if not gone.any():
            return
        places = self.at[gone].to(self.whole.device)
        self.whole = self.whole.index_put((places,), self.x[self._places(gone)])
        kept = self._places(~gone)
        self.at = self.at[~gone]
        self.x = self.x[kept]
        self.first = self.first[kept]

    def _slope(self, at: Tensor, x: Tensor) -> Tensor:
        """dx/dt. Only rows whose dx/dt is finite get a graph: zero times a non-finite number is not
        zero.
        """
        with torch.no_grad():
            v = self._velocity(self.rows.t[at], x, at)
        if not torch.is_grad_enabled():
            return v
        sound = _sound(v)
        which = self._places(sound)
        if sound.any():
            return v.index_put((which,), self._velocity(self.rows.t[at[sound]], x[which]))
        return v

    def _velocity(self, times: Tensor, x: Tensor, counted: Tensor | None = None) -> Tensor:
        if counted is not None:
            self.rows.evaluations[counted] += 1
        told = (
            times.clamp(*self.run.inside(self.segment, x.dtype)).to(real_type(x.dtype)).to(x.device)
        )
        v = self.segment.field(told.reshape(-1, *[1] * (x.dim() - 1)), x)
        check_like("field", v, x)
        return v

    def _step(
        self, at: Tensor, x: Tensor, first: Tensor, count: bool = True
    ) -> tuple[Tensor, Tensor, Tensor]:
        """x1, the last stage and each row's error of one attempt by each row."""
        tableau = self.method.tableau
        start = self.rows.t[at]
        end = self.rows.end[at]
        h = self._by_row(self.rows.h[at], x)
        stages = [first]
        for c, weights in list(zip(tableau.c, tableau.a, strict=True))[1:]:
            if c == 1:
                times = end
            else:
                times = start + c * (end - start)
            stages.append(
                self._velocity(times, x + h * weighted(1, weights, stages), at if count else None)
            )
        x1 = x + h * weighted(1, tableau.b, stages)
        with torch.no_grad():
            scale = self.run.atol + self.run.rtol * torch.maximum(x.abs(), x1.abs())
            norms = [
                self._norms(h * weighted(1, weights, stages) / scale)
                for weights in tableau.error_weights
            ]
        if len(norms) == 1:
            return x1, stages[-1], norms[0]
        return (
            x1,
            stages[-1],
            start.new_tensor([tableau.error(of_row) for of_row in torch.stack(norms, 1).tolist()]),
        )


def _sound(x: Tensor) -> Tensor:
    """Which rows are finite."""
    return torch.isfinite(x.detach()).reshape(len(x), math.prod(x.shape[1:])).all(1).cpu()


def _places(chosen: Tensor) -> Tensor:
    return chosen.nonzero().squeeze(1)
