"""Where a map averages values with the rows of a softmax, and what changes the rows before."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from ctrans.interop.attention_function import FUNCTION
from ctrans.interop.operation_names import CONVERSIONS, MOVES, NORM, SUMS
from ctrans.interop.operations import Graph, Made

ATTENTION = ("scaled_dot_product_attention", FUNCTION.__name__)
"""Operations of an attention, even of one that reads no other token of its state."""
AVERAGING = ("matmul", "bmm", "einsum", "__matmul__")
CHANGES = (
    *SUMS,
    NORM,
    "mul",
    "mul_",
    "div",
    "div_",
    "masked_fill",
    "masked_fill_",
    "where",
    "nan_to_num",
    "einsum",
    "matmul",
    "linear",
    "conv2d",
    "layer_norm",
    "batch_norm",
)
"""Operations after which the rows of a softmax are others."""


class Average(NamedTuple):
    """An operation that averages values, and the names of what changes the rows before it."""

    number: int
    changes: tuple[str, ...]


def averages_among(graph: Graph, operations: set[int]) -> list[Average]:
    """Those of the operations that average values with the rows of a softmax among them."""
    found = []
    for n in sorted(operations):
        if graph.operations[n].name in ATTENTION:
            found.append(Average(n, ()))
        else:
            found += [Average(n, tuple(changes)) for changes in _rows_of(graph, n, operations)]
    return found


def _rows_of(graph: Graph, n: int, among: set[int]) -> Iterator[list[str]]:
    """For each operand of operation n that weighs the tokens of another one, and is made of the
    rows of a softmax: what changes them.
    """
    operation = graph.operations[n]
    operands = [m for m in operation.reads if not graph.is_of_weights(m)]
    if operation.name not in AVERAGING or len(operands) < 2:
        return
    for rows in operands:
        if not _weighs_others(graph, n, rows, operands):
            continue
        changes = _changes_behind_a_softmax(graph, rows, among)
        if changes is not None:
            yield changes


def _weighs_others(graph: Graph, n: int, rows: int, operands: list[int]) -> bool:
    """Whether an operand has a row for each of several tokens, which the others do not have: the
    scores of a token's experts are for what is computed for that token.
    """
    operation = graph.operations[n]
    if operation.name != "einsum":
        shapes = [graph.operations[m].shape or () for m in operands]
        shape = graph.operations[rows].shape
        return shape is not None and len(set(map(len, shapes))) == 1 and shape[-2] > 1
    equation, *given = operation.args
    if len(given) == 1 and isinstance(given[0], (list, tuple)):
        given = list(given[0])
    if not isinstance(equation, str) or "->" not in equation:
        return False
    terms = equation.replace(" ", "").split("->")[0].split(",")
    axes = {each.number: term for each, term in zip(given, terms, strict=False) if _is_made(each)}
    if rows not in axes:
        return False
    of_others = {axis for m in operands if m != rows for axis in axes.get(m, "")}
    return bool(set(axes[rows]) - of_others) and bool(set(axes[rows]) & of_others)


def _is_made(value: object) -> bool:
    return isinstance(value, Made)


def _changes_behind_a_softmax(graph: Graph, n: int, among: set[int]) -> list[str] | None:
    """The names of what changes the rows of the softmax that operation n is made of; None if it is
    made of none of these.
    """
    operation = graph.operations[n]
    if n not in among:
        return None
    if operation.name == "softmax" or _is_softmax_by_hand(graph, n):
        return []
    changes_nothing = operation.name in (*MOVES, *CONVERSIONS)
    if not changes_nothing and operation.name not in CHANGES:
        return None
    reads = [m for m in operation.reads if not graph.is_of_weights(m)]
    if changes_nothing:
        reads = reads[:1]
    for m in reads:
        changes = _changes_behind_a_softmax(graph, m, among)
        if changes is not None:
            return changes if changes_nothing else [*changes, operation.name]
    return None


def _is_softmax_by_hand(graph: Graph, n: int) -> bool:
    """Whether operation n divides an exponential by a sum of it."""
    operation = graph.operations[n]
    if operation.name not in ("div", "div_") or len(operation.reads) != 2:
        return False
    numbers = [_unmoved(graph, m) for m in operation.reads]
    numerator, sum_ = (graph.operations[m] for m in numbers)
    if numerator.name not in ("exp", "exp_") or sum_.name != "sum":
        return False
    return _unmoved(graph, sum_.reads[0]) == numbers[0]


def _unmoved(graph: Graph, n: int) -> int:
    while graph.operations[n].name in (*MOVES, *CONVERSIONS):
        n = graph.operations[n].reads[0]
    return n
