"""The costate P = dL/dX by depth: the discrete model's gradient, or the adjoint ODE of the
continuous one.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from ctrans.base.as_found import leaving_as_found
from ctrans.base.shapes import TokenRows
from ctrans.dynamics.depth import Depth
from ctrans.measure.walk import (
    Instrument,
    Model,
    StepContext,
    StepContextBack,
    Turn,
    check_targets,
    terminal_loss,
    value_and_pullback,
    walk,
)
from solvers import ADVICE, ConfigError, Map, Method, Segment, SolveError, Stats, Status, unknown
from solvers.request import check_solver
from solvers.run import finite
from solvers.solve import solve

Point = tuple[Tensor, Tensor]
"""(X, P): a hidden state and its costate."""

FORMS = ("discrete", "continuous")


@dataclasses.dataclass(frozen=True)
class Costate:
    """P_k = dL/dX_k at depth-time 0 and at each segment's end, with the states X_k: one more of
    each than segments.

    `starts[k]` is (X, P) at the input of segment k's field. It is (states[k], costates[k]), except
    in the continuous form with a norm around the state. There a segment begins by putting X_k on
    that norm's image, and `starts[k]` is that point with the gradient there.

    `drift[k]` is max - min of <P, v> over the accepted steps of segment k, relative to their
    largest |P||v|. The ODE conserves <P, v> on a segment, so in the continuous form drift is error
    of the solver. In the discrete form it shows how far one step is from resolving the ODE; it is
    nan where the ODE has no velocity (a norm around the state with a dead gain). A small drift
    alone does not prove a costate right: <P, v> is conserved along any solution of state and
    adjoint equation, also from a wrong X or a wrong P(T).
    """

    form: str
    loss: float
    times: tuple[float, ...]
    states: tuple[TokenRows, ...]
    costates: tuple[TokenRows, ...]
    starts: tuple[Point, ...]
    drift: tuple[float, ...]
    stats: Stats


@torch.no_grad()
@leaving_as_found
def costate(
    model: Model,
    tokens: Tensor,
    targets: Any,
    *,
    form: str = "discrete",
    method: str | Method | None = None,
    steps: int | None = None,
    rtol: float | None = None,
    atol: float | None = None,
) -> Costate:
    """dP/dt = -(dv/dX)' P backward from P(T) = dL/dX(T), with L the model's own loss or the
    cross-entropy of head(X_T) in nats.

    - `tokens`, `targets`: the input, and the targets of the loss
    - `form`: "discrete" is the model as trained, one step per segment. P_k is autograd's gradient,
      computed with one segment's graph in memory at a time. "continuous" solves the ODE and its
      adjoint, with the order of its method
    - `method`, `steps`, `rtol`, `atol`: options of `solvers.solve` for the continuous form; tsit5
      by default

    costate changes no parameter's gradient. Theory, section 5; Kan, eq. 15-16.

    Raises ConfigError for an unknown form, solver options with the discrete form, and targets that
    do not match the tokens or are all -1. Raises SolveError if the state or the costate becomes
    non-finite or the solver fails.
    """
    if form not in FORMS:
        raise unknown("form of the costate", form, FORMS)
    check_targets(model, tokens, targets)
    solver_options = {"method": method, "steps": steps, "rtol": rtol, "atol": atol}
    options = {name: value for name, value in solver_options.items() if value is not None}
    if form == "continuous":
        return _continuous(model, tokens, targets, options)
    if options:
        raise ConfigError(
            f"the discrete form takes the model's own steps: leave {', '.join(options)} out, or"
            " choose form 'continuous'"
        )
    discrete: Costate = walk(model, tokens, targets, [DiscreteCostate()])[0]
    return discrete


def places(depth: Depth) -> dict[str, Any]:
    """What identifies each segment: its start in depth-time, its kind and its placement."""
    return {
        "times": list(depth.times[:-1]),
        "kinds": [sublayer.kind for sublayer in depth.sublayers],
        "placements": [sublayer.placement.name for sublayer in depth.sublayers],
    }


def continuous_or_discrete(
    model: Model,
    tokens: Tensor,
    targets: Any,
    *,
    rtol: float | None = None,
    atol: float | None = None,
) -> tuple[Costate, str | None]:
    """The continuous costate and None; or the discrete one and the reason, if the ODE or its
    adjoint has no solution.

    This happens with a norm around the state that has a dead gain: the ODE divides by the gain, the
    model's own step does not. The loss is then the discrete model's, and `starts` holds its own
    states. Raises ConfigError for invalid tolerances, and the errors of the discrete form.
    """
    check_solver("tsit5", 1, rtol, atol, torch.float64)
    try:
        continuous = costate(model, tokens, targets, form="continuous", rtol=rtol, atol=atol)
    except (ConfigError, SolveError) as error:
        reason = f"there is no continuous costate, so ctrans uses the discrete model's: {error}"
        return costate(model, tokens, targets), reason
    return continuous, None


ZERO_GRADIENT = (
    "dL/dX is 0 at every state, for example before a head of zeros: H = 0, and every velocity is"
    " optimal"
)
"""The message if a loss does not depend on the depth."""


class DiscreteCostate(Instrument):
    """The costate of the discrete model, P_k = (dX_{k+1}/dX_k)' P_{k+1}, on a walk with a loss."""

    def begin(self, depth: Depth, x0: Tensor) -> None:
        self._times = depth.times
        self._states = [x0]
        self._loss = math.nan
        self._costates: list[Tensor] = []
        self._starts: list[Point] = []
        self._drift: list[float] = []

    def forward(self, at: StepContext) -> None:
        self._states.append(at.y)

    def head(self, model: Model, at: Turn) -> None:
        self._loss = at.loss
        self._costates = [at.p]

    def backward(self, at: StepContextBack) -> None:
        self._costates.insert(0, at.before)
        self._starts.insert(0, at.met)
        try:
            drift = float(_drift(at.sublayer.velocity, [(at.y, at.p), at.met]))
        except ConfigError:
            # a zero gain flattens the norm's image: the ODE has no velocity, the step needs none
            drift = math.nan
        self._drift.insert(0, drift)

    def figures(self) -> Costate:
        """Raises SolveError if a state or a costate is not finite."""
        _check_finite(self._states, self._costates)
        steps = 2 * len(self._starts)  # forward and backward
        return Costate(
            form="discrete",
            loss=self._loss,
            times=self._times,
            states=tuple(self._states),
            costates=tuple(self._costates),
            starts=tuple(self._starts),
            drift=tuple(self._drift),
            stats=Stats(steps, steps),
        )


