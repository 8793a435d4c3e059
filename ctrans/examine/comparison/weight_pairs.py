"""Which weights of two models belong together."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ctrans.dynamics.weights.on_demand import WeightKey, WeightReader, in_memory, readers_of
from ctrans.examine.comparison.weight_relations import CHUNK, Relation, relation_of

MOMENTS = (1, 2, 4)
"""Powers of |w| whose sums do not depend on the order of a weight's entries, nor on their signs."""
SAME_ENTRIES = 1e-6
"""How far these sums may be apart, relative, for the same entries in some order."""
LIKE = 0.5
"""From this cosine on two weights are one weight that changed."""

Places = Mapping[WeightKey | int, int]
"""The number of the part that has a weight, by the weight's key."""


@dataclass(frozen=True)
class WeightPair:
    """Two weights that belong together, by their names in the two models."""

    first_name: str
    second_name: str
    of_first: WeightReader
    of_second: WeightReader

    @property
    def first(self) -> Tensor:
        return self.of_first.read()

    @property
    def second(self) -> Tensor:
        return self.of_second.read()

    def added_to(self, first: Tensor) -> Tensor:
        """What the second weight has more than the first, which is given."""
        second = self.second.detach()
        widest = torch.promote_types(torch.float32, first.dtype)
        if second.dtype == torch.float64:
            widest = torch.float64
        return second.to(widest, copy=True).sub_(first.detach().to(widest)).to(first.dtype)


@dataclass(frozen=True)
class Unnamed:
    """A weight without a partner of its name. `part` is the number of its part, None if it is in
    none.
    """

    name: str
    reader: WeightReader
    part: int | None
    entries: int
    moments: tuple[float, ...]


def pairs_of(
    first: nn.Module,
    second: nn.Module,
    places_in_first: Places | None = None,
    places_in_second: Places | None = None,
) -> tuple[list[WeightPair], list[str]]:
    """The weights of two modules that belong together, and the names of those without a partner.

    They have the same name. Those without are of the same part and size, and have the same entries
    in some order; or point in like directions; or are the only ones left. Names of other libraries
    say nothing.
    """
    left = dict(_weights(first))
    right = dict(_weights(second))
    pairs = [
        WeightPair(name, name, left.pop(name), right.pop(name))
        for name in list(left)
        if name in right
    ]
    if not left or not right:
        return pairs, [*left, *right]
    of_left = [_unnamed(name, reader, places_in_first or {}) for name, reader in left.items()]
    of_right = [_unnamed(name, reader, places_in_second or {}) for name, reader in right.items()]
    for partner_of in (_of_same_entries, _of_like_direction, _alone):
        for one in list(of_left):
            may_be = [
                each for each in of_right if (each.part, each.entries) == (one.part, one.entries)
            ]
            rivals = [
                each for each in of_left if (each.part, each.entries) == (one.part, one.entries)
            ]
            other = partner_of(one, may_be, rivals)
            if other is not None:
                pairs.append(WeightPair(one.name, other.name, one.reader, other.reader))
                of_left.remove(one)
                of_right.remove(other)
    return pairs, [each.name for each in (*of_left, *of_right)]


def _weights(module: nn.Module) -> Iterator[tuple[str, WeightReader]]:
    """The parameters and buffers. A single whole number counts something, as batches seen."""
    yield from readers_of(module)
    for name, buffer in module.named_buffers():
        counts = buffer.numel() == 1 and not (buffer.is_floating_point() or buffer.is_complex())
        if not counts:
            yield name, in_memory(buffer)


@torch.no_grad()
def _unnamed(name: str, reader: WeightReader, places: Places) -> Unnamed:
    weight = _real(reader)
    moments = [0.0 for _ in MOMENTS]
    # in parts: a large weight has no copy in float64
    for part in weight.reshape(-1).split(CHUNK):
        size = part.double().abs()
        for i, power in enumerate(MOMENTS):
            moments[i] += float(size.pow(power).sum())
    return Unnamed(name, reader, places.get(reader.key), weight.numel(), tuple(moments))


def _real(reader: WeightReader) -> Tensor:
    """The weight, with the parts of complex entries along a last axis."""
    weight = reader.read().detach()
    if weight.is_complex():
        return torch.view_as_real(weight.resolve_conj())
    return weight


Partner = Callable[[Unnamed, list[Unnamed], list[Unnamed]], Unnamed | None]
"""The partner of a weight among those of the other module that may be it, and those of its own
module that may have the same.
"""


def _of_same_entries(one: Unnamed, may_be: list[Unnamed], rivals: list[Unnamed]) -> Unnamed | None:
    """The first weight that has the same entries in some order, up to their signs."""
    for other in may_be:
        if all(
            abs(a - b) <= SAME_ENTRIES * max(abs(a), abs(b))
            for a, b in zip(one.moments, other.moments, strict=True)
        ):
            return other
    return None


@torch.no_grad()
def _of_like_direction(
    one: Unnamed, may_be: list[Unnamed], rivals: list[Unnamed]
) -> Unnamed | None:
    """The weight of the most similar direction, also transposed, if it is similar."""
    weight = _real(one.reader)
    cosines = [(_cosine(weight, _real(other.reader)), other) for other in may_be]
    cosine, best = max(cosines, key=lambda each: each[0], default=(0.0, None))
    if cosine > LIKE:
        return best
    return None


def _alone(one: Unnamed, may_be: list[Unnamed], rivals: list[Unnamed]) -> Unnamed | None:
    """The only weight that it may be, if that may be no other's."""
    if len(may_be) == len(rivals) == 1:
        return may_be[0]
    return None


def _cosine(a: Tensor, b: Tensor) -> float:
    """The largest |cosine| of two weights, in the order in which they are or transposed. 0 if an
    entry of them is not finite.
    """
    squares = _product(a, a) * _product(b, b)
    if not 0 < squares < math.inf:
        return 0.0
    products = [abs(_product(a, b))]
    if a.dim() == 2 and a.t().shape == b.shape:
        products.append(abs(_product(a.t(), b)))
    return max(products) / math.sqrt(squares)


def _product(a: Tensor, b: Tensor) -> float:
    """The sum of the products of entries, in float64, of a part of them at a time."""
    parts = zip(a.reshape(-1).split(CHUNK), b.reshape(-1).split(CHUNK), strict=True)
    return sum(float(x.double() @ y.double()) for x, y in parts)


def relations_of(pairs: Sequence[WeightPair]) -> list[Relation]:
    """How the second weight of each pair follows from the first, in two models. A weight that does
    not show it by itself is rounded to a format only if another weight of the model is.
    """
    relations = [relation_of(pair.first, pair.second) for pair in pairs]
    shown = {relation.words for relation in relations if relation.adds and relation.evident}
    for k, (pair, relation) in enumerate(zip(pairs, relations, strict=True)):
        if not relation.evident and relation.words not in shown:
            relations[k] = relation_of(pair.first, pair.second, formats=())
    return relations


def rounded_pairs(
    found: list[tuple[WeightPair, Relation]],
) -> dict[WeightKey | int, WeightPair]:
    """By the first weight's key, the pairs in which rounding added something to each entry."""
    return {pair.of_first.key: pair for pair, relation in found if relation.adds}
