"""Section 8: transport of uncertainty in Wasserstein distance, and rates in the data's
dimension.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from scipy.optimize import linear_sum_assignment, linprog
from torch import Tensor, nn

from ctrans.base.draw import Draw
from ctrans.control.action import action_of, path_action
from ctrans.dynamics.depth import Depth
from ctrans.dynamics.norm import RMSNorm
from ctrans.dynamics.placement import PLACEMENTS
from ctrans.dynamics.sublayer import Sublayer
from ctrans.measure.transport.generalisation import generalisation_radius
from ctrans.measure.transport.transport import printed_transport_bound, transport_bound
from ctrans.measure.transport.wasserstein import wasserstein
from ctrans.measure.walk import states_of
from ctrans.model.gpt import GPT
from ctrans.theory.random_models import describe_model, random_model
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

SECTION = 8


@statement(
    "dyadic-wasserstein",
    "Weed and Bach 2019, proposition 1",
    "W_1 of two samples is at most the sum over dyadic levels of diameter times the mass that cells"
    " differ by, in k dimensions",
    1e-9,
    0.5,
)
def dyadic(draw: Draw) -> Trial:
    """W_1 of two samples of N points in a cube of k dimensions of R^m against the sum over its
    dyadic cells.
    """
    dimensions = 1 + draw.integer(3)
    count = 8 + draw.integer(40)
    ambient = dimensions + draw.integer(30)
    x = draw.unit(count, dimensions)
    y = draw.unit(count, dimensions)
    frame = torch.linalg.qr(draw.normal(ambient, dimensions)).Q
    # in the Euclidean distance, in which a cell's diameter is total/2^level
    cost = torch.cdist(
        x @ frame.mT, y @ frame.mT, compute_mode="donot_use_mm_for_euclid_dist"
    ).numpy()
    measured = float(cost[linear_sum_assignment(cost)].mean())
    bound = 0.0
    levels = 6
    total = math.sqrt(dimensions)
    for level in range(1, levels + 1):
        difference = _points_by_cell(x, level) - _points_by_cell(y, level)
        # the difference between sibling cells moves within their parent
        bound += 2.0 ** (1 - level) * total * float(difference.abs().sum()) / count
    bound += total * 2.0**-levels
    return at_most(
        measured, bound, f"{count} points of a {dimensions}-cube in {ambient} dimensions: W_1"
    )


def _points_by_cell(points: Tensor, level: int) -> Tensor:
    """The number of points in each dyadic cell of the unit cube at that level."""
    dimensions = points.shape[-1]
    sides = 2**level
    along = (sides * points).floor().clamp(max=sides - 1).long()
    cell = (along * sides ** torch.arange(dimensions)).sum(-1)
    return torch.bincount(cell, minlength=sides**dimensions)


@statement(
    "intrinsic-rate",
    "Weed and Bach 2019; Kan, eq. 128",
    "r(N) ~ N^(-1/k) for data of intrinsic dimension k > 2, whatever nd is: slopes from N = 32"
    " to 512",
    0.15,
    0.04,
    printed=Printed("r(N) ~ N^(-1/(nd))", 0.25, 0.01),
)
def intrinsic_rate(draw: Draw, *, printed: bool) -> Trials:
    """The slope of log W_1 against log N of points of a k-cube in m dimensions: its distance from
    -1/k, and from the slope of m = k.

    Printed: the same slope of a 3-cube in 64 dimensions against -1/64.
    """
    if printed:
        slope = _slope(draw, 3, 64)
        return Trial(
            abs(slope + 1 / 64) / (1 / 64),
            f"a 3-cube in 64 dimensions: W_1 ~ N^{slope:.3f}, not N^-0.016",
        )
    k = 3 + draw.integer(2)
    ambient = draw.choice((8, 16, 64, 128))
    seed = draw.seed()
    case = f"a {k}-cube in {ambient} dimensions"
    inside = _slope(Draw(seed), k, k, pairs=6)
    outside = _slope(Draw(seed), k, ambient, pairs=6)
    return [
        Trial(abs(outside + 1 / k) * k, f"{case}: W_1 ~ N^{outside:.3f}"),
        Trial(
            abs(outside - inside) * k, f"{case}: W_1 ~ N^{outside:.3f}, and N^{inside:.3f} in {k}"
        ),
    ]


def _slope(draw: Draw, dimensions: int, ambient: int, pairs: int = 2) -> float:
    """The slope between 32 and 512 points, from the mean over pairs of samples of 512, and 16 times
    as many of 32; the points do not depend on the ambient dimension.
    """
    frame = torch.linalg.qr(Draw(ambient).normal(ambient, dimensions)).Q
    means = {}
    for count in (32, 512):
        points = [draw.unit(2, count, dimensions) for _ in range(512 // count * pairs)]
        distances = [wasserstein(x @ frame.mT, y @ frame.mT, 1) for x, y in points]
        means[count] = sum(distances) / len(distances)
    return math.log(means[512] / means[32]) / math.log(512 / 32)


def diverging(draw: Draw, d: int = 8) -> tuple[Depth, Tensor, Tensor]:
    """Two fields X -> s (w.X) behind RMSNorm, s = (1, -1, 1, ...), and inputs on either side of w.X
    = 0, which separate at full speed.
    """
    s = torch.tensor([1.0, -1.0] * (d // 2), dtype=torch.float64)
    w = draw.normal(d)
    w = w / w.norm()
    w = w - s * (w @ s) / d + s / d  # so that the fields push on in the direction they have begun
    field = nn.Linear(d, d, bias=False)
    field.weight = nn.Parameter(torch.outer(s, w))
    parts = [
        Sublayer(field, kind, output_norm=RMSNorm(d, 0.0).double()) for kind in ("attention", "ffn")
    ]
    x = (1e-5 * w / w.norm()).reshape(1, 1, d)
    return Depth(parts, 1.0).requires_grad_(requires_grad=False), x, -x


def _two_samples(draw: Draw) -> tuple[GPT, Tensor, Tensor]:
    """A model of any placement with a bound, and two clouds of as many hidden states."""
    placement = draw.choice([name for name in PLACEMENTS if name != "none"])
    model = random_model(draw, placement, width=4)
    x = draw.of_any_size(1 + draw.integer(5), 1 + draw.integer(3), 4)
    return model, x, x + draw.log_uniform(-3, 1) * draw.normal(*x.shape)


@statement(
    "theorem-6",
    "Kan, theorem 6, eq. 17",
    "behind output norms W_p(mu_D, nu_D) <= W_p(mu_0, nu_0) + 2 dt sqrt(nd) m_p sum_k g_k, m_p ="
    " (nd)^max(0, 1/p - 1/2)",
    printed=Printed(
        "W_p(mu_D, nu_D) <= 2^((p-1)/p) (C W_p(mu_0, nu_0) + 4 dt D sqrt(nd) g_max), at p = 1 too",
        share=0.05,
    ),
)
def theorem_6(draw: Draw, *, printed: bool) -> Trials:
    """W_p of the ends is at most the bound, for any placement with a bound, any samples, p = 1 and
    2.

    Printed: W_1 of the ends <= W_1 of the inputs + 4 dt D sqrt(nd) g_max, for the diverging fields
    at n = 1, d = 8, D = 1.
    """
    if printed:
        depth, x, y = diverging(draw)
        bound = not_none(printed_transport_bound(depth, 1, wasserstein(x, y, 1), 1))
        return at_most(
            wasserstein(depth(x), depth(y), 1), bound, "n = 1, d = 8, D = 1: W_1 of the ends"
        )
    model, x, y = _two_samples(draw)
    ends = (model.depth(x), model.depth(y))
    cases = []
    for p in (1, 2):
        bound = not_none(transport_bound(model.depth, x.shape[1], wasserstein(x, y, p), p))
        case = f"W_{p} of the ends, {describe_model(model)}"
        cases.append(at_most(wasserstein(*ends, p), bound, case))
    return cases


@statement(
    "theorem-6-attained",
    "ctrans",
    "for fields s(w.X) on either side of w.X = 0 it is attained, at p = 1 (32 = 4 D n d) and p = 2"
    " (4 D sqrt(nd))",
    1e-3,
    0.05,
)
def theorem_6_attained(draw: Draw) -> Trials:
    """W_1 = 32 and W_2 = 4 sqrt(8) of the ends, and both equal the bound, for the diverging fields
    at n = 1, d = 8, D = 1.
    """
    depth, x, y = diverging(draw)
    cases = []
    for p, exact in ((1, 32.0), (2, 4 * math.sqrt(8))):
        distance = wasserstein(depth(x), depth(y), p)
        bound = transport_bound(depth, 1, wasserstein(x, y, p), p)
        cases += [
            equal(distance, exact, f"W_{p} of the ends"),
            equal(distance, bound or math.nan, f"W_{p} against its bound"),
        ]
    return cases


@statement(
    "wasserstein",
    "ctrans",
    "between equal numbers of samples W_p is an assignment problem: the linear programme over all"
    " plans has the same optimum",
    1e-9,
    0.25,
)
def assignment(draw: Draw) -> Trial:
    """W_p by assignment against the linear programme over all plans."""
    count = 1 + draw.integer(7)
    p = 1 + draw.integer(2)
    a, b = draw.normal(2, count, 3)
    cost = ((a.unsqueeze(1) - b.unsqueeze(0)).abs() ** p).sum(-1).numpy()
    rows = np.kron(np.eye(count), np.ones(count))
    columns = np.kron(np.ones(count), np.eye(count))
    plan = linprog(
        cost.ravel(),
        A_eq=np.vstack([rows, columns]),
        b_eq=np.full(2 * count, 1 / count),
        method="highs",
    )
    return equal(
        wasserstein(a, b, p),
        float(plan.fun) ** (1 / p),
        f"W_{p} of {count} samples against the linear programme",
    )


@statement(
    "least-action",
    "ctrans, after Benamou and Brenier 2000",
    "A = T sum_k |X_(k+1) - X_k|^2/h_k >= |X_T - X_0|^2 for each token, and the mean of A >= W_2^2"
    " of the tokens at 0 and at T; both attained by X_0 + t (a X_0 + b), 1 + a T > 0",
)
def least_action(draw: Draw) -> Trials:
    """Each token's action against its squared displacement, and the mean against W_2^2, along the
    states of a random model; and that both are equal along the straight flow from the same X_0.
    """
    model, x, _ = _two_samples(draw)
    depth = model.depth
    states = states_of(depth, x)
    path = torch.stack(states)
    actions = path_action(path, depth.lengths)
    displacements = (path[-1] - path[0]).square().sum(-1)
    figures = action_of(states, depth.lengths)
    case = describe_model(model)
    cases = [
        at_most(float(displacement), float(action), f"|X_T - X_0|^2 of a token, {case}")
        for displacement, action in zip(displacements.flatten(), actions.flatten(), strict=True)
    ]
    mean_action = not_none(figures.action)
    cases.append(at_most(not_none(figures.transport), mean_action, f"W_2^2 of the tokens, {case}"))
    depth_time = depth.times[-1]
    rate = draw.uniform(-0.9, 3) / depth_time
    shift = draw.normal(x.shape[-1])
    straight = [x + t * (rate * x + shift) for t in depth.times]
    flow = action_of(straight, depth.lengths)
    straight_action = not_none(flow.action)
    return [
        *cases,
        equal(not_none(flow.displacement), straight_action, "|X_T - X_0|^2 of a straight flow"),
        equal(not_none(flow.transport), straight_action, "W_2^2 of a straight flow"),
    ]


@statement(
    "generalisation-radius",
    "Kan, eq. 128",
    "r(N, delta) ~ N^(-1/(nd)) is vacuous at real nd: 10^12 samples leave over 99% of it",
    0.0,
    0,
    printed="the radius tells how well N samples represent the data (halving it, to say the least)",
)
def radius_at_real_size(draw: Draw, *, printed: bool) -> Trials:
    """N^(-1/(nd)) for 10^12 samples of 64 tokens of width 128: relative to the radius of one.

    Printed: at most 1/2 of it.
    """
    radius = generalisation_radius(10**12, 64, 128)
    case = "10^12 samples in 8192 dimensions leave of the radius"
    if printed:
        return at_most(radius.shrinkage, 0.5, f"{case} of one")
    vacuous = radius.vacuous and not generalisation_radius(1000, 1, 2).vacuous
    return [
        at_most(0.99, radius.shrinkage, case),
        holds_if("said to be vacuous there, not in 2 dimensions", condition=vacuous),
    ]


@statement(
    "eq-127",
    "Kan, eq. 124-127",
    "behind output norms E_nu G(X_D) <= E_mu G(X_D) + L (r + 2 dt nd sum_k g_k) where W_1(mu, nu)"
    " <= r, L Lipschitz in the same entrywise 1-norm; attained",
    share=0.5,
    printed=Printed("the same with 4 D sqrt(nd) g_max for 2 dt nd sum_k g_k", share=0.05),
)
def robust_loss(draw: Draw, *, printed: bool) -> Trials:
    """G(X) = L|X - Y|_1, which is L-Lipschitz, over random samples of any placement, each with its
    own `transport_bound`.

    In one case of 4, and as printed, the diverging fields, with Y the end of the other input: they
    attain the bound, up to their inputs' distance.
    """
    slope = draw.log_uniform(-2, 2)
    constructed = printed or not draw.integer(4)
    if constructed:
        depth, x, y = diverging(draw)
        target = depth(x)
    else:
        model, x, y = _two_samples(draw)
        depth = model.depth
        target = draw.normal(1, *x.shape[1:])

    def mean_loss(samples: Tensor) -> float:
        return float(slope * (depth(samples) - target).abs().sum((1, 2)).mean())

    distance = wasserstein(x, y, 1)
    if printed:
        transported = not_none(printed_transport_bound(depth, x.shape[1], distance, 1))
    else:
        transported = not_none(transport_bound(depth, x.shape[1], distance, 1))
    bound = mean_loss(x) + slope * transported
    case = f"the mean loss over nu, L = {slope:.3g}"
    above = at_most(mean_loss(y), bound, case)
    if constructed and not printed:
        attained = at_most(0.9999 * bound, mean_loss(y), f"0.9999 of the bound against {case}")
        return [above, attained]
    return above


@statement(
    "eq-129",
    "Kan, eq. 129",
    "for no number N of samples does the bound tend to the mean loss: it stays L 2 dt nd sum_k g_k"
    " above. For a fixed network and 0 <= G <= M the excess is at most M sqrt(log(1/delta)/(2 N))"
    " with probability 1 - delta (Hoeffding)",
    0.0,
    0.05,
    printed=Printed(
        "the bound tells how the network generalises: it tends to the mean loss", share=0.02
    ),
)
def generalisation_bound(draw: Draw, *, printed: bool) -> Trials:
    """The excess of the true mean of a loss over that of N samples, in 400 draws of a fair coin's
    loss 0 or M behind the diverging fields, against Hoeffding's bound and Kan's.

    Hoeffding's bound is loose by its factor before the exponential: a normal tail's share is a
    seventh of delta at 0.05. So a bound that is 10 % smaller also holds here.

    Printed: r = 0, so that mu = nu and the excess is 0, against what the bound allows.
    """
    depth, x, y = diverging(draw)
    constant = not_none(transport_bound(depth, 1, 0.0, 1))
    if printed:
        return at_most(constant, 0.0, "r = 0, L = 1: the bound allows for two equal distributions")
    samples = 10 + draw.integer(990)
    delta = draw.uniform(0.05, 0.5)
    largest = float((depth(x) - depth(y)).abs().sum())
    drawn = (draw.unit(400, samples) < 0.5).double().mean(-1)
    excess = largest * (0.5 - drawn)
    hoeffding = largest * math.sqrt(math.log(1 / delta) / (2 * samples))
    missed = float((excess > hoeffding).double().mean())
    # five standard errors of a share of 400 draws
    return [
        Trial(
            missed - delta - 5 * math.sqrt(delta * (1 - delta) / 400),
            f"N = {samples}: {missed:.1%} beyond, delta = {delta:.2f}",
        ),
        at_most(
            float(excess.max()), constant, "the largest excess against the bound's constant part"
        ),
    ]
