"""Scores of architecture search that need no training, as baselines: each a number of a model at
its initial weights.
"""

from __future__ import annotations

import copy
import math

import torch
from torch import Tensor, nn

from ctrans.model.gpt import GPT


def gradient_scores(model: GPT, tokens: Tensor, targets: Tensor) -> dict[str, float]:
    """The gradient's norm; SNIP, sum |w dL/dw| (Lee et al. 2019); GradNorm, sum over weights of
    |dL/dW|_F (Abdelfattah et al. 2021).
    """
    weights = [parameter for parameter in model.parameters() if parameter.requires_grad]
    _, loss = model(tokens, targets)
    gradients = torch.autograd.grad(loss, weights, materialize_grads=True)
    return {
        "gradient norm": float(torch.cat([g.flatten() for g in gradients]).norm()),
        "SNIP": float(
            sum((w.detach() * g).abs().sum() for w, g in zip(weights, gradients, strict=True))
        ),
        "GradNorm": float(sum(g.norm() for g in gradients)),
    }


def synflow(model: GPT) -> float:
    """log10 of sum w dR/dw, R the sum of the last state for weights |w| and a state of ones (Tanaka
    et al. 2020), without any norm: behind one R would be the same whatever the weights.
    """
    positive = copy.deepcopy(model)
    for sublayer in positive.depth.sublayers:
        sublayer.input_norm = sublayer.output_norm = sublayer.state_norm = None
    weights = [parameter for parameter in positive.depth.parameters() if parameter.requires_grad]
    with torch.no_grad():
        for weight in weights:
            weight.abs_()
    tokens = torch.zeros(1, model.config.context, dtype=torch.int64)
    total = positive.depth(torch.ones_like(positive.embed(tokens))).sum()
    gradients = torch.autograd.grad(total, weights, materialize_grads=True)
    flow = float(sum((w.detach() * g).sum() for w, g in zip(weights, gradients, strict=True)))
    return math.log10(flow) if 0 < flow < math.inf else math.nan


def naswot(model: GPT, tokens: Tensor) -> float:
    """log |det K|, K_ij the number of hidden units of all FFNs whose signs agree for sequences i
    and j, averaged over their tokens (Mellor et al. 2021); as log(unit share) plus a ridge of 1e-6,
    since few sequences have nearly equal means.
    """
    codes: list[Tensor] = []

    def keep(module: nn.Module, given: tuple[Tensor, ...], output: Tensor) -> None:
        codes.append((output.detach() > 0).to(torch.float64).mean(-2))

    handles = []
    for sublayer in model.depth.sublayers:
        if sublayer.kind == "ffn":
            wide = [
                part
                for part in sublayer.field.modules()
                if isinstance(part, nn.Linear) and part.out_features > part.in_features
            ]
            handles += [part.register_forward_hook(keep) for part in wide[:1]]
    try:
        with torch.no_grad():
            model.depth(model.embed(tokens))
    finally:
        for handle in handles:
            handle.remove()
    if not codes:
        return float("nan")
    code = torch.cat(codes, dim=-1)
    kernel = (code @ code.mT + (1 - code) @ (1 - code).mT) / code.shape[-1]
    return float(
        torch.linalg.slogdet(kernel + 1e-6 * torch.eye(len(kernel), dtype=torch.float64)).logabsdet
    )
