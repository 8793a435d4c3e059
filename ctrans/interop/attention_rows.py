"""Makes a model's attention rows visible: as the library returns them, as a softmax computes them,
or from the arguments of fused attention.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ctrans.interop.block_calls import tensors_in
from ctrans.interop.recorded_calls import RecordedCall, watched
from ctrans.interop.tolerances import tolerance
from ctrans.measure.attention.attention_calls import AttentionCalls, KernelCall, looks

IMPLEMENTATION = "_attn_implementation"
"""The setting by which the library chooses the attention kernel."""
ROWS = "eager"
"""Its value for the kernel that returns rows."""
PRODUCTS_WITH_ROWS: tuple[Callable[..., Any], ...] = (
    torch.matmul,
    Tensor.matmul,
    Tensor.__matmul__,
    torch.bmm,
    Tensor.bmm,
    torch.einsum,
)
"""Products of matrices of which the first may be rows."""


@contextmanager
def _computed_rows() -> Iterator[list[Tensor]]:
    """Inside, the list gets each array of rows (batch, heads, tokens, tokens) that a softmax or the
    fused kernel computes, or with which a product of matrices averages.
    """
    seen: list[Tensor] = []
    of_softmaxes: list[Tensor] = []  # with which no product has averaged yet
    of_products: list[Tensor] = []

    def note(rows: Tensor) -> None:
        if rows.dim() in (3, 4):
            seen.append(rows)

    def of_product(output: Tensor, *args: Any, **kwargs: Any) -> None:
        rows = next((each for each in tensors_in(args)), output)
        if any(rows is each for each in of_products) or not _are_averages(rows):
            return
        of_products.append(rows)
        # heads may have equal rows, so that each softmax is of one product
        for i, each in enumerate(of_softmaxes):
            if rows is each or _equal(rows, each):
                del of_softmaxes[i]
                return
        note(rows)

    def of_kernel(output: Tensor, *args: Any, **kwargs: Any) -> None:
        note(_rows(KernelCall(*args, **kwargs)))

    def of_softmax(output: Tensor, *args: Any, **kwargs: Any) -> None:
        of_softmaxes.append(output)
        note(output)

    products = dict.fromkeys(PRODUCTS_WITH_ROWS, of_product)
    with AttentionCalls(after={**looks(of_kernel, of_softmax), **products}):
        yield seen


def _equal(rows: Tensor, others: Tensor) -> bool:
    return rows.shape == others.shape and torch.equal(rows, others.to(rows))


def _are_averages(rows: Tensor) -> bool:
    """Whether entries are at least 0 and rows sum to 1, as a softmax by hand gives."""
    if not rows.is_floating_point() or rows.dim() < 3:
        return False
    close = tolerance(rows.dtype)
    return bool((rows >= 0).all() and ((rows.sum(-1) - 1).abs() <= close).all())


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


class LastRows:
    """The rows of the last call of a module: what it returned, or what softmaxes and
    products computed in it.
    """

    def __init__(self, calls: Sequence[RecordedCall], computed: Sequence[Tensor]):
        self._calls = calls
        self._computed = computed

    def __call__(self) -> Tensor | None:
        """The rows (batch, heads, tokens, tokens); None if there are none."""
        call = self._calls[-1]
        returned = _returned(call.output)
        if returned is not None:
            return returned
        square = [rows for rows in self._computed if rows.shape[-1] == rows.shape[-2]]
        if not square:
            return None
        last: Tensor = square[-1]
        if last.dim() == 4:
            return last
        if len(last) == len(call.x):  # each head by itself
            return torch.stack([rows for rows in square if rows.shape == last.shape], 1)
        # sequences and heads share an axis, sequences first
        by_head: Tensor = last.unflatten(0, (len(call.x), -1))
        return by_head

    @property
    def are_of_another_sequence(self) -> bool:
        """Whether there are rows, and they weigh other tokens than those that read them."""
        return bool(self._computed) and self() is None


@contextmanager
def seeing_rows(first: nn.Module) -> Iterator[LastRows]:
    """Inside, what it gives has the rows of the last call of `first`."""
    with watched({"": first}) as seen, _computed_rows() as computed_rows:
        yield LastRows(seen, computed_rows)


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
