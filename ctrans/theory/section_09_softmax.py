"""Section 9: the softmax Jacobian's norm theta/tau, and theta as number partitioning (Emadi)."""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor

from ctrans.base.draw import Draw
from ctrans.measure.attention.balanced_mass import balanced_mass, smallest_difference
from ctrans.theory.statement import Printed, Trial, Trials, at_most, equal, statement

RowsOfEntries = Float[Tensor, "*rows entries"]
"""Rows of attention."""

SECTION = 9

ROUNDING = 1e-14
"""Absolute rounding error of 1 - delta^2."""


def within(measured: float | Tensor, bound: float | Tensor, case: str) -> Trial:
    """measured <= bound, up to the rounding of theta."""
    return at_most(max(float(measured) - ROUNDING, 0.0), bound, case)


def all_subsets(entries: int) -> Float[Tensor, "subsets entries"]:
    """All subsets as rows of zeros and ones."""
    return ((torch.arange(2**entries).unsqueeze(-1) >> torch.arange(entries)) & 1).double()


def theta_of_subsets(p: Float[Tensor, " entries"]) -> Tensor:
    """theta = 4 max_S p(S)(1 - p(S)), over every subset S."""
    masses = all_subsets(len(p)) @ p
    return (4 * masses * (1 - masses)).max()


def random_row(draw: Draw, longest: int, shortest: int = 1) -> Float[Tensor, " entries"]:
    """A softmax row: logits of any spread, some of them equal."""
    entries = shortest + draw.integer(longest - shortest + 1)
    logits = draw.log_uniform(-3.0, 1.0) * draw.normal(entries)
    if draw.flag():
        logits = logits.round(decimals=1)
    return logits.softmax(-1)


def softmax_jacobian(
    p: RowsOfEntries, temperature: float
) -> Float[Tensor, "*rows entries entries"]:
    """J = (diag(p) - p p')/tau, the derivative of softmax(u/tau); |J|_{inf->1} = theta(p)/tau
    (Emadi, theorem 4.2).
    """
    return (torch.diag_embed(p) - p.unsqueeze(-1) * p.unsqueeze(-2)) / temperature


@statement(
    "theorem-4.2",
    "Emadi, theorem 4.2",
    "|J_softmax|_{inf->1} = theta/tau exactly, theta(p) = 4 max_S p(S)(1 - p(S))",
    1e-12,
    as_printed=True,
)
def softmax_norm(draw: Draw) -> Trial:
    """max over sign vectors s of |J s|_1 = theta(p)/tau, for rows of up to 10 entries, with an
    absolute tolerance.
    """
    p = random_row(draw, 10)
    tau = draw.uniform(0.2, 3.0)
    measured = ((2 * all_subsets(len(p)) - 1) @ softmax_jacobian(p, tau)).abs().sum(-1).amax()
    return equal(
        measured,
        float(balanced_mass(p).upper) / tau,
        "|J|_{inf->1} over all sign vectors against theta/tau",
        1.0,
    )


@statement(
    "theta-partition",
    "ctrans, on Emadi, definition 4.1",
    "theta = 1 - delta^2, delta the smallest difference between two halves: meeting in the middle"
    " finds it",
    ROUNDING,
)
def partition(draw: Draw) -> Trial:
    """theta = 1 - delta^2 by search, against every subset."""
    entries = 1 + draw.integer(12)
    spread = draw.log_uniform(-2, 1)
    p = (spread * draw.normal(entries)).softmax(-1)
    return equal(
        balanced_mass(p).lower, theta_of_subsets(p), f"theta against all subsets, L = {len(p)}", 1.0
    )


@statement(
    "theta-bracket",
    "ctrans",
    "beyond 30 entries theta is bracketed: any partition from below, mass that cannot be balanced"
    " from above",
    share=0.5,
)
def bracket(draw: Draw) -> Trial:
    """Ratio of theta, from meeting in the middle of the whole row, to the bracket; at most 1
    inside.
    """
    p = random_row(draw, 36, 31)
    mass = balanced_mass(p, tolerance=1e-6)
    theta = 1 - float(smallest_difference(p.unsqueeze(0))) ** 2
    if theta:
        outside = max(float(mass.lower) / theta, theta / float(mass.upper))
    else:
        outside = 1 + float(mass.upper)
    return within(outside, 1.0, "theta bracket")


