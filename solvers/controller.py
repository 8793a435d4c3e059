"""Step-size control of adaptive methods: rules as data, and the step size that one solve carries
from segment to segment.

A step of size h has the error `err`: the norm of its estimate over atol + rtol max(abs x, abs x1).
It is accepted if err <= 1. The estimate is O(h^q), so a step of size h err^(-1/q) would have had
the error 1. A rule says how close to that size to go.
"""

from __future__ import annotations

import abc
import dataclasses
import math
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from solvers.checked import AnyFloat, checked
from solvers.errors import ConfigError, shown

STRETCH = 1.08
"""How much a step may exceed the proposal to reach a segment's end. The safety factors leave room
for it, and it saves a step.
"""
SMALLEST = 1e-10
"""Smaller errors count as this: they carry no information on their size."""
SHORTER = 0.99
"""After a rejection, the next attempt is at most this part of the rejected size, whatever the rule
says.
"""
Errors = tuple[float, float, float]
Size = Any
"""A number, or a tensor of one for each row of `solve_each`."""


@runtime_checkable
class Controller(Protocol):
    """A rule for the next step's size. It is frozen data; it gets what it must remember as
    arguments.
    """

    def accepted(self, size: float, proposed: float, errors: Errors, q: int) -> float:
        """The next size after an accepted step of that size. `proposed` is larger if the segment's
        end cut the step short.

        `errors` are its error and those of the two accepted steps before it, the latest first (1 at
        the start).
        """

    def rejected(self, size: float, error: float, q: int) -> float:
        """The size of the next attempt after a rejected one, whose error is above 1 or not
        finite.
        """


class _ByFactors:
    """A rule whose fields are checked: each within its limits, and not at a limit where the rule
    could not work.
    """

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            low, high = LIMITS[name]
            inside = (
                isinstance(value, (int, float))
                and not isinstance(value, bool)
                and low <= value <= high
            )
            has_no_effect = (value == 0 and name in NOT_ZERO) or (value == 1 and name in NOT_ONE)
            if not inside or has_no_effect:
                raise ConfigError(
                    f"{type(self).__name__} has {name} = {shown(value)}: give a number between"
                    f" {low} and {high}"
                )


LIMITS: dict[str, tuple[float, float]] = dict.fromkeys(
    ("safety", "retry", "damping", "shrink", "beta", "d"), (0, 1)
)
LIMITS |= {"alpha": (0, 2), "p": (0, 2), "i": (0, 2), "grow": (1, math.inf)}
NOT_ZERO = ("safety", "retry", "shrink", "i")
NOT_ONE = ("shrink", "grow")


@checked
@dataclasses.dataclass(frozen=True)
class Cautious(_ByFactors):
    """h_next = h * clip(safety err^(-1/q) * min(1, err_prev/err)^(damping/q), 1, grow); rejected: h
    * max(shrink, retry err^(-1/q)).

    A proportional rule that grows more slowly while errors grow. No accepted step makes the next
    one smaller. It took the fewest evaluations on switched Transformers. Raises ConfigError for
    factors that could not work.
    """

    safety: float = 0.95
    retry: float = 0.9
    damping: float = 0.3
    shrink: float = 0.2
    grow: AnyFloat = 10.0

    def accepted(self, size: Size, proposed: Size, errors: tuple[Size, Size, Size], q: int) -> Size:
        error, previous_error, _ = errors
        damped = _at_most(previous_error / error, 1.0) ** (self.damping / q)
        factor = self.safety * error ** (-1 / q) * damped
        return _at_least(size * _at_most(factor, self.grow), proposed)

    def rejected(self, size: Size, error: Size, q: int) -> Size:
        return _shorter(size, error, q, self.shrink, self.retry)


class _ByPowers(_ByFactors):
    """h_next = h * clip(safety prod_i err_i^(powers_i/q), shrink, grow) over the last three errors,
    the latest first.
    """

    safety: float
    shrink: float
    grow: AnyFloat

    @property
    @abc.abstractmethod
    def powers(self) -> tuple[float, float, float]: ...

    def accepted(self, size: Size, proposed: Size, errors: tuple[Size, Size, Size], q: int) -> Size:
        factor = math.prod(
            error ** (power / q) for error, power in zip(errors, self.powers, strict=True)
        )
        next_size = size * _at_most(_at_least(self.safety * factor, self.shrink), self.grow)
        # a step cut short by its segment's end is no evidence against the longer proposal
        cut_short = size < proposed
        if isinstance(cut_short, Tensor):
            return torch.where(cut_short, _at_least(next_size, proposed), next_size)
        if cut_short:
            return max(next_size, proposed)
        return next_size

    def rejected(self, size: Size, error: Size, q: int) -> Size:
        return _shorter(size, error, q, self.shrink, self.safety)


@checked
@dataclasses.dataclass(frozen=True)
class PI(_ByPowers):
    """h_next = h * clip(safety err^(-alpha/q) err_prev^(beta/q), shrink, grow); rejected: h *
    clip(safety err^(-1/q), shrink, 1).

    Proportional-integral control (Gustafsson 1991), with the exponents of Hairer and Wanner, IV.2.
    beta = 0 and alpha = 1 is the elementary control. At equal error it takes 6 to 30% fewer
    evaluations than `Cautious` on DETEST and switched models (`benchmarks/controllers.py`). At
    equal tolerances it takes more, for a smaller error. Raises ConfigError for factors that could
    not work.
    """

    safety: float = 0.9
    alpha: float = 0.7
    beta: float = 0.4
    shrink: float = 0.2
    grow: AnyFloat = 10.0

    @property
    def powers(self) -> tuple[float, float, float]:
        return -self.alpha, self.beta, 0.0


