"""The costate P = dL/dX by depth: the discrete model's gradient, and the adjoint ODE of the continuous one."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from ctrans.depth import Depth
from solvers import ConfigError, Method, Segment, SolveError, Stats, Status, solve
from solvers.errors import unknown
from solvers.run import finite
from solvers.segment import Map
from solvers.solution import ADVICE

Point = tuple[Tensor, Tensor]
"""(X, P): a hidden state and its costate."""


@runtime_checkable
class Model(Protocol):
    """What has a costate: X_0 = embed(tokens), a depth that carries it to X_T, logits = head(X_T). GPT is one."""

    @property
    def depth(self) -> Depth: ...

    def embed(self, tokens: Tensor) -> Tensor: ...

    def head(self, x: Tensor) -> Tensor: ...


@dataclasses.dataclass(frozen=True)
class Costate:
    """P_k = dL/dX_k at depth-time 0 and at each segment's end, with the states X_k: one more of each than there are segments.

    `starts[k]` is (X, P) as segment k's field meets them at its start. It is (states[k], costates[k]), but for the continuous
    form behind a norm around the state: there a segment begins by putting X_k on that norm's image, and the pair is that point
    and the gradient there.

    `drift[k]` is max - min of <P, v> over the accepted steps of segment k, relative to the largest |P||v| among them. The ODE
    conserves <P, v> on a segment, so in the continuous form drift is error of the solver; in the discrete form it says how far
    one step is from resolving the ODE. The converse fails: <P, v> is conserved along any solution of state and adjoint
    equation, from a wrong X or a wrong P(T) too, so a small drift alone does not make a costate right.
    """

    form: str
    loss: float
    times: tuple[float, ...]
    states: tuple[Float[Tensor, "*batch tokens width"], ...]
    costates: tuple[Float[Tensor, "*batch tokens width"], ...]
    starts: tuple[Point, ...]
    drift: tuple[float, ...]
    stats: Stats


@torch.no_grad()
def costate(
    model: Model,
    tokens: Int[Tensor, "*batch tokens"],
    targets: Int[Tensor, "..."],
    *,
    form: str = "discrete",
    method: str | Method | None = None,
    steps: int | None = None,
    rtol: float | None = None,
    atol: float | None = None,
) -> Costate:
    """dP/dt = -(dv/dX)' P backward from P(T) = dL/dX(T), L the mean cross-entropy of head(X_T) in nats (without targets of -1).

    "discrete" is the model as it is trained, one step per segment: P_k is autograd's gradient, found segment by segment with one
    segment's graph in memory at a time. "continuous" solves the ODE and its adjoint by any method of `solvers.METHODS` (tsit5
    if none is given) and has that method's order; `steps`, `rtol` and `atol` are those of `solve`. No parameter's gradient is
    touched. Theory, section 5; Kan, eq. 15-16.

    Raises ConfigError for an unknown form, solver options given to the discrete form, targets that do not match the tokens or
    are all -1; SolveError where the state or the costate becomes non-finite or the solver cannot go on.
    """
    if form not in FORMS:
        raise unknown("form of the costate", form, FORMS)
    check_targets(tokens, targets)
    given = {"method": method, "steps": steps, "rtol": rtol, "atol": atol}
    forward = FORMS[form](model.depth, model.embed(tokens), {name: value for name, value in given.items() if value is not None})
    loss, p = _value_and_pullback(lambda x: cross_entropy(model, x, targets), forward.states[-1])
    costates, stats = [p], forward.stats
    starts: list[Point] = []
    drift: list[Tensor] = []
    for sublayer, back in reversed(list(zip(model.depth.sublayers, forward.backs, strict=True))):
        way = back(p)
        p = way.costate
        costates.insert(0, p)
        starts.insert(0, way.path[-1])
        drift.insert(0, _drift(sublayer.velocity, way.path))
        stats = Stats(*(sum(pair) for pair in zip(dataclasses.astuple(stats), dataclasses.astuple(way.stats), strict=True)))
    _check_finite(forward.states, costates)
    return Costate(
        form,
        float(loss),
        model.depth.times,
        tuple(forward.states),
        tuple(costates),
        tuple(starts),
        tuple(float(value) for value in drift),
        stats,
    )


def check_targets(tokens: Tensor, targets: Tensor) -> None:
    """Raises ConfigError unless there is one target per token and one of them is not -1."""
    if targets.shape != tokens.shape:
        shapes = f"shape {tuple(targets.shape)} and tokens {tuple(tokens.shape)}"
        raise ConfigError(f"targets have {shapes}: give one target per token")
    if not (targets != -1).any():
        raise ConfigError("every target is -1, so there is no loss: give at least one token to predict")


def cross_entropy(model: Model, x: Float[Tensor, "*batch tokens width"], targets: Int[Tensor, "..."]) -> Float[Tensor, ""]:
    """L(X_T): the mean cross-entropy of head(X_T) in nats, targets of -1 left out.

    Raises ConfigError for a head without one row of logits per target and, on the CPU, for targets that have no logit.
    """
    logits = model.head(x)
    if logits.shape[:-1].numel() != targets.numel():
        shapes = f"the head gives {tuple(logits.shape)} for targets {tuple(targets.shape)}"
        raise ConfigError(f"{shapes}: take a model with logits of every token")
    # on an accelerator this would wait for the device; there the loss's own assertion reports it
    if targets.device.type == "cpu" and not -1 <= int(targets.min()) <= int(targets.max()) < logits.shape[-1]:
        span = f"targets run from {int(targets.min())} to {int(targets.max())}"
        raise ConfigError(
            f"{span}, and the head gives {logits.shape[-1]} numbers per token: give targets below that, or a model whose head has a "
            "logit for every token"
        )
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten(), ignore_index=-1)


@dataclasses.dataclass(frozen=True)
class _Way:
    """A segment from its end to its start: (X, P) at the accepted steps, and dL/dX before entering the segment."""

    path: Sequence[Point]
    costate: Tensor
    stats: Stats


@dataclasses.dataclass(frozen=True)
class _Forward:
    """X_0 and X at each segment's end, and for each segment the way back: dL/dX at its end to a `_Way`."""

    states: Sequence[Tensor]
    backs: Sequence[Callable[[Tensor], _Way]]
    stats: Stats


