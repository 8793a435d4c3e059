"""Segments with learned times: dL/dt1 = <p(t1), f(t1, x1)> and dL/dt0 = -<p(t0), f(t0, x0)>, p =
dL/dx.

The derivatives come from a change of variable that leaves the times' values unchanged. On a segment
from a to b, with t = a + s (b - a) and s in [0, 1],

    dx/ds = (b - a) f(a + s (b - a), x),

which depends on a and b as on parameters. So every kind of gradient supports it, and forward mode
too. For backprop and checkpoint it is the exact derivative of the computed steps, whose sizes are
fixed parts of b - a. For the adjoint it is the derivative of the ODE.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.autograd import forward_ad

from solvers.tree import State, mapped

Field = Callable[[Tensor, Tensor], Tensor]
Clock = Callable[[Tensor], Tensor]


def with_learned_times(field: Field, t0: Any, t1: Any) -> tuple[Field, Clock | None]:
    """The field on the segment from t0 to t1 with the derivatives by the learned times, and the map
    from a time's value to the time that depends on them.

    The values of both are unchanged, bit for bit. Without learned times it returns the field itself
    and None.
    """
    learned_t0 = learned_tensor(t0)
    learned_t1 = learned_tensor(t1)
    if learned_t0 is None and learned_t1 is None:
        return field, None
    a = _value(t0)
    b = _value(t1)

    def clock(t: Tensor) -> Tensor:
        da = _change(learned_t0, a, t)
        db = _change(learned_t1, b, t)
        s = (t - a) / (b - a)
        return t + (da + s * (db - da)).to(t)

    def moved(t: Tensor, x: State) -> State:
        da = _change(learned_t0, a, t)
        db = _change(learned_t1, b, t)
        faster = 1 + (db - da) / (b - a)
        v: State = mapped(lambda part: part * faster.to(part), field(clock(t), x))
        return v

    return moved, clock


def _value(time: Any) -> float:
    if isinstance(time, Tensor):
        return float(time.detach().item())
    return float(time)


def learned_tensor(time: Any) -> Tensor | None:
    """The time if it has a derivative."""
    if not isinstance(time, Tensor):
        return None
    has_derivative = (
        time.requires_grad
        or is_functorch_wrapped_tensor(time)
        or forward_ad.unpack_dual(time).tangent is not None
    )
    if not has_derivative:
        return None
    return time


def _change(learned: Tensor | None, value: float, t: Tensor) -> Tensor:
    """learned - value: an exact zero, which carries the derivative of a learned time."""
    if learned is None:
        return t.new_zeros(())
    return learned - value
