"""An initial value problem in torchdiffeq's terms, solved by this package's methods."""

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

from solvers.changes import owned
from solvers.checked import binds, is_dense
from solvers.controller import PI
from solvers.declared_switches import (
    Switches,
    check_gradient,
    check_no_learned_switch,
    declared_switches,
    moved_switch,
    time_beside,
)
from solvers.error_norm import Norm, get_norm, rms, with_checked_value
from solvers.errors import ConfigError, SolveError, check_positive, look_up, shown
from solvers.event import Event, start_resolution
from solvers.gradients import get_gradient
from solvers.march import Gradient
from solvers.method import Method, has_capability
from solvers.request import TYPES, check_state
from solvers.run import as_tensor, check_like, real_type
from solvers.runge_kutta import RungeKutta
from solvers.segment import Field, Segment
from solvers.solution import Solution
from solvers.solve import solve
from solvers.step_control import StepControl, Tolerance, spread
from solvers.tree import Tree

BOUNDS = ("first_step", "min_step", "max_step")
FACTORS = {"safety": "safety", "ifactor": "grow", "dfactor": "shrink"}
"""torchdiffeq's names of the numbers of its step control, and those of `PI`."""
ADAPTIVE_OPTIONS = ("norm", "max_num_steps", "dtype", "step_t", "jump_t", *BOUNDS, *FACTORS)
FIXED_OPTIONS = ("norm", "step_size", "grid_constructor", "interp", "perturb")
CALLBACKS = ("callback_step", "callback_accept_step", "callback_reject_step")
EVENT_STEPS = 2**16
"""The most steps of an adaptive method in search of an event, without `max_num_steps`."""

