"""Edits of the order of rows within attention's maps: heads, and rotary channels within a head."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from ctrans.examine.search.block_edits import with_thirds
from ctrans.examine.search.edit import Act, Changes, MakeChanges
from ctrans.examine.search.sites import Block, NamedMatrix, WeightSites, thirds


def _words(letter: str, name: str) -> re.Pattern[str]:
    """Names of the map to queries, keys or values."""
    own = f"w_?{letter}|{letter}|{letter}_?proj|{letter}_?lin|to_{letter}|{letter}_net|{name}"
    return re.compile(rf"(^|[._])({own})([._]|$)", re.IGNORECASE)


QUERIES = _words("q", "query|queries")
KEYS = _words("k", "keys?")
VALUES = _words("v", "values?")
MOST_HEADS = 8
"""Pairs among so many heads are exchanged."""
SHOWN = 6


def _roles(block: Block) -> Iterator[tuple[NamedMatrix, NamedMatrix, NamedMatrix]]:
    """The maps to queries, keys and values of each attention of a block, by their names."""
    found = [
        [matrix for matrix in block.matrices.values() if words.search(matrix.place)]
        for words in (QUERIES, KEYS, VALUES)
    ]
    yield from zip(*found, strict=False)


def _head_sizes(sites: WeightSites, q: NamedMatrix, k: NamedMatrix) -> Iterator[tuple[int, int]]:
    """Numbers of query heads, and the channels of a head, that fit the maps."""
    rows, key_rows = (sites.weights[matrix.weight].shape[0] for matrix in (q, k))
    for count in sites.head_counts():
        size = rows // count
        if rows % count == 0 and key_rows % size == 0:
            yield count, size


def rotary_halves(sites: WeightSites, block: Block) -> Iterator[tuple[str, MakeChanges]]:
    """Channels that turn together: in halves of a head where they are neighbours, and the
    reverse.
    """
    for q, k, _ in _roles(block):
        for _, size in _head_sizes(sites, q, k):
            for words, act in _halves(size).items():
                yield (
                    f"the rows of {q.place} and {k.place} in heads of {size} {words}",
                    partial(_rows, sites, (q, k), act),
                )
    for matrix, count in _of_thirds(sites, block):
        size = min(sites.weights[matrix.weight].shape) // count
        for words, act in _halves(size).items():
            yield (
                f"the first two thirds of {matrix.place} in heads of {size} {words}",
                partial(with_thirds, sites, matrix, partial(_first_two, act)),
            )


def _halves(size: int) -> dict[str, Act]:
    if size % 2:
        return {}
    return {
        "from halves to pairs": partial(_turned, shape=(-1, 2, size // 2)),
        "from pairs to halves": partial(_turned, shape=(-1, size // 2, 2)),
    }


def _turned(rows: Tensor, shape: tuple[int, int, int]) -> Tensor:
    """The rows of a shape, with its last two axes exchanged."""
    turned: Tensor = rows.unflatten(0, shape).transpose(1, 2).flatten(0, 2)
    return turned


def _first_two(act: Act, parts: list[Tensor]) -> list[Tensor]:
    return [act(parts[0]), act(parts[1]), parts[2]]


def key_heads(sites: WeightSites, block: Block) -> Iterator[tuple[str, MakeChanges]]:
    """Keys and values of the heads in another order."""
    for q, k, v in _roles(block):
        for _, size in _head_sizes(sites, q, k):
            rows = {sites.weights[matrix.weight].shape[0] for matrix in (k, v)}
            if len(rows) > 1:
                continue
            count = rows.pop() // size
            orders = {
                f"heads {i} and {j} exchanged": _exchange(count, i, j)
                for i, j in itertools.combinations(range(min(count, MOST_HEADS)), 2)
            }
            orders["heads in reverse order"] = list(reversed(range(count)))
            for words, order in orders.items():
                yield (
                    f"of {k.place} and {v.place} the {count} {words}",
                    partial(_rows, sites, (k, v), partial(_in_order, order=order)),
                )


def _exchange(count: int, i: int, j: int) -> list[int]:
    order = list(range(count))
    order[i], order[j] = j, i
    return order


def grouped_queries(sites: WeightSites, block: Block) -> Iterator[tuple[str, MakeChanges]]:
    """Query heads that share keys with their neighbours where they shared them with each n-th one,
    and the reverse, with the columns of the output map.
    """
    for q, k, v in _roles(block):
        rows, key_rows = (sites.weights[matrix.weight].shape[0] for matrix in (q, k))
        if rows == key_rows:
            continue
        outputs = [
            matrix
            for matrix in block.matrices.values()
            if matrix not in (q, k, v)
            and sites.weights[matrix.weight].shape[1] == rows
            and matrix.place.rpartition(".")[0] == q.place.rpartition(".")[0]
        ]
        for count, size in _head_sizes(sites, q, k):
            groups = key_rows // size
            heads = torch.arange(count)
            for order in (heads.view(groups, -1).T, heads.view(-1, groups).T):
                numbers = order.flatten().tolist()
                shown = ", ".join(map(str, numbers[:SHOWN]))
                if len(numbers) > SHOWN:
                    shown += ", .."
                yield (
                    f"the {count} heads of {q.place} in the order {shown}",
                    partial(_heads_with_outputs, sites, q, outputs, numbers),
                )


def _heads_with_outputs(
    sites: WeightSites, q: NamedMatrix, outputs: list[NamedMatrix], order: list[int]
) -> Changes:
    changes = _rows(sites, (q,), partial(_in_order, order=order))
    for matrix in outputs:
        columns = sites.weights[matrix.weight].T
        changes[matrix.weight] = _in_order(columns, order=order).T.contiguous()
    return changes


def heads_of_thirds(sites: WeightSites, block: Block) -> Iterator[tuple[str, MakeChanges]]:
    """A matrix of queries, keys and values: by maps where it was by heads, and the reverse."""
    for matrix, count in _of_thirds(sites, block):
        orders: dict[str, Callable[..., Tensor]] = {
            f"from three maps of {count} heads to {count} heads of three maps": partial(
                _turned_blocks, shape=(3, count)
            ),
            f"from {count} heads of three maps to three maps of {count} heads": partial(
                _turned_blocks, shape=(count, 3)
            ),
        }
        for words, act in orders.items():
            yield (
                f"{matrix.place} {words}",
                partial(with_thirds, sites, matrix, partial(_as_one, act)),
            )


def _of_thirds(sites: WeightSites, block: Block) -> Iterator[tuple[NamedMatrix, int]]:
    """Matrices of queries, keys and values, with numbers of heads that fit them."""
    for matrix in block.matrices.values():
        if thirds(sites.weights[matrix.weight]) is None:
            continue
        for count in sites.head_counts():
            if min(sites.weights[matrix.weight].shape) % count == 0:
                yield matrix, count


def _as_one(act: Act, parts: list[Tensor]) -> list[Tensor]:
    return [act(torch.cat(parts))]


def _turned_blocks(rows: Tensor, shape: tuple[int, int]) -> Tensor:
    """The rows in blocks of a shape, with its axes exchanged."""
    turned: Tensor = rows.unflatten(0, (*shape, -1)).transpose(0, 1).flatten(0, 2)
    return turned


def _rows(sites: WeightSites, matrices: tuple[NamedMatrix, ...], act: Act) -> Changes:
    """The matrices with their rows, and biases, in another order."""
    return {
        name: act(sites.weights[name]).contiguous() for matrix in matrices for name in matrix.names
    }


def _in_order(rows: Tensor, order: list[int]) -> Tensor:
    """The equal parts of the rows, one for each head, in that order."""
    reordered: Tensor = rows.unflatten(0, (len(order), -1))[order].flatten(0, 1)
    return reordered
