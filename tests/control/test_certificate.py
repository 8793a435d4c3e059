import dataclasses
import json
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ctrans.control import (
    EllipsoidSlice,
    FrobeniusBall,
    KineticCost,
    TangentSpace,
    admissible_set,
    certify,
    ellipsoid_value,
)
from ctrans.control.ascent import Chart, ascend
from ctrans.control.evidence import VelocityAscent, WeightAscent, climb_weights, exponent
from ctrans.control.last_map import Features
from ctrans.dynamics.norm import NORMS
from ctrans.dynamics.placement import PLACEMENTS
from solvers import ConfigError
from tests.cases import PAPERS
from tests.helpers import learned

TOKENS, WIDTH, FEATURES = 8, 12, 20


def numbers(*shape, seed=0, dtype=torch.float64):
    return torch.randn(
        *shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    ).to(dtype)


def costate(tokens=TOKENS, width=WIDTH, seed=0, dtype=torch.float64):
    """Tokens that weigh very differently, as they do in a text."""
    return numbers(tokens, width, seed=seed, dtype=dtype) * torch.logspace(
        -2, 1, tokens, dtype=dtype
    ).unsqueeze(-1)


def make(name, width=WIDTH, eps=1e-5, dtype=torch.float64):
    return learned(
        NORMS[name](width, eps).to(dtype), 0.2
    )  # parameters that require gradients, as a model's do


def admit(name, placement, P, **remedy):
    norm = make(name, P.shape[-1], dtype=P.dtype)
    state = (
        norm(numbers(*P.shape, seed=4, dtype=P.dtype)).detach()
        if PLACEMENTS[placement].state_norm
        else None
    )
    return admissible_set(norm, placement, state=state, **remedy)


every = pytest.mark.parametrize("name", PAPERS)
every_placement = pytest.mark.parametrize("placement", sorted(PLACEMENTS))


@pytest.mark.cases(2)
@every
@every_placement
def test_the_evidence_agrees_with_the_verdict_in_every_placement(name, placement):
    P = costate()
    certificate = certify(admit(name, placement, P), P, features=numbers(TOKENS, FEATURES, seed=1))
    assert certificate.agrees, certificate.findings
    if PLACEMENTS[placement].output_norm:
        assert certificate.verdict == "well-posed for bounded gains"
        assert abs(certificate.velocities.gap) < 1e-10
        assert abs(certificate.weights.gap) < 1e-8
        assert certificate.kkt < 1e-14
        assert certificate.velocities.uniqueness < 1e-6
        assert certificate.growth.values[-1] == pytest.approx(certificate.hamiltonian, rel=1e-6)
        assert max(certificate.growth.values) <= certificate.hamiltonian * (1 + 1e-13)
        assert abs(certificate.growth.exponent) < 1e-5
    else:
        assert certificate.verdict == "degenerate"
        assert certificate.hamiltonian == math.inf
        assert abs(certificate.growth.exponent - 1) < 1e-8
        assert abs(certificate.witness.exponent - 1) < 1e-12
        assert certificate.velocities is None


@pytest.mark.cases(1)
@every
@every_placement
def test_a_kinetic_cost_is_certified_in_every_placement(name, placement):
    P = costate()
    certificate = certify(
        admit(name, placement, P, kinetic=0.5), P, features=numbers(TOKENS, FEATURES, seed=1)
    )
    assert certificate.agrees, certificate.findings
    assert certificate.velocities.gap < 1e-9
    assert certificate.kkt < 1e-12


@pytest.mark.parametrize(
    "remedy", [{"radius": 2.0}, {"last_map_decay": 0.3}, {"radius": 2.0, "kinetic": 0.1}]
)
def test_bounds_and_costs_on_the_weights_are_certified(remedy):
    P = costate()
    certificate = certify(
        admissible_set(None, "pre", features=numbers(TOKENS, FEATURES, seed=1), **remedy), P
    )
    assert certificate.agrees, certificate.findings
    assert abs(certificate.velocities.gap) < 1e-12
    assert certificate.growth is None


@pytest.mark.cases(1)
@every
def test_at_width_768_and_128_tokens_the_closed_form_is_certified_to_1e_8(name):
    P = costate(128, 768)
    admissible = admit(name, "peri", P)
    certificate = certify(admissible, P, pairs=1)
    assert abs(certificate.velocities.gap) < 1e-10
    assert certificate.kkt < 1e-13
    assert certificate.agrees, certificate.findings
    weights = climb_weights(
        admissible.chart(P),
        Features(numbers(128, 160, seed=1)),
        certificate.hamiltonian,
        1,
        torch.Generator().manual_seed(0),
    )
    assert weights.rank == weights.tokens == 128
    assert abs(weights.gap) < 1e-8


