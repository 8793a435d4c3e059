"""Gradient by the adjoint ODE: the state and its costate are solved backward, and nothing of the
way there is kept.

On a segment with field v(t, x; theta), a(t) = dL/dx(t) obeys da/dt = -(dv/dx)' a, and dL/dtheta =
integral of (dv/dtheta)' a dt. Of a complex z, dL/dz is dL/d(Re z) + i dL/d(Im z), as autograd has
it, and ' the adjoint over the reals.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from solvers.capture import Captured, aside, untraced, without_graph
from solvers.chain import Backward, Chain, Found, Grads
from solvers.errors import ConfigError, SolveError
from solvers.march import Progress, march
from solvers.method import Method
from solvers.run import Run
from solvers.segment import Segment, Time
from solvers.solution import Solution, Status
from solvers.transforms import check_no_transform

FINER = 0.1
"""By how much the tolerances of an adaptive method are lowered to estimate its error."""


@dataclasses.dataclass(frozen=True)
class AdjointError:
    """How far a backward solve is from the adjoint ODE's exact solution, by repeating it with finer
    steps.

    `gradient` is the relative error of all gradients together (initial state and parameters),
    estimated from twice the steps (a tenth of the tolerances for an adaptive method). `state` is
    how far the state solved backward misses, at worst, one that was kept, relative to it. The
    forward solve's own error comes on top.
    """

    gradient: float
    state: float


Report = Callable[[AdjointError], object]


@dataclasses.dataclass(frozen=True)
class Adjoint:
    """The gradient of the ODE's solution, by the same method backward: off by an error of the
    method's order.

    Keeps the state at each segment's start, whatever the number of steps, and goes on from it when
    the way back gets there. With `restore=False` it keeps the last state only, and one for each
    segment that begins with a projection (`enter`), which cannot be undone: errors of the state
    then add up over the segments, or grow where the field contracts.

    An adaptive method controls the error of state and costate; the parameters' integral follows
    (Kidger et al. 2021). With `report`, each backward pass is repeated more finely and
    `report(AdjointError)` called, at three times the cost. `rtol`, `atol` and `method` are those of
    the way back where it is to have others than the way there.
    """

    report: Report | None = None
    restore: bool = True
    rtol: float | None = None
    atol: float | None = None
    method: Method | None = None

    def __post_init__(self) -> None:
        for name in ("rtol", "atol"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf):
                raise ConfigError(f"{name} = {value!r} of the adjoint: give a positive finite number, or None")
        if self.method is not None and not isinstance(self.method, Method):
            raise ConfigError(f"method = {self.method!r} of the adjoint: give a method, as METHODS['rk4'], or None")

    def check(self, method: Method, segments: Sequence[Segment]) -> None:
        """Raises ConfigError for implicit methods, and for segments whose state is projected after
        each step: that is no ODE.
        """
        if any(getattr(chosen, "implicit", False) for chosen in (method, self.method)):
            raise ConfigError(
                "gradient 'adjoint' solves an ODE made of the field's derivatives, which an implicit method would differentiate again: "
                "use gradient='backprop' or 'checkpoint'"
            )
        for k, segment in enumerate(segments):
            if segment.project is not None:
                raise ConfigError(
                    f"gradient 'adjoint' solves an ODE, and segment {k} projects the state after each step (a norm around it): "
                    "use gradient='checkpoint', or the projected ODE, depth.segments(continuous=True)"
                )

    detached = True
    dense = True

    def scheme(self, method: Method) -> Method:
        return method

    @untraced
    def integrate(self, method: Method, segments: Sequence[Segment], x0: Tensor, run: Run, progress: Progress | None) -> Solution:
        check_no_transform("adjoint")
        starts: dict[int, Tensor] = {}
        noted = [k for k, s in enumerate(segments) if self.restore or k == 0 or s.enter is not None]
        chain, found = Chain([x0]), Found(run)
        captured: Captured = {}
        owners: list[int] = []  # the segment of each saved state
        report, first = self.report, 0
        tolerances = {"rtol": self.rtol or run.rtol, "atol": self.atol or run.atol}
        request = run.again(save="ends", steps=1 if run.save == "steps" else run.steps, **tolerances)

        def done(k: int, x: Tensor) -> None:
            nonlocal captured, first
            captured[k] = capture.take()
            owners.extend([k] * (len(run.saved) - 1 - len(owners)))
            # a report compares all gradients together, so with one the whole way back is one node
            if report is None or k == len(segments) - 1:
                inside = found.take(x)
                stops = list(zip(owners[found.count :], (saved.time for saved in inside), strict=False))
                kept = [i for i in noted if first <= i <= k]
                stretch = _Stretch(self.method or method, segments[first : k + 1], first, stops, kept, request, report)
                back = partial(_backward, stretch, chain.baton)
                with aside():
                    states = chain.add([saved.x for saved in inside], [x], [starts.pop(i) for i in kept], captured, back)
                found.put(states, chain.links[0])
                captured, first = {}, k + 1

        with without_graph(x0.device) as capture:
            solution = march(method, _noting(segments, noted, starts), x0.detach(), run, progress, done)
        if solution.status is not Status.SUCCESS:
            return solution
        outputs = chain.end(found.all(chain.links[0]), [solution.x1])
        run.saved = []
        return dataclasses.replace(solution, x1=outputs[-1], states=(x0, *outputs))


@dataclasses.dataclass(frozen=True)
class _Stretch:
    """Segments from `first` on that are one node: when states inside were saved, and of which
    segments the start is kept.
    """

    method: Method
    segments: Sequence[Segment]
    first: int
    stops: Sequence[tuple[int, float]]
    kept: Sequence[int]
    request: Run
    report: Report | None


def _backward(
    stretch: _Stretch,
    baton: list[Sequence[Any]],
    state: Backward,
    kept: Sequence[Tensor],
    inside: Grads,
    after: Sequence[Tensor],
) -> Sequence[Tensor]:
    """dL/dx at the stretch's start from that at its end."""
    stops: dict[int, list[tuple[float, Tensor | None]]] = {}
    for (k, time), gradient in zip(stretch.stops, inside, strict=True):
        stops.setdefault(k, []).append((time, gradient))
    way = _Way(stretch.method, stretch.segments, stretch.first, stops, dict(zip(stretch.kept, kept, strict=True)))
    x1, *step = baton[0]
    run = stretch.request.again(controlled=(2, *x1.shape), step_size=step[0] if step else None)
    x, a, misses = way.back(x1, after[0], state, run)
    baton[0] = (x, run.step_size)  # an adaptive method takes its step from segment to segment on the way back too
    if stretch.report is not None:
        error = way.error(x1, after[0], a, state, stretch.request)
        stretch.report(AdjointError(error, max(float(miss) for miss in misses)))
    return (a,)


