"""Which maps of a model are like sublayers and in none of the parts that were read.

A verdict is about the parts as read. What comes before them counts as the embedding, what comes
behind them as the head. A map is like a sublayer if its input also goes past it, as in x + f(x),
however the two are combined. Nobody knows whether H is finite there.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import cached_property, partial

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from ctrans.base.as_found import as_found
from ctrans.control.outer_code import BEFORE, BEHIND
from ctrans.dynamics.scheme import whole_graph
from ctrans.dynamics.weights.on_demand import has_weights_on_demand
from ctrans.interop.block_calls import Call, intercepted, tensors_in
from ctrans.interop.foreign_errors import FOREIGN_ERRORS, named_error
from ctrans.interop.model_adapter import ModelAdapter
from ctrans.interop.module_chain import is_linear
from ctrans.interop.operation_names import PRODUCTS
from ctrans.interop.operations import Graph, Made, Operation, Operations
from ctrans.interop.recorded_calls import without_fast_path
from ctrans.interop.residual_sums import SCALINGS
from ctrans.interop.stream_adapter import StreamAdapter
from ctrans.interop.transformers_adapter import TransformersAdapter
from ctrans.interop.whole_modules import whole_modules
from ctrans.interop.writes import changes_its_input

CONTEXT = "what its blocks read beside the state"
KINDS = {BEFORE: "the embedding", CONTEXT: "fixed", BEHIND: "the head"}
"""As what each part outside of the blocks is read."""
NOT_FOLLOWED = "ctrans cannot follow its code from the last state to the output"
MADE_UNSEEN = (
    "code that torch does not show makes a tensor in it of weights or states, as a scripted"
    " function does, so that ctrans cannot follow it"
)


def outside_of(adapter: ModelAdapter) -> dict[str, str]:
    """Each part outside of the blocks or of the residual stream with maps like sublayers, and what
    that means.

    One pass of the model on its example. Nothing is known of a model whose weights are loaded on
    demand, or which does not run so.
    """
    if has_weights_on_demand(adapter.model):
        return {}
    if isinstance(adapter, StreamAdapter):
        record = partial(_outside_of_stream, adapter)
    else:
        assert isinstance(adapter, TransformersAdapter), "there are two kinds"
        record = partial(_outside_of_blocks, adapter)
    try:
        # autograd shows tensors that unseen code makes
        with as_found(adapter.model), all_tracked(adapter.model), without_fast_path():
            return record()
    except FOREIGN_ERRORS:
        pass
    try:
        with as_found(adapter.model), torch.no_grad(), without_fast_path():
            return record()
    except FOREIGN_ERRORS as error:
        return {BEHIND: f"not tested, as it does not run so ({named_error(error)})"}


@contextlib.contextmanager
def all_tracked(model: nn.Module) -> Iterator[None]:
    """Inside, autograd tracks each parameter, frozen ones too."""
    frozen = [
        parameter
        for parameter in model.parameters()
        if parameter.is_floating_point() and not parameter.requires_grad
    ]
    for parameter in frozen:
        parameter.requires_grad = True
    try:
        with torch.enable_grad():
            yield
    finally:
        for parameter in frozen:
            parameter.requires_grad = False


def _outside_of_blocks(adapter: TransformersAdapter) -> dict[str, str]:
    """Each block returns its state unchanged, so that every such map is outside of them."""
    graph = Graph(adapter.model)
    states: list[Tensor] = []
    contexts: list[Tensor] = []

    def unchanged(block: int, call: Call) -> Tensor:
        states.append(call.x)
        contexts.extend(tensors_in(call.context))
        return call.x

    mode = Operations(graph.met, whole_modules(adapter.model), apart=True)
    with intercepted(adapter.blocks(), unchanged, adapter.form), whole_graph(), mode:
        output = adapter.run_like(adapter.like().unsqueeze(0))
    logits = adapter.tensor(output)
    if logits is None or not states:
        return {}
    first, last, sink = (graph.number(x) for x in (states[0], states[-1], logits))
    context = set[int]()
    for tensor in contexts:
        context |= graph.before(graph.number(tensor))
    region = graph.before(sink) | graph.before(last) | context
    return _in_words(graph, region, first, last, sink, context)


def _outside_of_stream(adapter: StreamAdapter) -> dict[str, str]:
    """What is between the first state and the last one is in the parts of the stream."""
    graph, output = adapter.recorded()
    logits = adapter.tensor(output)
    assert logits is not None, "it was read"
    first, last = (adapter.number_in(graph, k) for k in (0, len(adapter.steps)))
    sink = graph.number(logits)
    inside = graph.after(first) & graph.before(last)
    region = graph.before(sink) - inside | {first, last}
    context = graph.before(last) - graph.before(first)
    return _in_words(graph, region, first, last, sink, context)


def _in_words(
    graph: Graph, region: set[int], first: int, last: int, sink: int, context: set[int]
) -> dict[str, str]:
    """The maps like sublayers of a region around the states from `first` to `last`, by place."""
    before = graph.before(first)
    places = {BEFORE: before, CONTEXT: context - before, BEHIND: region - before - context}
    joins = Paths(graph).joins(sorted(region), first, last)
    made_unseen = {n for n in region if _is_made_unseen(graph, n)}
    found: dict[str, str] = {}
    for where, among in places.items():
        count = len(among & joins)
        if count:
            found[where] = (
                f"maps in it whose input also goes past them, as in x + f(x): {count}. "
                f"It is read as {KINDS[where]}"
            )
        elif among & made_unseen:
            found[where] = MADE_UNSEEN
    if last != sink and last not in graph.before(sink):
        found[BEHIND] = NOT_FOLLOWED
    return found


def _is_made_unseen(graph: Graph, n: int) -> bool:
    """Whether code that torch does not show made tensor n of weights or states."""
    operation = graph.operations[n]
    if operation.site is not None or operation.path or operation.shape is None:
        return False
    tensor: Tensor = operation.output
    return tensor.grad_fn is not None


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

    def joins(self, region: list[int], first: int, last: int) -> set[int]:
        """The operations where an activation meets its own image under a matrix of weights. The
        state `last` sees what `first` does.
        """
        past: dict[int, int] = {}  # what each sees past all matrices, as bits of an integer
        through: dict[int, int] = {}  # what it sees through one or more
        gated: dict[int, int] = {}  # what it sees in both ways, in products of the two alone
        found: set[int] = set()
        for n in region:
            if n not in self.activations:
                continue
            operation = self.graph.operations[n]
            reads = [m for m in dict.fromkeys(operation.reads) if m in past]
            past[n] = 0
            if operation.shape is not None:
                past[n] = 1 << n
            through[n] = 0
            gated[n] = 0
            known = 0
            seen_without_gate = 0
            if n == last != first and first in past:
                reads.append(first)
            for m in reads:
                is_mapped, goes_past = False, True
                if m in operation.reads:
                    is_mapped, goes_past = self._ways(operation, m)
                through[n] |= through[m]
                if is_mapped:
                    through[n] |= past[m]
                if goes_past:
                    past[n] |= past[m]
                still_gated = 0 if is_mapped else gated[m]
                gated[n] |= still_gated
                seen_without_gate |= (past[m] | through[m]) & ~still_gated
                known |= past[m] & through[m] & ~gated[m]
            gated[n] &= ~seen_without_gate
            if self._multiplies(operation):
                gated[n] |= past[n] & through[n]  # a gate: no sum of x and f(x) yet
            elif past[n] & through[n] & ~known & ~gated[n]:
                found.add(n)
        return found

    def _multiplies(self, operation: Operation) -> bool:
        """Whether the operation is a product of activations."""
        is_product = operation.name in SCALINGS or any(each in operation.name for each in PRODUCTS)
        activations = [m for m in operation.reads if m in self.activations]
        return (
            is_product
            and len(set(activations)) > 1
            and not any(self._is_matrix(m) for m in operation.reads)
        )

    def _ways(self, operation: Operation, m: int) -> tuple[bool, bool]:
        """Whether the operation sees operation m through a matrix of its own, and past it."""
        function = operation.function
        if isinstance(function, nn.Module):
            is_map = is_linear(function) or isinstance(function, nn.Embedding)
            return is_map, not is_map
        if function is None or not any(self._is_matrix(n) for n in operation.reads):
            return False, True
        if self.graph.operations[m].shape is None:
            return True, False  # an index into a table
        try:
            goes_past = self._depends_without_matrices(operation, m)
        except FOREIGN_ERRORS:
            return True, True
        return not goes_past or operation.reads.count(m) > 1, goes_past

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
