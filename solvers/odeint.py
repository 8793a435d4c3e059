"""torchdiffeq's call: the same arguments, names and results, by this package's methods."""

from __future__ import annotations

import dataclasses
import math
import warnings
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torchdiffeq
from torch import Tensor

from solvers.controller import PI
from solvers.error_norm import Norm, rms
from solvers.errors import ConfigError, SolveError, look_up, unknown
from solvers.event import Event
from solvers.gradients import Gradient, get_gradient
from solvers.method import Method
from solvers.methods import METHODS
from solvers.request import TYPES
from solvers.run import time_type
from solvers.runge_kutta import RungeKutta
from solvers.segment import Field, Segment
from solvers.solution import Solution
from solvers.solve import solve
from solvers.step_control import StepControl, Tolerance, spread
from solvers.tableau import RK4_38
from solvers.torchdiffeq_methods import NAMES
from solvers.tree import Tree

ITS_METHODS: dict[str, Method] = {
    **{name: METHODS[name] for name in ("euler", "midpoint", "heun3", "bosh3", "dopri5", "tsit5")},
    "heun2": METHODS["heun"],
    "adaptive_heun": METHODS["heun_euler"],
    "rk4": RungeKutta(RK4_38),  # what it calls so
}
"""Its names of methods that are ours too. The rest of `NAMES` is left to it whole: a multistep method has a past, which would end
with every call."""
BOUNDS = ("first_step", "min_step", "max_step")
RULE = {"safety": "safety", "ifactor": "grow", "dfactor": "shrink"}
ADAPTIVE = ("norm", "max_num_steps", "dtype", "step_t", "jump_t", *BOUNDS, *RULE)
CALLBACKS = ("callback_step", "callback_accept_step", "callback_reject_step")
FIXED = ("norm", "step_size", "grid_constructor", "interp", "perturb")

Func = Callable[[Tensor, Any], Any]


def odeint(
    func: Func,
    y0: Any,
    t: Tensor,
    *,
    rtol: Tolerance = 1e-7,
    atol: Tolerance = 1e-9,
    method: str | None = None,
    options: Mapping[str, Any] | None = None,
    event_fn: Any = None,
    gradient: str | Gradient = "backprop",
) -> Any:
    """y at each time of t, stacked along a new first axis: y(t[0]) = y0, dy/dt = func(t, y). t may ascend or descend.

    As `torchdiffeq.odeint` (0.2.5), so that it takes the other's place. Gradients reach y0, t and whatever func depends on. Methods that
    only torchdiffeq has (dopri8, fehlberg2, the Adams ones, scipy_solver) are run by it whole, with what it accepts, refuses and warns
    of; all that follows is of the methods that are ours, `ITS_METHODS`.

    - `func(t, y)`: dy/dt, like y
    - `y0`: a tensor or a tuple of them, and so is then func's value and the result; here lists, named tuples and dictionaries too, and all
      of these nested
    - `t`: the times. Adaptive methods step as they like and interpolate; fixed ones step from time to time, or by `step_size`
    - `rtol`, `atol`: of an adaptive method, numbers or tensors by entry. A relative one below what y0's type resolves is raised to that
    - `method`: a name, dopri5 if None
    - `options`: norm, first_step, min_step, max_step, max_num_steps, step_t, jump_t, safety, ifactor, dfactor; step_size,
      grid_constructor, interp ("linear" or "cubic"). Time is always carried in float64, and a field never evaluated at a switch, so that
      `dtype` and `perturb` change nothing. An option that is none of these is warned of, as there
    - `event_fn(t, y)`: the result is then (event_t, states at t[0] and there): the first time at which an entry of event_fn's value has
      another sign than at t[0]. Both have the gradients of `odeint_event` there, and those by what event_fn itself depends on, which are
      missing there. t has two times, of which the second only says the direction and a scale: it goes on for up to 1e9 of these
      intervals, or a million steps of a fixed-step method
    - `gradient`: a name of `GRADIENTS` (`adjoint` for `odeint_adjoint`), which is not there

    Different from there: what goes wrong raises ConfigError, a ValueError, or SolveError with the time and the advice instead of an
    assertion; steps whose error is too large, since `min_step` allows none shorter, are warned of, and so are callbacks of func, which are
    not called.
    """
    _check_times(t)
    if event_fn is not None and (len(t) != 2 or not callable(event_fn)):
        raise ConfigError(f"event_fn = {event_fn!r} with {len(t)} times: give a function of t and y, and two times")
    if method in NAMES and method not in ITS_METHODS:
        return _theirs(func, y0, t, rtol=rtol, atol=atol, method=method, options=options, event_fn=event_fn, gradient=gradient)
    chosen = ITS_METHODS.get("dopri5" if method is None else method)
    if chosen is None:
        raise unknown("method", method, {*ITS_METHODS, *NAMES})
    asked = dict(options or {})
    tree, field, first = _flattened(func, y0, chosen, asked)
    start = first
    tolerances = [_by_entry(*given, start, tree) for given in (("rtol", rtol), ("atol", atol))]
    # as the field is told it
    moments = t.to(time_type(start.dtype))
    if t.requires_grad:
        start = start - field(moments[0], start) * (moments[0] - moments[0].detach())
    if event_fn is not None:
        told = event_fn if tree is None else lambda t, y: event_fn(t, tree.parts(y))
        event_t, states = _until(told, chosen, field, start, t, tolerances, asked, tree, gradient)
        states = torch.stack([first, states])
        return event_t, states if tree is None else tree.parts(states)
    if len(t) == 1:
        states = start[None]
    elif chosen.adaptive:
        chosen, request = _request(chosen, start, tolerances, asked, tree)
        states = _adaptive(chosen, field, start, t, request, asked, gradient)
    else:
        states = _fixed(chosen, field, start, t, asked, gradient)
    if t.requires_grad:
        later = zip(moments[1:], states[1:], strict=True)
        states = torch.stack([first, *(y + field(time, y) * (time - time.detach()) for time, y in later)])
    return states if tree is None else tree.parts(states)


