"""Single entries of hidden states: the largest of each layer, and how entries vary across data."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from ctrans.base.median import median_of
from ctrans.dynamics.depth import Depth
from ctrans.measure.forward.bounds import ForwardBounds, printed_level
from ctrans.measure.forward.moments import ratios, token_lengths
from ctrans.measure.walk.instrument import of_text
from solvers.run import finite


@dataclass(frozen=True)
class Massive:
    """By depth: the largest |entry|, its ratio to the median |entry|, and its channel; nan and -1
    if the state is not finite.
    """

    largest: list[float]
    ratio: list[float]
    channel: list[int]


class LargestEntry(NamedTuple):
    """The largest |entry| of a state, its ratio to the median |entry|, and its place; nan and -1 if
    the state is not finite.
    """

    size: float
    ratio: float
    sequence: int
    token: int
    channel: int


def largest_entry(
    x: Float[Tensor, "*batch tokens width"], kept: Tensor | None = None
) -> LargestEntry:
    """The `LargestEntry` of a state; with `kept` of those tokens alone."""
    if not finite(x):
        return LargestEntry(math.nan, math.nan, -1, -1, -1)
    size = x.detach().abs()
    median = median_of(of_text(size, kept))
    if kept is not None:
        size = torch.where(kept.unsqueeze(-1), size, 0.0)
    row, channel = divmod(int(size.argmax()), x.shape[-1])
    largest = float(size.max())
    if median:
        ratio = largest / median
    elif largest:
        ratio = math.inf
    else:
        ratio = math.nan
    return LargestEntry(largest, ratio, *divmod(row, x.shape[-2]), channel)


def massive_activations(entries: Sequence[LargestEntry]) -> Massive:
    """Largest entries by depth. They show a few channels with huge entries, which moments do
    not.
    """
    return Massive(
        [entry.size for entry in entries],
        [entry.ratio for entry in entries],
        [entry.channel for entry in entries],
    )


@dataclass(frozen=True)
class DataVariance:
    """The variance of single entries over the inputs, by depth: its mean and its largest over the
    entries, with bounds.

    `bound` is the sharper bound. `printed_bound` is Kan's theorem 5, None where it does not apply.
    `used` and `printed_used` are the largest variance over them. Figures are nan where a state is
    not finite.
    """

    mean: list[float]
    largest: list[float]
    bound: list[float]
    printed_bound: list[float] | None
    used: list[float]
    printed_used: list[float] | None


def variance_over_inputs(
    x: Float[Tensor, "inputs tokens width"], kept: object = None
) -> tuple[float, float]:
    """The mean and the largest over the entries of x of Var(x) = E[x^2] - E[x]^2 over the
    inputs.
    """
    variance = x.double().var(0, correction=0)
    return float(variance.mean()), float(variance.max())


def data_variance(
    depth: Depth,
    x0: Float[Tensor, "inputs tokens width"],
    variances: Sequence[tuple[float, float]],
    bounds: ForwardBounds,
) -> DataVariance:
    """`variance_over_inputs` by depth, from X_0 on, with bounds.

    As printed (Kan, theorem 5, behind output norms): the mean over inputs of (|X_0|_F + t
    sqrt(nd)(g_max + b_max))^2. Sharper: an entry grows by at most its token's length, so Var(x) <=
    max over entries of E[(|x_0| + r_k)^2], with r_k the growth that `bounds` allow. With norms
    around the state it is the norm's largest token squared.
    """
    mean = [mean_of_entries for mean_of_entries, _ in variances]
    largest = [largest_of_entries for _, largest_of_entries in variances]
    start = x0.double()
    width = x0.shape[-1]
    entries = x0[0].numel()
    held = any(sublayer.state_norm is not None for sublayer in depth.sublayers)
    bound = []
    for k, rms in enumerate(bounds.rms[: len(mean)]):
        if held and k > 0:
            bound.append(width * rms**2)
        else:
            growth = math.sqrt(width) * (rms - bounds.rms[0])
            bound.append(float((start.abs() + growth).square().mean(0).max()))
    printed: list[float] | None = None
    printed_used: list[float] | None = None
    outputs = [
        sublayer.output_norm for sublayer in depth.sublayers if sublayer.output_norm is not None
    ]
    if len(outputs) == len(depth.sublayers) and not held:
        level = printed_level(outputs)
        lengths = token_lengths(start.flatten(1))
        printed = [
            float((lengths + t * math.sqrt(entries) * level).square().mean())
            for t in depth.times[: len(mean)]
        ]
        printed_used = ratios(largest, printed)
    return DataVariance(mean, largest, bound, printed, ratios(largest, bound), printed_used)
