"""Backward sensitivity: the largest singular value of the Jacobians through which gradients pass, by depth."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from ctrans.depth import Depth
from ctrans.stability.singular import Linearisation, Singular, compose, leading_singular, linearise
from ctrans.sublayer import Sublayer, plain_attention
from solvers import ConfigError
from solvers.run import finite
from solvers.segment import Map

TOLERANCE = 1e-3
"""Relative error at which an iteration stops."""

Progress = Callable[[int], None]


@dataclasses.dataclass(frozen=True)
class Sensitivity:
    """|J|_2, at most `error` times itself too small by the residual's estimate; None where it does not exist, and `note` says why."""

    value: float | None
    error: float | None
    products: int
    note: str = ""


@dataclasses.dataclass(frozen=True)
class Backward:
    """Sensitivities by depth, of the discrete model at its own states.

    `sublayers[k]` is S_k = |dv_k/dX|_2 of segment k's velocity. `blocks[i]` is |dX_{i+1}/dX_i|_2 of block i, and `products[i]` is
    |J_{i:D}|_2 of all blocks from i to the end: by that much a gradient at the end can have grown when it reaches block i.
    """

    sublayers: list[Sensitivity]
    blocks: list[Sensitivity]
    products: list[Sensitivity]


def backward_sensitivity(
    depth: Depth,
    x0: Float[Tensor, "*batch tokens width"],
    *,
    tolerance: float = TOLERANCE,
    starts: int | None = None,
    progress: Progress | None = None,
) -> Backward:
    """S_k, |dX_{i+1}/dX_i|_2 and |J_{i:D}|_2 along X_{k+1} = step_k(X_k) from X_0 (Kan, eq. 16 and 18; theory, section 7).

    Of a batch of sequences, each is the largest over the sequences. Nothing is formed: the cost is about 20 evaluations and their
    gradients for each sublayer and block, as many of all later blocks for each product, and the memory of one graph of the
    whole depth. With `starts`, only so many of the products are computed, spread evenly over the blocks i; that is most of the
    work in a deep model. `progress(k)` is called when each of the 2D + D + D figures is done.

    What is not finite, and what depends on it, has None as its value; the rest is computed.
    """
    done = itertools.count(1)

    def told(figure: Sensitivity) -> Sensitivity:
        if progress is not None:
            progress(next(done))
        return figure

    states = trajectory(depth, x0)
    sublayers = [
        told(sublayer_sensitivity(sublayer, x, tolerance=tolerance)) for sublayer, x in zip(depth.sublayers, states, strict=False)
    ]
    steps = step_linearisations(depth, states)
    parts = [steps[i : i + depth.per_block] for i in range(0, len(steps), depth.per_block)]
    blocks = [told(_of_chain(part, tolerance)[0]) for part in parts]
    products: list[Sensitivity] = []
    wanted = set(range(len(parts)) if starts is None else torch.linspace(0, len(parts) - 1, starts).round().int().tolist())
    guess: Tensor | None = None
    for i in reversed(range(len(parts))):
        found, right = Sensitivity(None, None, 0, "left out"), guess
        if i in wanted:
            found, right = _of_chain([step for part in parts[i:] for step in part], tolerance, guess)
        products.insert(0, told(found))
        # the left singular vectors of J_{i:D} change little with i, and one pull takes the right ones along
        guess = None if right is None or i == 0 or None in parts[i - 1] else _chain(parts[i - 1]).pull(right)
    return Backward(sublayers, blocks, products)


@torch.no_grad()
def trajectory(depth: Depth, x0: Float[Tensor, "*batch tokens width"]) -> list[Float[Tensor, "*batch tokens width"]]:
    """X_0 and X_{k+1} = step_k(X_k), finite or not."""
    states = [x0.detach()]
    for sublayer, h in zip(depth.sublayers, lengths(depth), strict=True):
        states.append(sublayer.step(states[-1], h))
    return states


def lengths(depth: Depth) -> list[float]:
    """The length of every segment in depth-time."""
    return [float(segment.length) for segment in depth.segments()]


def step_linearisations(depth: Depth, states: Sequence[Float[Tensor, "*batch tokens width"]]) -> list[Linearisation | None]:
    """The linearised discrete step of every segment at its state; None where the state is not finite."""

    def linearised(sublayer: Sublayer, h: float, x: Tensor) -> Linearisation | None:
        with plain_attention(sublayer):
            return linearise(lambda x: sublayer.step(x, h), x) if finite(x) else None

    return [linearised(*each) for each in zip(depth.sublayers, lengths(depth), states, strict=False)]


def sublayer_sensitivity(
    sublayer: Sublayer, x: Float[Tensor, "*batch tokens width"], *, tolerance: float = TOLERANCE
) -> Sensitivity:
    """S = |dv/dX|_2 of the sublayer's velocity v at X. An FFN acts on each token alone, so that each is a problem of its own."""
    if not finite(x):
        return Sensitivity(None, None, 0, "the state is not finite")
    try:
        with plain_attention(sublayer):
            linear = linearise(sublayer.velocity, x)
    except ConfigError as error:  # the tangent space of an image that a zero gain has flattened
        return Sensitivity(None, None, 0, str(error))
    return summary(leading_singular(linear, problem=PROBLEM[sublayer.kind], tolerance=tolerance))


PROBLEM = {"attention": 2, "ffn": 1}
"""How many of a state's last axes a map of each kind mixes."""


def sensitivity(
    function: Map, x: Float[Tensor, "*batch tokens width"], *, problem: int = 2, tolerance: float = TOLERANCE
) -> Sensitivity:
    """|dy/dx|_2 of any function with second derivatives, its Jacobian taken over the last `problem` axes of x."""
    return summary(leading_singular(linearise(function, x), problem=problem, tolerance=tolerance))


def summary(found: Singular) -> Sensitivity:
    """The largest value of the batch as a `Sensitivity`."""
    if not bool(found.values.isfinite().all()):
        return Sensitivity(None, None, found.products, "the Jacobian is not finite")
    return Sensitivity(found.largest, found.error, found.products)


def _of_chain(
    steps: Sequence[Linearisation | None], tolerance: float, guess: Tensor | None = None
) -> tuple[Sensitivity, Tensor | None]:
    """|J|_2 of step after step, and its right singular vector where both exist."""
    if None in steps:
        return Sensitivity(None, None, 0, f"the state is not finite {steps.index(None)} sublayers on"), None
    found = leading_singular(_chain(steps), tolerance=tolerance, start=guess)
    right = found.right.squeeze(-3)
    return summary(found), right if finite(right) else None


def _chain(steps: Sequence[Linearisation | None]) -> Linearisation:
    return compose([step for step in steps if step is not None])
