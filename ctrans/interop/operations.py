"""The operations of a forward pass, which of them reads which, and the states of a residual stream
among them.

A state is the output of an operation through which all later ones see the input: no later operation
reads an earlier one. Between two states x and y of a stream acts a sum y = x + f(x).
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ctrans.interop.block_calls import tensors_in

Place = tuple[Any, ...]
"""Where code calls an operation: the code, the instruction in it, and how many calls it made before."""
TORCHS_OWN = ("torch.overrides", "torch.nn.functional")
"""Modules whose code stands between a call and its operation."""
SUMS = ("add", "iadd", "radd")
"""Operations whose output has each argument as a term."""
MORE_SUMS = ("sub", "isub", "addcmul")
"""Operations whose output has the first argument as a term."""


class Operations(TorchFunctionMode):
    """Inside, each operation's output is what `met` returns for its place, name, arguments and
    output.
    """

    def __init__(self, met: Callable[[Place, str, Any, Any], Any]):
        super().__init__()
        self.met, self.seen = met, Counter[Place]()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        frame: Any = sys._getframe(1)
        while frame.f_globals.get("__name__") in TORCHS_OWN:
            frame = frame.f_back
        line = frame.f_code, frame.f_lasti
        self.seen[line] += 1
        return self.met((*line, self.seen[line]), func.__name__, (args, kwargs), func(*args, **(kwargs or {})))


class Graph:
    """The operations of one pass, by number. A tensor that no operation made is one, too."""

    def __init__(self) -> None:
        self.reads: list[list[int]] = []
        self.places: list[Place | None] = []
        self.names: list[str] = []
        self.outputs: list[Any] = []  # kept, as their ids must stay theirs
        self.shapes: list[torch.Size | None] = []
        self._made: dict[int, int] = {}

    def number(self, tensor: Tensor) -> int:
        """The operation that made the tensor."""
        return self._made[id(tensor)] if id(tensor) in self._made else self._add(None, "", [], tensor)

    def met(self, place: Place, name: str, given: Any, output: Any) -> Any:
        """Adds an operation, for `Operations`."""
        inputs, in_place = tensors_in(given), name.endswith("_") and (name[:3] in ("__i", "__s") or name[-2] != "_")
        made = tensors_in(output) or inputs[:1]
        if in_place or not all(any(each is x for x in inputs) for each in made):  # a dropout of 0 makes none
            self._add(place, name.strip("_"), [self.number(x) for x in inputs], output, made)
        return output

    def _add(self, place: Place | None, name: str, reads: list[int], output: Any, made: list[Tensor] | None = None) -> int:
        number = len(self.reads)
        self.reads.append(reads)
        self.places.append(place)
        self.names.append(name)
        self.outputs.append((output, made))
        self.shapes.append(output.shape if isinstance(output, Tensor) and output.is_floating_point() else None)
        for each in [output] if made is None else made:
            self._made[id(each)] = number
        return number

    def leaves(self) -> Iterator[int]:
        """The tensors that no operation made."""
        return (n for n, place in enumerate(self.places) if place is None)

    def weights(self, first: int, last: int) -> list[nn.Parameter]:
        """The parameters that the operations after `first`, up to `last`, read."""
        read = dict.fromkeys(each for reads in self.reads[first + 1 : last + 1] for each in reads)
        return [tensor for n in read if isinstance(tensor := self.outputs[n][0], nn.Parameter)]

    def stream(self, source: int, sink: int) -> list[int]:
        """The states on the way from the source to the sink that have the commonest shape: where
        each sum begins, and where the last one ends.
        """
        within, before = {source}, {sink}
        for n in range(source + 1, sink + 1):
            if not within.isdisjoint(self.reads[n]):
                within.add(n)
        for n in range(sink, source, -1):
            if n in before:
                before.update(self.reads[n])
        readers: dict[int, list[int]] = {n: [] for n in sorted(within & before)}
        for n in readers:
            for read in {*self.reads[n]} & readers.keys():
                readers[read].append(n)
        states, furthest = [], source
        for n, own in readers.items():
            if furthest <= n:
                states.append(n)
            furthest = max(furthest, *own, n)
        ends = {x: y for x, y in pairwise(states) if len(readers[x]) > 1 and self._is_sum(x, y)}
        shapes = Counter(self.shapes[x] for x in ends)
        starts = [x for x in ends if self.shapes[x] == shapes.most_common(1)[0][0] and self.places[x]]
        return [*starts, ends[starts[-1]]] if starts else []

    def _is_sum(self, x: int, y: int) -> bool:
        return x in self._terms(y, x) and self.shapes[x] is not None and self.shapes[x] == self.shapes[y]

    def _terms(self, n: int, first: int) -> set[int]:
        name = self.names[n]
        if n <= first or name not in SUMS + MORE_SUMS:
            return {n}
        return set[int]().union(*(self._terms(each, first) for each in (self.reads[n] if name in SUMS else self.reads[n][:1])))
