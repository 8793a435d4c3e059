"""Diagnosis of weights alone, one tensor in memory at a time, and of what changed between two
checkpoints.

>>> before, after = weight_diagnosis(first), weight_diagnosis(second)
>>> print(change(before.readings, after.readings, updates(first, second)))
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from typing import ClassVar

import torch
from torch import Tensor

from ctrans.dynamics.fields import spectral_norm
from ctrans.examine.diagnosis.diagnose import Diagnosis
from ctrans.examine.diagnosis.norm_instruments import smallest_gain
from ctrans.examine.diagnosis.weight_checks import CHANGE_CHECKS, OTHER_CHANGE, WEIGHT_CHECKS
from ctrans.interop.weight_names import BLOCK, GAIN
from ctrans.measure.findings import Checks, Reading, Readings
from ctrans.measure.measures import MEASURES

WeightReaders = Mapping[str, Callable[[], Tensor]]
"""Functions that read the weights, by name."""
SAFE = (1e-140, 1e140)
"""Lengths between these come from squares that float64 holds."""
EXACT = 2**18
"""Up to so many entries the spectral norm is exact."""
AT_ONCE = 2**20
"""So many entries are converted at once."""
VECTORS = 8
"""Vectors of the power iteration."""
PASSES = 6
"""Passes of the power iteration over the matrix."""
SMALLEST = 16
"""The smaller side of a matrix whose stable rank says something."""
KERNEL = 16
"""A last axis that is no longer is that of a kernel, and not of a stack of matrices."""


class WeightDiagnosis(Diagnosis):
    """Findings and readings of a checkpoint's weights; `segment` of a reading is its block."""

    checks: ClassVar[Checks] = WEIGHT_CHECKS


class Change(Diagnosis):
    """What changed from one checkpoint to another; `segment` of a reading is its block."""

    checks: ClassVar[Checks] = CHANGE_CHECKS


@torch.no_grad()
def weight_diagnosis(
    weights: WeightReaders, progress: Callable[[int], None] | None = None
) -> WeightDiagnosis:
    """The findings of these weights, from one pass over their numbers and three for the spectra."""
    readings: Readings = {}
    for name, reader in weights.items():
        for location, block, part in parts_of(name, reader()):
            # fast; inf also if it overflows
            finite = all(math.isfinite(torch.linalg.vector_norm(chunk)) for chunk in chunks(part))
            bad = 0
            if not finite:
                bad = sum(int((~chunk.isfinite()).sum()) for chunk in chunks(part))
            figures = [
                (
                    "entries that are not finite",
                    float(bad),
                    f"{bad} of {part.numel()} entries are inf or nan",
                )
            ]
            if part.numel() and not bad and part.dim() == 2:
                figures += _figures(part, block)
            elif part.numel() and not bad and GAIN.search(name):
                figures += _gain(part)
            for quantity, value, figure in figures:
                readings.setdefault(quantity, []).append(Reading(value, location, figure, block))
        if progress is not None:
            progress(1)
    without = {
        "all that needs a text": (
            "--weights-only reads weights alone: states, heads and the loss were not measured"
        )
    }
    return WeightDiagnosis(WEIGHT_CHECKS.judge(readings), readings, without)


@torch.no_grad()
def updates(
    before: WeightReaders, after: WeightReaders, progress: Callable[[int], None] | None = None
) -> list[Reading]:
    """|W' - W|/|W| of each weight that both have, in the Frobenius norm; inf for a W of zeros."""
    readings: list[Reading] = []
    for name in after:
        if name in before:
            readings += _updates_of(name, before[name](), after[name]())
        if progress is not None:
            progress(1)
    return readings


def _updates_of(name: str, before: Tensor, after: Tensor) -> Iterator[Reading]:
    """The updates of a weight's matrices; none if its shape changed."""
    if before.shape != after.shape:
        return
    pairs = zip(parts_of(name, before), parts_of(name, after), strict=True)
    for (location, block, old), (_, _, new) in pairs:
        moved = 0.0
        size = 0.0
        for old_chunk, new_chunk in zip(chunks(old), chunks(new), strict=True):
            moved = math.hypot(moved, _length(new_chunk - old_chunk))
            size = math.hypot(size, _length(old_chunk))
        if size:
            value = moved / size
        elif moved:
            value = math.inf
        else:
            value = 0.0
        if value:
            figure = f"it moved by {value:.3g} times its size"
        else:
            figure = "it did not change"
        yield Reading(value, location, figure, block)


