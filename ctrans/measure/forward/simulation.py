"""One run of a model over a text by depth: moments, bounds, conservation, and the distance between
the discrete model and its ODE.
"""

from __future__ import annotations

import copy
import dataclasses
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
from ctrans.measure.forward.moments import moments, ratios
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
    is_discrete = Scheme(method, steps, rtol, atol).discrete
    if is_discrete:
        discrete = solution
    else:
        discrete = model.trajectory(tokens, throw=False, progress=progress)
    exact: Sequence[Tensor] = []
    how: str | None = None
    why: str | None = None
    if reference:
        exact, how, why = _reference(model, tokens, progress)

    states = solution.states
    bounding = Attempt(BoundsByDepth(discrete=is_discrete))
    by_depth, allowed, conserved = observe(
        model.depth, states, [States(moments), bounding, DriftByDepth()], kept=kept_of(model)
    )
    bounds: ForwardBounds | None = None
    used: list[float] | None = None
    if allowed is not None:
        bounds = _shortened(allowed, len(states))
        used = ratios([moment.mean_abs for moment in by_depth], bounds.mean_abs)
    law: str | None = None
    drift: list[float] | None = None
    if conserved is not None:
        conservation_law, drift = conserved
        law = conservation_law.statement
    placement = model.config.placement
    if model.depth.shared:
        placement = model.depth.sublayers[0].placement.name
    return Simulation(
        placement=placement,
        discrete=is_discrete,
        status=solution.status,
        message=solution.message,
        warnings=list(solution.warnings),
        times=list(solution.times),
        mean_abs=[moment.mean_abs for moment in by_depth],
        variance=[moment.variance for moment in by_depth],
        rms=[moment.rms for moment in by_depth],
        common=[moment.common for moment in by_depth],
        bounds=bounds,
        used=used,
        unbounded=bounding.note,
        law=law,
        drift=drift,
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
    if solution.status is Status.SUCCESS:
        return solution.states, how, None
    return solution.states, how, solution.message


def _distances(
    states: Sequence[TokenRows], exact_states: Sequence[TokenRows]
) -> list[float | None]:
    distances: list[float | None] = [
        float(torch.linalg.vector_norm(x.double() - exact) / torch.linalg.vector_norm(exact))
        for x, exact in zip(states, exact_states, strict=False)
    ]
    return distances + [None] * (len(states) - len(distances))


def _shortened(bounds: ForwardBounds, count: int) -> ForwardBounds:
    """The bounds at the first `count` times."""
    lists: dict[str, Any] = {
        name: value[:count] for name, value in vars(bounds).items() if isinstance(value, list)
    }
    return dataclasses.replace(bounds, **lists)
