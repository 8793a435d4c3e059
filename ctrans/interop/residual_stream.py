"""The residual stream of a forward pass: the sums y = a x + s_1 f_1(x) + s_2 f_2(x) .. that follow
one another up to the output.

The last such sum is found first, then the last one that its x sees, and so on. So a map may read
other tensors beside its state, such as the first state or an encoder's output.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import compress, pairwise

import torch
from torch import Tensor, nn

from ctrans.interop.gated_sums import gated_state, is_gated_sum, summed_by_gates
from ctrans.interop.operation_names import MASKS, RESHAPES, SUMS, TURNS
from ctrans.interop.operations import Graph
from ctrans.interop.residual_sums import (
    Sum,
    reshaped,
    share_of,
    sum_at,
    sums_among,
    unscaled,
)

MAKE_ROWS = ("softmax", "scaled_dot_product_attention")
"""Operations that make rows of attention."""
FEWEST = 2
"""The fewest sums that make a stream."""


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
    graph: Graph,
    sink: int,
    is_norm: Callable[[int, int], bool],
    source: int | None = None,
) -> list[StreamPart]:
    """The parts that follow one another up to the sink: each sum, with a norm behind it if
    is_norm(its number, the next state's) says so; and what else is between sums. With a `source`,
    only those that begin with it or behind it.
    """
    steps: list[StreamPart] = []
    if source is None:
        sums = _sums(graph, sink)
    else:
        behind = graph.after(source)
        among = _chain(graph, graph.before(sink) & behind)
        sums = _of_commonest_size(graph, [each for each in among if each.x in behind])
        if not sums:
            return []
    if len(sums) == 1:
        inner = _inside_of(graph, sums[0])
        if inner:
            sums = inner
            sink = inner[-1].y
    if not sums:
        steps = _gated(graph, sink, is_norm)
        if steps:
            return _through_bottlenecks(graph, steps, sink)
        # code that torch does not show may be before the first sum, or behind the last one
        sums = _of_commonest_size(graph, _chain(graph, set(range(len(graph.operations)))))
        if not sums:
            return []
        if sums[-1].y not in graph.before(sink):
            sink = sums[-1].y
    sums = _scaled_behind(graph, sums, sink)
    for each, then in zip(sums, [*sums[1:], None], strict=True):
        first = _in_its_shape(graph, each.x, sums)
        if steps:
            first = steps[-1].last
        end = _in_its_shape(graph, each.y, sums)
        if then is None:
            between = [(one.y, _unmasked(graph, later.x)) for one, later in pairwise(sums)]
            end = _behind_its_norm(graph, between, end, sink, is_norm)
            steps.append(StreamPart(first, end, each))
        elif reshaped(graph, then.x)[-1] == reshaped(graph, each.y)[-1]:
            steps.append(StreamPart(first, end, each))
        elif is_norm(each.y, then.x) and then.x in graph.bottlenecks(each.y, then.y)[0]:
            steps.append(StreamPart(first, then.x, each))
        elif is_norm(each.y, then.x):  # the next part also reads what is not normed
            steps += [StreamPart(first, end, each), StreamPart(end, then.x, None)]
        elif is_norm(each.y, _unmasked(graph, then.x)):
            normed = _unmasked(graph, then.x)
            steps += [StreamPart(first, normed, each), StreamPart(normed, then.x, None)]
        else:
            if any(is_norm(one.y, other.x) for one, other in pairwise(sums)):
                end = _last_norm(graph, end, then.x, is_norm)  # coordinates may follow it
            steps += [StreamPart(first, end, each), StreamPart(end, then.x, None)]
    steps = [step for step in steps if step.first != step.last]
    before = _gated_before(graph, steps[0].first)
    if source is None and not before:
        steps[0] = _from_before_its_norm(graph, steps[0], is_norm)
    if source is not None:
        before = [part for part in before if part.first in graph.after(source)]
    steps = [
        *before,
        *steps,
        *_gated_after(graph, steps[-1].last, sink),
    ]
    return _through_bottlenecks(graph, steps, sink)


def _from_before_its_norm(
    graph: Graph, part: StreamPart, is_norm: Callable[[int, int], bool]
) -> StreamPart:
    """The first part, from before the norm of its state if the part reads that too: then only both
    together are its state.
    """
    through, _ = graph.bottlenecks(0, part.last)
    if part.first in through:
        return part
    for n in reversed(through):
        if 0 < n < part.first and is_norm(n, part.first):
            return StreamPart(n, part.last, None)
    return part


def _unmasked(graph: Graph, n: int) -> int:
    """The operation of which n has some tokens set to a number, such as those of padding."""
    while graph.operations[n].name in MASKS:
        n = graph.operations[n].reads[0]
    return n


def _scaled_behind(graph: Graph, sums: Sequence[Sum], sink: int) -> list[Sum]:
    """These sums, each with the number by which the model multiplies it before the next one: c (x +
    f(x)) is c x + c f(x).
    """
    scaled = [_scaled_at(graph, each, then.x) for each, then in pairwise(sums)]
    found = [each or before for each, before in zip(scaled, sums, strict=False)]
    last = sums[-1]
    have = [each is not None for each in scaled]
    if any(have) and _next_of(have):
        through, _ = graph.bottlenecks(last.y, sink)
        behind = filter(None, (_scaled_at(graph, last, n) for n in through[1:4]))
        last = next(behind, last)
    return [*found, last]


def _scaled_at(graph: Graph, each: Sum, n: int) -> Sum | None:
    """The sum that operation n is: a number times that sum; None if it is another."""
    product = unscaled(graph, n)
    share = share_of(product)
    is_of_the_sum = reshaped(graph, product.number)[-1] == reshaped(graph, each.y)[-1]
    if share in (None, 1.0) or not is_of_the_sum or each.offset is not None:
        return None
    terms = tuple(term.times(share) for term in each.terms)
    return replace(
        each,
        y=n,
        share=share * each.share,
        terms=terms,
        factor=product.factor * each.factor,
        made_by=(*product.made_by, *each.made_by),
    )


def _gated(graph: Graph, sink: int, is_norm: Callable[[int, int], bool]) -> list[StreamPart]:
    """The parts of a stream of gated sums alone: each from the state that a sum sees entry by entry
    to that of the next sum, with what is between, such as a norm.
    """
    found: list[tuple[int, int]] = []
    for y in sorted(graph.before(sink), reverse=True):
        if found and y > found[-1][0]:
            continue
        x = gated_state(graph, y)
        if x is not None:
            found.append((x, y))
    if not found:
        return []
    between = [(earlier[1], later[0]) for later, earlier in pairwise(found)][::-1]
    last = _behind_its_norm(graph, between, found[0][1], sink, is_norm)
    ends = [last, *(x for x, _ in found[:-1])]
    steps = [
        StreamPart(x, end, None, is_gated=True) for (x, _), end in zip(found, ends, strict=True)
    ]
    return steps[::-1]


def _gated_after(graph: Graph, x: int, sink: int) -> Iterator[StreamPart]:
    """The gated sums of the state that follow x. Between sums they are parts in any case."""
    for y in graph.bottlenecks(x, sink)[0]:
        if y > x and is_gated_sum(graph, x, y):
            yield StreamPart(x, y, None, is_gated=True)
            x = y


def _gated_before(graph: Graph, y: int) -> list[StreamPart]:
    """The gated sums of the state that come before y, in order."""
    found: list[StreamPart] = []
    x = summed_by_gates(graph, y)
    while x is not None:
        found.append(StreamPart(x, y, None, is_gated=True))
        y = x
        x = summed_by_gates(graph, y)
    return found[::-1]


def _through_bottlenecks(graph: Graph, steps: list[StreamPart], sink: int) -> list[StreamPart]:
    """The parts, where those whose states are read again by later parts (skips) are one."""
    through = set(graph.bottlenecks(steps[0].first, sink)[0])
    joined: list[StreamPart] = []
    for step in steps:
        if joined and joined[-1].last not in through:
            joined[-1] = StreamPart(joined[-1].first, step.last, None)
        else:
            joined.append(step)
    last = joined[-1].last
    if last not in through:  # what follows the last sum reads an earlier state too
        shape = graph.operations[last].shape
        behind = [n for n in through if n > last and graph.operations[n].shape == shape]
        if behind:
            joined[-1] = StreamPart(joined[-1].first, behind[0], None)
    return joined


def _is_behind_a_norm(
    graph: Graph, made: int, state: int, is_norm: Callable[[int, int], bool]
) -> bool:
    """Whether the next sum's state is the norm of what a sum has made."""
    is_another = reshaped(graph, state)[-1] != reshaped(graph, made)[-1]
    return is_another and is_norm(made, state)


def _behind_its_norm(
    graph: Graph,
    between: Sequence[tuple[int, int]],
    end: int,
    sink: int,
    is_norm: Callable[[int, int], bool],
) -> int:
    """Where the part of the last sum, made at `end`, ends: at the norm that follows it if this is
    a norm of its block, not the model's last one. It is if an earlier sum has a norm at the same
    place of another block, or the sums before have theirs in a pattern that says so. `between` has
    for each of the sums but the last where it is made, and the state of the next sum.
    """
    have = [_is_behind_a_norm(graph, *pair, is_norm) for pair in between]
    if not any(have):
        return end
    last = _last_norm(graph, end, sink, is_norm)
    place = _place_in_a_block(graph, end, last)
    places = {_place_in_a_block(graph, *pair) for pair in compress(between, have)}
    if place and place in places:
        return last
    if place and "" not in places and not all(have):
        return end
    return last if _next_of(have) else end


def _next_of(pattern: Sequence[bool]) -> bool:
    """The entry that follows if these repeat at the shortest distance; the last one if they do
    not.
    """
    for distance in range(1, (len(pattern) + 1) // 2 + 1):
        if all(one == other for one, other in zip(pattern, pattern[distance:], strict=False)):
            return pattern[-distance]
    return pattern[-1]


def _place_in_a_block(graph: Graph, first: int, last: int) -> str:
    """The path of the module whose weights the operations between read, without its numbers; ""
    if they read none.
    """
    return re.sub(r"\d+", "", graph.path_around(graph.weights(first, last)))


def _last_norm(graph: Graph, n: int, sink: int, is_norm: Callable[[int, int], bool]) -> int:
    """The last operation of the norm that follows n; n if none follows."""
    through, _ = graph.bottlenecks(n, sink)
    norms = [m for m in through[1:8] if is_norm(n, m)]
    return max(norms, default=n)


def _in_its_shape(graph: Graph, n: int, sums: Sequence[Sum]) -> int:
    """Operation n, or the one that gives its output as many axes as states have at most, in the
    order that most states have.
    """
    axes = max(len(graph.operations[each.x].shape or ()) for each in sums)

    def has_them(m: int) -> bool:
        return len(graph.operations[m].shape or ()) == axes

    same = [m for m in reshaped(graph, n) if has_them(m)]
    if same and not has_them(n):
        return same[-1]
    for m in range(n, len(graph.operations)):
        operation = graph.operations[m]
        if has_them(m) and (m == n or (operation.name in RESHAPES and n in operation.reads)):
            return _in_its_order(graph, m, _form_of_states(graph, sums))
    return n


def _form_of_states(graph: Graph, sums: Sequence[Sum]) -> torch.Size | None:
    """The shape that most states have; of two that as many have, the one that counts sequences
    first, as the input does.
    """
    shapes = Counter(graph.operations[each.y].shape for each in sums)
    given = graph.operations[0].output.shape

    def sequences_first(shape: torch.Size | None) -> tuple[int, bool]:
        return shapes[shape], shape is not None and shape[0] == given[0]

    return max(shapes, key=sequences_first)


def _in_its_order(graph: Graph, n: int, form: torch.Size | None) -> int:
    """Operation n, or the one before or behind it that gives its tokens the order of that form."""
    shape = graph.operations[n].shape
    if form is None or shape is None or shape == form or sorted(shape) != sorted(form):
        return n
    readers = [m for m in range(n + 1, len(graph.operations)) if n in graph.operations[m].reads]
    if len(readers) == 1 and graph.operations[readers[0]].name in TURNS:
        turned = readers[0]
    elif graph.operations[n].name in TURNS:
        turned = graph.operations[n].reads[0]
    else:
        return n
    if graph.operations[turned].shape == form and graph.operations[turned].site:
        return turned
    return n


def notes_of(graph: Graph, sink: int, steps: Sequence[StreamPart]) -> tuple[str, ...]:
    """What is said of the model beside its parts."""
    notes = []
    others = _other_sums(graph, sink, steps)
    if others:
        names = list(dict.fromkeys(filter(None, (others[0], others[-1]))))
        where = f" ({' .. '.join(names)})" if names else ""
        notes.append(
            f"{len(others)} of its sums x + f(x), inside of parts or beside them,"
            f" {'is' if len(others) == 1 else 'are'} not examined apart{where}: blocks= may name"
            " their list, or example= give their input first"
        )
    before = graph.before(steps[0].first) & graph.after(0)
    earlier = [n for n in before if graph.operations[n].name in MAKE_ROWS]
    if earlier:
        notes.append(
            f"before its first state there {'is' if len(earlier) == 1 else 'are'} {len(earlier)} of"
            " its attentions, which are not examined: their sums are not read"
        )
    if graph.hides_operations:
        notes.append(
            "code inside of torch.vmap, or another transform of torch.func, is not seen: sums that"
            " read its results are in larger parts, or before the first state"
        )
    if any(operation.name == "batch_norm" for operation in graph.operations):
        notes.append("it has batch norms, each of which is a scale and an offset in evaluation")
    return tuple(notes)


def _other_sums(graph: Graph, sink: int, steps: Sequence[StreamPart]) -> list[str]:
    """The residual sums that the sink sees and which are in none of the parts, or inside of one:
    the name of the first module whose weights each reads.
    """
    of_parts = {step.sum.y for step in steps if step.sum is not None}
    for step in steps:
        if step.sum is not None and step.sum.offset is not None:
            of_parts.update(graph.operations[step.sum.y].reads)  # the sum without its offset
        if step.sum is not None:
            of_parts.add(reshaped(graph, unscaled(graph, step.sum.y).number)[-1])
            of_parts.update(_partial_sums(graph, step.sum))
    others = {
        n
        for n in sums_among(graph, graph.before(sink)) - of_parts
        if not _may_be_scores(graph.operations[n].output, graph.operations[steps[0].first].output)
    }
    return [_first_module(graph, n) for n in sorted(others)]


def _partial_sums(graph: Graph, whole: Sum) -> Iterator[int]:
    """The sums of the same state that a sum of several terms reads."""
    for n in graph.operations[whole.y].reads:
        part = sum_at(graph, n)
        if part is not None and part.x == whole.x:
            yield n


def _may_be_scores(y: Tensor, state: Tensor) -> bool:
    """Whether a sum is of no vectors of tokens, such as scores (batch, heads, tokens, tokens)."""
    return y.dim() > state.dim() and y.shape[-1] != state.shape[-1]


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

    return _of_commonest_size(graph, found)


def _inside_of(graph: Graph, outer: Sum) -> list[Sum]:
    """The stream inside of the map of the only sum, as of a Transformer with a skip around it."""
    inside = graph.after(outer.x) - {outer.x}
    for term in outer.terms:
        found = _of_commonest_size(graph, _chain(graph, inside & graph.before(term.number)))
        if len(found) >= FEWEST and found[0].x in inside:
            return found
    return []


def _of_commonest_size(graph: Graph, sums: list[Sum]) -> list[Sum]:
    """The sums of the commonest size."""

    def size(each: Sum) -> tuple[int, int]:
        shape = graph.operations[each.y].shape or torch.Size([1])
        return shape.numel(), shape[-1]

    if not sums:
        return []
    commonest = Counter(map(size, sums)).most_common(1)[0][0]
    return [each for each in sums if size(each) == commonest]


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
