"""Section 5: the costate, the maximum principle's gap and alignment, and their values after
training.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import scipy.optimize
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ctrans.base.draw import Draw
from ctrans.control.attained import attained
from ctrans.control.costate import Costate, costate
from ctrans.control.maximum_principle import maximum_principle
from ctrans.dynamics.depth import Depth
from ctrans.dynamics.fields import reference_kernels
from ctrans.dynamics.norm import SphereNorm
from ctrans.dynamics.placement import PLACEMENTS
from ctrans.dynamics.sublayer import Sublayer
from ctrans.measure.walk import terminal_loss
from ctrans.model.gpt import GPT
from ctrans.theory.random_models import described, random_model, random_text
from ctrans.theory.random_norms import EPSILONS, random_norm
from ctrans.theory.statement import Printed, Trial, Trials, equal, known, statement
from solvers import Stats
from solvers.methods import fixed_step
from solvers.solve import solve

SECTION = 5

TOLERANCE = 1e-9
DRIFT = 1e-6
"""The largest accepted change of <P, v> on a segment at that tolerance."""


def _trained(draw: Draw) -> tuple[GPT, Tensor, Tensor]:
    """A smooth model (a solver reaches its tolerance only on a smooth one), a text and its
    targets.
    """
    made = random_model(
        draw,
        draw.choice(PLACEMENTS),
        activation="gelu",
        dt=draw.uniform(0.1, 0.5),
        depth=1,
        eps=1e-2,
    )
    return made, random_text(draw, 1, 4), random_text(draw, 1, 4)


def _continuous(made: GPT, tokens: Tensor, targets: Tensor) -> Costate:
    return costate(made, tokens, targets, form="continuous", rtol=TOLERANCE, atol=TOLERANCE)


@statement(
    "discrete-costate",
    "ctrans, on Kan, eq. 15-16",
    "on the discrete model the costate is the gradient with respect to the hidden state",
    1e-11,
    0.25,
)
def discrete_costate(draw: Draw) -> Trials:
    """P_k = dL/dX_k at every state: `costate` of the discrete model against autograd through its
    steps, any placement.
    """
    made, tokens, targets = _trained(draw)
    with torch.enable_grad():
        # unlike a walk, the oracle keeps the graph of all steps at once
        states = [made.embed(tokens).requires_grad_()]
        for sublayer in made.depth.sublayers:
            states.append(sublayer.step(states[-1], made.config.dt))
        gradients = torch.autograd.grad(terminal_loss(made, states[-1], targets), states)
    found = costate(made, tokens, targets).costates
    words = f"P_k against dL/dX_k, {described(made)}"
    return [equal(p, gradient, words) for p, gradient in zip(found, gradients, strict=True)]


@statement(
    "adjoint-equation",
    "ctrans, on Kan, eq. 58",
    "dP/dt = -(dv/dX)' P backward from dL/dX(T) gives P(t) = dL/dX(t)",
    1e-5,
    0.02,
)
def continuous_costate(draw: Draw) -> Trial:
    """P(0) against the derivative through a fine fixed-step solution."""
    made, tokens, targets = _trained(draw)
    with torch.enable_grad(), reference_kernels(made):
        x0 = made.embed(tokens).requires_grad_()
        end = solve(
            made.depth.segments(continuous=True), x0, method=fixed_step("dopri5"), steps=12
        ).x1
        (exact,) = torch.autograd.grad(terminal_loss(made, end, targets), x0)
    found = _continuous(made, tokens, targets)
    return equal(found.costates[0], exact, f"P(0) against dL/dX(0) of the ODE, {described(made)}")


@statement(
    "conserved-product", "ctrans", "<P(t), v(X(t))> is constant on each segment", DRIFT, 0.02
)
def conserved_product(draw: Draw) -> Trial:
    """max over segments of (max - min of <P, v>)/max |P||v| along the continuous costate, at a
    tolerance of 1e-9.
    """
    made, tokens, targets = _trained(draw)
    drift = max(_continuous(made, tokens, targets).drift)
    return Trial(drift, f"drift {drift:.1g}, {described(made)}")


@statement(
    "drift",
    "ctrans",
    "drift of <P, v> is error, but not all error drifts: a wrong P(T) conserves it too",
    DRIFT,
    0.01,
    printed=Printed("a costate that conserves <P, v> is right", 0.01),
)
def drift_is_error(draw: Draw, printed: bool) -> Trial:
    """A costate that solves the adjoint equation conserves the product, right or wrong.

    Printed: |P(0) - P_right(0)|/|P_right(0)| of the costate of wrong targets if its drift is at
    most 1e-6, else 0.
    """
    made, tokens, targets = _trained(draw)
    right, wrong = (_continuous(made, tokens, each) for each in (targets, (targets + 1) % 11))
    error = float((wrong.costates[0] - right.costates[0]).norm() / right.costates[0].norm())
    drift = max(wrong.drift)
    if printed:
        return Trial(
            error if drift <= DRIFT else 0.0,
            f"drift {drift:.1g}, and the costate is wrong by {error:.0%}",
        )
    return Trial(drift, f"a costate wrong by {error:.0%} drifts by {drift:.1g}")


class GivenVelocity(nn.Module):
    """f(X) = raw for every X: sets a sublayer's velocity in a test."""

    def __init__(self, raw: Tensor):
        super().__init__()
        self.raw = raw

    def forward(self, x: Tensor) -> Tensor:
        return self.raw


