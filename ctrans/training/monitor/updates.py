"""One step of the optimiser on a sample of the weights: |W' - W|/|W|, and gradients over the root
of Adam's second moments.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ctrans.training.monitor.hooks import local
from ctrans.training.monitor.training_measures import GaugeAt

ENTRIES = 8192
"""The number of entries of the sample of a group of weights."""
Group = Sequence[nn.Parameter]
"""The weights of a sublayer, or those outside of the depth."""


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
        self.before = [[part.clone() for part in parts] for parts in _samples(groups)]

    @torch.no_grad()
    def figures(
        self,
        groups: Sequence[Group],
        optimizer: torch.optim.Optimizer | None,
        cut: Tensor | None = None,
    ) -> dict[GaugeAt, Tensor]:
        """`update`, `unmoved`, `rate_share` and `decay_share` if there is a sample of before the
        step; `adam_gradient_ratio` if the optimiser has Adam's second moments.

        `cut` is a factor of the gradients that is yet to be applied.
        """
        if optimizer is None:
            states, rates, decays = ({}, {}, {})
        else:
            states, rates, decays = (adam_states(optimizer), *rates_of(optimizer))
        found: dict[GaugeAt, Tensor] = {}
        adam = [
            (k, p, n)
            for k, p, n in _strides(groups)
            if p.grad is not None and not p.grad.is_sparse and id(p) in states
        ]
        if adam:
            measured = [("adam_gradient_ratio", _gradient_ratio(adam, states, cut))]
        else:
            measured = []
        before = self.before
        self.before = None
        if before is not None:
            measured += _step(groups, before, rates, decays)
        for name, values in measured:
            for k, value in values.items():
                if k + 1 < len(groups):
                    found[name, k] = value
                elif name in ("update", "adam_gradient_ratio"):
                    found[name + "_outside", 0] = value
        return found


def _step(
    groups: Sequence[Group],
    before: list[list[Tensor]],
    rates: Mapping[int, float],
    decays: Mapping[int, float],
) -> Iterator[tuple[str, dict[int, Tensor]]]:
    """The figures of one step by group, of all groups at once: on a GPU each call of torch
    counts.
    """
    now = _samples(groups)
    same = [
        k
        for k, old in enumerate(before)
        if old and [part.shape for part in old] == [part.shape for part in now[k]]
    ]
    if not same:
        return
    weights = [(k, p) for k in same for p in groups[k]]
    new, old = ([part for k in same for part in parts[k]] for parts in (now, before))
    size = {k: length.clamp(min=1e-30) for k, length in _lengths(weights, old).items()}
    changed = torch._foreach_sub(new, old)
    yield "update", {k: length / size[k] for k, length in _lengths(weights, changed).items()}
    matrices = [(k, part) for (k, p), part in zip(weights, changed, strict=True) if p.dim() > 1]
    if matrices:
        still = torch.stack(_here(torch._foreach_norm([part for _, part in matrices]))) == 0
        counts = Counter(k for k, _ in matrices)
        yield (
            "unmoved",
            {
                k: part.float().mean()
                for k, part in zip(counts, still.split([*counts.values()]), strict=True)
            },
        )
    # a step is not longer where weights have grown
    small = torch._foreach_clamp_max(torch._foreach_clamp_min(old, -1.0), 1.0)
    for name, share, parts in (("rate_share", rates, small), ("decay_share", decays, old)):
        shares = [share.get(id(p), 0.0) for _, p in weights]
        there = {k for (k, _), each in zip(weights, shares, strict=True) if each}
        if there:
            lengths = _lengths(weights, torch._foreach_mul(parts, shares))
        else:
            lengths = {}
        yield name, {k: length / size[k] for k, length in lengths.items() if k in there}


def adam_states(
    optimizer: torch.optim.Optimizer,
) -> dict[int, tuple[dict[str, Any], dict[str, Any]]]:
    """The state and the options of each parameter that has Adam's second moments, by id.
    Adafactor's have no betas.
    """
    state: Mapping[Any, dict[str, Any]] = optimizer.state
    pairs = (
        (parameter, options)
        for options in optimizer.param_groups
        for parameter in options["params"]
    )
    return {
        id(p): (state[p], options)
        for p, options in pairs
        if "betas" in options and "exp_avg_sq" in state.get(p, {})
    }


def rates_of(optimizer: torch.optim.Optimizer) -> tuple[dict[int, float], dict[int, float]]:
    """The learning rate of each parameter over the largest one, by id, and this times its weight
    decay. Nothing if all rates are 0.
    """
    groups = {
        id(p): group
        for group in optimizer.param_groups
        if group["lr"] is not None
        for p in group["params"]
    }
    largest = max((float(group["lr"]) for group in groups.values()), default=0.0)
    if largest > 0:
        rates = {key: float(group["lr"]) / largest for key, group in groups.items()}
    else:
        rates = {}
    return rates, {
        key: rate * float(groups[key].get("weight_decay") or 0.0) for key, rate in rates.items()
    }


def settings(optimizer: torch.optim.Optimizer | None) -> dict[str, Any]:
    """`learning_rate` and `adam_memory` of an optimiser that has them."""
    if optimizer is None:
        groups = []
    else:
        groups = optimizer.param_groups
    rates = [float(group["lr"]) for group in groups if group["lr"] is not None]
    betas = [float(group["betas"][1]) for group in groups if "betas" in group]
    if rates:
        found = {"learning_rate": max(rates)}
    else:
        found = {}
    if betas:
        return {**found, "adam_memory": 1 / max(1e-12, 1 - max(betas))}
    return found


def _gradient_ratio(
    own: Sequence[tuple[int, nn.Parameter, int]],
    states: Mapping[int, tuple[dict[str, Any], dict[str, Any]]],
    cut: Tensor | None,
) -> dict[int, Tensor]:
    """rms of g/sqrt(nu) by group, where g is this step's gradient and nu = (beta_2 nu' + (1 -
    beta_2) g^2)/(1 - beta_2^t).

    It is 1 for constant gradients, and at most 1/sqrt(1 - beta_2). Source: Wortsman et al. (arXiv
    2304.13013, section 3.4).
    """
    g = [_sample(_placed(p), n) for _, p, n in own]
    moments = [_sample(states[id(p)][0]["exp_avg_sq"], n) for _, p, n in own]
    betas = [float(states[id(p)][1]["betas"][1]) for _, p, _ in own]
    if cut is None:
        g = g
    else:
        g = [part * cut.to(part) for part in g]
    squares = torch._foreach_mul(torch._foreach_mul(g, g), [1 - beta for beta in betas])
    squares = torch._foreach_add(torch._foreach_mul(moments, betas), squares)
    ratios = torch._foreach_div(g, torch._foreach_sqrt(torch._foreach_clamp_min(squares, 1e-30)))
    steps = (
        torch.stack(
            _here(
                [torch.as_tensor(states[id(p)][0]["step"], dtype=torch.float32) for _, p, _ in own]
            )
        )
        + 1
    )
    corrections = (1 - steps.new_tensor(betas) ** steps).sqrt()
    counts = dict[int, float]()
    for (k, p, _), part in zip(own, g, strict=True):
        counts[k] = counts.get(k, 0.0) + _shards(p) * part.numel()
    lengths = _lengths([(k, p) for k, p, _ in own], ratios, corrections)
    return {k: length / math.sqrt(counts[k]) for k, length in lengths.items()}


def _samples(groups: Sequence[Group]) -> list[list[Tensor]]:
    found: list[list[Tensor]] = [[] for _ in groups]
    for k, p, n in _strides(groups):
        found[k].append(_sample(p, n))
    return found


def _sample(tensor: Tensor, stride: int) -> Tensor:
    # contiguous: torch takes a list of such tensors by few kernels
    return local(tensor.detach()).reshape(-1)[::stride].float().contiguous()


def _shards(weight: nn.Parameter) -> float:
    """Over how many processes its entries are spread."""
    return weight.numel() / max(1, local(weight).numel())


def _placed(weight: nn.Parameter) -> Tensor:
    """The gradient, sharded as the weight is: behind sequence-parallel maps it may be a part of a
    sum.
    """
    own: Any = weight
    grad: Tensor = (
        own.grad.redistribute(placements=own.placements)
        if hasattr(own.grad, "redistribute")
        else own.grad
    )
    return grad


def _strides(groups: Sequence[Group]) -> Iterator[tuple[int, nn.Parameter, int]]:
    """Each weight with its group and the stride of its sample. Vectors are sampled whole, matrices
    of a group at about `ENTRIES` entries.
    """
    for k, group in enumerate(groups):
        stride = max(1, math.ceil(sum(p.numel() for p in group) / ENTRIES))
        yield from ((k, p, stride if p.dim() > 1 else 1) for p in group)


def _lengths(
    weights: Sequence[tuple[int, nn.Parameter]],
    samples: Sequence[Tensor],
    factors: Tensor | float = 1.0,
) -> dict[int, Tensor]:
    """The length of each group's whole weights, from samples of this process, times a factor of
    each weight.
    """
    norms = torch.stack(_here(torch._foreach_norm(list(samples))))
    norms = norms * norms.new_tensor([_shards(p) for _, p in weights]).sqrt()
    norms = norms * (factors.to(norms) if isinstance(factors, Tensor) else factors)
    counts = Counter(k for k, _ in weights)
    return dict(
        zip(counts, torch._foreach_norm(list(norms.split([*counts.values()]))), strict=True)
    )


def _here(numbers: Sequence[Tensor]) -> list[Tensor]:
    """All on the device of the first one."""
    return [number.to(numbers[0].device) for number in numbers]