@checked
@dataclasses.dataclass(frozen=True)
class PID(_ByPowers):
    """h_next = h * clip(safety err^(-(i+p+d)/q) err_prev^((p+2d)/q) err_before^(-d/q), shrink,
    grow); rejected as by PI.

    Integral, proportional and differential control of log err (Soederlind 2003). diffrax and
    torchode call these gains icoeff, pcoeff and dcoeff. For errors of h^q the factor is safety *
    prod (1/err)^(i/q) (err_prev/err)^(p/q) (err_prev^2/(err err_before))^(d/q). i = 1, p = d = 0 is
    the elementary control, and d = 0 is PI(alpha=i + p, beta=p). The defaults are the gains of
    Kennedy and Carpenter (2003), err^(-.49/q) err_prev^(.34/q) err_before^(-.10/q). Raises
    ConfigError for factors that could not work.
    """

    safety: float = 0.95
    p: float = 0.14
    i: float = 0.25
    d: float = 0.1
    shrink: float = 0.2
    grow: AnyFloat = 10.0

    @property
    def powers(self) -> tuple[float, float, float]:
        return -(self.i + self.p + self.d), self.p + 2 * self.d, -self.d


def _at_least(x: Size, bound: Size) -> Size:
    if isinstance(x, Tensor):
        return x.clamp(min=bound)
    return max(x, bound)


def _at_most(x: Size, bound: Size) -> Size:
    if isinstance(x, Tensor):
        return x.clamp(max=bound)
    return min(x, bound)


def _shorter(size: Size, error: Size, q: int, shrink: float, retry: float) -> Size:
    """size * max(shrink, retry error^(-1/q)); with an error that is not finite size * shrink."""
    if isinstance(error, Tensor):
        error = error.nan_to_num(nan=math.inf, posinf=math.inf)
    elif math.isnan(error):
        error = math.inf
    return size * _at_least(retry * error ** (-1 / q), shrink)


class ByNumber:
    """A rule of numbers, for tensors: it gets one row at a time."""

    def __init__(self, rule: Controller):
        self.rule = rule

    def accepted(self, size: Size, proposed: Size, errors: tuple[Size, Size, Size], q: int) -> Size:
        next_sizes = []
        for row in torch.stack((size, proposed, *errors), 1).tolist():
            row_size, row_proposed, *row_errors = row
            next_sizes.append(self.rule.accepted(row_size, row_proposed, tuple(row_errors), q))
        return size.new_tensor(next_sizes)

    def rejected(self, size: Size, error: Size, q: int) -> Size:
        next_sizes = []
        for row_size, row_error in torch.stack((size, error), 1).tolist():
            next_sizes.append(self.rule.rejected(row_size, row_error, q))
        return size.new_tensor(next_sizes)


CONTROLLERS: dict[str, Controller] = {"cautious": Cautious(), "pi": PI(), "pid": PID()}
"""Each rule with its default numbers. The tests run through all of them."""


def for_tensors(rule: Controller) -> Any:
    """The rule, for tensors in place of numbers. The package's own rules take them."""
    rules_for_tensors = [type(controller) for controller in CONTROLLERS.values()]
    if type(rule) in rules_for_tensors:
        return rule
    return ByNumber(rule)


@dataclasses.dataclass
class StepSize:
    """The next step size of an adaptive method, by its rule. q is the order of the error estimate
    plus one.

    - `step`: the proposal; `shortest` and `longest` are its bounds
    - `errors`: of the last two accepted steps, the latest first
    - `rejected_size`: of the latest attempt if it was rejected, infinite otherwise

    A switch of field does not reset it: neighbouring segments of a model need similar steps. An
    occasional rejection costs less than a restart in each segment.
    """

    rule: Controller
    q: int
    step: float
    shortest: float = 0.0
    longest: float = math.inf
    errors: tuple[float, float] = (1.0, 1.0)
    rejected_size: float = math.inf

    def propose(self, remaining: float) -> tuple[float, bool]:
        """The next step's size, and whether it ends the segment. The last two steps are equal,
        which avoids a very short last step.
        """
        self.step = max(self.shortest, min(self.step, self.longest))
        stretched = min(STRETCH * self.step, self.longest)
        if stretched == 0:
            # smaller than the smallest number: the caller sees that it does not advance
            return 0.0, False
        pieces = max(1, math.ceil(min(3.0, remaining / stretched)))
        # a stretched attempt could repeat the rejected one for ever
        if self.rejected_size > self.shortest and remaining / pieces >= self.rejected_size:
            pieces += 1
        if pieces > 2:
            return self.step, False
        return remaining / pieces, pieces == 1

    def allows(self, size: float, error: float) -> bool:
        """Whether a step of that size may have that error: at most 1, or any finite one at the
        shortest size.
        """
        return error <= 1 or (size <= self.shortest and math.isfinite(error))

    def judge(self, size: float, error: float) -> bool:
        """Whether a step of that size with that error is accepted. Sets the next proposal."""
        if not self.allows(size, error):  # also if it is nan
            self.step = min(self.rule.rejected(size, error, self.q), SHORTER * size)
            self.rejected_size = size
            return False
        error = max(error, SMALLEST)
        self.step = self.rule.accepted(size, self.step, (error, *self.errors), self.q)
        self.errors = (error, self.errors[0])
        self.rejected_size = math.inf
        return True
