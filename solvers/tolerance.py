"""Tolerances by entry: an error e is kept below 1 in norm(e_i/(atol_i + rtol_i abs(x_i))), with an rtol_i and atol_i for each entry."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from solvers.errors import ConfigError
from solvers.tree import Tree

Tolerance = float | Tensor | Sequence[Any] | Mapping[Any, Any]
"""One number; a tensor that broadcasts with the state; or, of a state of several tensors, numbers and tensors in its structure."""


def spread(name: str, given: Tolerance | None, x: Tensor, tree: Tree | None = None) -> tuple[Any, Any]:
    """The smallest of the tolerances, and what a run has: one number as it is, or a tensor in x's shape, where x is flat for a tree.

    Raises ConfigError for tensors that fit no state, depend on something that learns, or hold anything but positive finite numbers.
    """
    if given is None or isinstance(given, str) or not isinstance(given, (Tensor, Sequence, Mapping)):
        return given, given
    try:
        whole = torch.as_tensor(given).expand(x.shape) if tree is None else tree.spread(given)
    except (RuntimeError, TypeError, ValueError):
        state = f"shape {tuple(x.shape)}" if tree is None else f"{len(tree.shapes)} tensors"
        raise ConfigError(
            f"{name} = {given!r} does not fit a state of {state}: give one number, a tensor that broadcasts with it, or one of these for "
            "each of its tensors"
        ) from None
    if whole.requires_grad:
        raise ConfigError(f"{name} depends on what is learned, and a tolerance has no gradient: give it as .detach()")
    low, high = (float(whole.min()), float(whole.max())) if not whole.is_complex() else (float("nan"),) * 2
    if not (low > 0 and high < float("inf")):
        raise ConfigError(f"{name} is from {low:g} to {high:g}: give positive finite numbers")
    return low, whole.to(dtype=tolerance_type(x.dtype), device=x.device)


def tolerance_type(dtype: torch.dtype) -> torch.dtype:
    """The type in which errors of a state of that type are held against tolerances: the real one, and no half precision."""
    return torch.float64 if dtype in (torch.float64, torch.complex128) else torch.float32
