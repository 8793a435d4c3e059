"""One step of the optimiser on a sample of the weights: |W' - W|/|W|, and gradients over the root
of Adam's second moments.
"""

from __future__ import annotations

import cmath
import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ctrans.training.monitor.hooks import local
from ctrans.training.monitor.training_measures import GaugeAt

ENTRIES = 8192
"""The number of entries of the sample of a group of weights."""
Group = Sequence[nn.Parameter]
"""The weights of a sublayer, or those outside of the depth."""
AdamState = tuple[dict[str, Any], dict[str, Any]]
"""The optimiser's state of a parameter, and the options of its group."""


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
        """`update`, `unmoved`, `lost_entries`, `rate_share` and `decay_share` if there is a sample
        of before the step, with an optimiser also `ungrouped`; `adam_gradient_ratio` if it has
        Adam's second moments.

        `cut` is a factor of the gradients that is yet to be applied.
        """
        states: dict[int, AdamState] = {}
        rates: dict[int, float] = {}
        decays: dict[int, float] = {}
        if optimizer is not None:
            states = adam_states(optimizer)
            # RAdam's first steps are far shorter than its rate, by design
            if type(innermost(optimizer)).__name__ != "RAdam":
                rates, decays = rates_of(optimizer)
        by_group: dict[str, dict[int, Tensor]] = {}
        sampled = [
            (k, p, stride)
            for k, p, stride in _strides(groups)
            if p.grad is not None and not p.grad.is_sparse and id(p) in states
        ]
        if optimizer is not None and sampled:
            known = _with_known_gradients(sampled, states, optimizer)
            by_group["adam_gradient_ratio"] = _gradient_ratio(known, states, cut)
        before = self.before
        self.before = None
        if before is not None:
            by_group |= _step(groups, before, rates, decays, grouped_by(optimizer))
        figures: dict[GaugeAt, Tensor] = {}
        for name, values in by_group.items():
            for k, value in values.items():
                if k + 1 < len(groups):
                    figures[name, k] = value
                elif name in ("update", "adam_gradient_ratio", "ungrouped"):
                    figures[name + "_outside", 0] = value
        return figures


def _step(
    groups: Sequence[Group],
    before: list[list[Tensor]],
    rates: Mapping[int, float],
    decays: Mapping[int, float],
    grouped: Collection[int] | None,
) -> dict[str, dict[int, Tensor]]:
    """The figures of one step by group, of all groups at once: on a GPU each call of torch
    counts. `grouped` are the ids of the optimiser's weights, None if it is unknown.
    """
    after = _samples(groups)
    # a group that was sharded since then has samples of other shapes
    comparable = [
        k
        for k, parts in enumerate(before)
        if parts and [part.shape for part in parts] == [part.shape for part in after[k]]
    ]
    if not comparable:
        return {}
    weights = [(k, p) for k in comparable for p in groups[k]]
    old = [part for k in comparable for part in before[k]]
    new = [part for k in comparable for part in after[k]]
    sizes = {k: length.clamp(min=1e-30) for k, length in _lengths(weights, old).items()}
    changes = torch._foreach_sub(new, old)
    update = {k: length / sizes[k] for k, length in _lengths(weights, changes).items()}
    figures = {
        "update": update,
        "unmoved": _unmoved(weights, changes),
    }
    if grouped is not None:
        figures["lost_entries"] = _lost_entries(weights, changes, grouped)
        figures["ungrouped"] = _ungrouped(weights, changes, grouped)
    # a step is not longer where weights have grown
    cut = torch._foreach_clamp_max(torch._foreach_clamp_min(old, -1.0), 1.0)
    for name, shares, parts in (("rate_share", rates, cut), ("decay_share", decays, old)):
        factors = [shares.get(id(p), 0.0) for _, p in weights]
        with_share = {k for (k, _), factor in zip(weights, factors, strict=True) if factor}
        lengths: dict[int, Tensor] = {}
        if with_share:
            lengths = _lengths(weights, torch._foreach_mul(parts, factors))
        figures[name] = {k: lengths[k] / sizes[k] for k in lengths if k in with_share}
    return figures


