"""How the best value grows with a bound: linearly where the problem is degenerate, not at all where it is well-posed."""

from __future__ import annotations

import dataclasses
import functools
import math

import torch
from jaxtyping import Float
from torch import Tensor

from ctrans.control.ascent import Chart, Gains, ascend, evened
from ctrans.control.last_map import Features, frobenius
from ctrans.control.linear_spaces import LinearSpace

DECADES = (-2.0, 2.0)
"""Radii from 1/100 to 100 times the one at which velocities have the right size."""
DECADES_OF_GAINS = (0.0, 4.0)
"""With gains trained too: first the weights take their share of the bound, to overcome eps and the state, and then gains alone."""
RADII = 8
FITTED = 4
"""The exponent is that of the largest radii: small ones show how a norm's eps gives way, or a running cost, and not growth."""
STEPS = 25
"""The most for one radius. The value is a lower bound where it stops: at small radii, where a norm's eps slows the ascent."""
SHARES = (0.01, 0.1, 1.0)
"""|W|/|(gamma, beta)| of starts that have both: the larger the bound, the less of it the weights need against eps."""


@dataclasses.dataclass(frozen=True)
class Growth:
    """The best -<P, f> - cost(f) found within |W|_F <= R, for growing R, and the k of value ~ R^k at the largest R."""

    radii: tuple[float, ...]
    values: tuple[float, ...]
    exponent: float


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
    gains: Gains | None = None,
) -> Growth:
    """max of -<P, f> - cost(f) over the velocities f that the placement makes of h W', |W|_F <= R, by ascent at each R.

    The radii are in units of the least norm of weights whose raw output has the velocity `typical`, well above any eps. The first
    ascent starts at random, each later one where the one before ended, or at that point stretched to the new bound if it is
    better; so do weights whose raw output is `likely`, where the velocities jump from one point to another (a norm of width 2).
    With `gains` the norm's gains and offsets are bounded together with the weights, |W|^2 + |gamma|^2 + |beta|^2 <= R^2.
    """
    u, s, inverse, _ = features.svd
    # a norm forgets the scale of h W', so that coordinates orthonormal in h W' converge fastest; where f is linear, those in W
    to_raw, to_weights = (u, inverse) if chart.degree == 0 else (u * s.mT, torch.ones_like(s))
    rank = to_raw.shape[-1]
    own = None if gains is None else torch.stack([gains.gamma, gains.has_offset * gains.beta])
    unit = math.hypot(float(frobenius(features.coordinates(chart.raw(typical)))), 0.0 if own is None else float(own.norm()))
    radii = ((unit or 1.0) * _decades(typical, DECADES if own is None else DECADES_OF_GAINS)).tolist()

    def payoff(z: Tensor) -> Tensor:
        raw = to_raw @ z[..., :rank, :]
        if gains is None:
            return chart.payoff(raw).sum(-1)
        f = gains.velocity(raw, z[..., rank : rank + 1, :], gains.has_offset * z[..., rank + 1 :, :])
        return -(chart.P * f).sum((-2, -1))

    def size(z: Tensor) -> Tensor:
        return frobenius(torch.cat([to_weights * z[..., :rank, :], z[..., rank:, :]], -2))

    def stretch(z: Tensor, radius: float) -> Tensor:
        return z * (radius / size(z))

    def within(radius: float, z: Tensor) -> Tensor:
        return z / (size(z) / radius).clamp_min(1)

    raw = torch.randn(1, *chart.shape, generator=generator, dtype=s.dtype).to(s.device)
    directions = [to_raw.mT @ evened(chart.P, raw)]
    if likely is not None:
        # at a size where no eps shows, and large against the state that it is added to
        directions.append(inverse / to_weights * (u.mT @ chart.raw(chart.velocity(likely))).unsqueeze(0))
    z, values = None, []
    for radius in radii:
        starts = [stretch(each, radius) for way in directions for each in _shares(way, own, to_weights)]
        if own is not None and likely is not None:
            starts.append(_filled(directions[-1], own, to_weights, radius))
        if z is not None:
            starts += [z, stretch(z, radius)]
        start = max(starts, key=lambda z: float(payoff(z)))
        found = ascend(payoff, start, (-2, -1), functools.partial(within, radius), STEPS)
        z = found.z
        values.append(found.best)
    return Growth(tuple(radii), _numbers(torch.cat(values)), exponent(s.new_tensor(radii), torch.cat(values)))


def _shares(z: Tensor, own: Tensor | None, to_weights: Tensor) -> list[Tensor]:
    """The weights z, alone or with gains and offsets as they are, the weights taking these shares of the two together."""
    if own is None:
        return [z]
    z = z / frobenius(to_weights * z)
    rest = _direction(own).expand(*z.shape[:-2], *own.shape)
    return [torch.cat([share * z, rest], -2) for share in SHARES]


def _filled(z: Tensor, own: Tensor, to_weights: Tensor, radius: float) -> Tensor:
    """The weights z as they are, at most half of the bound, and gains and offsets for the rest of it."""
    size = float(frobenius(to_weights * z))
    share = min(1.0, radius / (2 * size)) if size else 1.0
    rest = math.sqrt(radius**2 - (share * size) ** 2) * _direction(own)
    return torch.cat([share * z, rest.expand(*z.shape[:-2], *own.shape)], -2)


def _direction(own: Tensor) -> Tensor:
    return own / own.norm() if bool(own.any()) else torch.full_like(own, own.numel() ** -0.5)


def witness(space: LinearSpace, P: Float[Tensor, "tokens width"]) -> Witness:
    """-<P, f_R> along `space.witness(P, R)` for growing R, in units of the R with entries of root mean square 1."""
    radii = P.numel() ** 0.5 * _decades(P)
    velocities = torch.stack([space.witness(P, float(radius)) for radius in radii])
    values = -(P * velocities).sum((-2, -1))
    return Witness(_numbers(radii), _numbers(values), exponent(radii, values), float(space.residual(velocities).amax()))


def exponent(radii: Float[Tensor, " radii"], values: Float[Tensor, " radii"]) -> float:
    """k of the least-squares fit log|value| = k log R + c over the largest radii; 0 where a value is 0."""
    radii, values = radii[-FITTED:], values[-FITTED:].abs()
    if not bool(values.all()):
        return 0.0
    x, y = radii.log(), values.log()
    x = x - x.mean()
    return float((x * y).sum() / x.square().sum())


def _decades(like: Tensor, decades: tuple[float, float] = DECADES) -> Float[Tensor, " radii"]:
    return torch.logspace(*decades, RADII, dtype=like.dtype, device=like.device)


def _numbers(x: Tensor) -> tuple[float, ...]:
    return tuple(x.flatten().tolist())
