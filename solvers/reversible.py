"""Gradient by an algebraically reversible scheme: the last pair of states determines all earlier
ones.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from solvers.capture import untraced, without_graph
from solvers.chain import Arrival, Backward, Chain
from solvers.checked import checked
from solvers.errors import ConfigError, SolveError, shown
from solvers.kept import watched
from solvers.march import Gradient, Progress, march
from solvers.method import HasReversibleForm, Method, ReversibleForm, has_capability
from solvers.run import Run, Step, dtype_name
from solvers.segment import Segment
from solvers.solution import Solution, Status
from solvers.transforms import check_no_transform

COUPLING = 0.99
"""lambda. A smaller one is more stable; rounding errors of the backward pass grow by 1/lambda a
step.
"""
MISSED = 1e-3
"""The largest miss of the initial state in the backward pass, relative to it. The gradient's
relative error was 1 to 10 times the miss in our tests.
"""


@checked
@dataclasses.dataclass(frozen=True)
class Reversible(Gradient):
    """The exact gradient of the reversible scheme, from its last pair of states. Memory does not
    depend on the number of steps.

    It supports the package's own methods and fields without projections, which lose information.
    Its solution differs from that of the plain method by an error of the method's order, and it
    takes two increments a step. So it does not train the discrete model of one Euler step per
    segment. `coupling` is lambda in (0, 1].

    If the field damps by more than lambda a step, the pair diverges even if the plain method is
    stable (`solvers.reversible_scheme` has the stability region). An adaptive method then takes
    shorter steps; if that does not help, the solve ends with Status.PAIR_APART. A smaller lambda is
    more stable, but the backward pass magnifies rounding errors by 1/lambda a step. If the backward
    pass misses the initial state by more than a thousandth of it (RMS), it raises SolveError
    instead of returning a wrong gradient. The state must be float32 or float64.
    """

    coupling: float = COUPLING

    def __post_init__(self) -> None:
        if (
            isinstance(self.coupling, bool)
            or not isinstance(self.coupling, (int, float))
            or not 0 < self.coupling <= 1
        ):
            raise ConfigError(
                f"coupling = {shown(self.coupling)}: give a number above 0 and at most 1, such as"
                f" {COUPLING}"
            )

    def check(self, method: Method, segments: Sequence[Segment]) -> None:
        """Raises ConfigError for methods of other packages, and for segments that project the
        state.
        """
        implicit = has_capability(method, "implicit")
        if implicit or not isinstance(method, HasReversibleForm):
            if implicit:
                kind = "an implicit one"
            else:
                kind = f"a {type(method).__name__}"
            raise ConfigError(
                "gradient 'reversible' is made of an explicit Runge-Kutta method of this package,"
                f" not of {kind}: use rk4 or tsit5, or gradient='checkpoint'"
            )
        for k, segment in enumerate(segments):
            if segment.project is not None:
                what = f"projection of segment {k} (a norm around the state)"
            elif segment.enter is not None:
                what = f"map on entering segment {k} (to a norm's image, or a mixing of streams)"
            else:
                continue
            raise ConfigError(
                f"gradient 'reversible' cannot go back through the {what}: use"
                " gradient='checkpoint'"
            )

    detached = True
    inverts = True

    def scheme(self, method: Method) -> ReversibleForm:
        assert isinstance(method, HasReversibleForm), "checked before"
        return method.reversible(self.coupling)

    @untraced
    def integrate(
        self,
        method: Method,
        segments: Sequence[Segment],
        x0: Tensor,
        run: Run,
        progress: Progress | None,
    ) -> Solution:
        check_no_transform("reversible")
        if x0.dtype.itemsize < 4:
            raise ConfigError(
                f"gradient 'reversible' cannot go back in {dtype_name(x0.dtype)}, because rounding"
                " errors grow in the backward pass: keep the state in float32 (autocast does), or"
                " use gradient='checkpoint'"
            )
        scheme = self.scheme(method)
        chain = Chain([x0, x0], run)

        def done(k: int, x: Tensor) -> None:
            assert run.partner is not None, "every segment leaves a partner"
            steps = run.trace
            run.trace = []
            backward = partial(
                _backward,
                scheme,
                k,
                steps,
                run.stats.accepted - len(steps),
                chain.baton,
                run.again(),
            )
            stored = []
            if k == 0:  # the backward pass ends there, and checks that it does
                stored = [x0]
            chain.add([x, run.partner], stored, {k: capture.take()}, backward)

        start = x0.detach()
        forward = [watched(segment, chain.kept) for segment in segments]
        with without_graph(x0.device) as capture:
            solution = march(scheme, forward, start, run, progress, done)
        if solution.status is not Status.SUCCESS:
            return solution
        assert run.partner is not None, "every segment leaves a partner"
        partner = run.partner
        run.partner = None
        return chain.end(solution, x0, [solution.x1, partner])


def _backward(
    scheme: ReversibleForm,
    k: int,
    steps: Sequence[Step],
    steps_before: int,
    baton: list[Sequence[Any]],
    run: Run,
    state: Backward,
    stored: Sequence[Tensor],
    arrivals: Sequence[Arrival],
    after: Sequence[Tensor],
) -> Sequence[Tensor]:
    """dL/dy and dL/dz at segment k's start from those at its end. Gradients of saved states are
    added where they were saved. There are `steps_before` accepted steps before the segment.
    """
    y, z = baton[0]
    pair = (y, z)
    cotangents = (after[0], after[1])
    waiting = list(arrivals)
    after_first_step = pair
    for i in range(len(steps), 0, -1):
        after_first_step = pair
        while waiting and waiting[-1][1] == steps_before + i:
            _, _, gradient = waiting.pop()
            if gradient is not None:
                cotangents = (cotangents[0] + gradient, cotangents[1])
        pair, cotangents = scheme.step_back(
            steps[i - 1], pair, cotangents, partial(state.pull, k), run
        )
    baton[0] = pair
    for x0 in stored:
        _check_start(pair[0], x0, after_first_step[0])
    return cotangents


def _check_start(y: Tensor, x0: Tensor, after_first_step: Tensor) -> None:
    """Raises SolveError if the backward pass ends in a y that is too far from x0."""
    missed = float(torch.linalg.vector_norm(y - x0))
    size = max(
        float(torch.linalg.vector_norm(x0)), float(torch.linalg.vector_norm(after_first_step))
    )
    if not missed <= MISSED * size:
        raise SolveError(
            "the backward pass of gradient 'reversible' misses the initial state by"
            f" {missed / size:.1g} of it, because rounding errors grow in it: use"
            " gradient='checkpoint', float64, fewer steps, or a coupling nearer to 1"
        )
