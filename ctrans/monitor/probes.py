"""Probes: walks on a held batch, rarer than reports."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from ctrans.monitor.sites import Sites


@dataclasses.dataclass(frozen=True, eq=False)
class Held:
    """A small batch that is always the same: tokens, and the targets of the model's loss."""

    tokens: Tensor
    targets: Any


def probe(sites: Sites, held: Held, optimizer: torch.optim.Optimizer | None) -> dict[str, Any]:
    return {}
