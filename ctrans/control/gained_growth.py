"""How the best value grows where a norm's gains and offsets are trained too, with one bound on them and the weights together.

The velocity is affine in (gamma, beta): for given weights W, -<P, f> = c(W) + <S(W), (gamma, beta)>. So the best gains within
|W|^2 + |gamma|^2 + |beta|^2 <= R^2 are along S, and what is left to climb is F_R(W) = c(W) + sqrt(R^2 - |W|^2) |S(W)|. An ascent over
both together would crawl: a norm forgets the weights' length, which is far from that of the gains.
"""

from __future__ import annotations

import functools
import math

import torch
from jaxtyping import Float
from torch import Tensor

from ctrans.control.ascent import Chart, ascend, evened
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

    # what an offset adds does not depend on the weights
    added = gains.velocity(likely, zero, one) - gains.velocity(likely, zero, zero)
    by_offset = -gains.has_offset * (chart.P * added).sum(-2)

    def size(z: Tensor) -> Tensor:
        return frobenius(inverse * z)

    def payoff(radius: float, z: Tensor) -> Tensor:
        raw = u @ z
        fixed = gains.velocity(raw, zero, zero)
        by_gain = -(chart.P * (gains.velocity(raw, one, zero) - fixed)).sum(-2)
        if len(one) == 1:  # one gain that all channels share
            by_gain = by_gain.sum(-1, keepdim=True)
        slope = (by_gain.square().sum(-1) + by_offset.square().sum()).sqrt()
        return -(chart.P * fixed).sum((-2, -1)) + (radius**2 - size(z).square().squeeze((-2, -1))).sqrt() * slope

    def within(radius: float, z: Tensor) -> Tensor:
        return z / (size(z) / (MOST * radius)).clamp_min(1)

    def stretched(z: Tensor, radius: float) -> list[Tensor]:
        length = size(z)
        return [z * (share * radius / torch.where(length == 0, 1.0, length)) for share in SHARES]

    def climbed(radius: float, starts: Tensor, steps: int) -> tuple[Tensor, Tensor]:
        found = ascend(functools.partial(payoff, radius), starts, (-2, -1), functools.partial(within, radius), steps)
        first = found.best.argmax()
        return found.best[first], found.z[first : first + 1]

    noise = torch.randn(RESTARTS, *chart.shape, generator=generator, dtype=u.dtype).to(u.device)
    best = (u.mT @ chart.raw(chart.velocity(likely))).unsqueeze(0)
    directions = torch.cat([best, u.mT @ evened(chart.P, noise)])
    _, z = climbed(radii[-1], torch.cat([within(radii[-1], best), *stretched(directions, radii[-1])[:2]]), TRIED)
    value, z = climbed(radii[-1], z, SEARCH)
    values, ends, last = [value], [z], radii[-1]
    for radius in reversed(radii[:-1]):
        carried = [z, z * (radius / last), best, *stretched(torch.cat([z, best]), radius)]
        starts = torch.cat([within(radius, each) for each in carried])
        top = payoff(radius, starts).argmax()
        value, z = climbed(radius, starts[top : top + 1], STEPS)
        values.append(value)
        ends.append(z)
        last = radius
    values.reverse()
    # an end at any bound may be better at another than what the ascent there came to
    for k, radius in enumerate(radii):
        starts = torch.cat(stretched(torch.cat(ends), radius))
        top = payoff(radius, starts).argmax()
        if float(payoff(radius, starts)[top]) > float(values[k]):
            values[k] = torch.maximum(values[k], climbed(radius, starts[top : top + 1], STEPS)[0])
    base = float(-(chart.P * gains.velocity(u @ z[0], zero, zero)).sum())
    return Growth(tuple(radii), numbers(torch.stack(values)), exponent(u.new_tensor(radii), torch.stack(values) - base), base)
