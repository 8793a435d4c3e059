"""torch's `F.multi_head_attention_forward` as the operations that it consists of, so that its
linear maps and its rows are seen like those of other code.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

FUNCTION: Callable[..., Any] = F.multi_head_attention_forward
SIGNATURE = inspect.signature(FUNCTION)
UNUSUAL = ("bias_k", "bias_v", "add_zero_attn", "static_k", "static_v")
"""Arguments that add tokens, or replace keys and values: with them a call stays one operation."""


def taken_apart(arguments: tuple[Any, Any]) -> tuple[Tensor, Tensor | None] | None:
    """What a call with these arguments makes, sequences first, and its rows if they are asked for;
    None for a call with other options.
    """
    named = _by_name(arguments)
    query: Tensor = named["query"]
    is_random = named["training"] and named["dropout_p"]
    if query.dim() != 3 or _unusual(named) or is_random:
        return None
    q, k, v = _maps(named)
    mask = _mask(named, q)
    if named["need_weights"]:
        scores = q @ k.mT * q.shape[-1] ** -0.5
        if mask is not None:
            scores = scores + mask
        rows = scores.softmax(-1)
        averages = rows @ v
    else:
        rows = None
        averages = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    joined = averages.transpose(1, 2).flatten(-2)
    y = F.linear(joined, named["out_proj_weight"], named["out_proj_bias"])
    if rows is not None and named["average_attn_weights"]:
        rows = rows.mean(1)
    return y, rows


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
    """Queries, keys and values (batch, heads, tokens, features)."""
    inputs = [named[name] for name in ("query", "key", "value")]
    bias = named["in_proj_bias"]
    if named["use_separate_proj_weight"]:
        weights = [named[f"{role}_proj_weight"] for role in ("q", "k", "v")]
    elif all(x is inputs[0] for x in inputs):
        together = F.linear(inputs[0].transpose(0, 1), named["in_proj_weight"], bias)
        return [_by_head(each, named["num_heads"]) for each in together.chunk(3, -1)]
    else:
        weights = named["in_proj_weight"].chunk(3)
    biases = (None, None, None) if bias is None else bias.chunk(3)
    return [
        _by_head(F.linear(x.transpose(0, 1), weight, offset), named["num_heads"])
        for x, weight, offset in zip(inputs, weights, biases, strict=True)
    ]


def _by_head(x: Tensor, heads: int) -> Tensor:
    by_head: Tensor = x.unflatten(-1, (heads, -1))
    return by_head.transpose(1, 2)


def _mask(named: dict[str, Any], q: Tensor) -> Tensor | None:
    """What is added to scores (batch, heads, tokens, read); True hides in both masks."""
    masks = []
    if named["attn_mask"] is not None:
        mask = _added(named["attn_mask"], q)
        if mask.dim() == 3:
            mask = mask.unflatten(0, (len(q), -1))
        masks.append(mask)
    if named["key_padding_mask"] is not None:
        masks.append(_added(named["key_padding_mask"], q)[:, None, None])
    if not masks:
        return None
    return torch.stack(torch.broadcast_tensors(*masks)).sum(0)


def _added(mask: Tensor, like: Tensor) -> Tensor:
    if mask.dtype != torch.bool:
        return mask.to(like.dtype)
    hidden = torch.full_like(mask, -torch.inf, dtype=like.dtype)
    return torch.where(mask, hidden, hidden.new_zeros(()))