def _unmoved(
    weights: Sequence[tuple[int, nn.Parameter]], changes: Sequence[Tensor]
) -> dict[int, Tensor]:
    """The share of each group's matrices whose change is 0; nothing for groups without any."""
    matrices = [(k, part) for (k, p), part in zip(weights, changes, strict=True) if p.dim() > 1]
    if not matrices:
        return {}
    is_still = torch.stack(_here(torch._foreach_norm([part for _, part in matrices]))) == 0
    counts = Counter(k for k, _ in matrices)
    by_group = is_still.split([*counts.values()])
    return {k: part.float().mean() for k, part in zip(counts, by_group, strict=True)}


def _lost_entries(
    weights: Sequence[tuple[int, nn.Parameter]], changes: Sequence[Tensor], grouped: Collection[int]
) -> dict[int, Tensor]:
    """The share of entries whose change is 0, of each group's matrices of less than float32 that a
    step changes at all. An optimiser with copies in float32 has other weights than the model's, and
    loses nothing.
    """
    still: dict[int, Tensor] = {}
    entries: dict[int, Tensor] = {}
    for (k, p), change in zip(weights, changes, strict=True):
        if p.dim() < 2 or not p.is_floating_point() or id(p) not in grouped:
            continue
        if torch.finfo(p.dtype).bits < 32:
            is_still = (change == 0).float()
            moves = (~is_still.bool()).any() * _entries_for_each(p, change)
            still[k] = still.get(k, 0.0) + moves * is_still.sum()
            entries[k] = entries.get(k, 0.0) + moves * is_still.numel()
    return {k: still[k] / entries[k] for k in still}


def _ungrouped(
    weights: Sequence[tuple[int, nn.Parameter]], changes: Sequence[Tensor], grouped: Collection[int]
) -> dict[int, Tensor]:
    """The share of each group's trainable matrices that the optimiser does not have and the step
    does not change: another optimiser may have them.
    """
    shares: dict[int, Tensor] = {}
    trainable = [
        (k, p, change)
        for (k, p), change in zip(weights, changes, strict=True)
        if p.dim() > 1 and p.requires_grad
    ]
    counts = Counter(k for k, _, _ in trainable)
    for k, p, change in trainable:
        share = change.new_zeros(())
        if id(p) not in grouped:
            share = (~change.any()).to(change) / counts[k]
        shares[k] = shares.get(k, 0.0) + share
    return shares


def grouped_by(optimizer: torch.optim.Optimizer | None) -> set[int] | None:
    """The ids of the weights that an optimiser has; None if it is unknown."""
    if optimizer is None:
        return None
    return {id(p) for group in optimizer.param_groups for p in group["params"]}


def steps_taken(optimizer: torch.optim.Optimizer | None) -> float | None:
    """The most steps that the optimiser has counted for a weight. None if it counts none, or has no
    state yet: a wrapper may keep it elsewhere.
    """
    if optimizer is None:
        return None
    state: Mapping[Any, dict[str, Any]] = optimizer.state
    counted = [float(of_weight["step"]) for of_weight in state.values() if "step" in of_weight]
    return max(counted, default=None)


def adam_states(optimizer: torch.optim.Optimizer) -> dict[int, AdamState]:
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


def innermost(optimizer: Any) -> Any:
    """The optimiser that steps, within those of libraries that wrap it, as Accelerate does."""
    while isinstance(getattr(optimizer, "optimizer", None), torch.optim.Optimizer):
        optimizer = optimizer.optimizer
    return optimizer


def sign_of_step(optimizer: torch.optim.Optimizer | None) -> float:
    """1 for an optimiser that lowers what the gradients are of, -1 for one that raises it
    (`maximize=True`), nan if its groups differ.
    """
    if optimizer is None:
        return 1.0
    raises = {bool(group.get("maximize")) for group in optimizer.param_groups if group["params"]}
    if len(raises) > 1:
        return math.nan
    if True in raises:
        return -1.0
    return 1.0


def coupled_decay(optimizer: torch.optim.Optimizer, options: Mapping[str, Any]) -> float | None:
    """lambda, where the optimiser adds lambda w to the gradient before it takes its moments, as
    Adam does; 0 where it decays the weights apart from them, as AdamW does. None if it is unknown.
    `options` are those of a group of an optimiser with Adam's moments.
    """
    decay = float(options.get("weight_decay") or 0.0)
    kind = innermost(optimizer)
    if decay == 0:
        return 0.0
    if "decoupled_weight_decay" in options:
        is_decoupled = bool(options["decoupled_weight_decay"])
    elif hasattr(kind, "adam_w_mode"):  # the FusedAdam of Apex and DeepSpeed
        is_decoupled = bool(kind.adam_w_mode)
    elif type(kind).__name__ == "AdamW":
        is_decoupled = True
    else:
        return None
    if is_decoupled:
        return 0.0
    return decay


