"""The operations of a forward pass, and the states of a residual stream among them.

A state is the output of an operation through which all later ones see the input: none of them reads
an earlier one. A stream has sums y = x + f(x) from state to state.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Mapping
from itertools import chain, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ctrans.interop.block_calls import tensors_in

CallSite = tuple[Any, ...]
"""Where code calls an operation: the code, the instruction, and how often it ran before."""
Met = Callable[[CallSite, str, Any, Any], Any]
"""From the place, name, arguments and output of an operation to what it returns instead."""
BETWEEN = ("torch.overrides", "torch.nn.functional", "jaxtyping._decorator")
"""Modules whose code is between a call and its operation; jaxtyping's if it checks types in use."""
SUMS = ("add", "add_", "sub", "sub_", "addcmul")
PRODUCTS = ("mm", "matmul", "linear", "einsum", "tensordot", "conv", "attention")
"""Parts of the names of operations that multiply by matrices."""


class Operations(TorchFunctionMode):
    """Inside, `met` gets each operation."""

    def __init__(self, met: Met):
        super().__init__()
        self.met = met
        self.seen = Counter[CallSite]()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        frame: Any = sys._getframe(1)
        while frame.f_globals.get("__name__") in BETWEEN:
            frame = frame.f_back
        line = frame.f_code, frame.f_lasti
        self.seen[line] += 1
        return self.met(
            (*line, self.seen[line]), func.__name__, (args, kwargs), func(*args, **(kwargs or {}))
        )


class Operation(NamedTuple):
    """An operation and the numbers of those that it reads; a tensor that none made has no place."""

    place: CallSite | None
    name: str
    reads: list[int]
    output: Any

    @property
    def shape(self) -> torch.Size | None:
        """The shape of its output if that is one tensor of numbers."""
        if isinstance(self.output, Tensor) and self.output.is_floating_point():
            return self.output.shape
        return None


class Graph:
    """The operations of one pass, by number."""

    def __init__(self) -> None:
        self.operations: list[Operation] = []
        self._made: dict[int, int] = {}
        self._weights: list[list[nn.Parameter] | None] = []
        """By operation, the parameters that alone make its output, such as a slice of one."""

    def number(self, tensor: Tensor) -> int:
        """The number of the operation that made the tensor, or changed it last."""
        if id(tensor) not in self._made:
            self._add(Operation(None, "", [], tensor), [tensor])
        return self._made[id(tensor)]

    def met(self, place: CallSite, name: str, given: Any, output: Any) -> Any:
        """Adds an operation; for `Operations`."""
        # in place
        inputs = tensors_in(given)
        changes = name.endswith("_")
        if name == "__setitem__":
            found = inputs[:1]
        else:
            found = tensors_in(output)
        made = [x for x in found if changes or all(x is not each for each in inputs)]
        if made:
            self._add(Operation(place, name, [self.number(x) for x in inputs], output), made)
        if not isinstance(
            output, Tensor
        ):  # several outputs: each is an operation that reads the whole
            for i, x in enumerate(tensors_in(output)):
                self._add(Operation((*place, i), "", [self.number(x)], x), [x])
        return output

    def _add(self, operation: Operation, made: list[Tensor]) -> None:
        own = operation.output
        if operation.place:
            parts = [self._weights[n] for n in operation.reads]
        else:
            parts = [[own] if isinstance(own, nn.Parameter) else None]
        self._weights.append(
            None if None in parts else [*dict.fromkeys(chain(*filter(None, parts)))]
        )
        self._made.update(dict.fromkeys(map(id, made), len(self.operations)))
        self.operations.append(operation)

    def weights(self, first: int, last: int) -> list[nn.Parameter]:
        """The parameters that the operations after `first`, up to `last`, read, or slices of
        them.
        """
        read = dict.fromkeys(
            n for each in self.operations[first + 1 : last + 1] for n in each.reads if n != first
        )
        return list(dict.fromkeys(weight for n in read for weight in self._weights[n] or ()))

    def after(self, source: int, without: int | None = None) -> set[int]:
        """The source and the operations that see it, other than through `without`."""
        seen = {source}
        for n in range(source, len(self.operations)):
            if n != without and not seen.isdisjoint(self.operations[n].reads):
                seen.add(n)
        return seen

    def before(self, sink: int) -> set[int]:
        """The sink and the operations that it sees."""
        seen = {sink}
        for n in range(sink, 0, -1):
            if n in seen:
                seen.update(self.operations[n].reads)
        return seen

    def stream(self, source: int, sink: int) -> list[int]:
        """The states from the source to the sink that have the commonest shape: the start of each
        sum, and the end of the last.
        """
        after = self.after(source)
        before = self.before(sink)
        readers: dict[int, list[int]] = {n: [] for n in sorted(after & before)}
        for n in readers:
            for read in {*self.operations[n].reads} & readers.keys():
                readers[read].append(n)
        states = []
        furthest = source
        for n, own in readers.items():
            if furthest <= n:
                states += [n]
            else:
                states += []
            furthest = max(furthest, *own, n)
        ends = {x: y for x, y in pairwise(states) if len(readers[x]) > 1 and self.is_sum(x, y)}
        common = Counter(self.operations[x].shape for x in ends).most_common(1)
        starts = [x for x in ends if self.operations[x].shape == common[0][0]]
        if starts:
            return [*starts, ends[starts[-1]]]
        return []

    def inner_sums(self, states: list[int], sink: int) -> int:
        """How many sums x + f(x) that the sink sees, with a product of matrices in f, are not one
        of those from state to state.
        """
        before = self.before(sink)
        read = Counter(chain(*({*self.operations[n].reads} for n in before)))
        sums = [
            n for n in sorted(before) if self.operations[n].name in SUMS and self._adds_map(n, read)
        ]
        return len(sums) - sum(any(x < n <= y for n in sums) for x, y in pairwise(states))

    def _adds_map(self, n: int, read: Mapping[int, int]) -> bool:
        """Whether operation n adds f(x) to x, where f has a product. `read` counts who reads x."""
        own = self.operations[n]
        for x in own.reads:
            if read[x] > 1 and self.operations[x].place and self.operations[x].shape == own.shape:
                seen = {x}
                multiplied = set[int]()
                for m in range(x + 1, n):
                    reads = self.operations[m].reads
                    name = self.operations[m].name
                    if not seen.isdisjoint(reads):
                        seen.add(m)
                        if not multiplied.isdisjoint(reads) or any(
                            word in name for word in PRODUCTS
                        ):
                            multiplied.add(m)
                if not multiplied.isdisjoint(own.reads):
                    return True
        return False

    def is_sum(self, x: int, y: int) -> bool:
        """Whether the states x and y are of one shape and y = x + .."""
        first = self.operations[x]
        last = self.operations[y]
        return bool(first.place and first.shape and first.shape == last.shape) and self._has_term(
            y, x
        )

    def _has_term(self, n: int, x: int) -> bool:
        own = self.operations[n]
        return n == x or (
            n > x and own.name in SUMS and any(self._has_term(each, x) for each in own.reads)
        )