def _figures(chosen: SphereNorm, raw: Tensor, p: Tensor) -> tuple[float, ...]:
    """H, gap, alignment and product of one sublayer with velocity N(raw) at the costate P; nan for
    None.
    """
    depth = Depth([Sublayer(GivenVelocity(raw), "ffn", output_norm=chosen)], 1.0, per_block=1)
    x = torch.zeros_like(p)
    found = maximum_principle(
        depth, Costate("discrete", 0.0, (0.0, 1.0), (x, x), (p, p), ((x, p),), (0.0,), Stats())
    )
    figures = (found.hamiltonian, found.gap, found.alignment, found.product)
    return tuple(math.nan if value is None else value for (value,) in figures)


def _alignment(chosen: SphereNorm, raw: Tensor, p: Tensor) -> float:
    return _figures(chosen, raw, p)[2]


def _problem(draw: Draw, tokens: int) -> tuple[SphereNorm, Tensor, Tensor]:
    """A norm, its input, and a costate."""
    chosen = random_norm(
        draw, eps=draw.choice(EPSILONS) if tokens > 1 else 0.0, width=3 + draw.integer(8)
    )
    raw, p = draw.normal(2, tokens, chosen.width)
    return chosen, raw, draw.log_uniform(-6, 6) * p


@statement(
    "pmp-gap",
    "ctrans, on Kan, eq. 58 and 99",
    "g = H(P) + <P, v> >= 0, and g = (1 - a)(H + <P, beta>)",
    1e-12,
)
def gap(draw: Draw) -> Trials:
    """g = H + <P, v> >= 0 and g = (1 - a)(H + <P, beta>), relative to |H| + |<P, v>|, at a random
    costate and v = N(raw).
    """
    chosen, raw, p = _problem(draw, 1 + draw.integer(4))
    H, g, a, product = _figures(chosen, raw, p)
    scale = abs(H) + abs(product)
    steepest = H + float((p @ chosen.beta).sum())
    return [
        Trial(-g / scale, f"-g/(|H| + |<P, v>|), {p.shape[0]} tokens of width {p.shape[1]}"),
        equal(g, (1 - a) * steepest, "g against (1 - a)(H + <P, beta>)", scale),
    ]


@statement(
    "alignment-range",
    "ctrans",
    "a = (<P, beta> - <P, v>)/(<P, beta> + H) is in [-1, 1]: 1 at the maximiser, -1 opposite",
    1e-9,
)
def alignment_range(draw: Draw) -> Trials:
    """a is within [-1, 1]: 1 at the maximiser and -1 opposite to it."""
    chosen, raw, p = _problem(draw, 1 + draw.integer(4))
    sharp = random_norm(draw, "layernorm" if chosen.centred else "rmsnorm", width=chosen.width)
    a = _alignment(chosen, raw, p)
    signs = torch.tensor([1.0, -1.0], dtype=torch.float64)
    ends = torch.tensor(
        [_alignment(sharp, -sign * sharp.gamma * p, p) for sign in signs], dtype=torch.float64
    )
    return [
        Trial(abs(a) - 1, f"a = {a:.6f}"),
        equal(ends, signs, "a at the maximiser and opposite"),
    ]


