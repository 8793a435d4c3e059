"""Section 5: what training attains of the maximum principle: the radial identity, and critical points."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import scipy.optimize
import torch
import torch.nn.functional as F
from torch import Tensor

from ctrans.control.attained import attained
from ctrans.control.costate import costate
from ctrans.model.random_models import described, random_model, random_text
from ctrans.placement import PLACEMENTS
from ctrans.statement import Draw, Printed, Trial, equal, known, statement

LAM = 1e-4
"""A decay that keeps gains finite where the loss has no minimum in them."""
STATIONARY = 1e-7
"""The gradient over |x| at which a loss counts as stationary in x."""


@statement(
    "radial-identity",
    5,
    "ctrans",
    "dt <P, v> = <theta, dL/dtheta>, theta the last map with its bias, or the output norm's gains and offsets",
    1e-12,
    0.05,
)
def radial_identity(draw: Draw) -> Trial:
    """h <P, r> against <theta, dL/dtheta> of every sublayer, any placement."""
    made = random_model(draw, draw.choice(PLACEMENTS), depth=1)
    found = attained(made, random_text(draw, 1, 4), random_text(draw, 1, 4))
    return Trial(max(found.identity), f"{described(made)}: the two differ by {max(found.identity):.1g} |P||r|")


@statement(
    "critical-alignment",
    5,
    "ctrans",
    "at a critical point of L + lam/2 |theta|^2, dt <P, v> = -lam |theta|^2: without decay the alignment is 0",
    1e-5,
    0.02,
    printed=Printed("a trained layer's alignment with the optimal control is 1", 1e-3, 0.02),
)
def unaligned_when_trained(draw: Draw, printed: bool) -> Trial:
    """dt <P, v> + lam |gamma|^2 over dt H of a last sublayer at a minimum in its output norm's gains. Printed: 1 - alignment there."""
    made = random_model(draw, "peri", depth=1, norm="rmsnorm", dt=1.0)
    tokens, targets = random_text(draw, 1, 4).expand(3, -1), random_text(draw, 3, 4)
    first, inner = made.depth.sublayers
    last = known(inner.output_norm)
    state = first.step(made.embed(tokens), 1.0)
    raw = last.standardize(inner.field(inner.given(state)))

    def loss(gamma: Tensor) -> Tensor:
        logits = made.head(state + gamma * raw)
        return F.cross_entropy(logits.flatten(0, -2), targets.flatten()) + LAM / 2 * gamma.square().sum()

    gamma = _minimised(loss, last.gamma)
    last.gamma.copy_(gamma)
    found = attained(made, tokens, targets)
    work, gap, decayed = found.work[-1], known(found.pointwise_gap[-1]), LAM * float(gamma.square().sum())
    if printed:
        return Trial(1 - (-work / (gap - work)), f"at a critical point of the gains: alignment {-work / (gap - work):.2g}")
    words = f"at a critical point of the gains: dt <P, v> = {work:.3g}, lam |gamma|^2 = {decayed:.3g}, dt H = {gap - work:.3g}"
    return Trial(abs(work + decayed) / (gap - work), words)


@torch.enable_grad()
def _minimised(loss: Callable[[Tensor], Tensor], start: Tensor) -> Tensor:
    """A point near the start where the loss is stationary: by L-BFGS, and where that is slow, in a narrow valley, on by Newton's steps."""
    x = start.detach().clone().requires_grad_()
    optimiser = torch.optim.LBFGS([x], max_iter=500, tolerance_grad=1e-12, tolerance_change=0, line_search_fn="strong_wolfe")

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
    5,
    "ctrans",
    "where a loss with decay is stationary in the last map, that map attains the mean-field principle within its norm",
    1e-6,
    0.05,
)
def shared_principle(draw: Draw) -> Trial:
    """A last map trained with decay by L-BFGS, in the loss itself: at the costates found there it is the best of its norm."""
    made = random_model(draw, draw.choice(("none", "pre")), depth=1)
    tokens, targets = random_text(draw, 1, 4), random_text(draw, 1, 4)
    sublayer, h, lam = made.depth.sublayers[-1], made.depth.lengths[-1], draw.log_uniform(-1.5, 0.5)
    state = costate(made, tokens, targets).states[-2]
    last = sublayer.field.output_projection
    features = sublayer.field.pre_projection(sublayer.given(state)).flatten(0, -2)
    features = torch.cat([features, torch.ones_like(features[..., :1])], -1)

    def loss(theta: Tensor) -> Tensor:
        logits = made.head(state + h * (features @ theta.mT).reshape(state.shape))
        return F.cross_entropy(logits.flatten(0, -2), targets.flatten()) + lam / 2 * theta.square().sum()

    theta = _minimised(loss, torch.cat([last.weight, last.bias.unsqueeze(-1)], -1))
    last.weight.copy_(theta[:, :-1])
    last.bias.copy_(theta[:, -1])
    P = costate(made, tokens, targets).costates[-1].flatten(0, -2)
    gained, best = -h * (P * (features @ theta.mT)).sum(), h * theta.norm() * (P.mT @ features).norm()
    return equal(gained, best, f"{described(made)}, decay {lam:.2g}: what the trained map gains against the best of its norm")
