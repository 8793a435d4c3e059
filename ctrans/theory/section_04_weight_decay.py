"""Section 4: weight decay of both factors of a path, of one map, and of three factors."""

from __future__ import annotations

import math

from torch import Tensor

from ctrans.base.draw import Draw
from ctrans.control import LastMapDecay
from ctrans.control.decay_threshold import (
    UnitsPath,
    ValuePath,
    climb_factors,
    decay_threshold,
    with_evidence,
)
from ctrans.dynamics.fields import ACTIVATIONS
from ctrans.theory.payoffs import payoff
from ctrans.theory.statement import (
    Printed,
    Trial,
    Trials,
    at_most,
    equal,
    holds_if,
    not_none,
    statement,
)

SECTION = 4


@statement(
    "weight-decay",
    "Kan, section 3.2",
    "running cost lam/2 (|V|^2 + |O|^2): H = 0 for lam >= lam*, else infinite; |(A X)'P|_2 of"
    " values, max |P'relu(X w)| of units",
    1e-9,
    0.1,
    printed=Printed("with weight decay the Hamiltonian exists (whatever the decay)", 0.0, 0.02),
)
def decayed_path(draw: Draw, *, printed: bool) -> Trials:
    """An ascent over both factors: R^2/2 (lam* - lam) below lam*, nothing above it.

    Printed: at half of lam* the best value of both factors for a tenfold bound, over the value
    before.
    """
    P = draw.normal(6, 4)
    path: ValuePath | UnitsPath
    if draw.flag():
        path = ValuePath(draw.normal(1 + draw.integer(3), 6, 4), 2)
    else:
        path = UnitsPath(draw.normal(6, 4), ACTIVATIONS["relu"], 16, 4)
    threshold = decay_threshold(path, P)
    case = type(path).__name__
    if printed:
        climb = climb_factors(path, P, threshold.lower / 2)
        growth = climb.values[-1] / max(climb.values[-2], 1e-300)
        return at_most(growth, 1.0, f"{case}, lam = lam*/2: the best value with a tenfold bound")
    threshold = with_evidence(threshold, path, P)
    below = not_none(threshold.below)
    radius = below.radii[-1]
    value = below.values[-1]
    case = f"{case}, lam* = {threshold.lower:.3g}"
    return [
        *(
            holds_if(f"{case}: {finding}", condition=holds)
            for finding, holds in threshold.findings.items()
        ),
        at_most(
            value,
            radius**2 / 2 * (threshold.upper - 0.9 * threshold.lower),
            f"{case}: value against R^2/2 (lam* - lam)",
        ),
    ]


@statement(
    "weight-decay-features",
    "ctrans",
    "one decayed map at fixed features h has H = |h'P|^2/(2 lam), which grows like |h|^2 where h is"
    " trained",
    1e-10,
    0.25,
)
def one_map_decayed(draw: Draw) -> Trials:
    """-<P, h W'> - lam/2 |W|^2 at W = -P'h/lam, which 30 other W do not exceed; 10^4 times that for
    features 100 times as long.
    """
    h = draw.normal(5, 6)
    P = draw.normal(5, 4)
    lam = draw.log_uniform(-2, 1)

    def value(c: float, W: Tensor) -> Tensor:
        return payoff(P, c * h @ W.mT) - lam / 2 * W.square().sum((-2, -1))

    best = -P.mT @ h / lam
    around = best + draw.log_uniform(-3, 1) * draw.normal(30, 4, 6)
    small = float(LastMapDecay(h, lam).support(P))
    large = float(LastMapDecay(100.0 * h, lam).support(P))
    return [
        equal(small, value(1.0, best), "H against the value of W = -P'h/lam"),
        at_most(float(value(1.0, around).amax()), small, "the best of 30 other W against H"),
        equal(large, value(100.0, 100 * best), "H at features a hundred times as long"),
        equal(large / small, 1e4, "H at features a hundred times as long, over H"),
    ]


@statement(
    "weight-decay-three",
    "ctrans",
    "three decayed factors (input gains, V, O): the value grows like R^3, so that H is infinite for"
    " every lam",
    0.05,
    0.25,
)
def three_factors(draw: Draw) -> Trials:
    """gamma, V and O of size R: the gain grows like R^3 and the decay like R^2, so large R exceed
    even ten times lam*.
    """
    x = draw.normal(5, 4)
    P = draw.normal(5, 4)
    gamma = draw.normal(4)
    V = draw.normal(4, 4)
    out = draw.normal(4, 4)
    if not float(payoff(P, (gamma * x) @ V.mT @ out.mT)) > 0:
        out = -out
    unit = float((gamma.square().sum() + V.square().sum() + out.square().sum()).sqrt())
    decay = 10 * ValuePath(x.unsqueeze(0), 4).threshold(P)[0]
    values = []
    for radius in (1e9, 1e10):
        r = radius / unit
        gain = float(payoff(P, (r * gamma * x) @ (r * V).mT @ (r * out).mT))
        values.append(gain - decay / 2 * radius**2)
    rate = math.log10(values[1] / values[0])
    above = holds_if("ten times lam* is exceeded", condition=values[0] > 0)
    return [above, Trial(abs(rate - 3), f"the value grows like R^{rate:.4f}")]
