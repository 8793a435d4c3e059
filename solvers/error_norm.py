"""How the error of a state becomes one number, which each step keeps below 1.

| name    | of e = error/(atol + rtol max(abs x, abs x1)) | meaning                                                               |
| ------- | --------------------------------------------- | --------------------------------------------------------------------- |
| `rms`   | sqrt(mean e^2)                                | entries are right on average: one of 10,000 may be 100 times worse    |
| `token` | the largest sqrt(mean e^2) over the last axis | every token, which is a row of the state, is right on average         |
| `max`   | max abs e                                     | every entry is right                                                  |

For complex entries abs is |z|, and e^2 its square.
"""  # noqa: E501  # a table

from __future__ import annotations

import math
from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor

from solvers.errors import ConfigError, look_up, shown

Norm = Callable[[Tensor], Tensor]
"""Maps a tensor of scaled errors to a number. The tensor has the state's shape. In the adjoint's
backward solve it has a leading axis of 2: state and costate.
"""


def rms(e: Tensor) -> Tensor:
    """sqrt(mean e^2)."""
    return cast(Tensor, torch.linalg.vector_norm(e)) / math.sqrt(e.numel())


def largest_token(e: Tensor) -> Tensor:
    """The largest root mean square over the last axis."""
    if e.dim() == 0:
        return e.abs()
    norms: Tensor = torch.linalg.vector_norm(e, dim=-1)
    return norms.max() / math.sqrt(e.shape[-1])


def largest(e: Tensor) -> Tensor:
    """max abs e."""
    return e.abs().max()


ERROR_NORMS: dict[str, Norm] = {"rms": rms, "token": largest_token, "max": largest}


def get_norm(norm: str | Norm) -> Norm:
    """The norm of that name, or the function itself. Raises ConfigError with the nearest name
    otherwise.
    """
    if callable(norm):
        return norm
    if not isinstance(norm, str):
        raise ConfigError(
            f"norm = {shown(norm)}: give a function of a tensor, or one of"
            f" {', '.join(sorted(ERROR_NORMS))}"
        )
    return look_up("norm", norm, ERROR_NORMS)
