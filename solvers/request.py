"""Checks of a request to `solve`, before any computation."""

from __future__ import annotations

import torch
from torch import Tensor

from solvers.errors import ConfigError, shown
from solvers.method import Method
from solvers.methods import get_method
from solvers.step_control import StepControl, check_whole

TYPES = (
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.complex128,
    torch.complex64,
)


def check_state(x0: Tensor) -> None:
    """Raises ConfigError unless x0 is a non-empty dense tensor of a floating or complex type."""
    if not isinstance(x0, Tensor) or x0.dtype not in TYPES or x0.numel() == 0:
        if isinstance(x0, Tensor):
            what = f"{tuple(x0.shape)} of {x0.dtype}"
        else:
            what = type(x0).__name__
        raise ConfigError(
            f"the initial state is {what}: give a non-empty tensor of a floating or complex type"
        )
    if x0.layout is not torch.strided or x0.is_nested or x0.is_meta:
        if x0.is_meta:
            what = "on the meta device and has no numbers"
        elif x0.is_nested:
            what = "nested"
        else:
            what = str(x0.layout)
        raise ConfigError(
            f"the initial state is {what}: give a dense tensor with numbers, as by x0.to_dense()"
        )


def method_of(method: str | Method, steps: int) -> Method:
    """The method object. Raises ConfigError for an unknown name, and for `steps` that it does not
    support.
    """
    chosen = get_method(method)
    check_whole("steps", steps)
    if chosen.adaptive and steps != 1:
        raise ConfigError(
            f"method {method!r} chooses its own steps and takes no steps = {steps}: give rtol and"
            " atol, or use rk4"
        )
    return chosen


def check_solver(
    method: str | Method, steps: int, rtol: float | None, atol: float | None, dtype: torch.dtype
) -> tuple[Method, float, float]:
    """The method and its tolerances (defaults where None).

    Raises ConfigError for an unknown name, steps below 1, and options that the method does not
    use. Also for tolerances that are not positive and finite, or that the dtype cannot resolve.
    """
    chosen = method_of(method, steps)
    limits = StepControl(rtol, atol).limits(chosen, method, torch.empty((), dtype=dtype))
    return chosen, limits["rtol"], limits["atol"]


def check_callable(name: str, function: object) -> None:
    """Raises ConfigError unless the function is callable or None."""
    if function is not None and not callable(function):
        raise ConfigError(f"{name} = {shown(function)}: give a function, or None")
