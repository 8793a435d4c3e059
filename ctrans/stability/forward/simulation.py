"""One run of a model over a text, seen by depth: moments, bounds, conservation, and the distance
between the discrete model and its ODE.
"""

from __future__ import annotations

import copy
import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from ctrans.scheme import Scheme
from ctrans.stability.forward.bounds import BoundsByDepth, ForwardBounds
from ctrans.stability.forward.conservation import DriftByDepth
from ctrans.stability.forward.moments import MomentsByDepth
from ctrans.walk import Attempt, DescribedModel, kept_of, observe
from solvers import ConfigError, Method, Norm, Solution, Status

REFERENCE = {"method": "tsit5", "rtol": 1e-8, "atol": 1e-8}
"""How the ODE is solved that the discrete model is compared with, in float64."""


@dataclasses.dataclass(frozen=True)
class Simulation:
    """A trajectory by depth, of the discrete model or of a method for its ODE (`discrete`). Lists
    run over depth-time 0 and every segment's end that was reached.

    `distance` is |X - X_ode|/|X_ode| of the trajectory, `discrete_distance` the same for the
    discrete model (None where the reference or the discrete model failed before that depth).
    `drift` is the violation of the conservation law `law` in each segment, one less than there are
    times. `used` is the mean absolute value over its sharper bound. `bounds` and `used` are None
    where no bound on a map is known, which `unbounded` then says. `warnings` are what is to be
    known of a method that got to the end. `reference` is how the ODE was solved, None where it was
    not asked for, and `unreferenced` why that failed, where it did: distances are None from there
    on.
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
    progress: Callable[[int], None] | None = None,
) -> Simulation:
    """X(t) of the model on those tokens by that method, and what theory says of it.

    - `model`: one of ctrans; `ctrans.simulate` takes any `nn.Module` and the path of a checkpoint
      too, and opens them
    - `tokens`: token ids, or what else the model reads as one tensor
    - `method`, `steps`, `rtol`, `atol`, `norm`: as `solvers.solve` takes them. A trajectory that
      breaks off is returned up to there with its status
    - `reference`: whether the ODE is solved accurately beside it; without, distances to it are None
    - `progress(k)`: called for each segment done, three times over: the trajectory, the discrete
      model (if the trajectory is another) and the reference

    Raises ConfigError for a request that makes no sense.
    """
    start = time.perf_counter()
    solution = model.trajectory(
        tokens, method=method, steps=steps, rtol=rtol, atol=atol, norm=norm, throw=False, progress=progress
    )
    seconds = time.perf_counter() - start
    itself = Scheme(method, steps, rtol, atol).discrete
    discrete = solution if itself else model.trajectory(tokens, throw=False, progress=progress)
    exact, how, why = _reference(model, tokens, progress) if reference else ([], None, None)

    states = solution.states
    bounding = Attempt(BoundsByDepth(discrete=itself))
    each, allowed, conserved = observe(model.depth, states, [MomentsByDepth(), bounding, DriftByDepth()], kept=kept_of(model))
    bounds, unbounded = None if allowed is None else _shortened(allowed, len(states)), bounding.note
    return Simulation(
        placement=model.depth.sublayers[0].placement.name if model.depth.shared else model.config.placement,
        discrete=itself,
        status=solution.status,
        message=solution.message,
        warnings=list(solution.warnings),
        times=list(solution.times),
        mean_abs=[m.mean_abs for m in each],
        variance=[m.variance for m in each],
        rms=[m.rms for m in each],
        bounds=bounds,
        used=None
        if bounds is None
        else [m.mean_abs / bound if bound else math.nan for m, bound in zip(each, bounds.mean_abs, strict=True)],
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
    model: DescribedModel, tokens: Tensor, progress: Callable[[int], None] | None
) -> tuple[Sequence[Tensor], str, str | None]:
    """The ODE's states, as far as they can be had, how they were, and why not to the end where they
    were not.
    """
    how = f"{REFERENCE['method']}, rtol = atol = {REFERENCE['rtol']:g}, float64"
    twin: Any = copy.deepcopy(model)  # a module, whatever its class
    try:
        solution: Solution = twin.double().trajectory(tokens, **REFERENCE, throw=False, progress=progress)
    except ConfigError as error:  # a norm's image that a gain has flattened: there is no ODE to solve
        return [], how, str(error)
    return solution.states, how, None if solution.status is Status.SUCCESS else solution.message


def _distances(
    states: Sequence[Float[Tensor, "*batch tokens width"]], exact_states: Sequence[Float[Tensor, "*batch tokens width"]]
) -> list[float | None]:
    known = [
        float(torch.linalg.vector_norm(x.double() - exact) / torch.linalg.vector_norm(exact))
        for x, exact in zip(states, exact_states, strict=False)
    ]
    return known + [None] * (len(states) - len(known))


def _shortened(bounds: ForwardBounds, count: int) -> ForwardBounds:
    """The bounds at the times that were reached."""
    shorter: dict[str, Any] = {name: None if value is None else value[:count] for name, value in vars(bounds).items()}
    return ForwardBounds(**shorter)
