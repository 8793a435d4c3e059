"""Ascents over velocities and over weights of the last linear map, through the model's own modules.

They do not use the closed form. A certificate compares their result with H.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from ctrans.base.shapes import UnbatchedRows
from ctrans.control.admissible import length, ratio
from ctrans.control.ascent import STEPS, Chart, ascend, balanced, noise
from ctrans.control.last_map import Features

PAIRS = 2
"""Starts come in pairs z and -z: a quadratic on a sphere has at most one local maximum besides the
global one, on the opposite side.
"""
GUESSES, TRIED = 32, 30
"""Where there are local maxima: the number of additional starts, and their number of steps before
the best ones continue.
"""
WEIGHT_STEPS = 200
"""With fewer features than tokens an ascent over weights converges slowly. Its result is a lower
bound wherever it stops.
"""


@dataclass(frozen=True)
class VelocityAscent:
    """The best -<P, f> - cost(f) found over velocities, through the model's own modules with their
    eps.

    `gap` is (H - best)/scale, see `Supremum.scale`. `uniqueness` is the largest distance between
    one token's maximisers from different starts, relative to the longest velocity, over tokens that
    do not tie. `tied` is the same over tokens that tie. Where gains couple all tokens, a token
    counts by its share |p_j|/max |p|.
    """

    best: float
    gap: float
    uniqueness: float
    tied: float
    steps: int


@dataclass(frozen=True)
class WeightAscent:
    """The best -<P, f> - cost(f) found over weights W of the last linear map; the placement makes f
    of h W'.

    `gap` is (H - best)/scale: 0 if the rank of the features is the number of tokens. With a smaller
    rank the best value found is a lower bound, so the least gap lies between `proven` (see
    `gap_of_rank`) and `gap`. `proven` is 0 if nothing is proven: an output norm leaves the lengths
    of the rows of h W' free, so weights can attain H if (tokens - rank)(d - 1) < tokens.
    """

    best: float
    gap: float
    proven: float
    rank: int
    tokens: int
    steps: int


@torch.no_grad()
def climb_velocities(
    chart: Chart,
    value: float,
    scale: float,
    ties: Bool[Tensor, " tokens"],
    pairs: int,
    generator: torch.Generator,
    *,
    steps: int = STEPS,
) -> tuple[VelocityAscent, Float[Tensor, "rows width"]]:
    """Ascent over the chart's velocities. Returns its evidence and the best coordinates.

    - `value`: H
    - `scale`: the unit of the gap (`Supremum.scale`)
    - `ties`: the tokens whose costate ties
    - `pairs`: the number of pairs of random starts. If the chart has guesses, the starts that are
      best after a few steps continue
    - `steps`: the largest number of steps; 0 if all tokens tie: then only rounding could be climbed
    """
    tokens = len(chart.P)
    width = chart.shape[-1]
    chart = chart.split_parts()
    start = chart.spread * _starts(chart.P, chart.shape, pairs, generator)
    if chart.guess is not None:
        start = torch.cat(
            [start, chart.guess(noise(start, generator, GUESSES, 1, chart.shape[-1]))]
        )
        tried = ascend(chart.payoff, start, chart.axes, chart.project, steps=min(steps, TRIED))
        start = tried.z[tried.best.topk(2 * pairs).indices]
    found = ascend(chart.payoff, start, chart.axes, chart.project, steps=steps)
    payoffs = found.best.reshape(2 * pairs, -1)
    best, first = payoffs.max(0)
    near = payoffs >= best - math.sqrt(torch.finfo(best.dtype).eps) * best.abs()
    velocities, coordinates = (
        x.reshape(2 * pairs, -1, x.shape[-1]) for x in (chart.velocity(found.z), found.z)
    )
    rows = torch.arange(velocities.shape[1], device=ties.device)
    top = velocities[first.expand(len(rows)), rows]
    # coordinates of weights (under a decay of the last map) have no rows of tokens
    by_token = coordinates.shape[1] == len(rows)
    likely = (
        coordinates[first.expand(len(rows)), rows] if by_token else coordinates[first[0]]
    ).reshape(-1, width)
    apart = torch.where(near, length(velocities - top), 0.0).amax(0)
    # at least the rounding of a random velocity, as the best one may be 0
    longest = torch.maximum(
        length(top).amax(),
        torch.finfo(best.dtype).eps * length(chart.velocity(chart.project(start))).amax(),
    )
    distance = ratio(apart, longest)
    if chart.joint:  # one ascent for all tokens resolves a token only as far as its share
        distance = distance * ratio(length(chart.P), length(chart.P).amax())
    distance = distance.reshape(tokens, -1).amax(-1)
    ascent = VelocityAscent(
        best=float(best.sum()),
        gap=share_of(value - float(best.sum()), scale),
        uniqueness=float(torch.where(ties, 0.0, distance).amax()),
        tied=float(torch.where(ties, distance, 0.0).amax()),
        steps=found.steps,
    )
    return ascent, likely


@torch.no_grad()
def climb_weights(
    chart: Chart,
    features: Features,
    value: float,
    pairs: int,
    generator: torch.Generator,
    likely: UnbatchedRows | None = None,
    *,
    scale: float | None = None,
) -> WeightAscent:
    """Ascent over weights of the last linear map, in coordinates z with h W' = U z.

    - `features`: h, the input of the last map
    - `value`: H
    - `pairs`: the number of pairs of random starts
    - `likely`: the end of an ascent over velocities. The weights whose raw output comes nearest to
      it are one more start
    - `scale`: the unit of the gap; |H| if None
    """
    u = features.svd[0]
    raw = chart.spread * balanced(chart.P, _starts(chart.P, chart.shape, pairs, generator))
    if likely is not None:
        raw = torch.cat([raw, likely.unsqueeze(0)])
    found = ascend(lambda z: chart.payoff(u @ z).sum(-1), u.mT @ raw, (-2, -1), steps=WEIGHT_STEPS)
    W = features.weights(features.coordinates(u @ found.z[found.best.argmax()]))
    best = float(chart.payoff(features.h @ W.mT).sum())
    return WeightAscent(
        best,
        share_of(value - best, abs(value) if scale is None else scale),
        0.0,
        features.rank,
        len(u),
        found.steps,
    )


def _starts(
    P: Tensor, shape: tuple[int, ...], pairs: int, generator: torch.Generator
) -> Float[Tensor, " starts *shape"]:
    half = noise(P, generator, pairs, *shape)
    return torch.cat([half, -half])


def share_of(part: float, whole: float) -> float:
    """part/whole, with 0/0 = 0."""
    if whole:
        return part / whole
    if part:
        return math.copysign(math.inf, part)
    return 0.0
