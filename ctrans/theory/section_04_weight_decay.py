"""Section 4: weight decay of both factors of a path, of one map, and of three factors."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ctrans.base.draw import Draw
from ctrans.control import LastMapDecay
from ctrans.control.decay_paths import CubicPath, UnitsPath, ValuePath, with_ones
from ctrans.control.decay_threshold import climb_factors, decay_threshold, with_evidence
from ctrans.control.reachable_rows import bound_over_rows
from ctrans.control.shown_factors import path_of, with_best_rows
from ctrans.dynamics.fields import ACTIVATIONS, Attention
from ctrans.dynamics.fields.feed_forward import GATES
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
    " values at fixed rows A, max |P'relu(X w)| of units",
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
    "weight-decay-rows",
    "ctrans",
    "attention with decayed Q, K, V, O: lam* <= max over j, k of |(N + M)/2 x_j - (N - M)/2 x_k|, N"
    " = max over |u| = 1 of sum |<p_i, u>|, M = |sum p_i|, times sqrt(m) for m heads of the same"
    " values; reached where the present rows have 0",
    1e-8,
    0.1,
)
def rows_of_all_queries_and_keys(draw: Draw) -> Trials:
    """Rows of weights do not exceed the bound: random ones, and the best choice of tokens for
    random u and v. Two tokens x_2 = -x_1 with P = (0, p), at Q = K = 0: the present rows make (A
    X)'P = 0, those that Q and K can make |p||x_1|.
    """
    tokens = 2 + draw.integer(6)
    width = 2 + draw.integer(6)
    x = draw.normal(tokens, width)
    P = draw.log_uniform(-2, 2) * (draw.normal(tokens, width) + draw.flag() * draw.normal(width))
    bound = bound_over_rows(x, P)
    rows = draw.normal(tokens, tokens).softmax(-1)
    slopes = P @ draw.normal(width)
    along = x @ draw.normal(width)
    chosen = x[(slopes.unsqueeze(-1) * along).argmax(-1)]
    both = torch.stack([draw.normal(width), draw.normal(width)])
    first, second = both / both.norm(dim=-1, keepdim=True)
    opposite = torch.stack([first, -first]) * draw.log_uniform(-1, 1)
    last = torch.stack([torch.zeros(width).to(x), second]) * draw.log_uniform(-1, 1)
    attention = Attention(width, 1, bias=False).to(x).requires_grad_(requires_grad=False)
    attention.qkv.weight.zero_()
    path = path_of(attention, opposite.unsqueeze(0))
    present, proven = path.threshold(last)
    best = with_best_rows(path, attention, opposite.unsqueeze(0), last)
    found, _ = best.threshold(last)
    product = opposite[0].norm() * last[1].norm()
    case = f"{tokens} tokens of width {width}"
    return [
        at_most(_spectral(rows @ x, P), bound, f"{case}: random rows"),
        at_most(_spectral(chosen, P), bound, f"{case}: a token chosen by each"),
        at_most(present, 1e-12 * product, "two opposite tokens: the present rows, against 0"),
        equal(found, product, "two opposite tokens: the rows found, against |p||x|"),
        equal(proven, product, "two opposite tokens: the bound, against |p||x|"),
    ]


def _spectral(mixed: Tensor, P: Tensor) -> float:
    """|(A X)'P|_2."""
    return float(torch.linalg.matrix_norm(mixed.mT @ P, 2))


@statement(
    "weight-decay-bias",
    "ctrans",
    "a decayed bias of units is one more column of W_1: lam* is max |P'relu((X, 1) w)|, 2 for X ="
    " (1, -1), P = (1, 1), where |P'relu(X w)| is at most 1",
    1e-8,
)
def units_with_a_bias(draw: Draw) -> Trials:
    """X = (a, -a), P = (p, p), a <= 1: w = 0, b = 1 has |P'1| = 2 |p|, and the bound too. For a
    random X and P the bound exceeds what w = 0, b = 1 makes, and what random units make.
    """
    phi = ACTIVATIONS["relu"]
    a = draw.log_uniform(-2, 0)
    p = draw.log_uniform(-2, 2)
    opposite = torch.tensor([[a], [-a]], dtype=torch.float64)
    P = torch.full((2, 1), p, dtype=torch.float64)
    found, _ = UnitsPath(with_ones(opposite), phi, 4, 1).threshold(P)
    without, proven = UnitsPath(opposite, phi, 4, 1, bias=True).threshold(P)
    x = with_ones(draw.normal(6, 4))
    costates = draw.normal(6, 3)
    _, bound = UnitsPath(x, phi, 4, 3).threshold(costates)
    units = draw.normal(20, 5)
    hidden = (x @ (units / units.norm(dim=-1, keepdim=True)).mT).clamp_min(0)
    return [
        equal(without, a * p, "two opposite tokens without a bias, against |a||p|"),
        equal(found, 2 * p, "two opposite tokens: what was found, against 2 |p|"),
        equal(proven, 2 * p, "two opposite tokens: the bound, against 2 |p|"),
        at_most(costates.sum(0).norm(), bound, "w = 0, b = 1, against the bound"),
        at_most((costates.mT @ hidden).norm(dim=0).amax(), bound, "20 units, against the bound"),
    ]


@statement(
    "weight-decay-gate",
    "ctrans",
    "decayed gated units, and units max(z, 0)^2: the value grows like R^3, so that H is infinite"
    " for every lam",
    0.02,
    0.25,
)
def gated_units(draw: Draw) -> Trials:
    """An ascent over all factors: thousandfold from R to 10 R, and above a penalty that balances at
    a small R.
    """
    gate = None
    name = "units max(z, 0)^2"
    if draw.flag():
        name = draw.choice(("swiglu", "geglu", "reglu"))
        gate = ACTIVATIONS[GATES[name]]
    P = draw.normal(5, 4)
    path = CubicPath(draw.normal(5, 4), gate, 8, 4)
    threshold = with_evidence(decay_threshold(path, P), path, P)
    below = not_none(threshold.below)
    cost = below.decay / 2
    gains = [
        value + cost * radius**2 for value, radius in zip(below.values, below.radii, strict=True)
    ]
    rate = math.log10(gains[-1] / gains[-2]) / math.log10(below.radii[-1] / below.radii[-2])
    return [
        holds_if(f"{name}: lam* is infinite", condition=math.isinf(threshold.lower)),
        holds_if(f"{name}: the penalty is exceeded", condition=below.values[-1] > 0),
        Trial(abs(rate - 3), f"{name}: the value grows like R^{rate:.4f}"),
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
