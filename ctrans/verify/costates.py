"""Section 5: the costate, what it conserves, the maximum principle's gap and alignment."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ctrans.control.costate import Costate, costate
from ctrans.control.maximum_principle import MaximumPrinciple, maximum_principle
from ctrans.depth import Depth
from ctrans.fields import reference_kernels
from ctrans.model.gpt import GPT
from ctrans.norm import SphereNorm
from ctrans.placement import PLACEMENTS
from ctrans.sublayer import Sublayer
from ctrans.verify.draws import below, between, described, model, noise, norm, one_of, size, text
from ctrans.verify.statement import Check, Statement, Trial, equal, worst
from solvers import Stats, fixed_step, solve

TOLERANCE = 1e-9
DRIFT = 1e-6
"""What <P, v> may change by on a segment at that tolerance."""


def _trained(generator: torch.Generator) -> tuple[GPT, Tensor, Tensor]:
    """A smooth model, since a solver meets its tolerance on no other, a text and its targets."""
    made = model(generator, one_of(generator, PLACEMENTS), activation="gelu", dt=between(generator, 0.1, 0.5), depth=1, eps=1e-2)
    return made, text(generator, 1, 4), text(generator, 1, 4)


def _loss(made: GPT, x: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(made.head(x).flatten(0, -2), targets.flatten())


def discrete_costate(generator: torch.Generator) -> Trial:
    """P_k = dL/dX_k at every state: `costate` of the discrete model against autograd through its steps, any placement."""
    made, tokens, targets = _trained(generator)
    with torch.enable_grad():
        # the oracle keeps the graph of all steps at once, which a walk never does
        states = [made.embed(tokens).requires_grad_()]
        for sublayer in made.depth.sublayers:
            states.append(sublayer.step(states[-1], made.config.dt))
        gradients = torch.autograd.grad(_loss(made, states[-1], targets), states)
    found = costate(made, tokens, targets).costates
    return worst(
        *(equal(p, gradient, f"P_k against dL/dX_k, {described(made)}") for p, gradient in zip(found, gradients, strict=True))
    )


def continuous_costate(generator: torch.Generator) -> Trial:
    """Against the derivative through a fine fixed-step solution."""
    made, tokens, targets = _trained(generator)
    with torch.enable_grad(), reference_kernels(made):
        x0 = made.embed(tokens).requires_grad_()
        end = solve(made.depth.segments(continuous=True), x0, method=fixed_step("dopri5"), steps=12).x1
        (exact,) = torch.autograd.grad(_loss(made, end, targets), x0)
    found = costate(made, tokens, targets, form="continuous", rtol=TOLERANCE, atol=TOLERANCE)
    return equal(found.costates[0], exact, f"P(0) against dL/dX(0) of the ODE, {described(made)}")


def conserved_product(generator: torch.Generator) -> Trial:
    """max over segments of (max - min of <P, v>)/max |P||v| along the continuous costate, solved to a tolerance of 1e-9."""
    made, tokens, targets = _trained(generator)
    drift = max(costate(made, tokens, targets, form="continuous", rtol=TOLERANCE, atol=TOLERANCE).drift)
    return Trial(drift, f"drift {drift:.1g}, {described(made)}")


def _two_costates(generator: torch.Generator) -> tuple[float, float]:
    """The error of a costate that starts from a wrong P(T), that of other targets, and its drift."""
    made, tokens, targets = _trained(generator)
    right, wrong = (
        costate(made, tokens, each, form="continuous", rtol=TOLERANCE, atol=TOLERANCE) for each in (targets, (targets + 1) % 11)
    )
    return float((wrong.costates[0] - right.costates[0]).norm() / right.costates[0].norm()), max(wrong.drift)


def drift_is_error(generator: torch.Generator) -> Trial:
    """A costate that solves the adjoint equation conserves the product, right or wrong."""
    error, drift = _two_costates(generator)
    return Trial(drift, f"a costate wrong by {error:.0%} drifts by {drift:.1g}")


def drift_certifies(generator: torch.Generator) -> Trial:
    """|P(0) - P_right(0)|/|P_right(0)| of the costate of wrong targets where its drift is at most DRIFT, else 0."""
    error, drift = _two_costates(generator)
    return Trial(error if drift <= DRIFT else 0.0, f"drift {drift:.1g}, and the costate is wrong by {error:.0%}")


class GivenVelocity(nn.Module):
    """f(X) = raw, whatever X: puts a sublayer's velocity where a check wants it."""

    def __init__(self, raw: Tensor):
        super().__init__()
        self.raw = raw

    def forward(self, x: Tensor) -> Tensor:
        return self.raw