def _continuous(model: Model, tokens: Tensor, targets: Any, options: dict[str, Any]) -> Costate:
    """Solves the ODE forward, keeping every accepted step, and then each segment backward with
    `_solve_back`.

    It is not an instrument of a walk: a walk takes the discrete model's steps, and here a solver
    chooses the steps.
    """
    options = {"method": "tsit5"} | options
    depth = model.depth
    x0 = model.embed(tokens)
    segments = depth.segments(continuous=True)
    forward = solve(segments, x0, save="steps", **options)
    options.pop("steps", None)
    states = [x0]
    forward_steps = []
    first = 0
    for sublayer, segment in zip(depth.sublayers, segments, strict=True):
        last = forward.times.index(segment.end, first)
        x = states[-1]
        if segment.enter is None:
            start = x
        else:
            start = segment.enter(x)
        step_times = forward.times[first : last + 1]
        step_states = [start, *forward.states[first + 1 : last + 1]]
        steps = list(zip(step_times, step_states, strict=True))
        forward_steps.append((sublayer.velocity, segment.enter, x, steps))
        states.append(forward.states[last])
        first = last
    loss, p = value_and_pullback(lambda x: terminal_loss(model, x, targets), states[-1])
    costates = [p]
    starts = list[Point]()
    drift = list[float]()
    stats = forward.stats
    for velocity, enter, before, steps in reversed(forward_steps):
        path, p, backward_stats = _solve_back(velocity, steps, options, costates[0])
        if enter is not None:
            _, p = value_and_pullback(enter, before, p)
        costates.insert(0, p)
        starts.insert(0, path[-1])
        drift.insert(0, float(_drift(velocity, path)))
        stats += backward_stats
    _check_finite(states, costates)
    return Costate(
        form="continuous",
        loss=float(loss),
        times=depth.times,
        states=tuple(states),
        costates=tuple(costates),
        starts=tuple(starts),
        drift=tuple(drift),
        stats=stats,
    )


