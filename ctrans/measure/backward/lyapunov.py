"""Lyapunov exponents along depth: the rates at which small perturbations of the hidden state
grow.
"""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import Tensor

from ctrans.base.shapes import TokenRows
from ctrans.dynamics.depth import Depth, check_count
from ctrans.measure.backward.sensitivity import StepGraphs, linearised_step
from ctrans.measure.walk import Instrument, StepContext, walk_depth
from solvers.run import finite

UNRESOLVED = 32
"""R_ii below so many units of rounding of the longest column, or as many as R has columns, is
rounding error alone.
"""


@dataclasses.dataclass(frozen=True)
class Lyapunov:
    """Exponents per unit of depth-time, largest first: means over the batch, with standard
    deviations (0 for one sequence).

    `growth[k][i]` is the mean of log R_ii of segment k. An exponent is its sum over k divided by
    the depth-time covered, `time`. Where a state is not finite, `time` is shorter than the depth
    and `note` gives the segment.
    """

    exponents: list[float]
    deviations: list[float]
    growth: list[list[float]]
    time: float
    note: str = ""


class LyapunovExponents(Instrument):
    """lambda_i = (1/T) sum_k log R_ii^(k), Q_{k+1} R^(k) = (dX_{k+1}/dX_k) Q_k, Q_0 random with
    `count` orthonormal columns.

    The instrument pushes the columns through each segment's discrete step. Exponents depend on Q_0
    by O(1/T); their sum over a full set does not, as it is log|det J_{0:D}|/T. A direction that a
    step removes to rounding (`UNRESOLVED`) has exponent -inf, as the mean of a token behind a norm.
    A change of a token's length keeps eps/(variance + eps) of itself, which float32 may not
    resolve. `count` is at most the dimension of a state; ConfigError if it is below 1. Memory: one
    segment's weights and graph, or `graphs`, which must come before it in the same lane.
    """

    def __init__(
        self,
        *,
        count: int = 4,
        generator: torch.Generator | None = None,
        graphs: StepGraphs | None = None,
    ):
        self.count = check_count("count", count)
        self.graphs = graphs
        self.state = (generator or torch.Generator().manual_seed(0)).get_state()

    def begin(self, depth: Depth, x0: Tensor) -> None:
        *batch, tokens, width = x0.shape
        self._depth = depth
        self._going = True
        self._count = min(self.count, tokens * width)
        generator = torch.Generator()
        generator.set_state(self.state)  # the same Q_0 in every walk
        drawn = torch.randn(
            *batch, tokens * width, self._count, generator=generator, dtype=x0.dtype
        )
        self._q = torch.linalg.qr(drawn.to(x0.device)).Q
        self._growth: list[Tensor] = []

    def forward(self, at: StepContext) -> None:
        self._going = self._going and finite(at.x) and finite(at.y)
        if self._going:
            if self.graphs is None:
                step = linearised_step(at.sublayer, at.h, at.x)
            else:
                step = self.graphs.of(at)
            assert step is not None, "the state was found finite"
            moved = [
                step.push(column.reshape(step.x.shape)).reshape(column.shape)
                for column in self._q.unbind(-1)
            ]
            self._q, r = torch.linalg.qr(torch.stack(moved, -1))
            self._growth.append(_logarithms(r))

    def figures(self) -> Lyapunov:
        growth = self._growth
        time = self._depth.times[len(self._growth)]
        note = ""
        if len(growth) < len(self._depth.sublayers):
            note = f"the state is not finite after segment {len(growth)}"
        if not growth:
            return Lyapunov([], [], [], time, note)
        by_segment = torch.stack(growth).reshape(len(growth), -1, self._count).double()
        rates = (by_segment.sum(0) / time).sort(-1, descending=True).values
        if len(rates) > 1:
            # a direction that is removed in all sequences has no spread
            is_removed = (rates == -math.inf).all(0)
            deviations = rates.std(0).nan_to_num(nan=math.inf).masked_fill(is_removed, 0.0)
        else:
            deviations = torch.zeros_like(rates[0])
        return Lyapunov(
            rates.mean(0).tolist(), deviations.tolist(), by_segment.mean(1).tolist(), time, note
        )


def _logarithms(r: Tensor) -> Tensor:
    """log R_ii, -inf where it is zero to rounding."""
    sizes = r.diagonal(dim1=-2, dim2=-1).abs()
    longest = torch.linalg.vector_norm(r, dim=-2).amax(-1, keepdim=True)
    units = max(UNRESOLVED, r.shape[-1])
    is_zero = sizes <= units * torch.finfo(r.dtype).eps * longest
    return sizes.log().masked_fill(is_zero, -math.inf)


def lyapunov(
    depth: Depth,
    x0: TokenRows,
    *,
    count: int = 4,
    generator: torch.Generator | None = None,
) -> Lyapunov:
    """`LyapunovExponents` alone."""
    instrument = LyapunovExponents(count=count, generator=generator)
    exponents: Lyapunov = walk_depth(depth, x0, [instrument])[0]
    return exponents
