"""Weight decay: how fast it shrinks matrices and the gains of norms, and how large the gains
are.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ctrans.training.monitor.hooks import local
from ctrans.training.monitor.training_measures import GaugeAt
from ctrans.training.monitor.updates import coupled_decay, innermost, share_of_decay

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
def decay_of(root: nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[GaugeAt, Tensor]:
    """The largest share that weight decay takes of a weight in a step: `weight_decay` of matrices,
    `gain_decay` of the gains of norms; and `gain_size`, the median |gain|. A decay that goes into
    Adam's moments takes another share, and is left out.
    """
    if optimizer is None:
        return {}
    gains = gains_of(root)
    of_gains = {id(gain) for gain in gains}
    of_matrices = {id(weight) for weight in root.parameters() if weight.dim() > 1}
    figures: dict[GaugeAt, Tensor] = {}
    for name, ids in (("weight_decay", of_matrices), ("gain_decay", of_gains)):
        share = _largest_share(optimizer, ids)
        if share is not None:
            figures[name, 0] = torch.tensor(share, dtype=torch.float64)
    entries = [local(gain.detach()).abs().flatten().float() for gain in gains]
    entries = [part for part in entries if part.numel()]  # a sharded one may be elsewhere
    if ("gain_decay", 0) in figures and entries:
        here = [part.to(entries[0].device) for part in entries]
        figures["gain_size", 0] = torch.cat(here).nanmedian().double()
    return figures


def _largest_share(optimizer: torch.optim.Optimizer, ids: Collection[int]) -> float | None:
    """The largest eta lambda of these weights; None if the optimiser has none of them, or if one is
    unknown.
    """
    shares = [
        _share(optimizer, group)
        for group in optimizer.param_groups
        if any(id(p) in ids for p in group["params"])
    ]
    known = [share for share in shares if share is not None]
    if not known or len(known) < len(shares):
        return None
    return max(known)


def _share(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> float | None:
    """The share that a step of this group takes of a weight in the long run. None if it is unknown,
    as of RMSprop, which divides the decay by the size of gradients.
    """
    decay = float(group.get("weight_decay") or 0.0)
    if decay and "betas" not in group and type(innermost(optimizer)).__name__ != "SGD":
        return None
    if "betas" in group and coupled_decay(optimizer, group) != 0:
        return None
    return share_of_decay(optimizer, group)
