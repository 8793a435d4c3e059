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
from ctrans.interop.groups_of_tokens import are_in_order, of_whole_sequences
from ctrans.interop.recorded_calls import RecordedCall, watched
from ctrans.interop.tolerances import difference, tolerance
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


class ComputedRows:
    """Arrays of rows (batch, heads, tokens, tokens), or those of one head, in the order of a pass.

    - `of_groups`: the shapes of rows with more axes, as of the columns of images
    - `seen`: all that a softmax or the fused kernel computes, or with which a product averages
    - `averaging`: those with which the fused kernel or a product of matrices averages
    - `axes`: of each of these, the axis of the token that reads and of those that are read; None if
      that is not known
    - `unused`: of the softmaxes, those with which no product has averaged yet
    """

    def __init__(self) -> None:
        self.seen: list[Tensor] = []
        self.of_groups: list[torch.Size] = []
        self.averaging: list[Tensor] = []
        self.axes: list[tuple[int, int] | None] = []
        self.unused: list[Tensor] = []

    def of_kernel(self, output: Tensor, *args: Any, **kwargs: Any) -> None:
        rows = _rows(KernelCall(*args, **kwargs))
        self._add(rows, (rows.dim() - 2, rows.dim() - 1))
        self._see(rows)

    def of_softmax(self, output: Tensor, *args: Any, **kwargs: Any) -> None:
        self.unused.append(output)
        self._see(output)

    def of_product(self, output: Tensor, *args: Any, **kwargs: Any) -> None:
        operands = tensors_in(args)
        for i, operand in enumerate(operands):
            if self._averages_with(operand, _axes_in_product(args, operands, i)):
                return

    def _averages_with(self, rows: Tensor, axes: tuple[int, int] | None) -> bool:
        """Notes the rows if a product with them averages."""
        if any(rows is each for each in self.averaging):
            return True
        # heads may have equal rows, so that each softmax is of one product
        for i, softmax in enumerate(self.unused):
            if rows is softmax or _equal(rows, softmax):
                self._add(rows, axes)
                del self.unused[i]
                return True
            if _without_sink(rows, softmax):
                self._add(rows, axes)
                self._see(rows)
                del self.unused[i]
                return True
        if _are_averages(rows):
            self._add(rows, axes)
            self._see(rows)
            return True
        return False

    def _add(self, rows: Tensor, axes: tuple[int, int] | None) -> None:
        self.averaging.append(rows)
        self.axes.append(axes)

    def _see(self, rows: Tensor) -> None:
        if rows.dim() in (3, 4):
            self.seen.append(rows)
        elif rows.dim() > 4:
            self.of_groups.append(rows.shape)


def _axes_in_product(
    args: Sequence[Any], operands: Sequence[Tensor], i: int
) -> tuple[int, int] | None:
    """The axis of operand i of a product of two that its other one lacks, as of the token that
    reads, and the axis that is summed, as of those that are read. None if there is not one of each.
    """
    if len(operands) != 2:
        return None
    if not isinstance(args[0], str):  # a product of matrices
        last = operands[i].dim() - 1
        return (last - 1, last) if i == 0 else (last, last - 1)
    inputs, _, result = args[0].replace(" ", "").partition("->")
    names = inputs.split(",")
    if len(names) != 2 or not result or "." in inputs:
        return None
    own, other = names[i], names[1 - i]
    reads = [axis for axis in own if axis in result and axis not in other]
    read = [axis for axis in own if axis not in result and axis in other]
    if len(reads) != 1 or len(read) != 1:
        return None
    return own.index(reads[0]), own.index(read[0])


@contextmanager
def _computed_rows() -> Iterator[ComputedRows]:
    """Inside, what it gives has the rows that are computed."""
    computed = ComputedRows()
    products = dict.fromkeys(PRODUCTS_WITH_ROWS, computed.of_product)
    of_attention = looks(computed.of_kernel, computed.of_softmax)
    with AttentionCalls(after={**of_attention, **products}):
        yield computed


def _of_sequences(rows: Tensor, batch: int, tokens: int) -> Tensor:
    """The rows of whole sequences, where these are of equal groups of tokens that follow one
    another and read only each other, as patches of one channel of a series do.
    """
    groups, rest = divmod(len(rows), batch)
    if rest or groups < 2 or groups * rows.shape[-1] != tokens:
        return rows
    by_group = rows.unflatten(0, (batch, groups)).movedim(1, 2)  # (batch, heads, groups, m, m)
    size = rows.shape[-1]
    whole = by_group.new_zeros(*by_group.shape[:4], groups, size)
    for g in range(groups):
        whole[:, :, g, :, g] = by_group[:, :, g]
    joined: Tensor = whole.flatten(4).flatten(2, 3)
    return joined


