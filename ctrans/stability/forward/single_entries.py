"""Single entries of hidden states: the largest of each layer, and how entries vary across data."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from ctrans.depth import Depth
from ctrans.stability.forward.bounds import ForwardBounds, forward_bounds
from solvers.run import finite


@dataclasses.dataclass(frozen=True)
class Massive:
    """By depth: the largest |entry|, its ratio to the median |entry|, and the channel it is in. nan and -1 where not finite."""

    largest: list[float]
    ratio: list[float]
    channel: list[int]


def massive_activations(states: Sequence[Float[Tensor, "*batch tokens width"]]) -> Massive:
    """max |X| / median |X| of every state: a few dimensions with huge entries show here and not in the moments."""
    found = [_massive(x.detach()) for x in states]
    largest, ratio, channel = (list(column) for column in zip(*found, strict=True))
    return Massive(largest, ratio, channel)


def _massive(x: Tensor) -> tuple[float, float, int]:
    if not finite(x):
        return math.nan, math.nan, -1
    size = x.abs().flatten(0, -2)
    place = int(size.argmax())
    largest, median = float(size.max()), float(size.median())
    return largest, largest / median if median else math.inf if largest else math.nan, place % x.shape[-1]


@dataclasses.dataclass(frozen=True)
class DataVariance:
    """The variance of single entries over the inputs, by depth: its mean and its largest over the entries, and bounds on both.

    `bound` is the sharper one, `printed_bound` Kan's theorem 5, None where it makes no statement. `used` and `printed_used` are
    the largest variance over them. nan where a state is not finite.
    """

    mean: list[float]
    largest: list[float]
    bound: list[float]
    printed_bound: list[float] | None
    used: list[float]
    printed_used: list[float] | None


@torch.no_grad()
def data_variance(
    depth: Depth, states: Sequence[Float[Tensor, "inputs tokens width"]], bounds: ForwardBounds | None = None
) -> DataVariance:
    """Var(x) = E[x^2] - E[x]^2 of each entry x of X_k over the inputs given, all of equal weight, and what it cannot exceed.

    As printed (Kan, theorem 5, behind output norms): the mean over inputs of (|X_0|_F + t sqrt(nd)(g_max + b_max))^2. Sharper: an
    entry cannot grow by more than its token, so Var(x) <= max over entries of E[(|x_0| + r_k)^2], r_k the growth of a token's
    length that `forward_bounds` allows; behind a norm around the state, that norm's largest token squared. `bounds` are those of
    these states where they are known.
    """
    start = states[0].double()
    width, entries = start.shape[-1], start[0].numel()
    rms = (forward_bounds(depth, states) if bounds is None else bounds).rms
    held = any(sublayer.state_norm is not None for sublayer in depth.sublayers)
    variances = [x.double().var(0, correction=0) for x in states]
    mean, largest = [float(v.mean()) for v in variances], [float(v.max()) for v in variances]
    bound = [
        width * value**2 if held and k else float((start.abs() + math.sqrt(width) * (value - rms[0])).square().mean(0).max())
        for k, value in enumerate(rms[: len(states)])
    ]
    printed = None
    norms = [sublayer.output_norm for sublayer in depth.sublayers]
    outputs = [norm for norm in norms if norm is not None]
    if len(outputs) == len(norms) and not held:
        level = max(float(n.gamma.abs().max()) for n in outputs) + max(float(n.beta.abs().max()) for n in outputs)
        lengths = torch.linalg.vector_norm(start.flatten(1), dim=-1)
        printed = [float((lengths + t * math.sqrt(entries) * level).square().mean()) for t in depth.times[: len(states)]]
    return DataVariance(
        mean,
        largest,
        bound,
        printed,
        _ratios(largest, bound),
        None if printed is None else _ratios(largest, printed),
    )


def _ratios(measured: Sequence[float], bounds: Sequence[float]) -> list[float]:
    return [value / bound if bound else math.nan for value, bound in zip(measured, bounds, strict=True)]