def _cosines(chosen: SphereNorm, raw: Tensor, p: Tensor) -> tuple[Tensor, Tensor]:
    """The layer's velocity u and the maximiser u*, as points of the norm's sphere."""
    return chosen.coordinates(chosen(raw)), chosen.coordinates(chosen.maximizer(-p))


@statement(
    "alignment-one-token",
    "ctrans",
    "for one token a is the cosine between the layer's velocity and the optimal one, on the norm's"
    " sphere",
    1e-10,
)
def one_token(draw: Draw) -> Trial:
    """a = cos(u, u*) for one token: u and u* are the velocity and the maximiser as points of the
    norm's sphere.
    """
    chosen, raw, p = _problem(draw, 1)
    cosine = F.cosine_similarity(*_cosines(chosen, raw, p))[0]
    return equal(_alignment(chosen, raw, p), cosine, "a against cos(u, u*), one token", 1.0)


@statement(
    "alignment-tokens",
    "ctrans",
    "for several tokens a is the mean of their cosines, weighted with |C(gamma*p_j)|",
    1e-10,
    printed=Printed("a is the cosine between the layer's velocity and the optimal one", 1e-6),
)
def several_tokens(draw: Draw, printed: bool) -> Trial:
    """a = sum_j w_j cos(u_j, u*_j)/sum_j w_j, w_j = |C(gamma*p_j)|, for four tokens with costates
    of different sizes.

    Printed: a against cos(u, u*) of the four tokens as one vector; three of the costates are 20
    times smaller.
    """
    if printed:
        chosen, raw, p = _problem(draw, 4)
        p = p * torch.tensor([1.0, 0.05, 0.05, 0.05], dtype=p.dtype).unsqueeze(-1)
        u, best = _cosines(chosen, raw, p)
        expected = F.cosine_similarity(u.flatten(), best.flatten(), dim=0)
        words = "a against cos(u, u*), four tokens"
    else:
        chosen = random_norm(draw, width=3 + draw.integer(8))
        raw, p = draw.normal(2, 4, chosen.width)
        p = p * draw.normal(4, 1)
        weights = chosen.centre(chosen.gamma * p).norm(dim=-1)
        expected = (weights * F.cosine_similarity(*_cosines(chosen, raw, p))).sum() / weights.sum()
        words = "a against the mean of cos(u_j, u*_j)"
    return equal(_alignment(chosen, raw, p), expected, words, 1.0)


LAM = 1e-4
"""A decay that keeps gains finite if the loss has no minimum in them."""
STATIONARY = 1e-7
"""A loss counts as stationary in x if its gradient is below this share of |x|."""


@statement(
    "radial-identity",
    "ctrans",
    "dt <P, v> = <theta, dL/dtheta>, theta the last map with its bias, or the output norm's gains"
    " and offsets",
    1e-12,
    0.05,
)
def radial_identity(draw: Draw) -> Trial:
    """h <P, r> against <theta, dL/dtheta> of every sublayer, any placement."""
    made = random_model(draw, draw.choice(PLACEMENTS), depth=1)
    found = attained(made, random_text(draw, 1, 4), random_text(draw, 1, 4))
    return Trial(
        max(found.identity),
        f"{described(made)}: the two differ by {max(found.identity):.1g} |P||r|",
    )


