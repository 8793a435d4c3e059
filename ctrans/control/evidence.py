"""What a certificate compares the closed form of H with: ascents through the model's own modules,
and the growth of the best value with a bound.

The ascents over velocities and over weights of the last linear map do not use the closed form. The
best value grows linearly with a bound if the problem is degenerate, and stops growing if it is
well-posed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from ctrans.base.shapes import UnbatchedRows
from ctrans.control.admissible import length, ratio
from ctrans.control.ascent import (
    STEPS,
    BoundedAscent,
    Chart,
    ascend,
    balanced,
    frobenius,
    identity,
    noise,
)
from ctrans.control.last_map import Features, LastMapDecay
from ctrans.control.tangent import LinearSpace

PerRadius = Float[Tensor, " radii"]
"""A number for each radius."""

PAIRS = 2
"""Starts come in pairs z and -z: a quadratic on a sphere has at most one local maximum besides the
global one, on the opposite side.
"""
GUESSES = 32
"""The number of additional starts where there are local maxima."""
GUESS_STEPS = 30
"""The number of steps of these starts before the best ones continue."""
WEIGHT_STEPS = 200
"""With fewer features than tokens an ascent over weights converges slowly. Its result is a lower
bound wherever it stops.
"""

DECADES = (-2.0, 2.0)
"""Radii from 1/100 to 100 times the one at which velocities have the right size."""
RADII = 8
FITTED = 4
"""The exponent is fitted to the largest radii. Small radii show the effect of a norm's eps or of a
running cost.
"""
GROWTH_STEPS = 25
"""Largest number of steps per radius. Where an ascent stops early (small radii, because of eps),
its value is a lower bound.
"""

GAINED_DECADES = (0.0, 4.0)
"""Radii of a bound on weights and gains together: first the weights overcome eps and the state,
then only the gains grow.
"""
GAINED_SHARES = (1e-4, 1e-2, 0.5)
"""|W|/R of starts: with a larger bound the weights need a smaller share of it against eps."""
GAINED_MOST = math.sqrt(0.5)
"""The largest useful |W|/R: beyond it more weights cost more in gains than they add, because |S|
grows at most like |W| and then saturates.
"""
GAINED_RESTARTS = 2
"""Random directions of weights at the largest bound, in addition to the one that is best at the
present gains.
"""
GAINED_FIRST_STEPS = 8
"""Steps from each start at the largest bound."""
GAINED_SEARCH_STEPS = 60
"""Steps on from the best of these starts."""
GAINED_CARRIED_STEPS = 10
"""Steps at each smaller bound."""


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


@dataclass(frozen=True)
class Growth:
    """The best -<P, f> - cost(f) found within |W|_F <= R for growing R, and the k of value - base ~
    R^k at the largest R.

    `limit` is an upper bound of all values: H plus its rounding, if H is finite.
    """

    radii: tuple[float, ...]
    values: tuple[float, ...]
    exponent: float
    base: float = 0.0
    limit: float = math.inf


@dataclass(frozen=True)
class Witness:
    """-<P, f_R> along f_R = -R p/|p|, p the projection of P on a degenerate set. `residual` is the
    distance of the f_R from it.
    """

    radii: tuple[float, ...]
    values: tuple[float, ...]
    exponent: float
    residual: float


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
        guesses = chart.guess(noise(start, generator, GUESSES, 1, chart.shape[-1]))
        start = torch.cat([start, guesses])
        first_ascents = ascend(
            chart.payoff, start, chart.axes, chart.project, steps=min(steps, GUESS_STEPS)
        )
        start = first_ascents.z[first_ascents.best.topk(2 * pairs).indices]
    ascents = ascend(chart.payoff, start, chart.axes, chart.project, steps=steps)
    payoffs = ascents.best.reshape(2 * pairs, -1)
    best, first = payoffs.max(0)
    near = payoffs >= best - math.sqrt(torch.finfo(best.dtype).eps) * best.abs()
    velocities = _by_start(chart.velocity(ascents.z), 2 * pairs)
    coordinates = _by_start(ascents.z, 2 * pairs)
    rows = torch.arange(velocities.shape[1], device=ties.device)
    top = velocities[first.expand(len(rows)), rows]
    # coordinates of weights (under a decay of the last map) have no rows of tokens
    by_token = coordinates.shape[1] == len(rows)
    if by_token:
        likely = coordinates[first.expand(len(rows)), rows]
    else:
        likely = coordinates[first[0]]
    likely = likely.reshape(-1, width)
    apart = torch.where(near, length(velocities - top), 0.0).amax(0)
    # at least the rounding of a random velocity, as the best one may be 0
    random_velocities = chart.velocity(chart.project(start))
    rounding = torch.finfo(best.dtype).eps * length(random_velocities).amax()
    longest = torch.maximum(length(top).amax(), rounding)
    distance = ratio(apart, longest)
    if chart.joint:
        # one ascent for all tokens resolves a token only as far as its share
        distance = distance * ratio(length(chart.P), length(chart.P).amax())
    distance = distance.reshape(tokens, -1).amax(-1)
    ascent = VelocityAscent(
        best=float(best.sum()),
        gap=share_of(value - float(best.sum()), scale),
        uniqueness=float(torch.where(ties, 0.0, distance).amax()),
        tied=float(torch.where(ties, distance, 0.0).amax()),
        steps=ascents.steps,
    )
    return ascent, likely


def _by_start(rows: Tensor, starts: int) -> Tensor:
    """Rows of shape (starts, rows of each start, entries)."""
    return rows.reshape(starts, -1, rows.shape[-1])


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
    if scale is None:
        scale = abs(value)
    u = features.svd[0]
    raw = chart.spread * balanced(chart.P, _starts(chart.P, chart.shape, pairs, generator))
    if likely is not None:
        raw = torch.cat([raw, likely.unsqueeze(0)])

    def payoff(z: Tensor) -> Tensor:
        return chart.payoff(u @ z).sum(-1)

    ascents = ascend(payoff, u.mT @ raw, (-2, -1), steps=WEIGHT_STEPS)
    W = features.weights(features.coordinates(u @ ascents.z[ascents.best.argmax()]))
    best = float(chart.payoff(features.h @ W.mT).sum())
    return WeightAscent(
        best=best,
        gap=share_of(value - best, scale),
        proven=0.0,
        rank=features.rank,
        tokens=len(u),
        steps=ascents.steps,
    )


def _starts(
    P: Tensor, shape: tuple[int, ...], pairs: int, generator: torch.Generator
) -> Float[Tensor, " starts *shape"]:
    half = noise(P, generator, pairs, *shape)
    return torch.cat([half, -half])


def share_of(part: float, total: float) -> float:
    """part/total, with 0/0 = 0."""
    if total:
        return part / total
    if part:
        return math.copysign(math.inf, part)
    return 0.0


def growth(
    chart: Chart,
    features: Features,
    typical: UnbatchedRows,
    generator: torch.Generator,
    *,
    likely: UnbatchedRows | None = None,
    base: float = 0.0,
) -> Growth:
    """max of -<P, f> - cost(f) over the velocities f that the placement makes of h W', |W|_F <= R,
    by ascent at each R.

    The radii are in units of the least norm of weights whose raw output has the velocity `typical`,
    well above any eps. The first ascent starts at random. Each later one starts at the end of the
    one before, or at that point stretched to the new bound if it is better. Weights whose raw
    output is `likely` are one more start, for velocities that jump from one point to another (a
    norm of width 2). The exponent is that of value - `base` (see `Supremum.base`).
    """
    u, s, inverse, _ = features.svd
    # a norm ignores the scale of h W', so coordinates orthonormal in h W' converge fastest; for a
    # linear f those orthonormal in W
    if chart.degree == 0:
        to_raw = u
        to_weights = inverse
    else:
        to_raw = u * s.mT
        to_weights = torch.ones_like(s)
    unit = float(frobenius(features.coordinates(chart.raw(typical))))
    if unit == 0:
        unit = 1.0
    radii = (unit * decades(typical)).tolist()

    def payoff(radius: float, z: Tensor) -> Tensor:
        return chart.payoff(to_raw @ z).sum(-1)

    def size(z: Tensor) -> Tensor:
        return frobenius(to_weights * z)

    ascent = BoundedAscent(payoff, GROWTH_STEPS, size)
    directions = [to_raw.mT @ balanced(chart.P, noise(s, generator, 1, *chart.shape))]
    if likely is not None:
        # so large that neither eps nor the state that it is added to matters
        likely_raw = (u.mT @ chart.raw(chart.velocity(likely))).unsqueeze(0)
        directions.append(inverse / to_weights * likely_raw)
    climbed: list[tuple[Tensor, Tensor]] = []
    for radius in radii:
        starts = [ascent.stretched(radius, torch.cat(directions))]
        if climbed:
            end = climbed[-1][1]
            starts += [end, ascent.stretched(radius, end)]
        best_start = ascent.best(radius, torch.cat(starts))
        climbed.append(ascent.climb(radius, best_start))
    return _improved(ascent, radii, climbed, base)


def _improved(
    ascent: BoundedAscent,
    radii: Sequence[float],
    climbed: Sequence[tuple[Tensor, Tensor]],
    base: float,
) -> Growth:
    """The growth of the values of ascents with their ends. Each value improves if the end of an
    ascent at another bound leads to a better one.
    """
    ends = torch.cat([end for _, end in climbed])
    best_values = list[Tensor]()
    for radius, (value, _) in zip(radii, climbed, strict=True):
        start = ascent.best(radius, ascent.stretched(radius, ends))
        if float(ascent.payoff(radius, start)) > float(value):
            value = torch.maximum(value, ascent.climb(radius, start)[0])
        best_values.append(value)
    values = torch.cat(best_values)
    return Growth(
        radii=tuple(radii),
        values=numbers(values),
        exponent=exponent(values.new_tensor(radii), values - base),
        base=base,
    )


def decayed_growth(decay: LastMapDecay, P: UnbatchedRows) -> Growth:
    """max of -<P, h W'> - lam/2 |W|_F^2 over |W|_F <= R for growing R, by ascent: it saturates once
    R admits W*.
    """
    u, _, inverse, _ = decay.map.svd

    def cost(raw: Tensor, f: Tensor) -> Tensor:
        """lam/2 <f_j, ((h h')^+ f)_j>: token j's part of lam/2 |W|^2, W the least weights with h W'
        = f.
        """
        solved = u @ (inverse * decay.map.coordinates(f))
        return decay.last_map_decay / 2 * (f * solved).sum(-1)

    chart = Chart(P, P.shape, identity, degree=1, cost=cost)
    return growth(chart, decay.map, decay.maximizer(P), torch.Generator().manual_seed(0))


def witness(space: LinearSpace, P: UnbatchedRows) -> Witness:
    """-<P, f_R> along `space.witness(P, R)` for growing R, in units of the R with entries of root
    mean square 1.
    """
    radii = P.numel() ** 0.5 * decades(P)
    velocities = torch.stack([space.witness(P, float(radius)) for radius in radii])
    values = -(P * velocities).sum((-2, -1))
    return Witness(
        radii=numbers(radii),
        values=numbers(values),
        exponent=exponent(radii, values),
        residual=float(space.residual(velocities).amax()),
    )


def exponent(radii: PerRadius, values: PerRadius) -> float:
    """k of the least-squares fit log|value| = k log R + c over the largest radii; 0 if a value is
    0.
    """
    radii = radii[-FITTED:]
    values = values[-FITTED:].abs()
    if not values.all():
        return 0.0
    x = radii.log()
    y = values.log()
    x = x - x.mean()
    return float((x * y).sum() / x.square().sum())


def decades(like: Tensor, span: tuple[float, float] = DECADES) -> PerRadius:
    """RADII numbers from 10^span[0] to 10^span[1], evenly spaced in the logarithm."""
    return torch.logspace(*span, RADII, dtype=like.dtype, device=like.device)


def numbers(x: Tensor) -> tuple[float, ...]:
    """The tensor's entries as floats."""
    return tuple(x.flatten().tolist())


def gained_growth(
    chart: Chart,
    features: Features,
    typical: UnbatchedRows,
    generator: torch.Generator,
    *,
    likely: UnbatchedRows,
) -> Growth:
    """max of -<P, f> over |W|_F^2 + |gamma|^2 + |beta|^2 <= R^2 for growing R, f made of h W' with
    these gains.

    The velocity is affine in (gamma, beta): for given weights W, -<P, f> = c(W) + <S(W), (gamma,
    beta)>. So the best gains within the bound are along S, and the ascent only climbs F_R(W) = c(W)
    + sqrt(R^2 - |W|^2) |S(W)|. A joint ascent would converge slowly: a norm ignores the weights'
    length, which is far from that of the gains.

    Radii are in units of the weights whose velocity is `typical` together with the present gains.
    The largest radius comes first: its ascents start from `likely` (raw outputs that are best at
    the present gains) and from random directions. The smaller radii start from its end, unscaled
    and in proportion. Values are lower bounds. The chart has gains.
    """
    gains = chart.gains
    p = chart.P
    assert gains is not None, "only a norm's chart is asked"
    u, _, inverse, _ = features.svd
    trained_offset = gains.has_offset * gains.beta
    present_gains = torch.stack([gains.gamma, trained_offset])
    weight_norm = float(frobenius(features.coordinates(chart.raw(typical))))
    unit = math.hypot(weight_norm, float(present_gains.norm()))
    if unit == 0:
        unit = 1.0
    radii = (unit * decades(typical, GAINED_DECADES)).tolist()
    one = torch.ones_like(gains.gamma)
    zero = torch.zeros_like(gains.gamma)
    velocity_by_offset = gains.velocity(likely, zero, one) - gains.velocity(likely, zero, zero)
    by_offset = -gains.has_offset * (p * velocity_by_offset).sum(-2)

    def size(z: Tensor) -> Tensor:
        return frobenius(inverse * z)

    def payoff(radius: float, z: Tensor) -> Tensor:
        """F_R(W) of h W' = u z."""
        raw = u @ z
        fixed = gains.velocity(raw, zero, zero)
        by_gain = -(p * (gains.velocity(raw, one, zero) - fixed)).sum(-2)
        if len(one) == 1:  # one gain that all channels share
            by_gain = by_gain.sum(-1, keepdim=True)
        slope = (by_gain.square().sum(-1) + by_offset.square().sum()).sqrt()
        length_of_gains = (radius**2 - size(z).square().squeeze((-2, -1))).sqrt()
        return -(p * fixed).sum((-2, -1)) + length_of_gains * slope

    ascent = BoundedAscent(
        payoff, GAINED_CARRIED_STEPS, size, most=GAINED_MOST, shares=GAINED_SHARES
    )
    best = (u.mT @ chart.raw(chart.velocity(likely))).unsqueeze(0)
    largest = radii[-1]
    random = u.mT @ balanced(p, noise(u, generator, GAINED_RESTARTS, *chart.shape))
    directions = torch.cat([best, random])
    # the two smallest shares
    small = ascent.stretched(largest, directions)[: 2 * len(directions)]
    starts = torch.cat([ascent.within(largest, best), small])
    _, z = ascent.climb(largest, starts, GAINED_FIRST_STEPS)
    values, z = ascent.climb(largest, z, GAINED_SEARCH_STEPS)
    climbed = [(values, z)]
    previous_radius = largest
    for radius in reversed(radii[:-1]):
        # The best weights of a smaller radius are near those of the one before, near those in the
        # proportion of the radii, or near the best at the present gains: it climbs from each.
        in_proportion = z * (radius / previous_radius)
        stretched = ascent.stretched(radius, torch.cat([z, best]))
        carried = ascent.within(radius, torch.cat([z, in_proportion, best, stretched]))
        values, z = ascent.climb(radius, ascent.best(radius, carried))
        climbed.append((values, z))
        previous_radius = radius
    _, best_z = climbed[0]
    without_gains = -float((p * gains.velocity(u @ best_z[0], zero, zero)).sum())
    return _improved(ascent, radii, climbed[::-1], without_gains)
