"""Attention with other scores, another mask or rows of fewer digits, while a model runs."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

HIDDEN = -1e30
"""Scores below this are of tokens that are not read."""
PRODUCT = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
"""The names of the arguments of scaled dot product attention."""
OfScores = Callable[[Tensor], Tensor]
OfMask = Callable[[Tensor], Tensor]


class AttentionVariant(TorchFunctionMode):
    """Computes each scaled dot product attention in steps, with these changes. They also apply to
    each softmax over a square of scores, where a mask can only hide more.

    - `scores`: what becomes of the scores of tokens that are read
    - `mask`: what becomes of the mask (.., tokens, tokens), True for a token that is read
    - `dtype`: that of the softmax
    """

    def __init__(
        self,
        *,
        scores: OfScores | None = None,
        mask: OfMask | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        self.scores = scores
        self.mask = mask
        self.dtype = dtype

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        given = dict(kwargs or {})
        if name == "softmax":
            x = given["input"] if "input" in given else args[0]
            if x.dim() > 2 and x.shape[-1] == x.shape[-2] > 1:
                return self._rows(x, x > HIDDEN)
        if name == "scaled_dot_product_attention":
            return self._product(**dict(zip(PRODUCT, args, strict=False)), **given)
        return func(*args, **given)

    def _rows(self, scores: Tensor, reads: Tensor) -> Tensor:
        """Rows of attention from scores and what each token reads."""
        if self.scores is not None:
            scores = torch.where(reads, self.scores(scores), scores)
        if self.mask is not None:
            reads = self.mask(reads)
        scores = scores.masked_fill(~reads, -math.inf)
        if self.dtype is not None:
            return scores.to(self.dtype).softmax(-1).to(scores.dtype)
        return scores.softmax(-1)

    def _product(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,  # noqa: FBT001, FBT002  # torch's signature
        scale: float | None = None,
        **options: Any,
    ) -> Tensor:
        if options.get("enable_gqa"):
            groups = query.shape[-3] // key.shape[-3]
            key = key.repeat_interleave(groups, -3)
            value = value.repeat_interleave(groups, -3)
        factor = query.shape[-1] ** -0.5 if scale is None else scale
        scores = factor * (query @ key.transpose(-2, -1))
        reads = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device)
        if is_causal:
            reads = reads.tril()
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            reads = reads & attn_mask
        elif attn_mask is not None:
            reads = reads & (attn_mask > HIDDEN)
            scores = scores + attn_mask.clamp(min=HIDDEN) * reads
        return self._rows(scores, reads) @ value


def one_later(reads: Tensor) -> Tensor:
    """Tokens read one token further ahead."""
    return reads | (_distances(reads) == _ahead(reads) - 1)


def one_less(reads: Tensor) -> Tensor:
    """Tokens read one token less far ahead, unless none is left."""
    fewer = reads & (_distances(reads) > _ahead(reads))
    return torch.where(fewer.any(-1, keepdim=True), fewer, reads)


def _ahead(reads: Tensor) -> int:
    """The smallest i - j of a token j that token i reads."""
    distances = _distances(reads).expand(reads.shape)
    return int(distances[reads].min())


def wider_window(reads: Tensor) -> Tensor:
    """Each token also reads the one before those of its window."""
    distances = _distances(reads)
    return reads | ((distances >= 0) & (distances <= _width(reads)))


def narrower_window(reads: Tensor) -> Tensor:
    """No token reads the first one of its window."""
    return reads & (_distances(reads) < _width(reads) - 1)


def _width(reads: Tensor) -> int:
    """The most tokens that one reads."""
    return int(reads.sum(-1).max())


def _distances(reads: Tensor) -> Tensor:
    """i - j for each pair of tokens."""
    i = torch.arange(reads.shape[-2], device=reads.device)
    j = torch.arange(reads.shape[-1], device=reads.device)
    return i[:, None] - j


def capped(cap: float) -> OfScores:
    """Scores s as cap tanh(s/cap)."""
    return lambda scores: cap * (scores / cap).tanh()


def uncapped(cap: float) -> OfScores:
    """The inverse of `capped`."""
    limit = 1 - 1e-7
    return lambda scores: cap * (scores / cap).clamp(-limit, limit).atanh()


def scaled(factor: float) -> OfScores:
    """Scores times a factor."""
    return lambda scores: factor * scores
