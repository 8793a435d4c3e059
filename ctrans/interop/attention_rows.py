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

IMPLEMENTATION = "_attn_implementation"
"""The setting by which the library chooses the attention kernel."""
ROWS = "eager"
"""Its value for the kernel that returns rows."""
SOFTMAXES: tuple[Callable[..., Any], ...] = (torch.softmax, F.softmax, Tensor.softmax)


class _SoftmaxRows(TorchFunctionMode):
    """Records each square array of rows (batch, heads, tokens, tokens) that a softmax computes."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        output = func(*args, **named)
        if func is F.scaled_dot_product_attention:
            self._note(_rows(*args, **named))
        elif func in SOFTMAXES:
            self._note(output)
        return output

    def _note(self, rows: Tensor) -> None:
        if rows.dim() in (3, 4) and rows.shape[-1] == rows.shape[-2]:
            self.rows.append(rows)


@contextmanager
def showing_rows(model: nn.Module) -> Iterator[None]:
    """Inside, the library uses the attention kernel that also returns the rows."""
    configs = {}
    for part in model.modules():
        config = getattr(part, "config", None)
        if hasattr(config, IMPLEMENTATION):
            configs[id(config)] = config
    before = [(config, getattr(config, IMPLEMENTATION)) for config in configs.values()]
    try:
        for config, _ in before:
            setattr(config, IMPLEMENTATION, ROWS)
        yield
    finally:
        # outer configs first: setting one also sets those inside it
        for config, implementation in before:
            setattr(config, IMPLEMENTATION, implementation)


def _returned(output: Any) -> Tensor | None:
    """The attention rows (batch, heads, tokens, tokens) in a module's output: the first such array
    with entries >= 0 (T5 returns biases too).
    """
    if not isinstance(output, tuple):
        return None
    for part in output[1:]:
        if not isinstance(part, Tensor) or part.dim() != 4:
            continue
        if part.shape[2] == part.shape[3] and (part >= 0).all():
            return part
    return None


@contextmanager
def seeing_rows(first: nn.Module) -> Iterator[Callable[[], Tensor | None]]:
    """Inside, the function that it gives returns the rows (batch, heads, tokens, tokens) of the
    last call of `first`; None if there are none.
    """
    with watched({"": first}) as seen, _SoftmaxRows() as computing:

        def rows() -> Tensor | None:
            call = seen[-1]
            returned = _returned(call.output)
            if returned is not None or not computing.rows:
                return returned
            computed: Tensor = computing.rows[-1]
            if computed.dim() == 3:  # sequences and heads share an axis, sequences first
                by_head: Tensor = computed.unflatten(0, (len(call.x), -1))
                return by_head
            return computed

        yield rows


def _rows(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,  # noqa: FBT001, FBT002  # as in torch
    **more: Any,
) -> Tensor:
    """softmax(s q k' + mask): the output for the unit matrix as values, without dropout."""
    unit = torch.eye(value.shape[-2], dtype=value.dtype, device=value.device)
    unit_values = unit.expand(*value.shape[:-1], -1)
    return F.scaled_dot_product_attention(
        query, key, unit_values, attn_mask, is_causal=is_causal, **more
    )
