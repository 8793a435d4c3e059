"""Which residual sums of a model are in none of the parts that were read.

A verdict is about the parts as read, and a sum x + f(x) before them counts as the embedding, one
behind them as the head. Nobody knows whether H is finite there.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ctrans.base.as_found import as_found
from ctrans.dynamics.scheme import whole_graph
from ctrans.dynamics.weights.on_demand import has_weights_on_demand
from ctrans.interop.block_calls import Call, intercepted
from ctrans.interop.foreign_errors import FOREIGN_ERRORS
from ctrans.interop.model_adapter import ModelAdapter
from ctrans.interop.operations import Graph, Operations, whole_modules
from ctrans.interop.recorded_calls import without_fast_path
from ctrans.interop.residual_stream import sums_among

BEFORE = "the part before its blocks"
BEHIND = "the part behind its blocks"


def outer_sums(adapter: ModelAdapter) -> dict[str, str]:
    """Each part outside of the blocks with residual sums, and what that means.

    One pass of the model on its example, in which each block returns its state unchanged, so that
    every sum is outside of them. Nothing is known of a model whose weights are loaded on demand, or
    which does not run so.
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
    """The sums up to the first state, and those between the last one and the sink, in words."""
    before = sums_among(graph, graph.before(first))
    behind = sums_among(graph, graph.before(sink) & graph.after(last) - {last})
    found: dict[str, str] = {}
    for where, sums, kind in ((BEFORE, before, "embedding"), (BEHIND, behind, "head")):
        if sums:
            found[where] = f"sums x + f(x) in it: {len(sums)}. It is read as the {kind}"
    return found
