"""Segments whose times are learned: dL/dt1 = <p(t1), f(t1, x1)> and dL/dt0 = -<p(t0), f(t0, x0)>, p = dL/dx.

By a change of variable with the times' values unchanged. On a segment from a to b, with t = a + s (b - a) and s in [0, 1],

    dx/ds = (b - a) f(a + s (b - a), x),

whose dependence on a and b is one on parameters. So every kind of gradient has it, forward mode too: for backprop and checkpoint it is
the exact derivative of the steps computed, whose sizes are fixed parts of b - a; for the adjoint that of the ODE.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.autograd import forward_ad

Field = Callable[[Tensor, Tensor], Tensor]


def with_learned_times(field: Field, t0: Any, t1: Any) -> Field:
    """The field on the segment from t0 to t1, depending on those of them that are tensors with a derivative.

    Its values are the field's own, bit for bit.
    """
    learned = [time if isinstance(time, Tensor) and _has_derivative(time) else None for time in (t0, t1)]
    if not any(time is not None for time in learned):
        return field
    a, b = (time.detach().item() if isinstance(time, Tensor) else float(time) for time in (t0, t1))

    def moved(t: Tensor, x: Tensor) -> Tensor:
        # time - its value is an exact zero that carries the derivative
        da, db = (t.new_zeros(()) if time is None else time - value for time, value in zip(learned, (a, b), strict=True))
        s = (t - a) / (b - a)
        v = field(t + (da + s * (db - da)).to(t), x)
        return v * (1 + (db - da) / (b - a)).to(v)

    return moved


def _has_derivative(time: Tensor) -> bool:
    return time.requires_grad or is_functorch_wrapped_tensor(time) or forward_ad.unpack_dual(time).tangent is not None
