"""Which axes of a model's own states count sequences, tokens and channels."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ctrans.interop.operations import Graph
from solvers import ConfigError

TOKENS_AND_CHANNELS = 3
"""How many axes states have whose tokens have one axis."""


@dataclass(frozen=True)
class StateAxes:
    """The axes of states with `number` axes.

    - `batch`: the axis that counts sequences, of which each is there `copies` times
    - `width`: the axis that counts channels; all others count tokens
    - `turned`: the numbers of those states whose first two axes come in the other order
    """

    number: int
    batch: int
    width: int
    copies: int
    turned: frozenset[int] = frozenset()

    @property
    def tokens_first(self) -> bool:
        """Whether states are (tokens, batch, width)."""
        return self.batch == 1

    @property
    def batch_among_tokens(self) -> int:
        """The place of the axis of sequences among all axes but that of channels."""
        return self.batch - int(self.width < self.batch)

    def _fit(self, shapes: Sequence[Sequence[int]]) -> bool:
        """Whether all states, of these shapes, have as many sequences and channels as the first."""
        first = shapes[0]
        for number, shape in enumerate(shapes):
            in_order = list(shape)
            if number in self.turned:
                in_order[:2] = in_order[1::-1]
            if len(in_order) != len(first):
                return False
            if any(in_order[axis] != first[axis] for axis in (self.batch, self.width)):
                return False
        return True

    def tokens_of(self, shape: torch.Size) -> torch.Size:
        """The shape of such states without their axis of channels."""
        return torch.Size(size for axis, size in enumerate(shape) if axis != self.width)

    def rows(self, x: Tensor, number: int = 0) -> Float[Tensor, "batch tokens width"]:
        """State `number` of the module, sequences first."""
        turned = self._turned(self._in_first_order(x, number))
        return turned.reshape(len(turned) // self.copies, -1, turned.shape[-1])

    def rows_like(self, y: Tensor, x: Tensor, *, turned: bool | None = None) -> Tensor:
        """The output y of a map of the states x, sequences first, whatever its axes. `turned` says
        whether it has tokens first, where the shape does not.
        """
        swapped = self._swapped(y, x.shape, turned=turned)
        if swapped is not None:
            rows = swapped
        elif y.dim() == 2 or y.dim() != self.number:
            rows = y.reshape(*x.shape[:-1], -1)
        else:
            rows = self.rows(y)
        if rows.shape != x.shape:
            raise ConfigError(
                f"it makes a tensor {tuple(rows.shape)} of states {tuple(x.shape)}: its norms and"
                " maps must return one row for each token"
            )
        return rows

    def own_form(self, x: Tensor, shape: Sequence[int], *, turned: bool | None = None) -> Tensor:
        """States (batch, tokens, width) with the module's own axes, of that shape; `turned` as in
        `rows_like`.
        """
        if len(shape) == 2:
            return x.reshape(tuple(shape))
        swapped = self._swapped(x, shape, turned=turned)
        if swapped is not None:
            return swapped
        axes = [axis for axis in range(len(shape)) if axis not in (self.batch, self.width)]
        in_rows = [shape[axis] for axis in (self.batch, *axes, self.width)]
        return x.reshape(in_rows).movedim((0, -1), (self.batch, self.width))

    def own_form_like(self, x: Tensor, like: Tensor) -> Tensor:
        """A copy of x with the module's own axes, in the form of that tensor."""
        return _laid_out_like(self.own_form(x, like.shape), like)

    def own_state(self, x: Tensor, like: Tensor, number: int) -> Tensor:
        """State `number` in the form of the module's own. A copy, which the module may change."""
        turned = x.reshape(self._turned(self._in_first_order(like, number)).shape)
        own = turned.movedim((0, -1), (self.batch, self.width))
        return _laid_out_like(self._in_first_order(own, number), like)

    def _in_first_order(self, x: Tensor, number: int) -> Tensor:
        """State `number` with its axes in the order of state 0, or the other way round."""
        return x.transpose(0, 1) if number in self.turned else x

    def _swapped(self, x: Tensor, shape: Sequence[int], *, turned: bool | None) -> Tensor | None:
        """x with its first two axes in the order that they have in that shape, as a part of a model
        may turn them for itself; None if the shape does not tell it.
        """
        sizes = tuple(x.shape[:-1])
        has_channels_last = self.number == self.width + 1 == x.dim() == len(shape) == 3
        if not has_channels_last or self.copies > 1:
            return None
        if sizes[0] == sizes[1]:
            return {None: None, False: x, True: x.transpose(0, 1)}[turned]
        if tuple(shape[:2]) == sizes:
            return x
        if tuple(shape[:2]) == sizes[::-1]:
            return x.transpose(0, 1)
        return None

    def _turned(self, x: Tensor) -> Tensor:
        return x.movedim((self.batch, self.width), (0, -1))


