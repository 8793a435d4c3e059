"""Matrices that are as they were drawn, beside those that were trained.

The entries of a fresh matrix are independent draws of one law, and a training ends that. For an
m x n matrix W with the mean square s^2 = |W|_F^2/(m n), independent draws reach with a chance of
exp(-8) at most

    |W|_2 = s (sqrt m + sqrt n + 4)                       (Davidson & Szarek 2001; normal entries)
    Q_m = 1 + 2 sqrt(8/m) + 16/m                          (Laurent & Massart 2000; wide rows)

where Q_m is the variance over rows of the mean square of a row, over the variance (kappa - 1)
s^4/n of independent entries with the fourth moment kappa s^4. So it is for columns. The *excess* of
a matrix is the largest of its singular value, the spread of its rows and that of its columns, each
over what draws reach.

torch draws the weights of `nn.Linear` evenly between -a and a with a = 1/sqrt n. There a training
shows at once, as it pushes entries beyond the edge. The excess of this law is the distance of the
entries from it (Kolmogorov's, and that of the largest entry from a), over what draws reach.

A narrow matrix, or one that was hardly trained, may have an excess below 1 too. So what is below
1 counts only beside what is clearly above.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ctrans.examine.diagnosis.matrix_norms import divided_chunks, unit_of
from ctrans.interop.weight_names import BLOCK, place_and_block
from ctrans.measure.findings import Reading

BLOCK_QUANTITY = "block like random weights"
WEIGHT_QUANTITY = "weight like random ones"
SURPRISE = 8.0
"""By chance draws reach what counts as 1 with a probability of exp(-8), once in 3,000."""
FEWEST_MATRICES = 2
"""A block with fewer matrices tells too little."""
FEWEST_OTHERS = 2
"""A weight is judged beside as many others of its role at least."""
FEWEST_ENTRIES = 2**11
"""A smaller matrix tells too little of even draws."""
SAMPLE = 2**16
"""So many entries are compared with a law, at most."""
ROUNDING = 2.0**-8
"""Of bfloat16."""


@dataclass(frozen=True)
class Excess:
    """How far a matrix is from what draws reach, which is 1: from independent entries, and from
    even ones between the edges of torch's laws.
    """

    independent: float
    even: float


def excess_of(matrix: Tensor, norm: float, largest: float) -> Excess:
    """The excess of a matrix with this spectral norm and this largest entry, both above 0."""
    rows, columns = matrix.shape
    unit = unit_of(largest)
    of_rows = torch.zeros(rows, dtype=torch.float64)
    of_columns = torch.zeros(columns, dtype=torch.float64)
    fourth = 0.0
    start = 0
    for chunk in divided_chunks(matrix, unit):
        squares = chunk.double().square()  # fourth powers leave the range of float32
        of_rows[start : start + len(chunk)] = squares.sum(1).cpu()
        of_columns += squares.sum(0).cpu()
        fourth += float(squares.square().sum())
        start += len(chunk)
    square = float(of_rows.sum()) / matrix.numel()
    reached = math.sqrt(square) * (math.sqrt(rows) + math.sqrt(columns) + math.sqrt(2 * SURPRISE))
    spread = fourth / matrix.numel() - square**2
    independent = max(
        norm / unit / reached,
        _dispersion(of_rows / columns, square, spread / columns),
        _dispersion(of_columns / rows, square, spread / rows),
    )
    return Excess(independent, _even_excess(matrix, largest))


def _dispersion(means: Tensor, mean: float, variance: float) -> float:
    """The standard deviation of mean squares over the largest of independent entries."""
    if variance <= 0:  # entries of one size, such as signs
        return 0.0
    ratio = float((means - mean).square().mean()) / variance
    reached = 1 + 2 * math.sqrt(SURPRISE / len(means)) + 2 * SURPRISE / len(means)
    return math.sqrt(ratio / reached)


def _even_excess(matrix: Tensor, largest: float) -> float:
    """The distance from even entries, with the edge that is next to the largest entry. Infinite for
    a small matrix, which may be near to such an edge by chance.
    """
    if matrix.numel() < FEWEST_ENTRIES:
        return math.inf
    edge = min(_edges(*matrix.shape), key=lambda edge: abs(largest / edge - 1))
    from_edge = abs(largest / edge - 1) / (SURPRISE / matrix.numel() + ROUNDING)
    entries = _sampled(matrix).double() / largest
    below = (entries.sort().values + 1) / 2
    count = len(below)
    place = torch.arange(count, dtype=torch.float64) / count
    distance = float(torch.maximum(below - place, place + 1 / count - below).max())
    reached = math.sqrt((SURPRISE + math.log(2)) / 2 / count)  # by Kolmogorov's law
    return max(from_edge, distance / reached)


def _edges(rows: int, columns: int) -> list[float]:
    """Where torch's uniform laws end: that of its layers, Xavier's, and LeCun's and He's."""
    return [
        math.sqrt(square)
        for square in (1 / columns, 6 / (rows + columns), 3 / columns, 6 / columns)
    ]


def _sampled(matrix: Tensor) -> Tensor:
    """Entries of a matrix: all, or as many as `SAMPLE` at random places."""
    if matrix.numel() <= SAMPLE:
        return matrix.flatten().cpu()
    generator = torch.Generator().manual_seed(0)
    places = torch.randint(matrix.numel(), (SAMPLE,), generator=generator)
    return matrix[places // matrix.shape[1], places % matrix.shape[1]].cpu()


def untrained_blocks(excesses: Mapping[str, Excess]) -> list[Reading]:
    """For each block what most of the other blocks of its list exceed independent draws by, if its
    own matrices do not; else 0. `excesses` are those of matrices by name.
    """
    lists: dict[str, dict[int, list[float]]] = {}
    for name, excess in excesses.items():
        block = _block_of(name)
        if block is not None:
            lists.setdefault(_list_of(name), {}).setdefault(block, []).append(excess.independent)
    return [
        reading
        for path, blocks in lists.items()
        for reading in _of_list(path, blocks, several=len(lists) > 1)
    ]


def untrained_weights(excesses: Mapping[str, Excess]) -> list[Reading]:
    """For each matrix what most of the others of its role, in other blocks, exceed draws by, if it
    does not itself; else 0. For one outside of the blocks, if its entries are even, what most
    blocks exceed independent draws by.
    """
    return [*_of_roles(excesses), *_outside(excesses)]


def _block_of(name: str) -> int | None:
    """The number of the block that a weight belongs to; None outside of blocks."""
    return place_and_block("", name)[1]


def _list_of(name: str) -> str:
    """The list of blocks that a weight belongs to: "encoder.layers"."""
    number = BLOCK.search(name)
    if number is None:
        return ""
    return name[: number.start(1)].rstrip(".")


def _of_list(path: str, blocks: Mapping[int, Sequence[float]], *, several: bool) -> list[Reading]:
    largest = {
        block: max(of_block)
        for block, of_block in blocks.items()
        if len(of_block) >= FEWEST_MATRICES
    }
    readings: list[Reading] = []
    if len(largest) < 2:
        return readings
    for block, own in largest.items():
        others = statistics.median_high(other for k, other in largest.items() if k != block)
        place = f"block {block}"
        if several:
            place += f" of {path}"
        figure = _figure(own, others, "independent")
        readings.append(Reading(others if own <= 1 else 0.0, place, figure, block))
    return readings


def _figure(own: float, others: float, law: str) -> str:
    return (
        f"it differs from {law} draws by {own:.2g} times what they reach by chance; in the"
        f" other blocks {others:.2g} times"
    )


def _of_roles(excesses: Mapping[str, Excess]) -> Iterator[Reading]:
    roles: dict[str, dict[str, Excess]] = {}
    for name, excess in excesses.items():
        number = BLOCK.search(name)
        if number is not None:
            role = f"{name[: number.start(1)]}*{name[number.end(1) :]}"
            roles.setdefault(role, {})[name] = excess
    for weights in roles.values():
        if len(weights) <= FEWEST_OTHERS:
            continue
        for name, own in weights.items():
            others = [excess for other, excess in weights.items() if other != name]
            yield _beside(name, own, others)


def _beside(name: str, own: Excess, others: Sequence[Excess]) -> Reading:
    """The reading of a weight beside those of its role: by the law that tells more."""
    place, block = place_and_block(f"the weight {name}", name)
    readings = []
    for law in ("independent", "even"):
        mine = getattr(own, law)
        peers = statistics.median_high(getattr(each, law) for each in others)
        value = peers if mine <= 1 else 0.0
        readings.append(Reading(value, place, _figure(mine, peers, law), block))
    return max(readings, key=lambda reading: reading.value)


def _outside(excesses: Mapping[str, Excess]) -> Iterator[Reading]:
    of_blocks: dict[tuple[str, int], float] = {}
    for name, excess in excesses.items():
        block = _block_of(name)
        if block is not None:
            key = _list_of(name), block
            of_blocks[key] = max(of_blocks.get(key, 0.0), excess.independent)
    if not of_blocks:
        return
    blocks = statistics.median_high(of_blocks.values())
    for name, excess in excesses.items():
        if _block_of(name) is None:
            figure = (
                f"its entries differ from even draws by {excess.even:.2g} times what they reach by"
                f" chance; the blocks from independent ones by {blocks:.2g} times"
            )
            yield Reading(blocks if excess.even <= 1 else 0.0, f"the weight {name}", figure)
