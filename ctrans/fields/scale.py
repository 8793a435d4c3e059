"""Scaling of a map's weights, which turns f into c f."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from typing import Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor, nn

from solvers.errors import look_up

SCALINGS_OF_ATTENTION: Mapping[str, bool] = {"V": True, "WV": True}
"""Kan's V, and W and V together. Both turn f into c f."""


@runtime_checkable
class JoinedAttention(Protocol):
    """An attention that has W_Q, W_K and W_V as one linear map, and W as another."""

    qkv: nn.Linear
    out: nn.Linear


Joined = TypeVar("Joined", bound=JoinedAttention)


@torch.no_grad()
def scale_linear(linear: nn.Module, c: float) -> None:
    """W -> c W and b -> c b, in place, for all linear maps in the module."""
    for parameter in linear.parameters():
        parameter.mul_(c)


@torch.no_grad()
def scaled_attention(attention: Joined, name: str, c: float, values: Callable[[Tensor], Tensor]) -> Joined:
    """A copy that computes c f(x): V times c, or W and V each times sqrt(c), and the biases
    accordingly.

    `values` returns V's rows of the joined weight or bias. Raises ConfigError for a name that is
    not in `SCALINGS_OF_ATTENTION`.
    """
    look_up("scaling", name, SCALINGS_OF_ATTENTION)
    twin = copy.deepcopy(attention)
    inner, last = (c, 1.0) if name == "V" else (math.sqrt(c), math.sqrt(c))
    for parameter in (twin.qkv.weight, twin.qkv.bias):
        if parameter is not None:
            values(parameter).mul_(inner)
    if twin.out.bias is not None:
        twin.out.bias.mul_(inner)
    scale_linear(twin.out, last)
    return twin
