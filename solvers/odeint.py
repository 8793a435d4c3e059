"""`odeint` with torchdiffeq's arguments, names and results, by this package's methods."""

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
from torch import Tensor, nn

from solvers.checked import binds, has_numbers, is_dense
from solvers.controller import PI
from solvers.error_norm import rms
from solvers.errors import ConfigError, SolveError, check_positive, look_up, shown, unknown
from solvers.event import Event
from solvers.gradients import get_gradient
from solvers.march import Gradient
from solvers.method import Method
from solvers.methods import METHODS
from solvers.request import TYPES
from solvers.run import real_type
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
"""torchdiffeq's names of methods that this package has too. torchdiffeq runs the rest of `NAMES` as
a whole: a multistep method would lose its past with every call.
"""
ALL_METHODS = {name: METHODS[f"torchdiffeq:{name}"] for name in NAMES} | ITS_METHODS
BOUNDS = ("first_step", "min_step", "max_step")
RULE = {"safety": "safety", "ifactor": "grow", "dfactor": "shrink"}
ADAPTIVE = ("norm", "max_num_steps", "dtype", "step_t", "jump_t", *BOUNDS, *RULE)
CALLBACKS = ("callback_step", "callback_accept_step", "callback_reject_step")
EVENT_STEPS = 2**16
"""The most steps of an adaptive method in search of an event, without `max_num_steps`."""
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
    """y at each time of t, stacked along a new first axis: y(t[0]) = y0, dy/dt = func(t, y). t may
    ascend or descend.

    It replaces `torchdiffeq.odeint` (0.2.5). Gradients reach y0, t and all that func depends on.
    torchdiffeq itself runs the methods that only it has (dopri8, fehlberg2, the Adams ones,
    scipy_solver), with its own checks and warnings. The following holds for this package's methods,
    `ITS_METHODS`.

    - `func(t, y)`: dy/dt, like y
    - `y0`: a tensor or a tuple of tensors; func's value and the result have its structure. Lists,
      named tuples and dictionaries work too, also nested
    - `t`: the times. Adaptive methods choose their steps and interpolate. Fixed-step methods step
      from time to time, or by `step_size`
    - `rtol`, `atol`: of an adaptive method; numbers, or tensors for tolerances by entry. A relative
      one below the resolution of y0's type is raised to it
    - `method`: a name, dopri5 if None
    - `options`: norm, first_step, min_step, max_step, max_num_steps, step_t, jump_t, safety,
      ifactor, dfactor; step_size, grid_constructor, interp ("linear" or "cubic"). `dtype` and
      `perturb` have no effect: time is always float64, and a field is never evaluated at a switch.
      Other options give a warning, as in torchdiffeq
    - `event_fn(t, y)`: the result is then (event_t, states at t[0] and at event_t): the first time
      at which an entry of event_fn's value has another sign than at t[0]. Both have gradients, also
      by tensors that event_fn depends on, which torchdiffeq lacks. t has two times; the second sets
      the direction and a scale. The solve runs for up to 1e9 of these intervals, or a million steps
      of a fixed-step method
    - `gradient`: a name of `GRADIENTS` (`adjoint` for `odeint_adjoint`); torchdiffeq has no such
      argument

    Unlike torchdiffeq, errors raise ConfigError, a ValueError, or SolveError with the time and
    advice, and no assertion. It warns if steps have too large an error because `min_step` allows no
    shorter ones, and if func has callbacks, which are not called.
    """
    _check_times(t)
    if event_fn is not None and (len(t) != 2 or not callable(event_fn)):
        raise ConfigError(
            f"event_fn = {shown(event_fn)} with {len(t)} times: give a function of t and y, and two"
            " times"
        )
    if method in NAMES and method not in ITS_METHODS:
        calls = {"backprop": "odeint", "adjoint": "odeint_adjoint"}
        if isinstance(gradient, str):
            call = calls.get(gradient)
        else:
            call = None
        if call is None:
            raise ConfigError(
                f"method {method!r} is torchdiffeq's and has the gradients {', '.join(calls)} only,"
                f" not {shown(gradient)}"
            )
        return their_result(
            call,
            func,
            y0,
            t,
            rtol=rtol,
            atol=atol,
            method=method,
            options=options,
            event_fn=event_fn,
        )
    chosen = ITS_METHODS.get("dopri5" if method is None else method)
    if chosen is None:
        raise unknown("method", method, ALL_METHODS)
    problem = Problem(func, y0, chosen, rtol, atol, options, gradient)
    first = problem.start
    # in the type in which the field gets the time
    moments = t.to(real_type(first.dtype))
    if t.requires_grad:
        problem.start = first - problem.field(moments[0], first) * (
            moments[0] - moments[0].detach()
        )
    if event_fn is not None:
        event_t, states = problem.until(event_fn, t)
        return event_t, problem.parts(torch.stack([first, states]))
    if len(t) == 1:
        states = problem.start[None]
    elif chosen.adaptive:
        states = problem.adaptive(t)
    else:
        states = problem.fixed(t)
    if t.requires_grad:
        later = zip(moments[1:], states[1:], strict=True)
        states = torch.stack(
            [first, *(y + problem.field(time, y) * (time - time.detach()) for time, y in later)]
        )
    return problem.parts(states)