def _discrete(depth: Depth, x0: Tensor, options: dict[str, Any]) -> _Forward:
    """X_{k+1} = step_k(X_k), and back P_k = (dX_{k+1}/dX_k)' P_{k+1}."""
    if options:
        given = ", ".join(options)
        raise ConfigError(f"the discrete form is the model's own steps: leave {given} out, or choose form 'continuous'")
    states, backs = [x0], []
    for sublayer, segment in zip(depth.sublayers, depth.segments(), strict=True):
        step = partial(sublayer.step, dt=float(segment.length))
        x, y = states[-1], step(states[-1])
        states.append(y)
        backs.append(partial(_step_back, step, x, y))
    return _Forward(states, backs, Stats(len(backs), len(backs)))


def _step_back(step: Map, x: Tensor, y: Tensor, p: Tensor) -> _Way:
    before = _value_and_pullback(step, x, p)[1]
    return _Way([(y, p), (x, before)], before, Stats(1, 1))


def _continuous(depth: Depth, x0: Tensor, options: dict[str, Any]) -> _Forward:
    """The ODE's solution by a `solve` that keeps every accepted step, and back by `_solve_back` from each segment's end."""
    options = {"method": "tsit5"} | options
    segments = depth.segments(continuous=True)
    forward = solve(segments, x0, save="steps", **options)
    options.pop("steps", None)
    states, backs, first = [x0], [], 0
    for sublayer, segment in zip(depth.sublayers, segments, strict=True):
        last = forward.times.index(float(segment.t1), first)
        x = states[-1]
        start = x if segment.enter is None else segment.enter(x)
        steps = list(zip(forward.times[first : last + 1], [start, *forward.states[first + 1 : last + 1]], strict=True))
        backs.append(partial(_solve_back, sublayer.velocity, segment.enter, x, steps, options))
        states.append(forward.states[last])
        first = last
    return _Forward(states, backs, forward.stats)


