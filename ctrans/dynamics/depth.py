"""Depth: sublayers in order, each with a span of depth-time."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import deepcopy
from fractions import Fraction
from itertools import accumulate, pairwise
from numbers import Rational
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

from ctrans.base.option import SMALLEST, WEIGHT, Range
from ctrans.base.shapes import TokenRows
from ctrans.dynamics.sublayer import Sublayer
from ctrans.dynamics.weights.functions_of_depth import coefficients_of, copy_to
from ctrans.dynamics.weights.on_demand import has_weights_on_demand
from solvers import ConfigError, Segment, checked, look_up, shown

MOST_BLOCKS = 10_000
"""The largest number of blocks: ten times that of the deepest trained model."""
DT = Range(SMALLEST, WEIGHT.high, "a positive residual scale of at most 1e37, such as 1 or 0.1")


class Sublayers(nn.ModuleList):
    """A list of `Sublayer`s that modules can hold."""

    if TYPE_CHECKING:

        def __iter__(self) -> Iterator[Sublayer]: ...
        def __getitem__(self, index: int) -> Sublayer: ...  # type: ignore[override]  # a list of sublayers alone


@checked
class Depth(nn.Module):
    """The switched ODE dX/dt = v_k(X) on segment k, k = 0 .. K-1, and the discrete Transformer,
    which takes one Euler step for each segment.

    Segment k lasts spans[k] * dt. A plain block has two spans of 1, attention and FFN, so that T =
    2 D dt. `per_block` is the number of consecutive sublayers of a block. Times are exact
    fractions, so that each segment has exactly the length of the discrete step. `shared` means that
    one block, the same modules, acts at all times, also after a change of depth. Raises ConfigError
    for a dt or span that is not positive and finite, and for sublayers that do not fill blocks.
    """

    def __init__(
        self,
        sublayers: Iterable[Sublayer],
        dt: float,
        *,
        spans: Sequence[Fraction | int] | None = None,
        per_block: int = 2,
        shared: bool = False,
    ):
        super().__init__()
        sublayers = list(sublayers)
        for part in sublayers:
            if not isinstance(part, nn.Module):
                raise ConfigError(f"sublayers have {shown(part)}: give objects of Sublayer")
        self.sublayers = Sublayers(sublayers)
        self.dt = check_dt(dt)
        check_count("per_block", per_block)
        self.spans = _check_spans(spans, len(self.sublayers))
        self.per_block = per_block
        self.shared = shared
        depth_time = sum(self.spans) * Fraction(self.dt)
        if depth_time > sys.float_info.max:
            raise ConfigError(
                f"dt = {dt:g} times {len(self.sublayers)} sublayers is no finite depth-time:"
                " lower dt"
            )
        if not self.sublayers or len(self.sublayers) % per_block:
            raise ConfigError(
                f"{len(self.sublayers)} sublayers do not make blocks of {per_block}: give whole"
                " blocks, at least one"
            )

    def forward(self, x: TokenRows) -> TokenRows:
        """The discrete Transformer: one step of length spans[k] * dt for each segment."""
        for sublayer, length in zip(self.sublayers, self.lengths, strict=True):
            x = sublayer.step(x, length)
        return x

    def states(self, x: TokenRows) -> tuple[TokenRows, ...]:
        """The states of the discrete Transformer: the first, and that after each segment."""
        states = [x]
        for sublayer, length in zip(self.sublayers, self.lengths, strict=True):
            states.append(sublayer.step(states[-1], length))
        return tuple(states)

    @property
    def blocks(self) -> int:
        """D, the number of blocks."""
        return len(self.sublayers) // self.per_block

    @property
    def unit(self) -> str:
        """What `per_block` sublayers are called: "block", or "part" if an attention and an FFN are
        counted each for itself.
        """
        kinds = {sublayer.kind for sublayer in self.sublayers}
        if self.per_block == 1 and {"attention", "ffn"} <= kinds:
            return "part"
        return "block"

    @property
    def streamed(self) -> bool:
        """Whether weights are made on demand. Then do not keep those of several segments."""
        return has_weights_on_demand(self)

    @property
    def lengths(self) -> tuple[float, ...]:
        """The length of each segment in depth-time, spans[k] * dt rounded once: the step of the
        discrete model.
        """
        dt = Fraction(self.dt)
        lengths = [span * dt for span in self.spans]
        # the quotient is what float() gives; compilers do not trace float() of a fraction
        return tuple(length.numerator / length.denominator for length in lengths)

    @property
    def times(self) -> tuple[float, ...]:
        """Depth-time at the start and at the end of each segment: K + 1 times."""
        return tuple(float(time) for time in self._times())

    def segments(self, *, continuous: bool = False) -> list[Segment]:
        """The segments for `solve`.

        By default the model's own steps: `solve(depth.segments(), x, method="euler", steps=1)` has
        the bits of `depth(x)` for all placements. With a norm around the state (post, pre_post,
        deepnorm) this step has no continuous limit once the norm has learned a gain or offset
        (theory, section 3). `continuous=True` gives the projected ODE, on which each method has its
        order. For the other placements both are the same.
        """
        times = self._times()
        return [
            sublayer.segment(t0, t1, continuous=continuous)
            for sublayer, (t0, t1) in zip(self.sublayers, pairwise(times), strict=True)
        ]

    def refine(self, k: int, weights: str = "constant") -> Depth:
        """k times as many blocks of length dt/k over the same T: `resample(k D)`. Raises
        ConfigError for k below 1.
        """
        return self.resample(self.blocks * check_count("k", k), weights)

    def resample(self, blocks: int, weights: str = "constant") -> Depth:
        """Any number of blocks over the same T. Their weights are copies: theta(s) of this depth at
        the blocks' middles.

        Free weights: with "constant", theta is each block's weights on its interval, and a new
        block gets the mean of theta over its own interval. With "linear", theta is linear between
        the blocks' midpoints and constant outside the outer ones. Weights that are functions of
        depth (`GPTConfig.depth_weights`) are evaluated exactly, whatever `weights` is. A `shared`
        block stays the same. Raises ConfigError for a number of blocks below 1 or above
        `MOST_BLOCKS`, and for an unknown interpolation.
        """
        check_count("blocks", blocks, MOST_BLOCKS)
        sampler = look_up("interpolation of weights", weights, SAMPLERS)
        if self.shared:
            block = deepcopy(Sublayers(self._blocks()[0]))
            return self._over_same_time(list(block) * blocks, blocks)
        old_blocks = [Sublayers(block) for block in self._blocks()]
        old_parameters = [dict(block.named_parameters()) for block in old_blocks]
        coefficients = {key: deepcopy(c) for key, c in coefficients_of(old_blocks).items()}
        free = [
            name
            for name, parameter in old_parameters[0].items()
            if id(parameter) not in coefficients
        ]
        new_sublayers: list[Sublayer] = []
        for j in range(blocks):
            sources = sampler(Fraction(j, blocks), Fraction(j + 1, blocks), len(old_blocks))
            first_source = sources[0][0]
            middle = Fraction(2 * j + 1, 2 * blocks)
            block = copy_to(old_blocks[first_source], coefficients, middle)
            parameters = dict(block.named_parameters())
            with torch.no_grad():
                for name in free:
                    # relative to the first source, so that the mean of equal weights is exact
                    first = old_parameters[first_source][name]
                    change = sum(
                        float(weight) * (old_parameters[i][name] - first)
                        for i, weight in sources[1:]
                    )
                    parameters[name].copy_(first + change)
            new_sublayers.extend(block)
        return self._over_same_time(new_sublayers, blocks)

    def _over_same_time(self, sublayers: Sequence[Sublayer], blocks: int) -> Depth:
        dt = float(Fraction(self.dt) * Fraction(self.blocks, blocks))
        return Depth(
            sublayers,
            dt,
            spans=self._resampled_spans(blocks),
            per_block=self.per_block,
            shared=self.shared,
        )

    def symmetric(self) -> Depth:
        """Blocks of half FFN, attention, half FFN with the same weights (Strang splitting; Lu et
        al. 2020). The FFN halves share weights. Raises ConfigError for other blocks than attention
        and FFN.
        """
        kinds_by_block = [[sublayer.kind for sublayer in block] for block in self._blocks()]
        if any(kinds != ["attention", "ffn"] for kinds in kinds_by_block):
            raise ConfigError(
                "only a depth of attention-FFN blocks has a symmetric form: leave out symmetric()"
            )
        sublayers: list[Sublayer] = []
        for attention, ffn in self._blocks():
            sublayers += [ffn, attention, ffn]
        half = Fraction(1, 2)
        spans = [half, Fraction(1), half] * self.blocks
        return Depth(sublayers, self.dt, spans=spans, per_block=3)

    def _resampled_spans(self, blocks: int) -> list[Fraction]:
        """The spans of `blocks` blocks: each is the mean over the old blocks in its place, so that
        T stays.
        """
        spans = []
        for j in range(blocks):
            sources = _average(Fraction(j, blocks), Fraction(j + 1, blocks), self.blocks)
            for k in range(self.per_block):
                shares = (share * self.spans[i * self.per_block + k] for i, share in sources)
                spans.append(sum(shares, Fraction(0)))
        return spans

    def _times(self) -> list[Fraction]:
        return [Fraction(self.dt) * span for span in accumulate(self.spans, initial=Fraction(0))]

    def _blocks(self) -> list[list[Sublayer]]:
        sublayers = list(self.sublayers)
        starts = range(0, len(sublayers), self.per_block)
        return [sublayers[start : start + self.per_block] for start in starts]


Sources = list[tuple[int, Fraction]]
"""Blocks, each with its weight in a mean."""


def _average(start: Fraction, end: Fraction, blocks: int) -> Sources:
    """Piecewise constant theta, averaged over [start, end]."""
    first = math.floor(start * blocks)
    last = math.ceil(end * blocks)
    overlap = [
        (i, min(end, Fraction(i + 1, blocks)) - max(start, Fraction(i, blocks)))
        for i in range(first, last)
    ]
    return [(i, share / (end - start)) for i, share in overlap]


def _midpoint(start: Fraction, end: Fraction, blocks: int) -> Sources:
    """Linear theta between the blocks' midpoints, at the middle of [start, end]."""
    middle = (start + end) / 2 * blocks - Fraction(1, 2)  # in blocks, from the first midpoint
    middle = min(max(middle, Fraction(0)), Fraction(blocks - 1))
    i = math.floor(middle)
    if middle == i:
        return [(i, Fraction(1))]
    return [(i, 1 - middle + i), (i + 1, middle - i)]


