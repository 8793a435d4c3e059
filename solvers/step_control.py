"""Options of adaptive methods: tolerances, the norm of the error, and bounds of the steps."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from numbers import Integral
from typing import Any

import torch
from torch import Tensor

from solvers.error_norm import Norm, get_norm, rms, with_checked_value
from solvers.errors import ConfigError, check_positive, shown
from solvers.method import Method, options_of
from solvers.run import dtype_name, real_type
from solvers.tree import Tree

RTOL = 1e-6
ATOL = 1e-8
"""Default tolerances of an adaptive method."""
MAX_STEPS = 10_000
"""Default limit of attempts of an adaptive method in a segment."""
Tolerance = float | Tensor | Sequence[Any] | Mapping[Any, Any]
"""One number, or a tensor that broadcasts with the state. For a state of several tensors, also
numbers and tensors in its structure.
"""


@dataclasses.dataclass(frozen=True)
class StepControl:
    """How an adaptive method chooses its steps: it keeps norm(error/(atol + rtol abs(x))) below 1
    in every step.

    - `rtol`, `atol`: the tolerances, 1e-6 and 1e-8 if None. A tensor that broadcasts with the state
      gives a tolerance for each entry
    - `norm`: a name of `ERROR_NORMS`, or a function of a tensor; "rms" if None. "token" and "max"
      suit states in which few entries change. For a state of several tensors a named norm is the
      largest of its tensors' norms
    - `first_step`: the size of the first step
    - `min_step`: the method tries no shorter step. It accepts a step of this size with any finite
      error, and counts it in `stats.forced`
    - `max_step`: the method tries no longer step
    - `max_steps`: the most attempts in a segment, 10,000 if None

    Sizes are in units of time. Raises ConfigError for sizes that are not positive and finite or not
    in order, a `max_steps` below 1, and an unknown norm.
    """

    rtol: Tolerance | None = None
    atol: Tolerance | None = None
    norm: str | Norm | None = None
    first_step: float | None = None
    min_step: float | None = None
    max_step: float | None = None
    max_steps: int | None = None

    def __post_init__(self) -> None:
        for name, size in self.bounds.items():
            check_positive(name, size, "a positive finite number, in units of time")
        for (less, low), (more, high) in pairwise(self.bounds.items()):
            if low > high:
                raise ConfigError(f"{less} = {low!r} is above {more} = {high!r}: exchange them")
        if self.max_steps is not None:
            check_whole("max_steps", self.max_steps)
        if self.norm is not None:
            get_norm(self.norm)

    @property
    def bounds(self) -> dict[str, float]:
        """The given step sizes, in the order in which they must ascend."""
        sizes = {
            "min_step": self.min_step,
            "first_step": self.first_step,
            "max_step": self.max_step,
        }
        return {name: size for name, size in sizes.items() if size is not None}

    def with_tolerances(self, rtol: Tolerance | None, atol: Tolerance | None) -> StepControl:
        """The same with these tolerances. Raises ConfigError for a tolerance given in both
        places.
        """
        for name, value in {"rtol": rtol, "atol": atol}.items():
            if value is not None and getattr(self, name) is not None:
                raise ConfigError(
                    f"{name} is given twice, by itself and in step_control: give one of them"
                )
        if rtol is None and atol is None:
            return self
        if rtol is None:
            rtol = self.rtol
        if atol is None:
            atol = self.atol
        return dataclasses.replace(self, rtol=rtol, atol=atol)

    def limits(
        self,
        method: Method,
        name: object,
        x: Tensor,
        tree: Tree | None = None,
        *,
        norm_is_used: bool = False,
    ) -> dict[str, Any]:
        """The fields of a `Run`, for the state x, which is flat for a tree.

        `name` is how the user named the method. Raises ConfigError for tolerances that do not fit
        the state or its dtype, and for options that the method does not use. `norm_is_used` says
        that something else uses the norm.
        """
        least_rtol, rtol = spread("rtol", self.rtol, x, tree)
        least_atol, atol = spread("atol", self.atol, x, tree)
        options = {
            "rtol": least_rtol,
            "atol": least_atol,
            "max_steps": self.max_steps,
            **self.bounds,
        }
        if not norm_is_used:
            options["norm"] = self.norm
        check_unused_options(method, options, name)
        least_rtol, least_atol = check_tolerances(method, least_rtol, least_atol, x.dtype)
        # without a tensor of tolerances, one number holds for all entries
        if not isinstance(rtol, Tensor):
            rtol = least_rtol
        if not isinstance(atol, Tensor):
            atol = least_atol
        norm: Norm = rms
        if self.norm is not None:
            norm = get_norm(self.norm)
        if tree is not None:
            norm = tree.norm(norm, named=not callable(self.norm))
        if callable(self.norm):
            norm = with_checked_value(norm)
        max_steps = MAX_STEPS
        if self.max_steps is not None:
            max_steps = int(self.max_steps)
        bounds = {bound: float(size) for bound, size in self.bounds.items()}
        return {"rtol": rtol, "atol": atol, "norm": norm, "max_steps": max_steps, **bounds}


MOST = 10**12
"""The most steps: more than any machine takes."""


def check_whole(name: str, count: object) -> None:
    """Raises ConfigError unless the count is an integer from 1 to `MOST`."""
    if isinstance(count, bool) or not isinstance(count, Integral) or count < 1:
        raise ConfigError(f"{name} = {shown(count)}: give a whole number of at least 1")
    if int(count) > MOST:
        raise ConfigError(f"{name} = {shown(count)}: give at most {MOST:,}")


def check_unused_options(method: Method, given: Mapping[str, object], name: object) -> None:
    """Raises ConfigError for an option that is given (not None) but that the method does not use.
    `name` is how the user named the method.
    """
    if isinstance(name, str):
        called = f"method {name!r}"
    else:
        called = f"a {type(method).__name__}"
    for option, value in given.items():
        if value is None or option in options_of(method):
            continue
        if option in ("rtol", "atol"):
            option = "rtol or atol"
        if method.adaptive:
            raise ConfigError(
                f"{called} takes no {option}: use an adaptive method of the package, as tsit5"
            )
        raise ConfigError(
            f"{called} has fixed steps and takes no {option}: give steps, or use an adaptive"
            " method, as tsit5"
        )


def check_tolerances(
    method: Method, rtol: float | None, atol: float | None, dtype: torch.dtype
) -> tuple[float, float]:
    """Both tolerances (defaults where None). Raises ConfigError unless they are positive, finite
    and resolved by the dtype.
    """
    if rtol is None:
        rtol = RTOL
    if atol is None:
        atol = ATOL
    check_positive("rtol", rtol)
    check_positive("atol", atol)
    resolution = 4 * torch.finfo(dtype).eps
    if "rtol" in options_of(method) and rtol < resolution:
        raise ConfigError(
            f"rtol = {rtol:g} is below what {dtype_name(dtype)} resolves ({resolution:.1g}): raise"
            " it or use float64"
        )
    compared_in = real_type(dtype)
    least = torch.finfo(compared_in).tiny
    if "atol" in options_of(method) and atol < least:
        # rounded to 0, it gives 0/0 for an entry that is 0
        raise ConfigError(
            f"atol = {atol:g} vanishes in {dtype_name(compared_in)}, whose least number is"
            f" {least:.1e}: raise it or use float64"
        )
    return float(rtol), float(atol)


def spread(
    name: str, tolerance: Tolerance | None, x: Tensor, tree: Tree | None = None
) -> tuple[Any, Any]:
    """The smallest tolerance, and the tolerances for a `Run`: a number, or a tensor in x's shape. x
    is flat for a tree.

    Raises ConfigError for tensors that do not fit the state, that require a gradient, or that hold
    anything but positive finite numbers.
    """
    if isinstance(tolerance, str) or not isinstance(tolerance, (Tensor, Sequence, Mapping)):
        return tolerance, tolerance
    try:
        if tree is None:
            by_entry = torch.as_tensor(tolerance).expand(x.shape)
        else:
            by_entry = tree.spread(tolerance)
    except (RuntimeError, TypeError, ValueError):
        if tree is None:
            state = f"shape {tuple(x.shape)}"
        else:
            state = f"{len(tree.shapes)} tensors"
        raise ConfigError(
            f"{name} = {shown(tolerance)} does not fit a state of {state}: give one number, a"
            " tensor that broadcasts with it, or one of both for each of its tensors"
        ) from None
    if by_entry.requires_grad:
        raise ConfigError(
            f"{name} requires a gradient, which a tolerance does not have: give {name}.detach()"
        )
    if by_entry.is_meta:
        raise ConfigError(f"{name} is {shown(tolerance)}: give positive finite numbers")
    if by_entry.is_complex():
        low = math.nan
        high = math.nan
    elif not by_entry.numel():  # of an empty state
        low = 1.0
        high = 1.0
    else:
        low = float(by_entry.min())
        high = float(by_entry.max())
    if not (low > 0 and high < math.inf):
        raise ConfigError(f"{name} is from {low:g} to {high:g}: give positive finite numbers")
    return low, by_entry.to(dtype=real_type(x.dtype), device=x.device)
