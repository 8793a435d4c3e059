"""Section 4: the value of a model's own loss along its trajectory."""

from __future__ import annotations

import math
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ctrans.base.draw import Draw
from ctrans.control.convex_head import ConvexHead, convex_head
from ctrans.control.least_loss import cross_entropies, least_loss
from ctrans.control.optimal_trajectory import optimal_trajectory
from ctrans.control.reach import Leg, ReachableSet, reaches
from ctrans.dynamics.norm import RMSNorm
from ctrans.dynamics.sublayer import Sublayer
from ctrans.theory.random_models import describe_model, random_model, random_text
from ctrans.theory.random_norms import any_norm, describe_norm
from ctrans.theory.statement import Trial, Trials, at_most, equal, statement

SECTION = 4


@statement(
    "reach-of-segments",
    "ctrans, on Hopf-Lax",
    "behind output norms a token reaches X + sum_k h_k conv(V_k): the least <p, z> is <p, X> -"
    " sum_k h_k H_k(p), reached by the maximisers of all segments, and no outputs of norms do"
    " better",
    share=0.5,
)
def reach_of_segments(draw: Draw) -> Trials:
    """Two to four unlike norms of one width, against outputs of the norms themselves."""
    first = any_norm(draw)
    norms = [first]
    while len(norms) < 2 + draw.integer(3):
        other = any_norm(draw)
        if other.width == first.width:
            norms.append(other)
    legs = tuple(
        Leg(Sublayer(nn.Identity(), "ffn", output_norm=norm), draw.uniform(0.05, 2))
        for norm in norms
    )
    x = draw.normal(1, first.width)
    p = draw.normal(1, first.width)
    least = (p * x).sum(-1) - ReachableSet(legs).hamiltonian(p)
    ends = x
    for leg, norm in zip(legs, norms, strict=True):
        ends = ends + leg.length * norm(10 * draw.normal(20, first.width))
    case = f"{describe_norm(first)} and {len(norms) - 1} more"
    return [
        equal((p * ReachableSet(legs).extreme(x, p)).sum(-1), least, f"{case}: <p, z*>"),
        Trial(
            float((least - (p * ends).sum(-1)).amax() / (p.norm() * ends.norm(dim=-1).amax())),
            f"{case}: norms' outputs below the least <p, z>, as a share",
        ),
    ]


@statement(
    "optimality-gap",
    "ctrans, on the verification theorem",
    "peri, output: with the norms' gains and the ends fixed no weights of the maps have a loss"
    " below Phi(X_0, 0), and no velocities that the maximum principle chooses",
    share=0.05,
)
def optimality_gap(draw: Draw) -> Trials:
    """The value of one model against the loss of another with the same norms and ends, and against
    the end of an optimal trajectory.
    """
    model = random_model(draw, draw.choice(["peri", "output"]), depth=1 + draw.integer(2))
    tokens = random_text(draw)
    targets = random_text(draw)
    proven = least_loss(model, tokens, targets, sweeps=1).proven[0]
    assert proven is not None, "a GPT's head is convex behind its norm"
    best = optimal_trajectory(model, tokens, targets)
    size = draw.log_uniform(-1, 1)
    for sublayer in model.depth.sublayers:
        for parameter in sublayer.field.parameters():
            parameter.copy_(size * draw.normal(*parameter.shape))
    _, loss = model(tokens, targets)
    case = describe_model(model)
    return [
        at_most(proven, loss, f"{case}: Phi(X_0, 0) against the loss of other weights"),
        at_most(proven, best.loss, f"{case}: Phi(X_0, 0) against the optimal trajectory"),
    ]


@statement(
    "optimal-sweeps",
    "ctrans, on Li et al. (2018)",
    "peri, output: relaxed sweeps of the maximum principle, from the model's own velocities on,"
    " never raise the loss, and end near Phi(X_0, 0), that a search over states finds",
    0.05,
    0.02,
)
def optimal_sweeps(draw: Draw) -> Trials:
    """Both are searches of a loss that is not convex. Equal to 5% and 0.5 millinats here."""
    model = random_model(draw, draw.choice(["peri", "output"]), depth=1 + draw.integer(2))
    tokens = random_text(draw)
    targets = random_text(draw)
    value = least_loss(model, tokens, targets)
    best = optimal_trajectory(model, tokens, targets)
    rises = [after - before for before, after in pairwise(best.history)]
    case = describe_model(model)
    return [
        equal(
            max(best.loss, 1e-2), max(value.found[0], 1e-2), f"{case}: the loss after the sweeps"
        ),
        Trial(max(rises, default=0.0) / best.history[0], f"{case}: the largest rise of a sweep"),
    ]


