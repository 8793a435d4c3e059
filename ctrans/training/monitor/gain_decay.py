"""Weight decay of the gains of norms: how fast it shrinks them, and how large they are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ctrans.training.monitor.hooks import local
from ctrans.training.monitor.training_measures import GaugeAt
from ctrans.training.monitor.updates import coupled_decay

NAMES = ("weight", "gain", "gamma", "scale")
"""How norms call their gains."""


def gains_of(root: nn.Module) -> list[nn.Parameter]:
    """The gains of the norms of a model, each once: vectors of modules whose class is called a
    norm.
    """
    found = {
        id(weight): weight
        for module in root.modules()
        if "norm" in type(module).__name__.lower()
        for name, weight in module.named_parameters(recurse=False)
        if name in NAMES and weight.dim() == 1
    }
    return list(found.values())


@torch.no_grad()
def decay_of_gains(
    gains: Sequence[nn.Parameter], optimizer: torch.optim.Optimizer | None
) -> dict[GaugeAt, Tensor]:
    """`gain_decay`, the largest share that one step takes of a gain, and `gain_size`, the median
    |gain|. Nothing without gains in the optimiser, or if their decay goes into Adam's moments.
    """
    if optimizer is None:
        return {}
    ids = {id(gain) for gain in gains}
    shares = [
        _share(optimizer, group)
        for group in optimizer.param_groups
        if any(id(p) in ids for p in group["params"])
    ]
    known = [share for share in shares if share is not None]
    if len(known) < len(shares) or not known:
        return {}
    entries = [local(gain.detach()).abs().flatten().float() for gain in gains]
    entries = [part.to(entries[0].device) for part in entries if part.numel()]
    if not entries:
        return {}
    return {
        ("gain_decay", 0): torch.tensor(max(known), dtype=torch.float64),
        ("gain_size", 0): torch.cat(entries).median().double(),
    }


def _share(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> float | None:
    """eta lambda, the share that a step of this group takes of a weight; None if it is unknown."""
    decay = float(group.get("weight_decay") or 0.0)
    if "betas" in group and coupled_decay(optimizer, group) != 0:
        return None
    return decay * float(group["lr"] or 0.0)
