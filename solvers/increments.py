"""What the steps of a solve add to the state, and what rounding to its type loses of that."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from solvers.segment import Segment

STATE = 0.02
"""The share of the state below which a loss is left alone: slow fields hardly move it."""


class Increments:
    """What the steps of a solve add to the state, and what rounding to its type loses of that."""

    def __init__(self, dtype: torch.dtype):
        self._wide = torch.promote_types(dtype, torch.float32)
        if dtype.itemsize >= 4:
            self._wide = torch.promote_types(dtype, torch.float64)
        self._added: Tensor | None = None
        self._lost: Tensor | None = None

    @torch.no_grad()
    def add(self, x: Tensor, increment: Tensor, x1: Tensor) -> None:
        """Adds a step from x to x1, the rounded x + increment."""
        if self._added is None or self._lost is None:
            self._added = torch.zeros_like(x, dtype=self._wide)
            self._lost = torch.zeros_like(x, dtype=self._wide)
        self._added.add_(increment)
        self._lost.add_(x).add_(increment).sub_(x1)

    def share_lost(self, x1: Tensor) -> float:
        """|lost|/|added|; 0 if the loss is small compared with the state x1. Waits for the
        device.
        """
        if self._added is None or self._lost is None:
            return 0.0
        added = float(torch.linalg.vector_norm(self._added))
        lost = float(torch.linalg.vector_norm(self._lost))
        size = float(torch.linalg.vector_norm(x1.detach().to(self._wide)))
        if not lost > STATE * size or added == 0:
            return 0.0
        return lost / added


def increments_of(segments: Sequence[Segment], steps: int, dtype: torch.dtype) -> Increments | None:
    """A record for that many steps in each segment; None if they lose little of any state, each at
    most half a unit in the last place.
    """
    if len(segments) * steps * torch.finfo(dtype).eps / 2 < STATE:
        return None
    return Increments(dtype)
