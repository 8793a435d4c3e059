"""Diagnosis of weights alone, one tensor in memory at a time, and of what changed between two
checkpoints.

>>> before, after = weight_diagnosis(first), weight_diagnosis(second)
>>> print(change(before.readings, after.readings, updates(first, second)))
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from ctrans.base.broken_entries import broken_entries
from ctrans.base.median import median_of
from ctrans.examine.diagnosis.diagnose import Diagnosis
from ctrans.examine.diagnosis.incomplete import QUANTITY as LACKING
from ctrans.examine.diagnosis.incomplete import blocks_after_the_last, incomplete_blocks
from ctrans.examine.diagnosis.matrix_norms import (
    chunks,
    divided_chunks,
    frobenius_norm,
    largest_entry,
    spectral_norm_of,
    unit_of,
)
from ctrans.examine.diagnosis.norm_instruments import smallest_gain
from ctrans.examine.diagnosis.untrained import (
    BLOCK_QUANTITY,
    WEIGHT_QUANTITY,
    Excess,
    excess_of,
    untrained_blocks,
    untrained_weights,
)
from ctrans.examine.diagnosis.weight_checks import CHANGE_CHECKS, OTHER_CHANGE, WEIGHT_CHECKS
from ctrans.interop.checkpoint_weights import WeightReaders
from ctrans.interop.hugging_face_files import CONFIG, EARLIER_CONFIG, read_config
from ctrans.interop.promised_weights import why_unlike_config
from ctrans.interop.stored_weights import FLOATS
from ctrans.interop.weight_names import GAIN, place_and_block
from ctrans.measure.findings import Checks, Reading, Readings
from ctrans.measure.measures import MEASURES
from solvers import ConfigError

NOT_FINITE = "entries that are not finite"
NAMED = 3
"""How many tensors that are not read are named."""
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
    weights: WeightReaders,
    progress: Callable[[int], None] | None = None,
    buffers: WeightReaders | None = None,
    directory: Path | None = None,
    *,
    unread: Mapping[str, str] | None = None,
    left_out: Sequence[str] = (),
    files: int = 1,
    bare: Path | None = None,
    allow_pickle: bool = False,
) -> WeightDiagnosis:
    """The findings of these weights, from one pass over their numbers and three for the spectra.

    Of buffers, such as masks, only entries that are not finite are read. The names and shapes in a
    `directory` are compared with its config.json. `unread` has the dtypes of tensors that are not
    read, and `left_out` the names of what a training keeps next to the weights. `missing` names
    both. These weights are in one of the model's `files`. `bare` is their directory if it has no
    config.json, as an interrupted export leaves it.
    """
    readings: Readings = {}
    excesses: dict[str, Excess] = {}
    for name, reader in weights.items():
        for part_name, part in parts_of(name, reader()):
            location, block = place_and_block(f"the weight {part_name}", part_name)
            # fast; inf also if it overflows
            finite = all(math.isfinite(torch.linalg.vector_norm(chunk)) for chunk in chunks(part))
            bad = 0
            if not finite:
                bad = sum(int((~chunk.isfinite()).sum()) for chunk in chunks(part))
            figures = [
                (
                    NOT_FINITE,
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
            values = {quantity: value for quantity, value, _ in figures}
            if "spectral norm" in values:
                excesses[part_name] = excess_of(
                    part, values["spectral norm"], values["largest entry of a matrix"]
                )
        if progress is not None:
            progress(1)
    for name, reader in (buffers or {}).items():
        broken = _broken_entries(name, reader())
        if broken is not None:
            readings.setdefault(NOT_FINITE, []).append(broken)
        if progress is not None:
            progress(1)
    untrained = {
        BLOCK_QUANTITY: untrained_blocks(excesses),
        WEIGHT_QUANTITY: untrained_weights(excesses),
    }
    readings |= {quantity: several for quantity, several in untrained.items() if several}
    lacking = incomplete_blocks(weights)
    without = {
        "all that needs a text": (
            "--weights-only reads weights alone: states, heads and the loss were not measured"
        )
    }
    if unread:
        examples = ", ".join(f"{name} ({dtype})" for name, dtype in sorted(unread.items())[:NAMED])
        without["tensors that are no floating-point numbers"] = (
            f"{len(unread)} not read, such as {examples}: save weights as {', '.join(FLOATS)}"
        )
    if left_out:
        examples = ", ".join(left_out[:NAMED])
        without["what a training keeps next to the weights"] = (
            f"{len(left_out)} left out, such as {examples}"
        )
    if directory is not None:
        try:
            reason = why_unlike_config(directory, allow_pickle=allow_pickle)
        except ConfigError as error:
            without["the weights beside config.json"] = f"not compared: {error}"
            lacking += _blocks_after_the_last(weights, directory)
        else:
            figure = reason or "names and shapes are as its config.json says"
            lacking.append(Reading(float(bool(reason)), "the file", figure))
    if bare is not None:
        without[CONFIG] = (
            f"{str(bare)!r} has none, so no library reads a model there, and names and shapes were"
            " not compared: if an export was interrupted, run it again"
        )
        if os.path.lexists(bare / EARLIER_CONFIG):
            figure = "an export was interrupted and left weights without config.json: run it again"
            lacking.append(Reading(1.0, CONFIG, figure))
    if files > 1:
        figure = f"it is 1 of {files} files of the model: give the directory that has them all"
        lacking.append(Reading(float(files - 1), "the other files", figure))
    if lacking:
        readings[LACKING] = lacking
    return WeightDiagnosis(WEIGHT_CHECKS.judge(readings), readings, without)


def _blocks_after_the_last(weights: WeightReaders, directory: Path) -> list[Reading]:
    """As `blocks_after_the_last`, by the config of the directory; nothing if it cannot be read."""
    try:
        return blocks_after_the_last(weights, read_config(directory))
    except ConfigError:
        return []


def _broken_entries(name: str, buffer: Tensor) -> Reading | None:
    """The entries of a buffer that are nan or inf; None if there are none."""
    kind = "complex tensor" if buffer.is_complex() else "buffer"
    location, block = place_and_block(f"the {kind} {name}", name)
    broken = broken_entries(buffer)
    if not broken:
        return None
    figure = f"{broken} of {buffer.numel()} entries are inf or nan"
    return Reading(float(broken), location, figure, block)


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
    for (part_name, old), (_, new) in pairs:
        location, block = place_and_block(f"the weight {part_name}", part_name)
        moved = 0.0
        size = 0.0
        for old_chunk, new_chunk in zip(chunks(old), chunks(new), strict=True):
            moved = math.hypot(moved, frobenius_norm(new_chunk - old_chunk))
            size = math.hypot(size, frobenius_norm(old_chunk))
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
        if quantity in (BLOCK_QUANTITY, WEIGHT_QUANTITY, LACKING):  # trainings change the first two
            continue
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


def parts_of(name: str, weight: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Name and numbers of a weight, or of each matrix of a stack, such as experts."""
    is_a_stack = weight.dim() == 3 and weight.shape[-1] > KERNEL
    if is_a_stack:
        for i, matrix in enumerate(weight):
            yield f"{name}[{i}]", matrix
    elif weight.dim() > 2:
        yield name, weight.flatten(1)
    else:
        yield name, weight


def _gain(gains: Tensor) -> Iterator[tuple[str, float, str]]:
    size = gains.abs().double()
    largest = float(size.max())
    median = median_of(size)
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
    largest = largest_entry(weight)
    if not largest:
        yield "largest entry of a matrix", largest, "every entry is 0, so its output is 0"
        return
    unit = unit_of(largest)
    rows = []
    columns = torch.zeros(weight.shape[1], dtype=torch.float64)
    for chunk in divided_chunks(weight, unit):
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
    norm = spectral_norm_of(weight, unit)
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
    median = median_of(lengths)
    if median == 0:
        return 1.0
    return float(lengths.max()) / median
