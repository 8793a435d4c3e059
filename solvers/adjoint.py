"""Gradient by the adjoint ODE: the state and its costate are solved backward, and nothing of the way there is kept.

On a segment with field v(t, x; theta), a(t) = dL/dx(t) obeys da/dt = -(dv/dx)' a, and dL/dtheta = integral of (dv/dtheta)' a dt.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from solvers.detached import Backward, Captured, Grads, attach, without_graph
from solvers.errors import ConfigError, SolveError
from solvers.march import Progress, march
from solvers.methods import Method
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

    @torch.compiler.disable  # the compiler cannot trace what looks for captured tensors; around it a model compiles
    def integrate(self, method: Method, segments: Sequence[Segment], x0: Tensor, run: Run, progress: Progress | None) -> Solution:
        captured: Captured = {}
        starts: dict[int, Tensor] = {}

        def done(k: int) -> None:
            captured[k] = capture.take()
            if progress is not None:
                progress(k)

        with without_graph(x0.device.type) as capture:
            solution = march(method, _noting(segments, starts), x0, run, done)
        if solution.status is not Status.SUCCESS:
            return solution
        if not self.restore:
            starts = {k: x for k, x in starts.items() if k == 0 or segments[k].enter is not None}
        times, places = solution.times[1:], list(starts)

        def backward(state: Backward, kept: Sequence[Tensor], gradients: Grads) -> Tensor:
            x1, *before = kept
            way = _Way(method, segments, dict(zip(times, gradients, strict=True)), dict(zip(places, before, strict=True)))
            request = run.again(save="ends", steps=1 if run.save == "steps" else run.steps)
            a, miss = way.back(x1, state, request)
            if self.report is not None:
                self.report(AdjointError(way.error(x1, a, state, request), miss))
            return a

        keep = [solution.x1, *starts.values()]
        starts.clear()
        run.saved = []
        outputs = attach(solution.states[1:], keep, x0, captured, backward)
        return dataclasses.replace(solution, x1=outputs[-1], states=(x0, *outputs))


def _noting(segments: Sequence[Segment], starts: dict[int, Tensor]) -> list[Segment]:
    """The segments, with the state before each (and before its `enter`) noted."""

    def noting(k: int, segment: Segment) -> Segment:
        def note(x: Tensor) -> Tensor:
            starts[k] = x
            return x if segment.enter is None else segment.enter(x)

        return dataclasses.replace(segment, enter=note)

    return [noting(k, segment) for k, segment in enumerate(segments)]


@dataclasses.dataclass(frozen=True)
class _Way:
    """The way back: where gradients of saved states come in, and the states that were kept, by the segment they precede."""

    method: Method
    segments: Sequence[Segment]
    gradients: dict[float, Tensor | None]
    starts: dict[int, Tensor]

    def back(self, x: Tensor, state: Backward, request: Run) -> tuple[Tensor, float]:
        """a = dL/dx at the start, from the state at the end, and the largest miss of a kept state."""
        a, misses = torch.zeros_like(x), []
        run = request.again(controlled=2 * x.numel())
        for k in range(len(self.segments) - 1, -1, -1):
            segment = self.segments[k]
            stops: list[Time] = [t for t in self.gradients if segment.start < t < segment.end or segment.end < t < segment.start]
            for t0, t1 in reversed(list(pairwise([segment.t0, *stops, segment.t1]))):
                gradient = self.gradients.get(float(t1))
                a = a if gradient is None else a + gradient
                x, a = self._segment(k, t1, t0, x, a, state, run)
            if k in self.starts:
                solved, entered = x, self.starts[k]
                x = entered
                if segment.enter is not None:
                    entered, a = state.pull(k, segment.enter, x, a)
                misses.append(torch.linalg.vector_norm(solved - entered) / torch.linalg.vector_norm(entered))
        return a, float(torch.stack(misses).max())

    def _segment(self, k: int, t1: Time, t0: Time, x: Tensor, a: Tensor, state: Backward, run: Run) -> tuple[Tensor, Tensor]:
        """(x, a) at t0 from (x, a) at t1, the parameters' integral added to the state's gradients."""
        field, tensors = self.segments[k].field, state.captured[k]
        shapes = [x.shape, x.shape, *(tensor.shape for tensor in tensors)]
        sizes = [math.prod(shape) for shape in shapes]

        def augmented(t: Tensor, s: Tensor) -> Tensor:
            x, a = (part.view(shape) for part, shape in zip(s[: 2 * sizes[0]].split(sizes[:2]), shapes[:2], strict=True))
            v, pulled, parts = state.vjp(k, lambda x: field(t, x), x, a)
            rates = [v, -pulled, *(torch.zeros_like(z) if g is None else -g for z, g in zip(tensors, parts, strict=True))]
            return torch.cat([rate.reshape(-1).to(s.dtype) for rate in rates])

        flat = torch.cat([x.reshape(-1), a.reshape(-1), *(x.new_zeros(size) for size in sizes[2:])])
        run.saved = []
        solution = march(self.method, [Segment(t1, t0, augmented)], flat, run)
        if solution.status is not Status.SUCCESS:
            raise SolveError(f"the adjoint of segment {k}: {solution.message}", solution)
        x, a, *sums = (part.view(shape) for part, shape in zip(solution.x1.split(sizes), shapes, strict=True))
        for tensor, part in zip(tensors, sums, strict=True):
            state.add(tensor, part.to(tensor.dtype))
        return x, a

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