def curve(
    func: Func, y0: Any, t0: float, t1: float, method: Method, tolerances: Sequence[Tolerance], asked: dict[str, Any]
) -> Callable[[Tensor], Any]:
    """t -> y(t) between two times, of one adaptive solve."""
    tree, field, start = _flattened(func, y0, method, asked)
    known = [_by_entry(*given, start, tree) for given in zip(("rtol", "atol"), tolerances, strict=True)]
    method, request = _request(method, start, known, asked, tree)
    ends = sorted({t0, t1, *_inside(asked, t0, t1)}, reverse=t0 > t1)
    found = _solved([Segment(a, b, field) for a, b in pairwise(ends)], start, method=method, save="curve", **request).curve
    assert found is not None, "asked for"
    return found if tree is None else lambda t: tree.parts(found(t))


def _flattened(func: Func, y0: Any, method: Method, asked: Mapping[str, Any]) -> tuple[Tree | None, Field, Tensor]:
    """The structure of y0 if it is none, and the field and start of the flat state; what goes unheard is warned of."""
    known = ADAPTIVE if method.adaptive else FIXED
    if strange := sorted(set(asked) - set(known)):
        warnings.warn(f"odeint: unexpected options {strange} for a method that knows {', '.join(known)}", stacklevel=3)
    if unheard := [name for name in CALLBACKS if hasattr(func, name)]:
        warnings.warn(
            f"odeint: func has {', '.join(unheard)}, and callbacks are not called here: solvers.solve(..., on_step=) does",
            stacklevel=3,
        )
    if isinstance(y0, Tensor):
        return None, func, y0
    tree = Tree(y0, "y0")
    return tree, partial(_flat, tree, func), tree.flat("y0", y0)


def _theirs(func: Func, y0: Any, t: Tensor, *, gradient: str | Gradient, **request: Any) -> Any:
    """torchdiffeq's own result, with its bare assertions turned into errors."""
    calls = {"backprop": torchdiffeq.odeint, "adjoint": torchdiffeq.odeint_adjoint}
    call = calls.get(gradient) if isinstance(gradient, str) else None
    if call is None:
        raise ConfigError(
            f"method {request['method']!r} is torchdiffeq's and has the gradients {', '.join(calls)} only, not {gradient!r}"
        )
    if not isinstance(y0, Tensor) and type(y0) is not tuple:  # it knows no other structure
        return _their_tree(Tree(y0, "y0"), func, y0, t, gradient=gradient, **request)
    options = None if request["options"] is None else dict(request["options"])
    try:
        return call(func, y0, t, **{**request, "options": options})
    except AssertionError as error:
        raise SolveError(f"torchdiffeq's {request['method']}: {error or 'it stopped without a word'}") from None


def _their_tree(tree: Tree, func: Func, y0: Any, t: Tensor, event_fn: Any, **request: Any) -> Any:
    """The same of the flat state, in its structure."""
    field = partial(_flat, tree, func)
    told = None if event_fn is None else lambda t, y: event_fn(t, tree.parts(y))
    found = _theirs(field, tree.flat("y0", y0), t, event_fn=told, **request)
    return tree.parts(found) if event_fn is None else (found[0], tree.parts(found[1]))


