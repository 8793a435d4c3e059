"""Gradient by the adjoint ODE: the state and its costate are solved backward, and nothing of the way there is kept.

On a segment with field v(t, x; theta), a(t) = dL/dx(t) obeys da/dt = -(dv/dx)' a, and dL/dtheta = integral of (dv/dtheta)' a dt.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from solvers.detached import Backward, Captured, Grads, attach, untraced, without_graph
from solvers.errors import ConfigError, SolveError
from solvers.march import Progress, march
from solvers.method import Method
from solvers.run import Run
from solvers.segment import Segment, Time
from solvers.solution import Solution, Status

FINER = 0.1
"""By how much the tolerances of an adaptive method are lowered to estimate its error."""


@dataclasses.dataclass(frozen=True)
class AdjointError:
    """How far a backward solve is from the adjoint ODE's exact solution, by repeating it with finer steps.

    `gradient` is the relative error of all gradients together (initial state and parameters), estimated from twice the steps
    (a tenth of the tolerances for an adaptive method). `state` is how far the state solved backward misses, at worst, one that
    was kept, relative to it. The forward solve's own error comes on top.
    """

    gradient: float
    state: float


@dataclasses.dataclass(frozen=True)
class Adjoint:
    """The gradient of the ODE's solution, by the same method backward: off by an error of the method's order.

    Keeps the state at each segment's start, whatever the number of steps, and goes on from it when the way back gets there.
    With `restore=False` it keeps the last state only, and one for each segment that begins with a projection (`enter`), which
    cannot be undone: errors of the state then add up over the segments, or grow where the field contracts.

    An adaptive method controls the error of state and costate; the parameters' integral follows (Kidger et al. 2021). With
    `report`, each backward pass is repeated more finely and `report(AdjointError)` called, at three times the cost.
    """

    report: Callable[[AdjointError], object] | None = None
    restore: bool = True

    def check(self, method: Method, segments: Sequence[Segment]) -> None:
        """Raises ConfigError for segments whose state is projected after each step: that is no ODE."""
        for k, segment in enumerate(segments):
            if segment.project is not None:
                raise ConfigError(
                    f"gradient 'adjoint' solves an ODE, and segment {k} projects the state after each step (a norm around it): "
                    "use gradient='checkpoint', or the projected ODE, depth.segments(continuous=True)"
                )

    detached = True

    def scheme(self, method: Method) -> Method:
        return method

    @untraced
    def integrate(self, method: Method, segments: Sequence[Segment], x0: Tensor, run: Run, progress: Progress | None) -> Solution:
        captured: Captured = {}
        starts: dict[int, Tensor] = {}
        inside: dict[int, range] = {}
        noted = [k for k, s in enumerate(segments) if self.restore or k == 0 or s.enter is not None]

        def done(k: int) -> None:
            captured[k] = capture.take()
            inside[k] = range(sum(map(len, inside.values())), len(run.saved) - 1)
            if progress is not None:
                progress(k)

        with without_graph(x0.device) as capture:
            solution = march(method, _noting(segments, noted, starts), x0.detach(), run, done)
        if solution.status is not Status.SUCCESS:
            return solution
        if run.save == "ends":
            inside[len(segments) - 1] = range(1)
        times = solution.times[1:]

        def backward(state: Backward, kept: Sequence[Tensor], gradients: Grads) -> Tensor:
            x1, *before = kept
            stops = {k: [(times[i], gradients[i]) for i in places] for k, places in inside.items()}
            way = _Way(method, segments, stops, dict(zip(noted, before, strict=True)))
            request = run.again(save="ends", steps=1 if run.save == "steps" else run.steps)
            a, misses = way.back(x1, state, request)
            if self.report is not None:
                self.report(AdjointError(way.error(x1, a, state, request), max(float(miss) for miss in misses)))
            return a

        keep = [solution.x1, *(starts[k] for k in noted)]
        starts.clear()
        run.saved = []
        outputs = attach(solution.states[1:], keep, x0, captured, backward)
        return dataclasses.replace(solution, x1=outputs[-1], states=(x0, *outputs))


def _noting(segments: Sequence[Segment], noted: Sequence[int], starts: dict[int, Tensor]) -> list[Segment]:
    """The segments, with the state before some of them (and before their `enter`) put down."""

    def noting(k: int, segment: Segment) -> Segment:
        def note(x: Tensor) -> Tensor:
            starts[k] = x
            return x if segment.enter is None else segment.enter(x)

        return dataclasses.replace(segment, enter=note)

    wanted = set(noted)
    return [noting(k, segment) if k in wanted else segment for k, segment in enumerate(segments)]


@dataclasses.dataclass(frozen=True)
class _Way:
    """The way back: by segment the times at which gradients of saved states come in, and the states kept from its start."""

    method: Method
    segments: Sequence[Segment]
    stops: dict[int, list[tuple[float, Tensor | None]]]
    starts: dict[int, Tensor]

    def back(self, x: Tensor, state: Backward, request: Run) -> tuple[Tensor, list[Tensor]]:
        """a = dL/dx at the start, from the state at the end, and by how much each kept state was missed."""
        a, misses = torch.zeros_like(x), []
        run = request.again(controlled=2 * x.numel())
        for k in range(len(self.segments) - 1, -1, -1):
            segment = self.segments[k]
            t: Time = segment.t1
            for stop, gradient in reversed(self.stops[k]):
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
        return a, misses

    def _segment(self, k: int, t1: Time, t0: Time, x: Tensor, a: Tensor, state: Backward, run: Run) -> tuple[Tensor, Tensor]:
        """(x, a) at t0 from (x, a) at t1, the parameters' integral added to the state's gradients."""
        field, tensors = self.segments[k].field, state.captured[k]
        shapes = [x.shape, x.shape, *(tensor.shape for tensor in tensors)]
        sizes = [math.prod(shape) for shape in shapes]
        used: set[int] = set()

        def augmented(t: Tensor, s: Tensor) -> Tensor:
            x, a = (part.view(shape) for part, shape in zip(s[: 2 * sizes[0]].split(sizes[:2]), shapes[:2], strict=True))
            v, pulled, parts = state.vjp(k, lambda x: field(t, x), x, a)
            used.update(i for i, part in enumerate(parts) if part is not None)
            rates = [v, -pulled, *(torch.zeros_like(z) if g is None else -g for z, g in zip(tensors, parts, strict=True))]
            return torch.cat([rate.reshape(-1).to(s.dtype) for rate in rates])

        # the equation is linear in a: at the state's size, the tolerances of an adaptive method mean the same for both
        scale = _length(a) / _length(x) if self.method.adaptive else x.new_ones(())
        flat = torch.cat([x.reshape(-1), (a / scale).reshape(-1), *(x.new_zeros(size) for size in sizes[2:])])
        run.saved = []
        solution = march(self.method, [Segment(t1, t0, augmented)], flat, run)
        if solution.status is not Status.SUCCESS:
            raise SolveError(f"the adjoint of segment {k}: {solution.message}", solution)
        x, a, *sums = (part.view(shape) for part, shape in zip(solution.x1.split(sizes), shapes, strict=True))
        for i, (tensor, part) in enumerate(zip(tensors, sums, strict=True)):
            if i in used:
                state.add(tensor, (scale * part).to(tensor.dtype))
        return x, scale * a

    def error(self, x1: Tensor, a: Tensor, state: Backward, request: Run) -> float:
        """The relative error of all gradients together, by going the way again more finely."""
        finer = Backward(state.captured, state.tensors)
        if self.method.adaptive:
            again, factor = request.again(rtol=FINER * request.rtol, atol=FINER * request.atol), 1.0
        else:
            again, factor = request.again(steps=2 * request.steps), 2**self.method.order / (2**self.method.order - 1)
        a_finer, _ = self.back(x1, finer, again)
        pairs = [(a, a_finer), *zip(state.gradients, finer.gradients, strict=True)]
        size = math.sqrt(sum(float(fine.square().sum()) for _, fine in pairs if fine is not None))
        gap = math.sqrt(sum(float((g - f).square().sum()) for g, f in pairs if g is not None and f is not None))
        return factor * gap / size if size else 0.0


def _length(x: Tensor) -> Tensor:
    """|x|, or 1 where that is zero."""
    length = torch.linalg.vector_norm(x)
    return torch.where(length == 0, torch.ones_like(length), length)
