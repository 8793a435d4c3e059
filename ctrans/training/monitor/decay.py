"""Weight decay: how fast it shrinks matrices and the gains of norms, and how large the gains
are.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ctrans.interop.foreign_errors import FOREIGN_ERRORS
from ctrans.interop.norms import as_norm
from ctrans.training.monitor.hooks import local
from ctrans.training.monitor.training_measures import GaugeAt
from ctrans.training.monitor.updates import coupled_decay, innermost, share_of_decay

PLAIN = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.BatchNorm1d, nn.BatchNorm2d)
"""Norms whose gain is their weight."""
NAMES = ("weight", "gain", "gamma", "scale")
"""How norms call their gains."""
Shifts = Mapping[type[nn.Module], float]
"""By class of norms: s, if the gain is s + weight."""


class GainOfNorm(NamedTuple):
    """The weight of a norm's gain."""

    norm: nn.Module
    weight: nn.Parameter


def gains_of(root: nn.Module) -> list[GainOfNorm]:
    """The gains of the norms of a model, each once: vectors of modules whose class is called a
    norm.
    """
    found = {
        id(weight): GainOfNorm(module, weight)
        for module in root.modules()
        if "norm" in type(module).__name__.lower()
        for name, weight in module.named_parameters(recurse=False)
        if name in NAMES and weight.dim() == 1
    }
    return list(found.values())


def shifts_of(root: nn.Module) -> dict[type[nn.Module], float]:
    """s of each class of norms whose gain is s + weight with s not 0, such as Gemma's 1 + weight.
    One norm of each class is copied and run.
    """
    shifts: dict[type[nn.Module], float] = {}
    for norm, _ in gains_of(root):
        kind = type(norm)
        if kind in shifts or kind in PLAIN:
            continue
        shifts[kind] = 0.0
        with contextlib.suppress(*FOREIGN_ERRORS):
            read = as_norm(norm)
            if read is not None:
                shifts[kind] = read.form.shift
    return {kind: shift for kind, shift in shifts.items() if shift}


@torch.no_grad()
def decay_of(
    root: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    shifts: Shifts = MappingProxyType({}),
) -> dict[GaugeAt, Tensor]:
    """The largest share that weight decay takes of a weight in a step: `weight_decay` of matrices,
    `gain_decay` of the gains of norms; and `gain_size`, the median |s + weight| with the norms'
    `shifts` s. A decay that goes into Adam's moments takes another share, and is left out.
    """
    if optimizer is None:
        return {}
    gains = gains_of(root)
    of_gains = {id(gain.weight) for gain in gains}
    of_matrices = {id(weight) for weight in root.parameters() if weight.dim() > 1}
    figures: dict[GaugeAt, Tensor] = {}
    for name, ids in (("weight_decay", of_matrices), ("gain_decay", of_gains)):
        share = _largest_share(optimizer, ids)
        if share is not None:
            figures[name, 0] = torch.tensor(share, dtype=torch.float64)
    entries = [
        (local(gain.weight.detach()).flatten().float() + shifts.get(type(gain.norm), 0.0)).abs()
        for gain in gains
    ]
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
    as of RMSprop, which divides the decay by the size of gradients, and of ASGD, whose `lambd`
    takes a part too.
    """
    if type(innermost(optimizer)).__name__ == "ASGD":
        return None
    decay = float(group.get("weight_decay") or 0.0)
    if decay and "betas" not in group and type(innermost(optimizer)).__name__ != "SGD":
        return None
    if "betas" in group and coupled_decay(optimizer, group) != 0:
        return None
    return share_of_decay(optimizer, group)