@statement(
    "theta-long-rows",
    "ctrans",
    "softmax rows of N(0, 1) logits: 1 - theta < 2e-9 at L = 32, < 5e-13 at 64, in the median row",
    0.0,
    0.02,
    printed="the same in every row",
)
def long_rows(draw: Draw, *, printed: bool) -> Trials:
    """The median of 33 rows. Printed: the row with the largest entry, of 5000."""
    cases = []
    for entries, claimed in {32: 2e-9, 64: 5e-13}.items():
        case = f"1 - theta of N(0, 1) logits, L = {entries}"
        tolerance = claimed / 10
        if printed:
            p = draw.normal(5000, entries).softmax(-1)
            heaviest = p[p.amax(-1).argmax()]
            difference = 1 - balanced_mass(heaviest, tolerance=tolerance).upper
            case = f"{case}, a row with largest mass {float(heaviest.max()):.2f}"
        else:
            p = draw.normal(33, entries).softmax(-1)
            difference = (1 - balanced_mass(p, tolerance=tolerance).lower).median()
            case = f"{case}, the median row"
        cases.append(at_most(difference, claimed, case))
    return cases


def greedy_prefix(p: RowsOfEntries) -> Float[Tensor, "*rows"]:
    """4 c (1 - c), c the sum of the largest entries that is nearest to 1/2 (Emadi, E.2). The paper
    equates it with theta for up to 16 entries, but it is only a lower bound.
    """
    sums = p.sort(-1, descending=True).values.cumsum(-1)
    return (4 * sums * (1 - sums)).amax(-1)


@statement(
    "greedy-prefix",
    "Emadi, E.2",
    "greedy prefixes bound theta from below, and miss it in most rows of 16",
    0.0,
    0.02,
    printed=Printed("for L <= 16 the greedy prefix gives theta exactly", 1e-12, 1.0),
)
def greedy(draw: Draw, *, printed: bool) -> Trials:
    """theta(p) - 4 c (1 - c) >= 0, c the greedy prefix's mass, and > 0 in most rows of 16. Printed:
    0, for 4, 8 or 16 entries.
    """
    if printed:
        entries = draw.choice((4, 8, 16))
        row = draw.normal(entries).softmax(-1)
        miss = float(balanced_mass(row).lower - greedy_prefix(row))
        return Trial(miss, f"L = {entries}: greedy prefix misses theta by {miss:.3g}")
    rows = torch.stack([draw.normal(16).softmax(-1) for _ in range(100)])
    gap = balanced_mass(rows).lower - greedy_prefix(rows)
    missed = float((gap > 1e-12).double().mean())
    return [
        Trial(float(-gap.min()) - ROUNDING, "greedy against theta"),
        Trial(0.8 - missed, f"L = 16: missed in {missed:.0%} of rows"),
    ]


@statement(
    "corollary-4.3-uniform",
    "Emadi, corollary 4.3(1)",
    "the uniform row has theta = 1 for even L, 1 - 1/L^2 for odd L",
    ROUNDING,
    0.25,
    printed="the uniform row has theta = 1",
)
def uniform(draw: Draw, *, printed: bool) -> Trials:
    """theta = 1 - [L odd]/L^2 for the uniform rows of two neighbouring lengths L, one of them odd.
    Printed: theta = 1.
    """
    first = 2 + draw.integer(40)
    cases = []
    for length in (first, first + 1):
        theta = balanced_mass(torch.full((length,), 1 / length, dtype=torch.float64)).lower
        expected = 1.0
        if not printed:
            expected = 1 - (length % 2) / length**2
        cases.append(equal(theta, expected, f"theta of the uniform row, L = {length}", 1.0))
    return cases


@statement(
    "corollary-4.3-one-hot",
    "Emadi, corollary 4.3(2)",
    "a one-hot row has theta = 0",
    0.0,
    0.1,
    as_printed=True,
)
def one_hot(draw: Draw) -> Trial:
    """theta = 0 for every one-hot row of a length from 1 to 40."""
    p = torch.eye(1 + draw.integer(40), dtype=torch.float64)
    return equal(balanced_mass(p).upper.max(), 0.0, f"theta of one-hot rows, L = {len(p)}", 1.0)


def peaked_bound(p: RowsOfEntries) -> Float[Tensor, "*rows"]:
    """4 kappa (1 - kappa) where the largest entry 1 - kappa is at least 1/2, otherwise 1: never
    below theta.

    Corollary 4.3(3) of Emadi states the first form for every kappa, which is false for kappa > 1/2.
    """
    top = p.amax(-1)
    return torch.where(top >= 0.5, 4 * top * (1 - top), torch.ones_like(top))


@statement(
    "corollary-4.3-peaked",
    "Emadi, corollary 4.3(3)",
    "a row with top mass 1 - kappa has theta <= 4 kappa (1 - kappa) for kappa <= 1/2",
    printed="the same for every kappa",
)
def peaked(draw: Draw, *, printed: bool) -> Trial:
    """theta over every subset against 4 kappa (1 - kappa), kappa <= 1/2. Printed: any kappa, rows
    of 2 to 11 entries.
    """
    if printed:
        entries = 2 + draw.integer(10)
        spread = draw.uniform(0.1, 3)
        p = (spread * draw.normal(entries)).softmax(-1)
        kappa = 1 - float(p.max())
        return at_most(
            balanced_mass(p).lower,
            4 * kappa * (1 - kappa),
            f"kappa = {kappa:.3g}: theta against 4 kappa (1 - kappa)",
        )
    p = random_row(draw, 12)
    p[p.argmax()] += 1  # at least half of the mass
    p = p / p.sum()
    return within(theta_of_subsets(p), peaked_bound(p), "peaked rows")


