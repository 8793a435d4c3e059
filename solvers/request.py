"""Whether a request to `solve` makes sense, said before anything is computed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor

from solvers.errors import ConfigError
from solvers.method import Method, options_of
from solvers.methods import get_method
from solvers.segment import Segment, check_chain
from solvers.tolerance import tolerance_type

RTOL, ATOL = 1e-6, 1e-8
"""Tolerances of an adaptive method that is given none."""
TYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex128, torch.complex64)


def check_segments(segments: Sequence[Segment]) -> None:
    """Raises ConfigError unless the segments are a list of which each begins where the one before ends."""
    if not isinstance(segments, Sequence) or isinstance(segments, str):
        raise ConfigError(f"the segments are a {type(segments).__name__}, which is gone through more than once: give a list")
    if not all(isinstance(segment, Segment) for segment in segments):
        raise ConfigError("the segments are not all of type Segment: make them by Segment(t0, t1, field)")
    check_chain(segments)


def check_state(x0: Tensor) -> None:
    """Raises ConfigError unless x0 is a non-empty tensor of a floating or complex type that holds numbers."""
    if not isinstance(x0, Tensor) or x0.dtype not in TYPES or x0.numel() == 0:
        what = f"{tuple(x0.shape)} of {x0.dtype}" if isinstance(x0, Tensor) else type(x0).__name__
        raise ConfigError(f"the initial state is {what}: give a non-empty tensor of a floating or complex type")
    if x0.layout is not torch.strided or x0.is_nested or x0.is_meta:
        what = "on the meta device and has no numbers" if x0.is_meta else "nested" if x0.is_nested else str(x0.layout)
        raise ConfigError(f"the initial state is {what}: give a dense tensor with numbers, as by x0.to_dense()")


def check_solver(
    method: str | Method,
    steps: int,
    rtol: float | None,
    atol: float | None,
    dtype: torch.dtype,
    max_steps: int | None = None,
) -> tuple[Method, float, float]:
    """The method and its tolerances (defaults where None).

    Raises ConfigError for an unknown name, counts below 1, tolerances that are not positive and finite or below what the dtype
    resolves or holds, and those of these options that the method does not heed.
    """
    chosen = get_method(method)
    for what, count in (("steps", steps), ("max_steps", max_steps)):
        if isinstance(count, bool) or not (
            (isinstance(count, Integral) and count >= 1) or (count is None and what == "max_steps")
        ):
            raise ConfigError(f"{what} = {count!r}: give a whole number of at least 1")
    if chosen.adaptive and steps != 1:
        raise ConfigError(f"method {method!r} chooses its own steps and takes no steps = {steps}: give rtol and atol, or use rk4")
    check_unused_options(chosen, {"rtol": rtol, "atol": atol, "max_steps": max_steps}, method)
    rtol, atol = RTOL if rtol is None else rtol, ATOL if atol is None else atol
    for what, value in (("rtol", rtol), ("atol", atol)):
        if isinstance(value, bool) or not isinstance(value, Real) or not 0 < value < math.inf:
            raise ConfigError(f"{what} = {value!r}: give a positive finite number")
    resolution = 4 * torch.finfo(dtype).eps
    if "rtol" in options_of(chosen) and rtol < resolution:
        name = str(dtype).removeprefix("torch.")
        raise ConfigError(f"rtol = {rtol:g} is below what {name} resolves ({resolution:.1g}): raise it or use float64")
    compared = tolerance_type(dtype)
    if "atol" in options_of(chosen) and atol < torch.finfo(compared).tiny:
        # rounded to 0, it leaves 0/0 of an entry that is 0
        name, least = str(compared).removeprefix("torch."), torch.finfo(compared).tiny
        raise ConfigError(f"atol = {atol:g} vanishes in {name}, whose least number is {least:.1e}: raise it or use float64")
    return chosen, float(rtol), float(atol)


def check_unused_options(method: Method, given: Mapping[str, object], name: object) -> None:
    """Raises ConfigError for an option that is given (not None) and that the method does not heed; `name` is how it was asked for."""
    called = f"method {name!r}" if isinstance(name, str) else f"a {type(method).__name__}"
    for option, value in given.items():
        if value is None or option in options_of(method):
            continue
        what = "rtol or atol" if option in ("rtol", "atol") else option
        raise ConfigError(
            f"{called} takes no {what}: use an adaptive method of the package, as tsit5"
            if method.adaptive
            else f"{called} has fixed steps and takes no {what}: give steps, or use an adaptive method, as tsit5"
        )


def check_callable(what: str, given: object) -> None:
    """Raises ConfigError for what is neither a function nor None."""
    if given is not None and not callable(given):
        raise ConfigError(f"{what} = {given!r}: give a function, or None")


def check_bounds(
    method: Method, name: object, first_step: float | None, min_step: float | None, max_step: float | None
) -> dict[str, Any]:
    """Those of them that are given, which must be positive, in that order, and for a method that heeds them; else ConfigError."""
    bounds = {"min_step": min_step, "first_step": first_step, "max_step": max_step}
    given = {what: step for what, step in bounds.items() if step is not None}
    for what, step in given.items():
        if isinstance(step, bool) or not isinstance(step, Real) or not 0 < step < math.inf:
            raise ConfigError(f"{what} = {step!r}: give a positive finite number, in units of time")
    check_unused_options(method, given, name)
    for (less, low), (more, high) in pairwise(given.items()):
        if low > high:
            raise ConfigError(f"{less} = {low!r} is above {more} = {high!r}: exchange them")
    return {what: float(step) for what, step in given.items()}