def reading_of(chosen: SphereNorm, raw: Tensor, p: Tensor) -> MaximumPrinciple:
    """The maximum principle of one sublayer with velocity N(raw) at the costate P."""
    depth = Depth([Sublayer(GivenVelocity(raw), "ffn", output_norm=chosen)], 1.0, per_block=1)
    x = torch.zeros_like(p)
    return maximum_principle(depth, Costate("discrete", 0.0, (0.0, 1.0), (x, x), (p, p), ((x, p),), (0.0,), Stats()))


def _known(value: float | None) -> float:
    """The value; behind an output norm H, gap and alignment exist, ties apart, which a random costate is not."""
    assert value is not None, "an output norm has a finite H"
    return value


def _reading(generator: torch.Generator, tokens: int) -> tuple[SphereNorm, Tensor, Tensor, MaximumPrinciple]:
    chosen = norm(generator, eps=one_of(generator, (0.0, 1e-5, 0.1)) if tokens > 1 else 0.0, width=3 + below(generator, 8))
    raw, p = noise(generator, 2, tokens, chosen.width)
    p = size(generator, -6, 6) * p
    return chosen, raw, p, reading_of(chosen, raw, p)


def gap(generator: torch.Generator) -> Trial:
    """g = H + <P, v> >= 0 and g = (1 - a)(H + <P, beta>), relative to |H| + |<P, v>|, at a random costate and v = N(raw)."""
    chosen, _, p, found = _reading(generator, 1 + below(generator, 4))
    H, g, a = (_known(value[0]) for value in (found.hamiltonian, found.gap, found.alignment))
    scale = abs(H) + abs(_known(found.product[0]))
    steepest = H + float((p @ chosen.beta).sum())
    return worst(
        Trial(-g / scale, f"-g/(|H| + |<P, v>|), {p.shape[0]} tokens of width {p.shape[1]}"),
        equal(g, (1 - a) * steepest, "g against (1 - a)(H + <P, beta>)", scale),
    )


def alignment_range(generator: torch.Generator) -> Trial:
    """Within [-1, 1], and at the ends at the maximiser and opposite."""
    chosen, _, p, found = _reading(generator, 1 + below(generator, 4))
    sharp = norm(generator, "layernorm" if chosen.centred else "rmsnorm", width=chosen.width)
    ends = [_known(reading_of(sharp, -sign * sharp.gamma * p, p).alignment[0]) for sign in (1, -1)]
    a = _known(found.alignment[0])
    return worst(
        Trial(abs(a) - 1, f"a = {a:.6f}"),
        equal(
            torch.tensor(ends, dtype=torch.float64),
            torch.tensor([1.0, -1.0], dtype=torch.float64),
            "a at the maximiser and opposite",
        ),
    )


def _cosines(chosen: SphereNorm, raw: Tensor, p: Tensor) -> tuple[Tensor, Tensor]:
    """Points u and u* of the norm's sphere: what the layer does, and the optimal control."""
    return chosen.coordinates(chosen(raw)), chosen.coordinates(chosen.maximizer(-p))