SAMPLERS: dict[str, Callable[[Fraction, Fraction, int], Sources]] = {
    "constant": _average,
    "linear": _midpoint,
}


def _check_spans(spans: Sequence[Fraction | int] | None, count: int) -> tuple[Fraction, ...]:
    if spans is None:
        return (Fraction(1),) * count
    spans = list(spans)
    if len(spans) != count or not all(isinstance(span, Rational) and span > 0 for span in spans):
        raise ConfigError(
            f"{count} sublayers need as many positive spans, as whole numbers or fractions of dt,"
            f" not {shown(spans)}"
        )
    return tuple(Fraction(span) for span in spans)


def spread(count: int, most: int) -> list[int]:
    """At most `most` of the indices 0 .. count - 1, spread evenly, with both ends."""
    indices = np.linspace(0, count - 1, min(most, count)).round().astype(int)
    return sorted(set(indices.tolist()))


def check_dt(dt: float) -> float:
    """dt as a float. Raises ConfigError unless it is positive and finite."""
    if isinstance(dt, Fraction):
        dt = float(dt)
    DT.check("dt", dt)
    return float(dt)


def check_count(name: str, value: int, most: int = 10**9) -> int:
    """The value. Raises ConfigError unless it is a whole number from 1 to `most`."""
    Range(1, most).check(name, value, whole=True)
    return value


def check_matches(name: str, x: Tensor, weights: Iterable[Tensor]) -> None:
    """Raises ConfigError unless some weight has the dtype and the device of x, or there is none.
    Weights that are loaded on demand have neither yet. Autocast converts all dtypes but float64.
    """
    kinds = {(weight.dtype, weight.device) for weight in weights if not weight.is_meta}
    if x.dtype is not torch.float64 and torch.is_autocast_enabled(x.device.type):
        kinds |= {(x.dtype, device) for _, device in kinds}
    if kinds and (x.dtype, x.device) not in kinds:
        weights_are = " and ".join(sorted(f"{dtype} on {device}" for dtype, device in kinds))
        raise ConfigError(
            f"{name} is {x.dtype} on {x.device} and the weights are {weights_are}: move one to the"
            " other"
        )