Func = Callable[[Tensor, Any], Any]


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
        self.options: Mapping[str, Any] = {}
        if options is not None:
            self.options = options
        self.switches: Switches = {}
        if method.adaptive:
            self.switches = declared_switches(self.options)
            check_gradient(self.switches, gradient)
        else:
            check_no_learned_switch(self.options, "a method of fixed steps")
        option_names: tuple[str, ...] = FIXED_OPTIONS
        if method.adaptive:
            option_names = ADAPTIVE_OPTIONS
        unexpected = sorted(set(self.options) - set(option_names))
        if unexpected:
            warnings.warn(
                f"odeint: unexpected options {unexpected} for a method that knows"
                f" {', '.join(option_names)}",
                stacklevel=4,
            )
        callbacks = [name for name in CALLBACKS if hasattr(func, name)]
        if callbacks:
            warnings.warn(
                f"odeint: func has {', '.join(callbacks)}, and callbacks are not called here:"
                " solvers.solve(..., on_step=) does",
                stacklevel=4,
            )
        factors = {}
        for theirs, ours in FACTORS.items():
            if theirs in self.options:
                factors[ours] = float(self.options[theirs])
        if factors and method.adaptive and isinstance(method, RungeKutta):
            controller = PI(**{"alpha": 1.0, "beta": 0.0, **factors})
            method = dataclasses.replace(method, controller=controller)
        self.method = method
        self.gradient = gradient
        self.tree: Tree | None = None
        self.field: Field = func
        self.start: Tensor = y0
        if not isinstance(y0, Tensor):
            self.tree = Tree(y0, "y0")
            self.field = self.tree.flat_map("func", func)
            self.start = self.tree.flat("y0", y0)
        self.rtol = _by_entry("rtol", rtol, self.start, self.tree)
        self.atol = _by_entry("atol", atol, self.start, self.tree)

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
        resolved = 0.0
        if self.start.dtype in TYPES:
            resolved = 4 * torch.finfo(self.start.dtype).eps
        rtol: float | Tensor
        if isinstance(self.rtol, Tensor):
            rtol = self.rtol.clamp(min=resolved)
        else:
            rtol = max(self.rtol, resolved)
        norm: Norm = rms
        own_norm = self.options.get("norm")
        if own_norm is not None:
            norm = own_norm
        if self.tree is not None:
            norm = self.tree.norm(norm, named=own_norm is None)
        max_steps = int(self.options.get("max_num_steps", 2**31 - 1))
        bounds: dict[str, float] = {}
        for name in BOUNDS:
            size = self.options.get(name)
            # torchdiffeq's defaults, 0 and inf, are no bounds
            if size not in (None, 0, math.inf):
                bounds[name] = float(size)
        return StepControl(rtol, self.atol, norm, max_steps=max_steps, **bounds)

    def solved(self, ends: Sequence[float], **request: Any) -> Solution:
        """The solution over a segment from each end to the next. Its warnings become Python's."""
        segments = [Segment(a, b, self.field) for a, b in pairwise(ends)]
        for k, (before, switch, after) in enumerate(zip(ends, ends[1:], ends[2:], strict=False)):
            learned = self.switches.get(switch)
            if learned is not None:
                enter = moved_switch(self.field, learned, before, switch, after)
                segments[k + 1] = Segment(switch, after, self.field, enter=enter)
        if self.method.adaptive:
            request.setdefault("step_control", self.control)
        solution = solve(
            segments, self.start, method=self.method, gradient=self.gradient, **request
        )
        for sentence in solution.warnings:
            warnings.warn(f"odeint: {sentence}", stacklevel=5)
        return solution

    def ends(self, times: Sequence[float]) -> list[float]:
        """The times, and the switches between the first and the last of them that the options
        declare, in order.
        """
        start = times[0]
        end = times[-1]
        inside = [time for time in self.switches if min(start, end) < time < max(start, end)]
        return sorted({*times, *inside}, reverse=start > end)

    def curve(self, t0: float, t1: float) -> Callable[[Tensor], Any]:
        """t -> y(t) between two times, from one adaptive solve."""
        flat_curve = self.solved(self.ends([t0, t1]), save="curve").curve
        assert flat_curve is not None, "save='curve' asks for it"
        return lambda t: self.parts(flat_curve(t))

    def until(self, event_fn: Func, t: Tensor) -> tuple[Tensor, Tensor]:
        """The event's time and state."""
        start, second = t.detach().tolist()
        with torch.no_grad():
            first: Any = event_fn(
                t[0].to(real_type(self.start.dtype)), self.parts(self.start.clone())
            )
        if not is_dense(first) or not first.is_floating_point() or not first.numel():
            raise ConfigError(
                f"event_fn returned {shown(first)}: return a tensor of floating-point numbers"
            )
        request: dict[str, Any] = {}
        if self.method.adaptive:
            ends = self.ends([start, start + 1e9 * (second - start)])
            steps = 1
            if "max_num_steps" not in self.options:  # an event that never comes would take for ever
                request["step_control"] = dataclasses.replace(self.control, max_steps=EVENT_STEPS)
        else:
            if self.options.get("grid_constructor") is not None:
                raise ConfigError(
                    "a grid has a fixed end, and the event's time is unknown: give step_size"
                    " instead"
                )
            if self.options.get("step_size") is None:
                size = abs(second - start)
            else:
                size = float(self.options["step_size"])
            ends = [start, start + math.copysign(2**20 * size, second - start)]
            steps = 2**20
        signs = self.signs_at_start(event_fn, ends, first)

        def entry(i: int, t: Tensor, y: Tensor) -> Tensor:
            value: Tensor = event_fn(t, self.parts(y))
            return value.flatten()[i]

        def least_with_first_sign(t: Tensor, y: Tensor) -> Tensor:
            value: Tensor = event_fn(t, self.parts(y)) * signs
            return value[signs != 0].min()

        # an entry that begins at zero has a sign as soon as it leaves zero
        events = [Event(partial(entry, int(i))) for i in (signs == 0).flatten().nonzero()]
        if signs.any():
            events.append(Event(least_with_first_sign, direction=-1))
        solution = self.solved(ends, events=events, steps=steps, **request)
        if solution.event_time is None:
            raise SolveError(
                f"no event between t = {start:g} and {ends[-1]:g}: check the sign of event_fn, or"
                " the direction of t",
                solution,
            )
        return solution.event_time.to(t), solution.x1

    @torch.no_grad()
    def signs_at_start(self, event_fn: Func, ends: Sequence[float], values: Tensor) -> Tensor:
        """The signs of an event's values at the start. Values that are 0 to rounding have the
        sign 0.
        """
        start = ends[0]
        span = ends[1] - start
        y = self.start.detach()
        check_state(y)
        slope = self.field(time_beside(start, ends[1], y.dtype), y)
        check_like("field", slope, y)
        norm: Norm = rms
        if self.method.adaptive:
            norm = with_checked_value(get_norm(self.control.norm or rms))
        resolution = start_resolution(norm, start, span, y, slope)
        ahead = math.copysign(min(resolution, abs(span)), span)
        values_soon = event_fn(as_tensor(start + ahead, y.dtype), self.parts(y + ahead * slope))
        signs = torch.sign(values)
        changes_at_once = signs * torch.sign(values_soon) < 0
        return torch.where(changes_at_once, 0.0, signs)

    def adaptive(self, t: Tensor) -> Tensor:
        """The states at the times t, by an adaptive method."""
        times: list[float] = t.detach().tolist()
        gradient = get_gradient(self.gradient)
        if has_capability(self.method, "dense") and has_capability(gradient, "dense"):
            ends = self.ends([times[0], times[-1]])
            return torch.stack(self.solved(ends, times=times).states)
        solution = self.solved(self.ends(times), save="segments")
        state_at = dict(zip(solution.times, solution.states, strict=True))
        return torch.stack([state_at[time] for time in times])

    def fixed(self, t: Tensor) -> Tensor:
        """The states at the times t, by one step between neighbouring times of a grid."""
        times: list[float] = t.detach().tolist()
        grid = self.grid(t, times)
        states = self.solved(grid, save="segments").states
        if grid == times:
            return torch.stack(states)
        interpolate = look_up("interp", self.options.get("interp", "linear"), INTERPOLATIONS)
        sign = math.copysign(1.0, times[-1] - times[0])
        states_at_times = [states[0]]
        for time in times[1:]:
            k = max(1, bisect_left(grid, sign * time, key=lambda end: sign * end))
            state = states[k]
            if time != grid[k]:
                ends = (grid[k - 1], grid[k])
                state = interpolate(self.field, ends, (states[k - 1], states[k]), time)
            states_at_times.append(state)
        return torch.stack(states_at_times)

    def grid(self, t: Tensor, times: list[float]) -> list[float]:
        """The ends of the steps."""
        constructor = self.options.get("grid_constructor")
        size = self.options.get("step_size")
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
    """The line through both states."""
    theta = (t - ends[0]) / (ends[1] - ends[0])
    return states[0] + theta * (states[1] - states[0])


