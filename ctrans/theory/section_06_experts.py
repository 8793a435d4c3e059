"""Section 6: the size of a mixture of experts."""

from __future__ import annotations

from ctrans.base.draw import Draw
from ctrans.theory.random_experts import describe_mixture, random_mixture
from ctrans.theory.statement import Trial, at_most, statement

SECTION = 6


@statement(
    "experts-bound",
    "ctrans",
    "top-k of E experts: |f(x)| is at most the largest bound of an expert, plus the shared ones'"
    " and |b_2|, whatever the router says",
)
def bound(draw: Draw) -> Trial:
    """|f(x)| against the bound at |x|, of 50 tokens of one length."""
    mixture = random_mixture(draw)
    x = draw.normal(50, mixture.up.in_features)
    x = draw.log_uniform(-1, 1.5) * x / x.norm(dim=-1, keepdim=True)
    return at_most(
        float(mixture(x).norm(dim=-1).max()),
        mixture.bound().at(float(x.norm(dim=-1).max())),
        describe_mixture(mixture),
    )
