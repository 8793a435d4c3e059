"""The residual stream of a forward pass: the sums y = a x + s_1 f_1(x) + s_2 f_2(x) .. that follow
one another up to the output.

The last such sum is found first, then the last one that its x sees, and so on. So a map may read
other tensors beside its state, such as the first state or an encoder's output.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import nn

from ctrans.interop.operations import PRODUCTS, RESHAPES, SUMS, Graph, Made, Operation

PASSED_ON = (*RESHAPES, "dropout", "clone", "type_as", "float", "to")
"""Operations that pass on their input, in evaluation and in its dtype."""
SCALINGS = ("mul", "mul_", "div", "div_")
LERP = "lerp"
AXES = 3
"""Of a state: sequences, tokens and channels."""
FEWEST = 2
"""The fewest sums that make a stream."""


@dataclass(frozen=True)
class Scaled:
    """A tensor times numbers and parameters: the operation that makes the tensor, and these.

    `outer` is the operation that makes the product.
    """

    number: int
    outer: int
    factor: float = 1.0
    scales: tuple[nn.Parameter, ...] = ()

    def times(self, factor: float) -> Scaled:
        return Scaled(self.number, self.outer, factor * self.factor, self.scales)


@dataclass(frozen=True)
class Sum:
    """Operation `y` = a x + the terms; a is `share`, and `x` is the operation that makes x.

    `offset` is a term that parameters alone make, None if there is none.
    """

    x: int
    y: int
    share: float
    terms: tuple[Scaled, ...]
    offset: int | None = None


def unscaled(graph: Graph, n: int) -> Scaled:
    """What operation n multiplies by numbers and parameters, and these."""
    chain = list(_factored(graph, n))
    found = chain[0]
    for product, inside in pairwise(chain):
        if graph.operations[product.number].name in SCALINGS:  # also by 1
            found = inside
    return found


def _factored(graph: Graph, n: int) -> Iterator[Scaled]:
    """Operation n as itself, as a factor times what it multiplies, and so on."""
    outer = n
    factor = 1.0
    scales: tuple[nn.Parameter, ...] = ()
    yield Scaled(n, outer)
    while True:
        operation = graph.operations[n]
        if operation.name in PASSED_ON and len(operation.reads) == 1:
            n = operation.reads[0]
        elif operation.name in SCALINGS and len(operation.args) == 2 and not operation.kwargs:
            made = [each.number for each in operation.args if isinstance(each, Made)]
            states = [number for number in made if not graph.is_of_weights(number)]
            if len(states) != 1:
                return
            other = _factor(graph, operation, states[0])
            if isinstance(other, nn.Parameter):
                scales = (*scales, other)
            elif other is not None:
                factor *= other
            else:
                return
            n = states[0]
        else:
            return
        if graph.operations[n].site is None:
            return
        yield Scaled(n, outer, factor, scales)


def _factor(graph: Graph, operation: Operation, state: int) -> float | nn.Parameter | None:
    """What the operation multiplies the state by; None if that is neither a number nor a parameter
    for all channels or for each.
    """
    inverse = operation.name.startswith("div")
    others = [each for each in operation.args if each != Made(state)]
    if len(others) != 1 or (inverse and operation.args[0] != Made(state)):
        return None
    (other,) = others
    if isinstance(other, (int, float)):
        return 1 / other if inverse else float(other)
    if not isinstance(other, Made) or inverse:
        return None
    parameter = graph.operations[other.number].output
    width = operation.shape[-1] if operation.shape else 1
    if isinstance(parameter, nn.Parameter) and parameter.numel() in (1, width):
        return parameter
    return None


def _operands(graph: Graph, term: Scaled) -> list[Scaled] | None:
    """The operands of a sum, scaled as it is; None if it is no sum."""
    operation = graph.operations[term.number]
    if term.scales or operation.name not in SUMS or len(operation.args) != 2:
        return None
    alpha = float((operation.kwargs or {}).get("alpha", 1))
    if operation.name.startswith("sub"):
        alpha = -alpha
    signs = (1.0, alpha)
    operands = []
    for each, sign in zip(operation.args, signs, strict=True):
        if isinstance(each, Made):
            operands.append(unscaled(graph, each.number).times(sign * term.factor))
        elif each != 0:
            return None
    return operands


def sum_at(graph: Graph, n: int) -> Sum | None:
    """Operation n as a residual sum: one term x is seen by all others through products of matrices.
    None if it is none.
    """
    terms = _operands(graph, Scaled(n, n))
    shape = graph.operations[n].shape
    if terms is None or shape is None or len(terms) < 2:
        return None
    while True:
        x = _state_among(graph, terms, n)
        if x is not None:
            others = [term for term in terms if term.outer != x.outer]
            offsets = [term.outer for term in others if _is_offset(graph, term.outer, n)]
            others = [term for term in others if term.outer not in offsets]
            first = graph.operations[x.number].shape
            if x.scales or first is None or x.factor <= 0 or not others or len(offsets) > 1:
                return None
            if first.numel() != shape.numel() or first[-1] != shape[-1]:
                return None
            return Sum(x.number, n, x.factor, tuple(others), *offsets)
        opened = max(
            (i for i in range(len(terms)) if _operands(graph, terms[i]) is not None),
            key=lambda i: terms[i].number,
            default=None,
        )
        if opened is None:
            return None
        beside = [term.number for i, term in enumerate(terms) if i != opened]
        if any(terms[opened].number in graph.before(other) for other in beside):
            return None  # the sum is a state that another term sees, such as x - mean(x)
        terms[opened : opened + 1] = _operands(graph, terms[opened]) or []


def summands(graph: Graph, term: Scaled) -> list[Scaled]:
    """The two operands of a term that is a sum of two products of matrices, as attention and FFN in
    parallel; otherwise the term alone.
    """
    operands = _operands(graph, term)
    if operands is None or len(operands) != 2:
        return [term]
    if any(graph.is_of_weights(each.number) for each in operands):
        return [term]
    return operands


def _is_offset(graph: Graph, term: int, n: int) -> bool:
    """Whether a term of the sum n is an offset of its channels, that parameters alone make."""
    size = (graph.operations[term].shape or torch.Size([1])).numel()
    return (
        graph.is_of_weights(term) and size < (graph.operations[n].shape or torch.Size([1])).numel()
    )


def _state_among(graph: Graph, terms: list[Scaled], n: int) -> Scaled | None:
    """The term of the sum n that all others see through products of matrices; offsets aside."""
    states = [term for term in terms if not _is_offset(graph, term.outer, n)]
    if len(states) < 2:
        return None
    first = min(states, key=lambda term: term.number)
    others = [term.number for term in states if term is not first]
    for x in _factored(graph, first.outer):
        if graph.operations[x.number].site is None:
            continue
        if all(n in graph.products_of(x.number, n + 1) for n in others):
            if any(_is_a_state(graph, n) for n in others):
                return None
            whole = unscaled(graph, first.outer).factor
            if whole == 0:
                return None
            return x.times(first.factor / whole)
    return None


def _is_a_state(graph: Graph, n: int) -> bool:
    """Whether operation n is a later state of a stream, as in a sum of it and the first state. A
    map may also end in a sum, but that begins with a product of matrices.
    """
    begins = sum_at(graph, n)
    if begins is None:
        return False
    while begins is not None:
        n = begins.x
        begins = sum_at(graph, n)
    return not _is_product(graph, n)


def _is_product(graph: Graph, n: int) -> bool:
    """Whether operation n is a product of matrices, alone or with an offset."""
    n = unscaled(graph, n).number
    operation = graph.operations[n]
    if operation.name in SUMS:
        states = [number for number in operation.reads if not graph.is_of_weights(number)]
        return len(states) == 1 and _is_product(graph, states[0])
    return any(word in operation.name for word in PRODUCTS)


@dataclass(frozen=True)
class StreamPart:
    """A part of a stream, from the state that operation `first` makes to that of `last`. `sum` is
    the sum in it, None if there is none. `is_gated`: whether it is a gated sum.
    """

    first: int
    last: int
    sum: Sum | None
    is_gated: bool = False


def steps_of_the_stream(
    graph: Graph, sink: int, is_norm: Callable[[int, int], bool]
) -> list[StreamPart]:
    """The parts that follow one another up to the sink: each sum, with a norm behind it if
    is_norm(its number, the next state's) says so; and what else is between sums.
    """
    sums = _sums(graph, sink)
    steps: list[StreamPart] = []
    if not sums:
        return _through_bottlenecks(graph, _gated(graph, sink, is_norm), sink)
    for each, then in zip(sums, [*sums[1:], None], strict=True):
        first = _in_its_shape(graph, each.x, sums)
        if steps:
            first = steps[-1].last
        end = _in_its_shape(graph, each.y, sums)
        if then is None:
            if len(sums) > 1 and _is_behind_a_norm(graph, sums[-2], sums[-1], is_norm):
                end = _last_norm(graph, end, sink, is_norm)
            steps.append(StreamPart(first, end, each))
        elif reshaped(graph, then.x)[-1] == reshaped(graph, each.y)[-1]:
            steps.append(StreamPart(first, end, each))
        elif is_norm(each.y, then.x):
            steps.append(StreamPart(first, then.x, each))
        else:
            if any(is_norm(one.y, other.x) for one, other in pairwise(sums)):
                end = _last_norm(graph, end, then.x, is_norm)  # coordinates may follow it
            steps += [StreamPart(first, end, each), StreamPart(end, then.x, None)]
    steps = [
        *_gated_before(graph, steps[0].first),
        *steps,
        *_gated_after(graph, steps[-1].last, sink),
    ]
    return _through_bottlenecks(graph, steps, sink)


def _gated(graph: Graph, sink: int, is_norm: Callable[[int, int], bool]) -> list[StreamPart]:
    """The parts of a stream of gated sums alone: each from the state that a sum sees entry by entry
    to that of the next sum, with what is between, such as a norm.
    """
    found: list[tuple[int, int]] = []
    for y in sorted(graph.before(sink), reverse=True):
        if found and y > found[-1][0]:
            continue
        x = _gated_state(graph, y)
        if x is not None:
            found.append((x, y))
    if not found:
        return []
    ends = [_last_norm(graph, found[0][1], sink, is_norm), *(x for x, _ in found[:-1])]
    steps = [
        StreamPart(x, end, None, is_gated=True) for (x, _), end in zip(found, ends, strict=True)
    ]
    return steps[::-1]


def _gated_state(graph: Graph, y: int) -> int | None:
    """The latest state (batch, tokens, width) of which y is a gated sum; None if there is none. A
    state without an axis of tokens may be that of a recurrence over them.
    """
    shape = graph.operations[y].shape
    if graph.operations[y].name not in (*SUMS, LERP) or shape is None or len(shape) < AXES:
        return None
    return _summed_by_gates(graph, y)


def _summed_by_gates(graph: Graph, y: int) -> int | None:
    """The latest x of which y is a gated sum, if y sees what came before through x alone: where the
    gate reads a branch too, y is also a gated sum of the branch.
    """
    states = [
        x
        for x in sorted(graph.before(y), reverse=True)
        if x < y and graph.operations[x].site is not None and _is_gated_sum(graph, x, y)
    ]
    for i, x in enumerate(states):
        if all(x in graph.bottlenecks(earlier, y)[0] for earlier in states[i + 1 :]):
            return x
    return None


def _gated_after(graph: Graph, x: int, sink: int) -> Iterator[StreamPart]:
    """The gated sums of the state that follow x. Between sums they are parts in any case."""
    for y in graph.bottlenecks(x, sink)[0]:
        if y > x and _is_gated_sum(graph, x, y):
            yield StreamPart(x, y, None, is_gated=True)
            x = y


def _gated_before(graph: Graph, y: int) -> list[StreamPart]:
    """The gated sums of the state that come before y, in order."""
    found: list[StreamPart] = []
    x = _summed_by_gates(graph, y)
    while x is not None:
        found.append(StreamPart(x, y, None, is_gated=True))
        y = x
        x = _summed_by_gates(graph, y)
    return found[::-1]


def _is_gated_sum(graph: Graph, x: int, y: int) -> bool:
    """Whether y = a(x) x + f(x), where a is a gate of each entry and f sees x through products of
    matrices, as in (1 - q) x + q f(x) and lerp(x, f(x), q).
    """
    if graph.operations[y].name not in (*SUMS, LERP):
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
        if n in reached and operation.name in (*SUMS, *SCALINGS, *PASSED_ON, LERP):
            reached |= set(operation.reads)
    return x in reached


def _through_bottlenecks(graph: Graph, steps: list[StreamPart], sink: int) -> list[StreamPart]:
    """The parts, where those whose states are read again by later parts (skips) are one."""
    through = set(graph.bottlenecks(steps[0].first, sink)[0])
    joined: list[StreamPart] = []
    for step in steps:
        if joined and joined[-1].last not in through:
            joined[-1] = StreamPart(joined[-1].first, step.last, None)
        else:
            joined.append(step)
    return joined


def _is_behind_a_norm(
    graph: Graph, sum_: Sum, then: Sum, is_norm: Callable[[int, int], bool]
) -> bool:
    """Whether the next sum reads the norm of a sum."""
    is_another = reshaped(graph, then.x)[-1] != reshaped(graph, sum_.y)[-1]
    return is_another and is_norm(sum_.y, then.x)


def _last_norm(graph: Graph, n: int, sink: int, is_norm: Callable[[int, int], bool]) -> int:
    """The last operation of the norm that follows n; n if none follows."""
    through, _ = graph.bottlenecks(n, sink)
    norms = [m for m in through[1:8] if is_norm(n, m)]
    return max(norms, default=n)


def _in_its_shape(graph: Graph, n: int, sums: Sequence[Sum]) -> int:
    """Operation n, or the one that gives its output as many axes as states have at most."""
    axes = max(len(graph.operations[each.x].shape or ()) for each in sums)

    def has_them(m: int) -> bool:
        return len(graph.operations[m].shape or ()) == axes

    same = [m for m in reshaped(graph, n) if has_them(m)]
    if same and not has_them(n):
        return same[-1]
    for m in range(n, len(graph.operations)):
        operation = graph.operations[m]
        if has_them(m) and (m == n or (operation.name in RESHAPES and n in operation.reads)):
            return m
    return n


def reshaped(graph: Graph, n: int) -> list[int]:
    """Operation n and those before it of which it is a reshaped output, latest first."""
    found = [n]
    while graph.operations[n].name in RESHAPES:
        n = graph.operations[n].reads[0]
        if graph.operations[n].site is None:
            break
        found.append(n)
    return found


def other_sums(graph: Graph, sink: int, steps: Sequence[StreamPart]) -> list[str]:
    """The residual sums that the sink sees and which are in none of the parts, or inside of one:
    the name of the first module whose weights each reads.
    """
    of_parts = {step.sum.y for step in steps if step.sum is not None}
    for step in steps:
        if step.sum is not None and step.sum.offset is not None:
            of_parts.update(graph.operations[step.sum.y].reads)  # the sum without its offset
    others = sums_among(graph, graph.before(sink)) - of_parts
    return [_first_module(graph, n) for n in sorted(others)]


def _first_module(graph: Graph, n: int) -> str:
    """The module of the first parameter that the maps of the sum n read; "" if it has no name."""
    found = sum_at(graph, n)
    assert found is not None, "it is a sum"
    for m in sorted(graph.before(n) & graph.after(found.x) - {found.x}):
        for read in graph.operations[m].reads:
            operation = graph.operations[read]
            if isinstance(operation.output, nn.Parameter) and "." in operation.path:
                return operation.path.rpartition(".")[0]
    return ""


def sums_among(graph: Graph, operations: set[int]) -> set[int]:
    """Those of the operations that are residual sums."""
    candidates = (n for n in operations if graph.operations[n].name in SUMS)
    return {n for n in candidates if sum_at(graph, n) is not None}


def _sums(graph: Graph, sink: int) -> list[Sum]:
    """The residual sums of the stream, of the commonest size. A stream that begins with the model's
    first input comes before one that only reads it, such as a decoder.
    """
    of_input = graph.after(0)
    found = _chain(graph, graph.before(sink) & of_input)
    if found and found[0].x not in of_input:
        beside = graph.before(sink) & of_input
        beside -= graph.after(found[0].x)
        other = _chain(graph, beside)
        if len(other) >= FEWEST and other[0].x in of_input:
            found = other
        else:
            found = _chain(graph, graph.before(sink))

    def size(each: Sum) -> tuple[int, int]:
        shape = graph.operations[each.y].shape or torch.Size([1])
        return shape.numel(), shape[-1]

    if not found:
        return []
    commonest = Counter(map(size, found)).most_common(1)[0][0]
    return [each for each in found if size(each) == commonest]


def _chain(graph: Graph, among: set[int]) -> list[Sum]:
    """The last residual sum among these operations, the last one that its x sees, and so on, in
    order.
    """
    found: list[Sum] = []
    while True:
        latest = sorted(among, reverse=True)
        candidates = (sum_at(graph, n) for n in latest if graph.operations[n].name in SUMS)
        last = next((each for each in candidates if each is not None), None)
        if last is None:
            return found[::-1]
        found.append(last)
        among = among & graph.before(last.x)