def their_result(call: str, func: Func, y0: Any, t: Tensor, **request: Any) -> Any:
    """The result of torchdiffeq's function of that name, for states of any structure. Its bare
    assertions become errors.
    """
    import torchdiffeq

    if (
        not isinstance(y0, Tensor) and type(y0) is not tuple
    ):  # torchdiffeq supports no other structure
        tree = Tree(y0, "y0")
        event_fn = request["event_fn"]
        if event_fn is not None:
            request["event_fn"] = tree.on_parts(event_fn)
        found = their_result(call, tree.flat_map("func", func), tree.flat("y0", y0), t, **request)
        if event_fn is None:
            return tree.parts(found)
        return (found[0], tree.parts(found[1]))
    if request["options"] is None:
        options = None
    else:
        options = dict(request["options"])
    try:
        return getattr(torchdiffeq, call)(func, y0, t, **{**request, "options": options})
    except AssertionError as error:
        raise SolveError(
            f"torchdiffeq's {request['method']}: {error or 'it stopped without a message'}"
        ) from None


class Problem:
    """dy/dt = field(t, y) from y = start, flat for a tree, by a method of this package, with the
    given options. Warns of arguments that have no effect.
    """

    def __init__(
        self,
        func: Func,
        y0: Any,
        method: Method,
        rtol: Tolerance,
        atol: Tolerance,
        options: Mapping[str, Any] | None,
        gradient: str | Gradient = "backprop",
    ):
        if isinstance(func, nn.Module) and not binds(func.forward, 0.0, y0):
            raise ConfigError(
                f"func = {shown(func)} takes other arguments than a time and a state: give one with"
                " forward(t, y)"
            )
        asked = self.asked = options or {}
        if method.adaptive:
            known = ADAPTIVE
        else:
            known = FIXED
        if strange := sorted(set(asked) - set(known)):
            warnings.warn(
                f"odeint: unexpected options {strange} for a method that knows {', '.join(known)}",
                stacklevel=4,
            )
        if unheard := [name for name in CALLBACKS if hasattr(func, name)]:
            warnings.warn(
                f"odeint: func has {', '.join(unheard)}, and callbacks are not called here:"
                " solvers.solve(..., on_step=) does",
                stacklevel=4,
            )
        rule = {ours: float(asked[theirs]) for theirs, ours in RULE.items() if theirs in asked}
        if rule and method.adaptive and isinstance(method, RungeKutta):
            method = dataclasses.replace(
                method, controller=PI(**{"alpha": 1.0, "beta": 0.0, **rule})
            )
        self.method = method
        self.gradient = gradient
        self.tree = tree = None if isinstance(y0, Tensor) else Tree(y0, "y0")
        self.field: Field = func if tree is None else tree.flat_map("func", func)
        self.start: Tensor = y0 if tree is None else tree.flat("y0", y0)
        self.rtol, self.atol = (
            _by_entry(*given, self.start, tree) for given in (("rtol", rtol), ("atol", atol))
        )

    def parts(self, y: Tensor) -> Any:
        """y in the structure of y0. Axes in front of a state's stay there."""
        if self.tree is None:
            return y
        return self.tree.parts(y)

    @property
    def control(self) -> StepControl:
        """The step control of an adaptive method. A relative tolerance below the type's resolution
        is raised to it.
        """
        if self.start.dtype in TYPES:
            resolved = 4 * torch.finfo(self.start.dtype).eps
        else:
            resolved = 0.0
        norm = self.asked.get("norm")
        if norm is None:
            chosen = rms
        else:
            chosen = norm
        return StepControl(
            (
                self.rtol.clamp(min=resolved)
                if isinstance(self.rtol, Tensor)
                else max(self.rtol, resolved)
            ),
            self.atol,
            chosen if self.tree is None else self.tree.norm(chosen, named=norm is None),
            max_steps=int(self.asked.get("max_num_steps", 2**31 - 1)),
            # torchdiffeq's defaults, 0 and inf, are no bounds
            **{
                name: float(self.asked[name])
                for name in BOUNDS
                if self.asked.get(name) not in (None, 0, math.inf)
            },
        )

    def solved(self, ends: Sequence[float], **request: Any) -> Solution:
        """The solution over a segment from each end to the next. Its warnings become Python's."""
        segments = [Segment(a, b, self.field) for a, b in pairwise(ends)]
        if self.method.adaptive:
            request.setdefault("step_control", self.control)
        solution = solve(
            segments, self.start, method=self.method, gradient=self.gradient, **request
        )
        for words in solution.warnings:
            warnings.warn(f"odeint: {words}", stacklevel=5)
        return solution

    def ends(self, times: Sequence[float]) -> list[float]:
        """The times, and the switches between the first and the last of them that the options
        declare, in order.
        """
        start = times[0]
        end = times[-1]
        switches = [
            float(s)
            for name in ("step_t", "jump_t")
            if self.asked.get(name) is not None
            for s in self.asked[name]
        ]
        inside = [s for s in switches if min(start, end) < s < max(start, end)]
        return sorted({*times, *inside}, reverse=start > end)

    def curve(self, t0: float, t1: float) -> Callable[[Tensor], Any]:
        """t -> y(t) between two times, from one adaptive solve."""
        found = self.solved(self.ends([t0, t1]), save="curve").curve
        assert found is not None, "asked for"
        return lambda t: self.parts(found(t))

    def until(self, event_fn: Func, t: Tensor) -> tuple[Tensor, Tensor]:
        """The event's time and state."""
        start, other = t.detach().tolist()
        with torch.no_grad():
            first: Any = event_fn(t[0].to(real_type(self.start.dtype)), self.parts(self.start))
        if not is_dense(first) or not first.is_floating_point() or not first.numel():
            raise ConfigError(
                f"event_fn returned {shown(first)}: return a tensor of floating-point numbers"
            )
        signs = torch.sign(first)
        request: dict[str, Any] = {}

        def entry(i: int, t: Tensor, y: Tensor) -> Tensor:
            value: Tensor = event_fn(t, self.parts(y))
            return value.flatten()[i]

        # an entry that begins at zero has a sign as soon as it leaves zero
        events = [Event(partial(entry, int(i))) for i in (signs == 0).flatten().nonzero()]
        if signs.any():
            events.append(
                Event(
                    lambda t, y: (event_fn(t, self.parts(y)) * signs)[signs != 0].min(),
                    direction=-1,
                )
            )
        if self.method.adaptive:
            ends = self.ends([start, start + 1e9 * (other - start)])
            steps = 1
            if "max_num_steps" not in self.asked:  # an event that never comes would take for ever
                request["step_control"] = dataclasses.replace(self.control, max_steps=EVENT_STEPS)
        else:
            if self.asked.get("grid_constructor") is not None:
                raise ConfigError(
                    "a grid has a fixed end, and the event's time is unknown: give step_size"
                    " instead"
                )
            if self.asked.get("step_size") is None:
                size = abs(other - start)
            else:
                size = float(self.asked["step_size"])
            ends = [start, start + math.copysign(2**20 * size, other - start)]
            steps = 2**20
        solution = self.solved(ends, events=events, steps=steps, **request)
        if solution.event_time is None:
            raise SolveError(
                f"no event between t = {start:g} and {ends[-1]:g}: check the sign of event_fn, or"
                " the direction of t",
                solution,
            )
        return solution.event_time.to(t), solution.x1

    def adaptive(self, t: Tensor) -> Tensor:
        """The states at the times t, by an adaptive method."""
        times: list[float] = t.detach().tolist()
        if getattr(self.method, "dense", False) and getattr(
            get_gradient(self.gradient), "dense", False
        ):
            ends = self.ends([times[0], times[-1]])
            return torch.stack(self.solved(ends, times=times).states)
        found = self.solved(self.ends(times), save="segments")
        states = dict(zip(found.times, found.states, strict=True))
        return torch.stack([states[time] for time in times])

    def fixed(self, t: Tensor) -> Tensor:
        """The states at the times t, by one step between neighbouring times of a grid."""
        times: list[float] = t.detach().tolist()
        grid = self.grid(t, times)
        states = self.solved(grid, save="segments").states
        if grid == times:
            return torch.stack(states)
        interpolate = look_up("interp", self.asked.get("interp", "linear"), INTERPOLATIONS)
        sign = math.copysign(1.0, times[-1] - times[0])
        found = [states[0]]
        for time in times[1:]:
            k = max(1, bisect_left(grid, sign * time, key=lambda end: sign * end))
            if time == grid[k]:
                found.append(states[k])
            else:
                found.append(
                    interpolate(
                        self.field, (grid[k - 1], grid[k]), (states[k - 1], states[k]), time
                    )
                )
        return torch.stack(found)

    def grid(self, t: Tensor, times: list[float]) -> list[float]:
        """The ends of the steps."""
        constructor = self.asked.get("grid_constructor")
        size = self.asked.get("step_size")
        if constructor is not None:
            if size is not None:
                raise ConfigError(
                    "step_size and grid_constructor both set the steps: give only one"
                )
            grid: list[float] = constructor(self.field, self.start, t.detach()).tolist()
            if grid[0] != times[0] or grid[-1] != times[-1]:
                raise ConfigError(
                    f"the grid goes from {grid[0]:g} to {grid[-1]:g}, the times from {times[0]:g}"
                    f" to {times[-1]:g}: make them agree"
                )
            return grid
        if size is None:
            return times
        size = float(size)
        check_positive("step_size", size, "a positive finite number, in units of time")
        span = times[-1] - times[0]
        # no extra step for a rest that is rounding error
        count = max(1, math.ceil(abs(span) / size * (1 - 1e-12)))
        return [times[0] + math.copysign(k * size, span) for k in range(count)] + [times[-1]]


