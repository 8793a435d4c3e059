"""Runge-Kutta methods over one segment, with fixed or adaptive steps."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from functools import cache, partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from solvers.attempts import Attempts
from solvers.changes import (
    check_kept,
    graph_version,
    is_same_state,
    owned,
    owned_state,
    share_memory,
    version_of,
)
from solvers.checked import checked
from solvers.controller import CONTROLLERS, Controller, StepSize
from solvers.errors import ConfigError, shown
from solvers.first_step import initial_step
from solvers.implicit import NotSolved, implicit_stage
from solvers.method import BOUNDED, FIXED
from solvers.reversible_scheme import Finish, ReversibleScheme
from solvers.run import Accepted, Run, Step, Stopped, check_like, finite, real_type
from solvers.segment import Segment
from solvers.stiffness import STARTED
from solvers.tableau import Tableau

Attempted = tuple[list[Tensor], Tensor, Tensor, list[Tensor]]
"""An adaptive step from x: its stages, h sum_i b_i k_i, the state after it, and the norms of its
errors.
"""
UNSOLVED = 20
"""The most attempts in a row, each shorter, with an unsolved implicit stage: together they shorten
the step by 1e14.
"""


@checked
@dataclasses.dataclass(frozen=True)
class RungeKutta:
    """The method of a tableau, with equal steps. An `adaptive` one takes steps whose sizes
    `controller` chooses by the embedded weights. `compiled` runs each of these steps by
    `torch.compile`.

    Raises ConfigError for an adaptive method whose tableau has no embedded weights, for `compiled`
    with equal or implicit steps, and for a controller without the protocol's methods.
    """

    tableau: Tableau
    adaptive: bool = False
    controller: Controller = CONTROLLERS["cautious"]
    compiled: bool = False
    # stages that enter the result: all but those that only estimate the error
    used: int = dataclasses.field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.adaptive and self.tableau.embedded is None:
            raise ConfigError(
                "a method without embedded weights cannot estimate its error: give the tableau"
                " embedded weights, or adaptive=False"
            )
        if self.compiled and (self.implicit or not self.adaptive):
            raise ConfigError(
                "only steps of adaptive explicit methods are compiled: use one as tsit5, or"
                " torch.compile of the whole solve"
            )
        if not isinstance(self.controller, Controller) or isinstance(self.controller, type):
            raise ConfigError(
                f"controller = {shown(self.controller)}: give a rule such as PI(safety=0.9) or"
                " Cautious()"
            )
        last_used = max(i for i, weight in enumerate(self.tableau.b) if weight != 0)
        object.__setattr__(self, "used", last_used + 1)

    @property
    def order(self) -> int:
        """The formal order: the global error is O(h^order) on a smooth field."""
        return self.tableau.order

    @property
    def dense(self) -> bool:
        """Whether it gives the states inside its steps."""
        return bool(self.tableau.dense)

    @property
    def implicit(self) -> bool:
        """Whether Newton's method finds its stages."""
        return self.tableau.gamma > 0

    @property
    def options(self) -> frozenset[str]:
        """The options of `solve` that it uses. Implicit methods with fixed steps use tolerances for
        Newton's method.
        """
        if self.adaptive:
            return BOUNDED
        if self.implicit:
            return FIXED | {"rtol", "atol", "norm"}
        return FIXED

    shows_steps = True

    def fixed(self) -> RungeKutta:
        """The same weights with steps of fixed size, for convergence tests."""
        return RungeKutta(self.tableau)

    def reversible(self, coupling: float) -> ReversibleScheme:
        """The scheme that `gradient="reversible"` uses with this method."""
        return ReversibleScheme(self, coupling)

    def advance(
        self, segment: Segment, x: Tensor, run: Run, finish: Finish | None = None
    ) -> Tensor:
        """The state at the segment's end. Raises Stopped if it cannot get there.

        `finish`, if given, makes each next x instead. An adaptive method controls the error of x +
        increment.
        """
        if self.adaptive:
            return self._adaptive(segment, x, run, finish)
        h = segment.step(run.steps)
        for start, end in segment.intervals(run.steps):
            step = Step(segment, start, end, h)
            times: list[float] = []
            if run.pending_times:
                times = run.passed(start, end)
            if finish is not None:
                following = finish(step, x, self.increment(step, x, run))
                assert following is not None, "a step of given size is not refused"
                run.trace.append(step)
                x = following
            elif times or run.observers:
                stages = self._stages(step, x, run, None, len(self.tableau.b))
                increment = weighted(h, self.tableau.b, stages)
                x1 = x + increment
                if run.increments is not None:
                    run.increments.add(x, increment, x1)
                x = self._complete(step, x, x1, stages, times, run)
            else:
                increment = self.increment(step, x, run)
                x1 = x + increment
                if run.increments is not None:
                    run.increments.add(x, increment, x1)
                x = run.accept(segment, end, x1)
        return x

    walk = advance

    def increment(self, step: Step, x: Tensor, run: Run) -> Tensor:
        """h sum_i b_i k_i: what one step adds to x, without error estimate and before
        projection.
        """
        if self.used == 1:  # Euler: beside the field of a small model every call counts
            t = run.start(step.segment, step.start, x)
            return step.h * self.tableau.b[0] * run.velocity(step.segment, t, x, kept=False)
        return weighted(step.h, self.tableau.b, self._stages(step, x, run, None, self.used))

    def pieces(self, segment: Segment, steps: int) -> Iterator[Segment]:
        """The segment's steps as segments of one step each, with the same bits."""
        ends = [segment.ends[0] + segment.length * Fraction(i, steps) for i in range(steps + 1)]
        for i, (t0, t1) in enumerate(pairwise(ends)):
            yield segment.part(t0, t1, first=i == 0)

    def _complete(
        self,
        step: Step,
        x: Tensor,
        x1: Tensor,
        stages: Sequence[Tensor],
        times: Sequence[float],
        run: Run,
    ) -> Tensor:
        """The state after an accepted step from x to x1, projected. Shows the step to the
        observers, and saves the states at times inside it.
        """
        inside = None
        if self.dense and (times or run.observers):
            inside = self._inside(step, x, stages, run)
        accepted = None
        if run.observers:
            accepted = Accepted(step, x, x1, stages[0], inside)
        following = run.accept(step.segment, step.end, x1, accepted)
        for time in times:
            assert inside is not None, "a method without states inside its steps was refused"
            if time == step.end:
                run.keep(time, following)
            else:
                run.keep(time, inside(time))
        return following

    def _inside(
        self, step: Step, x: Tensor, stages: Sequence[Tensor], run: Run
    ) -> Callable[[Tensor | float], Tensor]:
        """t -> the state at a time inside a step from x, by the tableau's interpolation. It is
        differentiable by a time given as a tensor.
        """
        with_graph = torch.is_grad_enabled()
        evaluated = list(stages)
        versions = [graph_version(stage) for stage in stages]

        def all_stages() -> Sequence[Tensor]:
            """The stages and the inner ones, which the first call evaluates."""
            if self.tableau.inner and len(evaluated) == len(stages):
                evaluated[:] = [owned(stage) for stage in stages]
                # the first call may come from the search for a root, which has no graph
                with torch.set_grad_enabled(with_graph):
                    for row, node in zip(self.tableau.inner, self.tableau.inner_c, strict=True):
                        t = step.start + node * (step.end - step.start)
                        state = x + weighted(step.h, row, evaluated)
                        evaluated.append(owned(run.velocity(step.segment, t, state)))
                        versions.append(graph_version(evaluated[-1]))
            check_kept(evaluated, versions)
            return evaluated

        def inside(t: Tensor | float) -> Tensor:
            theta = (t - step.start) / (step.end - step.start)
            if isinstance(theta, Tensor):
                weights = [
                    (step.h * weight).to(x.dtype) for weight in self.tableau.dense_weights(theta)
                ]
                state = x + sum(
                    weight * stage for weight, stage in zip(weights, all_stages(), strict=True)
                )
            else:
                state = x + weighted(step.h, self.tableau.dense_weights(theta), all_stages())
            if step.segment.project is None:
                return state
            return owned_state(step.segment.project(state), state)

        return inside

    def step_size(self, first: float, run: Run) -> StepSize:
        """The steps' sizes by its controller, from the first one on."""
        return StepSize(
            self.controller, self.tableau.error_order, first, run.min_step, run.max_step
        )

    def _adaptive(self, segment: Segment, x: Tensor, run: Run, finish: Finish | None) -> Tensor:
        t = segment.start
        first = run.velocity(segment, t, x)
        if run.step_size is None:
            first = owned(first)
            if run.first_step is None:
                first_step = initial_step(segment, x, first, run, self.order)
            else:
                first_step = run.first_step
            run.step_size = self.step_size(first_step, run)
        attempts = Attempts(segment, run.step_size, run.stats, run.max_steps)
        unsolved = 0
        while t != segment.end:
            # a short segment may be one step; if the field is not finite at the start, no step
            # is short enough
            sound = math.isfinite(attempts.error) or finite(first)
            step, broken = attempts.next(t, x.dtype, sound=sound)
            if broken is not None:
                run.note_tight_tolerances(self.order)
                raise Stopped(broken, t, x)
            try:
                if self.compiled:
                    stages, increment, x1, norms = self._compiled(step, x, run, first)
                else:
                    stages, increment, x1, norms = self._attempt(step, x, run, first)
            except Stopped:
                attempts.judge(attempts.error, refused=True)
                unsolved += 1
                if unsolved == UNSOLVED or attempts.size <= run.min_step:
                    raise
                continue
            unsolved = 0
            first = stages[0]  # evaluated again if it was replaced
            version = version_of(x1)
            error = self.tableau.error([float(norm) for norm in norms])
            if finish is not None and run.step_size.allows(attempts.size, error):
                following = finish(step, x, increment)
            else:
                following = x1
            if not attempts.judge(error, refused=following is None):
                continue
            assert following is not None, "a refused step is rejected"
            if run.stats.accepted >= STARTED and run.stats.stiff_at is None and not self.implicit:
                self._check_stiffness(step, stages, run)
            run.trace.append(step)
            if finish is None:
                times: list[float] = []
                if run.pending_times:
                    times = run.passed(t, step.end)
                following = self._complete(step, x, x1, stages, times, run)
            x = following
            t = step.end
            if t != segment.end:
                if self.tableau.reuses_last_stage and is_same_state(segment, x, x1, version):
                    first = stages[-1]
                else:
                    first = run.velocity(segment, t, x)
        return x

    def _attempt(
        self,
        step: Step,
        x: Tensor,
        run: Run,
        first: Tensor,
        field: Callable[[Any, Tensor], Tensor] | None = None,
    ) -> Attempted:
        """One attempt from x, whose first stage is known."""
        stages = self._stages(step, x, run, first, len(self.tableau.b), field)
        increment = weighted(step.h, self.tableau.b, stages)
        x1 = x + increment
        with torch.no_grad():
            norms = []
            for weights in self.tableau.error_weights:
                error = weighted(step.h, weights, stages)
                norms.append(run.size(error, x, x1))
        return stages, increment, x1, norms

    def _compiled(self, step: Step, x: Tensor, run: Run, first: Tensor) -> Attempted:
        """`_attempt` by `torch.compile`. Evaluations are counted here, and times are in a tensor: a
        Python number that changes would compile the step again.
        """
        run.stats.evaluations += len(self.tableau.b) - 1
        low, high = run.inside(step.segment, x.dtype)
        numbers = torch.tensor(
            [step.start, step.end, step.h, low, high], dtype=torch.float64, device="cpu"
        )
        # As tensors without axes: a compiled CUDA kernel takes those from the CPU by value, but
        # takes a vector on the CPU by its address, which is none on the GPU.
        return _compiled_attempt()(self, step.segment, numbers.unbind(), x, run, first)

    def _stages(
        self,
        step: Step,
        x: Tensor,
        run: Run,
        first: Tensor | None,
        count: int,
        field: Callable[[Any, Tensor], Tensor] | None = None,
    ) -> list[Tensor]:
        """The first `count` stages of a step from x; the very first one may be given. `field(t, x)`
        stands for the segment's, counted.
        """
        segment, start, end, h = step
        if field is None:
            field = partial(run.velocity, segment)
        if first is None:
            first = field(start, x)
        if self.implicit:
            first = owned(first)
        stages = [first]
        versions = [graph_version(first)]
        near = x
        for i in range(1, count):
            node = self.tableau.c[i]
            if node == 1:
                t = end
            else:
                t = start + node * (end - start)
            base = x + weighted(h, self.tableau.a[i], stages)
            if not self.implicit:
                stages.append(field(t, base))
                versions.append(graph_version(stages[-1]))
                continue
            try:
                stages.append(implicit_stage(run, segment, t, base, h * self.tableau.gamma, near))
            except NotSolved as failed:
                raise Stopped(failed.status, start, x) from None
            # start Newton's method for the next stage from this one
            near = base + h * self.tableau.gamma * stages[-1]
        if self.implicit:  # Newton's method makes new tensors
            return stages
        check_kept(stages, versions)
        if share_memory(stages) and not run.copies:
            run.copies = True
            return self._stages(step, x, run, None, count, field)
        return stages

    @torch.no_grad()
    def _check_stiffness(self, step: Step, stages: Sequence[Tensor], run: Run) -> None:
        """Records in the statistics if stability bounds the steps."""
        moved = torch.linalg.vector_norm(weighted(step.h, self.tableau.last_difference, stages))
        product = abs(step.h) * float(torch.linalg.vector_norm(stages[-1] - stages[-2]) / moved)
        if run.stiffness.found(product, self.tableau.stability_interval):
            run.stats.stiff_at = step.start


