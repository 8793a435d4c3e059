"""How the error of a whole state becomes one number, to be kept below 1 in every step.

| name    | of e = error/(atol + rtol max(abs x, abs x1))     | says                                                              |
| ------- | ------------------------------------------------- | ----------------------------------------------------------------- |
| `rms`   | sqrt(mean e^2)                                    | entries are right on average: one of 10,000 may be 100 times worse |
| `token` | the largest sqrt(mean e^2) over the last axis     | every token, each row of the state, is right on average           |
| `max`   | max abs e                                         | every entry is right                                              |

Of complex entries abs is |z|, and e^2 its square.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor

from solvers.errors import ConfigError, look_up

Norm = Callable[[Tensor], Tensor]
"""A tensor of scaled errors, in the state's shape (with a leading axis of 2, state and costate, on
the adjoint's way back), to a number.
"""


def rms(e: Tensor) -> Tensor:
    """sqrt(mean e^2)."""
    return cast(Tensor, torch.linalg.vector_norm(e)) / math.sqrt(e.numel())


def largest_token(e: Tensor) -> Tensor:
    """The largest root of a mean square over the last axis."""
    return torch.linalg.vector_norm(e, dim=-1).max() / math.sqrt(e.shape[-1]) if e.dim() else e.abs()


def largest(e: Tensor) -> Tensor:
    """max abs e."""
    return e.abs().max()


ERROR_NORMS: dict[str, Norm] = {"rms": rms, "token": largest_token, "max": largest}


def get_norm(norm: str | Norm) -> Norm:
    """The norm of that name, or the function itself; ConfigError with the nearest name otherwise."""
    if callable(norm):
        return norm
    if not isinstance(norm, str):
        raise ConfigError(f"norm = {norm!r}: give a function of a tensor, or one of {', '.join(sorted(ERROR_NORMS))}")
    return look_up("norm", norm, ERROR_NORMS)
