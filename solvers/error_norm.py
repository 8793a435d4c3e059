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
from typing import Any, cast

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


def with_checked_value(norm: Norm) -> Norm:
    """The norm, which raises ConfigError unless it returns one real number for a tensor of errors.
    For rows it is called once for each row.
    """
    if norm in ERROR_NORMS.values():
        return norm

    def checked_norm(e: Tensor) -> Tensor:
        value: Any = norm(e)
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            return torch.as_tensor(float(value), device=e.device)
        if not isinstance(value, Tensor) or value.numel() != 1 or not value.is_floating_point():
            raise ConfigError(
                f"norm returned {shown(value)} for errors of shape {tuple(e.shape)}: return one"
                " floating-point number as a tensor, as e.abs().max()"
            )
        return value.reshape(())

    return checked_norm