def change(before: Readings, after: Readings, updated: list[Reading] | None = None) -> Change:
    """What changed from readings of one checkpoint, or of a baseline, to those of another.

    Readings of the same quantity and place are compared, by the measure that `compares` them.
    """
    changes: Readings = {}
    if updated:
        changes["update over weight"] = updated
    of_quantity = {
        quantity: name for name, measure in MEASURES.items() for quantity in measure.compares
    }
    lost = 0
    new = 0
    for quantity, readings in after.items():
        old = {reading.place: reading for reading in before.get(quantity, ())}
        name = of_quantity.get(quantity, OTHER_CHANGE)
        compare = MEASURES[name].compute
        assert callable(compare), "a measure of a change has a function"
        for reading in readings:
            if reading.place not in old:
                new += 1
                continue
            earlier = old.pop(reading.place)
            value = compare(earlier, reading)
            if math.isnan(value):
                continue
            figure = f"before, {earlier.figure}; now, {reading.figure}"
            # `segment` of a model's reading is no block
            number = re.search(r"\bblock (\d+)", reading.place)
            block = None
            if number is not None:
                block = int(number[1])
            changes.setdefault(name, []).append(Reading(value, reading.place, figure, block))
        lost += len(old)
    missing = {}
    if lost or new:
        missing["figures of one of the two"] = f"{lost} of the first only, {new} of the second only"
    return Change(CHANGE_CHECKS.judge(changes), changes, missing)


def place_and_block(what: str, name: str) -> tuple[str, int | None]:
    """Where something of that name is: its block, if the name has a number, in words and as one."""
    number = BLOCK.search(name)
    if number is None:
        return what, None
    block = int(number[1])
    if "sublayers." in name:
        block = block // 2  # a block of ours has two
    return f"block {block}: {what}", block


def parts_of(name: str, weight: Tensor) -> Iterator[tuple[str, int | None, Tensor]]:
    """Place, block and numbers of a weight, or of each matrix of a stack, such as experts."""
    location, block = place_and_block(f"the weight {name}", name)
    is_a_stack = weight.dim() == 3 and weight.shape[-1] > KERNEL
    if is_a_stack:
        for i, matrix in enumerate(weight):
            yield f"{location}[{i}]", block, matrix
    elif weight.dim() > 2:
        yield location, block, weight.flatten(1)
    else:
        yield location, block, weight


