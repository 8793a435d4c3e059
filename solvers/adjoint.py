"""Gradient by the adjoint ODE: the state and its costate are solved backward, without storing the
steps of the forward solve.

On a segment with field v(t, x; theta), a(t) = dL/dx(t) obeys da/dt = -(dv/dx)' a, and dL/dtheta =
integral of (dv/dtheta)' a dt. For a complex z, dL/dz is dL/d(Re z) + i dL/d(Im z), as in autograd,
and ' is the adjoint over the reals.
"""

from __future__ import annotations

import dataclasses
import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from solvers.capture import Captured, untraced, without_graph
from solvers.chain import Arrival, Backward, Chain
from solvers.checked import checked
from solvers.errors import ConfigError, SolveError, check_positive, shown
from solvers.march import Gradient, Progress, march
from solvers.method import Method
from solvers.run import Run
from solvers.segment import Segment, Time
from solvers.solution import Solution, Status
from solvers.transforms import check_no_transform

FINER = 0.1
"""Factor on the tolerances of an adaptive method, to estimate its error."""


@dataclasses.dataclass(frozen=True)
class AdjointError:
    """The error of a backward solve against the exact adjoint ODE, from a second backward solve
    with finer steps.

    `gradient` is the relative error of all gradients together (initial state and parameters),
    estimated from twice the steps (a tenth of the tolerances for an adaptive method). `state` is
    the largest relative distance of the state solved backward from a kept one. The forward solve's
    own error is not included.
    """

    gradient: float
    state: float


Report = Callable[[AdjointError], object]


@checked
@dataclasses.dataclass(frozen=True)
class Adjoint(Gradient):
    """The gradient of the ODE's solution, by the same method backward. Its error has the method's
    order.

    It keeps the state at each segment's start, whatever the number of steps; the backward solve
    continues from that state. With `restore=False` it keeps the last state only, and one for each
    segment that begins with a projection (`enter`), which has no inverse. Errors of the state then
    add up over the segments, or grow if the field contracts.

    An adaptive method controls the error of state and costate, but not that of the parameters'
    integral (Kidger et al. 2021). With `report`, each backward pass is repeated with finer steps,
    and `report(AdjointError)` is called; this takes three times the cost. `rtol`, `atol` and
    `method` are those of the backward solve; None takes those of the forward solve.
    """

    report: Report | None = None
    restore: bool = True
    rtol: float | None = None
    atol: float | None = None
    method: Method | None = None

    def __post_init__(self) -> None:
        for name in ("rtol", "atol"):
            if getattr(self, name) is not None:
                check_positive(f"the adjoint's {name}", getattr(self, name))
        if self.method is not None and not isinstance(self.method, Method):
            raise ConfigError(
                f"method = {shown(self.method)} of the adjoint: give a method, as METHODS['rk4'],"
                " or None"
            )

    def check(self, method: Method, segments: Sequence[Segment]) -> None:
        """Raises ConfigError for implicit methods, and for segments that project the state after
        each step, which is no step of an ODE.
        """
        if any(getattr(chosen, "implicit", False) for chosen in (method, self.method)):
            raise ConfigError(
                "gradient 'adjoint' solves an ODE made of the field's derivatives, which an"
                " implicit method would differentiate again: use gradient='backprop' or"
                " 'checkpoint'"
            )
        for k, segment in enumerate(segments):
            if segment.project is not None:
                raise ConfigError(
                    f"gradient 'adjoint' solves an ODE, and segment {k} projects the state after"
                    " each step (a norm around it): use gradient='checkpoint', or the projected"
                    " ODE, depth.segments(continuous=True)"
                )

    detached = True
    dense = True

    @untraced
    def integrate(
        self,
        method: Method,
        segments: Sequence[Segment],
        x0: Tensor,
        run: Run,
        progress: Progress | None,
    ) -> Solution:
        check_no_transform("adjoint")
        chain = Chain([x0], run)
        # of the segments since the last node: the states at their starts, the captured tensors, the
        # accepted steps at their ends
        starts: dict[int, Tensor] = {}
        captured: Captured = {}
        counts: list[int] = []
        tolerances = {"rtol": self.rtol or run.rtol, "atol": self.atol or run.atol}
        request = run.again(
            save="ends", steps=1 if run.save == "steps" else run.steps, **tolerances
        )

        def done(k: int, x: Tensor) -> None:
            captured[k] = capture.take()
            counts.append(run.stats.accepted)
            # a report compares all gradients together, so with one the whole way back is one node
            if self.report is None or k == len(segments) - 1:
                stretch = {i: segments[i] for i in captured}
                way = _AdjointPass(
                    self.method or method,
                    stretch,
                    list(starts),
                    list(counts),
                    request,
                    self.report,
                    chain.baton,
                )
                chain.add([x], list(starts.values()), dict(captured), way)
                for found in (starts, captured, counts):
                    found.clear()

        noting = [
            _noting(k, s, starts) if self.restore or k == 0 or s.enter is not None else s
            for k, s in enumerate(segments)
        ]
        with without_graph(x0.device) as capture:
            solution = march(method, noting, x0.detach(), run, progress, done)
        if solution.status is Status.SUCCESS:
            return chain.end(solution, x0, [solution.x1])
        return solution


