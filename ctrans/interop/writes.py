"""Calls that write into a tensor, as functions of what the tensor was before."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def changes_its_input(name: str) -> bool:
    """Whether a function of that name writes into its first argument."""
    return name == "__setitem__" or (name.endswith("_") and not name.startswith("__"))


def copied_by(name: str, args: Sequence[Any]) -> Tensor | None:
    """The tensor y that a call copies into all of another one, as x.copy_(y) or x[:] = y. None if
    the call does something else.
    """
    is_copy = name == "copy_" or (name == "__setitem__" and is_whole(args[1]))
    if not is_copy or len(args) < 2:
        return None
    target, source = args[0], args[-1]
    if not isinstance(source, Tensor):
        return None
    if (source.shape, source.dtype, source.device) != (target.shape, target.dtype, target.device):
        return None
    return source


def is_whole(index: Any) -> bool:
    """Whether an index selects all entries, as in x[:] and x[...]."""
    if isinstance(index, tuple):
        return all(map(is_whole, index))
    return index is Ellipsis or (isinstance(index, slice) and index == slice(None))


def put_into(base: Tensor, view: Tensor, places: Tensor) -> Tensor:
    """The base with the entries of a view at these places of its own.

    `torch.as_strided_scatter` does the same, but its derivative by the base is wrong in torch 2.13.
    """
    flat = base.reshape(-1).index_copy(0, places, view.reshape(-1))
    return flat.reshape(base.shape)


def taken_from(base: Tensor, places: Tensor, shape: torch.Size) -> Tensor:
    """The entries of the base at these places, in that shape."""
    return base.reshape(-1)[places].reshape(shape)


def places_in(base: Tensor, view: Tensor) -> Tensor:
    """The places of a view's entries among those of its base, both in the order of their axes."""
    in_storage = [
        torch.arange(_extent(base, view), device=base.device).as_strided(
            tuple(each.shape), each.stride(), each.storage_offset()
        )
        for each in (base, view)
    ]
    of_base, of_view = (places.flatten() for places in in_storage)
    number = torch.zeros(_extent(base, view), dtype=torch.long, device=base.device)
    number[of_base] = torch.arange(len(of_base), device=base.device)
    return number[of_view]


def _extent(*tensors: Tensor) -> int:
    """One more than the last place of the storage that one of the tensors reads."""
    lasts = [
        tensor.storage_offset()
        + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
        for tensor in tensors
        if tensor.numel()
    ]
    return 1 + int(max(lasts, default=0))
