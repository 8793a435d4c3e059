"""torch's `F.multi_head_attention_forward` as the operations that it consists of, so that its
linear maps and its rows are seen like those of other code.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

FUNCTION: Callable[..., Any] = F.multi_head_attention_forward
SIGNATURE = inspect.signature(FUNCTION)
UNUSUAL = ("bias_k", "bias_v", "add_zero_attn", "static_k", "static_v")
"""Arguments that add tokens, or replace keys and values: with them a call stays one operation."""


def taken_apart(arguments: tuple[Any, Any]) -> tuple[Tensor, Tensor | None] | None:
    """What a call with these arguments makes (tokens, batch, width), and its rows if they are asked
    for; None for a call with other options. The products are torch's own, so that the bits are.
    """
    named = _by_name(arguments)
    query: Tensor = named["query"]
    is_random = named["training"] and named["dropout_p"]
    if query.dim() != 3 or _unusual(named) or is_random:
        return None
    tokens, batch, width = query.shape
    heads = named["num_heads"]
    q, k, v = _maps(named)
    mask = _mask(named, q, batch)
    rows = None
    if named["need_weights"]:
        q = q * math.sqrt(1 / q.shape[-1])
        scores = torch.bmm(q, k.mT) if mask is None else torch.baddbmm(mask, q, k.mT)
        rows = scores.softmax(-1)
        averages = torch.bmm(rows, v)
        rows = rows.view(batch, heads, tokens, -1)
        if named["average_attn_weights"]:
            rows = rows.mean(1)
    else:
        q, k, v = (each.unflatten(0, (batch, heads)) for each in (q, k, v))
        if mask is not None:
            mask = mask.expand(batch * heads, -1, -1).unflatten(0, (batch, heads))
        averages = F.scaled_dot_product_attention(q, k, v, mask).flatten(0, 1)
    joined = averages.transpose(0, 1).reshape(tokens, batch, width)
    return F.linear(joined, named["out_proj_weight"], named["out_proj_bias"]), rows


def why_whole(arguments: tuple[Any, Any]) -> str:
    """How a call that is not taken apart differs from others, in words."""
    unusual = _unusual(_by_name(arguments))
    if not unusual:
        return "of another form than (tokens, sequences, width), whose rows are not read"
    return (
        f"with keys of its own beside those of the tokens ({', '.join(unusual)}), so that its rows"
        " are not read"
    )


def _by_name(arguments: tuple[Any, Any]) -> dict[str, Any]:
    args, kwargs = arguments
    bound = SIGNATURE.bind(*args, **kwargs)
    bound.apply_defaults()
    return dict(bound.arguments)


def _unusual(named: dict[str, Any]) -> list[str]:
    """The arguments of a call that keep it one operation."""
    return [name for name in UNUSUAL if named[name] is not None and named[name] is not False]


def _maps(named: dict[str, Any]) -> list[Tensor]:
    """Queries, keys and values (batch * heads, tokens, features), by as many products as torch's:
    one product for what has the same input.
    """
    query, key = named["query"], named["key"]
    weight = named["in_proj_weight"]
    bias = named["in_proj_bias"]
    if named["use_separate_proj_weight"]:
        weights = [named[f"{role}_proj_weight"] for role in ("q", "k", "v")]
        maps = _products([query, key, named["value"]], weights, bias)
    elif key is not named["value"]:
        maps = _products([query, key, named["value"]], weight.chunk(3), bias)
    elif query is key:
        maps = list(_products([query], [weight], bias)[0].chunk(3, -1))
    else:
        third = len(weight) // 3
        queries, both = _products([query, key], weight.split([third, 2 * third]), bias)
        maps = [queries, *both.chunk(2, -1)]
    return [_by_head(each, named["num_heads"]) for each in maps]


def _products(
    inputs: Sequence[Tensor], weights: Sequence[Tensor], bias: Tensor | None
) -> list[Tensor]:
    if bias is None:
        return [F.linear(x, weight) for x, weight in zip(inputs, weights, strict=True)]
    offsets = bias.split([len(weight) for weight in weights])
    return list(map(F.linear, inputs, weights, offsets))


def _by_head(x: Tensor, heads: int) -> Tensor:
    tokens, batch, _ = x.shape
    by_head: Tensor = x.reshape(tokens, batch * heads, -1)
    return by_head.transpose(0, 1)


def _mask(named: dict[str, Any], q: Tensor, batch: int) -> Tensor | None:
    """What is added to scores (batch * heads, tokens, read); True hides in both masks."""
    mask: Tensor | None = None
    if named["attn_mask"] is not None:
        mask = _added(named["attn_mask"], q)
        if mask.dim() == 2:
            mask = mask.unsqueeze(0)
    if named["key_padding_mask"] is not None:
        padding = _added(named["key_padding_mask"], q)[:, None, None]
        padding = padding.expand(-1, named["num_heads"], -1, -1).flatten(0, 1)
        mask = padding if mask is None else mask + padding
    return mask


def _added(mask: Tensor, like: Tensor) -> Tensor:
    if mask.dtype != torch.bool:
        return mask.to(like.dtype)
    hidden = torch.zeros_like(mask, dtype=like.dtype)
    return hidden.masked_fill(mask, -math.inf)
