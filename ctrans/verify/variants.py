"""Section 4: Hamiltonians of architectures beside ours: parallel blocks, experts, norms without gain, free attention rows."""

from __future__ import annotations

import itertools
import math

import torch
from torch import Tensor

from ctrans.control import admissible_set
from ctrans.norm import RMSNorm, SphereNorm
from ctrans.verify.draws import below, noise, norm, one_of
from ctrans.verify.statement import Check, Statement, Trial, equal, worst


def _values(chosen: SphereNorm, P: Tensor) -> Tensor:
    """H of each token by itself."""
    return admissible_set(chosen, "peri").support(P.unsqueeze(-2))


def _size(P: Tensor, *norms: SphereNorm) -> float:
    return sum(float((P.norm(dim=-1) * admissible_set(each, "peri").maximizer(P).norm(dim=-1)).sum()) for each in norms)


def parallel(generator: torch.Generator) -> Trial:
    """v = N_1 f_1 + N_2 f_2: the maximisers together attain H_1 + H_2, and 30 random pairs do not exceed it."""
    width = 3 + below(generator, 6)
    first, second = norm(generator, width=width), norm(generator, width=width)
    P = noise(generator, 1 + below(generator, 4), width)
    H, scale = float(_values(first, P).sum() + _values(second, P).sum()), _size(P, first, second)
    best = sum(admissible_set(each, "peri").maximizer(P) for each in (first, second))
    others = first(noise(generator, 30, *P.shape)) + second(noise(generator, 30, *P.shape))
    return worst(
        equal(-(P * best).sum(), H, "the two maximisers' sum", scale),
        Trial((float(-(P * others).sum((-2, -1)).amin()) - H) / scale, "the best of 30 pairs against H_1 + H_2"),
    )


def experts(generator: torch.Generator) -> Trial:
    """v_j = sum_e g_je N_e f_e(x_j), g_j convex: a vertex of the gates with its expert's maximiser is best."""
    width, count = 3 + below(generator, 6), 2 + below(generator, 3)
    norms = [norm(generator, width=width) for _ in range(count)]
    P = noise(generator, 1 + below(generator, 4), width)
    each = torch.stack([_values(chosen, P) for chosen in norms])
    H, scale = float(each.amax(0).sum()), _size(P, *norms)
    best = torch.stack([admissible_set(chosen, "peri").maximizer(P) for chosen in norms])
    chosen = best.gather(0, each.argmax(0).reshape(1, -1, 1).expand(1, *P.shape))[0]
    gates = noise(generator, 30, count, len(P), 1).mul(3).softmax(1)
    others = (gates * torch.stack([one(noise(generator, 30, *P.shape)) for one in norms], 1)).sum(1)
    mixed = (gates * best).sum(1)
    return worst(
        equal(-(P * chosen).sum(), H, f"{count} experts, the best one for each token", scale),
        Trial((float(-(P * others).sum((-2, -1)).amin()) - H) / scale, "the best of 30 mixtures against H"),
        Trial((float(-(P * mixed).sum((-2, -1)).amin()) - H) / scale, "mixtures of the experts' maximisers against H"),
    )


def without_gain(generator: torch.Generator) -> Trial:
    """RMSNorm with gamma = 1 that is not trained: sqrt(d) sum_j |p_j|, attained at -sqrt(d) p_j/|p_j|."""
    width = 1 + below(generator, 9)
    chosen, P = RMSNorm(width, 0.0).double().requires_grad_(False), noise(generator, 1 + below(generator, 4), width)
    best = -math.sqrt(width) * P / P.norm(dim=-1, keepdim=True)
    H = math.sqrt(width) * float(P.norm(dim=-1).sum())
    others = chosen(noise(generator, 30, *P.shape))
    return worst(
        equal(_values(chosen, P).sum(), H, "H against sqrt(d) sum_j |p_j|"),
        equal(-(P * best).sum(), H, "what -sqrt(d) p/|p| attains"),
        Trial(float(-(P * others).sum((-2, -1)).amin()) / H - 1, "the best of 30 outputs"),
    )


def free_rows(generator: torch.Generator) -> Trial:
    """f = A X M' with any stochastic A, causal or not: every choice of one token per row is tried, and 50 random A."""
    tokens, width, causal = 2 + below(generator, 3), 2 + below(generator, 4), bool(below(generator, 2))
    X, P, M = noise(generator, tokens, width), noise(generator, tokens, width), noise(generator, width, width)
    gains = -P @ (X @ M.mT).mT
    allowed = torch.ones(tokens, tokens, dtype=torch.bool).tril() if causal else torch.ones(tokens, tokens, dtype=torch.bool)
    H = float(gains.masked_fill(~allowed, -math.inf).amax(-1).sum())
    choices = [range(row + 1 if causal else tokens) for row in range(tokens)]
    best = max(float(-(P * (X[list(read)] @ M.mT)).sum()) for read in itertools.product(*choices))
    scores = one_of(generator, (1.0, 5.0)) * noise(generator, 50, tokens, tokens)
    rows = scores.masked_fill(~allowed, -math.inf).softmax(-1)
    scale = float(gains.abs().sum())
    return worst(
        equal(best, H, f"{tokens} tokens, causal {causal}: every choice of one token for each row", scale),
        Trial((float(-(P * (rows @ X @ M.mT)).sum((-2, -1)).amin()) - H) / scale, "50 random rows against H"),
    )


STATEMENTS: tuple[Statement, ...] = (
    Statement(
        "parallel-blocks", 4, "ctrans", "parallel sublayers with a norm behind each: H = H_1 + H_2", Check(parallel, 1e-12)
    ),
    Statement(
        "experts",
        4,
        "ctrans",
        "a mixture of experts with convex gates and a norm behind each: H = sum_j max_e H_e(p_j), one expert for each token",
        Check(experts, 1e-12),
    ),
    Statement(
        "norm-without-gain",
        4,
        "ctrans",
        "RMSNorm without a trained gain at the output: H = sqrt(d) sum_j |p_j|, finite whatever is trained",
        Check(without_gain, 1e-12),
    ),
    Statement(
        "free-rows",
        4,
        "ctrans",
        "free attention rows at fixed M = O V: H = sum_i max over the j that i reads of -<p_i, M x_j>, hard attention",
        Check(free_rows, 1e-12),
    ),
)
