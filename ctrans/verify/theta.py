"""Section 9: the softmax Jacobian's norm theta/tau, and theta as number partitioning (Emadi)."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from ctrans.stability.attention.balanced_mass import balanced_mass
from ctrans.verify.attention_cases import BOUND_CASES, all_subsets
from ctrans.verify.attention_cases import BoundCase as BoundCase
from ctrans.verify.draws import below, between, noise, one_of, size
from ctrans.verify.statement import Check, Draw, Statement, Trial, as_printed, at_most, equal, worst

ROUNDING = 1e-14
"""Of 1 - delta^2, absolutely."""


def bounded(name: str) -> Draw:
    """The bound of that name in BOUND_CASES as a check."""
    rule: BoundCase = BOUND_CASES[name]

    def draw(generator: torch.Generator) -> Trial:
        measured, bound = rule(generator)
        return at_most(max(measured - ROUNDING, 0.0), bound, name)

    return draw


def softmax_norm(generator: torch.Generator) -> Trial:
    """max over sign vectors s of |J s|_1 = theta(p)/tau, for rows of up to 10 entries, absolutely."""
    measured, bound = BOUND_CASES["softmax norm"](generator)
    return equal(measured, bound, "|J|_{inf->1} over all sign vectors against theta/tau", 1.0)


def _row(generator: torch.Generator, entries: int, spread: float = 1.0) -> Tensor:
    return (spread * noise(generator, entries)).softmax(-1)


def partition(generator: torch.Generator) -> Trial:
    """theta = 1 - delta^2 by search, against every subset."""
    p = _row(generator, 1 + below(generator, 12), size(generator, -2, 1))
    masses = all_subsets(len(p)) @ p
    return equal(balanced_mass(p).lower, (4 * masses * (1 - masses)).max(), f"theta against all subsets, L = {len(p)}", 1.0)


CLAIMED = {32: 2e-9, 64: 5e-13}
"""What is said to be left of 1 - theta in softmax rows of so many N(0, 1) logits."""


def long_rows(generator: torch.Generator) -> Trial:
    """The median of 33 rows."""
    cases = []
    for entries, claimed in CLAIMED.items():
        left = 1 - balanced_mass(_rows(generator, 33, entries), tolerance=claimed / 10).lower
        cases.append(at_most(left.median(), claimed, f"1 - theta of N(0, 1) logits, L = {entries}, the median row"))
    return worst(*cases)


def every_long_row(generator: torch.Generator) -> Trial:
    """The row with the largest entry, of 5000."""
    cases = []
    for entries, claimed in CLAIMED.items():
        p = _rows(generator, 5000, entries)
        heaviest = p[p.amax(-1).argmax()]
        left = 1 - float(balanced_mass(heaviest, tolerance=claimed / 10).upper)
        cases.append(
            at_most(
                left, claimed, f"1 - theta of N(0, 1) logits, L = {entries}, a row with largest mass {float(heaviest.max()):.2f}"
            )
        )
    return worst(*cases)


def _rows(generator: torch.Generator, count: int, entries: int) -> Tensor:
    return noise(generator, count, entries).softmax(-1)


def greedy_prefix(p: Float[Tensor, "*rows entries"]) -> Float[Tensor, "*rows"]:
    """4 c (1 - c), c the sum of the largest entries that is nearest to 1/2 (Emadi, E.2).

    Said there to equal theta for up to 16 entries; it is only a lower bound.
    """
    sums = p.sort(-1, descending=True).values.cumsum(-1)
    return (4 * sums * (1 - sums)).amax(-1)


def greedy(generator: torch.Generator) -> Trial:
    """theta(p) - 4 c (1 - c), c the greedy prefix's mass, for a softmax row of 4, 8 or 16 entries."""
    entries = one_of(generator, (4, 8, 16))
    p = _row(generator, entries)
    gap = float(balanced_mass(p).lower - greedy_prefix(p))
    return Trial(gap, f"L = {entries}: greedy prefix misses theta by {gap:.3g}")


def greedy_is_below(generator: torch.Generator) -> Trial:
    """A lower bound, that falls short in most rows of 16."""
    rows = torch.stack([_row(generator, 16) for _ in range(100)])
    gap = balanced_mass(rows).lower - greedy_prefix(rows)
    missed = float((gap > 1e-12).double().mean())
    return worst(
        Trial(float(-gap.min()) - ROUNDING, "greedy against theta"),
        Trial(0.8 - missed, f"L = 16: missed in {missed:.0%} of rows"),
    )


def uniform_is_one(generator: torch.Generator) -> Trial:
    """theta = 1 for the uniform rows of two neighbouring lengths, one of them odd."""
    return worst(*(equal(_uniform(length), 1.0, f"theta of the uniform row, L = {length}") for length in _neighbours(generator)))


