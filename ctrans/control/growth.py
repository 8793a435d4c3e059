"""How the best value grows with a bound: linearly where the problem is degenerate, not at all where it is well-posed.

How the best value grows where a norm's gains and offsets are trained too, with one bound on them and the weights together.

The velocity is affine in (gamma, beta): for given weights W, -<P, f> = c(W) + <S(W), (gamma, beta)>. So the best gains within
|W|^2 + |gamma|^2 + |beta|^2 <= R^2 are along S, and what is left to climb is F_R(W) = c(W) + sqrt(R^2 - |W|^2) |S(W)|. An ascent over
both together would crawl: a norm forgets the weights' length, which is far from that of the gains.
"""

from __future__ import annotations

import dataclasses
import functools
import math

import torch
from jaxtyping import Float
from torch import Tensor

from ctrans.control.ascent import Chart, Gains, ascend, evened, unchanged
from ctrans.control.last_map import Features, LastMapDecay, frobenius
from ctrans.control.tangent import LinearSpace

DECADES = (-2.0, 2.0)
"""Radii from 1/100 to 100 times the one at which velocities have the right size."""
RADII = 8
FITTED = 4
"""The exponent is that of the largest radii: small ones show how a norm's eps gives way, or a running cost, and not growth."""
STEPS = 25
"""The most for one radius. The value is a lower bound where it stops: at small radii, where a norm's eps slows the ascent."""


@dataclasses.dataclass(frozen=True)
class Growth:
    """The best -<P, f> - cost(f) found within |W|_F <= R, for growing R, and the k of value - base ~ R^k at the largest R.

    `limit` is what no value may exceed: H and its rounding, where it is finite.
    """

    radii: tuple[float, ...]
    values: tuple[float, ...]
    exponent: float
    base: float = 0.0
    limit: float = math.inf


@dataclasses.dataclass(frozen=True)
class Witness:
    """-<P, f_R> along f_R = -R p/|p|, p the projection of P on a degenerate set; `residual` is how far the f_R are from it."""

    radii: tuple[float, ...]
    values: tuple[float, ...]
    exponent: float
    residual: float


def growth(
    chart: Chart,
    features: Features,
    typical: Float[Tensor, "tokens width"],
    generator: torch.Generator,
    *,
    likely: Float[Tensor, "tokens width"] | None = None,
    base: float = 0.0,
) -> Growth:
    """max of -<P, f> - cost(f) over the velocities f that the placement makes of h W', |W|_F <= R, by ascent at each R.

    The radii are in units of the least norm of weights whose raw output has the velocity `typical`, well above any eps. The first
    ascent starts at random, each later one where the one before ended, or at that point stretched to the new bound if it is
    better; so do weights whose raw output is `likely`, where the velocities jump from one point to another (a norm of width 2).
    The exponent is that of what the values exceed `base` by (see `Supremum.base`).
    """
    u, s, inverse, _ = features.svd
    # a norm forgets the scale of h W', so that coordinates orthonormal in h W' converge fastest; where f is linear, those in W
    to_raw, to_weights = (u, inverse) if chart.degree == 0 else (u * s.mT, torch.ones_like(s))
    unit = float(frobenius(features.coordinates(chart.raw(typical)))) or 1.0
    radii = (unit * decades(typical)).tolist()

    def payoff(z: Tensor) -> Tensor:
        return chart.payoff(to_raw @ z).sum(-1)

    def size(z: Tensor) -> Tensor:
        return frobenius(to_weights * z)

    def stretch(z: Tensor, radius: float) -> Tensor:
        return z * (radius / size(z))

    def within(radius: float, z: Tensor) -> Tensor:
        return z / (size(z) / radius).clamp_min(1)

    raw = torch.randn(1, *chart.shape, generator=generator, dtype=s.dtype).to(s.device)
    directions = [to_raw.mT @ evened(chart.P, raw)]
    if likely is not None:
        # at a size where no eps shows, and large against the state that it is added to
        directions.append(inverse / to_weights * (u.mT @ chart.raw(chart.velocity(likely))).unsqueeze(0))
    z, values, ends = None, [], []
    for radius in radii:
        starts = [stretch(way, radius) for way in directions] + ([] if z is None else [z, stretch(z, radius)])
        start = max(starts, key=lambda z: float(payoff(z)))
        found = ascend(payoff, start, (-2, -1), functools.partial(within, radius), STEPS)
        z = found.z
        values.append(found.best)
        ends.append(z)
    # an end at any bound may be better at another than what the ascents there came to
    for k, radius in enumerate(radii):
        start = max((stretch(end, radius) for end in ends), key=lambda z: float(payoff(z)))
        if float(payoff(start)) > float(values[k]):
            values[k] = torch.maximum(values[k], ascend(payoff, start, (-2, -1), functools.partial(within, radius), STEPS).best)
    return Growth(tuple(radii), numbers(torch.cat(values)), exponent(s.new_tensor(radii), torch.cat(values) - base), base)