def one_token(generator: torch.Generator) -> Trial:
    """a = cos(u, u*) for one token: u and u* are the velocity and the maximiser as points of the norm's sphere."""
    chosen, raw, p, found = _reading(generator, 1)
    u, best = _cosines(chosen, raw, p)
    return equal(_known(found.alignment[0]), F.cosine_similarity(u, best)[0], "a against cos(u, u*), one token", 1.0)


def cosine_of_all(generator: torch.Generator) -> Trial:
    """a against cos(u, u*) with four tokens flattened into one vector; three of the costates are made 20 times smaller."""
    chosen, raw, p, _ = _reading(generator, 4)
    p = p * torch.tensor([1.0, 0.05, 0.05, 0.05], dtype=p.dtype).unsqueeze(-1)
    u, best = _cosines(chosen, raw, p)
    a = _known(reading_of(chosen, raw, p).alignment[0])
    return equal(a, F.cosine_similarity(u.flatten(), best.flatten(), dim=0), "a against cos(u, u*), four tokens", 1.0)


def weighted_cosine(generator: torch.Generator) -> Trial:
    """a = sum_j w_j cos(u_j, u*_j)/sum_j w_j, w_j = |C(gamma*p_j)|, for four tokens with costates of different sizes."""
    chosen = norm(generator, width=3 + below(generator, 8))
    raw, p = noise(generator, 2, 4, chosen.width)
    p = p * noise(generator, 4, 1)
    u, best = _cosines(chosen, raw, p)
    weights = chosen.centre(chosen.gamma * p).norm(dim=-1)
    mean = (weights * F.cosine_similarity(u, best)).sum() / weights.sum()
    return equal(_known(reading_of(chosen, raw, p).alignment[0]), mean, "a against the mean of cos(u_j, u*_j)", 1.0)


STATEMENTS: tuple[Statement, ...] = (
    Statement(
        "discrete-costate",
        5,
        "ctrans, on Kan, eq. 15-16",
        "on the discrete model the costate is the gradient with respect to the hidden state",
        Check(discrete_costate, 1e-11, 0.25),
    ),
    Statement(
        "adjoint-equation",
        5,
        "ctrans, on Kan, eq. 58",
        "dP/dt = -(dv/dX)' P backward from dL/dX(T) gives P(t) = dL/dX(t)",
        Check(continuous_costate, 1e-5, 0.02),
    ),
    Statement(
        "conserved-product",
        5,
        "ctrans",
        "<P(t), v(X(t))> is constant on each segment",
        Check(conserved_product, DRIFT, 0.02),
    ),
    Statement(
        "drift",
        5,
        "ctrans",
        "drift of <P, v> is error, but not all error drifts: a wrong P(T) conserves it too",
        Check(drift_is_error, DRIFT, 0.01),
        Check(drift_certifies, 0.01, 0.01),
        "a costate that conserves <P, v> is right",
    ),
    Statement(
        "pmp-gap",
        5,
        "ctrans, on Kan, eq. 58 and 99",
        "g = H(P) + <P, v> >= 0, and g = (1 - a)(H + <P, beta>)",
        Check(gap, 1e-12),
    ),
    Statement(
        "alignment-range",
        5,
        "ctrans",
        "a = (<P, beta> - <P, v>)/(<P, beta> + H) is in [-1, 1]: 1 at the maximiser, -1 opposite",
        Check(alignment_range, 1e-9),
    ),
    Statement(
        "alignment-one-token",
        5,
        "ctrans",
        "for one token a is the cosine between what the layer does and the optimal control, on the norm's sphere",
        Check(one_token, 1e-10),
    ),
    Statement(
        "alignment-tokens",
        5,
        "ctrans",
        "for several tokens a is the mean of their cosines, weighted with |C(gamma*p_j)|",
        Check(weighted_cosine, 1e-10),
        Check(cosine_of_all, 1e-6),
        "a is the cosine between what the layer does and the optimal control",
    ),
)
