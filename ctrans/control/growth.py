"""Growth of the best value with a bound: linear if the problem is degenerate, none if it is
well-posed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from ctrans.base.shapes import UnbatchedRows
from ctrans.control.ascent import BoundedAscent, Chart, balanced, frobenius, identity, noise
from ctrans.control.last_map import Features, LastMapDecay
from ctrans.control.tangent import LinearSpace

PerRadius = Float[Tensor, " radii"]
"""A number for each radius."""

DECADES = (-2.0, 2.0)
"""Radii from 1/100 to 100 times the one at which velocities have the right size."""
RADII = 8
FITTED = 4
"""The exponent is fitted to the largest radii. Small radii show the effect of a norm's eps or of a
running cost.
"""
STEPS = 25
"""Largest number of steps per radius. Where an ascent stops early (small radii, because of eps),
its value is a lower bound.
"""
GAINED_DECADES = (0.0, 4.0)
"""Radii of a bound on weights and gains together: first the weights overcome eps and the state,
then only the gains grow.
"""
SHARES = (1e-4, 1e-2, 0.5)
"""|W|/R of starts: with a larger bound the weights need a smaller share of it against eps."""
MOST = math.sqrt(0.5)
"""The largest useful |W|/R: beyond it more weights cost more in gains than they add, because |S|
grows at most like |W| and then saturates.
"""
RESTARTS = 2
"""Random directions of weights at the largest bound, in addition to the one that is best at the
present gains.
"""
TRIED, SEARCH, CARRIED = 8, 60, 10
"""Steps of an ascent: from each start at the largest bound, on from the best of them, and at each
smaller bound.
"""


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
        to_raw, to_weights = (u, inverse)
    else:
        to_raw, to_weights = (u * s.mT, torch.ones_like(s))
    unit = float(frobenius(features.coordinates(chart.raw(typical)))) or 1.0
    radii = (unit * decades(typical)).tolist()
    ascent = BoundedAscent(
        lambda radius, z: chart.payoff(to_raw @ z).sum(-1),
        STEPS,
        lambda z: frobenius(to_weights * z),
    )
    directions = [to_raw.mT @ balanced(chart.P, noise(s, generator, 1, *chart.shape))]
    if likely is not None:
        # so large that neither eps nor the state that it is added to matters
        directions.append(
            inverse / to_weights * (u.mT @ chart.raw(chart.velocity(likely))).unsqueeze(0)
        )
    climbed: list[tuple[Tensor, Tensor]] = []
    for radius in radii:
        starts = [ascent.stretched(radius, torch.cat(directions))]
        if climbed:
            end = climbed[-1][1]
            starts += [end, ascent.stretched(radius, end)]
        climbed.append(ascent.climb(radius, ascent.best(radius, torch.cat(starts))))
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
    values = list[Tensor]()
    for radius, (value, _) in zip(radii, climbed, strict=True):
        start = ascent.best(radius, ascent.stretched(radius, ends))
        if float(ascent.payoff(radius, start)) > float(value):
            value = torch.maximum(value, ascent.climb(radius, start)[0])
        values.append(value)
    found = torch.cat(values)
    return Growth(
        tuple(radii), numbers(found), exponent(found.new_tensor(radii), found - base), base
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
        return decay.last_map_decay / 2 * (f * (u @ (inverse * decay.map.coordinates(f)))).sum(-1)

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
        numbers(radii),
        numbers(values),
        exponent(radii, values),
        float(space.residual(velocities).amax()),
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
    likely: UnbatchedRows,
    generator: torch.Generator,
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
    own = torch.stack([gains.gamma, gains.has_offset * gains.beta])
    unit = (
        math.hypot(float(frobenius(features.coordinates(chart.raw(typical)))), float(own.norm()))
        or 1.0
    )
    radii = (unit * decades(typical, GAINED_DECADES)).tolist()
    one = torch.ones_like(gains.gamma)
    zero = torch.zeros_like(gains.gamma)
    by_offset = -gains.has_offset * (
        p * (gains.velocity(likely, zero, one) - gains.velocity(likely, zero, zero))
    ).sum(-2)

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
        return (
            -(p * fixed).sum((-2, -1))
            + (radius**2 - size(z).square().squeeze((-2, -1))).sqrt() * slope
        )

    ascent = BoundedAscent(payoff, CARRIED, size, most=MOST, shares=SHARES)
    best = (u.mT @ chart.raw(chart.velocity(likely))).unsqueeze(0)
    last = radii[-1]
    directions = torch.cat([best, u.mT @ balanced(p, noise(u, generator, RESTARTS, *chart.shape))])
    small = ascent.stretched(last, directions)[: 2 * len(directions)]  # the two smallest shares
    _, z = ascent.climb(last, torch.cat([ascent.within(last, best), small]), TRIED)
    climbed = [ascent.climb(last, z, SEARCH)]
    for radius in reversed(radii[:-1]):
        z = climbed[-1][1]
        carried = torch.cat(
            [z, z * (radius / last), best, ascent.stretched(radius, torch.cat([z, best]))]
        )
        climbed.append(ascent.climb(radius, ascent.best(radius, ascent.within(radius, carried))))
        last = radius
    base = -float((p * gains.velocity(u @ climbed[0][1][0], zero, zero)).sum())
    return _improved(ascent, radii, climbed[::-1], base)
