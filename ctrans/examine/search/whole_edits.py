"""Edits outside of blocks: of the inputs, embeddings, positions and head, and of how all attention
computes.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from ctrans.examine.search.block_edits import GAINS
from ctrans.examine.search.computation import (
    AttentionInstead,
    OtherRotaryBase,
    before_the_head,
    table_with_base,
)
from ctrans.examine.search.edit import Act, Changes, Edit, Subject, changed, times, transpose
from ctrans.examine.search.sites import WeightSites

FARTHEST_SHIFT = 8
"""Token ids are shifted by up to so many."""
ROW_SHIFTS = (1, -1, 2, -2)
"""Rows of a table are moved by so many: some models leave two positions free."""
SHARPER = 4.0
SOFTEST = 12
"""The outputs are divided by the square root of 2 up to so many times."""
ROTARY_BASES = (1e2, 1e3, 1e4, 1e5, 5e5, 1e6)
RANGES: dict[str, Act] = {
    "times 255": lambda x: x * 255,
    "divided by 255": lambda x: x / 255,
    "from 0..1 to -1..1": lambda x: 2 * x - 1,
    "from -1..1 to 0..1": lambda x: (x + 1) / 2,
    "with mean 0 and deviation 1": lambda x: (x - x.mean()) / x.std(),
}
"""What may have become of an image's numbers."""


def other_inputs(subject: Subject) -> Iterator[Edit]:
    """Token ids shifted or in reverse order; images flipped, with colours in reverse order, or in
    another range.
    """
    acts: dict[str, Act] = {}
    if subject.reads_ids:
        vocabulary = subject.vocabulary or int(subject.inputs.max()) + 1
        for shift in range(1, FARTHEST_SHIFT + 1):
            for signed in (shift, -shift):
                acts[f"{signed:+d}"] = partial(_shifted, shift=signed, vocabulary=vocabulary)
        acts["in reverse order"] = partial(torch.flip, dims=(-1,))
        name = "token ids"
    else:
        acts |= RANGES
        for axis in range(1, subject.inputs.dim()):
            acts[f"with axis {axis} in reverse order"] = partial(torch.flip, dims=(axis,))
        if subject.inputs.dim() > 3 and subject.inputs.shape[-1] == subject.inputs.shape[-2]:
            acts["with rows and columns exchanged"] = partial(torch.transpose, dim0=-1, dim1=-2)
        name = "inputs"
    for words, act in acts.items():
        yield Edit(f"{name} {words}", "the inputs", inputs=act)


def _shifted(ids: Tensor, shift: int, vocabulary: int) -> Tensor:
    return (ids + shift).remainder(vocabulary)


def outside_of_blocks(subject: Subject) -> Iterator[Edit]:
    """Embeddings, positions and head: rows moved or in reverse order, transposed, with the other
    sign, or one in place of the other; gains.
    """
    sites = subject.sites
    for matrix in sites.outside.values():
        rows, columns = sites.weights[matrix.weight].shape
        acts: dict[str, Act] = {
            f"the rows of {matrix.place} in reverse order": partial(torch.flip, dims=(0,)),
            f"the sign of {matrix.place} turned": torch.neg,
        }
        for shift in ROW_SHIFTS:
            acts[f"the rows of {matrix.place} moved by {shift}"] = partial(
                torch.roll, shifts=shift, dims=0
            )
        length = subject.inputs.shape[-1]
        if subject.reads_ids and 1 < length < rows:
            acts[f"the first {length} rows of {matrix.place} in reverse order"] = partial(
                _first_reversed, count=length
            )
        if rows == columns:
            acts[f"{matrix.place} transposed"] = transpose
        for words, act in acts.items():
            yield Edit(words, matrix.place, partial(changed, sites, (matrix.weight,), act))
    for one, other in itertools.permutations(sites.outside.values(), 2):
        weight = sites.weights[other.weight]
        if weight.shape == sites.weights[one.weight].shape:
            yield Edit(
                f"{one.place} set to {other.place}",
                one.place,
                partial(dict[str, Tensor], {one.weight: weight}),
            )
    for name in sites.outside_vectors:
        for words, act in GAINS.items():
            yield Edit(f"{name} {words}", name, partial(changed, sites, (name,), act))


def _first_reversed(rows: Tensor, count: int) -> Tensor:
    return torch.cat([rows[:count].flip(0), rows[count:]])


def other_computation(subject: Subject) -> Iterator[Edit]:
    """A mask of later tokens, rows of softmax over keys, other scales of scores, a norm before the
    head, another base of rotary positions.
    """
    sites = subject.sites
    yield Edit(
        "later tokens masked in all attention",
        "attention",
        during=partial(AttentionInstead, masked=True),
    )
    yield Edit(
        "all attention's softmax over keys",
        "attention",
        during=partial(AttentionInstead, over_keys=True),
    )
    for size in _head_sizes(sites):
        for factor in (size**-0.5, size**0.5):
            yield Edit(
                f"all attention's scores times {factor:.3g}, for heads of {size} channels",
                "attention",
                during=partial(AttentionInstead, factor=factor),
            )
    for name in ("layernorm", "rmsnorm"):
        yield Edit(
            f"a {name} before the head",
            "the head",
            during=partial(before_the_head, sites.module, subject.classes, name),
        )
    for base in ROTARY_BASES:
        yield Edit(
            f"rotary positions of base {base:g}",
            "positions",
            partial(_tables, sites, base),
            during=partial(OtherRotaryBase, base),
        )


def smaller_outputs() -> Iterator[Edit]:
    """Logits times less than 1: no fault is undone by them. They lower the loss of any model that
    is too sure, as each one is on a text unlike that of its training.
    """
    for power in range(1, SOFTEST + 1):
        factor = 2.0 ** (-power / 2)
        yield Edit(f"outputs times {factor:.3g}", "the head", outputs=times(factor))


def larger_outputs(subject: Subject) -> Iterator[Edit]:
    """Logits that are too small."""
    del subject
    yield _larger(SHARPER)


def _larger(factor: float) -> Edit:
    further = None
    if factor < 1000:
        further = partial(_larger, 2 * factor)
    words = f"outputs times {factor:g}"
    return Edit(words, "the head", outputs=times(factor), further=further)


def _head_sizes(sites: WeightSites) -> list[int]:
    """The channels of a head, by the numbers of heads and the most frequent width of maps."""
    widths = [
        sites.weights[matrix.weight].shape[1]
        for block in sites.blocks
        for matrix in block.matrices.values()
    ]
    if not widths:
        return []
    width = max(widths, key=widths.count)
    return sorted({width // count for count in sites.head_counts() if width % count == 0})


def _tables(sites: WeightSites, base: float) -> Changes:
    """Buffers of rotary frequencies, or of their cosines and sines, with another base."""
    changes: Changes = {}
    for name, table in sites.buffers.items():
        other = table_with_base(table, base)
        if other is not None:
            changes[name] = other
    return changes
