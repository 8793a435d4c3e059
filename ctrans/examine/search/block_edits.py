"""Edits of the weights of blocks: in each other's place, transposed, with another sign or scale,
left out; blocks in another order.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor

from ctrans.examine.search.edit import (
    Act,
    Changes,
    Edit,
    MakeChanges,
    Subject,
    changed,
    times,
    title_of,
    transpose,
)
from ctrans.examine.search.sites import Block, NamedMatrix, WeightSites, thirds

SCALES = (0.25, 4.0)
"""The first factors that are tried; the search goes on in the direction that helps."""
ORDERS = {
    "the first and the second third": (1, 0, 2),
    "the second and the last third": (0, 2, 1),
    "the first and the last third": (2, 1, 0),
}
"""Of queries, keys and values in one matrix."""
SMALLEST_SCALE = 1e-3
"""A search for a factor ends there, and at its inverse."""
GAINS: dict[str, Act] = {
    "plus 1": lambda g: g + 1,
    "minus 1": lambda g: g - 1,
    "set to 1": torch.ones_like,
    "set to 0": torch.zeros_like,
}
"""What may have become of gains: stored less 1, or not loaded."""


def exchanged_matrices(sites: WeightSites, block: Block) -> Iterator[tuple[str, MakeChanges]]:
    """Two maps of the same shape in each other's place."""
    for one, other in itertools.combinations(block.matrices.values(), 2):
        if _shapes(sites, one) == _shapes(sites, other):
            yield (
                f"{one.place} and {other.place} exchanged",
                partial(_exchanged, sites, one.names, other.names),
            )


def _shapes(sites: WeightSites, matrix: NamedMatrix) -> list[torch.Size]:
    return [sites.weights[name].shape for name in matrix.names]


def _exchanged(sites: WeightSites, names: tuple[str, ...], others: tuple[str, ...]) -> Changes:
    changes: Changes = {}
    for name, other in zip(names, others, strict=True):
        changes[name] = sites.weights[other]
        changes[other] = sites.weights[name]
    return changes


def exchanged_thirds(sites: WeightSites, block: Block) -> Iterator[tuple[str, MakeChanges]]:
    """Queries, keys and values that one matrix holds, in another order."""
    for matrix in block.matrices.values():
        if thirds(sites.weights[matrix.weight]) is None:
            continue
        for words, order in ORDERS.items():
            yield (
                f"{words} of {matrix.place} exchanged",
                partial(with_thirds, sites, matrix, partial(_in_order, order)),
            )


def _in_order(order: tuple[int, ...], parts: list[Tensor]) -> list[Tensor]:
    return [parts[i] for i in order]


def with_thirds(
    sites: WeightSites, matrix: NamedMatrix, act: Callable[[list[Tensor]], list[Tensor]]
) -> Changes:
    """The matrix and its bias with other thirds."""
    found = thirds(sites.weights[matrix.weight])
    assert found is not None, "asked before"
    axis, parts = found
    rows = [part.movedim(axis, 0) for part in parts]
    changes = {matrix.weight: torch.cat(act(rows)).movedim(0, axis).contiguous()}
    if matrix.bias is not None:
        changes[matrix.bias] = torch.cat(act(list(sites.weights[matrix.bias].chunk(3))))
    return changes


def transposed(sites: WeightSites, block: Block) -> Iterator[tuple[str, MakeChanges]]:
    """A square map as its transpose."""
    for matrix in block.matrices.values():
        rows, columns = sites.weights[matrix.weight].shape
        if rows == columns:
            yield (
                f"{matrix.place} transposed",
                partial(changed, sites, (matrix.weight,), transpose),
            )


def turned_signs(sites: WeightSites, block: Block) -> Iterator[tuple[str, MakeChanges]]:
    """A map with the other sign."""
    for matrix in block.matrices.values():
        yield (
            f"the sign of {matrix.place} turned",
            partial(changed, sites, (matrix.weight,), torch.neg),
        )


def left_out(sites: WeightSites, block: Block) -> Iterator[tuple[str, MakeChanges]]:
    """A map that gives 0, and all of them."""
    every = tuple(name for matrix in block.matrices.values() for name in matrix.names)
    yield "all maps set to 0", partial(changed, sites, every, torch.zeros_like)
    for matrix in block.matrices.values():
        yield (
            f"{matrix.place} set to 0",
            partial(changed, sites, matrix.names, torch.zeros_like),
        )


def gains(sites: WeightSites, block: Block) -> Iterator[tuple[str, MakeChanges]]:
    """Gains and other vectors of a block plus 1, minus 1, or set to 1 or 0."""
    for place, name in block.vectors.items():
        for words, act in GAINS.items():
            yield f"{place} {words}", partial(changed, sites, (name,), act)


def scaled(subject: Subject) -> Iterator[Edit]:
    """A weight that is too large or too small."""
    sites = subject.sites
    for factor in SCALES:
        for matrix in sites.outside.values():
            yield _scaling(sites, (matrix.weight,), matrix.place, matrix.place, factor, factor)
        for group in sites.alike():
            for place in (*group[0].matrices, *group[0].vectors):
                names = [_weight_at(block, place) for block in group]
                if len(group) > 1:
                    what = f"{place} in all {len(group)} blocks"
                    yield _scaling(sites, tuple(names), title_of(group), what, factor, factor)
                for block, name in zip(group, names, strict=True):
                    what = f"{place} in {block.title}"
                    edit = _scaling(sites, (name,), block.title, what, factor, factor)
                    yield dataclasses.replace(edit, single=True)


def _weight_at(block: Block, place: str) -> str:
    if place in block.matrices:
        return block.matrices[place].weight
    return block.vectors[place]


def _scaling(
    sites: WeightSites, names: tuple[str, ...], place: str, what: str, factor: float, step: float
) -> Edit:
    """Weights times a factor. Further ones are larger, or smaller, by the root of the first."""
    following = factor * step**0.5
    further = None
    if SMALLEST_SCALE < following < 1 / SMALLEST_SCALE:
        further = partial(_scaling, sites, names, place, what, following, step)
    return Edit(
        f"{what} times {factor:.3g}",
        place,
        partial(changed, sites, names, times(factor)),
        further=further,
    )


def blocks_in_another_order(subject: Subject) -> Iterator[Edit]:
    """Neighbours in each other's place, and all blocks in reverse order."""
    sites = subject.sites
    for group in sites.alike():
        if len(group) > 2:
            yield Edit(
                f"the {len(group)} blocks {title_of(group)} in reverse order",
                title_of(group),
                partial(_reordered, sites, group, list(reversed(group))),
            )
        for one, other in pairwise(group):
            yield Edit(
                f"{one.title} and {other.title} exchanged",
                one.title,
                partial(_reordered, sites, [one, other], [other, one]),
                single=True,
            )


def _reordered(sites: WeightSites, places: list[Block], blocks: list[Block]) -> Changes:
    return {
        name: sites.weights[block.names[place]]
        for at, block in zip(places, blocks, strict=True)
        for place, name in at.names.items()
    }
