"""Section 8: how far uncertainty in the inputs travels, in Wasserstein distance."""

from __future__ import annotations

import math

import numpy as np
import torch
from scipy.optimize import linprog
from torch import Tensor, nn

from ctrans.depth import Depth
from ctrans.norm import RMSNorm
from ctrans.placement import PLACEMENTS
from ctrans.stability.transport.bounds import printed_transport_bound, transport_bound
from ctrans.stability.transport.generalisation import generalisation_radius
from ctrans.stability.transport.wasserstein import wasserstein
from ctrans.sublayer import Sublayer
from ctrans.verify.draws import below, described, model, noise, one_of, size
from ctrans.verify.statement import Check, Statement, Trial, at_most, equal, holds_if, worst


class Sign(nn.Module):
    """X -> s (w . X) on each token."""

    def __init__(self, s: Tensor, w: Tensor):
        super().__init__()
        self.s, self.w = s, w

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.w).unsqueeze(-1) * self.s


def diverging(generator: torch.Generator, d: int = 8) -> tuple[Depth, Tensor, Tensor]:
    """Two fields X -> s (w.X) behind RMSNorm, s = (1, -1, 1, ...), and inputs on either side of w.X = 0: they part at full speed."""
    s = torch.tensor([1.0, -1.0] * (d // 2), dtype=torch.float64)
    w = noise(generator, d)
    w = w / w.norm()
    w = w - s * (w @ s) / d + s / d  # so that the fields push on in the direction they have begun
    first, second = (RMSNorm(d, 0.0).double().requires_grad_(False) for _ in range(2))
    parts = [Sublayer(Sign(s, w), "attention", output_norm=first), Sublayer(Sign(s, w), "ffn", output_norm=second)]
    x = (1e-5 * w / w.norm()).reshape(1, 1, d)
    return Depth(parts, 1.0), x, -x


def theorem_6_as_printed(generator: torch.Generator) -> Trial:
    """W_1 of the ends <= W_1 of the inputs + 4 dt D sqrt(nd) g_max, for the diverging fields at n = 1, d = 8, D = 1."""
    depth, x, y = diverging(generator)
    bound = printed_transport_bound(depth, 1, wasserstein(x, y, 1), 1)
    assert bound is not None, "behind output norms the theorem speaks"
    return at_most(wasserstein(depth(x), depth(y), 1), bound, "n = 1, d = 8, D = 1: W_1 of the ends")


def theorem_6(generator: torch.Generator) -> Trial:
    """Never exceeded, for any placement with a bound, any samples, p = 1 and 2."""
    made = model(generator, one_of(generator, [name for name in PLACEMENTS if name != "none"]), width=4)
    samples, tokens = 1 + below(generator, 5), 1 + below(generator, 3)
    x = size(generator, -1, 1) * noise(generator, samples, tokens, 4)
    y = x + size(generator, -3, 1) * noise(generator, samples, tokens, 4)
    ends = made.depth(x), made.depth(y)
    cases = []
    for p in (1, 2):
        bound = transport_bound(made.depth, tokens, wasserstein(x, y, p), p)
        assert bound is not None, "norms bound the velocity"
        cases.append(at_most(wasserstein(*ends, p), bound, f"W_{p} of the ends, {described(made)}"))
    return worst(*cases)


def theorem_6_attained(generator: torch.Generator) -> Trial:
    """W_1 = 32 and W_2 = 4 sqrt(8) of the ends, and both equal the bound, for the diverging fields at n = 1, d = 8, D = 1."""
    depth, x, y = diverging(generator)
    cases = []
    for p, exact in ((1, 32.0), (2, 4 * math.sqrt(8))):
        found, bound = wasserstein(depth(x), depth(y), p), transport_bound(depth, 1, wasserstein(x, y, p), p)
        cases += [equal(found, exact, f"W_{p} of the ends"), equal(found, bound or math.nan, f"W_{p} against its bound")]
    return worst(*cases)


def assignment(generator: torch.Generator) -> Trial:
    """Against the linear programme over all plans."""
    count, p = 1 + below(generator, 7), 1 + below(generator, 2)
    a, b = noise(generator, 2, count, 3)
    cost = ((a.unsqueeze(1) - b.unsqueeze(0)).abs() ** p).sum(-1).numpy()
    rows, columns = np.kron(np.eye(count), np.ones(count)), np.kron(np.ones(count), np.eye(count))
    plan = linprog(cost.ravel(), A_eq=np.vstack([rows, columns]), b_eq=np.full(2 * count, 1 / count), method="highs")
    return equal(wasserstein(a, b, p), float(plan.fun) ** (1 / p), f"W_{p} of {count} samples against the linear programme")


def radius_at_real_size(generator: torch.Generator) -> Trial:
    """N^(-1/(nd)) for 10^12 samples of 64 tokens of width 128: what is left of the radius of one."""
    found = generalisation_radius(10**12, 64, 128)
    return worst(
        at_most(0.99, found.shrinkage, "10^12 samples in 8192 dimensions leave of the radius"),
        holds_if(
            found.vacuous and not generalisation_radius(1000, 1, 2).vacuous, "said to be vacuous there, not in 2 dimensions"
        ),
    )


def radius_shrinks(generator: torch.Generator) -> Trial:
    """N^(-1/(nd)) <= 1/2 for N = 10^12 samples of 64 tokens of width 128."""
    found = generalisation_radius(10**12, 64, 128)
    return at_most(found.shrinkage, 0.5, "10^12 samples in 8192 dimensions leave of the radius of one")


STATEMENTS: tuple[Statement, ...] = (
    Statement(
        "theorem-6",
        8,
        "Kan, theorem 6, eq. 17",
        "W_p(mu_D, nu_D) <= W_p(mu_0, nu_0) + 2 dt sqrt(nd) m_p sum_k g_k, m_p = (nd)^max(0, 1/p - 1/2)",
        Check(theorem_6),
        Check(theorem_6_as_printed, share=0.05),
        "W_p(mu_D, nu_D) <= 2^((p-1)/p) (C W_p(mu_0, nu_0) + 4 dt D sqrt(nd) g_max), at p = 1 too",
    ),
    Statement(
        "theorem-6-attained",
        8,
        "ctrans",
        "for fields s(w.X) on either side of w.X = 0 it is attained, at p = 1 (32 = 4 D n d) and p = 2 (4 D sqrt(nd))",
        Check(theorem_6_attained, 1e-3, 0.05),
    ),
    Statement(
        "wasserstein",
        8,
        "ctrans",
        "between equally many samples W_p is an assignment problem: the linear programme over all plans does no better",
        Check(assignment, 1e-9, 0.25),
    ),
    Statement(
        "generalisation-radius",
        8,
        "Kan, eq. 128",
        "r(N, delta) ~ N^(-1/(nd)) is vacuous at real nd: 10^12 samples leave over 99% of it",
        Check(radius_at_real_size, 0.0, 0),
        Check(radius_shrinks, 0.0, 0),
        "the radius tells how well N samples represent the data (halving it, to say the least)",
    ),
)
