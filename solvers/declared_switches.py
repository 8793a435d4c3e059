"""The options `step_t` and `jump_t` of `odeint`: times at which a step ends, because the field may
jump there. The solution is differentiable by them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from solvers.checked import has_numbers, item
from solvers.errors import ConfigError, shown
from solvers.gradients import get_gradient
from solvers.learned_time import learned_tensor
from solvers.march import Gradient
from solvers.method import has_capability
from solvers.run import as_tensor, neighbour, representable
from solvers.segment import Field, Map

NAMES = ("step_t", "jump_t")
Switches = Mapping[float, Tensor | None]
"""The times, each with its tensor if it has a derivative."""


def declared_switches(options: Mapping[str, Any]) -> Switches:
    """The times of both options. Raises ConfigError for anything but finite numbers, and for one
    time with two derivatives.
    """
    switches: dict[float, Tensor | None] = {}
    for name in NAMES:
        for time in _listed(name, options.get(name)):
            value = _number(name, time)
            learned = learned_tensor(time)
            earlier = switches.get(value)
            if learned is not None and earlier is not None:
                raise ConfigError(
                    f"step_t and jump_t have two times {value:g} that require a gradient: give"
                    " each time once"
                )
            if earlier is None:
                switches[value] = learned
    return switches


def check_no_learned_switch(options: Mapping[str, Any] | None, method: str) -> None:
    """Raises ConfigError for a time that requires a gradient, which `method` does not have."""
    for name in NAMES:
        if options is None or options.get(name) is None:
            continue
        if any(learned_tensor(time) is not None for time in _listed(name, options[name])):
            raise ConfigError(
                f"{name} requires a gradient, which {method} does not have: use an"
                f" adaptive method of this package, as dopri5, or give {name}.detach()"
            )


def check_gradient(switches: Switches, gradient: str | Gradient) -> None:
    """Raises ConfigError if the kind of gradient has no derivative by the times that require it."""
    is_learned = any(learned is not None for learned in switches.values())
    if is_learned and has_capability(get_gradient(gradient), "inverts"):
        raise ConfigError(
            f"step_t or jump_t requires a gradient, which gradient {shown(gradient)} does not have:"
            " use backprop, checkpoint or adjoint, or detach the times"
        )


def _listed(name: str, times: Any) -> list[Any]:
    """The times one by one."""
    if times is None:
        return []
    is_list = isinstance(times, Sequence) and not isinstance(times, (str, bytes))
    is_array = hasattr(times, "shape") and len(times.shape) == 1
    if isinstance(times, Tensor) and not has_numbers(times):
        is_array = False
    if not (is_list or is_array):
        raise ConfigError(f"{name} = {shown(times)}: give a list of times, or a tensor of one axis")
    return list(times)


def _number(name: str, time: Any) -> float:
    """The time by value."""
    number = time
    if isinstance(time, Tensor) and has_numbers(time) and time.dim() == 0:
        number = time.detach().item()
    elif not isinstance(time, Tensor):
        number = item(time)
    is_number = isinstance(number, Real) and not isinstance(number, bool)
    try:
        value = float(number) if is_number else math.nan
    except OverflowError:
        value = math.inf
    if not math.isfinite(value):
        raise ConfigError(f"{name} has the entry {shown(number)}: give finite numbers")
    return value


def moved_switch(field: Field, learned: Tensor, before: float, switch: float, after: float) -> Map:
    """The map y -> y of the state at a switch between two times, with the derivative by the switch.

    A later switch leaves the first field longer: the map goes along the first field by the delay,
    which is 0 by value, and back along the second field. A step of the midpoint method has the
    flow's first two derivatives.
    """

    def enter(y: Tensor) -> Tensor:
        delay = (learned - switch).to(as_tensor(switch, y.dtype))
        first = time_beside(switch, before, y.dtype)
        second = time_beside(switch, after, y.dtype)
        later = _midpoint_step(field, first, delay, y)
        return _midpoint_step(field, second + delay, -delay, later)

    return enter


def time_beside(switch: float, side: float, dtype: torch.dtype) -> Tensor:
    """The time next to the switch, towards a side, as fields get it."""
    at = representable(switch, dtype)
    return as_tensor(neighbour(at, representable(side, dtype), dtype), dtype)


def _midpoint_step(field: Field, t: Tensor, h: Tensor, y: Tensor) -> Tensor:
    middle = y + h / 2 * field(t, y)
    return y + h * field(t + h / 2, middle)