def chunks(weight: Tensor) -> Iterator[Tensor]:
    """The rows in float32 or float64, a part at a time."""
    if not weight.dim():
        weight = weight.unsqueeze(0)
    rows_at_once = max(AT_ONCE // max(weight[:1].numel(), 1), 1)
    for part in weight.split(rows_at_once):
        if part.dtype == torch.float64:
            yield part
        else:
            yield part.float()


def _length(chunk: Tensor) -> float:
    """The Frobenius norm, also of entries whose squares overflow or underflow."""
    length = float(torch.linalg.vector_norm(chunk, dtype=torch.float64))
    if SAFE[0] < length < SAFE[1] or not chunk.numel():
        return length
    largest = float(chunk.abs().max())
    if largest == 0 or not math.isfinite(largest):
        return largest
    return largest * float(torch.linalg.vector_norm(chunk.double() / largest))


def _largest(weight: Tensor) -> float:
    """The largest absolute value."""
    largest = 0.0
    for chunk in chunks(weight):
        low, high = chunk.aminmax()
        largest = max(largest, float(high), -float(low))
    return largest


def _unit(largest: float) -> float:
    """The power of two by which a matrix with this largest entry is divided before its entries are
    squared: 1 unless its squares leave the range of float32.
    """
    if 1e-15 < largest < 1e15:
        return 1.0
    return math.ldexp(1.0, math.frexp(largest)[1] - 1)


def _divided_chunks(weight: Tensor, unit: float) -> Iterator[Tensor]:
    """The chunks divided by the power of two: in float64, unless it is 1."""
    for chunk in chunks(weight):
        if unit == 1:
            yield chunk
        else:
            yield chunk.double() / unit


def _gain(gains: Tensor) -> Iterator[tuple[str, float, str]]:
    size = gains.abs().double()
    largest = float(size.max())
    median = float(size.median())
    yield "largest gain of a norm", largest, f"its largest |gamma| is {largest:.2g}"
    if largest:  # otherwise the whole norm is dead, which its largest gain says
        yield ("smallest gain over the median", *smallest_gain(gains))
    if median:
        figure = (
            f"|gamma| = {largest:.3g} in channel {int(size.argmax())}; the norm's median is"
            f" {median:.2g}"
        )
        yield "largest gain over the median", largest / median, figure


def _figures(weight: Tensor, block: int | None) -> Iterator[tuple[str, float, str]]:
    """Figures of a matrix."""
    largest = _largest(weight)
    if not largest:
        yield "largest entry of a matrix", largest, "every entry is 0, so its output is 0"
        return
    unit = _unit(largest)
    rows = []
    columns = torch.zeros(weight.shape[1], dtype=torch.float64)
    for chunk in _divided_chunks(weight, unit):
        squares = chunk.square()
        rows.append(squares.sum(1))
        columns += squares.sum(0)
    row_lengths = torch.cat(rows).double().sqrt()
    column_lengths = columns.sqrt()
    yield "largest entry of a matrix", largest, f"largest entry {largest:.2g}"
    if block is not None:
        zero_rows = 0
        zero_columns = 0
        if not (row_lengths.all() and column_lengths.all()):  # a length of 0 may have underflowed
            zero_rows, zero_columns = _zeros(weight)
        figure = (
            f"{zero_rows} of {len(row_lengths)} rows and {zero_columns} of {len(column_lengths)}"
            " columns are 0"
        )
        yield "units of zeros", float(zero_rows + zero_columns), figure
    if min(weight.shape) < SMALLEST:
        return
    norm = _spectral_norm(weight, unit)
    stable_rank = float(columns.sum()) / norm**2
    yield "spectral norm", norm * unit, f"spectral norm {norm * unit:.3g}"
    yield "stable rank", stable_rank, f"stable rank {stable_rank:.3g} of {min(weight.shape)}"
    over_rows = _over_the_median(row_lengths)
    over_columns = _over_the_median(column_lengths)
    if over_columns > over_rows:
        channel = f"column {int(column_lengths.argmax())}"
    else:
        channel = f"row {int(row_lengths.argmax())}"
    ratio = max(over_rows, over_columns)
    yield "outlier channel", ratio, f"{channel} has {ratio:.3g} times the median length"


def _zeros(weight: Tensor) -> tuple[int, int]:
    """The number of rows and of columns of zeros."""
    rows = 0
    columns = torch.ones(weight.shape[1], dtype=torch.bool)
    for chunk in chunks(weight):
        is_zero = chunk == 0
        rows += int(is_zero.all(1).sum())
        columns &= is_zero.all(0)
    return rows, int(columns.sum())


def _over_the_median(lengths: Tensor) -> float:
    """The largest length over the median one; 1 if that is 0."""
    median = lengths.median()
    if float(median) == 0:
        return 1.0
    return float(lengths.max() / median)


def _spectral_norm(matrix: Tensor, unit: float) -> float:
    """|W/unit|_2: exact for a small matrix. For a large one from below, by block power iteration:
    about 5% too small for random entries, and exact to 3 digits if few singular values are large.
    """
    if matrix.numel() <= EXACT:
        return spectral_norm(torch.cat(list(_divided_chunks(matrix, unit))).float())
    rows = torch.randn(VECTORS, matrix.shape[1], generator=torch.Generator().manual_seed(0))
    image = rows
    for _ in range(PASSES):
        rows = torch.linalg.qr(image.T).Q.T.contiguous()
        image = torch.zeros_like(rows)
        for chunk in _divided_chunks(matrix, unit):
            chunk = chunk.float()
            # with few rows BLAS is several times faster than with few columns
            image += (rows @ chunk.T) @ chunk
    return math.sqrt(max(float(torch.linalg.eigvalsh((rows @ image.T).double())[-1]), 0.0))
