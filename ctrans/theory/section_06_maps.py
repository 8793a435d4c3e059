"""Section 6: bounds of attention and of the FFN."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ctrans.base.draw import Draw
from ctrans.dynamics.fields import Attention, spectral_norm
from ctrans.theory.random_models import (
    random_model,
)
from ctrans.theory.statement import Trial, Trials, at_most, statement

SECTION = 6


def _attention(draw: Draw, heads: int, *, causal: bool) -> Attention:
    attention = Attention(6, heads, bias=False, causal=causal).double()
    attention.requires_grad_(requires_grad=False)
    for parameter in attention.parameters():
        parameter.copy_(draw.normal(*parameter.shape))
    return attention


@statement(
    "eq-81",
    "Kan, eq. 81",
    "attention: |f(X)_i| <= sum_h |W_h V_h| max_j |x_j|, whatever the number of tokens; attained",
    printed="|f(X)| <= sqrt(n) sum_h |W_h V_h| |X|",
)
def attention_rows(draw: Draw, *, printed: bool) -> Trials:
    """|f(X)_i| <= sum_h |W_h V_h| max_j |x_j|, attained by equal tokens for one head.

    Printed: |f(X)| <= sqrt(n) sum_h |W_h V_h| |X|.
    """
    attention = _attention(draw, 2, causal=draw.flag())
    x = draw.log_uniform(-1, 1) * draw.normal(draw.choice((1, 3, 8)), 6)
    out = attention(x)
    gain = attention.bound().gain
    if printed:
        return at_most(
            out.norm(), math.sqrt(len(x)) * gain * float(x.norm()), f"|f(X)|, {len(x)} tokens"
        )
    bounded = at_most(
        out.norm(dim=-1).max(), gain * float(x.norm(dim=-1).max()), f"max |f(X)_i|, {len(x)} tokens"
    )
    single = _attention(draw, 1, causal=False)
    W = single.out.weight
    V = single.qkv.weight.chunk(3)[2]
    top = torch.linalg.svd(W @ V).Vh[0].repeat(len(x), 1)
    attained = abs(float(single(top).norm() / top.norm()) / single.bound().gain - 1)
    return [
        bounded,
        Trial(
            attained,
            f"{len(x)} equal tokens, one head: the gain misses its bound by {attained:.1g}",
        ),
    ]


@statement(
    "ffn-bound",
    "ctrans, on Kan, appendix G",
    "FFN with abs(phi(z)) <= abs(z): |f(x)| <= |W_2|(|W_1||x| + |b_1|) + |b_2|",
)
def feed_forward(draw: Draw) -> Trial:
    """|f(x)| <= |W_2||W_1||x| without biases, plus the terms of biases."""
    model = random_model(draw, "none", bias=draw.flag())
    ffn = model.depth.sublayers[1].field
    x = draw.log_uniform(-2, 2) * draw.normal(4, model.config.width)
    outer = spectral_norm(ffn.down.weight)
    inner = spectral_norm(ffn.up.weight)
    inner_offset = _length(ffn.up.bias)
    outer_offset = _length(ffn.down.bias)
    bounds = outer * (inner * x.norm(dim=-1) + inner_offset) + outer_offset
    return at_most(
        (ffn(x).norm(dim=-1) / bounds).max(), 1.0, f"|f(x)| over its bound, {ffn.activation}"
    )


def _length(bias: Tensor | None) -> float:
    if bias is None:
        return 0.0
    return float(bias.norm())
