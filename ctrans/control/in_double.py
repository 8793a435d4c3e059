"""A model in float64 for a while: the model itself, whose hooks and closures stay with it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn


@contextlib.contextmanager
def in_double(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Inside, the parameters and buffers of the modules are in float64, and tensors that share
    memory still share it. Afterwards they are what they were, to the bit, also where a forward pass
    put another buffer in the place of one. What an opened model remembers of its inputs is
    forgotten at both ends.

    Code that computes with tensors of its own in another dtype may raise an error inside.
    """
    modules = list(modules)
    forgets: list[Callable[[], None]] = [
        forget for module in modules if (forget := getattr(module, "forget", None)) is not None
    ]
    parts = {part for module in modules for part in module.modules()}
    buffers = [(part, dict(part._buffers)) for part in parts]
    tensors = {
        id(tensor): tensor
        for module in modules
        for tensor in (*module.parameters(), *module.buffers())
        if tensor.is_floating_point() and tensor.dtype != torch.float64 and not tensor.is_meta
    }
    before = [(tensor, tensor.data) for tensor in tensors.values()]
    wide: dict[tuple[int, torch.dtype], Tensor] = {}
    try:
        for tensor, data in before:
            storage = data.untyped_storage()
            place = (storage.data_ptr(), data.dtype)
            if place not in wide:
                whole = torch.empty(0, dtype=data.dtype, device=data.device).set_(storage)
                wide[place] = whole.double()
            tensor.data = wide[place].as_strided(data.shape, data.stride(), data.storage_offset())
        for forget in forgets:
            forget()
        yield
    finally:
        for part, as_before in buffers:
            part._buffers.clear()
            part._buffers.update(as_before)
        for tensor, data in before:
            tensor.data = data
        for forget in forgets:
            forget()


def widened(numbers: Any) -> Any:
    """A tensor of floating numbers in float64; others as they are."""
    is_float = isinstance(numbers, Tensor) and numbers.is_floating_point()
    return numbers.double() if is_float else numbers