def decayed_growth(decay: LastMapDecay, P: Float[Tensor, "tokens width"]) -> Growth:
    """max of -<P, h W'> - lam/2 |W|_F^2 over |W|_F <= R for growing R, by ascent: it saturates once R lets W* in."""
    u, _, inverse, _ = decay.map.svd

    def cost(raw: Tensor, f: Tensor) -> Tensor:
        """lam/2 <f_j, ((h h')^+ f)_j>: token j's part of lam/2 |W|^2, W the least weights with h W' = f."""
        return decay.last_map_decay / 2 * (f * (u @ (inverse * decay.map.coordinates(f)))).sum(-1)

    chart = Chart(P, P.shape, axes=(-1,), degree=1, velocity=unchanged, cost=cost)
    return growth(chart, decay.map, decay.maximizer(P), torch.Generator().manual_seed(0))


def witness(space: LinearSpace, P: Float[Tensor, "tokens width"]) -> Witness:
    """-<P, f_R> along `space.witness(P, R)` for growing R, in units of the R with entries of root mean square 1."""
    radii = P.numel() ** 0.5 * decades(P)
    velocities = torch.stack([space.witness(P, float(radius)) for radius in radii])
    values = -(P * velocities).sum((-2, -1))
    return Witness(numbers(radii), numbers(values), exponent(radii, values), float(space.residual(velocities).amax()))


def exponent(radii: Float[Tensor, " radii"], values: Float[Tensor, " radii"]) -> float:
    """k of the least-squares fit log|value| = k log R + c over the largest radii; 0 where a value is 0."""
    radii, values = radii[-FITTED:], values[-FITTED:].abs()
    if not bool(values.all()):
        return 0.0
    x, y = radii.log(), values.log()
    x = x - x.mean()
    return float((x * y).sum() / x.square().sum())


def decades(like: Tensor, span: tuple[float, float] = DECADES) -> Float[Tensor, " radii"]:
    """Factors of the radii."""
    return torch.logspace(*span, RADII, dtype=like.dtype, device=like.device)


def numbers(x: Tensor) -> tuple[float, ...]:
    """A tensor of numbers for a report."""
    return tuple(x.flatten().tolist())


GAINED_DECADES = (0.0, 4.0)
"""First the weights take their share of the bound, to overcome eps and the state, and then gains alone."""
SHARES = (1e-4, 1e-2, 0.5)
"""|W|/R of starts: the larger the bound, the less of it the weights need against eps."""
MOST = math.sqrt(0.5)
"""|W|/R beyond which more weights take more from the gains than they give: |S| grows at most like |W|, and then it saturates."""
RESTARTS = 2
"""Random directions of weights at the largest bound, beside the one that is best at the gains as they are."""
TRIED, SEARCH, CARRIED = 8, 60, 10
"""Steps of an ascent from each start at the largest bound, on from the best of them, and at each smaller bound from the larger's end."""


@dataclasses.dataclass(frozen=True, eq=False)
class _Climb:
    """F_R over weights z in coordinates orthonormal in h W': h W' = u z, and W is as long as `inverse` * z."""

    chart: Chart
    gains: Gains
    u: Tensor
    inverse: Tensor
    by_offset: Float[Tensor, " width"]
    """-d<P, f>/dbeta, which does not depend on the weights; 0 where there is no offset."""

    def size(self, z: Tensor) -> Tensor:
        """|W|_F."""
        return frobenius(self.inverse * z)

    def fixed(self, z: Tensor) -> Float[Tensor, "*batch tokens width"]:
        """f without gains and offsets."""
        zero = torch.zeros_like(self.gains.gamma)
        return self.gains.velocity(self.u @ z, zero, zero)

    def payoff(self, radius: float, z: Tensor) -> Float[Tensor, "*batch"]:
        """F_R(W) = c(W) + sqrt(R^2 - |W|^2) |S(W)|."""
        one, zero, p = torch.ones_like(self.gains.gamma), torch.zeros_like(self.gains.gamma), self.chart.P
        raw = self.u @ z
        fixed = self.gains.velocity(raw, zero, zero)
        by_gain = -(p * (self.gains.velocity(raw, one, zero) - fixed)).sum(-2)
        if len(one) == 1:  # one gain that all channels share
            by_gain = by_gain.sum(-1, keepdim=True)
        slope = (by_gain.square().sum(-1) + self.by_offset.square().sum()).sqrt()
        return -(p * fixed).sum((-2, -1)) + (radius**2 - self.size(z).square().squeeze((-2, -1))).sqrt() * slope

    def within(self, radius: float, z: Tensor) -> Tensor:
        """z, shortened to `MOST` of the bound where it is longer."""
        return z / (self.size(z) / (MOST * radius)).clamp_min(1)

    def stretched(self, z: Tensor, radius: float) -> list[Tensor]:
        """z with each of `SHARES` of the bound."""
        length = self.size(z)
        return [z * (share * radius / torch.where(length == 0, 1.0, length)) for share in SHARES]

    def climbed(self, radius: float, starts: Tensor, steps: int) -> tuple[Tensor, Tensor]:
        """The best value found from any of the starts, and the z that has it."""
        found = ascend(functools.partial(self.payoff, radius), starts, (-2, -1), functools.partial(self.within, radius), steps)
        first = found.best.argmax()
        return found.best[first], found.z[first : first + 1]

    def best_start(self, radius: float, starts: Tensor) -> tuple[Tensor, Tensor]:
        """The best value among the starts themselves, and the one that has it."""
        values = self.payoff(radius, starts)
        top = values.argmax()
        return values[top], starts[top : top + 1]


