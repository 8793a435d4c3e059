"""`StepSize` and `Attempts` for all rows of a batch at once: tensors in place of numbers."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from solvers.attempts import SHORTEST
from solvers.controller import SHORTER, SMALLEST, STRETCH, for_tensors
from solvers.run import Run, real_type
from solvers.runge_kutta import RungeKutta
from solvers.segment import Segment
from solvers.solution import Stats, Status

ENDS = (Status.SUCCESS, Status.STEP_UNDERFLOW, Status.NON_FINITE, Status.TOO_MANY_STEPS)
"""The ways in which a row ends, by number."""
GOOD, UNDERFLOW, NON_FINITE, TOO_MANY = range(4)


class RowAttempts:
    """How far each row is, what its `StepSize` and `Attempts` hold, and how it ended, as tensors
    over all rows on the CPU. `at` are numbers of rows.
    """

    def __init__(self, count: int):
        def filled(value: float) -> Tensor:
            return torch.full((count,), value, dtype=torch.float64, device="cpu")

        def zeros() -> Tensor:
            return torch.zeros(count, dtype=torch.long, device="cpu")

        # how it ended, in which segment, and its cost
        self.status = zeros()
        self.segment = zeros()
        self.evaluations = zeros()
        self.accepted = zeros()
        self.rejected = zeros()
        self.forced = zeros()
        # its time, and the end and the signed length of the step that it tries
        self.t = filled(0)
        self.end = filled(0)
        self.h = filled(0)
        # as in `StepSize`
        self.proposed = filled(math.nan)
        self.rejected_size = filled(math.inf)
        self.errors = torch.stack([filled(1), filled(1)])
        # as in `Attempts`, on the present segment
        self.attempts = zeros()
        self.size = filled(math.inf)
        self.error = filled(0)

    def results(
        self,
    ) -> tuple[
        tuple[Status, ...], tuple[Stats, ...], tuple[int | None, ...], tuple[float | None, ...]
    ]:
        """Each row's status and cost, and the segment and time at which it broke: the fields of an
        `EachSolution`.
        """
        statuses = tuple(ENDS[number] for number in self.status.tolist())
        costs = torch.stack((self.evaluations, self.accepted, self.rejected, self.forced), 1)
        stats = tuple(Stats(*counts) for counts in costs.tolist())
        segments: list[int | None] = self.segment.tolist()
        times: list[float | None] = self.t.tolist()
        for i, status in enumerate(statuses):
            if status.good:
                segments[i] = None
                times[i] = None
        return statuses, stats, tuple(segments), tuple(times)

    def enter(self, at: Tensor, start: float) -> None:
        """Puts the rows at the start of a segment."""
        self.t[at] = start
        self.attempts[at] = 0
        self.size[at] = math.inf
        self.error[at] = 0.0

    def next(
        self, at: Tensor, run: Run, segment: Segment, dtype: torch.dtype, finite_slope: Tensor
    ) -> Tensor:
        """The next step of each row, as by `Attempts.next`, and its number in `ENDS`."""
        t = self.t[at]
        previous_size = self.size[at]
        finite_error = self.error[at].isfinite()
        step = self.proposed[at].clamp(run.min_step, run.max_step)
        remaining = (segment.end - t).abs()
        stretched = (STRETCH * step).clamp(max=run.max_step)
        pieces = (remaining / stretched).clamp(max=3).ceil().clamp(min=1)
        rejected_size = self.rejected_size[at]
        repeats = (rejected_size > run.min_step) & (remaining / pieces >= rejected_size)
        pieces = torch.where(repeats, pieces + 1, pieces)
        size = torch.where(pieces <= 2, remaining / pieces, step)
        ends_the_segment = pieces == 1
        h = torch.copysign(size, segment.end - t)
        exact_end = t + h
        rounded_end = exact_end.to(real_type(dtype)).double()
        stretch = (rounded_end - t) / h
        rounds = (stretch >= 0.5) & (stretch <= 2)  # as in `step_end`
        end = torch.where(rounds, rounded_end, exact_end)
        self.end[at] = torch.where(ends_the_segment, segment.end, end)
        self.h[at] = torch.where(ends_the_segment | (end == t), h, end - t)
        ulp = torch.nextafter(t.abs(), torch.full_like(t, math.inf)) - t.abs()
        hardly_advances = ~ends_the_segment & (size <= (4 * ulp).clamp(min=SHORTEST))
        lost = ~(finite_slope | finite_error) | hardly_advances
        broken_by_error = ~finite_error & (lost | (previous_size <= run.min_step))
        status = torch.where(self.attempts[at] == run.max_steps, TOO_MANY, GOOD)
        status = torch.where(lost, UNDERFLOW, status)
        status = torch.where(broken_by_error, NON_FINITE, status)
        self.proposed[at] = step
        self.size[at] = size
        self.attempts[at] += 1
        return status

    def judge(self, at: Tensor, error: Tensor, method: RungeKutta, run: Run) -> Tensor:
        """Which attempts are accepted, as by `Attempts.judge`."""
        rule = for_tensors(method.controller)
        q = method.tableau.error_order
        size = self.size[at]
        accepted = (error <= 1) | ((size <= run.min_step) & error.isfinite())
        self.error[at] = error
        self.forced[at[accepted & (error > 1)]] += 1

        rejected_rows = at[~accepted]
        rejected_size = size[~accepted]
        shorter = rule.rejected(rejected_size, error[~accepted], q)
        self.rejected[rejected_rows] += 1
        self.proposed[rejected_rows] = torch.minimum(shorter, SHORTER * rejected_size)
        self.rejected_size[rejected_rows] = rejected_size

        rows = at[accepted]
        latest_error = error[accepted].clamp(min=SMALLEST)
        errors = (latest_error, *self.errors[:, rows])
        self.proposed[rows] = rule.accepted(size[accepted], self.proposed[rows], errors, q)
        self.errors[:, rows] = torch.stack((latest_error, self.errors[0, rows]))
        self.rejected_size[rows] = math.inf
        return accepted
