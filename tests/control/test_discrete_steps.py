"""The discrete model's Hamiltonian: bounded behind a norm around the state, for every dt, where the
ODE's is not.
"""

import pytest
import torch
import torch.nn.functional as F
from scipy.optimize import minimize

from ctrans.control import KineticCost, StepImage, TangentSpace, admissible_set, certify
from ctrans.control.costate import costate
from ctrans.control.last_map import last_features
from ctrans.control.model_check import check_model
from ctrans.control.regularization import Regularization
from ctrans.dynamics.norm import NORMS
from ctrans.dynamics.placement import PLACEMENTS
from tests.cases import PAPERS
from tests.helpers import learned, small_model, tokens

TOKENS, WIDTH = 5, 6
every = pytest.mark.parametrize("name", PAPERS)
every_dt = pytest.mark.parametrize("dt", [1.0, 0.1, 0.01])
AROUND = [name for name, placement in PLACEMENTS.items() if placement.state_norm]


def numbers(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def make(name, eps=1e-5):
    return learned(NORMS[name](WIDTH, eps).double(), 0.2).requires_grad_(False)


def step_set(name, dt, eps=1e-5, state=None):
    norm = make(name, eps)
    return StepImage(
        admissible_set(norm, "peri"), numbers(TOKENS, WIDTH, seed=5) if state is None else state, dt
    )


@pytest.mark.cases(1)
@every
@every_dt
def test_the_step_saturates_at_the_images_value(name, dt):
    """The best weights found by scipy through N(X + dt h W') against sum_j sqrt(d)|C(gamma p_j)| -
    <p_j, beta>.
    """
    norm, X, P, h = (
        make(name),
        numbers(TOKENS, WIDTH, seed=5),
        numbers(TOKENS, WIDTH),
        numbers(TOKENS, 7, seed=1),
    )

    def loss(values):
        W = torch.from_numpy(values).reshape(WIDTH, 7).requires_grad_()  # in units of 1/dt
        value = (P * norm(X + dt * h @ (W / dt).mT)).sum()
        (slope,) = torch.autograd.grad(value, W)
        return float(value.detach()), slope.flatten().numpy()

    starts = [numbers(WIDTH * 7, seed=seed).numpy() * 30 for seed in range(3)]
    best = max(
        -minimize(loss, start, jac=True, method="L-BFGS-B", options={"maxiter": 3000}).fun
        for start in starts
    )
    next_state = float(norm.support(-P).sum())
    assert best == pytest.approx(next_state, rel=1e-4)
    H = float(step_set(name, dt).support(P))
    assert pytest.approx((next_state + float((P * X).sum())) / dt, rel=1e-12) == H
    certificate = certify(step_set(name, dt), P, features=h)
    assert certificate.agrees, certificate.findings
    assert certificate.verdict == "well-posed for bounded gains"
    assert abs(certificate.growth.exponent) < 1e-2
    assert certificate.gained.exponent == pytest.approx(1, abs=1e-2)


@every
def test_as_dt_goes_to_zero_the_steps_value_is_the_odes(name):
    """+inf at almost every P; 0 at P whose lowest image point is X. At X's other critical P the ODE
    says 0 and the step does not.
    """
    norm = make(name, eps=0.0)
    X = norm(numbers(TOKENS, WIDTH, seed=3))
    values = [
        float(step_set(name, dt, 0.0, X).support(numbers(TOKENS, WIDTH))) for dt in (1, 1e-2, 1e-4)
    ]
    assert values[1] == pytest.approx(100 * values[0])
    assert values[2] == pytest.approx(1e4 * values[0])
    normal = norm.coordinates(X) / norm.gamma
    ode = TangentSpace(norm, X)
    assert float(ode.support(-normal)) == float(ode.support(normal)) == 0
    lowest = float(step_set(name, 1e-4, 0.0, X).support(-normal))
    highest = float(step_set(name, 1e-4, 0.0, X).support(normal))
    assert abs(lowest) < 1e-9 * highest
    assert highest == pytest.approx(2 * TOKENS * WIDTH * 1e4)


@every
@every_dt
def test_a_kinetic_cost_on_a_step_is_certified(name, dt):
    filled = admissible_set(make(name), "peri", kinetic=1.0).velocities
    certificate = certify(
        KineticCost(StepImage(filled, numbers(TOKENS, WIDTH, seed=5), dt), 0.3),
        numbers(TOKENS, WIDTH),
    )
    assert certificate.agrees, certificate.findings


@pytest.mark.slow
@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("norm", PAPERS)
def test_a_model_has_both_verdicts_side_by_side(placement, norm):
    model, text = small_model(placement, depth=1, norm=norm), tokens(1, 9)
    check = check_model(model, text[:, :-1], text[:, 1:], thorough=True)
    assert check.agrees, check.failures
    around, behind = PLACEMENTS[placement].state_norm, PLACEMENTS[placement].output_norm
    assert check.verdict == ("well-posed for bounded gains" if behind else "degenerate")
    assert check.step_verdict == (
        "well-posed for bounded gains" if behind or around else "degenerate"
    )
    assert (check.step_evidence is not None) == around
    assert all((segment.step is not None) == around for segment in check.segments)


@pytest.mark.slow
@pytest.mark.parametrize("placement", AROUND)
def test_a_step_is_certified_at_its_own_state_costate_and_features(placement):
    """The model's step is one of the allowed ones: -<P_{k+1}, X_{k+1} - X_k>/dt <= H, and the
    features make it.
    """
    model, text = small_model(placement, depth=1), tokens(1, 9)
    check, found = (
        check_model(model, text[:, :-1], text[:, 1:], thorough=True),
        costate(model, text[:, :-1], text[:, 1:]),
    )
    for k, (segment, sublayer) in enumerate(
        zip(check.segments, model.depth.sublayers, strict=True)
    ):
        X, after, P = found.states[k], found.states[k + 1], found.costates[k + 1]
        made = -float((P * (after - X)).sum()) / model.depth.dt
        assert made <= segment.step.hamiltonian
        last = sublayer.field.output_projection
        W = torch.cat([last.weight, last.bias.unsqueeze(-1)], -1)
        torch.testing.assert_close(
            sublayer.state_norm(X + model.depth.dt * last_features(sublayer, X) @ W.mT), after
        )


@pytest.mark.slow
def test_a_gain_behind_an_output_norm_scales_h():
    """check_segment against brute force through the sublayer's own forward, whose velocities are g
    N(raw).
    """
    model, text = small_model("peri", depth=1), tokens(1, 9)
    plain = check_model(model, text[:, :-1], text[:, 1:], thorough=True)
    for sublayer in model.depth.sublayers:
        sublayer.gain = 0.25
    found = costate(model, text[:, :-1], text[:, 1:], form="continuous")
    scaled = check_model(model, text[:, :-1], text[:, 1:], thorough=True)
    for segment, sublayer, (_, p) in zip(
        scaled.segments, model.depth.sublayers, found.starts, strict=True
    ):
        norm, best = sublayer.output_norm, sublayer.gain * sublayer.output_norm.maximizer(-p)
        assert segment.certificate.hamiltonian == pytest.approx(-float((p * best).sum()), rel=1e-12)
        x = numbers(2000, norm.width)
        sampled = 0.25 * F.layer_norm(x, x.shape[-1:], norm.gamma, norm.beta)
        assert (
            -float((p.flatten(0, -2) @ sampled.mT).amin(-1).sum())
            <= segment.certificate.hamiltonian
        )
    assert scaled.agrees, scaled.failures
    assert scaled.segments[0].certificate.words.startswith("0.25 f")
    assert plain.segments[0].certificate.words.startswith("f_j")


@pytest.mark.slow
def test_a_gain_behind_an_output_norm_and_a_kinetic_cost_go_together():
    """sup over u of -<P, g f> - lam/2 |g f|^2: the cost is of the velocity g f."""
    model, text = small_model("peri", depth=1), tokens(1, 9)
    for sublayer in model.depth.sublayers:
        sublayer.gain = 0.25
    found = costate(model, text[:, :-1], text[:, 1:], form="continuous")
    check = check_model(
        model, text[:, :-1], text[:, 1:], Regularization(kinetic=0.5), thorough=True
    )
    assert check.agrees, check.failures
    for segment, sublayer, (_, p) in zip(
        check.segments, model.depth.sublayers, found.starts, strict=True
    ):
        P = p.flatten(0, -2)
        norm, u = sublayer.output_norm, torch.zeros_like(P)
        for _ in range(20_000):
            v = 0.25 * (norm.beta + norm.gamma * u)
            u = norm.centre(u - 2 * 0.25 * norm.gamma * (P + 0.5 * v))
            u = u / (u.square().mean(-1, keepdim=True).sqrt()).clamp_min(1)
        v = 0.25 * (norm.beta + norm.gamma * u)
        best = -float((P * v).sum() + 0.25 * v.square().sum())
        assert best == pytest.approx(segment.certificate.hamiltonian, rel=1e-9)