@cache
def _compiled_attempt() -> Callable[..., Attempted]:
    """`_attempt`, compiled. It is made at the first use, because it imports the compiler."""

    def attempt(
        method: RungeKutta,
        segment: Segment,
        numbers: Any,
        x: Tensor,
        run: Run,
        first: Tensor,
    ) -> Any:
        start, end, h, low, high = numbers

        def field(t: Tensor, x: Tensor) -> Tensor:
            v = segment.acting(t.clamp(low, high).to(real_type(x.dtype)), x)
            check_like("field", v, x)
            return v

        return method._attempt(Step(segment, start, end, h), x, run, first, field)

    return torch.compile(attempt, dynamic=False)


def weighted(h: float | Tensor, weights: Sequence[float], stages: Sequence[Tensor]) -> Tensor:
    """h sum_i w_i k_i without the zero weights. For one stage of weight 1 and a number h it has
    exactly the bits of `h * k`.
    """
    if isinstance(h, Tensor):
        wide = [stage.to(torch.promote_types(stage.dtype, torch.float32)) for stage in stages]
        return (h * weighted(1.0, weights, wide)).to(stages[0].dtype)
    total = None
    for weight, stage in zip(weights, stages, strict=False):
        if weight:
            if total is None:
                total = (h * weight) * stage
            else:
                total = torch.add(total, stage, alpha=h * weight)
    if total is None:
        return torch.zeros_like(stages[0])
    return total
