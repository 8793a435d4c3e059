"""Section 5: the maximum principle's gap and alignment, and their values after training."""

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
from ctrans.dynamics.norm import SphereNorm
from ctrans.dynamics.placement import PLACEMENTS
from ctrans.dynamics.sublayer import Sublayer
from ctrans.measure.walk import terminal_loss
from ctrans.theory.random_models import describe_model, random_model, random_text
from ctrans.theory.random_norms import EPSILONS, random_norm
from ctrans.theory.statement import Printed, Trial, Trials, equal, not_none, statement
from solvers import Stats

SECTION = 5


class GivenVelocity(nn.Module):
    """f(X) = raw for every X: sets a sublayer's velocity in a test."""

    def __init__(self, raw: Tensor):
        super().__init__()
        self.raw = raw

    def forward(self, x: Tensor) -> Tensor:
        return self.raw


def _figures(norm: SphereNorm, raw: Tensor, p: Tensor) -> tuple[float, ...]:
    """H, gap, alignment and product of one sublayer with velocity N(raw) at the costate P; nan for
    None.
    """
    depth = Depth([Sublayer(GivenVelocity(raw), "ffn", output_norm=norm)], 1.0, per_block=1)
    x = torch.zeros_like(p)
    principle = maximum_principle(
        depth, Costate("discrete", 0.0, (0.0, 1.0), (x, x), (p, p), ((x, p),), (0.0,), Stats())
    )
    figures = (principle.hamiltonian, principle.gap, principle.alignment, principle.product)
    return tuple(math.nan if value is None else value for (value,) in figures)


def _alignment(norm: SphereNorm, raw: Tensor, p: Tensor) -> float:
    return _figures(norm, raw, p)[2]


def _norm_raw_and_costate(draw: Draw, tokens: int) -> tuple[SphereNorm, Tensor, Tensor]:
    """A norm, its input, and a costate."""
    eps = 0.0
    if tokens > 1:
        eps = draw.choice(EPSILONS)
    norm = random_norm(draw, eps=eps, width=3 + draw.integer(8))
    raw, p = draw.normal(2, tokens, norm.width)
    return norm, raw, draw.log_uniform(-6, 6) * p


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
    norm, raw, p = _norm_raw_and_costate(draw, 1 + draw.integer(4))
    H, g, a, product = _figures(norm, raw, p)
    scale = abs(H) + abs(product)
    steepest = H + float((p @ norm.beta).sum())
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
    norm, raw, p = _norm_raw_and_costate(draw, 1 + draw.integer(4))
    name = "rmsnorm"
    if norm.centred:
        name = "layernorm"
    without_eps = random_norm(draw, name, width=norm.width)
    a = _alignment(norm, raw, p)
    signs = torch.tensor([1.0, -1.0], dtype=torch.float64)
    ends = torch.tensor(
        [_alignment(without_eps, -sign * without_eps.gamma * p, p) for sign in signs],
        dtype=torch.float64,
    )
    return [
        Trial(abs(a) - 1, f"a = {a:.6f}"),
        equal(ends, signs, "a at the maximiser and opposite"),
    ]


def _cosines(norm: SphereNorm, raw: Tensor, p: Tensor) -> tuple[Tensor, Tensor]:
    """The layer's velocity u and the maximiser u*, as points of the norm's sphere."""
    return norm.coordinates(norm(raw)), norm.coordinates(norm.maximizer(-p))


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
    norm, raw, p = _norm_raw_and_costate(draw, 1)
    cosine = F.cosine_similarity(*_cosines(norm, raw, p))[0]
    return equal(_alignment(norm, raw, p), cosine, "a against cos(u, u*), one token", 1.0)


@statement(
    "alignment-tokens",
    "ctrans",
    "for several tokens a is the mean of their cosines, weighted with |C(gamma*p_j)|",
    1e-10,
    printed=Printed("a is the cosine between the layer's velocity and the optimal one", 1e-6),
)
def several_tokens(draw: Draw, *, printed: bool) -> Trial:
    """a = sum_j w_j cos(u_j, u*_j)/sum_j w_j, w_j = |C(gamma*p_j)|, for four tokens with costates
    of different sizes.

    Printed: a against cos(u, u*) of the four tokens as one vector; three of the costates are 20
    times smaller.
    """
    if printed:
        norm, raw, p = _norm_raw_and_costate(draw, 4)
        p = p * torch.tensor([1.0, 0.05, 0.05, 0.05], dtype=p.dtype).unsqueeze(-1)
        u, best = _cosines(norm, raw, p)
        expected = F.cosine_similarity(u.flatten(), best.flatten(), dim=0)
        case = "a against cos(u, u*), four tokens"
    else:
        norm = random_norm(draw, width=3 + draw.integer(8))
        raw, p = draw.normal(2, 4, norm.width)
        p = p * draw.normal(4, 1)
        weights = norm.centre(norm.gamma * p).norm(dim=-1)
        expected = (weights * F.cosine_similarity(*_cosines(norm, raw, p))).sum() / weights.sum()
        case = "a against the mean of cos(u_j, u*_j)"
    return equal(_alignment(norm, raw, p), expected, case, 1.0)


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
    model = random_model(draw, draw.choice(PLACEMENTS), depth=1)
    difference = max(attained(model, random_text(draw, 1, 4), random_text(draw, 1, 4)).identity)
    return Trial(difference, f"{describe_model(model)}: the two differ by {difference:.1g} |P||r|")


