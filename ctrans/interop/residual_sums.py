"""Residual sums in the graph of a forward pass: y = a x + s_1 f_1(x) + s_2 f_2(x) .., where all f
see x through products of matrices.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor, nn

from ctrans.interop.operation_names import CONVERSIONS, LERP, NORM, PRODUCTS, RESHAPES, SUMS
from ctrans.interop.operations import Graph, Made, Operation
from ctrans.interop.products import product_at

COPIES = ("clone", "dropout")
"""Operations that copy their input, in evaluation."""
PASSED_ON = (*RESHAPES, *COPIES, "type_as", "float", "to")
"""Operations that pass on their input, in evaluation and in its dtype."""
NORMS = (NORM, "layer_norm", "rms_norm")
SCALINGS = ("mul", "mul_", "div", "div_")


@dataclass(frozen=True)
class MadeBy:
    """A number w that operation `number` makes of weights; 1 - w if it `is_rest`."""

    number: int
    is_rest: bool = False


@dataclass(frozen=True)
class Scaled:
    """A tensor times numbers and weights: the operation that makes the tensor, and these.

    `outer` is the operation that makes the product.
    """

    number: int
    outer: int
    factor: float = 1.0
    scales: tuple[Tensor, ...] = ()
    made_by: tuple[MadeBy, ...] = ()
    """What makes the scales."""

    def times(self, factor: float) -> Scaled:
        return replace(self, factor=factor * self.factor)

    def times_weight(self, scale: Tensor, made_by: MadeBy) -> Scaled:
        return replace(self, scales=(*self.scales, scale), made_by=(*self.made_by, made_by))


@dataclass(frozen=True)
class Sum:
    """Operation `y` = a x + the terms; a is `share`, a number that a weight may be now, and `x` is
    the operation that makes x.

    `offset` is a term that parameters alone make, None if there is none.
    """

    x: int
    y: int
    share: float
    terms: tuple[Scaled, ...]
    offset: int | None = None
    factor: float = 1.0
    made_by: tuple[MadeBy, ...] = ()
    """a is this factor times what these make of weights."""


def unscaled(graph: Graph, n: int) -> Scaled:
    """What operation n multiplies by numbers and weights, and these."""
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
    scales: tuple[Tensor, ...] = ()
    made_by: tuple[MadeBy, ...] = ()
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
            if isinstance(other, Tensor):
                scales = (*scales, other)
                made_by = (*made_by, *(MadeBy(m) for m in made if m != states[0]))
            elif other is not None:
                factor *= other
            else:
                return
            n = states[0]
        else:
            return
        if graph.operations[n].site is None:
            return
        yield Scaled(n, outer, factor, scales, made_by)


def _factor(graph: Graph, operation: Operation, state: int) -> float | Tensor | None:
    """What the operation multiplies the state by; None if that is neither a number, nor one that
    parameters alone make, nor a parameter with one for each channel.
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
    weight = graph.operations[other.number].output
    if not isinstance(weight, Tensor):
        return None
    width = operation.shape[-1] if operation.shape else 1
    is_number = weight.numel() == 1 and graph.is_of_weights(other.number)
    is_by_channel = isinstance(weight, nn.Parameter) and weight.numel() == width
    return weight if is_number or is_by_channel else None


def _operands(graph: Graph, term: Scaled) -> list[Scaled] | None:
    """The operands of a sum, scaled as it is; None if it is no sum."""
    operation = graph.operations[term.number]
    if term.scales or operation.name not in SUMS:
        return None
    if operation.name == LERP:
        return _operands_of_lerp(graph, term, operation)
    if len(operation.args) != 2:
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


def _operands_of_lerp(graph: Graph, term: Scaled, operation: Operation) -> list[Scaled] | None:
    """The operands (1 - w) x and w y of lerp(x, y, w), where w is one number."""
    if len(operation.args) != 3:
        return None
    x, y, weight = operation.args
    kept, added = (unscaled(graph, each.number).times(term.factor) for each in (x, y))
    if not isinstance(weight, Made):
        return [kept.times(1 - weight), added.times(weight)]
    value = graph.operations[weight.number].output
    if value.numel() > 1 or not graph.is_of_weights(weight.number):
        return None
    return [
        kept.times_weight(1 - value, MadeBy(weight.number, is_rest=True)),
        added.times_weight(value, MadeBy(weight.number)),
    ]


def sum_at(graph: Graph, n: int) -> Sum | None:
    """Operation n as a residual sum: one term x is seen by all others through products of matrices.
    None if it is none.
    """
    if n not in graph.sums:  # sums of sums of sums would be looked for again and again
        graph.sums[n] = _sum_at(graph, n)
    found: Sum | None = graph.sums[n]
    return found


