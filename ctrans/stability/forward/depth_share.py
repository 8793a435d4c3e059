"""What the depth adds to its input: how much, how it grows, and whether it leaves tokens apart."""

from __future__ import annotations

import dataclasses
import math

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from ctrans.depth import Depth
from ctrans.walk import Instrument, StepContext
from ctrans.walk.instrument import of_text


@dataclasses.dataclass(frozen=True)
class DepthShare:
    """What the sublayers do to the state, at depth-time 0 and at every segment's end.

    `added` is |X_k - Y_k|/|X_k|, Y the state without them: Y_0 = X_0, Y_{k+1} = Y_k or, where a
    norm stands around the state, that norm of it. 0 says that the depth does nothing, 1 that the
    state owes all to it. `growth` is p of |X_k - Y_k| ~ k^p between the middle block and the end:
    1/2 for contributions that are independent of each other, 1 for equal ones, and 1 more for each
    further doubling over the second half; nan for a depth of one block, or one that adds nothing.
    `similarity` is the mean cosine between two tokens of a sequence, nan where there is one: at 1
    they are one token (rank collapse).
    """

    added: list[float]
    growth: float
    similarity: list[float]


class DepthShares(Instrument):
    """`DepthShare` along the walk. Nothing but the states is looked at."""

    def begin(self, depth: Depth, x0: Tensor) -> None:
        self._depth, self._without = depth, x0
        self._sizes, self._added, self._similarity = [self._size(x0)], [0.0], [token_similarity(x0, self.kept)]

    def forward(self, at: StepContext) -> None:
        norm = at.sublayer.state_norm
        self._without = at.sublayer.enter(self._without)
        self._without = self._without if norm is None else norm(self._without)
        self._sizes.append(self._size(at.y))
        self._added.append(self._size(at.y - self._without))
        self._similarity.append(token_similarity(at.y, self.kept))

    def figures(self) -> DepthShare:
        shares = [added / size if size else math.nan for added, size in zip(self._added, self._sizes, strict=True)]
        return DepthShare(shares, self._growth(), self._similarity)

    def _size(self, x: Tensor) -> float:
        return float(torch.linalg.vector_norm(of_text(x, self.kept).double()))

    def _growth(self) -> float:
        reached, half = len(self._added) - 1, self._depth.blocks // 2 * self._depth.per_block
        if half == 0 or reached < len(self._depth.sublayers):
            return math.nan
        start, end = self._added[half], self._added[-1]
        return math.log(end / start) / math.log(reached / half) if start > 0 and 0 < end < math.inf else math.nan


def token_similarity(x: Float[Tensor, "*batch tokens width"], kept: Bool[Tensor, "*batch tokens"] | None = None) -> float:
    """The mean of <x_i, x_j>/(|x_i||x_j|) over pairs i != j of a sequence's tokens, and over the
    batch; nan for one token.

    Of tokens that are `kept`, where these are not all; a sequence that has one of them has no pair
    and does not count.
    """
    unit = torch.nn.functional.normalize(x.double(), dim=-1)
    tokens = torch.full(x.shape[:-2], x.shape[-2], device=x.device)
    if kept is not None:
        unit, tokens = torch.where(kept.unsqueeze(-1), unit, 0.0), kept.sum(-1)
    several = tokens > 1
    pairs = unit.sum(-2).square().sum(-1) - unit.square().sum((-1, -2))
    return float((pairs[several] / (tokens * (tokens - 1))[several]).mean()) if bool(several.any()) else math.nan