def _noting(k: int, segment: Segment, starts: dict[int, Tensor]) -> Segment:
    """The segment, which also stores the state at its start, before `enter`, as starts[k]."""

    def note(x: Tensor) -> Tensor:
        starts[k] = x
        if segment.enter is None:
            return x
        return segment.enter(x)

    return segment.with_maps(enter=note)


Stops = dict[int, list[tuple[float, Tensor | None]]]
"""By a segment's number: the times of its saved states, and their gradients."""


@dataclasses.dataclass(frozen=True)
class _AdjointPass:
    """The backward solve over the segments (by their numbers) of one autograd node: a `Pass`.

    The starts of the segments `kept` are kept. `counts` are the accepted steps at each segment's
    end.
    """

    method: Method
    segments: dict[int, Segment]
    kept: Sequence[int]
    counts: Sequence[int]
    request: Run
    report: Report | None
    baton: list[Sequence[Any]]

    def __call__(
        self,
        state: Backward,
        kept: Sequence[Tensor],
        arrivals: Sequence[Arrival],
        after: Sequence[Tensor],
    ) -> Sequence[Tensor]:
        """dL/dx at the start of the segments from that at their end."""
        numbers = list(self.segments)
        stops: Stops = {k: [] for k in numbers}
        for time, steps, gradient in arrivals:
            stops[numbers[bisect_left(self.counts, steps)]].append((time, gradient))
        starts = dict(zip(self.kept, kept, strict=True))
        x1, *step = self.baton[0]
        request = self.request.again(controlled=(2, *x1.shape))
        run = request.again(step_size=step[0] if step else None)
        x, a, misses = self._back(x1, after[0], stops, starts, state, run)
        # an adaptive method continues with its step size on the way back too
        self.baton[0] = (x, run.step_size)
        if self.report is not None:
            # the error over the difference of the coarser solve from the finer one
            finer = request.again(rtol=FINER * request.rtol, atol=FINER * request.atol)
            factor = 1.0
            if not self.method.adaptive:
                finer = request.again(steps=2 * request.steps)
                factor = 2**self.method.order / (2**self.method.order - 1)
            fine = Backward(state.captured, state.tensors)
            _, a_fine, _ = self._back(x1, after[0], stops, starts, fine, finer)
            pairs = [(a, a_fine), *zip(state.gradients, fine.gradients, strict=True)]
            size = math.hypot(
                *(float(torch.linalg.vector_norm(f)) for _, f in pairs if f is not None)
            )
            gap = math.hypot(
                *(
                    float(torch.linalg.vector_norm(g - f))
                    for g, f in pairs
                    if g is not None and f is not None
                )
            )
            self.report(
                AdjointError(
                    factor * gap / size if size else 0.0, max(float(miss) for miss in misses)
                )
            )
        return (a,)

    def _back(
        self,
        x: Tensor,
        a: Tensor,
        stops: Stops,
        starts: dict[int, Tensor],
        state: Backward,
        run: Run,
    ) -> tuple[Tensor, Tensor, list[Tensor]]:
        """x and a = dL/dx at the start from those at the end, and the relative miss of each kept
        state.
        """
        misses = []
        for k, segment in reversed(self.segments.items()):
            t: Time = segment.t1
            for stop, gradient in reversed(stops[k]):
                if stop != float(t):
                    x, a = self._segment(k, t, stop, x, a, state, run)
                    t = stop
                if gradient is None:
                    a = a
                else:
                    a = a + gradient
            x, a = self._segment(k, t, segment.t0, x, a, state, run)
            if k in starts:
                solved = x
                entered = starts[k]
                x = entered
                if segment.enter is not None:
                    entered, a = state.pull(k, segment.enter, x, a)
                misses.append(torch.linalg.vector_norm(solved - entered) / _length(entered))
        return x, a, misses

    def _segment(
        self, k: int, t1: Time, t0: Time, x: Tensor, a: Tensor, state: Backward, run: Run
    ) -> tuple[Tensor, Tensor]:
        """(x, a) at t0 from (x, a) at t1. Adds the parameters' integral to their gradients."""
        field = self.segments[k].field
        tensors = state.captured[k]
        count = x.numel()
        dtype = x.dtype
        sums = [_entries(torch.zeros_like(tensor), dtype) for tensor in tensors]
        used: set[int] = set()

        def augmented(t: Tensor, s: Tensor) -> Tensor:
            v, pulled, parts = state.vjp(
                k, lambda x: field(t, x), s[:count].view_as(x), s[count : 2 * count].view_as(x)
            )
            used.update(i for i, part in enumerate(parts) if part is not None)
            rates = [
                v,
                -pulled,
                *(
                    torch.zeros_like(z) if g is None else -g
                    for z, g in zip(tensors, parts, strict=True)
                ),
            ]
            return torch.cat([_entries(rate, dtype) for rate in rates])

        # the equation is linear in a: scaled to the state's size, the same tolerances suit both
        if self.method.adaptive:
            scale = _length(a) / _length(x)
        else:
            scale = x.new_ones(())
        flat = torch.cat([x.reshape(-1), (a / scale).reshape(-1), *sums])
        run.saved = []
        solution = march(self.method, [Segment(t1, t0, augmented)], flat, run)
        if solution.status is not Status.SUCCESS:
            raise SolveError(f"the adjoint of segment {k}: {solution.message}", solution)
        ends, costates, *parts = torch.split(
            solution.x1, [count, count, *(len(part) for part in sums)]
        )
        for i, (tensor, part) in enumerate(zip(tensors, parts, strict=True)):
            if i in used:
                state.add(tensor, _from_entries(scale * part, tensor))
        return ends.view_as(x), scale * costates.view_as(x)


def _entries(z: Tensor, dtype: torch.dtype) -> Tensor:
    """The entries of a tensor in a real or complex type. A real type gets the real and imaginary
    parts of a complex z.
    """
    return (
        (torch.view_as_real(z.resolve_conj()) if z.is_complex() and not dtype.is_complex else z)
        .reshape(-1)
        .to(dtype)
    )


def _from_entries(entries: Tensor, z: Tensor) -> Tensor:
    """A tensor like z from its `_entries`."""
    if z.is_complex() and not entries.is_complex():
        entries = torch.view_as_complex(entries.view(-1, 2))
    return (
        (entries if z.is_complex() or not entries.is_complex() else entries.real)
        .to(z.dtype)
        .view(z.shape)
    )


def _length(x: Tensor) -> Tensor:
    """|x|, or 1 if that is zero."""
    length = torch.linalg.vector_norm(x)
    return torch.where(length == 0, torch.ones_like(length), length)
