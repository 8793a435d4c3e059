"""Single entries of hidden states: the largest of each layer, and how entries vary across data."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from ctrans.depth import Depth
from ctrans.stability.forward.bounds import ForwardBounds, forward_bounds
from ctrans.walk import Instrument, StepContext, observe
from solvers.run import finite


@dataclasses.dataclass(frozen=True)
class Massive:
    """By depth: the largest |entry|, its ratio to the median |entry|, and its channel; nan and -1
    if the state is not finite.
    """

    largest: list[float]
    ratio: list[float]
    channel: list[int]


def massive_activations(states: Sequence[Float[Tensor, "*batch tokens width"]]) -> Massive:
    """max |X| / median |X| of each state. It shows a few channels with huge entries, which moments
    do not.
    """
    return _columns([_massive(x.detach()) for x in states])


class MassiveByDepth(Instrument):
    """`massive_activations` of X_0 and of X at every segment's end."""

    def begin(self, depth: Depth, x0: Tensor) -> None:
        self._each = [_massive(x0.detach())]

    def forward(self, at: StepContext) -> None:
        self._each.append(_massive(at.y.detach()))

    def figures(self) -> Massive:
        return _columns(self._each)


def _columns(each: Sequence[tuple[float, float, int]]) -> Massive:
    largest, ratio, channel = (list(column) for column in zip(*each, strict=True))
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


class VarianceOverInputs(Instrument):
    """Var(x) = E[x^2] - E[x]^2 of each entry x of X_k over the inputs of the batch, with bounds.

    As printed (Kan, theorem 5, behind output norms): the mean over inputs of (|X_0|_F + t
    sqrt(nd)(g_max + b_max))^2. Sharper: an entry grows by at most its token's length, so Var(x) <=
    max over entries of E[(|x_0| + r_k)^2], with r_k the growth that `bounds` allow. With norms
    around the state it is the norm's largest token squared.
    """

    def __init__(self, bounds: Callable[[], ForwardBounds]):
        self._bounds = bounds

    def begin(self, depth: Depth, x0: Tensor) -> None:
        self._depth, self._start = depth, x0.double()
        self._mean: list[float] = []
        self._largest: list[float] = []
        self._note(x0)

    def forward(self, at: StepContext) -> None:
        self._note(at.y)

    def _note(self, x: Tensor) -> None:
        variance = x.double().var(0, correction=0)
        self._mean.append(float(variance.mean()))
        self._largest.append(float(variance.max()))

    def figures(self) -> DataVariance:
        depth, start, reached = self._depth, self._start, len(self._mean)
        width, entries = start.shape[-1], start[0].numel()
        rms = self._bounds().rms
        held = any(sublayer.state_norm is not None for sublayer in depth.sublayers)
        bound = [
            width * value**2 if held and k else float((start.abs() + math.sqrt(width) * (value - rms[0])).square().mean(0).max())
            for k, value in enumerate(rms[:reached])
        ]
        printed = None
        norms = [sublayer.output_norm for sublayer in depth.sublayers]
        outputs = [norm for norm in norms if norm is not None]
        if len(outputs) == len(norms) and not held:
            level = max(float(n.gamma.detach().abs().max()) for n in outputs)
            level += max(float(n.beta.detach().abs().max()) for n in outputs)
            lengths = torch.linalg.vector_norm(start.flatten(1), dim=-1)
            printed = [float((lengths + t * math.sqrt(entries) * level).square().mean()) for t in depth.times[:reached]]
        return DataVariance(
            self._mean,
            self._largest,
            bound,
            printed,
            _ratios(self._largest, bound),
            None if printed is None else _ratios(self._largest, printed),
        )


def data_variance(
    depth: Depth, states: Sequence[Float[Tensor, "inputs tokens width"]], bounds: ForwardBounds | None = None
) -> DataVariance:
    """`VarianceOverInputs` along given states, with their `forward_bounds` unless given."""
    found: DataVariance = observe(
        depth, states, [VarianceOverInputs(lambda: forward_bounds(depth, states) if bounds is None else bounds)]
    )[0]
    return found


def _ratios(measured: Sequence[float], bounds: Sequence[float]) -> list[float]:
    return [value / bound if bound else math.nan for value, bound in zip(measured, bounds, strict=True)]
