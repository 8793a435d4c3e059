"""Derivatives other than backward ones: which `torch.func` transforms or forward mode surround a
solve.

Forward mode carries a tangent v' = (df/dx) v through the same steps. It needs no extra memory and
no kind of gradient, so all kinds compute it by plain steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import (
    TransformType,
    get_interpreter_stack,
    get_unwrapped,
    is_batchedtensor,
    is_functorch_wrapped_tensor,
    is_legacy_batchedtensor,
)
from torch.autograd import forward_ad

from solvers.errors import ConfigError


def in_forward_mode() -> bool:
    """Whether tangents may exist: inside `torch.func.jvp` or `forward_ad.dual_level`."""
    return bool(forward_ad._current_level >= 0)


def check_no_transform(kind: str) -> None:
    """Raises ConfigError if a kind of gradient other than backprop is used inside a transform of
    torch.func.
    """
    if _transforms():
        raise ConfigError(
            "torch.func.grad, vjp and vmap differentiate operation by operation, not by gradient"
            f" {kind!r}: use gradient='backprop' in them"
        )


def transformed() -> bool:
    """Whether a transform of torch.func surrounds this call."""
    return bool(_transforms())


def batched() -> bool:
    """Whether vmap makes the values of numbers unavailable."""
    return TransformType.Vmap in _transforms()


def check_not_batched(name: str, time: Any) -> None:
    """Raises ConfigError if vmap hides the numbers of a time."""
    while isinstance(time, Tensor) and is_functorch_wrapped_tensor(time):
        if is_batchedtensor(time):
            raise ConfigError(
                f"{name} is batched by vmap, which hides its numbers: use vmap over the initial"
                " state or the weights only, and a loop over times"
            )
        time = get_unwrapped(time)


def _transforms() -> list[TransformType]:
    if torch.compiler.is_compiling():
        return []
    return [interpreter.key() for interpreter in get_interpreter_stack() or ()]


def is_batched(gradient: Tensor) -> bool:
    """Whether a gradient stands for several, as with `is_grads_batched` of torch.autograd.grad."""
    return is_legacy_batchedtensor(gradient) or is_batchedtensor(gradient)


class _Once(torch.autograd.Function):
    """Marks tensors whose further derivative raises an error. Otherwise the missing derivative
    would be zero.
    """

    @staticmethod
    def forward(ctx: object, count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(tensor.detach() for tensor in tensors[:count])

    @staticmethod
    def backward(ctx: object, *gradients: Tensor) -> tuple[Tensor, ...]:
        raise ConfigError(
            "second derivatives are not defined for the gradients 'reversible' and 'adjoint', which"
            " compute the first ones without a graph: use gradient='backprop' or 'checkpoint'"
        )


def differentiable_once(
    roots: Sequence[Tensor], gradients: Sequence[Tensor | None]
) -> list[Tensor | None]:
    """The gradients, which depend on `roots`. Autograd raises ConfigError if they are
    differentiated again.
    """
    present = [gradient for gradient in gradients if gradient is not None]
    marked = iter(_Once.apply(len(present), *present, *roots))  # type: ignore[no-untyped-call]  # torch gives it no types
    marked_gradients: list[Tensor | None] = []
    for gradient in gradients:
        if gradient is None:
            marked_gradients.append(None)
        else:
            marked_gradients.append(next(marked))
    return marked_gradients
