"""How near a training is to the edge of stability of its optimiser: at a larger curvature the steps
along the sharpest direction would grow.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ctrans.measure.backward.curvature import edge
from ctrans.measure.walk import Model
from ctrans.training.monitor.sharpness import sharpness
from ctrans.training.monitor.updates import adam_states, innermost, rates_of

Options = Mapping[str, Any]
"""The options of a group of weights."""


@dataclass(frozen=True)
class Stability:
    """An optimiser is stable while lambda_max(S H S) is at most `edge`. H is the Hessian by the
    `weights` that it trains, and S = diag(`scales`).

    With unlike learning rates a scale has sqrt(lr/lr_max), and `edge` is that of lr_max.
    """

    weights: list[nn.Parameter]
    scales: list[Tensor | float]
    edge: float


def gradient_descents_edge(rate: float, options: Options) -> float:
    """2 (1 + b)/((1 - d) lr) for v <- b v + (1 - d) g, w <- w - lr v, with momentum b and dampening
    d; 2 (1 + b)/((1 + 2 b) lr) for Nesterov's w <- w - lr (g + b v), d = 0.

    On lambda/2 w^2 the second has the characteristic polynomial z^2 - (1 + b)(1 - lr lambda) z + b
    (1 - lr lambda). Its roots lie in the unit disc if and only if lr lambda (1 + 2 b) <= 2 (1 + b).
    """
    momentum = float(options.get("momentum", 0.0))
    if options.get("nesterov"):
        return 2 * (1 + momentum) / ((1 + 2 * momentum) * rate)
    kept = 1.0
    if momentum:
        kept = 1 - float(options.get("dampening", 0.0))
    if kept <= 0:
        return math.inf
    return 2 * (1 + momentum) / (kept * rate)


def adams_edge(rate: float, options: Options) -> float:
    """2 (1 + b)/((1 - b) lr), b = beta_1: 38/lr at 0.9 (Cohen et al. 2022, arXiv 2207.14484)."""
    return edge(rate, float(options["betas"][0]))


EDGES: dict[str, Callable[[float, Options], float]] = {
    "SGD": gradient_descents_edge,
    "Adam": adams_edge,
    "AdamW": adams_edge,
    "FusedAdam": adams_edge,
}
"""Functions of the largest learning rate and the options, by the name of the optimiser's class.
NAdam, RAdam, RMSprop and others step in other ways.
"""
SHARED = ("momentum", "dampening", "nesterov", "maximize", "betas", "amsgrad")
"""Options that must be the same for all weights."""


def adam_scales(
    weights: Sequence[nn.Parameter], optimizer: torch.optim.Optimizer
) -> dict[int, Tensor]:
    """P^-1/2 for each weight that has Adam's moments, by id, where P = (1 - beta_1^t)(sqrt(nu) +
    eps) and nu are the second moments over 1 - beta_2^t, their maximum with AMSGrad.

    Source: Cohen et al. 2022 (arXiv 2207.14484, section 2).
    """
    states = adam_states(optimizer)
    scales = {}
    for weight in weights:
        if id(weight) not in states:
            continue
        state, options = states[id(weight)]
        steps = float(state["step"])
        beta_1, beta_2 = options["betas"]
        squares = state["exp_avg_sq"]
        if options.get("amsgrad"):
            squares = state["max_exp_avg_sq"]
        root = (squares / (1 - beta_2**steps)).sqrt() + options["eps"]
        scales[id(weight)] = ((1 - beta_1**steps) * root).rsqrt()
    return scales


def trained_by(
    weights: Sequence[nn.Parameter], optimizer: torch.optim.Optimizer | None
) -> list[nn.Parameter]:
    """Those of the weights that train: all that need gradients and are in a group of it, if there
    is an optimiser.
    """
    trained = [weight for weight in weights if weight.requires_grad]
    if optimizer is None:
        return trained
    grouped = {id(weight) for group in optimizer.param_groups for weight in group["params"]}
    return [weight for weight in trained if id(weight) in grouped]


def stability_of(
    weights: Sequence[nn.Parameter], optimizer: torch.optim.Optimizer
) -> Stability | None:
    """None for an optimiser whose edge is not known, before Adam's first step, and if groups of
    weights differ in more than their rates and decays.
    """
    name = type(innermost(optimizer)).__name__
    groups = [group for group in optimizer.param_groups if group["params"]]
    if name not in EDGES or not groups:
        return None
    options = groups[0]
    if any(group.get(key) != options.get(key) for group in groups for key in SHARED):
        return None
    relative, _ = rates_of(optimizer)
    if not relative or options.get("maximize"):
        return None
    scales: dict[int, Tensor | float] = {id(weight): 1.0 for weight in weights}
    if "betas" in options:
        scales = dict(adam_scales(weights, optimizer))
    trained = [weight for weight in weights if id(weight) in scales]
    if not trained:
        return None
    return Stability(
        trained,
        [scales[id(weight)] * math.sqrt(relative[id(weight)]) for weight in trained],
        EDGES[name](max(float(group["lr"]) for group in groups), options),
    )


def over_edge(
    model: Model,
    trained: Sequence[nn.Parameter],
    tokens: Tensor,
    targets: Any,
    optimizer: torch.optim.Optimizer | None,
) -> dict[str, float]:
    """The sharpness by the weights that train. Where the optimiser's edge of stability is known,
    also the edge, the sharpness that it bounds and their ratio.
    """
    if not trained:
        return {}
    figures = {"sharpness": sharpness(model, trained, tokens, targets)}
    stability = None
    if optimizer is not None:
        stability = stability_of(trained, optimizer)
    if stability is None:
        return figures
    preconditioned = figures["sharpness"]
    if any(isinstance(scale, Tensor) or scale != 1 for scale in stability.scales):
        preconditioned = sharpness(model, stability.weights, tokens, targets, stability.scales)
        figures["preconditioned"] = preconditioned
    figures["edge"] = stability.edge
    figures["preconditioned_over_edge"] = preconditioned / stability.edge
    return figures