@statement(
    "free-value-is-flat",
    "ctrans, on Kan, theorem 2",
    "none, pre: Phi(X_k, t_k) is the same number for every k before the end, whatever the state; of"
    " two classes behind RMSNorm it is log(1 + exp(-sqrt(d) |gamma * w| - <beta, w>)), w the"
    " difference of their rows",
    1e-6,
    0.1,
)
def free_value(draw: Draw) -> Trials:
    """Random models of two tokens."""
    model = random_model(draw, draw.choice(["none", "pre"]), norm="rmsnorm", vocab_size=2)
    tokens = torch.zeros(1, 3, dtype=torch.int64)
    value = least_loss(model, tokens, tokens)
    weight = model.head_weight()
    norm = model.final_norm
    assert isinstance(norm, RMSNorm), "the model was made with it"
    gap = norm.gamma * (weight[0] - weight[1])
    drift = float(norm.beta @ (weight[0] - weight[1]))
    least = math.log1p(math.exp(-math.sqrt(norm.width) * float(gap.norm()) - drift))
    case = describe_model(model)
    return [
        equal(
            torch.tensor(value.found[:-1]),
            torch.full((len(value.found) - 1,), value.found[0]),
            f"{case}: at all states before the last",
        ),
        Trial(
            abs(value.found[0] - least) / max(least, 1e-3),
            f"{case}: {value.found[0]:.6g} against {least:.6g}",
        ),
    ]


@statement(
    "convex-head",
    "ctrans",
    "behind a final norm the cross-entropy is convex in x_hat: its least over the cap of directions"
    " within arcsin(r/|c|) of c bounds the loss of all states within r of c from below",
    share=0.1,
)
def cap_bound(draw: Draw) -> Trials:
    """What is proven for a ball, against random states of it; and what is proven for the states
    within reach, against the model's own loss.
    """
    model = random_model(draw, "peri", depth=1)
    tokens, targets = random_text(draw, batch=1, length=2), random_text(draw, batch=1, length=2)
    head = convex_head(model, cross_entropies(targets))
    centre = draw.log_uniform(-1, 1) * draw.normal(1, 2, model.config.width)
    radius = float(draw.log_uniform(-2, 1) * centre.norm(dim=-1).min())
    proven = head.proven(centre, radius, centre)
    steps = draw.normal(50, 2, model.config.width)
    states = centre + radius * steps / steps.norm(dim=-1, keepdim=True)
    losses = _losses(model.head(states), targets)
    whole, reached = reaches(model.depth)[0].ball(model.embed(tokens))
    lower = head.proven(whole, reached, whole).sum()
    _, loss = model(tokens, targets)
    case = f"{describe_model(model)}, r/|c| = {radius / float(centre.norm(dim=-1).min()):.2g}"
    return [
        Trial(
            float((proven - losses).amax() / losses.amax()),
            f"{case}: losses of a ball's states below what is proven, as a share",
        ),
        at_most(lower, loss, f"{case}: the model's own loss"),
        _is_least(head, case, model.config.width),
    ]


def _losses(logits: Tensor, targets: Tensor) -> Tensor:
    """What each token adds to the mean cross-entropy of two."""
    terms = F.cross_entropy(
        logits.flatten(0, -2), targets.expand(len(logits), 2).flatten(), reduction="none"
    )
    return terms.reshape(-1, 2) / 2


def _is_least(head: ConvexHead, case: str, width: int) -> Trial:
    """Over all directions the bound is reached to the tolerance of its search, if it is reached on
    the sphere: by the state where the search ends.
    """
    anywhere = torch.ones(1, 2, width, dtype=torch.float64)
    lower = head.proven(anywhere, math.inf, anywhere).sum()
    return at_most(lower, head.losses(torch.zeros_like(anywhere)).sum(), f"{case}: at n = 0")
