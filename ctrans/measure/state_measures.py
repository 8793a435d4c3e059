"""Figures of a state X_k and of a velocity r_k, as plain functions of the tensor.

The walk, a trajectory and the hooks of a training hand over the tensors.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ctrans.measure.measures import MEASURES, Measure
from ctrans.measure.reductions import length, sample_rows

MEDIAN_OF = 4096
"""The largest number of entries of which a median is taken."""
TINY = 1e-30


def root_mean_square(x: Tensor) -> Tensor:
    """|x|/sqrt(number of entries)."""
    return length(x) / math.sqrt(x.numel())


def mean_size(x: Tensor) -> Tensor:
    """The mean of |x| over the entries."""
    return length(x, 1) / x.numel()


def largest_size(x: Tensor) -> Tensor:
    """The largest |x| over the entries."""
    return length(x, math.inf)


def outlier_ratio(x: Tensor) -> Tensor:
    """Largest over median |x|."""
    flat = x.flatten()
    median = flat[:: max(1, flat.numel() // MEDIAN_OF)].abs().median().float()
    return length(x, math.inf) / median.clamp(min=TINY)


def token_spread(r: Tensor) -> Tensor:
    """|r - mean over tokens|/|r|, of a sample of tokens."""
    rows = sample_rows(r)
    return length(rows - rows.mean(0)) / length(rows).clamp(min=TINY)


def common_share(x: Tensor) -> Tensor:
    """The share of |X_k|^2 that is the same for all tokens, of a sample of tokens."""
    return 1 - token_spread(x) ** 2


MEASURES.add(
    "a walk, a trajectory, or a training's hooks",
    {
        "times": Measure(
            formula="the sum of the sublayers' lengths dt",
            title="depth-time",
            unit="t",
            scope="state",
            charted=False,
        ),
        "kind of a sublayer": Measure(
            formula="attention, FFN, or a part of another model", title="kind", scope="sublayer"
        ),
        "mean_abs": Measure(
            live=True,
            formula="mean of |x| over the entries x of X_k",
            title="hidden states",
            unit="mean |x| over entries",
            scope="state",
            compute=mean_size,
        ),
        "variance": Measure(
            formula="sample variance of all entries of X_k",
            unit="variance",
            scope="state",
            compute=torch.var,
        ),
        "rms": Measure(
            live=True,
            formula="|X_k|/sqrt(number of entries)",
            title="root mean square",
            unit="root mean square of X",
            scope="state",
            compute=root_mean_square,
            detail=True,
        ),
        "common": Measure(
            live=True,
            formula="share of |X_k|^2 that is the same for all tokens",
            title="common to all tokens",
            unit="share",
            scope="state",
            compute=common_share,
            share=True,
            detail=True,
        ),
        "largest": Measure(
            live=True,
            formula="largest |x| over the entries x of X_k",
            title="largest entry",
            unit="largest |x|",
            scope="state",
            compute=largest_size,
        ),
        "peak": Measure(
            live=True,
            formula="largest over median |x|",
            title="outliers",
            unit="largest over median |x|",
            scope="state",
            compute=outlier_ratio,
        ),
        "costate": Measure(
            formula="|dL/dX_k|",
            unit="|dL/dX|",
            scope="state",
            live=True,
        ),
        "velocity": Measure(
            live=True,
            formula="|r_k|/sqrt(number of entries), r_k the raw velocity",
            title="what sublayers add",
            unit="root mean square of r",
            scope="sublayer",
            compute=root_mean_square,
        ),
        "spread": Measure(
            live=True,
            formula="share of |r_k| that differs between tokens: |r_k - mean over tokens|/|r_k|",
            title="what sublayers add, by token",
            unit="share",
            scope="sublayer",
            compute=token_spread,
        ),
    },
)
