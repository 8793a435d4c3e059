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

from ctrans.interop.recorded_calls import watched
from ctrans.measure.attention.attention_calls import AttentionCalls, KernelCall, looks

IMPLEMENTATION = "_attn_implementation"
"""The setting by which the library chooses the attention kernel."""
ROWS = "eager"
"""Its value for the kernel that returns rows."""


@contextmanager
def _computed_rows() -> Iterator[list[Tensor]]:
    """Inside, the list gets each square array of rows (batch, heads, tokens, tokens) that a softmax
    or the fused kernel computes.
    """
    seen: list[Tensor] = []

    def note(rows: Tensor) -> None:
        if rows.dim() in (3, 4) and rows.shape[-1] == rows.shape[-2]:
            seen.append(rows)

    def of_kernel(output: Tensor, *args: Any, **kwargs: Any) -> None:
        note(_rows(KernelCall(*args, **kwargs)))

    def of_softmax(output: Tensor, *args: Any, **kwargs: Any) -> None:
        note(output)

    with AttentionCalls(after=looks(of_kernel, of_softmax)):
        yield seen


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
    with watched({"": first}) as seen, _computed_rows() as computed_rows:

        def rows() -> Tensor | None:
            call = seen[-1]
            returned = _returned(call.output)
            if returned is not None or not computed_rows:
                return returned
            computed: Tensor = computed_rows[-1]
            if computed.dim() == 3:  # sequences and heads share an axis, sequences first
                by_head: Tensor = computed.unflatten(0, (len(call.x), -1))
                return by_head
            return computed

        yield rows


def _rows(call: KernelCall) -> Tensor:
    """softmax(s q k' + mask): the output for the unit matrix as values, without dropout."""
    value = call.value
    unit = torch.eye(value.shape[-2], dtype=value.dtype, device=value.device)
    unit_values = unit.expand(*value.shape[:-1], -1)
    return F.scaled_dot_product_attention(
        call.query,
        call.key,
        unit_values,
        call.attn_mask,
        is_causal=call.is_causal,
        scale=call.scale,
        enable_gqa=call.enable_gqa,
    )
