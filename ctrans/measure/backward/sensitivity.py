"""Backward sensitivity by depth: the largest singular value of the Jacobians that gradients pass
through.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import overload

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ctrans.base.shapes import TokenMask, TokenRows
from ctrans.dynamics.depth import Depth, spread
from ctrans.dynamics.fields import mixes_tokens, reference_kernels
from ctrans.dynamics.sublayer import Sublayer
from ctrans.measure.backward.singular_values import (
    Linearisation,
    Singular,
    compose,
    leading_singular,
    linearise,
)
from ctrans.measure.walk import Instrument, SegmentCallback, StepContext, walk_depth
from solvers import ConfigError, SolveError
from solvers.run import finite

TOLERANCE = 1e-3
"""Default relative error at which the iteration for a singular value stops."""


@dataclass(frozen=True)
class Sensitivity:
    """|J|_2 and its estimated relative error: the true value may be larger. Both are None if |J|_2
    does not exist, and `note` gives the reason.
    """

    value: float | None
    error: float | None
    products: int
    note: str = ""


@dataclass(frozen=True)
class SensitivityByDepth:
    """Sensitivities by depth, of the discrete model at its own states.

    `sublayers[k]` is S_k = |dv_k/dX|_2 of segment k's velocity. `blocks[i]` is |dX_{i+1}/dX_i|_2 of
    block i. `products[i]` is |J_{i:D}|_2 of all blocks from i to the end: the largest factor by
    which a gradient grows from the end back to block i. Each is the largest over the sequences.

    `conditions[i]` has |J_{i:D}|_2 |X_i|/|X_D| of each sequence: the largest growth of a relative
    change of X_i up to the end. It is empty if unknown.
    """

    sublayers: list[Sensitivity]
    blocks: list[Sensitivity]
    products: list[Sensitivity]
    conditions: list[list[float]]

    @property
    def condition(self) -> list[float | None]:
        """The condition of the worst sequence, by block."""
        return [max(by_sequence, default=None) for by_sequence in self.conditions]


Steps = Sequence[Linearisation | None]
NOT_FINITE = "the Jacobian is not finite"
CLOSED = "a scale of 0 closes the sublayer, and its gradient is not 0"
LEFT_OUT = Sensitivity(None, None, 0, "left out")
ALL_AT_ONCE = "left out: it needs all weights at once, and these are made on demand"


class Sensitivities(Instrument):
    """S_k, |dX_{i+1}/dX_i|_2 and |J_{i:D}|_2 along the walk (Kan, eq. 16 and 18; theory, section
    7).

    Each figure is the largest over the sequences of the batch. No Jacobian is formed. The cost is
    about 20 evaluations with gradients for each sublayer and block, and the same number for all
    later blocks for each product. Products are most of the work in a deep model. With `starts`,
    only that many blocks i, spread evenly, get |dX_{i+1}/dX_i|_2 and |J_{i:D}|_2. `progress(k)` is
    called after each of the 2D + D + D figures.

    Sublayers and blocks need the memory of one block's weights and graph. Products keep the graph
    of the whole depth with all weights. If weights are made on demand (`depth.streamed`), there are
    no products.

    A figure is None if it is not finite, if it depends on one that is not, or if it is a product
    along states that end early. `graphs` must come before this instrument in the same lane.
    `whole()` returns the leading singular values of J_{0:D} if they are known already, else None.
    `sublayers` has S_k of the segments reached so far. Products are known after the walk.
    """

    def __init__(
        self,
        *,
        tolerance: float = TOLERANCE,
        starts: int | None = None,
        progress: SegmentCallback | None = None,
        graphs: StepGraphs | None = None,
        whole: Callable[[], Singular | None] | None = None,
    ):
        self.tolerance = tolerance
        self.starts = starts
        self.progress = progress
        self.graphs = graphs
        self.whole = whole
        self.sublayers: list[Sensitivity] = []

    def begin(self, depth: Depth, x0: Tensor) -> None:
        self._depth = depth
        starts = self.starts
        if starts is None:
            starts = depth.blocks
        self._looked_at = set(spread(depth.blocks, starts))
        if depth.streamed:
            self._wanted = set[int]()
        else:
            self._wanted = self._looked_at
        self.sublayers = []
        self._blocks: list[Sensitivity] = []
        self._steps: list[Linearisation | None] = []
        self._sizes = [_sizes(x0, self.kept)]
        self._done = itertools.count(1)

    def forward(self, at: StepContext) -> None:
        self.sublayers.append(
            self._reported(
                sublayer_sensitivity(at.sublayer, at.x, tolerance=self.tolerance, kept=self.kept)
            )
        )
        per_block = self._depth.per_block
        block, part = divmod(at.k, per_block)
        looked_at = block in self._looked_at
        if looked_at or self._wanted:
            if self.graphs is None:
                step = linearised_step(at.sublayer, at.h, at.x)
            else:
                step = self.graphs.of(at)
            self._steps.append(text_alone(step, self.kept))
        if part == per_block - 1:
            # the last block is also J_{D-1:D}, which needs each sequence to the tolerance
            last = bool(self._wanted) and block == self._depth.blocks - 1
            if looked_at:
                self._last = self._of_chain(self._steps[-per_block:], all_sequences=last)
            else:
                self._last = (LEFT_OUT, None)
            self._blocks.append(self._reported(self._last[0]))
            if not self._wanted:
                self._steps = []
            self._sizes.append(_sizes(at.y, self.kept))

    def figures(self) -> SensitivityByDepth:
        """Products are computed from the last block to the first."""
        reached = len(self._blocks)
        blocks = self._depth.blocks
        per_block = self._depth.per_block
        left_out = LEFT_OUT.note
        if self._depth.streamed:
            left_out = ALL_AT_ONCE
        starts = self._wanted
        if reached < blocks:
            left_out = f"the states end after {reached} of {blocks} blocks, so X_D is unknown"
            starts = set()
        computed: dict[int, tuple[Sensitivity, Singular | None]] = {}
        if starts:
            computed[blocks - 1] = self._last
        # what others know is of the padding too
        if self.whole is not None and self.kept is None and 0 in starts - computed.keys():
            of_the_depth = self.whole()
            if of_the_depth is not None:
                computed[0] = (summary(of_the_depth), of_the_depth)
        products = list[Sensitivity]()
        conditions = list[list[float]]()
        guess: Tensor | None = None  # of the right singular vectors
        for i in reversed(range(blocks)):
            product = Sensitivity(None, None, 0, left_out)
            leading: Singular | None = None
            if i in starts:
                # each sequence to the tolerance: the worst relative to its states may not have the
                # largest |J|
                if i in computed:
                    product, leading = computed[i]
                else:
                    steps = self._steps[i * per_block :]
                    product, leading = self._of_chain(steps, guess, all_sequences=True)
                if leading is not None and finite(leading.right):
                    guess = leading.right.squeeze(-3)
                else:
                    guess = None
            products.insert(0, self._reported(product))
            if leading is None:
                conditions.insert(0, [])
            else:
                conditions.insert(0, _conditions(leading, self._sizes[i], self._sizes[-1]))
            # the left singular vectors of J_{i:D} change little with i; one pull gives the right
            # ones
            block_before: Linearisation | None = None
            if i > min(starts - computed.keys(), default=i):
                block_before = _chain(self._steps[(i - 1) * per_block : i * per_block])
            if guess is None or block_before is None:
                guess = None
            else:
                guess = block_before.pull(guess)
        return SensitivityByDepth(self.sublayers, self._blocks, products, conditions)

    def _of_chain(
        self, steps: Steps, guess: Tensor | None = None, *, all_sequences: bool
    ) -> tuple[Sensitivity, Singular | None]:
        """|J|_2 of the steps one after another, with the triplets of each sequence if all steps
        exist.
        """
        linear = _chain(steps)
        if linear is None:
            note = f"the state is not finite {steps.index(None)} sublayers on"
            return Sensitivity(None, None, 0, note), None
        singular = leading_singular(
            linear, each=all_sequences, tolerance=self.tolerance, start=guess
        )
        return summary(singular), singular

    def _reported(self, figure: Sensitivity) -> Sensitivity:
        if self.progress is not None:
            self.progress(next(self._done))
        return figure


def backward_sensitivity(
    depth: Depth,
    x0: TokenRows,
    *,
    tolerance: float = TOLERANCE,
    starts: int | None = None,
    progress: SegmentCallback | None = None,
) -> SensitivityByDepth:
    """`Sensitivities` alone."""
    instrument = Sensitivities(tolerance=tolerance, starts=starts, progress=progress)
    sensitivities: SensitivityByDepth = walk_depth(depth, x0, [instrument])[0]
    return sensitivities


def _sizes(x: Tensor, kept: TokenMask | None) -> Float[Tensor, " sequences"]:
    """|X| of the text of each sequence."""
    if kept is not None:
        x = x * kept.unsqueeze(-1)
    sizes: Tensor = torch.linalg.vector_norm(x.double(), dim=(-2, -1)).reshape(-1)
    return sizes


def _conditions(products: Singular, start: Tensor, end: Tensor) -> list[float]:
    """|J_{i:D}||X_i|/|X_D| by sequence; empty if a factor is unknown."""
    sizes = products.values[..., 0].double().reshape(-1)
    grown = torch.where(end == 0, math.inf, sizes * start / end)
    if all(map(finite, (sizes, start, end))):
        return grown.tolist()
    return []


def _chain(steps: Steps) -> Linearisation | None:
    """The steps one after another; None if a state is not finite."""
    finite_steps = [step for step in steps if step is not None]
    if len(finite_steps) == len(steps):
        return compose(finite_steps)
    return None


@overload
def text_alone(linear: Linearisation, kept: TokenMask | None) -> Linearisation: ...
@overload
def text_alone(linear: None, kept: TokenMask | None) -> None: ...
def text_alone(linear: Linearisation | None, kept: TokenMask | None) -> Linearisation | None:
    """The map of the text's states to the text's states: P J P, where P sets padding to 0. As no
    text reads padding, products of several P J P are P times the product of the J times P.
    """
    if linear is None or kept is None:
        return linear
    text = kept.unsqueeze(-1)
    push = linear.push
    pull = linear.pull
    return Linearisation(
        linear.x, linear.y, lambda v: push(v * text) * text, lambda u: pull(u * text) * text
    )


def linearised_step(sublayer: Sublayer, h: float, x: TokenRows) -> Linearisation | None:
    """dX+/dX of the discrete step X+ = step(X) of length h; None if the state is not finite."""
    if not finite(x):
        return None
    with reference_kernels(sublayer):
        return linearise(lambda x: sublayer.step(x, h), x)


class StepGraphs(Instrument):
    """Keeps `linearised_step` of each segment. Other instruments in the lane share it through
    `of`.
    """

    def begin(self, depth: Depth, x0: Tensor) -> None:
        self.found: list[Linearisation | None] = []

    def forward(self, at: StepContext) -> None:
        self.of(at)

    def of(self, at: StepContext) -> Linearisation | None:
        """The step of this segment, computed at the first call. Segments must come in order."""
        if at.k == len(self.found):
            self.found.append(linearised_step(at.sublayer, at.h, at.x))
        return self.found[at.k]

    def finite_steps(self, unknown: str) -> list[Linearisation]:
        """All steps. Raises SolveError with what is unknown if a state is not finite."""
        steps = [step for step in self.found if step is not None]
        if len(steps) < len(self.found):
            raise SolveError(
                f"the state is not finite at the start of segment {self.found.index(None)}:"
                f" {unknown}"
            )
        return steps


def sublayer_sensitivity(
    sublayer: Sublayer,
    x: TokenRows,
    *,
    tolerance: float = TOLERANCE,
    kept: TokenMask | None = None,
) -> Sensitivity:
    """S = |dv/dX|_2 of the sublayer's velocity v at X, for the `kept` tokens. Each token of an FFN
    is a separate problem.
    """
    if not finite(x):
        return Sensitivity(None, None, 0, "the state is not finite")
    try:
        with reference_kernels(sublayer):
            linear = text_alone(linearise(sublayer.velocity, x), kept)
    except ConfigError as error:  # a zero gain makes the image of a norm degenerate
        return Sensitivity(None, None, 0, str(error))
    axes = 1
    if mixes_tokens(sublayer.field, sublayer.kind):
        axes = 2
    sensitivity = summary(leading_singular(linear, problem=axes, tolerance=tolerance))
    if sensitivity.value == 0 and closed_by_a_scale(sublayer, x):
        return replace(sensitivity, note=CLOSED)
    return sensitivity


@torch.no_grad()
def closed_by_a_scale(sublayer: Sublayer, x: TokenRows) -> bool:
    """Whether the velocity is 0 only because of one scale of zeros, a number or one for each
    channel, as at the start of ReZero and LayerScale. A gradient reaches that scale, as dv/ds =
    f(X) is not 0.
    """
    if not isinstance(sublayer.field, nn.Module) or sublayer.velocity(x).any():
        return False
    for scale in sublayer.field.parameters():
        if scale.dim() > 1 or scale.any():
            continue
        zeros = scale.data.clone()
        try:
            scale.data.fill_(1.0)
            # an offset would add the same to all tokens of both states
            opened = sublayer.velocity(x) - sublayer.velocity(-x)
        finally:
            scale.data.copy_(zeros)
        if opened.any():
            return True
    return False


def summary(singular: Singular) -> Sensitivity:
    """The largest value of the batch as a `Sensitivity`."""
    if not singular.values.isfinite().all():
        return Sensitivity(None, None, singular.products, NOT_FINITE)
    return Sensitivity(singular.largest, singular.error, singular.products)
