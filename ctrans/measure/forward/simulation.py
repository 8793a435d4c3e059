"""One run of a model over a text by depth: moments, bounds, conservation, and the distance between
the discrete model and its ODE.
"""

from __future__ import annotations

import copy
import dataclasses
import math
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ctrans.base.as_found import leaving_as_found
from ctrans.base.shapes import TokenRows
from ctrans.dynamics.scheme import Scheme
from ctrans.measure.forward.bounds import BoundsByDepth, ForwardBounds
from ctrans.measure.forward.conservation import DriftByDepth
from ctrans.measure.forward.moments import moments
from ctrans.measure.walk import Attempt, DescribedModel, SegmentCallback, States, kept_of, observe
from solvers import ConfigError, Method, Norm, Solution, Status

REFERENCE = {"method": "tsit5", "rtol": 1e-8, "atol": 1e-8}
"""How the reference solution of the ODE is computed, in float64."""


@dataclasses.dataclass(frozen=True)
class Simulation:
    """A trajectory by depth, of the discrete model (`discrete`) or of a method for its ODE. Lists
    run over depth-time 0 and the end of each segment reached.

    - `distance`: |X - X_ode|/|X_ode| of the trajectory; None from where the reference failed
    - `discrete_distance`: the same for the discrete model
    - `drift`: violation of the conservation law `law` in each segment, so one entry fewer than
      `times`
    - `common`: the share of the squared size that is the same for all tokens (`Moments`)
    - `used`: the mean absolute value over its sharper bound
    - `bounds`, `used`: None if a map has no known bound; `unbounded` gives the reason
    - `warnings`: the method's warnings about a run that reached the end
    - `reference`: how the ODE was solved, None without a reference; `unreferenced`: why that failed
    """

    placement: str
    discrete: bool
    status: Status
    message: str
    warnings: list[str]
    times: list[float]
    mean_abs: list[float]
    variance: list[float]
    rms: list[float]
    common: list[float]
    bounds: ForwardBounds | None
    used: list[float] | None
    unbounded: str | None
    law: str | None
    drift: list[float] | None
    distance: list[float | None]
    discrete_distance: list[float | None]
    reference: str | None
    unreferenced: str | None
    evaluations: int
    accepted: int
    rejected: int
    seconds: float


@torch.no_grad()
@leaving_as_found
def simulate(
    model: DescribedModel,
    tokens: Tensor,
    *,
    method: str | Method = "euler",
    steps: int = 1,
    rtol: float | None = None,
    atol: float | None = None,
    norm: str | Norm | None = None,
    reference: bool = True,
    progress: SegmentCallback | None = None,
) -> Simulation:
    """X(t) of the model on these tokens by a method, with the bounds and laws of theory.

    - `model`: a ctrans model; `ctrans.simulate` also takes any `nn.Module` or the path of a
      checkpoint
    - `tokens`: token ids, or another input tensor of the model
    - `method`, `steps`, `rtol`, `atol`, `norm`: as in `solvers.solve`. A trajectory that fails is
      returned up to the failure, with its status
    - `reference`: whether to solve the ODE accurately too; if not, distances are None
    - `progress(k)`: called after each segment of the trajectory, of the discrete model (if the
      trajectory is another) and of the reference

    Raises ConfigError for invalid arguments.
    """
    start = time.perf_counter()
    solution = model.trajectory(
        tokens,
        method=method,
        steps=steps,
        rtol=rtol,
        atol=atol,
        norm=norm,
        throw=False,
        progress=progress,
    )
    seconds = time.perf_counter() - start
    itself = Scheme(method, steps, rtol, atol).discrete
    if itself:
        discrete = solution
    else:
        discrete = model.trajectory(tokens, throw=False, progress=progress)
    if reference:
        exact, how, why = _reference(model, tokens, progress)
    else:
        exact, how, why = ([], None, None)

    states = solution.states
    bounding = Attempt(BoundsByDepth(discrete=itself))
    each, allowed, conserved = observe(
        model.depth, states, [States(moments), bounding, DriftByDepth()], kept=kept_of(model)
    )
    if allowed is None:
        bounds = None
    else:
        bounds = _shortened(allowed, len(states))
    unbounded = bounding.note
    return Simulation(
        placement=(
            model.depth.sublayers[0].placement.name
            if model.depth.shared
            else model.config.placement
        ),
        discrete=itself,
        status=solution.status,
        message=solution.message,
        warnings=list(solution.warnings),
        times=list(solution.times),
        mean_abs=[m.mean_abs for m in each],
        variance=[m.variance for m in each],
        rms=[m.rms for m in each],
        common=[m.common for m in each],
        bounds=bounds,
        used=(
            None
            if bounds is None
            else [
                m.mean_abs / bound if bound else math.nan
                for m, bound in zip(each, bounds.mean_abs, strict=True)
            ]
        ),
        unbounded=unbounded,
        law=None if conserved is None else conserved[0].statement,
        drift=None if conserved is None else conserved[1],
        distance=_distances(states, exact),
        discrete_distance=_distances(discrete.states, exact)[: len(states)],
        reference=how,
        unreferenced=why,
        evaluations=solution.stats.evaluations,
        accepted=solution.stats.accepted,
        rejected=solution.stats.rejected,
        seconds=seconds,
    )


def _reference(
    model: DescribedModel, tokens: Tensor, progress: SegmentCallback | None
) -> tuple[Sequence[Tensor], str, str | None]:
    """The ODE's states as far as the solution succeeds, how they were computed, and why it failed,
    if it did.
    """
    how = f"{REFERENCE['method']}, rtol = atol = {REFERENCE['rtol']:g}, float64"
    twin: Any = copy.deepcopy(model)  # a module, whatever its class
    try:
        solution: Solution = twin.double().trajectory(
            tokens, **REFERENCE, throw=False, progress=progress
        )
    except ConfigError as error:  # a zero gain makes a norm's image degenerate, so there is no ODE
        return [], how, str(error)
    return solution.states, how, None if solution.status is Status.SUCCESS else solution.message


def _distances(
    states: Sequence[TokenRows], exact_states: Sequence[TokenRows]
) -> list[float | None]:
    known = [
        float(torch.linalg.vector_norm(x.double() - exact) / torch.linalg.vector_norm(exact))
        for x, exact in zip(states, exact_states, strict=False)
    ]
    return known + [None] * (len(states) - len(known))


def _shortened(bounds: ForwardBounds, count: int) -> ForwardBounds:
    """The bounds at the first `count` times."""
    lists: dict[str, Any] = {
        name: value[:count] for name, value in vars(bounds).items() if isinstance(value, list)
    }
    return dataclasses.replace(bounds, **lists)