def uniform(generator: torch.Generator) -> Trial:
    """theta = 1 - [L odd]/L^2 for the uniform rows of two neighbouring lengths L, one of them odd."""
    return worst(
        *(
            equal(_uniform(length), 1 - (length % 2) / length**2, f"theta of the uniform row, L = {length}", 1.0)
            for length in _neighbours(generator)
        )
    )


def _uniform(length: int) -> Tensor:
    return balanced_mass(torch.full((length,), 1 / length, dtype=torch.float64)).lower


def _neighbours(generator: torch.Generator) -> tuple[int, int]:
    """An even length and an odd one."""
    first = 2 + below(generator, 40)
    return first, first + 1


def one_hot(generator: torch.Generator) -> Trial:
    """theta = 0 for every one-hot row of a length from 1 to 40."""
    p = torch.eye(1 + below(generator, 40), dtype=torch.float64)
    return equal(balanced_mass(p).upper.max(), 0.0, f"theta of one-hot rows, L = {len(p)}", 1.0)


def top_k(generator: torch.Generator) -> Trial:
    """theta = 1 - (1 - 2 floor(k/2)/k)^2 for mass 1/k on the first k of up to 30 entries."""
    entries = 1 + below(generator, 30)
    k = 1 + below(generator, entries)
    p = torch.cat([torch.full((k,), 1 / k, dtype=torch.float64), torch.zeros(entries - k, dtype=torch.float64)])
    return equal(balanced_mass(p).lower, 1 - (1 - 2 * (k // 2) / k) ** 2, f"mass 1/{k} on {k} of {entries} tokens", 1.0)


def peaked_everywhere(generator: torch.Generator) -> Trial:
    """theta(p) <= 4 kappa (1 - kappa), kappa = 1 - max p, for softmax rows of 2 to 11 entries, kappa above 1/2 too."""
    p = _row(generator, 2 + below(generator, 10), between(generator, 0.1, 3))
    kappa = 1 - float(p.max())
    return at_most(balanced_mass(p).lower, 4 * kappa * (1 - kappa), f"kappa = {kappa:.3g}: theta against 4 kappa (1 - kappa)")


STATEMENTS: tuple[Statement, ...] = (
    as_printed(
        "theorem-4.2",
        9,
        "Emadi, theorem 4.2",
        "|J_softmax|_{inf->1} = theta/tau exactly, theta(p) = 4 max_S p(S)(1 - p(S))",
        Check(softmax_norm, 1e-12),
    ),
    Statement(
        "theta-partition",
        9,
        "ctrans, on Emadi, definition 4.1",
        "theta = 1 - delta^2, delta the smallest difference between two halves: meeting in the middle finds it",
        Check(partition, ROUNDING),
    ),
    Statement(
        "theta-bracket",
        9,
        "ctrans",
        "beyond 30 entries theta is bracketed: any partition from below, mass that cannot be balanced from above",
        Check(bounded("theta bracket"), share=0.5),
    ),
    Statement(
        "theta-long-rows",
        9,
        "ctrans",
        "softmax rows of N(0, 1) logits: 1 - theta < 2e-9 at L = 32, < 5e-13 at 64, in the median row",
        Check(long_rows, 0.0, 0.02),
        Check(every_long_row, 0.0, 0.02),
        "the same in every row",
    ),
    Statement(
        "greedy-prefix",
        9,
        "Emadi, E.2",
        "greedy prefixes bound theta from below, and miss it in most rows of 16",
        Check(greedy_is_below, 0.0, 0.02),
        Check(greedy, 1e-12),
        "for L <= 16 the greedy prefix gives theta exactly",
    ),
    Statement(
        "corollary-4.3-uniform",
        9,
        "Emadi, corollary 4.3(1)",
        "the uniform row has theta = 1 for even L, 1 - 1/L^2 for odd L",
        Check(uniform, ROUNDING, 0.25),
        Check(uniform_is_one, ROUNDING, 0.25),
        "the uniform row has theta = 1",
    ),
    as_printed("corollary-4.3-one-hot", 9, "Emadi, corollary 4.3(2)", "a one-hot row has theta = 0", Check(one_hot, 0.0, 0.1)),
    Statement(
        "corollary-4.3-peaked",
        9,
        "Emadi, corollary 4.3(3)",
        "a row with top mass 1 - kappa has theta <= 4 kappa (1 - kappa) for kappa <= 1/2",
        Check(bounded("peaked rows")),
        Check(peaked_everywhere),
        "the same for every kappa",
    ),
    as_printed(
        "corollary-4.3-top-k",
        9,
        "Emadi, corollary 4.3(4)",
        "mass 1/k on k tokens has theta = 1 - (1 - 2 floor(k/2)/k)^2",
        Check(top_k, ROUNDING, 0.25),
    ),
)