def _cubic(
    field: Field, ends: tuple[float, float], states: tuple[Tensor, Tensor], t: float
) -> Tensor:
    """The cubic through both states with the field's slopes there (Hermite)."""
    h = ends[1] - ends[0]
    s = (t - ends[0]) / h
    y0, y1 = states
    f0 = owned(field(torch.tensor(ends[0], dtype=real_type(y0.dtype)), y0))
    f1 = field(torch.tensor(ends[1], dtype=real_type(y1.dtype)), y1)
    return (
        (1 + 2 * s) * (1 - s) ** 2 * y0
        + s * (1 - s) ** 2 * h * f0
        + s * s * (3 - 2 * s) * y1
        + s * s * (s - 1) * h * f1
    )


INTERPOLATIONS = {"linear": _linear, "cubic": _cubic}


def _by_entry(name: str, tolerance: Tolerance, y0: Tensor, tree: Tree | None) -> float | Tensor:
    """A tolerance as `solve` takes it for the flat state. For a tuple of states, a tensor or list
    gives one tolerance for each.
    """
    if isinstance(tolerance, Tensor) and tolerance.dim() == 0 and not tolerance.requires_grad:
        tolerance = tolerance.item()
    state_is_tuple = tree is not None and isinstance(tree.places, tuple)
    if state_is_tuple and isinstance(tolerance, (Tensor, list)):
        tolerance = tuple(tolerance)
    _, by_entry = spread(name, tolerance, y0, tree)
    if isinstance(by_entry, bool) or not isinstance(by_entry, (int, float, Tensor)):
        raise ConfigError(
            f"{name} = {shown(by_entry)}: give a positive number, or a tensor of them that"
            " broadcasts with y0"
        )
    return by_entry
