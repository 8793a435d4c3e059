"""Backward sensitivity: the largest singular value of the Jacobians through which gradients pass,
by depth.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from ctrans.depth import Depth
from ctrans.fields import mixes_tokens, reference_kernels
from ctrans.stability.backward.singular_values import Linearisation, Singular, compose, leading_singular, linearise
from ctrans.sublayer import Sublayer
from ctrans.walk import Instrument, StepContext, walk_depth
from solvers import ConfigError
from solvers.run import finite
from solvers.segment import Map

TOLERANCE = 1e-3
"""Relative error at which an iteration stops."""

OnSegment = Callable[[int], None]


@dataclasses.dataclass(frozen=True)
class Sensitivity:
    """|J|_2, at most `error` times itself too small by the residual's estimate; None where it does
    not exist, and `note` says why.
    """

    value: float | None
    error: float | None
    products: int
    note: str = ""


@dataclasses.dataclass(frozen=True)
class SensitivityByDepth:
    """Sensitivities by depth, of the discrete model at its own states.

    `sublayers[k]` is S_k = |dv_k/dX|_2 of segment k's velocity. `blocks[i]` is |dX_{i+1}/dX_i|_2 of block i, and `products[i]` is
    |J_{i:D}|_2 of all blocks from i to the end: by that much a gradient at the end can have grown when it reaches block i. Each is
    the largest over the sequences.

    `conditions[i]` are |J_{i:D}|_2 |X_i|/|X_D| of every sequence by itself: by how much relative
    changes of its X_i can grow on the way to the end; empty where not known.
    """

    sublayers: list[Sensitivity]
    blocks: list[Sensitivity]
    products: list[Sensitivity]
    conditions: list[list[float]]

    @property
    def condition(self) -> list[float | None]:
        """That of the worst sequence, by block."""
        return [max(each, default=None) for each in self.conditions]


def _conditions(products: Tensor | None, start: Tensor, end: Tensor) -> list[float]:
    """|J_{i:D}||X_i|/|X_D| by sequence; none where a factor is not known."""
    if products is None or not (finite(products) and finite(start) and finite(end)):
        return []
    return [j * a / b if b else math.inf for j, a, b in zip(*(part.tolist() for part in (products, start, end)), strict=True)]


ToldSensitivity = Callable[[Sensitivity], Sensitivity]
Steps = Sequence[Linearisation | None]
FoundSensitivity = tuple[Sensitivity, Singular | None]
"""|J|_2, and its singular triplets by sequence where they exist."""
NOT_FINITE = "the Jacobian is not finite"
LEFT_OUT = Sensitivity(None, None, 0, "left out")
ALL_AT_ONCE = "left out: it needs all weights at once, and these are made on demand"


class Sensitivities(Instrument):
    """S_k, |dX_{i+1}/dX_i|_2 and |J_{i:D}|_2 along the walk (Kan, eq. 16 and 18; theory, section
    7).

    Of a batch of sequences, each is the largest over the sequences. Nothing is formed: the cost is
    about 20 evaluations and their gradients for each sublayer and block, as many of all later
    blocks for each product. With `starts`, only so many blocks i are looked at, spread evenly, for
    their own |dX_{i+1}/dX_i|_2 and their product; that is most of the work in a deep model.
    `progress(k)` is called when each of the 2D + D + D figures is done.

    Sublayers and blocks need the memory of one block: its weights, its graph. Products look ahead:
    they keep the graph of the whole depth, which holds all weights; where those are made on demand
    (`depth.streamed`) products are left out.

    What is not finite, and what depends on it, has None as its value; the rest is computed. So have
    products along states that end before the depth does. `graphs`, where given, stand before it in
    the same lane, and are shared with whoever else needs them; `whole` gives J_{0:D}'s leading
    singular values where somebody else has found them, or None.
    """

    def __init__(
        self,
        *,
        tolerance: float = TOLERANCE,
        starts: int | None = None,
        progress: OnSegment | None = None,
        graphs: StepGraphs | None = None,
        whole: Callable[[], Singular | None] | None = None,
    ):
        self.tolerance, self.starts, self.progress, self.graphs, self.whole = tolerance, starts, progress, graphs, whole
        self._sublayers: list[Sensitivity] = []

    @property
    def sublayers(self) -> list[Sensitivity]:
        """S_k of the segments that were reached: known on the way, and the products only by
        `figures`.
        """
        return self._sublayers

    def begin(self, depth: Depth, x0: Tensor) -> None:
        self._depth, self._looked_at = depth, _spread(depth.blocks, self.starts)
        self._wanted = set[int]() if depth.streamed else self._looked_at
        self._sublayers = []
        self._blocks: list[Sensitivity] = []
        self._kept: list[Steps] = []
        self._steps: list[Linearisation | None] = []
        self._sizes = [_sizes(x0)]
        self._done = itertools.count(1)

    def forward(self, at: StepContext) -> None:
        self._sublayers.append(self._told(sublayer_sensitivity(at.sublayer, at.x, tolerance=self.tolerance)))
        block, place = divmod(at.k, self._depth.per_block)
        looked_at, kept = block in self._looked_at, block >= min(self._wanted, default=self._depth.blocks)
        if self.graphs is not None:
            self._steps.append(self.graphs.of(at))
        elif looked_at or kept:
            self._steps.append(linearised_step(at.sublayer, at.h, at.x))
        if place == self._depth.per_block - 1:
            # the last block is J_{D-1:D} too, and those are wanted of every sequence
            last = bool(self._wanted) and block == self._depth.blocks - 1
            self._last = _of_chain(self._steps, self.tolerance, each=last) if looked_at else (LEFT_OUT, None)
            self._blocks.append(self._told(self._last[0]))
            self._kept.append(self._steps if kept else ())
            self._steps = []
            self._sizes.append(_sizes(at.y))

    def figures(self) -> SensitivityByDepth:
        reached, blocks = len(self._blocks), self._depth.blocks
        left_out, wanted = ALL_AT_ONCE if self._depth.streamed else LEFT_OUT.note, self._wanted
        if reached < blocks:
            left_out, wanted = f"the states end after {reached} of {blocks} blocks, so that X_D is not known", set()
        known = {blocks - 1: self._last} if wanted else {}
        whole = None if self.whole is None or 0 not in wanted - known.keys() else self.whole()
        if whole is not None:
            known[0] = summary(whole), whole
        products = _of_products([*self._kept, *[()] * (blocks - reached)], wanted, left_out, self.tolerance, self._told, known)
        end = self._sizes[-1]
        conditions = [_conditions(each, start, end) for (_, each), start in zip(products, self._sizes, strict=False)]
        conditions += [[]] * (blocks - len(conditions))
        return SensitivityByDepth(self._sublayers, self._blocks, [product for product, _ in products], conditions)

    def _told(self, figure: Sensitivity) -> Sensitivity:
        if self.progress is not None:
            self.progress(next(self._done))
        return figure


def backward_sensitivity(
    depth: Depth,
    x0: Float[Tensor, "*batch tokens width"],
    *,
    tolerance: float = TOLERANCE,
    starts: int | None = None,
    progress: OnSegment | None = None,
) -> SensitivityByDepth:
    """`Sensitivities` alone."""
    found: SensitivityByDepth = walk_depth(depth, x0, [Sensitivities(tolerance=tolerance, starts=starts, progress=progress)])[0]
    return found


def _sizes(x: Tensor) -> Float[Tensor, " sequences"]:
    """|X| of every sequence."""
    sizes: Tensor = torch.linalg.vector_norm(x.double(), dim=(-2, -1)).reshape(-1)
    return sizes


def _spread(count: int, starts: int | None) -> set[int]:
    """So many of the indices 0 .. count - 1, spread evenly; all for None."""
    return set(range(count) if starts is None else torch.linspace(0, count - 1, starts).round().int().tolist())


def _of_products(
    parts: Sequence[Steps],
    wanted: set[int],
    left_out: str,
    tolerance: float,
    told: ToldSensitivity,
    known: Mapping[int, FoundSensitivity],
) -> list[tuple[Sensitivity, Tensor | None]]:
    """|J_{i:D}|_2 for the wanted i, from the last to the first, and that of every sequence; those
    of `known` are taken from there.
    """
    products: list[tuple[Sensitivity, Tensor | None]] = []
    guess: Tensor | None = None  # of the right singular vectors
    for i in reversed(range(len(parts))):
        found, each, right = Sensitivity(None, None, 0, left_out), None, guess
        if i in wanted:
            # every sequence to the tolerance: the worst relative to its own states need not be the
            # one with the largest |J|
            rest = [step for part in parts[i:] for step in part]
            found, leading = known[i] if i in known else _of_chain(rest, tolerance, guess, each=True)
            each, right = (None, None) if leading is None else (leading.values[..., 0].double().reshape(-1), _right(leading))
        products.insert(0, (told(found), each))
        # the left singular vectors of J_{i:D} change little with i, and one pull takes the right
        # ones along
        on = i > min(wanted - known.keys(), default=i) and None not in parts[i - 1]
        guess = None if right is None or not on else _chain(parts[i - 1]).pull(right)
    return products


def linearised_step(sublayer: Sublayer, h: float, x: Float[Tensor, "*batch tokens width"]) -> Linearisation | None:
    """dX+/dX of the discrete step X+ = step(X) of length h; None where the state is not finite."""
    if not finite(x):
        return None
    with reference_kernels(sublayer):
        return linearise(lambda x: sublayer.step(x, h), x)


def step_linearisations(depth: Depth, x0: Float[Tensor, "*batch tokens width"]) -> list[Linearisation | None]:
    """The linearised discrete step of every segment along the depth from X_0: the graph of the
    whole depth, which holds all weights.
    """
    found: list[Linearisation | None] = walk_depth(depth, x0, [StepGraphs()])[0]
    return found


class StepGraphs(Instrument):
    """`linearised_step` of every segment, all kept: for one instrument or for several, which then
    ask for a segment's with `of`.
    """

    def begin(self, depth: Depth, x0: Tensor) -> None:
        self._steps: list[Linearisation | None] = []

    def forward(self, at: StepContext) -> None:
        self.of(at)

    def of(self, at: StepContext) -> Linearisation | None:
        """That of the segment, which has to follow those known."""
        if at.k == len(self._steps):
            self._steps.append(linearised_step(at.sublayer, at.h, at.x))
        return self._steps[at.k]

    def figures(self) -> list[Linearisation | None]:
        return self._steps


def sublayer_sensitivity(
    sublayer: Sublayer, x: Float[Tensor, "*batch tokens width"], *, tolerance: float = TOLERANCE
) -> Sensitivity:
    """S = |dv/dX|_2 of the sublayer's velocity v at X. An FFN acts on each token alone, so that
    each is a problem of its own.
    """
    if not finite(x):
        return Sensitivity(None, None, 0, "the state is not finite")
    try:
        with reference_kernels(sublayer):
            linear = linearise(sublayer.velocity, x)
    except ConfigError as error:  # the tangent space of an image that a zero gain has flattened
        return Sensitivity(None, None, 0, str(error))
    return summary(leading_singular(linear, problem=2 if mixes_tokens(sublayer.field, sublayer.kind) else 1, tolerance=tolerance))


def sensitivity(
    function: Map, x: Float[Tensor, "*batch tokens width"], *, problem: int = 2, tolerance: float = TOLERANCE
) -> Sensitivity:
    """|dy/dx|_2 of any function with second derivatives, its Jacobian taken over the last `problem`
    axes of x.
    """
    return summary(leading_singular(linearise(function, x), problem=problem, tolerance=tolerance))


def summary(found: Singular) -> Sensitivity:
    """The largest value of the batch as a `Sensitivity`."""
    if not bool(found.values.isfinite().all()):
        return Sensitivity(None, None, found.products, NOT_FINITE)
    return Sensitivity(found.largest, found.error, found.products)


def _of_chain(steps: Steps, tolerance: float, guess: Tensor | None = None, *, each: bool = False) -> FoundSensitivity:
    """|J|_2 of step after step, and what is known of every sequence where the steps exist."""
    if None in steps:
        return Sensitivity(None, None, 0, f"the state is not finite {steps.index(None)} sublayers on"), None
    found = leading_singular(_chain(steps), each=each, tolerance=tolerance, start=guess)
    return summary(found), found


def _right(found: Singular) -> Tensor | None:
    right = found.right.squeeze(-3)
    return right if finite(right) else None


def _chain(steps: Steps) -> Linearisation:
    return compose([step for step in steps if step is not None])