@statement(
    "corollary-4.3-top-k",
    "Emadi, corollary 4.3(4)",
    "mass 1/k on k tokens has theta = 1 - (1 - 2 floor(k/2)/k)^2",
    ROUNDING,
    0.25,
    as_printed=True,
)
def top_k(draw: Draw) -> Trial:
    """theta = 1 - (1 - 2 floor(k/2)/k)^2 for mass 1/k on the first k of up to 30 entries."""
    entries = 1 + draw.integer(30)
    k = 1 + draw.integer(entries)
    p = (torch.arange(entries) < k).double() / k
    return equal(
        balanced_mass(p).lower,
        1 - (1 - 2 * (k // 2) / k) ** 2,
        f"mass 1/{k} on {k} of {entries} tokens",
        1.0,
    )


def _total_variation(p: Tensor, q: Tensor) -> Tensor:
    return (p - q).abs().sum() / 2


@statement(
    "remark-b.1",
    "Emadi, remark B.1",
    "|J x|_1 is twice the total variation by which x moves the row, to first order",
    1e-6,
    as_printed=True,
)
def first_order_variation(draw: Draw) -> Trial:
    """|J x|_1 of the closed form against 2 TV/h, TV between the rows at logits u + h x/2 and u - h
    x/2, h = 1e-4: the error is of order h^2.
    """
    u = draw.normal(2 + draw.integer(9))
    tau = draw.uniform(0.2, 3.0)
    h = 1e-4
    x = 2 * draw.unit(len(u)) - 1
    ahead = ((u + h / 2 * x) / tau).softmax(-1)
    behind = ((u - h / 2 * x) / tau).softmax(-1)
    moved = _total_variation(ahead, behind)
    derivative = softmax_jacobian((u / tau).softmax(-1), tau) @ x
    return equal(2 * moved / h, derivative.abs().sum(), "2 TV/h against |J x|_1")


@statement(
    "total-variation",
    "ctrans, on Emadi, remark B.1",
    "logits that move by at most r move a row by a total variation of at most tanh(r/(2 tau)),"
    " attained",
)
def finite_variation(draw: Draw) -> Trials:
    """The largest TV over all sign vectors times r against tanh(r/(2 tau)); equal for two entries
    with logits r/2 and -r/2 that swap.

    A half S of the row has odds that grow by a factor of at most e^(2r/tau), so that its mass grows
    by at most s(z + r/tau) - s(z - r/tau) <= 2 s(r/tau) - 1, s the logistic function.
    """
    u = draw.normal(2 + draw.integer(7))
    tau = draw.uniform(0.2, 3.0)
    r = draw.log_uniform(-3, 1)
    row = (u / tau).softmax(-1)
    most = math.tanh(r / (2 * tau))
    moved = ((u + r * (2 * all_subsets(len(u)) - 1)) / tau).softmax(-1)
    pair = torch.tensor([r / 2, -r / 2], dtype=torch.float64) / tau
    farthest = (moved - row).abs().sum(-1).max() / 2
    swapped = _total_variation(pair.softmax(-1), (-pair).softmax(-1))
    return [
        within(farthest, most, f"L = {len(u)}, r/tau = {r / tau:.3g}: TV"),
        equal(swapped, most, "two entries that swap", max(most, 1e-3)),
    ]


@statement(
    "remark-b.2",
    "Emadi, remark B.2",
    "|J_softmax|_2 <= theta/(2 tau), attained by rows of two entries",
    printed="|J_softmax|_2 <= 1/(2 tau)",
)
def spectral_softmax(draw: Draw, *, printed: bool) -> Trials:
    """The largest eigenvalue of J against theta/(2 tau), theta over every subset; equal for two
    entries.

    x'Jx is the variance of x over the row, divided by tau. A vector of length 1 has a range of at
    most sqrt(2), and the largest variance of a range w is w^2 theta/4. Printed: 1/(2 tau).
    """
    p = random_row(draw, 10)
    tau = draw.uniform(0.2, 3.0)
    pair = random_row(draw, 2, 2)
    cases = []
    for row in (p, pair):
        theta = 1.0
        if not printed:
            theta = float(theta_of_subsets(row))
        bound = theta / (2 * tau)
        largest = torch.linalg.eigvalsh(softmax_jacobian(row, tau))[-1]
        cases.append(within(largest, bound, f"L = {len(row)}: |J|_2"))
        if row is pair and not printed:
            cases.append(within(bound, largest, "two entries: theta/(2 tau) against |J|_2"))
    return cases
