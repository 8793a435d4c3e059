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
"""From the call site, name, arguments and output of an operation to what it returns instead."""
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
        site = (*line, self.seen[line])
        output = func(*args, **(kwargs or {}))
        return self.met(site, func.__name__, (args, kwargs), output)


class Operation(NamedTuple):
    """An operation and the numbers of those that it reads; a tensor that none made has no call
    site.
    """

    site: CallSite | None
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
        self._numbers: dict[int, int] = {}
        """By id of a tensor, the number of the operation that made it, or changed it last."""
        self._weights: list[list[nn.Parameter] | None] = []
        """By operation, the parameters that alone make its output, such as a slice of one."""

    def number(self, tensor: Tensor) -> int:
        """The number of the operation that made the tensor, or changed it last."""
        if id(tensor) not in self._numbers:
            self._add(Operation(None, "", [], tensor), [tensor])
        return self._numbers[id(tensor)]

    def met(self, site: CallSite, name: str, arguments: Any, output: Any) -> Any:
        """Adds an operation; for `Operations`."""
        inputs = tensors_in(arguments)
        if name == "__setitem__":
            results = inputs[:1]
        else:
            results = tensors_in(output)
        acts_in_place = name.endswith("_")
        if not acts_in_place:  # what it only passes on is no result
            results = [x for x in results if all(x is not input_ for input_ in inputs)]
        if results:
            self._add(Operation(site, name, [self.number(x) for x in inputs], output), results)
        # several outputs: each is an operation that reads them all
        if not isinstance(output, Tensor):
            for i, x in enumerate(tensors_in(output)):
                self._add(Operation((*site, i), "", [self.number(x)], x), [x])
        return output

    def _add(self, operation: Operation, results: list[Tensor]) -> None:
        self._weights.append(self._weights_of(operation))
        for tensor in results:
            self._numbers[id(tensor)] = len(self.operations)
        self.operations.append(operation)

    def _weights_of(self, operation: Operation) -> list[nn.Parameter] | None:
        """The parameters that alone make its output; None if something else takes part."""
        if not operation.site:
            if isinstance(operation.output, nn.Parameter):
                return [operation.output]
            return None
        weights: dict[nn.Parameter, None] = {}
        for number in operation.reads:
            parameters = self._weights[number]
            if parameters is None:
                return None
            weights.update(dict.fromkeys(parameters))
        return list(weights)

    def weights(self, first: int, last: int) -> list[nn.Parameter]:
        """The parameters that the operations after `first`, up to `last`, read, or slices of
        them.
        """
        weights: dict[nn.Parameter, None] = {}
        for operation in self.operations[first + 1 : last + 1]:
            for number in operation.reads:
                if number != first:
                    weights.update(dict.fromkeys(self._weights[number] or ()))
        return list(weights)

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
            for number in {*self.operations[n].reads} & readers.keys():
                readers[number].append(n)
        states = []
        furthest = source
        for n, readers_of_n in readers.items():
            if furthest <= n:
                states.append(n)
            furthest = max(furthest, *readers_of_n, n)
        ends = {x: y for x, y in pairwise(states) if len(readers[x]) > 1 and self.is_sum(x, y)}
        if not ends:
            return []
        shapes = Counter(self.operations[x].shape for x in ends)
        commonest = shapes.most_common(1)[0][0]
        starts = [x for x in ends if self.operations[x].shape == commonest]
        return [*starts, ends[starts[-1]]]

    def inner_sums(self, states: list[int], sink: int) -> int:
        """How many sums x + f(x) that the sink sees, with a product of matrices in f, are not one
        of those from state to state.
        """
        before = self.before(sink)
        readers = Counter(chain(*({*self.operations[n].reads} for n in before)))
        sums = [
            n
            for n in sorted(before)
            if self.operations[n].name in SUMS and self._adds_map(n, readers)
        ]
        steps_with_a_sum = [(x, y) for x, y in pairwise(states) if any(x < n <= y for n in sums)]
        return len(sums) - len(steps_with_a_sum)

    def _adds_map(self, n: int, readers: Mapping[int, int]) -> bool:
        """Whether operation n adds f(x) to x, where f has a product. `readers` counts who reads
        x.
        """
        last = self.operations[n]
        for x in last.reads:
            first = self.operations[x]
            if readers[x] <= 1 or not first.site or first.shape != last.shape:
                continue
            if not self._products_of(x, n).isdisjoint(last.reads):
                return True
        return False

    def _products_of(self, x: int, n: int) -> set[int]:
        """The operations between x and n that see a product of matrices of what x makes."""
        seen = {x}
        multiplied = set[int]()
        for m in range(x + 1, n):
            operation = self.operations[m]
            if seen.isdisjoint(operation.reads):
                continue
            seen.add(m)
            is_product = any(word in operation.name for word in PRODUCTS)
            if is_product or not multiplied.isdisjoint(operation.reads):
                multiplied.add(m)
        return multiplied

    def is_sum(self, x: int, y: int) -> bool:
        """Whether the states x and y are of one shape and y = x + .."""
        first = self.operations[x]
        last = self.operations[y]
        if not first.site or not first.shape or first.shape != last.shape:
            return False
        return self._has_term(y, x)

    def _has_term(self, n: int, x: int) -> bool:
        """Whether x is n or a term of its sum."""
        if n == x:
            return True
        operation = self.operations[n]
        if n < x or operation.name not in SUMS:
            return False
        return any(self._has_term(number, x) for number in operation.reads)
