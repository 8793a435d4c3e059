"""Makes a model's attention rows visible: as the library returns them, as a softmax computes them,
or from the arguments of fused attention.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ctrans.interop.recorded_calls import watched

IMPLEMENTATION, ROWS = "_attn_implementation", "eager"
"""The setting by which the library chooses the attention kernel, and its value for the one that
returns rows.
"""
SOFTMAXES: tuple[Callable[..., Any], ...] = (torch.softmax, F.softmax, Tensor.softmax)


class _SoftmaxRows(TorchFunctionMode):
    """Records each square array of rows (batch, heads, tokens, tokens) that a softmax computes."""

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


@contextmanager
def showing_rows(model: nn.Module) -> Iterator[None]:
    """Inside, the library uses the attention kernel that also returns the rows."""
    parts = {
        id(config): config
        for part in model.modules()
        if hasattr(config := getattr(part, "config", None), IMPLEMENTATION)
    }
    before = [(config, getattr(config, IMPLEMENTATION)) for config in parts.values()]
    try:
        for config, _ in before:
            setattr(config, IMPLEMENTATION, ROWS)
        yield
    finally:
        for config, own in before:  # outer configs first: setting one also sets those inside it
            setattr(config, IMPLEMENTATION, own)


def _returned(output: Any) -> Tensor | None:
    """The attention rows (batch, heads, tokens, tokens) in a module's output: the first such array
    with entries >= 0 (T5 returns biases too).
    """
    if isinstance(output, tuple):
        returned = output[1:]
    else:
        returned = ()
    square = (
        each
        for each in returned
        if isinstance(each, Tensor) and each.dim() == 4 and each.shape[2] == each.shape[3]
    )
    return next((each for each in square if (each >= 0).all()), None)


@contextmanager
def seeing_rows(first: nn.Module) -> Iterator[Callable[[], Tensor | None]]:
    """Inside, the function that it gives returns the rows (batch, heads, tokens, tokens) of the
    last call of `first`; None if there are none.
    """
    with watched({"": first}) as seen, _SoftmaxRows() as computing:

        def rows() -> Tensor | None:
            found = _returned(seen[-1].output)
            if found is None and computing.rows:
                found = computing.rows[-1]
                if found.dim() == 3:  # sequences and heads share an axis, sequences first
                    found = found.unflatten(0, (len(seen[-1].x), -1))
            return found

        yield rows


def _rows(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **more: Any,
) -> Tensor:
    """softmax(s q k' + mask): the output for the unit matrix as values, without dropout."""
    one = torch.eye(value.shape[-2], dtype=value.dtype, device=value.device).expand(
        *value.shape[:-1], -1
    )
    return F.scaled_dot_product_attention(query, key, one, attn_mask, is_causal=is_causal, **more)
