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
from ctrans.base.old_names import OldReasons
from ctrans.base.printable import one_line
from ctrans.base.shapes import TokenRows
from ctrans.dynamics.scheme import Scheme
from ctrans.measure.forward.bounds import BoundsByDepth, ForwardBounds
from ctrans.measure.forward.conservation import DriftByDepth
from ctrans.measure.forward.euler_limit import ERROR, EulerLimit, euler_limit
from ctrans.measure.forward.moments import moments, ratios
from ctrans.measure.missing import tried
from ctrans.measure.walk import (
    Attempt,
    DescribedModel,
    Instrument,
    SegmentCallback,
    States,
    kept_of,
    observe,
)
from solvers import ConfigError, Method, Norm, Solution, SolveError, Status

METHOD = "tsit5"
TOLERANCE = 1e-8
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
    - `bounds`, `used`: None if a map has no known bound
    - `warnings`: the method's warnings about a run that reached the end
    - `reference`: how the ODE was solved, None without a reference
    - `missing`: why there is no "bound" or "error of more Euler steps", or a "distance to the ODE"
      not up to the end
    - `euler_limit`: errors at the end with more Euler steps, None without a reference to the end
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
    law: str | None
    drift: list[float] | None
    distance: list[float | None]
    discrete_distance: list[float | None]
    reference: str | None
    evaluations: int
    accepted: int
    rejected: int
    seconds: float
    missing: dict[str, str] = dataclasses.field(default_factory=dict)
    euler_limit: EulerLimit | None = None

    unbounded = OldReasons("bound")
    unreferenced = OldReasons("distance to the ODE")


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
    instruments: Sequence[Instrument] = (),
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
    - `instruments`: observe the states of the discrete model. They have their figures afterwards

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
    missing: dict[str, str] = {}
    exact: Sequence[Tensor] = []
    how: str | None = None
    limit: EulerLimit | None = None
    if reference:
        how = f"{METHOD}, rtol = atol = {TOLERANCE:g}, float64"
        exact, limit = _reference(model, tokens, discrete, missing, progress)

    if instruments:
        observe(model.depth, discrete.states, instruments, kept=kept_of(model))
    states = solution.states
    bounding = Attempt(BoundsByDepth(discrete=is_discrete), missing, "bound")
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
        law=law,
        drift=drift,
        distance=_distances(states, exact),
        discrete_distance=_distances(discrete.states, exact)[: len(states)],
        reference=how,
        evaluations=solution.stats.evaluations,
        accepted=solution.stats.accepted,
        rejected=solution.stats.rejected,
        seconds=seconds,
        missing=dict(sorted(missing.items())),
        euler_limit=limit,
    )


def _reference(
    model: DescribedModel,
    tokens: Tensor,
    discrete: Solution,
    missing: dict[str, str],
    progress: SegmentCallback | None,
) -> tuple[Sequence[Tensor], EulerLimit | None]:
    """The ODE's states as far as the solution succeeds, and the limit of more Euler steps. What
    fails has its reason in `missing`.
    """
    copied: Any = copy.deepcopy(model)  # a module, whatever its class
    twin: DescribedModel = copied.double()
    # a zero gain makes a norm's image degenerate, so there is no ODE
    solution: Solution | None = tried(
        missing,
        "distance to the ODE",
        _in_float64,
        twin,
        tokens,
        method=METHOD,
        rtol=TOLERANCE,
        atol=TOLERANCE,
        throw=False,
        progress=progress,
    )
    if solution is None:
        missing[ERROR] = f"there is no ODE: {missing['distance to the ODE']}"
        return [], None
    if solution.status is not Status.SUCCESS:
        missing["distance to the ODE"] = solution.message
        missing[ERROR] = f"the ODE was not solved to the end: {solution.message}"
        return solution.states, None
    if discrete.status is not Status.SUCCESS:
        missing[ERROR] = f"the discrete model broke off: {discrete.message}"
        return solution.states, None
    limit: EulerLimit | None = tried(
        missing,
        ERROR,
        euler_limit,
        model,
        twin,
        tokens,
        one_step=discrete,
        reference=solution,
        tolerance=TOLERANCE,
    )
    return solution.states, limit


def _in_float64(twin: DescribedModel, tokens: Tensor, **options: Any) -> Solution:
    """The twin's trajectory. Raises ConfigError where the code of its maps fails in float64, as
    kernels of experts do.
    """
    try:
        return twin.trajectory(tokens, **options)
    except (ConfigError, SolveError):
        raise
    except Exception as error:  # code of another's map raises what it likes
        raise ConfigError(
            f"it does not run in float64 ({type(error).__name__}: {one_line(error)})"
        ) from error


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