def _flat(tree: Tree, func: Func, t: Tensor, y: Tensor) -> Tensor:
    return tree.flat("func", func(t, tree.parts(y)))


def _request(
    method: Method, y0: Tensor, tolerances: Sequence[float | Tensor], asked: dict[str, Any], tree: Tree | None
) -> tuple[Method, dict[str, Any]]:
    """An adaptive method with the rule asked for, and what else is asked of `solve`."""
    resolved = 4 * torch.finfo(y0.dtype).eps if y0.dtype in TYPES else 0.0
    rule = {ours: float(asked[theirs]) for theirs, ours in RULE.items() if theirs in asked}
    if rule and isinstance(method, RungeKutta):
        method = dataclasses.replace(method, controller=PI(**{"alpha": 1.0, "beta": 0.0, **rule}))
    # its defaults, 0 and inf, are no bounds
    bounds = {name: float(asked[name]) for name in BOUNDS if asked.get(name) not in (None, 0, math.inf)}
    control = StepControl(
        tolerances[0].clamp(min=resolved) if isinstance(tolerances[0], Tensor) else max(tolerances[0], resolved),
        tolerances[1],
        _norm(asked.get("norm"), tree),
        max_steps=int(asked.get("max_num_steps", 2**31 - 1)),
        **bounds,
    )
    return method, {"step_control": control}


def _inside(asked: dict[str, Any], start: float, end: float) -> list[float]:
    """The switches that were declared between two times."""
    switches = [float(s) for name in ("step_t", "jump_t") if asked.get(name) is not None for s in asked[name]]
    return [s for s in switches if min(start, end) < s < max(start, end)]


def _until(
    event_fn: Func,
    method: Method,
    field: Field,
    y0: Tensor,
    t: Tensor,
    tolerances: Sequence[float | Tensor],
    asked: dict[str, Any],
    tree: Tree | None,
    gradient: str | Gradient,
) -> tuple[Tensor, Tensor]:
    """The event's time and state."""
    start, other = t.detach().tolist()
    with torch.no_grad():
        signs = torch.sign(event_fn(t[0].to(time_type(y0.dtype)), y0))
    event = Event(lambda t, y: (event_fn(t, y) * signs).min(), direction=-1)
    if method.adaptive:
        method, request = _request(method, y0, tolerances, asked, tree)
        end = start + 1e9 * (other - start)
        ends = sorted({start, end, *_inside(asked, start, end)}, reverse=start > other)
    else:
        if asked.get("grid_constructor") is not None:
            raise ConfigError("a grid ends where it ends, and an event's time is not known: give step_size instead")
        size = float(asked["step_size"]) if asked.get("step_size") is not None else abs(other - start)
        request = {"steps": 2**20}
        ends = [start, start + math.copysign(2**20 * size, other - start)]
    segments = [Segment(a, b, field) for a, b in pairwise(ends)]
    solution = _solved(segments, y0, method=method, gradient=gradient, events=event, **request)
    if solution.event_time is None:
        raise SolveError(
            f"no event between t = {start:g} and {ends[-1]:g}: check the sign of event_fn, or the direction of t", solution
        )
    return solution.event_time.to(t), solution.x1


def _adaptive(
    method: Method, field: Field, y0: Tensor, t: Tensor, request: dict[str, Any], asked: dict[str, Any], gradient: str | Gradient
) -> Tensor:
    request = {**request, "method": method, "gradient": gradient}
    times: list[float] = t.detach().tolist()
    inside = _inside(asked, times[0], times[-1])
    dense = getattr(method, "dense", False) and getattr(get_gradient(gradient), "dense", False)
    ends = sorted({times[0], times[-1], *inside, *([] if dense else times)}, reverse=times[0] > times[-1])
    segments = [Segment(a, b, field) for a, b in pairwise(ends)]
    if dense:
        return torch.stack(_solved(segments, y0, times=times, **request).states)
    found = _solved(segments, y0, save="segments", **request)
    states = dict(zip(found.times, found.states, strict=True))
    return torch.stack([states[time] for time in times])


def _solved(segments: Sequence[Segment], y0: Tensor, **request: Any) -> Solution:
    """The solution, whose warnings are Python's."""
    solution = solve(segments, y0, **request)
    for words in solution.warnings:
        warnings.warn(f"odeint: {words}", stacklevel=4)
    return solution


