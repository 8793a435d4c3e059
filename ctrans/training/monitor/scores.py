"""Attention scores of any model, from the torch functions that it calls.

While an attention module runs, a mode intercepts `scaled_dot_product_attention`, a softmax over
scores (.., heads, tokens, tokens), and torch's multi-head attention. It calls them unchanged, and
computes the scores of `ROWS` rows of the first sequence once more.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

ROWS = 64
"""The number of rows of the first sequence, evenly spaced."""
HIDDEN = -9e3
"""A mask hides a score if it makes it less than this: Megatron's masks are -10,000, others larger
in size. So a real score below this is taken for masked.
"""


class ScoresSeen(TorchFunctionMode):
    """Inside, calls `seen` with the scores before the softmax of each attention that torch
    computes: (heads, rows, tokens), -inf where a row may not read, on the device. `failed` gets an
    error of it, which must not end the training.
    """

    def __init__(self, seen: Callable[[Tensor], None], failed: Callable[[Exception], None]):
        super().__init__()
        self.seen = seen
        self.failed = failed

    def __torch_function__(
        self,
        function: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        look = LOOKS.get(function)
        if look is not None:
            try:
                with torch.no_grad():
                    scores = look(*args, **kwargs)
                    if scores is not None:
                        self.seen(scores)
            except Exception as error:  # of shapes and kinds of tensors that only the model knows
                self.failed(error)
        return function(*args, **kwargs)


def largest_score(scores: Tensor) -> Tensor:
    """max |s_ij| of each head, over scores that are not masked."""
    shown = scores != -math.inf  # a nan is not masked, and stays nan
    return scores.masked_fill(~shown, 0.0).abs().amax((-2, -1))


def row_entropy(scores: Tensor) -> Tensor:
    """The mean over rows of H(a_i)/log n_i for each head, where H is the entropy of row i's weights
    and n_i its number of visible tokens. Rows with one visible token do not count.
    """
    count = (scores != -math.inf).sum(-1)
    entropy = torch.special.entr(scores.softmax(-1)).sum(-1)
    several = count > 1
    share = torch.where(several, entropy / count.clamp(min=2).log(), 0.0)
    return share.sum(-1) / several.sum(-1).clamp(min=1)


def weight_ahead(scores: Tensor) -> Tensor:
    """The mean over rows i of the sum of a_ij over later tokens j > i, for each head; 0 behind a
    causal mask.
    """
    rows, tokens = scores.shape[-2:]
    places = torch.linspace(0, tokens - 1, rows, device=scores.device).round()
    later = torch.arange(tokens, device=scores.device) > places.unsqueeze(-1)
    return (scores.softmax(-1) * later).sum(-1).mean(-1)


def _of_kernel(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor | None:
    if query.dim() < 3:
        return None
    q, k = (_first(part) for part in (query, key))
    if len(q) > len(k):
        k = k.repeat_interleave(len(q) // len(k), 0)
    rows = _rows(q.shape[-2], q.device)
    scores = (q[:, rows] @ k.mT).float() * (q.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        later = torch.arange(k.shape[-2], device=q.device) > rows.unsqueeze(-1)
        return scores.masked_fill(later, -math.inf)
    if attn_mask is None:
        return scores
    mask = attn_mask
    while mask.dim() > 3:
        mask = mask[0]
    mask = mask.expand(*mask.shape[:-2], q.shape[-2], k.shape[-2])[..., rows, :]
    if mask.dtype == torch.bool:
        return scores.masked_fill(~mask, -math.inf)
    return _without_hidden(scores + mask.float())


def _of_softmax(*given: Any, **named: Any) -> Tensor | None:
    scores: Tensor = given[0] if given else named["input"]
    if scores.dim() < 4 or scores.shape[-1] < scores.shape[-2]:
        return None
    first = _first(scores)
    return _without_hidden(first[:, _rows(first.shape[-2], first.device)].float())


def _of_multihead(
    query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any
) -> Tensor | None:
    """torch's multi-head attention, of inputs (tokens, batch, width), with queries and keys from
    one matrix.
    """
    named = (
        inspect.signature(F.multi_head_attention_forward)
        .bind(query, key, value, *args, **kwargs)
        .arguments
    )
    heads = named["num_heads"]
    weight = named["in_proj_weight"]
    bias = named["in_proj_bias"]
    if weight is None or query.dim() != 3:
        return None
    width = query.shape[-1]
    parts = []
    for i, x in enumerate((query, key)):
        part = F.linear(
            x[:, 0],
            weight[i * width : (i + 1) * width],
            None if bias is None else bias[i * width : (i + 1) * width],
        )
        parts.append(part.unflatten(-1, (heads, -1)).transpose(0, 1))
    mask = named.get("attn_mask")
    padded = named.get("key_padding_mask")
    if mask is not None and mask.dim() == 3:
        mask = mask[:heads]
    else:
        mask = mask
    hidden = [
        _added(each.to(query.device))
        for each in (mask, None if padded is None else padded[:1])
        if each is not None
    ]
    return _of_kernel(
        parts[0], parts[1], parts[1], attn_mask=sum(hidden[1:], hidden[0]) if hidden else None
    )


def _added(mask: Tensor) -> Tensor:
    """A mask of torch's multi-head attention as one that is added to scores: its True hides."""
    if mask.dtype == torch.bool:
        return torch.zeros(mask.shape, device=mask.device).masked_fill(mask, -math.inf)
    return mask


LOOKS: dict[Any, Callable[..., Tensor | None]] = {
    F.scaled_dot_product_attention: _of_kernel,
    F.softmax: _of_softmax,
    torch.softmax: _of_softmax,
    Tensor.softmax: _of_softmax,
    F.multi_head_attention_forward: _of_multihead,
}
"""By torch function: the scores (heads, rows, tokens) of the first sequence, or None if the call is
of another kind.
"""


def _first(x: Tensor) -> Tensor:
    """(heads, tokens, ..) of the first sequence."""
    return x.reshape(-1, *x.shape[-3:])[0]


def _rows(tokens: int, device: torch.device) -> Tensor:
    return torch.linspace(0, tokens - 1, min(ROWS, tokens), device=device).round().long()


def _without_hidden(scores: Tensor) -> Tensor:
    return scores.masked_fill(scores < HIDDEN, -math.inf)