@statement(
    "critical-alignment",
    "ctrans",
    "at a critical point of L + lam/2 |theta|^2, dt <P, v> = -lam |theta|^2: without decay the"
    " alignment is 0",
    1e-5,
    0.02,
    printed=Printed("a trained layer's alignment with the optimal control is 1", 1e-3),
)
def unaligned_when_trained(draw: Draw, printed: bool) -> Trial:
    """dt <P, v> + lam |gamma|^2 over dt H of a last sublayer at a minimum in its output norm's
    gains. Printed: 1 - alignment there.
    """
    made = random_model(draw, "peri", depth=1, norm="rmsnorm", dt=1.0)
    tokens = random_text(draw, 1, 4).expand(3, -1)
    targets = random_text(draw, 3, 4)
    first, inner = made.depth.sublayers
    last = known(inner.output_norm)
    state = first.step(made.embed(tokens), 1.0)
    raw = last.standardize(inner.field(inner.given(state)))

    def loss(gamma: Tensor) -> Tensor:
        return terminal_loss(made, state + gamma * raw, targets) + LAM / 2 * gamma.square().sum()

    gamma = _minimised(loss, last.gamma)
    last.gamma.copy_(gamma)
    found = attained(made, tokens, targets)
    work = found.work[-1]
    gap = known(found.pointwise_gap[-1])
    decayed = LAM * float(gamma.square().sum())
    if printed:
        return Trial(
            1 - (-work / (gap - work)),
            f"at a critical point of the gains: alignment {-work / (gap - work):.2g}",
        )
    words = (
        f"at a critical point of the gains: dt <P, v> = {work:.3g}, lam |gamma|^2 = {decayed:.3g},"
        f" dt H = {gap - work:.3g}"
    )
    return Trial(abs(work + decayed) / (gap - work), words)


@torch.enable_grad()
def _minimised(loss: Callable[[Tensor], Tensor], start: Tensor) -> Tensor:
    """A point near the start where the loss is stationary: by L-BFGS, then by Newton's steps if
    that is slow.
    """
    x = start.detach().clone().requires_grad_()
    optimiser = torch.optim.LBFGS(
        [x], max_iter=500, tolerance_grad=1e-12, tolerance_change=0, line_search_fn="strong_wolfe"
    )

    def closure() -> Tensor:
        optimiser.zero_grad()
        value = loss(x)
        value.backward()  # type: ignore[no-untyped-call, unused-ignore]  # torch gives it no types
        return value

    optimiser.step(closure)  # type: ignore[no-untyped-call, unused-ignore]  # torch gives it no types
    closure()
    assert x.grad is not None, "it was just computed"
    if float(x.grad.norm()) <= STATIONARY * float(x.detach().norm()):
        return x.detach()

    def at(z: np.ndarray) -> Tensor:
        return torch.from_numpy(z).reshape(x.shape)

    found = scipy.optimize.minimize(
        lambda z: float(loss(at(z)).detach()),
        x.detach().flatten().numpy(),
        jac=lambda z: torch.func.grad(loss)(at(z)).flatten().numpy(),
        hess=lambda z: torch.func.hessian(loss)(at(z)).reshape(len(z), -1).numpy(),
        method="trust-exact",
        options={"gtol": STATIONARY * float(x.detach().norm()), "maxiter": 200},
    )
    return at(found.x)


@statement(
    "shared-principle",
    "ctrans",
    "where a loss with decay is stationary in the last map, that map attains the mean-field"
    " principle within its norm",
    1e-6,
    0.05,
)
def shared_principle(draw: Draw) -> Trial:
    """A last map trained with decay by L-BFGS: at the costates of the trained model it is the best
    map of its norm.
    """
    made = random_model(draw, draw.choice(("none", "pre")), depth=1)
    tokens = random_text(draw, 1, 4)
    targets = random_text(draw, 1, 4)
    sublayer = made.depth.sublayers[-1]
    h = made.depth.lengths[-1]
    lam = draw.log_uniform(-1.5, 0.5)
    state = costate(made, tokens, targets).states[-2]
    last = sublayer.field.output_projection
    features = sublayer.field.pre_projection(sublayer.given(state)).flatten(0, -2)
    features = torch.cat([features, torch.ones_like(features[..., :1])], -1)

    def loss(theta: Tensor) -> Tensor:
        trained = terminal_loss(
            made, state + h * (features @ theta.mT).reshape(state.shape), targets
        )
        return trained + lam / 2 * theta.square().sum()

    theta = _minimised(loss, torch.cat([last.weight, last.bias.unsqueeze(-1)], -1))
    last.weight.copy_(theta[:, :-1])
    last.bias.copy_(theta[:, -1])
    P = costate(made, tokens, targets).costates[-1].flatten(0, -2)
    gained = -h * (P * (features @ theta.mT)).sum()
    best = h * theta.norm() * (P.mT @ features).norm()
    return equal(
        gained,
        best,
        f"{described(made)}, decay {lam:.2g}: the trained map's gain against the best one of its"
        " norm",
    )