def share_of_decay(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> float:
    """The share that weight decay lambda takes of a weight in a step in the long run: eta lambda,
    where the optimiser subtracts it.

    torch's SGD adds it to the gradient. With momentum mu and dampening d, a weight without another
    gradient follows

        b <- mu b + (1 - d) lambda w,    w <- w - eta b    (Nesterov: d = 0, eta (lambda w + mu b))

    so with l = eta (1 - d) lambda it shrinks by the larger root of z^2 - (1 + mu - l) z + mu = 0;
    Nesterov's is that of z^2 - (1 + mu - l - mu l) z + mu (1 - l) = 0. For small l the share is
    l/(1 - mu).
    """
    decay = float(group.get("weight_decay") or 0.0) * float(group["lr"] or 0.0)
    momentum = float(group.get("momentum") or 0.0)
    if type(innermost(optimizer)).__name__ != "SGD" or not 0 < momentum < 1:
        return decay
    decay *= 1 - float(group.get("dampening") or 0.0)
    trace = 1 + momentum - decay
    determinant = momentum
    if group.get("nesterov"):
        trace -= momentum * decay
        determinant -= momentum * decay
    root = cmath.sqrt(trace**2 - 4 * determinant)
    left = max(abs(trace + root), abs(trace - root)) / 2
    if left >= 1:  # the steps diverge
        return decay / (1 - momentum)
    return 1 - left


def rates_of(optimizer: torch.optim.Optimizer) -> tuple[dict[int, float], dict[int, float]]:
    """The learning rate of each parameter over the largest one, by id, and this times its weight
    decay, without a decay that is in Adam's moments. Nothing if all rates are 0.
    """
    groups = {
        id(p): group
        for group in optimizer.param_groups
        if group["lr"] is not None
        for p in group["params"]
    }
    largest = max((float(group["lr"]) for group in groups.values()), default=0.0)
    if not largest > 0:
        return {}, {}
    rates = {key: float(group["lr"]) / largest for key, group in groups.items()}
    decays = dict[int, float]()
    for key in rates:
        group = groups[key]
        decays[key] = share_of_decay(optimizer, group) / largest
        if "betas" in group and coupled_decay(optimizer, group):
            decays[key] = 0.0
    return rates, decays


def settings(optimizer: torch.optim.Optimizer | None) -> dict[str, Any]:
    """`learning_rate` and `adam_memory` of an optimiser that has them."""
    if optimizer is None:
        return {}
    groups = optimizer.param_groups
    rates = [float(group["lr"]) for group in groups if group["lr"] is not None]
    betas = [float(group["betas"][1]) for group in groups if "betas" in group]
    figures = {}
    if rates:
        figures["learning_rate"] = max(rates)
    if betas:
        figures["adam_memory"] = 1 / max(1e-12, 1 - max(betas))
    return figures


class _AdamSample(NamedTuple):
    """A weight of group k, the stride of its sample, and lambda of a decay that is in Adam's
    moments.
    """

    k: int
    weight: nn.Parameter
    stride: int
    decay: float


def _with_known_gradients(
    sampled: Sequence[tuple[int, nn.Parameter, int]],
    states: Mapping[int, AdamState],
    optimizer: torch.optim.Optimizer,
) -> list[_AdamSample]:
    """The weights of the groups for which it is known what Adam's moments are of."""
    decays = [coupled_decay(optimizer, states[id(p)][1]) for _, p, _ in sampled]
    unknown = {k for (k, _, _), decay in zip(sampled, decays, strict=True) if decay is None}
    return [
        _AdamSample(k, p, stride, decay)
        for (k, p, stride), decay in zip(sampled, decays, strict=True)
        if decay is not None and k not in unknown
    ]


def _gradient_ratio(
    sampled: Sequence[_AdamSample], states: Mapping[int, AdamState], cut: Tensor | None
) -> dict[int, Tensor]:
    """rms of g/sqrt(nu) by group, where nu = (beta_2 nu' + (1 - beta_2) g^2)/(1 - beta_2^t) and g
    is what the optimiser takes for this step's gradient: dL/dW, plus lambda W if its decay lambda
    is coupled.

    It is 1 for constant gradients, and at most 1/sqrt(1 - beta_2). Source: Wortsman et al. (arXiv
    2304.13013, section 3.4).
    """
    if not sampled:
        return {}
    g = []
    for _, p, stride, decay in sampled:
        part = _sample(_placed_gradient(p), stride)
        if cut is not None:
            part = part * cut.to(part)
        if states[id(p)][1].get("maximize"):
            part = -part
        if decay:
            part = part + decay * _sample(p, stride)
        g.append(part)
    moments = []
    betas = []
    steps = []
    for _, p, stride, _ in sampled:
        state, options = states[id(p)]
        moments.append(_sample(state["exp_avg_sq"], stride))
        betas.append(float(options["betas"][1]))
        steps.append(torch.as_tensor(state["step"], dtype=torch.float32))
    squares = torch._foreach_mul(torch._foreach_mul(g, g), [1 - beta for beta in betas])
    squares = torch._foreach_add(torch._foreach_mul(moments, betas), squares)
    ratios = torch._foreach_div(g, torch._foreach_sqrt(torch._foreach_clamp_min(squares, 1e-30)))
    t = torch.stack(_here(steps)) + 1
    corrections = (1 - t.new_tensor(betas) ** t).sqrt()
    counts = dict[int, float]()
    for (k, p, _, _), part in zip(sampled, g, strict=True):
        counts[k] = counts.get(k, 0.0) + _entries_for_each(p, part) * part.numel()
    lengths = _lengths([(k, p) for k, p, _, _ in sampled], ratios, corrections)
    return {k: length / math.sqrt(counts[k]) for k, length in lengths.items()}


def _samples(groups: Sequence[Group]) -> list[list[Tensor]]:
    samples: list[list[Tensor]] = [[] for _ in groups]
    for k, p, stride in _strides(groups):
        samples[k].append(_sample(p, stride))
    return samples


def _sample(tensor: Tensor, stride: int) -> Tensor:
    # contiguous: torch takes a list of such tensors by few kernels
    return local(tensor.detach()).reshape(-1)[::stride].float().contiguous()


def _entries_for_each(weight: nn.Parameter, sample: Tensor) -> float:
    """How many entries of the whole weight, over all processes, each entry of its sample stands
    for. Sums over samples need this factor: vectors are sampled whole, and would outweigh matrices.
    """
    return weight.numel() / max(1, sample.numel())


def _placed_gradient(weight: nn.Parameter) -> Tensor:
    """The gradient, sharded as the weight is: behind sequence-parallel maps it may be a part of a
    sum.
    """
    gradient: Any = weight.grad
    if hasattr(gradient, "redistribute"):
        gradient = gradient.redistribute(placements=weight.placements)  # type: ignore[attr-defined]  # a DTensor
    placed: Tensor = gradient
    return placed


def _strides(groups: Sequence[Group]) -> Iterator[tuple[int, nn.Parameter, int]]:
    """Each weight with its group and the stride of its sample. Vectors are sampled whole, matrices
    of a group at about `ENTRIES` entries.
    """
    for k, group in enumerate(groups):
        stride = max(1, math.ceil(sum(p.numel() for p in group) / ENTRIES))
        for p in group:
            if p.dim() > 1:
                yield k, p, _without_common_factor(stride, local(p).numel())
            else:
                yield k, p, 1


def _without_common_factor(stride: int, entries: int) -> int:
    """The least stride from this one on that has no factor in common with the number of entries: a
    stride of 64 would read the same few columns of each row of 1024.
    """
    while entries and math.gcd(stride, entries) > 1:
        stride += 1
    return stride


def _lengths(
    weights: Sequence[tuple[int, nn.Parameter]],
    samples: Sequence[Tensor],
    factors: Tensor | None = None,
) -> dict[int, Tensor]:
    """The length of each group's whole weights, from samples of this process, times a factor of
    each weight: the root of the sum over weights of n/m |sample|^2 factor^2, of m out of n entries.
    """
    norms = torch.stack(_here(torch._foreach_norm(list(samples))))
    rates = [_entries_for_each(p, part) for (_, p), part in zip(weights, samples, strict=True)]
    norms = norms * norms.new_tensor(rates).sqrt()
    if factors is not None:
        norms = norms * factors.to(norms)
    counts = Counter(k for k, _ in weights)
    by_group = norms.split([*counts.values()])
    return dict(zip(counts, torch._foreach_norm(list(by_group)), strict=True))


def _here(numbers: Sequence[Tensor]) -> list[Tensor]:
    """All on the device of the first one."""
    return [number.to(numbers[0].device) for number in numbers]