@statement(
    "critical-alignment",
    "ctrans",
    "at a critical point of L + lam/2 |theta|^2, dt <P, v> = -lam |theta|^2: without decay the"
    " alignment is 0",
    1e-5,
    0.02,
    printed=Printed("a trained layer's alignment with the optimal control is 1", 1e-3),
)
def unaligned_when_trained(draw: Draw, *, printed: bool) -> Trial:
    """dt <P, v> + lam |gamma|^2 over dt H of a last sublayer at a minimum in its output norm's
    gains. Printed: 1 - alignment there.
    """
    model = random_model(draw, "peri", depth=1, norm="rmsnorm", dt=1.0)
    tokens = random_text(draw, 1, 4).expand(3, -1)
    targets = random_text(draw, 3, 4)
    first, inner = model.depth.sublayers
    last = not_none(inner.output_norm)
    state = first.step(model.embed(tokens), 1.0)
    raw = last.standardize(inner.field(inner.given(state)))

    def loss(gamma: Tensor) -> Tensor:
        return terminal_loss(model, state + gamma * raw, targets) + LAM / 2 * gamma.square().sum()

    gamma = _minimised(loss, last.gamma)
    last.gamma.copy_(gamma)
    by_the_model = attained(model, tokens, targets)
    work = by_the_model.work[-1]
    gap = not_none(by_the_model.pointwise_gap[-1])
    decayed = LAM * float(gamma.square().sum())
    if printed:
        alignment = -work / (gap - work)
        return Trial(1 - alignment, f"at a critical point of the gains: alignment {alignment:.2g}")
    case = (
        f"at a critical point of the gains: dt <P, v> = {work:.3g}, lam |gamma|^2 = {decayed:.3g},"
        f" dt H = {gap - work:.3g}"
    )
    return Trial(abs(work + decayed) / (gap - work), case)


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

    minimum = scipy.optimize.minimize(
        lambda z: float(loss(at(z)).detach()),
        x.detach().flatten().numpy(),
        jac=lambda z: torch.func.grad(loss)(at(z)).flatten().numpy(),
        hess=lambda z: torch.func.hessian(loss)(at(z)).reshape(len(z), -1).numpy(),
        method="trust-exact",
        options={"gtol": STATIONARY * float(x.detach().norm()), "maxiter": 200},
    )
    return at(minimum.x)


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
    model = random_model(draw, draw.choice(("none", "pre")), depth=1)
    tokens = random_text(draw, 1, 4)
    targets = random_text(draw, 1, 4)
    sublayer = model.depth.sublayers[-1]
    h = model.depth.lengths[-1]
    lam = draw.log_uniform(-1.5, 0.5)
    state = costate(model, tokens, targets).states[-2]
    last = sublayer.field.output_projection
    features = sublayer.field.pre_projection(sublayer.given(state)).flatten(0, -2)
    features = torch.cat([features, torch.ones_like(features[..., :1])], -1)

    def loss(theta: Tensor) -> Tensor:
        trained = terminal_loss(
            model, state + h * (features @ theta.mT).reshape(state.shape), targets
        )
        return trained + lam / 2 * theta.square().sum()

    theta = _minimised(loss, torch.cat([last.weight, last.bias.unsqueeze(-1)], -1))
    last.weight.copy_(theta[:, :-1])
    last.bias.copy_(theta[:, -1])
    P = costate(model, tokens, targets).costates[-1].flatten(0, -2)
    gained = -h * (P * (features @ theta.mT)).sum()
    best = h * theta.norm() * (P.mT @ features).norm()
    case = f"{describe_model(model)}, decay {lam:.2g}"
    return equal(gained, best, f"{case}: the trained map's gain against the best one of its norm")
