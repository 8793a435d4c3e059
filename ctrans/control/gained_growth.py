"""How the best value grows where a norm's gains and offsets are trained too, with one bound on them and the weights together.

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

from ctrans.control.ascent import Chart, Gains, ascend, evened
from ctrans.control.bounded_growth import Growth, decades, exponent, numbers
from ctrans.control.last_map import Features, frobenius

DECADES = (0.0, 4.0)
"""First the weights take their share of the bound, to overcome eps and the state, and then gains alone."""
SHARES = (1e-4, 1e-2, 0.5)
"""|W|/R of starts: the larger the bound, the less of it the weights need against eps."""
MOST = math.sqrt(0.5)
"""|W|/R beyond which more weights take more from the gains than they give: |S| grows at most like |W|, and then it saturates."""
RESTARTS = 2
"""Random directions of weights at the largest bound, beside the one that is best at the gains as they are."""
TRIED, SEARCH, STEPS = 8, 60, 10
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
    radii = (unit * decades(typical, DECADES)).tolist()
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
            values[k] = torch.maximum(values[k], climb.climbed(radius, start, STEPS)[0])
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
        value, z = climb.climbed(radius, start, STEPS)
        values.append(value)
        ends.append(z)
        last = radius
    return values[::-1], ends
