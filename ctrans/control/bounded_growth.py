"""How the best value grows with a bound: linearly where the problem is degenerate, not at all where it is well-posed."""

from __future__ import annotations

import dataclasses
import functools
import math

import torch
from jaxtyping import Float
from torch import Tensor

from ctrans.control.ascent import Chart, ascend, evened, unchanged
from ctrans.control.last_map import Features, LastMapDecay, frobenius
from ctrans.control.linear_spaces import LinearSpace

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
