"""Section 4: Hamiltonians of parallel blocks, experts, norms without gain and free attention
rows.
"""

from __future__ import annotations

import itertools
import math

import torch
from torch import Tensor

from ctrans.base.draw import Draw
from ctrans.control.sets_by_norm import image_of
from ctrans.dynamics.norm import RMSNorm, SphereNorm
from ctrans.theory.payoffs import largest_payoff, none_better, payoff
from ctrans.theory.random_norms import random_norm
from ctrans.theory.statement import Trial, Trials, equal, statement

SECTION = 4


def _best(P: Tensor, norms: list[SphereNorm]) -> tuple[Tensor, Tensor, float]:
    """H of each token behind each norm, (norms, tokens), the maximisers, (norms, tokens, width),
    and a scale of payoffs.
    """
    values = torch.stack([image_of(norm).support(P.unsqueeze(-2)) for norm in norms])
    best = torch.stack([image_of(norm).maximizer(P) for norm in norms])
    return values, best, sum(float(largest_payoff(P, f)) for f in best)


@statement(
    "parallel-blocks", "ctrans", "parallel sublayers with a norm behind each: H = H_1 + H_2", 1e-12
)
def parallel(draw: Draw) -> Trials:
    """v = N_1 f_1 + N_2 f_2: the two maximisers attain H_1 + H_2, and 30 random pairs do not exceed
    it.
    """
    width = 3 + draw.integer(6)
    first = random_norm(draw, width=width)
    second = random_norm(draw, width=width)
    P = draw.rows(width)
    values, best, scale = _best(P, [first, second])
    H = float(values[0].sum() + values[1].sum())
    random_pairs = first(draw.normal(30, *P.shape)) + second(draw.normal(30, *P.shape))
    return [
        equal(payoff(P, best[0] + best[1]), H, "the two maximisers' sum", scale),
        none_better(P, random_pairs, H, scale, "the best of 30 pairs against H_1 + H_2"),
    ]


@statement(
    "experts",
    "ctrans",
    "a mixture of experts with convex gates and a norm behind each: H = sum_j max_e H_e(p_j), one"
    " expert for each token",
    1e-12,
)
def experts(draw: Draw) -> Trials:
    """v_j = sum_e g_je N_e f_e(x_j), g_j convex: a vertex of the gates with its expert's maximiser
    is best.
    """
    width = 3 + draw.integer(6)
    count = 2 + draw.integer(3)
    norms = [random_norm(draw, width=width) for _ in range(count)]
    P = draw.rows(width)
    values, best, scale = _best(P, norms)
    H = float(values.amax(0).sum())
    one_expert = best[values.argmax(0), torch.arange(len(P))]
    gates = draw.normal(30, count, len(P), 1).mul(3).softmax(1)
    velocities = torch.stack([norm(draw.normal(30, *P.shape)) for norm in norms], 1)
    mixtures = (gates * velocities).sum(1)
    return [
        equal(payoff(P, one_expert), H, f"{count} experts, the best one for each token", scale),
        none_better(P, mixtures, H, scale, "the best of 30 mixtures against H"),
        none_better(
            P, (gates * best).sum(1), H, scale, "mixtures of the experts' maximisers against H"
        ),
    ]


@statement(
    "norm-without-gain",
    "ctrans",
    "RMSNorm without a trained gain at the output: H = sqrt(d) sum_j |p_j|, finite whatever is"
    " trained",
    1e-12,
)
def without_gain(draw: Draw) -> Trials:
    """RMSNorm with gamma = 1 that is not trained: sqrt(d) sum_j |p_j|, attained at -sqrt(d)
    p_j/|p_j|.
    """
    width = 1 + draw.integer(9)
    norm = RMSNorm(width, 0.0).double().requires_grad_(requires_grad=False)
    P = draw.rows(width)
    best = -math.sqrt(width) * P / P.norm(dim=-1, keepdim=True)
    H = math.sqrt(width) * float(P.norm(dim=-1).sum())
    return [
        equal(image_of(norm).support(P.unsqueeze(-2)).sum(), H, "H against sqrt(d) sum_j |p_j|"),
        equal(payoff(P, best), H, "the value of -sqrt(d) p/|p|"),
        Trial(
            float(payoff(P, norm(draw.normal(30, *P.shape))).max()) / H - 1,
            "the best of 30 outputs",
        ),
    ]


@statement(
    "free-rows",
    "ctrans",
    "free attention rows at fixed M = O V: H = sum_i max over the j that i reads of -<p_i, M x_j>,"
    " hard attention",
    1e-12,
)
def free_rows(draw: Draw) -> Trials:
    """f = A X M' with any stochastic A, causal or not: against every choice of one token per row,
    and 50 random A.
    """
    tokens = 2 + draw.integer(3)
    width = 2 + draw.integer(4)
    causal = draw.flag()
    X = draw.normal(tokens, width)
    P = draw.normal(tokens, width)
    M = draw.normal(width, width)
    gains = -P @ (X @ M.mT).mT
    hidden = torch.zeros(tokens, tokens, dtype=torch.bool)
    readable = [range(tokens)] * tokens
    if causal:
        hidden = torch.ones(tokens, tokens, dtype=torch.bool).triu(1)
        readable = [range(row + 1) for row in range(tokens)]
    H = float(gains.masked_fill(hidden, -math.inf).amax(-1).sum())
    scale = gains.abs().sum()
    choices = itertools.product(*readable)
    best = max(float(payoff(P, X[list(choice)] @ M.mT)) for choice in choices)
    scores = draw.choice((1.0, 5.0)) * draw.normal(50, tokens, tokens)
    rows = scores.masked_fill(hidden, -math.inf).softmax(-1)
    return [
        equal(
            best,
            H,
            f"{tokens} tokens, causal {causal}: every choice of one token for each row",
            scale,
        ),
        none_better(P, rows @ X @ M.mT, H, scale, "50 random rows against H"),
    ]