def _solve_back(
    velocity: Map, steps: Sequence[tuple[float, Tensor]], options: dict[str, Any], p: Tensor
) -> tuple[list[Point], Tensor, Stats]:
    """dz/dt = (v, -(dv/dX)' P) for z = (X, P), backward over the forward steps. Each step begins at
    the forward solution's X.

    If X were integrated back over the whole segment, its error could grow by exp(Lipschitz constant
    * length) where the flow contracts forward, and <P, v> would not show it. Interpolating X
      instead would limit the order to the interpolant's.
    """

    def field(t: Tensor, z: Tensor) -> Tensor:
        v, gradient = value_and_pullback(velocity, z[0], z[1])
        return torch.stack([v, -gradient])

    def from_state(x: Tensor) -> Map:
        return lambda z: torch.stack([x, z[1]])

    # the adjoint is linear in P: at unit size the tolerances suit any size of the loss's gradient
    size = p.square().mean().sqrt()
    size = torch.where(size == 0, 1.0, size)
    segments = [
        Segment(t1, t0, field, enter=from_state(x1)) for (t0, _), (t1, x1) in pairwise(steps)
    ]
    first_time, first_state = steps[0]
    last_time, last_state = steps[-1]
    end = torch.stack([last_state, p / size])
    solution = solve(segments[::-1], end, save="steps", throw=False, **options)
    if solution.status is not Status.SUCCESS:
        where = (
            f"at t = {solution.time:.6g}, on the way back from {last_time:.6g} to {first_time:.6g}"
        )
        raise SolveError(
            f"the costate's equation failed {where}: {ADVICE[solution.status]}", solution
        )
    path = [(x, size * p) for x, p in solution.states]
    _, first_costate = path[-1]
    path[-1] = (first_state, first_costate)
    return path, first_costate, solution.stats


def _drift(velocity: Map, path: Sequence[Point]) -> Tensor:
    """(max - min of <P, v>)/max |P||v| over the points; 0 where P or v vanishes at all of them."""
    velocities = [velocity(x) for x, _ in path]
    products = torch.stack([(p * v).sum() for (_, p), v in zip(path, velocities, strict=True)])
    sizes = torch.stack([p.norm() * v.norm() for (_, p), v in zip(path, velocities, strict=True)])
    size = sizes.max()
    return (products.max() - products.min()) / torch.where(size == 0, 1.0, size)


def _check_finite(states: Sequence[Tensor], costates: Sequence[Tensor]) -> None:
    """Raises SolveError for the first X, else the last P, that is not finite."""
    if finite(costates[0]) and finite(states[-1]):
        return
    last = len(states) - 1
    for k, x in enumerate(states):
        if not finite(x):
            raise SolveError(
                f"the hidden state became non-finite in segment {max(k - 1, 0)}:"
                f" {ADVICE[Status.NON_FINITE]}"
            )
    k = max(k for k, p in enumerate(costates) if not finite(p))
    if k == last:
        where = "at the head"
    else:
        where = f"in segment {k}"
    raise SolveError(
        f"the costate became non-finite {where}: take a smaller dt, smaller weights or a wider"
        " dtype"
    )