def _equal(rows: Tensor, others: Tensor) -> bool:
    """Whether these are the same rows, whose first axes may be joined."""
    if rows.shape[-2:] != others.shape[-2:] or rows.numel() != others.numel():
        return False
    return torch.equal(rows, others.to(rows).reshape(rows.shape))


def _without_sink(rows: Tensor, softmax: Tensor) -> bool:
    """Whether `rows` are those of a softmax over the tokens and further logits before or behind
    them, which average nothing.
    """
    if rows.shape[:-1] != softmax.shape[:-1] or not rows.shape[-1] < softmax.shape[-1]:
        return False
    tokens = rows.shape[-1]
    return _equal(rows, softmax[..., :tokens]) or _equal(rows, softmax[..., -tokens:])


def sum_to_one(rows: Tensor) -> bool:
    """Whether each row sums to 1 to rounding."""
    return bool(((rows.sum(-1) - 1).abs() <= tolerance(rows.dtype)).all())


def _are_averages(rows: Tensor) -> bool:
    """Whether entries are at least 0 and rows sum to 1, as a softmax by hand gives."""
    if not rows.is_floating_point() or rows.dim() < 3:
        return False
    return bool((rows >= 0).all()) and sum_to_one(rows)


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

    def __init__(self, calls: Sequence[RecordedCall], computed: ComputedRows):
        self.are_of_groups = False
        """Whether the last rows that were asked for are of groups of tokens."""
        self._calls = calls
        self._computed = computed

    def __call__(self) -> Tensor | None:
        """The rows (batch, heads, tokens, tokens); None if there are none."""
        returned = _returned(self._calls[-1].output)
        if returned is not None:
            return returned
        return self._joined(self._computed.seen)

    def of_another_sequence(self) -> Tensor | None:
        """The rows (batch, heads, tokens, others) that weigh other tokens than those that read
        them, if they are all that averages; else None.
        """
        if not self.are_of_another_sequence:
            return None
        return self.numbered(range(len(self._computed.averaging)))

    def numbered(self, numbers: Sequence[int]) -> Tensor | None:
        """The rows of all heads with which the kernel or a product averages, of those with these
        numbers in the pass; None if these are none of one attention.
        """
        averaging = self._computed.averaging
        if self._computed.unused or not numbers or max(numbers) >= len(averaging):
            return None
        if any(self._is_turned(i) for i in numbers):
            return None
        chosen = [self._standing(i) for i in numbers]
        rows = self._joined(chosen, is_square=chosen[-1].shape[-1] == chosen[-1].shape[-2])
        if rows is None or (len(chosen) > 1 and chosen[-1].dim() == 4):
            return None
        if len(chosen) not in (1, rows.shape[1]):
            return None
        return rows

    def _is_turned(self, i: int) -> bool:
        """Whether the rows of that product, of four axes, do not end in tokens and those that they
        read, with sequences and heads, or sequences alone, before them.
        """
        axes = self._computed.axes[i]
        rows = self._computed.averaging[i]
        return axes is not None and rows.dim() == 4 and axes not in ((2, 3), (1, 3))

    def _standing(self, i: int) -> Tensor:
        """The rows of that product, heads before tokens."""
        rows = self._computed.averaging[i]
        if rows.dim() == 4 and self._computed.axes[i] == (1, 3):
            return rows.transpose(1, 2)
        if self._computed.axes[i] is not None:
            return rows
        return self._by_head(rows)

    def heads_first(self) -> Tensor | None:
        """The rows of the only product that averages, whose first axis counts heads and then
        sequences.
        """
        averaging = self._computed.averaging
        batch, tokens = self._calls[-1].x.shape[:2]
        if self._computed.unused or len(averaging) != 1 or averaging[0].dim() != 3:
            return None
        if self._computed.axes[0] not in (None, (1, 2)):
            return None
        rows = averaging[0]
        if len(rows) % batch or rows.shape[1:] != (tokens, tokens):
            return None
        by_head: Tensor = rows.unflatten(0, (-1, batch))
        return by_head.transpose(0, 1)

    def by_sequence(self) -> Tensor | None:
        """The rows of products that each average in one sequence, (heads, tokens, tokens), as in a
        loop over sequences.
        """
        averaging = self._computed.averaging
        shapes = {rows.shape for rows in averaging}
        has_one_form = len(shapes) == 1 and averaging[0].dim() == 3
        if self._computed.unused or not has_one_form or len(averaging) != len(self._calls[-1].x):
            return None
        return torch.stack(averaging)

    def turned(self, *, heads_first: bool) -> Tensor | None:
        """The rows of the only product that averages, of four axes in any order. Of the two that do
        not count tokens, the first counts sequences, or heads.
        """
        averaging = self._computed.averaging
        if self._computed.unused or len(averaging) != 1 or averaging[0].dim() != 4:
            return None
        axes = self._computed.axes[0]
        if axes is None:
            return None
        others = [axis for axis in range(4) if axis not in axes]
        if heads_first:
            others.reverse()
        return averaging[0].permute(*others, *axes)

    def that_differ(self, other: LastRows) -> tuple[int, ...]:
        """The numbers of the rows that average and are others in another pass; none if the two
        passes have not as many.
        """
        pairs = list(zip(self._computed.averaging, other._computed.averaging, strict=False))
        if len(other._computed.averaging) != len(self._computed.averaging):
            return ()
        return tuple(i for i, (rows, others) in enumerate(pairs) if not _equal(rows, others))

    def _joined(self, computed: Sequence[Tensor], *, is_square: bool = True) -> Tensor | None:
        """The rows of all heads, from the last of these arrays."""
        by_head = [self._by_head(rows) for rows in computed]
        fitting = [rows for rows in by_head if (rows.shape[-1] == rows.shape[-2]) == is_square]
        if not fitting:
            return None
        x = self._calls[-1].x
        last = fitting[-1]
        last = self._of_groups(last)
        if last.dim() == 4:
            return _of_sequences(last, *x.shape[:2])
        if len(last) == len(x):  # each head by itself
            return torch.stack([rows for rows in fitting if rows.shape == last.shape], 1)
        if len(last) % len(x):
            return None
        # sequences and heads share an axis, sequences first
        of_heads: Tensor = last.unflatten(0, (len(x), -1))
        return of_heads

    def _of_groups(self, rows: Tensor) -> Tensor:
        """The rows of whole sequences, if these are of groups of tokens whose places are known."""
        call = self._calls[-1]
        batch, tokens = call.x.shape[:2]
        places_of_tokens: Any = getattr(call.module, "places_of_tokens", None)
        if rows.shape[-2] > tokens or places_of_tokens is None:
            return rows
        places = places_of_tokens(call.x)
        are_whole = rows.shape[-2] == tokens
        if places is None or (are_whole and are_in_order(places)):
            return rows
        whole = of_whole_sequences(rows, places, batch, tokens)
        self.are_of_groups = whole is not None
        return rows if whole is None else whole

    def _by_head(self, rows: Tensor) -> Tensor:
        """Rows (batch, heads, tokens, read) of what a softmax has as (batch, tokens, heads,
        read).
        """
        tokens = self._calls[-1].x.shape[1]
        if rows.dim() == 4 and rows.shape[1] == rows.shape[3] == tokens != rows.shape[2]:
            return rows.transpose(1, 2)
        return rows

    def why_of_groups(self, rows: Tensor | None) -> str:
        """Why these are no rows of whole sequences, in words; "" if they are, or if there are
        none.
        """
        sequences, tokens = self._calls[-1].x.shape[:2]
        if rows is not None:
            shape = rows.shape
            if shape[0] == sequences and shape[-1] == shape[-2] == tokens:
                return ""
        elif self._computed.of_groups:
            shape = self._computed.of_groups[-1]
        else:
            return ""
        return (
            f"its rows {tuple(shape)} are of groups of its {tokens} tokens, such as windows or"
            " columns, and only rows of whole sequences are read"
        )

    @property
    def are_of_another_sequence(self) -> bool:
        """Whether there are rows, and they weigh other tokens than those that read them."""
        return bool(self._computed.seen) and self() is None

    def all_that_average(self) -> Tensor | None:
        """These rows if they are all with which the module averages tokens; else None. A second
        softmax, or one that is changed before it averages, may weigh the tokens otherwise.
        """
        rows = self()
        joined = self.numbered(range(len(self._computed.averaging)))
        if rows is None or joined is None:
            return None
        for those in (rows, rows.transpose(1, 2)):  # with as many heads as tokens, either
            if difference(joined.to(rows), those) <= tolerance(rows.dtype):
                return those
        return None


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