def _sum_at(graph: Graph, n: int) -> Sum | None:
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
            share = share_of(x)
            if share is None or first is None or not others or len(offsets) > 1:
                return None
            if first.numel() != shape.numel() or first[-1] != shape[-1]:
                return None
            if offsets and not _belongs_to(graph, offsets[0], others) and _adds_to_a_sum(graph, n):
                return None  # the offset is added to a state
            offset = offsets[0] if offsets else None
            terms = _collected(others)
            return Sum(x.number, n, share, tuple(terms), offset, x.factor, x.made_by)
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


def _collected(terms: list[Scaled]) -> list[Scaled]:
    """The terms, where numbers times one tensor are one term: f + 5 f is 6 f."""
    found: dict[object, Scaled] = {}
    for term in terms:
        key = (term.number, tuple(map(id, term.scales)))
        before = found.get(key)
        if before is None:
            found[key] = term
        else:
            found[key] = replace(before, factor=before.factor + term.factor)
    return list(found.values())


def share_of(x: Scaled) -> float | None:
    """a > 0 in the term a x; None for other numbers, and for one of each channel."""
    if any(scale.numel() > 1 for scale in x.scales):
        return None
    share = x.factor * math.prod(float(scale) for scale in x.scales)
    return share if share > 0 else None


def summands(graph: Graph, term: Scaled) -> list[Scaled]:
    """The operands of a term that is a sum of products of matrices, as attention and FFN in
    parallel, and of those that are such sums; otherwise the term alone. The sum may get another
    dtype, as in low precision.
    """
    operation = graph.operations[term.number]
    if operation.name in CONVERSIONS and len(operation.reads) == 1:
        inside = summands(graph, replace(term, number=operation.reads[0]))
        return inside if len(inside) > 1 else [term]
    operands = _operands(graph, term)
    if operands is None or any(graph.is_of_weights(each.number) for each in operands):
        return [term]
    return [inner for each in operands for inner in summands(graph, each)]


def _is_offset(graph: Graph, term: int, n: int) -> bool:
    """Whether a term of the sum n is an offset of its channels, that parameters alone make."""
    size = (graph.operations[term].shape or torch.Size([1])).numel()
    return (
        graph.is_of_weights(term) and size < (graph.operations[n].shape or torch.Size([1])).numel()
    )


def _belongs_to(graph: Graph, offset: int, terms: list[Scaled]) -> bool:
    """Whether an offset is that of the only term, which is a product of matrices without one."""
    (term, *others) = terms
    product = product_at(graph, term.number)
    if others or term.number != term.outer or product is None or product.bias is not None:
        return False
    shape = graph.operations[term.number].shape
    return shape is not None and graph.operations[offset].shape == shape[-1:]


def _adds_to_a_sum(graph: Graph, n: int) -> bool:
    """Whether an operand of the sum n is a residual sum."""
    return any(sum_at(graph, each.number) for each in _operands(graph, Scaled(n, n)) or [])


def _state_among(graph: Graph, terms: list[Scaled], n: int) -> Scaled | None:
    """The term of the sum n that all others see through products of matrices; offsets aside."""
    states = [term for term in terms if not _is_offset(graph, term.outer, n)]
    if len(states) < 2:
        return None
    # a copy of the state may be made after the maps
    first = min(states, key=lambda term: reshaped(graph, term.number)[-1])
    others = [term.number for term in states if term is not first]
    for x in _factored(graph, first.outer):
        if graph.operations[x.number].site is None:
            continue
        if all(n in graph.products_of(x.number, n + 1) for n in others):
            if any(_is_a_state(graph, n) for n in others):
                return None
            inner = unscaled(graph, first.outer)
            if inner.factor == 0:
                return None
            found = x.times(first.factor / inner.factor)
            for scale, made_by in zip(first.scales, first.made_by, strict=True):
                if made_by not in inner.made_by:  # of a lerp
                    found = found.times_weight(scale, made_by)
            return found
    return None


def _is_a_state(graph: Graph, n: int) -> bool:
    """Whether operation n is a later state of a stream, normed or not, or a sum of such and others,
    as in a sum of it and the first state. A map may also end in a sum, but that begins with a
    product of matrices.
    """
    while graph.operations[n].name in NORMS:
        n = graph.operations[n].reads[0]
    begins = sum_at(graph, n)
    if begins is None:
        operands = _operands(graph, Scaled(n, n)) or []
        return any(_is_a_state(graph, each.number) for each in operands)
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


def reshaped(graph: Graph, n: int) -> list[int]:
    """Operation n and those before it of which it is a reshaped output, or a copy, latest first."""
    found = [n]
    while graph.operations[n].name in (*RESHAPES, *COPIES):
        n = graph.operations[n].reads[0]
        if graph.operations[n].site is None:
            break
        found.append(n)
    return found


def sums_among(graph: Graph, operations: set[int]) -> set[int]:
    """Those of the operations that are residual sums."""
    candidates = (n for n in operations if graph.operations[n].name in SUMS)
    return {n for n in candidates if sum_at(graph, n) is not None}