def _solve_back(
    velocity: Map, enter: Map | None, before: Tensor, steps: Sequence[tuple[float, Tensor]], options: dict[str, Any], p: Tensor
) -> _Way:
    """dz/dt = (v, -(dv/dX)' P) for z = (X, P), backward over the forward steps, each begun at the forward solution's X.

    If X were carried back over the whole segment, a flow that contracts forward would blow its error up by exp(Lipschitz
    constant * length), and <P, v> would not show it. An interpolant of X instead would put its own order in place of the
    method's.
    """

    def field(t: Tensor, z: Tensor) -> Tensor:
        v, gradient = _value_and_pullback(velocity, z[0], z[1])
        return torch.stack([v, -gradient])

    def from_state(x: Tensor) -> Map:
        return lambda z: torch.stack([x, z[1]])

    # the adjoint is linear in P: at unit size, tolerances mean the same to P as to X, however small the loss's gradient
    size = p.square().mean().sqrt()
    size = torch.where(size == 0, 1.0, size)
    segments = [Segment(t1, t0, field, enter=from_state(x1)) for (t0, _), (t1, x1) in pairwise(steps)]
    solution = solve(segments[::-1], torch.stack([steps[-1][1], p / size]), save="steps", throw=False, **options)
    if solution.status is not Status.SUCCESS:
        where = f"at t = {solution.time:.6g}, on the way back from {steps[-1][0]:.6g} to {steps[0][0]:.6g}"
        raise SolveError(f"the costate's equation failed {where}: {ADVICE[solution.status]}", solution)
    path = [(x, size * p) for x, p in solution.states]
    path[-1] = steps[0][1], path[-1][1]
    p = path[-1][1]
    return _Way(path, p if enter is None else _value_and_pullback(enter, before, p)[1], solution.stats)


FORMS: dict[str, Callable[[Depth, Tensor, dict[str, Any]], _Forward]] = {"discrete": _discrete, "continuous": _continuous}


@torch.enable_grad()
def _value_and_pullback(function: Map, x: Tensor, p: Tensor | None = None) -> Point:
    """(y, (dy/dx)' p) for y = function(x); p is 1 where it is not given and y is a number."""
    x = x.detach().requires_grad_()
    y = function(x)
    (gradient,) = torch.autograd.grad(y, x, p)
    return y.detach(), gradient


def _drift(velocity: Map, path: Sequence[Point]) -> Tensor:
    """(max - min of <P, v>)/max |P||v| over the points; 0 where P or v vanishes at all of them."""
    velocities = [velocity(x) for x, _ in path]
    products = torch.stack([(p * v).sum() for (_, p), v in zip(path, velocities, strict=True)])
    size = torch.stack([p.norm() * v.norm() for (_, p), v in zip(path, velocities, strict=True)]).max()
    return (products.max() - products.min()) / torch.where(size == 0, 1.0, size)


def _check_finite(states: Sequence[Tensor], costates: Sequence[Tensor]) -> None:
    """Raises SolveError for the first X, else the last P, that is not finite."""
    if finite(costates[0]) and finite(states[-1]):
        return
    last = len(states) - 1
    for k, x in enumerate(states):
        if not finite(x):
            raise SolveError(f"the hidden state became non-finite in segment {max(k - 1, 0)}: {ADVICE[Status.NON_FINITE]}")
    k = next(k for k in range(last, -1, -1) if not finite(costates[k]))
    where = "at the head" if k == last else f"in segment {k}"
    raise SolveError(f"the costate became non-finite {where}: take a smaller dt, smaller weights or a wider dtype")
