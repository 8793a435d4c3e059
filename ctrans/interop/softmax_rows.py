"""Attention rows seen where they are made: what softmax returns, or what torch's fused attention has to weigh values by."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

SOFTMAXES: tuple[Callable[..., Any], ...] = (torch.softmax, F.softmax, Tensor.softmax)


class _Watching(TorchFunctionMode):
    """Notes every square array of rows (batch, heads, tokens, tokens) that a softmax gives."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        if func is F.scaled_dot_product_attention:
            self._note(_rows(*args, **(kwargs or {})))
        elif func in SOFTMAXES:
            self._note(output)
        return output

    def _note(self, rows: Tensor) -> None:
        if rows.dim() in (3, 4) and rows.shape[-1] == rows.shape[-2]:
            self.rows.append(rows)


@contextlib.contextmanager
def softmax_rows() -> Iterator[list[Tensor]]:
    """Inside, notes what attention weighs values by, in the order in which it is computed."""
    with _Watching() as mode:
        yield mode.rows


def _rows(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """softmax(s q k' + mask), as `F.scaled_dot_product_attention` defines it."""
    if enable_gqa:
        key = key.repeat_interleave(query.shape[-3] // key.shape[-3], dim=-3)
    scores = (1 / math.sqrt(query.shape[-1]) if scale is None else scale) * (query @ key.transpose(-1, -2))
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        scores = scores.masked_fill(~attn_mask, -math.inf)
    elif attn_mask is not None:
        scores = scores + attn_mask
    return scores.softmax(-1)
