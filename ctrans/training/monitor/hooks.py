"""Hooks of a module that trains, and what they say of errors."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ctrans.base.printable import text_of


class Hook:
    """A hook of a module. Copies and pickles of the module have a hook that does nothing
    instead.
    """

    def __init__(self, act: Callable[..., None]):
        self.act = act

    def __call__(self, *args: Any) -> None:
        self.act(*args)

    def __reduce__(self) -> tuple[Any, ...]:
        # it takes any arguments, and needs no ctrans to load
        return getattr, (contextlib.nullcontext(), "__exit__")


def traced() -> bool:
    """Whether torch records the pass for a compiled graph, an export or TorchScript."""
    return torch.compiler.is_compiling() or torch.jit.is_tracing()  # type: ignore[attr-defined, no-untyped-call]  # torch gives it no types


def state_in(arguments: Sequence[Any]) -> Tensor | None:
    """The first of the arguments that may be a state."""
    for x in arguments:
        if isinstance(x, Tensor) and x.is_floating_point() and x.dim() > 1:
            return x
    return None


def local(x: Tensor) -> Tensor:
    """The entries of a sharded tensor that this process has; any other tensor as it is."""
    if hasattr(x, "to_local"):
        part: Tensor = x.to_local()
        return part
    return x


def in_a_line(error: BaseException) -> str:
    """An error in one line."""
    return f"{type(error).__name__}: {' '.join(text_of(error).split())[:200]}"
