"""Gradient by going back: the solve is by an algebraically reversible scheme, whose last pair of
states tells all the others.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from solvers.capture import aside, untraced, without_graph
from solvers.chain import Backward, Chain, Found, Grads
from solvers.errors import ConfigError, SolveError
from solvers.march import Progress, march
from solvers.method import HasReversibleForm, Method, ReversibleForm
from solvers.run import Run, Step, dtype_name
from solvers.segment import Segment
from solvers.solution import Solution, Status
from solvers.transforms import check_no_transform

COUPLING = 0.99
"""lambda. Smaller is stabler; rounding errors of the way back grow by 1/lambda a step."""
MISSED = 1e-3
"""By how much of the initial state the way back may miss it. The gradient's relative error was 1 to
10 times that where it was seen.
"""


@dataclasses.dataclass(frozen=True)
class Reversible:
    """The exact gradient of the reversible scheme, from its last pair of states: memory does not
    depend on the steps.

    For own methods and fields without projections, whose information is gone for good. It computes
    another solution than the plain method, by an error of the method's order, and takes two
    increments a step: what is trained by it is not the discrete model of one Euler step per
    segment. `coupling` is lambda in (0, 1]. Where the field damps by more than lambda a step, the
    pair comes apart even if the plain method is stable (`solvers.reversible_scheme` has the
    region): an adaptive method takes shorter steps, and where that does not help, the solve ends
    with Status.PAIR_APART. A smaller lambda is stabler, and its way back magnifies rounding errors
    by 1/lambda a step. A way back that misses the initial state by more than a thousandth of it
    (RMS) raises SolveError instead of giving a wrong gradient. The state must have float32 or
    float64.
    """

    coupling: float = COUPLING

    def __post_init__(self) -> None:
        if isinstance(self.coupling, bool) or not isinstance(self.coupling, (int, float)) or not 0 < self.coupling <= 1:
            raise ConfigError(f"coupling = {self.coupling!r}: give a number above 0 and at most 1, such as {COUPLING}")

    def check(self, method: Method, segments: Sequence[Segment]) -> None:
        """Raises ConfigError for other methods than own ones, and for segments that project the
        state.
        """
        if not isinstance(method, HasReversibleForm) or getattr(method, "implicit", False):
            other = "an implicit one" if getattr(method, "implicit", False) else f"a {type(method).__name__}"
            raise ConfigError(
                f"gradient 'reversible' is made of an explicit Runge-Kutta method of this package, not of {other}: "
                "use rk4 or tsit5, or gradient='checkpoint'"
            )
        for k, segment in enumerate(segments):
            if segment.project is not None or segment.enter is not None:
                raise ConfigError(
                    f"gradient 'reversible' cannot go back through the projection of segment {k} (a norm around the state): "
                    "use gradient='checkpoint'"
                )

    detached = True

    def scheme(self, method: Method) -> ReversibleForm:
        assert isinstance(method, HasReversibleForm), "checked before"
        return method.reversible(self.coupling)

    @untraced
    def integrate(self, method: Method, segments: Sequence[Segment], x0: Tensor, run: Run, progress: Progress | None) -> Solution:
        check_no_transform("reversible")
        if x0.dtype.itemsize < 4:
            raise ConfigError(
                f"gradient 'reversible' cannot go back in {dtype_name(x0.dtype)}, whose rounding errors grow on the way: "
                "keep the state in float32 (autocast does), or use gradient='checkpoint'"
            )
        scheme = self.scheme(method)
        chain, found = Chain([x0, x0]), Found(run)

        def done(k: int, x: Tensor) -> None:
            assert run.partner is not None, "every segment leaves a partner"
            inside = found.take(x)
            steps, run.trace = run.trace, []
            captured = {k: capture.take()}
            before = run.stats.accepted - len(steps)
            back = partial(_backward, scheme, k, steps, [saved.steps - before for saved in inside], chain.baton, run.again())
            first = [x0] if k == 0 else []
            with aside():
                states = chain.add([saved.x for saved in inside], [x, run.partner], first, captured, back)
            found.put(states, chain.links[0])

        with without_graph(x0.device) as capture:
            solution = march(scheme, segments, x0.detach(), run, progress, done)
        if solution.status is not Status.SUCCESS:
            return solution
        assert run.partner is not None, "every segment leaves a partner"
        outputs = chain.end(found.all(chain.links[0]), [solution.x1, run.partner])
        run.partner, run.saved = None, []
        return dataclasses.replace(solution, x1=outputs[-1], states=(x0, *outputs))


def _backward(
    scheme: ReversibleForm,
    k: int,
    steps: Sequence[Step],
    saved_after: Sequence[int],
    baton: list[Sequence[Any]],
    run: Run,
    state: Backward,
    kept: Sequence[Tensor],
    inside: Grads,
    after: Sequence[Tensor],
) -> Sequence[Tensor]:
    """dL/dy and dL/dz at segment k's start from those at its end; gradients of saved states come in
    where they were saved.
    """
    pair, cotangents = (baton[0][0], baton[0][1]), (after[0], after[1])
    waiting = list(zip(saved_after, inside, strict=True))
    after_first = pair
    for i in range(len(steps), 0, -1):
        after_first = pair
        while waiting and waiting[-1][0] == i:
            gradient = waiting.pop()[1]
            cotangents = cotangents if gradient is None else (cotangents[0] + gradient, cotangents[1])
        pair, cotangents = scheme.step_back(steps[i - 1], pair, cotangents, partial(state.pull, k), run)
    baton[0] = pair
    for x0 in kept:
        _check_start(pair[0], x0, after_first[0])
    return cotangents


def _check_start(y: Tensor, x0: Tensor, ahead: Tensor) -> None:
    missed, *sizes = (float(torch.linalg.vector_norm(x)) for x in (y - x0, x0, ahead))
    if not missed <= MISSED * max(sizes):
        raise SolveError(
            f"the way back of gradient 'reversible' misses the initial state by {missed / max(sizes):.1g} of it, since rounding errors "
            "grow there: use gradient='checkpoint', float64, fewer steps, or a coupling nearer to 1"
        )
