"""The least loss within reach against closed forms, brute force and other algorithms."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scipy.optimize import minimize, minimize_scalar

from ctrans.control.convex_head import convex_head
from ctrans.control.hjb.hopf_lax import hopf_lax, velocity_hull
from ctrans.control.least_loss import PROVEN, cross_entropies, least_loss
from ctrans.control.reach import Leg, ReachableSet, reaches
from ctrans.dynamics.norm import NORMS
from ctrans.dynamics.placement import PLACEMENTS
from ctrans.dynamics.sublayer import Sublayer
from ctrans.interop.losses import ModelWithLoss
from solvers import ConfigError
from tests.helpers import learned, small_model, tokens

TARGETS = tokens(seed=5)


def numbers(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("norm", ["layernorm", "rmsnorm", "dyt", "group_rmsnorm"])
def test_a_linear_loss_has_the_hamiltonians_closed_form(norm):
    """For L = <p, X_T> the value is <p, X_k> - sum of h H(p) over the segments that are left."""
    model = small_model("peri", norm=norm)
    p = numbers(2, 8, 16, seed=3)
    linear = ModelWithLoss(model, lambda logits, _: logits)
    linear.terminal_loss = lambda x, _: (p * x).sum() + 1000
    found = least_loss(linear, tokens(), None)
    x = model.embed(tokens())
    left = [
        h * sublayer.output_norm.support(-p).sum()
        for sublayer, h in zip(model.depth.sublayers, model.depth.lengths, strict=True)
    ]
    for k, value in enumerate(found.found):
        expected = (p * x).sum() - sum(left[k:]) + 1000
        # searches end at a gap of 1e-3 of the loss, and a linear one needs one sweep
        assert value == pytest.approx(float(expected), rel=1e-9)
        if k < len(left):
            x = list(model.depth.sublayers)[k].step(x, model.depth.lengths[k])
    assert found.by_token is None
    assert PROVEN in found.missing


def test_equal_segments_agree_with_hopf_lax():
    """Norms with equal gains: X + T V is one ball, which hopf_lax searches by other steps."""
    model = small_model("peri", depth=1, width=2, heads=1, norm="rmsnorm", scale=0.0)
    target = numbers(2, seed=4)
    x0 = model.embed(tokens())

    def terminal(x):
        return (x - target).square().sum(-1)

    quadratic = ModelWithLoss(model, None)
    quadratic.terminal_loss = lambda x, _: terminal(x).sum()
    hull = velocity_hull(next(iter(model.depth.sublayers)).output_norm)
    exact = hopf_lax(terminal, x0, model.depth.times[-1], hull).sum()
    found = least_loss(quadratic, tokens(), None)
    assert found.found[0] == pytest.approx(float(exact), rel=2e-3)
    assert found.found[0] >= float(exact) * (1 - 1e-9)


def test_unequal_segments_agree_with_scipy():
    """The sum of two ellipsoids of unlike gains, by SLSQP over both unit balls."""
    norms = [learned(NORMS["rmsnorm"](3, 0.0).double(), 0.5, seed=seed) for seed in (1, 2)]
    sublayers = [Sublayer(torch.nn.Identity(), "ffn", output_norm=norm) for norm in norms]
    lengths = (0.4, 0.7)
    legs = [Leg(sublayer, h) for sublayer, h in zip(sublayers, lengths, strict=True)]
    reach = ReachableSet(tuple(legs))
    x = numbers(1, 3, seed=7)
    P = numbers(1, 3, seed=8)
    axes = [h * 3**0.5 * norm.gamma.detach() for h, norm in zip(lengths, norms, strict=True)]
    centre = x + sum(h * norm.beta.detach() for h, norm in zip(lengths, norms, strict=True))

    def state(w):
        return centre + sum(
            torch.from_numpy(part) * axis for part, axis in zip((w[:3], w[3:]), axes, strict=True)
        )

    best = minimize(
        lambda w: float((P * state(w)).sum()),
        np.full(6, 0.1),
        method="SLSQP",
        constraints=[
            {"type": "ineq", "fun": lambda w: 1 - (w[:3] ** 2).sum()},
            {"type": "ineq", "fun": lambda w: 1 - (w[3:] ** 2).sum()},
        ],
    )
    assert float((P * reach.extreme(x, P)).sum().detach()) == pytest.approx(best.fun, rel=1e-6)


@pytest.mark.cases(3)
@pytest.mark.parametrize("placement", list(PLACEMENTS))
def test_the_value_never_falls_and_ends_at_the_models_loss(placement):
    model = small_model(placement, depth=2)
    value = least_loss(model, tokens(), TARGETS, sweeps=20)
    assert value.found[-1] == pytest.approx(float(model(tokens(), TARGETS)[1]), rel=1e-12)
    assert all(rise >= -1e-9 for rise in value.gaps)
    assert sum(value.gaps) == pytest.approx(value.found[-1] - value.found[0])
    for lower, found in zip(value.proven, value.found, strict=True):
        assert lower is None or lower <= found + 1e-9
    if not PLACEMENTS[placement].output_norm:
        # every state, or every state of an image, is within reach until the end
        assert value.found[:-1] == pytest.approx([value.found[0]] * (len(value.found) - 1))
        assert not any(value.bounded[:-1])


@pytest.mark.cases(1)
@pytest.mark.parametrize("placement", ["peri", "output"])
def test_other_weights_of_the_maps_stay_above_what_is_proven(placement):
    """The verification theorem: no weights of the maps lead below the value at X_0."""
    value = least_loss(small_model(placement, depth=1), tokens(), TARGETS)
    for seed in range(2):
        other = small_model(placement, depth=1)
        for sublayer in other.depth.sublayers:
            learned(sublayer.field, 1.0, seed=10 + seed)
        loss = float(other(tokens(), TARGETS)[1])
        assert loss >= value.proven[0]
        assert least_loss(other, tokens(), TARGETS).found[0] == pytest.approx(
            value.found[0], rel=5e-3
        )


def test_the_end_is_within_reach():
    """<P, z> is at least <P, X_0> - sum h H(P) for every P."""
    model = small_model("peri", depth=1)
    value = least_loss(model, tokens(), TARGETS, sweeps=20)
    reach = reaches(model.depth)[0]
    x = model.embed(tokens())
    for seed in range(20):
        P = numbers(2, 8, 16, seed=seed)
        least = (P * reach.extreme(x, P)).sum(-1)
        assert ((P * value.end).sum(-1) >= least - 1e-9).all()


def test_everywhere_is_the_least_of_all_states():
    """Orthonormal rows behind RMSNorm: the best x_hat is a e_y + b sum of the others, by scipy."""
    model = small_model("pre", norm="rmsnorm", vocab_size=16, scale=0.0)
    with torch.no_grad():
        model.unembedding = torch.nn.Linear(16, 16, bias=False).double().requires_grad_(False)
        model.unembedding.weight.copy_(torch.linalg.qr(numbers(16, 16))[0])
    text = tokens(vocabulary=16)

    def loss(angle):
        target = 4 * math.cos(angle)
        other = -4 * math.sin(angle) / math.sqrt(15)
        return math.log(math.exp(target) + 15 * math.exp(other)) - target

    least = minimize_scalar(loss, bounds=(0, 1.5), method="bounded", options={"xatol": 1e-10}).fun
    value = least_loss(model, text, text)
    assert value.found[0] == pytest.approx(least, rel=1e-5)
    assert value.proven[0] == pytest.approx(least, rel=2e-3)
    assert value.proven[0] <= least + 1e-12


@pytest.mark.parametrize("norm", ["rmsnorm", "layernorm"])
@pytest.mark.parametrize("radius", [0.3, 0.9, 3.0, math.inf])
def test_the_proof_from_below_against_all_directions(norm, radius):
    """A plane of directions: what is proven is the least over the convex hull of those that the
    ball's states have, found on a grid, and never above the loss of a state.
    """
    width = 3 if norm == "layernorm" else 2
    model = small_model("peri", norm=norm, width=width, heads=1, vocab_size=5, scale=0.3)
    text = tokens(1, 1, 5)
    head = convex_head(model, cross_entropies(text))
    centre = numbers(1, 1, width, seed=2)
    plane = torch.eye(width, dtype=torch.float64)
    if norm == "layernorm":
        plane = torch.linalg.svd(head.norm.centre(plane)).U[:, :2].mT
    angles = torch.linspace(0, 2 * math.pi, 2_001, dtype=torch.float64)
    circle = torch.stack([angles.cos(), angles.sin()], -1) @ plane
    size = min(radius, 1e6)
    states = head.norm.centre(centre[0]) + size * circle
    seen = head.norm.standardize(states) / math.sqrt(width)
    axis = head.norm.centre(centre[0, 0])
    axis = axis / axis.norm()
    grid = torch.linspace(0, 1, 101, dtype=torch.float64)[:, None, None] * circle
    hull = grid[(grid @ axis) >= (seen @ axis).min()]

    def losses(n):
        logits = F.linear(
            math.sqrt(width) * head.norm.gamma * n + head.norm.beta, model.head_weight()
        )
        return F.cross_entropy(logits, text[0].expand(len(n)), reduction="none")

    proven = float(head.proven(centre, radius, centre).sum())
    assert proven <= float(losses(seen).min()) + 1e-9
    assert proven == pytest.approx(float(losses(hull).min()), rel=5e-3)


def test_models_whose_reach_is_no_sum_are_refused():
    with pytest.raises(ConfigError, match="free velocities"):
        least_loss(small_model("peri", residual="hyper_connections"), tokens(), TARGETS)
    with pytest.raises(ConfigError, match="norm around the state"):
        least_loss(small_model("post*1+peri*2"), tokens(), TARGETS)


def test_pre_then_peri_is_flat_until_the_first_bounded_segment():
    value = least_loss(small_model("pre*1+peri*2"), tokens(), TARGETS, sweeps=5)
    assert value.bounded == (False, False, True, True, True, True, True)
    assert value.found[0] == pytest.approx(value.found[1])


def test_a_head_that_mixes_tokens_never_gives_more_than_the_models_loss():
    """The steps of tokens are then not independent: the end is evaluated as a whole."""
    model = small_model("peri", depth=1)
    head = model.head
    mixing = numbers(8, 8, seed=3)
    model.head = lambda x: mixing @ head(x)
    value = least_loss(model, tokens(), TARGETS, sweeps=20)
    logits = model.head(value.end)
    loss = F.cross_entropy(logits.flatten(0, -2), TARGETS.flatten())
    assert value.found[0] == pytest.approx(float(loss))
    assert value.found[0] <= value.found[-1]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_half_precision_proves_nothing(dtype):
    value = least_loss(small_model("peri", dtype, depth=1), tokens(), TARGETS, sweeps=3)
    if dtype == torch.float32:
        assert 0 < value.proven[0] <= value.found[0]
    else:
        assert value.proven[0] is None
        assert "two or three digits" in value.missing[PROVEN]


def test_sweeps_and_losses_that_make_no_sense_are_refused():
    with pytest.raises(ConfigError, match="sweeps = 0"):
        least_loss(small_model("peri", depth=1), tokens(), TARGETS, sweeps=0)
    model = small_model("peri", depth=1)
    model.final_norm.weight.fill_(math.nan)
    with pytest.raises(ConfigError, match="not finite"):
        least_loss(model, tokens(), TARGETS)
