"""Whether an attention averages: the rows that it uses have weights >= 0 that sum to 1.

The bound over all rows (`ctrans.control.reachable_rows`) holds for such rows only. A constant sink,
for example, takes part of a row only where all scores are low, and rows that are a difference of
averages sum to 1 with negative entries. So the rows are read before any normalisation, at states
whose scores are all low or all high, and the output must be these rows times the values.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ctrans.base.shapes import SequenceRows
from ctrans.control.decay_paths import ValuePath
from ctrans.control.shown_factors import largest_share, velocity_at_rows
from ctrans.dynamics.fields.protocols import HeadMatrices

LOW_SCORES = (-3.0, -100.0, -1e6)
HIGH_SCORES = (100.0,)
"""Scores of the tokens with each other at which rows are read."""
NOISE = 1e-2
"""By how much the tokens differ there, as a share."""
NO_AVERAGES = (
    "with large queries and keys the rows of its attention are no averages: they do not sum to 1,"
    " or have negative entries"
)
NOT_USED = "the output of its attention is not its rows times its values"


def row_error(attention: Any, x: SequenceRows) -> float:
    """The most that a row is off from an average: |sum - 1| + 2 |negative entries|, so that a sum
    over the row is that of an average up to this share of its largest term.
    """
    error = 0.0
    for rows in _rows_of(attention, x):
        below = rows.clamp_max(0).sum(-1).abs()
        off = (rows.sum(-1) - 1).abs() + 2 * below
        largest = float(off.amax())
        if math.isnan(largest):
            return math.inf
        error = max(error, largest)
    return error


def why_no_averages(
    attention: Any, path: ValuePath, x: SequenceRows, close: float
) -> tuple[str, float]:
    """Why the attention does not average its values at its present weights; "" if it does up to
    `close`. Also how closely it was seen to average, as a share.
    """
    error = 0.0
    for states in _extreme_states(attention, x):
        error = max(error, row_error(attention, states))
        if not error <= close:
            return NO_AVERAGES, error
        *_, rows = _rows_of(attention, states)
        expected = velocity_at_rows(attention, path, rows, states)
        found = attention(states).flatten(0, -2)
        error = max(error, largest_share(found - expected, expected))
        if not error <= close:
            return NOT_USED, error
    return "", error


def _rows_of(attention: Any, x: SequenceRows) -> Iterator[Tensor]:
    """The rows as the attention shows them, and those that it computes before it normalises
    them.
    """
    yield attention.probabilities(x)
    as_computed = getattr(attention, "rows", None)
    if callable(as_computed):
        yield as_computed(x)


def _extreme_states(attention: Any, x: SequenceRows) -> Iterator[SequenceRows]:
    """For each head, states at which all of its scores have one sign and one size: tokens that are
    nearly the eigenvector of its scores' symmetric part.
    """
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x.device)
    for head in attention.head_matrices():
        values, vectors = torch.linalg.eigh(_symmetric_scores(head))
        divisor = math.sqrt(len(head.query))
        if math.isfinite(attention.temperature):
            divisor *= attention.temperature
        for scores, k in ((LOW_SCORES, 0), (HIGH_SCORES, -1)):
            value = float(values[k])
            vector = vectors[:, k]
            for score in scores:
                if value * score <= 0:
                    continue
                size = math.sqrt(score * divisor / value)
                yield (size * (vector + NOISE / math.sqrt(len(vector)) * noise)).to(x)


def _symmetric_scores(head: HeadMatrices) -> Tensor:
    product = head.query.detach().double().mT @ head.key.detach().double()
    return (product + product.mT) / 2