def gained_growth(
    chart: Chart,
    features: Features,
    typical: Float[Tensor, "tokens width"],
    likely: Float[Tensor, "tokens width"],
    generator: torch.Generator,
) -> Growth:
    """max of -<P, f> over |W|_F^2 + |gamma|^2 + |beta|^2 <= R^2, f what the placement makes of h W' with these gains, for growing R.

    Radii are in units of the weights whose velocity is `typical` together with the gains as they are. The largest comes first:
    its maximum is sought from `likely` (raw outputs that are best at the gains as they are) and from random directions, and is
    carried to the smaller ones as it is and in proportion. Values are bounds from below. The chart has gains.
    """
    gains = chart.gains
    assert gains is not None, "only a norm's chart is asked"
    u, _, inverse, _ = features.svd
    own = torch.stack([gains.gamma, gains.has_offset * gains.beta])
    unit = math.hypot(float(frobenius(features.coordinates(chart.raw(typical)))), float(own.norm())) or 1.0
    radii = (unit * decades(typical, GAINED_DECADES)).tolist()
    one, zero = torch.ones_like(gains.gamma), torch.zeros_like(gains.gamma)
    added = gains.velocity(likely, zero, one) - gains.velocity(likely, zero, zero)
    climb = _Climb(chart, gains, u, inverse, -gains.has_offset * (chart.P * added).sum(-2))

    best = (u.mT @ chart.raw(chart.velocity(likely))).unsqueeze(0)
    value, z = _at_the_largest(climb, radii[-1], best, generator)
    values, ends = _carried(climb, radii, best, value, z)
    # an end at any bound may be better at another than what the ascent there came to
    for k, radius in enumerate(radii):
        top, start = climb.best_start(radius, torch.cat(climb.stretched(torch.cat(ends), radius)))
        if float(top) > float(values[k]):
            values[k] = torch.maximum(values[k], climb.climbed(radius, start, CARRIED)[0])
    found, base = torch.stack(values), float(-(chart.P * climb.fixed(ends[-1][0])).sum())
    return Growth(tuple(radii), numbers(found), exponent(u.new_tensor(radii), found - base), base)


def _at_the_largest(climb: _Climb, radius: float, best: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """The maximum at the largest bound, from `best` and random directions."""
    u, chart = climb.u, climb.chart
    noise = torch.randn(RESTARTS, *chart.shape, generator=generator, dtype=u.dtype).to(u.device)
    directions = torch.cat([best, u.mT @ evened(chart.P, noise)])
    _, z = climb.climbed(radius, torch.cat([climb.within(radius, best), *climb.stretched(directions, radius)[:2]]), TRIED)
    return climb.climbed(radius, z, SEARCH)


def _carried(climb: _Climb, radii: list[float], best: Tensor, value: Tensor, z: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """The maxima at all bounds in their order, each ascent from where that at the next larger one ended; and where they end."""
    values, ends, last = [value], [z], radii[-1]
    for radius in reversed(radii[:-1]):
        carried = [z, z * (radius / last), best, *climb.stretched(torch.cat([z, best]), radius)]
        _, start = climb.best_start(radius, torch.cat([climb.within(radius, each) for each in carried]))
        value, z = climb.climbed(radius, start, CARRIED)
        values.append(value)
        ends.append(z)
        last = radius
    return values[::-1], ends
