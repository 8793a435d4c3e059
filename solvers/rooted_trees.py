"""Rooted trees. Each stands for one order condition of Runge-Kutta methods (Butcher; Hairer,
Norsett, Wanner, II.2).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import Any

RootedTree = tuple[Any, ...]
"""The sorted tuple of the trees at its root."""


@functools.cache
def trees(size: int) -> tuple[RootedTree, ...]:
    """All rooted trees with that many nodes (1, 1, 2, 4, 9, ...), each as the sorted tuple of the
    subtrees at its root.
    """
    return tuple(sorted(set(_forests(size - 1, size - 1))))


def _forests(nodes: int, largest: int) -> Iterator[RootedTree]:
    """The forests with that many nodes whose trees have at most `largest` nodes. A forest may come
    more than once.
    """
    if nodes == 0:
        yield ()
    for size in range(1, min(nodes, largest) + 1):
        for tree in trees(size):
            for smaller_trees in _forests(nodes - size, size):
                yield tuple(sorted((tree, *smaller_trees)))


@functools.cache
def density(tree: RootedTree) -> int:
    """gamma(tree) = (number of nodes) * product of the densities of its branches. The order
    condition is sum b phi = 1/gamma.
    """
    return _nodes(tree) * math.prod(map(density, tree))


def _nodes(tree: RootedTree) -> int:
    """The number of nodes."""
    return 1 + sum(_nodes(branch) for branch in tree)