@pytest.mark.slow
def test_too_few_features_keep_the_weights_below_the_closed_form():
    P = costate()
    h = numbers(TOKENS, 4, seed=1) @ numbers(4, FEATURES, seed=2)
    certificate = certify(admit("layernorm", "output", P), P, features=h)
    assert certificate.weights.rank == 4
    assert certificate.weights.gap > 1e-3
    assert certificate.growth.values[-1] < certificate.hamiltonian * (1 - 1e-3)
    assert certificate.agrees, certificate.findings


@pytest.mark.cases(1)
@every
def test_growth_is_that_of_the_ball_in_the_weights(name):
    """For `pre` the best value within |W| <= R is R |h'P|, and for `post` R |h'A'P|, A the
    projection on the tangent space.
    """
    P, h = costate(), numbers(TOKENS, FEATURES, seed=1)
    free = certify(admit(name, "pre", P), P, features=h).growth
    for radius, value in zip(free.radii, free.values, strict=True):
        assert value == pytest.approx(float(FrobeniusBall(h, radius).support(P)), rel=1e-9)
    space = admit(name, "post", P)
    adjoint = torch.autograd.functional.vjp(lambda f: space.norm.tangent(space.state, f), P, P)[1]
    tangent = certify(space, P, features=h).growth
    for radius, value in zip(tangent.radii, tangent.values, strict=True):
        assert value == pytest.approx(float(FrobeniusBall(h, radius).support(adjoint)), rel=1e-9)


def test_without_features_a_degenerate_set_grows_in_a_bound_on_the_raw_output():
    P = costate()
    certificate = certify(admit("layernorm", "none", P), P)
    assert certificate.growth.values == pytest.approx(
        [radius * float(P.norm()) for radius in certificate.growth.radii]
    )
    assert certificate.witness.values == pytest.approx(
        [radius * float(P.norm()) for radius in certificate.witness.radii]
    )


def test_the_value_as_printed_for_layernorm_fails_its_certificate():
    class Printed(EllipsoidSlice):
        def support(self, P):
            return ellipsoid_value(self.norm, P)

    P, norm = costate(), make("layernorm")
    assert certify(EllipsoidSlice(norm), P).agrees
    failed = certify(Printed(norm), P)
    assert failed.velocities.gap > 1e-3
    assert not failed.agrees


def test_a_maximiser_that_is_not_one_fails_its_certificate():
    class Wrong(EllipsoidSlice):
        def maximizer(self, P):
            return super().maximizer(P.roll(1, 0))

    P = costate()
    assert not certify(Wrong(make("layernorm")), P).agrees


@pytest.fixture(scope="module")
def certificates():
    P, h = costate(), numbers(TOKENS, FEATURES, seed=1)
    return {
        placement: certify(admit("layernorm", placement, P), P, features=h)
        for placement in ("peri", "pre")
    }


@pytest.mark.cases(3)
@pytest.mark.parametrize(
    "change",
    [
        {"kkt": 1e-9},
        {"velocities": VelocityAscent(1.0, 1e-6, 0.0, 0.0, 5)},
        {"velocities": VelocityAscent(1.0, -1e-6, 0.0, 0.0, 5)},
        {"velocities": VelocityAscent(1.0, 0.0, 0.1, 0.0, 5)},
        {"weights": WeightAscent(1.0, 1e-6, 0.0, 8, 8, 5)},
        {"weights": WeightAscent(1.0, -1e-6, 0.0, 7, 8, 5)},
    ],
)
def test_each_piece_of_evidence_can_refute_a_well_posed_verdict(certificates, change):
    assert certificates["peri"].agrees
    assert not dataclasses.replace(certificates["peri"], **change).agrees


def test_growth_of_another_exponent_refutes_either_verdict(certificates):
    bounded, free = certificates["peri"], certificates["pre"]
    assert not dataclasses.replace(bounded, growth=free.growth).agrees
    assert not dataclasses.replace(free, growth=bounded.growth).agrees


def test_with_eps_the_inside_of_the_image_beats_its_edge_under_a_kinetic_cost():
    """The norm's own velocities refute the edge's value and confirm that of the filled image."""
    P, norm = 0.1 * costate(), make("layernorm")
    filled = admissible_set(norm, "peri", kinetic=5.0)
    edge = KineticCost(EllipsoidSlice(norm), 5.0)
    certificate = certify(filled, P)
    assert certificate.agrees, certificate.findings
    assert certificate.velocities.best > float(edge.support(P).detach()) + 1
    assert certify(KineticCost(EllipsoidSlice(make("layernorm", eps=0.0)), 5.0), P).agrees


@every
def test_tied_tokens_have_different_maximisers_and_the_others_one(name):
    P, norm = costate(), make(name)
    P[3] = 0
    certificate = certify(admissible_set(norm, "peri"), P)
    assert certificate.ties == 1
    assert certificate.velocities.tied > 0.5
    assert certificate.velocities.uniqueness < 1e-6
    assert certificate.agrees


