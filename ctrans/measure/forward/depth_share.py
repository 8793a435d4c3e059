"""Share of the depth in the state: its size, its growth, and the similarity of tokens."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from ctrans.base.shapes import TokenMask, TokenRows
from ctrans.dynamics.depth import Depth
from ctrans.dynamics.sublayer import Sublayer
from ctrans.measure.forward.moments import ratios
from ctrans.measure.walk import Instrument, StepContext
from ctrans.measure.walk.instrument import of_text


@dataclasses.dataclass(frozen=True)
class DepthShare:
    """Effect of the sublayers on the state, at depth-time 0 and at each segment's end.

    - `added`: |X_k - Y_k|/|X_k|, Y the state without sublayers: Y_0 = X_0, and Y_{k+1} is Y_k or,
      with a norm around the state, that norm of Y_k. 0 means that the depth does nothing, 1 that
      the depth makes up the whole state
    - `growth`: p of |X_k - Y_k| ~ k^p between the middle block and the end: 1/2 for independent
      contributions, 1 for equal ones, and 1 more for each further doubling over the second half;
      nan for a depth of one block or one that adds nothing
    - `similarity`: the mean cosine between two tokens of a sequence, nan for one token. At 1 all
      tokens are parallel (rank collapse)
    """

    added: list[float]
    growth: float
    similarity: list[float]


class DepthShares(Instrument):
    """`DepthShare` along the walk, from the states alone.

    `similarity` gives the similarities of tokens by segment, with None for X_0, where another
    instrument of the same walk measures them.
    """

    def __init__(self, similarity: Callable[[], Mapping[int | None, float]] | None = None):
        self._known_similarity = similarity

    def begin(self, depth: Depth, x0: Tensor) -> None:
        self._depth = depth
        self._without = x0
        self._sizes = [self._size(x0)]
        self._added = [0.0]
        self._similarity: list[float] = []
        self._look(x0)

    def forward(self, at: StepContext) -> None:
        self._without = without_map(at.sublayer, self._without)
        self._sizes.append(self._size(at.y))
        self._added.append(self._size(at.y - self._without))
        self._look(at.y)

    def _look(self, x: Tensor) -> None:
        if self._known_similarity is None:
            self._similarity.append(token_similarity(x, self.kept))

    def figures(self) -> DepthShare:
        shares = ratios(self._added, self._sizes)
        similarity = self._similarity
        if self._known_similarity is not None:
            by_segment = self._known_similarity()
            segments = [None, *range(len(shares) - 1)]
            similarity = [by_segment.get(segment, math.nan) for segment in segments]
        return DepthShare(shares, self._growth(), similarity)

    def _size(self, x: Tensor) -> float:
        return float(torch.linalg.vector_norm(of_text(x, self.kept).double()))

    def _growth(self) -> float:
        reached = len(self._added) - 1
        half = self._depth.blocks // 2 * self._depth.per_block
        if half == 0 or reached < len(self._depth.sublayers):
            return math.nan
        start = self._added[half]
        end = self._added[-1]
        if start > 0 and 0 < end < math.inf:
            return math.log(end / start) / math.log(reached / half)
        return math.nan


def without_map(sublayer: Sublayer, x: TokenRows) -> TokenRows:
    """What the segment makes of X if its map adds nothing: the streams mix, and the state norm
    acts.
    """
    x = sublayer.enter(x)
    if sublayer.state_norm is not None:
        x = sublayer.state_norm(x)
    return x


def token_similarity(x: TokenRows, kept: TokenMask | None = None) -> float:
    """Mean of <x_i, x_j>/(|x_i||x_j|) over pairs i != j of a sequence's tokens and over the batch;
    nan for one token.

    With `kept`, only those tokens count, and a sequence with fewer than two of them does not.
    """
    unit = torch.nn.functional.normalize(x.double(), dim=-1)
    tokens = torch.full(x.shape[:-2], x.shape[-2], device=x.device)
    if kept is not None:
        unit = torch.where(kept.unsqueeze(-1), unit, 0.0)
        tokens = kept.sum(-1)
    several = tokens > 1
    pairs = unit.sum(-2).square().sum(-1) - unit.square().sum((-1, -2))
    if several.any():
        return float((pairs[several] / (tokens * (tokens - 1))[several]).mean())
    return math.nan
