"""The maps of a residual stream: operations that are run again, the model's own pass between two of
them, and the module itself from state to state, where a part is none of the known parts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from ctrans.base.shapes import TokenRows
from ctrans.interop.attention_in_model import reference_kernel
from ctrans.interop.foreign_errors import FOREIGN_ERRORS
from ctrans.interop.groups_of_tokens import TokenPlaces, numbered, places_in
from ctrans.interop.operation_names import PRODUCTS
from ctrans.interop.operations import CallSite, Graph
from ctrans.interop.products import product_at
from ctrans.interop.replay import Replayed
from ctrans.interop.residual_sums import MadeBy
from solvers import ConfigError

if TYPE_CHECKING:
    from ctrans.interop.stream_adapter import StreamAdapter


class StreamMap(nn.Module):
    """f_k(x) = x_{k+1} - x, where x takes the place of the k-th state. `weights` are those that the
    module reads between these states.
    """

    label = "sum"
    scale_path = None
    use_reference_kernel = False

    def __init__(
        self, adapter: StreamAdapter, k: int, weights: Sequence[nn.Parameter], why_not: str
    ):
        super().__init__()
        self.adapter = adapter
        self.k = k
        self.weights = nn.ParameterList(weights)
        self.mixes_tokens = True
        self.stages = (self,)
        self.why_not = why_not

    def forward(self, x: TokenRows) -> TokenRows:
        flat = x.reshape(-1, *x.shape[-2:])
        with reference_kernel(self):
            _, after = self.adapter.passed(self.adapter.shaped(flat), {self.k: flat}, self.k + 1)
        return (after - flat).reshape(x.shape)


class NumberOfWeights(Replayed):
    """A number that operations make of weights alone, as these are now."""

    def __init__(self, graph: Graph, made_by: MadeBy):
        super().__init__(graph, None, made_by.number)
        self.is_rest = made_by.is_rest

    def of_weights(self) -> Tensor:
        w = super().of_weights()
        return 1 - w if self.is_rest else w


class MapOfOperations(Replayed):
    """f(x): the operations from the tensor `first` to the tensor `last`, for any state x (batch,
    tokens, width).
    """

    label = "operations"
    adapter: StreamAdapter
    mixing = ""
    """What mixes its tokens if no rows do."""
    averages_with_rows = True
    """Whether the rows of a softmax average values in it, without a change of the rows between."""
    changed_by = ""
    """What changes all rows between the softmax and the averages."""

    def __init__(
        self, adapter: StreamAdapter, graph: Graph, first: int, last: int, offset: int | None
    ):
        super().__init__(graph, first, last, offset=offset)
        self.adapter = adapter
        self._turned: dict[int | None, bool | None] = {}

    def forward(self, x: Tensor) -> Tensor:
        graph = self.adapter.graph_for(x)
        first = self._number_in(graph, self.first)
        last = self._number_in(graph, self.last)
        order = self.order_in(graph, first, last)
        axes = self.adapter.axes
        shape = graph.operations[first].output.shape
        own = axes.own_form(x, shape, turned=self._is_turned(self.first, x))
        self.rows = (x.shape[0], x.shape[1])
        self.axes = axes
        self.tokens_first = axes.tokens_first
        self.own = own.shape
        y = self._run(graph, order, {first: own}, last)
        return axes.rows_like(y, x, turned=self._is_turned(self.last, x))

    def _is_turned(self, n: int | None, x: Tensor) -> bool | None:
        """Whether that operation has tokens before sequences, as a pass of one sequence more shows;
        None where the shape for x shows it, or no pass does.
        """
        sequences, tokens = x.shape[:2]
        if sequences != tokens:
            return None
        if n in self._turned:  # the order of axes is that of the code, for all sizes
            return self._turned[n]
        try:
            graph = self.adapter.graph_for(torch.cat([x, x[:1]]))
            shape = graph.operations[self._number_in(graph, n)].output.shape
        except ConfigError:
            return None
        orders = {(sequences + 1, tokens): False, (tokens, sequences + 1): True}
        self._turned[n] = orders.get(tuple(shape[:2]))
        return self._turned[n]

    def places_of_tokens(self, x: Tensor) -> TokenPlaces | None:
        """Where its first linear map gets the tokens of states x, in groups; None if it gets more
        than moved states.
        """
        graph = self.adapter.graph_for(x)
        first = self._number_in(graph, self.first)
        order = self.order_in(graph, first, self._number_in(graph, self.last))
        for n in order:
            operation = graph.operations[n]
            if any(word in operation.name for word in PRODUCTS):
                break
        else:
            return None
        product = product_at(graph, n)
        channels = -1 if product is None else product.channels
        state = next((m for m in operation.reads if m == first or m in order), None)
        if state is None:
            return None
        shape = graph.operations[first].output.shape
        is_turned = self._is_turned(self.first, x)
        own = self.adapter.axes.own_form(numbered(x), shape, turned=is_turned)
        before = [m for m in order if m <= state]
        try:
            moved = self._run(graph, before, {first: own}, state)
            return places_in(moved.movedim(channels, -1))
        except FOREIGN_ERRORS:
            return None

    def _number_in(self, graph: Graph, n: int | None) -> int:
        """The number in another pass of the operation that is number n in this one."""
        assert n is not None
        site = self.graph.operations[n].site
        if site not in graph.numbers:
            raise ConfigError(
                f"{type(self.adapter.model).__name__} computes with other operations for these"
                " inputs than for its example, as code does that looks at their shape, or at"
                " whether a mask hides anything: give an example= of this shape, and make it the"
                " same operations for every mask"
            )
        return graph.numbers[site]


class MapOfPass(nn.Module):
    """f(x): the model itself from the tensor `first` of its pass to the tensor `last`, where its
    code decides by values what it does, as routed experts do.
    """

    label = "operations"
    mixing = ""
    averages_with_rows = True
    changed_by = ""

    def __init__(self, adapter: StreamAdapter, graph: Graph, first: int, last: int):
        super().__init__()
        self.adapter = adapter
        reader = next(n for n, each in enumerate(graph.operations) if last in each.reads)
        self.first = _site(graph, first)
        # not where `last` itself is made: a loop may make it another number of times
        self.reader = _site(graph, reader)
        self.index = graph.operations[reader].reads.index(last)
        inside = graph.after(first) & graph.before(last)
        modules = [graph.operations[n].function for n in sorted(inside)]
        self.parts = nn.ModuleList(part for part in modules if isinstance(part, nn.Module))
        self.weights = nn.ParameterList(graph.weights(first, last))

    def forward(self, x: Tensor) -> Tensor:
        return self.adapter.between(self.first, self.reader, self.index, x)


def _site(graph: Graph, n: int) -> CallSite:
    site = graph.operations[n].site
    assert site is not None
    return site