def _noting(segments: Sequence[Segment], noted: Sequence[int], starts: dict[int, Tensor]) -> list[Segment]:
    """The segments, with the state before some of them (and before their `enter`) put down."""

    def noting(k: int, segment: Segment) -> Segment:
        def note(x: Tensor) -> Tensor:
            starts[k] = x
            return x if segment.enter is None else segment.enter(x)

        return segment.with_maps(enter=note)

    wanted = set(noted)
    return [noting(k, segment) if k in wanted else segment for k, segment in enumerate(segments)]


@dataclasses.dataclass(frozen=True)
class _Way:
    """The way back over segments, the first of which is number `first`.

    By a segment's number: the times at which gradients of saved states come in, and the state kept
    from its start.
    """

    method: Method
    segments: Sequence[Segment]
    first: int
    stops: dict[int, list[tuple[float, Tensor | None]]]
    starts: dict[int, Tensor]

    def back(self, x: Tensor, a: Tensor, state: Backward, run: Run) -> tuple[Tensor, Tensor, list[Tensor]]:
        """x and a = dL/dx at the start from those at the end, and by how much each kept state was
        missed.
        """
        misses = []
        for k in range(self.first + len(self.segments) - 1, self.first - 1, -1):
            segment = self.segments[k - self.first]
            t: Time = segment.t1
            for stop, gradient in reversed(self.stops.get(k, [])):
                if stop != float(t):
                    x, a = self._segment(k, t, stop, x, a, state, run)
                    t = stop
                a = a if gradient is None else a + gradient
            x, a = self._segment(k, t, segment.t0, x, a, state, run)
            if k in self.starts:
                solved, entered = x, self.starts[k]
                x = entered
                if segment.enter is not None:
                    entered, a = state.pull(k, segment.enter, x, a)
                misses.append(torch.linalg.vector_norm(solved - entered) / _length(entered))
        return x, a, misses

    def _segment(self, k: int, t1: Time, t0: Time, x: Tensor, a: Tensor, state: Backward, run: Run) -> tuple[Tensor, Tensor]:
        """(x, a) at t0 from (x, a) at t1, the parameters' integral added to the state's gradients."""
        field, tensors = self.segments[k - self.first].field, state.captured[k]
        count, dtype = x.numel(), x.dtype
        sums = [_entries(torch.zeros_like(tensor), dtype) for tensor in tensors]
        used: set[int] = set()

        def augmented(t: Tensor, s: Tensor) -> Tensor:
            v, pulled, parts = state.vjp(k, lambda x: field(t, x), s[:count].view_as(x), s[count : 2 * count].view_as(x))
            used.update(i for i, part in enumerate(parts) if part is not None)
            rates = [v, -pulled, *(torch.zeros_like(z) if g is None else -g for z, g in zip(tensors, parts, strict=True))]
            return torch.cat([_entries(rate, dtype) for rate in rates])

        # the equation is linear in a: at the state's size, the tolerances of an adaptive method
        # mean the same for both
        scale = _length(a) / _length(x) if self.method.adaptive else x.new_ones(())
        flat = torch.cat([x.reshape(-1), (a / scale).reshape(-1), *sums])
        run.saved = []
        solution = march(self.method, [Segment(t1, t0, augmented)], flat, run)
        if solution.status is not Status.SUCCESS:
            raise SolveError(f"the adjoint of segment {k}: {solution.message}", solution)
        ends, costates, *parts = torch.split(solution.x1, [count, count, *(len(part) for part in sums)])
        for i, (tensor, part) in enumerate(zip(tensors, parts, strict=True)):
            if i in used:
                state.add(tensor, _from_entries(scale * part, tensor))
        return ends.view_as(x), scale * costates.view_as(x)

    def error(self, x1: Tensor, a1: Tensor, a: Tensor, state: Backward, request: Run) -> float:
        """The relative error of all gradients together, by going the way again more finely."""
        finer = Backward(state.captured, state.tensors)
        request = request.again(controlled=(2, *x1.shape))
        if self.method.adaptive:
            again, factor = request.again(rtol=FINER * request.rtol, atol=FINER * request.atol), 1.0
        else:
            again, factor = request.again(steps=2 * request.steps), 2**self.method.order / (2**self.method.order - 1)
        _, a_finer, _ = self.back(x1, a1, finer, again)
        pairs = [(a, a_finer), *zip(state.gradients, finer.gradients, strict=True)]
        size = math.hypot(*(float(torch.linalg.vector_norm(fine)) for _, fine in pairs if fine is not None))
        gap = math.hypot(*(float(torch.linalg.vector_norm(g - f)) for g, f in pairs if g is not None and f is not None))
        return factor * gap / size if size else 0.0


def _entries(z: Tensor, dtype: torch.dtype) -> Tensor:
    """The entries of a tensor as ones of a type that is real or complex whatever z is: nothing of a
    complex z is lost in a real state.
    """
    return (torch.view_as_real(z.resolve_conj()) if z.is_complex() and not dtype.is_complex else z).reshape(-1).to(dtype)


def _from_entries(entries: Tensor, z: Tensor) -> Tensor:
    """A tensor like z from its `_entries`."""
    if z.is_complex() and not entries.is_complex():
        entries = torch.view_as_complex(entries.view(-1, 2))
    return (entries if z.is_complex() or not entries.is_complex() else entries.real).to(z.dtype).view(z.shape)


def _length(x: Tensor) -> Tensor:
    """|x|, or 1 where that is zero."""
    length = torch.linalg.vector_norm(x)
    return torch.where(length == 0, torch.ones_like(length), length)
