"""Gradient by going back: an algebraically reversible form of any Runge-Kutta method (McCallum and Foster, arXiv 2410.11648).

With Psi_h(t, x) what one step of the method adds to x, the scheme carries a pair (y, z), both x0 at the start:

    y1 = lambda y + (1 - lambda) z + Psi_h(t, z)            z1 = z - Psi_{-h}(t1, y1)

Both lines can be solved for what went in, z = z1 + Psi_{-h}(t1, y1) and then y = (y1 - (1 - lambda) z - Psi_h(t, z))/lambda, so
the backward pass needs the last pair only. y has the method's order.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import partial

from torch import Tensor

from solvers.detached import Backward, Captured, Grads, attach, untraced, without_graph
from solvers.errors import ConfigError
from solvers.march import Progress, march
from solvers.methods import Method
from solvers.run import Run, Step
from solvers.runge_kutta import RungeKutta, fixed_steps
from solvers.segment import Segment
from solvers.solution import Solution, Status

COUPLING = 0.99
"""lambda. Smaller is stabler; rounding errors of the way back grow by 1/lambda a step."""


@dataclasses.dataclass(frozen=True)
class ReversibleScheme:
    """The reversible form of a Runge-Kutta method as a method: `advance` moves y, and the run carries z across segments."""

    method: RungeKutta
    coupling: float

    @property
    def order(self) -> int:
        """The order of the method it is made of."""
        return self.method.order

    @property
    def adaptive(self) -> bool:
        """Whether it chooses its own steps, by the error estimate of Psi_h(t, z)."""
        return self.method.adaptive

    def advance(self, segment: Segment, x: Tensor, run: Run) -> Tensor:
        """y at the segment's end. Raises Stopped where the method cannot get there."""
        y, z = x, x if run.partner is None else run.partner

        def finish(step: Step, z: Tensor, increment: Tensor) -> Tensor:
            nonlocal y
            y = run.accept(segment, step.end, y + (1 - self.coupling) * (z - y) + increment)
            return z - self.method.increment(back(step), y, run)

        if self.adaptive:
            z = self.method.adapt(segment, z, run, lambda step, z, z_plus: finish(step, z, z_plus - z))
        else:
            for step in fixed_steps(segment, run.steps):
                z = finish(step, z, self.method.increment(step, z, run))
                run.trace.append(step)
        run.partner = z
        return y


@dataclasses.dataclass(frozen=True)
class Reversible:
    """The exact gradient of the reversible scheme, from its last pair of states: memory does not depend on the steps.

    For own methods and fields without projections, whose information is gone for good. It computes another solution than the
    plain method, by an error of the method's order, and takes two increments a step: what is trained by it is not the discrete
    model of one Euler step per segment. `coupling` is lambda in (0, 1]. The pair drifts apart where a step h meets a Jacobian with
    h |df/dx| above about 1 - lambda for a long time, even if the plain method is stable there: a smaller lambda is stabler,
    and its way back magnifies rounding errors by 1/lambda a step. The state must have float32 or float64.
    """

    coupling: float = COUPLING

    def __post_init__(self) -> None:
        if isinstance(self.coupling, bool) or not isinstance(self.coupling, (int, float)) or not 0 < self.coupling <= 1:
            raise ConfigError(f"coupling = {self.coupling!r}: give a number above 0 and at most 1, such as {COUPLING}")

    def check(self, method: Method, segments: Sequence[Segment]) -> None:
        """Raises ConfigError for other methods than own ones, and for segments that project the state."""
        if not isinstance(method, RungeKutta):
            raise ConfigError(
                f"gradient 'reversible' is made of a Runge-Kutta method of this package, not of {method}: "
                "use rk4 or tsit5, or gradient='checkpoint'"
            )
        for k, segment in enumerate(segments):
            if segment.project is not None or segment.enter is not None:
                raise ConfigError(
                    f"gradient 'reversible' cannot go back through the projection of segment {k} (a norm around the state): "
                    "use gradient='checkpoint'"
                )

    detached = True

    def scheme(self, method: Method) -> Method:
        assert isinstance(method, RungeKutta), "checked before"
        return ReversibleScheme(method, self.coupling)

    @untraced
    def integrate(self, method: Method, segments: Sequence[Segment], x0: Tensor, run: Run, progress: Progress | None) -> Solution:
        if x0.dtype.itemsize < 4:
            raise ConfigError(
                f"gradient 'reversible' cannot go back in {str(x0.dtype).removeprefix('torch.')}, whose rounding errors grow on the way: "
                "keep the state in float32 (autocast does), or use gradient='checkpoint'"
            )
        scheme = self.scheme(method)
        assert isinstance(scheme, ReversibleScheme), "made by scheme()"
        captured: Captured = {}

        def done(k: int) -> None:
            captured[k] = capture.take()
            if progress is not None:
                progress(k)

        with without_graph(x0.device) as capture:
            solution = march(scheme, segments, x0.detach(), run, done)
        if solution.status is not Status.SUCCESS:
            return solution
        assert run.partner is not None, "every segment leaves a partner"
        place = {id(segment): k for k, segment in enumerate(segments)}
        steps = [(place[id(step.segment)], step) for step in run.trace]
        saved_after = [saved.steps for saved in run.saved[1:]]

        def backward(state: Backward, kept: Sequence[Tensor], gradients: Grads) -> Tensor:
            return _backward(scheme, steps, saved_after, state, kept, gradients, run.again())

        outputs = attach(solution.states[1:], [solution.x1, run.partner], x0, captured, backward)
        run.partner, run.saved = None, []
        return dataclasses.replace(solution, x1=outputs[-1], states=(x0, *outputs))


def _backward(
    scheme: ReversibleScheme,
    steps: Sequence[tuple[int, Step]],
    saved_after: Sequence[int],
    state: Backward,
    kept: Sequence[Tensor],
    gradients: Grads,
    run: Run,
) -> Tensor:
    """dL/dx0 from the last pair, one step at a time; gradients of saved states come in where they were saved."""
    method, coupling = scheme.method, scheme.coupling
    y, z = kept
    p, q = y.new_zeros(y.shape), z.new_zeros(z.shape)  # dL/dy, dL/dz
    waiting = list(zip(saved_after, gradients, strict=True))
    for i in range(len(steps), 0, -1):
        while waiting and waiting[-1][0] == i:
            gradient = waiting.pop()[1]
            p = p if gradient is None else p + gradient
        k, step = steps[i - 1]
        increment = partial(method.increment, step, run=run)
        increment_back = partial(method.increment, back(step), run=run)
        psi, pulled = state.pull(k, increment_back, y, -q)
        z, p = z + psi, p + pulled
        psi, pulled = state.pull(k, increment, z, p)
        y = z + (y - z - psi) / coupling
        p, q = coupling * p, q + (1 - coupling) * p + pulled
    return p + q


def back(step: Step) -> Step:
    """The same step the other way."""
    return Step(step.segment, step.end, step.start, -step.h)
