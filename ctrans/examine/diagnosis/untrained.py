"""Blocks whose matrices are like random ones, beside blocks that were trained.

The largest singular value of an m x n matrix of independent entries of the variance s^2 is at most
s (sqrt m + sqrt n + t), but for a chance of exp(-t^2/2) (Davidson & Szarek 2001, for normal
entries). A training adds directions that are larger. With s^2 = |W|_F^2/(m n) the *excess* is

    |W|_2/(s (sqrt m + sqrt n + 4)) = sqrt(m n/r)/(sqrt m + sqrt n + 4),   r = |W|_F^2/|W|_2^2

It is below 1 for random entries. A narrow matrix, or one that was hardly trained, stays below 1
too. So a block counts only if all of its matrices are below 1, and most of the other blocks have
one that is clearly above.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence

from ctrans.interop.weight_names import BLOCK
from ctrans.measure.findings import Reading

QUANTITY = "block like random weights"
DEVIATION = 4.0
"""t: by chance a random matrix is above once in 3,000."""
FEWEST_MATRICES = 2
"""A block with fewer matrices tells too little."""


def list_of(name: str) -> str:
    """The list of blocks that a weight belongs to: "encoder.layers"."""
    number = BLOCK.search(name)
    if number is None:
        return ""
    return name[: number.start(1)].rstrip(".")


def excess_of(stable_rank: float, shape: Sequence[int]) -> float:
    """The largest singular value over the largest that random entries would have."""
    rows, columns = shape
    width = math.sqrt(rows) + math.sqrt(columns)
    return math.sqrt(rows * columns / stable_rank) / (width + DEVIATION)


def untrained_blocks(excesses: Mapping[str, Mapping[int, Iterable[float]]]) -> list[Reading]:
    """For each block what most of the other blocks of its list exceed random entries by, if its own
    matrices do not; else 0. `excesses` are those of the matrices of each block, by list.
    """
    return [
        reading
        for path, blocks in excesses.items()
        for reading in _of_list(path, blocks, several=len(excesses) > 1)
    ]


def _of_list(path: str, excesses: Mapping[int, Iterable[float]], *, several: bool) -> list[Reading]:
    largest = {
        block: max(of_block)
        for block, of_block in ((block, list(several)) for block, several in excesses.items())
        if len(of_block) >= FEWEST_MATRICES
    }
    readings: list[Reading] = []
    if len(largest) < 2:
        return readings
    for block, own in largest.items():
        others = statistics.median_high(other for k, other in largest.items() if k != block)
        value = 0.0
        if own <= 1:
            value = others
        figure = (
            f"its largest singular value is {own:.2g} times what random entries have at most; in"
            f" the other blocks {others:.2g} times"
        )
        place = f"block {block}"
        if several:
            place += f" of {path}"
        readings.append(Reading(value, place, figure, block))
    return readings