def _fixed(method: Method, field: Field, y0: Tensor, t: Tensor, asked: dict[str, Any], gradient: str | Gradient) -> Tensor:
    times: list[float] = t.detach().tolist()
    grid = _grid(field, y0, t, asked)
    states = solve(
        [Segment(a, b, field) for a, b in pairwise(grid)], y0, method=method, save="segments", gradient=gradient
    ).states
    if grid == times:
        return torch.stack(states)
    interpolate = look_up("interp", asked.get("interp", "linear"), INTERPOLATIONS)
    sign = math.copysign(1.0, times[-1] - times[0])
    ascending = [sign * g for g in grid]
    found = [states[0]]
    for time in times[1:]:
        k = max(1, bisect_left(ascending, sign * time))
        found.append(
            states[k] if time == grid[k] else interpolate(field, (grid[k - 1], grid[k]), (states[k - 1], states[k]), time)
        )
    return torch.stack(found)


def _grid(field: Field, y0: Tensor, t: Tensor, asked: dict[str, Any]) -> list[float]:
    """The times between which one step is taken."""
    times: list[float] = t.detach().tolist()
    if asked.get("grid_constructor") is not None:
        if asked.get("step_size") is not None:
            raise ConfigError("step_size and grid_constructor both say where the steps end: give one of them")
        grid: list[float] = asked["grid_constructor"](field, y0, t.detach()).tolist()
        if grid[0] != times[0] or grid[-1] != times[-1]:
            raise ConfigError(
                f"the grid goes from {grid[0]:g} to {grid[-1]:g}, the times from {times[0]:g} to {times[-1]:g}: make them agree"
            )
        return grid
    if asked.get("step_size") is None:
        return times
    size = float(asked["step_size"])
    if not 0 < size < math.inf:
        raise ConfigError(f"step_size = {size!r}: give a positive finite number, in units of time")
    span = times[-1] - times[0]
    # a step that rounding alone would leave is none
    count = max(1, math.ceil(abs(span) / size * (1 - 1e-12)))
    return [times[0] + math.copysign(k * size, span) for k in range(count)] + [times[-1]]


def _linear(field: Field, ends: tuple[float, float], states: tuple[Tensor, Tensor], t: float) -> Tensor:
    return states[0] + (t - ends[0]) / (ends[1] - ends[0]) * (states[1] - states[0])


def _cubic(field: Field, ends: tuple[float, float], states: tuple[Tensor, Tensor], t: float) -> Tensor:
    """The cubic through both states with the field's slopes there (Hermite)."""
    h = ends[1] - ends[0]
    s = (t - ends[0]) / h
    f0, f1 = (field(torch.tensor(end, dtype=time_type(y.dtype)), y) for end, y in zip(ends, states, strict=True))
    y0, y1 = states
    return (1 + 2 * s) * (1 - s) ** 2 * y0 + s * (1 - s) ** 2 * h * f0 + s * s * (3 - 2 * s) * y1 + s * s * (s - 1) * h * f1


INTERPOLATIONS = {"linear": _linear, "cubic": _cubic}


def _norm(norm: Callable[[Any], Tensor] | None, tree: Tree | None) -> Norm:
    """The norm of a flat state from that of the user's; by default RMS, of a tuple the largest RMS of its tensors."""
    chosen = rms if norm is None else norm
    return chosen if tree is None else tree.norm(chosen, named=norm is None)


def _by_entry(name: str, given: Tolerance, y0: Tensor, tree: Tree | None) -> float | Tensor:
    """A tolerance as `solve` takes it for the flat state; of a tuple one for each part, whatever holds them."""
    if isinstance(given, Tensor) and given.dim() == 0 and not given.requires_grad:
        given = given.item()
    if tree is not None and isinstance(tree.places, tuple) and isinstance(given, (Tensor, list)):
        given = tuple(given)
    _, whole = spread(name, given, y0, tree)
    if isinstance(whole, bool) or not isinstance(whole, (int, float, Tensor)):
        raise ConfigError(f"{name} = {whole!r}: give a positive number, or a tensor of them that broadcasts with y0")
    return whole


def _check_times(t: object) -> None:
    if not isinstance(t, Tensor) or t.dim() != 1 or not t.dtype.is_floating_point or len(t) == 0:
        what = f"a tensor of shape {tuple(t.shape)} of {t.dtype}" if isinstance(t, Tensor) else type(t).__name__
        raise ConfigError(f"t is {what}: give a floating tensor of one axis")
    steps = t.detach().diff()
    if not (bool((steps > 0).all()) or bool((steps < 0).all())):
        raise ConfigError("t must be strictly increasing or strictly decreasing")