def _linear(
    field: Field, ends: tuple[float, float], states: tuple[Tensor, Tensor], t: float
) -> Tensor:
    return states[0] + (t - ends[0]) / (ends[1] - ends[0]) * (states[1] - states[0])


def _cubic(
    field: Field, ends: tuple[float, float], states: tuple[Tensor, Tensor], t: float
) -> Tensor:
    """The cubic through both states with the field's slopes there (Hermite)."""
    h = ends[1] - ends[0]
    s = (t - ends[0]) / h
    f0, f1 = (
        field(torch.tensor(end, dtype=real_type(y.dtype)), y)
        for end, y in zip(ends, states, strict=True)
    )
    y0, y1 = states
    return (
        (1 + 2 * s) * (1 - s) ** 2 * y0
        + s * (1 - s) ** 2 * h * f0
        + s * s * (3 - 2 * s) * y1
        + s * s * (s - 1) * h * f1
    )


INTERPOLATIONS = {"linear": _linear, "cubic": _cubic}


def _by_entry(name: str, given: Tolerance, y0: Tensor, tree: Tree | None) -> float | Tensor:
    """A tolerance as `solve` takes it for the flat state. For a tuple of states, a tensor or list
    gives one tolerance for each.
    """
    if isinstance(given, Tensor) and given.dim() == 0 and not given.requires_grad:
        given = given.item()
    if tree is not None and isinstance(tree.places, tuple) and isinstance(given, (Tensor, list)):
        given = tuple(given)
    _, whole = spread(name, given, y0, tree)
    if isinstance(whole, bool) or not isinstance(whole, (int, float, Tensor)):
        raise ConfigError(
            f"{name} = {shown(whole)}: give a positive number, or a tensor of them that broadcasts"
            " with y0"
        )
    return whole


def _check_times(t: object) -> None:
    if isinstance(t, Tensor) and not has_numbers(t):
        raise ConfigError(f"t is {shown(t)}: give a floating tensor of one axis")
    if not isinstance(t, Tensor) or t.dim() != 1 or not t.dtype.is_floating_point or len(t) == 0:
        if isinstance(t, Tensor):
            what = f"a tensor of shape {tuple(t.shape)} of {t.dtype}"
        else:
            what = type(t).__name__
        raise ConfigError(f"t is {what}: give a floating tensor of one axis")
    steps = t.detach().diff()
    if not (bool((steps > 0).all()) or bool((steps < 0).all())):
        raise ConfigError("t must be strictly increasing or strictly decreasing")
