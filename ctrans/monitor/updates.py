"""One step of the optimiser on a sample of the weights: |W' - W|/|W|, and gradients over the root
of Adam's second moments.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ctrans.monitor.gauge_table import GaugeAt
from ctrans.monitor.hooks import local

ENTRIES = 8192
"""The number of entries of the sample of a group of weights."""
Group = Sequence[nn.Parameter]
"""The weights of a sublayer, or those outside of the depth. They are on one device."""


class Updates:
    """Compares a sample of the weights before a step of the optimiser with those after it.

    The last group has the weights outside of the depth. Of a sharded weight, the sample has entries
    of this process.
    """

    def __init__(self) -> None:
        self.before: list[list[Tensor]] | None = None
        """The sample before the step, in float32; None if there is none."""

    @torch.no_grad()
    def remember(self, groups: Sequence[Group]) -> None:
        self.before = [list(torch._foreach_mul(list(_samples(group)), 1.0)) if group else [] for group in groups]

    @torch.no_grad()
    def figures(
        self, groups: Sequence[Group], optimizer: torch.optim.Optimizer | None, cut: Tensor | None = None
    ) -> dict[GaugeAt, Tensor]:
        """`update`, `unmoved`, `rate_share` and `decay_share` if there is a sample of before the step;
        `adam_gradient_ratio` if the optimiser has Adam's second moments.

        `cut` is a factor of the gradients that is yet to be applied.
        """
        found: dict[GaugeAt, Tensor] = {}
        before, self.before = self.before, None
        states, rates, decays = ({}, {}, {}) if optimizer is None else (adam_states(optimizer), *rates_of(optimizer))
        for k, group in enumerate(groups):
            end, place = ("_outside", 0) if k + 1 == len(groups) else ("", k)
            if before is not None and before[k]:
                now = list(_samples(group))
                if [part.shape for part in now] == [part.shape for part in before[k]]:
                    parts = [_shards(weight) for weight in group]
                    size = _length(before[k], parts).clamp(min=1e-30)
                    changed = torch._foreach_sub(now, before[k])
                    found["update" + end, place] = _length(changed, parts) / size
                    matrices = [part for part, weight in zip(changed, group, strict=True) if weight.dim() > 1]
                    if matrices and not end:
                        found["unmoved", place] = (torch.stack(torch._foreach_norm(matrices)) == 0).float().mean()
                    # a step is not longer where weights have grown
                    small = torch._foreach_clamp_max(torch._foreach_clamp_min(before[k], -1.0), 1.0)
                    for name, share, old in (("rate_share", rates, small), ("decay_share", decays, before[k])):
                        shares = [share.get(id(weight), 0.0) for weight in group]
                        if any(shares) and not end:
                            found[name, place] = _length(torch._foreach_mul(old, shares), parts) / size
            ratio = _gradient_ratio(group, states, cut)
            if ratio is not None:
                found["adam_gradient_ratio" + end, place] = ratio
        return found


def adam_states(optimizer: torch.optim.Optimizer) -> dict[int, tuple[dict[str, Any], dict[str, Any]]]:
    """The state and the options of each parameter that has Adam's second moments, by id. Adafactor's
    have no betas."""
    state: Mapping[Any, dict[str, Any]] = optimizer.state
    pairs = ((parameter, options) for options in optimizer.param_groups for parameter in options["params"])
    return {id(p): (state[p], options) for p, options in pairs if "betas" in options and "exp_avg_sq" in state.get(p, {})}


def rates_of(optimizer: torch.optim.Optimizer) -> tuple[dict[int, float], dict[int, float]]:
    """The learning rate of each parameter over the largest one, by id, and this times its weight decay.
    Nothing if all rates are 0.
    """
    groups = {id(p): group for group in optimizer.param_groups if group["lr"] is not None for p in group["params"]}
    largest = max((float(group["lr"]) for group in groups.values()), default=0.0)
    rates = {key: float(group["lr"]) / largest for key, group in groups.items()} if largest > 0 else {}
    return rates, {key: rate * float(groups[key].get("weight_decay") or 0.0) for key, rate in rates.items()}


def settings(optimizer: torch.optim.Optimizer | None) -> dict[str, Any]:
    """`learning_rate` and `adam_memory` of an optimiser that has them."""
    groups = [] if optimizer is None else optimizer.param_groups
    rates = [float(group["lr"]) for group in groups if group["lr"] is not None]
    betas = [float(group["betas"][1]) for group in groups if "betas" in group]
    found = {"learning_rate": max(rates)} if rates else {}
    return {**found, "adam_memory": 1 / max(1e-12, 1 - max(betas))} if betas else found


def _gradient_ratio(
    group: Group, states: Mapping[int, tuple[dict[str, Any], dict[str, Any]]], cut: Tensor | None
) -> Tensor | None:
    """rms of g/sqrt(nu), where g is this step's gradient and nu = (beta_2 nu' + (1 - beta_2)
    g^2)/(1 - beta_2^t).

    It is 1 for constant gradients, and at most 1/sqrt(1 - beta_2). Source: Wortsman et al. (arXiv
    2304.13013, section 3.4).
    """
    own = [
        (_sample(_placed(p), n), _sample(states[id(p)][0]["exp_avg_sq"], n), _shards(p), *states[id(p)])
        for p, n in _strides(group)
        if p.grad is not None and not p.grad.is_sparse and id(p) in states
    ]
    if not own:
        return None
    g, moments, parts, state, options = map(list, zip(*own, strict=True))
    betas = [float(each["betas"][1]) for each in options]
    g = g if cut is None else [*torch._foreach_mul(g, cut.to(g[0]))]
    squares = torch._foreach_mul(torch._foreach_mul(g, g), [1 - beta for beta in betas])
    squares = torch._foreach_add(torch._foreach_mul(moments, betas), squares)
    ratios = torch._foreach_div(g, torch._foreach_sqrt(torch._foreach_clamp_min(squares, 1e-30)))
    steps = torch.stack([torch.as_tensor(each["step"], dtype=torch.float32, device=g[0].device) for each in state]) + 1
    corrections = (1 - steps.new_tensor(betas) ** steps).sqrt()
    count = sum(part * each.numel() for part, each in zip(parts, g, strict=True))
    return _length(torch._foreach_mul(ratios, [*corrections.unbind()]), parts) / math.sqrt(count)


def _samples(group: Group) -> Iterator[Tensor]:
    for parameter, stride in _strides(group):
        yield _sample(parameter.detach(), stride)


def _sample(tensor: Tensor, stride: int) -> Tensor:
    return local(tensor).reshape(-1)[::stride].float()


def _shards(weight: nn.Parameter) -> float:
    """Over how many processes its entries are spread."""
    return weight.numel() / max(1, local(weight).numel())


def _placed(weight: nn.Parameter) -> Tensor:
    """The gradient, sharded as the weight is: behind sequence-parallel maps it may be a part of a sum."""
    own: Any = weight
    grad: Tensor = own.grad.redistribute(placements=own.placements) if hasattr(own.grad, "redistribute") else own.grad
    return grad


def _strides(group: Group) -> list[tuple[nn.Parameter, int]]:
    """Each weight with the stride of its sample. Vectors are sampled whole, matrices of a group at
    about `ENTRIES` entries.
    """
    total = sum(parameter.numel() for parameter in group)
    return [(p, max(1, math.ceil(total / ENTRIES)) if p.dim() > 1 else 1) for p in group]


def _length(samples: Sequence[Tensor], parts: Sequence[float]) -> Tensor:
    """The length of the whole weights, from samples of this process."""
    norms = torch._foreach_mul(torch._foreach_norm(list(samples)), [math.sqrt(part) for part in parts])
    found: Tensor = torch.linalg.vector_norm(torch.stack(norms))
    return found
