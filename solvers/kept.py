"""Finds what a field computed from parameters without a graph, keeps, and uses again later: such a
value has no derivative by the parameters, so their gradient would be wrong without a word.

`Capture` alone does not see it if the field also uses the parameter itself each time.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from solvers.errors import SolveError
from solvers.segment import Segment

Kept = WeakIdKeyDictionary
"""Tensors that a field computed from parameters in its first evaluation of a segment, and that are
still in use after it.
"""
WITHOUT_GRADIENT = (Tensor.detach, torch.detach, Tensor.data.__get__)  # type: ignore[attr-defined]  # a property of C


def watched(segment: Segment, kept: Kept) -> Segment:
    """The segment, whose first evaluation without a graph adds to `kept`."""
    is_first = True

    def field(t: Tensor, x: Tensor) -> Tensor:
        nonlocal is_first
        if not is_first or torch.is_grad_enabled():
            return segment.acting(t, x)
        is_first = False
        with _Derived() as mode:
            v = segment.acting(t, x)
        mode.tensors.pop(id(v), None)
        references = [weakref.ref(tensor) for tensor in mode.tensors.values()]
        mode.tensors.clear()  # only what others hold stays
        kept.update(
            (tensor, None) for tensor in (each() for each in references) if tensor is not None
        )
        return v

    return segment.with_maps(acting=field)


class _Derived(TorchFunctionMode):
    """Collects the tensors that are computed from tensors that require a gradient, but not those
    that the field detaches: they have no gradient with any kind.
    """

    def __init__(self) -> None:
        super().__init__()
        # by their numbers (id), and held until the evaluation ends: no number is given twice
        self.tensors: dict[int, Tensor] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in WITHOUT_GRADIENT:
            return result
        for tensor in _tensors((*args, *(kwargs or {}).values())):
            if tensor.requires_grad or id(tensor) in self.tensors:
                for made in _tensors([result]):
                    if not made.requires_grad:
                        self.tensors[id(made)] = made
                break
        return result


class Unused(TorchFunctionMode):
    """Raises SolveError if a function of torch gets a kept tensor without a graph."""

    def __init__(self, kept: Kept, k: int):
        super().__init__()
        self._kept = kept
        self._segment = k

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        writes = name.endswith("_") and not name.endswith("__")
        if writes and args and isinstance(args[0], Tensor):
            self._kept.pop(args[0], None)
        for tensor in _tensors((*args, *(kwargs or {}).values())):
            if tensor in self._kept and not tensor.requires_grad:
                raise SolveError(
                    f"segment {self._segment} uses a tensor of shape {tuple(tensor.shape)} that its"
                    " field computed from parameters in the forward pass and keeps"
                    " (torch.nn.utils.parametrize.cached?). Compute it each time, or before the"
                    " solve, or use gradient='backprop'"
                )
        return func(*args, **(kwargs or {}))


def _tensors(values: Any) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (tuple, list)):
            yield from _tensors(value)
