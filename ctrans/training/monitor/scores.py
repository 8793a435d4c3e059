"""Attention scores of any model, from the torch functions that it calls.

While an attention module runs, a mode intercepts `scaled_dot_product_attention`, a softmax over
scores (.., heads, queries, keys), and torch's multi-head attention. It calls them unchanged, and
computes the scores of `ROWS` rows of the first sequence once more.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ctrans.measure.attention.attention_calls import (
    KERNEL,
    SOFTMAXES,
    AttentionCalls,
    KernelCall,
    softmax_input,
)
from ctrans.measure.attention.row_entropy import entropy_of_rows


class SeenScores(NamedTuple):
    """The scores of an attention in the first sequence.

    - `entries`: (heads, rows, columns) of `ROWS` queries, -inf where a row may not read. Columns
      are keys: tokens, and whatever else the model lets them read
    - `queries`: the number of queries, which are tokens; None if the keys are of another sequence
    """

    entries: Tensor
    queries: int | None


ScoresOf = Callable[..., SeenScores | None]
"""The scores of a call with these arguments."""
ROWS = 64
"""The number of rows of the first sequence, evenly spaced."""
HIDDEN = -9e3
"""A mask hides a score if it makes it less than this: Megatron's masks are -10,000, others larger
in size. So a real score below this is taken for masked.
"""


def scores_seen(
    seen: Callable[[SeenScores], None], failed: Callable[[Exception], None]
) -> AttentionCalls:
    """Inside, calls `seen` with the scores before the softmax of each attention that torch
    computes, on the device. `failed` gets an error of it, which must not end the training.
    """

    def look_for(scores_of: ScoresOf) -> Callable[..., None]:
        def look(*args: Any, **kwargs: Any) -> None:
            try:
                with torch.no_grad():
                    scores = scores_of(*args, **kwargs)
                    if scores is not None:
                        seen(scores)
            except Exception as error:  # of shapes and kinds of tensors that only the model knows
                failed(error)

        return look

    return AttentionCalls(
        before={function: look_for(scores_of) for function, scores_of in SCORES.items()}
    )


def largest_score(scores: Tensor) -> Tensor:
    """max |s_ij| of each head, over scores that are not masked."""
    return scores.masked_fill(~_visible(scores), 0.0).abs().amax((-2, -1))


def row_entropy(scores: Tensor) -> Tensor:
    """The mean over rows of H(a_i)/log n_i for each head, where H is the entropy of row i's weights
    and n_i its number of visible keys: tokens, and sinks or memory keys if there are. Rows with one
    visible key do not count.
    """
    count = _visible(scores).sum(-1)
    entropy = entropy_of_rows(scores.softmax(-1))
    several = count > 1
    share = torch.where(several, entropy / count.clamp(min=2).log(), 0.0)
    return share.sum(-1) / several.sum(-1).clamp(min=1)


def weight_ahead(scores: Tensor, queries: int | None) -> Tensor:
    """The mean over rows i of the sum of a_ij over later tokens j > i, for each head; 0 behind a
    causal mask. Rows without a visible token, as of padding, do not count. nan where the keys are
    of another sequence, which has no later tokens.

    Where there are more columns than `queries`, nobody knows which ones are tokens: others are
    sinks, memory keys or a cache. Then it is 0 if no row reads ahead with the tokens as the first
    columns, or with the tokens as the last ones. Else it is nan, as where there are fewer columns.
    """
    if queries is None:
        return scores.new_full(scores.shape[:-2], math.nan)
    columns = scores.shape[-1]
    places = _rows(queries, scores.device).unsqueeze(-1)
    keys = torch.arange(columns, device=scores.device)
    visible = _visible(scores)
    if columns != queries:
        others = columns - queries
        if others < 0:
            return scores.new_full(scores.shape[:-2], math.nan)
        tokens_first = (visible & (keys > places) & (keys < queries)).any(-1).any(-1)
        tokens_last = (visible & (keys - others > places)).any(-1).any(-1)
        return torch.where(tokens_first & tokens_last, math.nan, scores.new_zeros(()))
    reads = visible.any(-1)
    share = torch.where(reads, (scores.softmax(-1) * (keys > places)).sum(-1), 0.0)
    return share.sum(-1) / reads.sum(-1).clamp(min=1)


def _visible(scores: Tensor) -> Tensor:
    """The scores that no mask hides. A nan is not masked, and stays nan."""
    return scores != -math.inf


def _of_kernel(*args: Any, **kwargs: Any) -> SeenScores | None:
    call = KernelCall(*args, **kwargs)
    if call.query.dim() < 3:
        return None
    q = _first(call.query)
    k = _first(call.key)
    if len(q) > len(k):
        k = k.repeat_interleave(len(q) // len(k), 0)
    rows = _rows(q.shape[-2], q.device)
    scale = call.scale
    if scale is None:
        scale = q.shape[-1] ** -0.5
    scores = (q[:, rows] @ k.mT).float() * scale
    if call.is_causal:
        later = torch.arange(k.shape[-2], device=q.device) > rows.unsqueeze(-1)
        return SeenScores(scores.masked_fill(later, -math.inf), q.shape[-2])
    mask = call.attn_mask
    if mask is None:
        return SeenScores(scores, q.shape[-2])
    while mask.dim() > 3:
        mask = mask[0]
    mask = mask.expand(*mask.shape[:-2], q.shape[-2], k.shape[-2])[..., rows, :]
    if mask.dtype == torch.bool:
        return SeenScores(scores.masked_fill(~mask, -math.inf), q.shape[-2])
    return SeenScores(_without_hidden(scores + mask.float()), q.shape[-2])


def _of_softmax(*args: Any, **kwargs: Any) -> SeenScores | None:
    scores = softmax_input(*args, **kwargs)
    if scores.dim() < 4 or scores.shape[-1] < scores.shape[-2]:
        return None
    first = _first(scores)
    queries = first.shape[-2]
    return SeenScores(_without_hidden(first[:, _rows(queries, first.device)].float()), queries)


def _of_multihead(
    query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any
) -> SeenScores | None:
    """torch's multi-head attention, of inputs (tokens, batch, width), with queries and keys from
    one matrix.
    """
    signature = inspect.signature(F.multi_head_attention_forward)
    arguments = signature.bind(query, key, value, *args, **kwargs).arguments
    heads = arguments["num_heads"]
    weight = arguments["in_proj_weight"]
    bias = arguments["in_proj_bias"]
    if weight is None or query.dim() != 3:
        return None
    width = query.shape[-1]
    projected = []
    for i, x in enumerate((query, key)):
        rows = slice(i * width, (i + 1) * width)
        if bias is None:
            part = F.linear(x[:, 0], weight[rows])
        else:
            part = F.linear(x[:, 0], weight[rows], bias[rows])
        projected.append(part.unflatten(-1, (heads, -1)).transpose(0, 1))
    q, k = projected
    masks = []
    mask = arguments.get("attn_mask")
    if mask is not None:
        if mask.dim() == 3:
            mask = mask[:heads]
        masks.append(_added(mask.to(query.device)))
    padding = arguments.get("key_padding_mask")
    if padding is not None:
        masks.append(_added(padding[:1].to(query.device)))
    added = None
    if masks:
        added = sum(masks[1:], masks[0])
    seen = _of_kernel(q, k, k, attn_mask=added)
    if seen is None or query is key:
        return seen
    return seen._replace(queries=None)


def _added(mask: Tensor) -> Tensor:
    """A mask of torch's multi-head attention as one that is added to scores: its True hides."""
    if mask.dtype == torch.bool:
        return torch.zeros(mask.shape, device=mask.device).masked_fill(mask, -math.inf)
    return mask


SCORES: Mapping[Callable[..., Any], ScoresOf] = {
    KERNEL: _of_kernel,
    **dict.fromkeys(SOFTMAXES, _of_softmax),
    F.multi_head_attention_forward: _of_multihead,
}
"""By torch function: the scores of the first sequence, or None if the call is of another kind."""


def _first(x: Tensor) -> Tensor:
    """(heads, tokens, ..) of the first sequence."""
    return x.reshape(-1, *x.shape[-3:])[0]


def _rows(tokens: int, device: torch.device) -> Tensor:
    return torch.linspace(0, tokens - 1, min(ROWS, tokens), device=device).round().long()


def _without_hidden(scores: Tensor) -> Tensor:
    return scores.masked_fill(scores < HIDDEN, -math.inf)