def _laid_out_like(x: Tensor, like: Tensor) -> Tensor:
    """A copy that code may view as it may the other one."""
    if like.is_contiguous():
        return x.clone(memory_format=torch.contiguous_format)
    return x.clone()


def turned_among(shapes: Sequence[Sequence[int]]) -> frozenset[int]:
    """The numbers of the states, of these shapes, whose first two axes come in another order than
    those of the first state. Raises ConfigError if other axes do.
    """
    first = tuple(shapes[0])
    orders = [tuple(shape) for shape in shapes]
    others = {
        k: shape
        for k, shape in enumerate(orders)
        if shape != first and sorted(shape) == sorted(first)
    }
    for shape in others.values():
        if len(first) != TOKENS_AND_CHANNELS or shape != (first[1], first[0], first[2]):
            raise ConfigError(
                f"its states have their axes in two orders, {first} and {shape}: turn them once"
                " before the first block, and back behind the last one"
            )
    return frozenset(others)


def axes_that_fit(
    shapes: Sequence[Sequence[int]], width: int, sequences: int, turned: frozenset[int]
) -> Iterator[StateAxes]:
    """What the axes of states of these shapes may count, if axis `width` counts channels. An axis
    of as many sequences comes before one of several rows for each.
    """
    first = shapes[0]
    for batch in sorted(range(len(first)), key=lambda axis: first[axis] != sequences):
        copies, remainder = divmod(first[batch], sequences)
        axes = StateAxes(len(first), batch, width, copies, turned)
        if batch != width and not remainder and axes._fit(shapes):
            yield axes


def without_axes(shapes: Sequence[Sequence[int]], example: Sequence[int]) -> ConfigError:
    """The error for states, of these shapes, of which no axis counts the sequences of the
    example.
    """
    forms = list(dict.fromkeys(map(tuple, shapes)))
    if len(forms) > 1:
        return ConfigError(
            f"its states have two forms, {forms[0]} and {forms[1]}: the tokens of its example"
            f" {tuple(example)} are grouped in another way from part to part, which is not read"
        )
    return ConfigError(
        f"no axis of its states {forms[0]} counts the sequences of its example {tuple(example)},"
        " each of which must be computed for itself: code that averages over the batch, or chooses"
        " by it, makes them read each other"
    )


def channels_of(model: nn.Module, graph: Graph, shape: Sequence[int]) -> int:
    """Which axis of states of that shape counts channels: the last, or the second of convolutions.
    The one along which most linear maps and convolutions act on tensors of such a form; if that
    does not tell, the one whose length most weights have, and then by which kind the maps are.
    """
    ends = (len(shape) - 1, 1)
    weights = list(model.parameters())
    vectors = Counter(len(weight) for weight in weights if weight.dim() == 1)
    inputs = Counter(weight.shape[1] for weight in weights if weight.dim() > 1)
    for found in (
        _maps_along(graph, shape, ends),
        [vectors[shape[axis]] + inputs[shape[axis]] for axis in ends],
    ):
        if found[0] != found[1]:
            return ends[found.index(max(found))]
    names = Counter(operation.name for operation in graph.operations)
    of_convolutions = sum(count for name, count in names.items() if "conv" in name)
    if of_convolutions > names["linear"] + names["matmul"]:
        return 1
    return len(shape) - 1


def _maps_along(graph: Graph, shape: Sequence[int], ends: Sequence[int]) -> list[int]:
    """How many linear maps act on the last axis, and how many convolutions on the second, of
    tensors with as many axes as states of that shape, and as long an axis of channels.
    """
    found = [0, 0]
    for operation in graph.operations:
        if operation.name != "linear" and "conv" not in operation.name:
            continue
        given = graph.operations[operation.reads[0]].shape
        end = int(operation.name != "linear")
        axis = ends[end]
        if given is not None and len(given) == len(shape) and given[axis] == shape[axis]:
            found[end] += 1
    return found
