"""Which maps of a model are like sublayers and in none of the parts that were read.

A verdict is about the parts as read. What comes before them counts as the embedding, what comes
behind them as the head. A map is like a sublayer if its input also goes past it, as in x + f(x),
however the two are combined. Nobody knows whether H is finite there.
"""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from ctrans.base.as_found import as_found
from ctrans.control.outer_code import BEFORE, BEHIND
from ctrans.dynamics.scheme import whole_graph
from ctrans.dynamics.weights.on_demand import has_weights_on_demand
from ctrans.interop.block_calls import Call, intercepted, tensors_in
from ctrans.interop.foreign_errors import FOREIGN_ERRORS
from ctrans.interop.model_adapter import ModelAdapter
from ctrans.interop.module_chain import is_linear
from ctrans.interop.operations import (
    Graph,
    Made,
    Operation,
    Operations,
    changes_its_input,
    whole_modules,
)
from ctrans.interop.recorded_calls import without_fast_path

NOT_FOLLOWED = "ctrans cannot follow its code from the last state to the output"


def outer_sums(adapter: ModelAdapter) -> dict[str, str]:
    """Each part outside of the blocks with maps like sublayers, and what that means.

    One pass of the model on its example, in which each block returns its state unchanged, so that
    every such map is outside of them. Nothing is known of a model whose weights are loaded on
    demand, or which does not run so.
    """
    if has_weights_on_demand(adapter.model):
        return {}
    graph = Graph(adapter.model)
    states: list[Tensor] = []

    def unchanged(block: int, call: Call) -> Tensor:
        states.append(call.x)
        return call.x

    mode = Operations(graph.met, whole_modules(adapter.model))
    try:
        with (
            as_found(adapter.model),
            torch.no_grad(),
            without_fast_path(),
            intercepted(adapter.blocks(), unchanged, adapter.form),
            whole_graph(),
            mode,
        ):
            output = adapter.run_like(adapter.like().unsqueeze(0))
    except FOREIGN_ERRORS:
        return {}
    logits = adapter.tensor(output)
    if logits is None or not states:
        return {}
    return in_words(graph, graph.number(states[0]), graph.number(states[-1]), graph.number(logits))


def in_words(graph: Graph, first: int, last: int, sink: int) -> dict[str, str]:
    """The maps up to the first state, and those between the last one and the sink, in words."""
    before = graph.before(first)
    behind = graph.before(sink) - graph.before(last)
    paths = Paths(graph)
    joins = paths.joins(sorted(before | behind | {last}))
    found: dict[str, str] = {}
    for where, among, kind in ((BEFORE, before, "embedding"), (BEHIND, behind, "head")):
        count = len(among & joins)
        if count:
            found[where] = (
                f"maps in it whose input also goes past them, as in x + f(x): {count}. "
                f"It is read as the {kind}"
            )
    if last != sink and last not in graph.before(sink):
        found[BEHIND] = NOT_FOLLOWED
    return found


class Paths:
    """How the operations of a pass see one another: past matrices of weights or through them."""

    def __init__(self, graph: Graph):
        self.graph = graph

    @cached_property
    def activations(self) -> set[int]:
        """The operations that see the model's input, or another tensor that is not the model's."""
        seen: set[int] = set()
        for n, operation in enumerate(self.graph.operations):
            is_foreign = operation.site is None and not operation.path
            if is_foreign or not seen.isdisjoint(operation.reads):
                seen.add(n)
        return seen

    @cached_property
    def of_matrices(self) -> set[int]:
        """The operations that see a matrix of the model's parameters, and no activation."""
        seen: set[int] = set()
        for n, operation in enumerate(self.graph.operations):
            is_matrix = isinstance(operation.output, nn.Parameter) and _has_two_axes(
                operation.output
            )
            if is_matrix or not seen.isdisjoint(operation.reads):
                seen.add(n)
        return seen - self.activations

    def joins(self, region: list[int]) -> set[int]:
        """The operations where something meets its own image under a matrix of weights."""
        past: dict[int, int] = {}  # what each sees past all matrices, as bits of an integer
        through: dict[int, int] = {}  # what it sees through one or more
        found: set[int] = set()
        for n in region:
            if n not in self.activations:
                continue
            operation = self.graph.operations[n]
            reads = [m for m in dict.fromkeys(operation.reads) if m in past]
            past[n] = 1 << n
            through[n] = 0
            known = 0
            for m in reads:
                is_mapped, goes_past = self._ways(operation, m)
                through[n] |= through[m]
                if is_mapped:
                    through[n] |= past[m]
                if goes_past:
                    past[n] |= past[m]
                known |= past[m] & through[m]
            if past[n] & through[n] & ~known:
                found.add(n)
        return found

    def _ways(self, operation: Operation, m: int) -> tuple[bool, bool]:
        """Whether the operation sees operation m through a matrix of its own, and past it."""
        function = operation.function
        if isinstance(function, nn.Module):
            is_map = is_linear(function) or isinstance(
                function, nn.MultiheadAttention | nn.Embedding
            )
            return is_map, not is_map
        if function is None or not any(self._is_matrix(n) for n in operation.reads):
            return False, True
        if self.graph.operations[m].shape is None:
            return True, False  # an index into a table
        try:
            goes_past = self._depends_without_matrices(operation, m)
        except FOREIGN_ERRORS:
            return True, True
        return not goes_past, goes_past

    def _is_matrix(self, n: int) -> bool:
        """Whether operation n makes a matrix of the model's parameters."""
        return n in self.of_matrices and _has_two_axes(self.graph.operations[n].output)

    def _depends_without_matrices(self, operation: Operation, m: int) -> bool:
        """Whether the operation's output changes with m's if its matrices are 0."""

        def value(n: int, *, is_changed: bool) -> object:
            output = self.graph.operations[n].output
            if not isinstance(output, Tensor):
                return output
            if self._is_matrix(n):
                return torch.zeros_like(output)
            if is_changed and n == m:
                generator = torch.Generator().manual_seed(0)
                return torch.randn(output.shape, generator=generator).to(output)
            return output.clone()

        def run(*, is_changed: bool) -> object:
            def filled(each: object) -> object:
                return value(each.number, is_changed=is_changed) if isinstance(each, Made) else each

            args, kwargs = tree_map(filled, (operation.args, operation.kwargs or {}))
            assert operation.function is not None
            output = operation.function(*args, **kwargs)
            return args[0] if changes_its_input(operation.name) else output

        with torch.no_grad():
            as_it_was = tensors_in(run(is_changed=False))
            changed = tensors_in(run(is_changed=True))
            pairs = zip(as_it_was, changed, strict=True)
            return any(not torch.equal(x, y) for x, y in pairs)


def _has_two_axes(value: object) -> bool:
    return isinstance(value, Tensor) and sum(size > 1 for size in value.shape) > 1
