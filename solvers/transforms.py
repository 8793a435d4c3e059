"""Derivatives that are not taken backward: which transforms of `torch.func` and which forward mode
a solve runs in.

Forward mode carries a tangent beside the state, v' = (df/dx) v, through the same steps: it needs no
memory of its own and no kind of gradient, so all kinds compute it alike, by plain steps.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch._C._functorch import TransformType, get_interpreter_stack
from torch.autograd import forward_ad

from solvers.errors import ConfigError


def in_forward_mode() -> bool:
    """Whether tangents may be carried: inside `torch.func.jvp` or `forward_ad.dual_level`."""
    return bool(forward_ad._current_level >= 0)


def check_no_transform(kind: str) -> None:
    """Raises ConfigError where a kind of gradient that is no plain autograd is asked for inside a
    transform of torch.func.
    """
    if _transforms():
        raise ConfigError(
            f"torch.func.grad, vjp and vmap differentiate operation by operation, not by gradient {kind!r}: use gradient='backprop' in them"
        )


def check_steps(adaptive: bool) -> None:
    """Raises ConfigError for adaptive steps under vmap."""
    if adaptive and batched():
        raise ConfigError(
            "under vmap the error of a sample cannot be looked at, and adaptive steps follow it: use a method of fixed steps, as rk4, "
            "or give the batch as one state"
        )


def batched() -> bool:
    """Whether numbers cannot be looked at, under vmap."""
    return TransformType.Vmap in _transforms()


def _transforms() -> list[TransformType]:
    if torch.compiler.is_compiling():
        return []
    return [interpreter.key() for interpreter in get_interpreter_stack() or ()]


class _Once(torch.autograd.Function):
    """Tensors whose further derivative is an error: a derivative that is missing would read as
    zero.
    """

    @staticmethod
    def forward(ctx: object, count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(tensor.detach() for tensor in tensors[:count])

    @staticmethod
    def backward(ctx: object, *gradients: Tensor) -> tuple[Tensor, ...]:
        raise ConfigError(
            "second derivatives are not defined for the gradients 'reversible' and 'adjoint', which compute the first ones without a "
            "graph: use gradient='backprop' or 'checkpoint'"
        )


def differentiable_once(roots: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
    """The gradients, which depend on `roots`, and of which autograd raises ConfigError when it is
    asked to differentiate them again.
    """
    given = [gradient for gradient in gradients if gradient is not None]
    marked = iter(_Once.apply(len(given), *given, *roots))  # type: ignore[no-untyped-call]  # torch gives it no types
    return [None if gradient is None else next(marked) for gradient in gradients]
