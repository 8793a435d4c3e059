"""Gated sums in the graph of a forward pass: y = a(x) x + f(x), where the state sets a gate a of
each entry.
"""

from __future__ import annotations

from ctrans.interop.operation_names import SUMS
from ctrans.interop.operations import Graph
from ctrans.interop.residual_sums import PASSED_ON, SCALINGS

AXES = 3
"""Of a state: sequences, tokens and channels."""


def gated_state(graph: Graph, y: int) -> int | None:
    """The latest state (batch, tokens, width) of which y is a gated sum; None if there is none. A
    state without an axis of tokens may be that of a recurrence over them.
    """
    shape = graph.operations[y].shape
    if graph.operations[y].name not in SUMS or shape is None or len(shape) < AXES:
        return None
    return summed_by_gates(graph, y)


def summed_by_gates(graph: Graph, y: int) -> int | None:
    """The latest x of which y is a gated sum, if y sees what came before through x alone: where the
    gate reads a branch too, y is also a gated sum of the branch.
    """
    states = [
        x
        for x in sorted(graph.before(y), reverse=True)
        if x < y and graph.operations[x].site is not None and is_gated_sum(graph, x, y)
    ]
    for i, x in enumerate(states):
        if all(x in graph.bottlenecks(earlier, y)[0] for earlier in states[i + 1 :]):
            return x
    return None


def is_gated_sum(graph: Graph, x: int, y: int) -> bool:
    """Whether y = a(x) x + f(x), where a is a gate of each entry and f sees x through products of
    matrices, as in (1 - q) x + q f(x) and lerp(x, f(x), q).
    """
    if graph.operations[y].name not in SUMS:
        return False
    before, after = graph.operations[x].shape, graph.operations[y].shape
    if (
        before is None
        or after is None
        or (before.numel(), before[-1:]) != (after.numel(), after[-1:])
    ):
        return False
    return y in graph.products_of(x, y + 1) and _is_entrywise(graph, x, y)


def _is_entrywise(graph: Graph, x: int, y: int) -> bool:
    """Whether y sees x entry by entry, through sums and products of entries alone."""
    reached = {y}
    for n in range(y, x, -1):
        operation = graph.operations[n]
        if n in reached and operation.name in (*SUMS, *SCALINGS, *PASSED_ON):
            reached |= set(operation.reads)
    return x in reached