@every_placement
def test_a_zero_costate_is_a_tie_everywhere_with_nothing_to_grow(placement):
    P = torch.zeros(TOKENS, WIDTH, dtype=torch.float64)
    certificate = certify(
        admit("layernorm", placement, P), P, features=numbers(TOKENS, FEATURES, seed=1)
    )
    assert certificate.ties == TOKENS
    assert certificate.hamiltonian == 0
    assert certificate.growth is None
    assert certificate.agrees, certificate.findings


def test_a_costate_along_layernorms_blind_direction_is_a_tie_that_rounding_does_not_climb():
    norm = make("layernorm")
    P = (0.1 / norm.gamma).detach().expand(TOKENS, WIDTH)
    certificate = certify(
        admissible_set(norm, "peri"), P, features=numbers(TOKENS, FEATURES, seed=1)
    )
    assert certificate.ties == TOKENS
    assert certificate.velocities.steps == 0
    assert certificate.agrees, certificate.findings


@pytest.mark.cases(1)
@every
@pytest.mark.parametrize("placement", ["peri", "post", "pre"])
def test_single_precision_certifies_to_its_own_accuracy(name, placement):
    P = costate(dtype=torch.float32)
    certificate = certify(
        admit(name, placement, P),
        P,
        features=numbers(TOKENS, FEATURES, seed=1, dtype=torch.float32),
    )
    assert certificate.agrees, certificate.findings


@pytest.mark.slow
def test_a_certificate_is_plain_numbers_and_the_same_for_the_same_seed():
    P, h = costate(4, 5), numbers(4, 6, seed=1)
    first, second, other = (
        certify(admit("layernorm", "peri", P), P, features=h, seed=seed) for seed in (3, 3, 4)
    )
    assert (
        json.loads(json.dumps(dataclasses.asdict(first)))["velocities"]["gap"]
        == first.velocities.gap
    )
    assert first == second
    assert first.velocities != other.velocities


def test_features_of_another_text_are_refused():
    P = costate()
    with torch.no_grad(), pytest.raises(ConfigError, match="tokens 9, the admissible set 8"):
        certify(admit("layernorm", "peri", P), P, features=numbers(TOKENS + 1, FEATURES))


# --- the ascent itself


@pytest.mark.slow
@given(seed=st.integers(0, 10**6))
@settings(max_examples=25)
def test_ascent_solves_each_concave_quadratic_by_itself(seed):
    root = numbers(3, 5, 5, seed=seed)
    A = root @ root.mT + 0.1 * torch.eye(5, dtype=torch.float64)
    b = numbers(3, 5, seed=seed + 1) * torch.tensor([[0.1], [1.0], [10.0]], dtype=torch.float64)

    def payoff(z):
        return (b * z).sum(-1) - (z.unsqueeze(-2) @ A @ z.unsqueeze(-1))[..., 0, 0] / 2

    found = ascend(payoff, numbers(3, 5, seed=seed + 2), (-1,))
    solution = torch.linalg.solve(A, b.unsqueeze(-1)).squeeze(-1)
    assert torch.allclose(found.best, (b * solution).sum(-1) / 2, rtol=1e-10)
    assert torch.allclose(payoff(found.z), found.best, rtol=1e-12)


def test_ascent_stays_where_projection_allows_and_finds_the_edge():
    target = torch.tensor([3.0, 4.0], dtype=torch.float64)

    def project(z):
        return z / z.norm(dim=-1, keepdim=True).clamp_min(1)

    for payoff in (lambda z: (target * z).sum(-1), lambda z: -(z - target).square().sum(-1)):
        found = ascend(payoff, numbers(4, 2), (-1,), project)
        assert torch.allclose(found.z, (target / 5).expand(4, 2), atol=1e-7)


def test_ascent_at_a_maximum_takes_no_step():
    assert ascend(lambda z: -z.square().sum(-1), torch.zeros(2, 3), (-1,)).steps == 0


def test_a_chart_pays_minus_the_product_with_the_costate_less_the_cost():
    P = costate()
    chart = Chart(P, P.shape, lambda z: 2 * z, degree=1, cost=lambda z, f: f.square().sum(-1))
    z = numbers(TOKENS, WIDTH, seed=5)
    assert torch.allclose(chart.payoff(z), -2 * (P * z).sum(-1) - 4 * z.square().sum(-1))


@pytest.mark.parametrize("k", [0.0, 0.5, 1.0, 2.0])
def test_the_exponent_is_read_off_the_largest_radii(k):
    radii = torch.logspace(-2, 2, 8, dtype=torch.float64)
    values = 3 * radii**k
    values[:4] = 1.0
    assert exponent(radii, values) == pytest.approx(k, abs=1e-12)
    assert exponent(radii, 0 * values) == 0


def test_a_tangent_space_of_dimension_zero_is_certified_as_well_posed():
    norm = make("layernorm", 2)
    P = numbers(3, 2)
    certificate = certify(TangentSpace(norm, norm(numbers(3, 2, seed=1)).detach()), P)
    assert certificate.verdict == "well-posed"
    assert certificate.agrees, certificate.findings
