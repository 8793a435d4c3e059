"""Theory, section 4: the Hamiltonian as a support function. What corrects the papers is shown to fail as printed, and to hold."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import nnls

from ctrans.control import (
    Ellipsoid,
    EllipsoidSlice,
    FrobeniusBall,
    KineticCost,
    LastMapDecay,
    TangentSpace,
    WholeSpace,
    admissible_set,
    certify,
    ellipsoid_value,
)
from ctrans.control.certificate import climb_weights
from ctrans.control.last_map import Features
from ctrans.norm import NORMS
from tests.helpers import learned


def numbers(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def make(name, width, eps=0.0, scale=0.3):
    return learned(NORMS[name](width, eps).double(), scale).requires_grad_(False)


def best_weights(norm, P, h):
    """What an ascent over weights finds through the norm, against the closed form."""
    image = admissible_set(norm, "peri")
    return climb_weights(image.chart(P), Features(h), float(image.support(P)), 2, torch.Generator().manual_seed(0))


def features(tokens, count, rank, seed=1):
    return numbers(tokens, rank, seed=seed) @ numbers(rank, count, seed=seed + 1)


both = pytest.mark.parametrize("name", sorted(NORMS))


# --- the table, row by row


def test_none_and_pre_have_an_infinite_hamiltonian_off_zero():
    """Theorem 2: along -R P/|P| the value R |P| has no bound, with exponent 1 in R."""
    P, space = numbers(4, 6), WholeSpace()
    assert float(space.support(P)) == math.inf
    for radius in (1.0, 1e3, 1e6):
        assert math.isclose(-float((P * space.witness(P, radius)).sum()), radius * float(P.norm()), rel_tol=1e-12)
    assert abs(certify(space, P, features=numbers(4, 8, seed=2)).growth.exponent - 1) < 0.01


@both
def test_post_has_an_infinite_hamiltonian_unless_p_is_normal_to_the_image(name):
    norm, X = make(name, 6), numbers(4, 6, seed=3)
    space = TangentSpace(norm, norm(X))
    assert float(space.support(numbers(4, 6))) == math.inf
    normal = norm.coordinates(norm(X)) / norm.gamma
    assert float(space.support(normal)) == 0
    assert float((normal * norm.tangent(norm(X), numbers(4, 6))).sum(-1).abs().max()) < 1e-13


@both
def test_finiteness_under_post_is_about_ps_orthogonal_projection_not_its_tangent_part(name):
    """Corrected: the tangent part Gamma(q - u(u.q)/(u.u)), q = C Gamma^-1 P, is an oblique projection and decides nothing.

    It vanishes at P = gamma * u, where H is infinite, and does not at P = u/gamma, where H = 0.
    """
    norm = make(name, 6)
    X = norm(numbers(4, 6, seed=3))
    u = norm.coordinates(X)
    space = TangentSpace(norm, X)
    assert float(norm.tangent(X, norm.gamma * u).abs().max()) < 1e-13
    assert float(space.support(norm.gamma * u)) == math.inf
    assert float(norm.tangent(X, u / norm.gamma).abs().max()) > 0.1
    assert float(space.support(u / norm.gamma)) == 0


@given(width=st.integers(1, 12), tokens=st.integers(1, 4), seed=st.integers(0, 10**6), size=st.floats(1e-3, 1e3))
@settings(max_examples=60)
def test_rmsnorms_value_and_maximiser_are_kans(width, tokens, seed, size):
    """Eq. 99: sum_j sqrt(d) |gamma * p_j|, attained at -sqrt(d) gamma^2 p_j/|gamma * p_j|."""
    norm, P = make("rmsnorm", width), size * numbers(tokens, width, seed=seed)
    scaled = norm.gamma * P
    H = math.sqrt(width) * scaled.norm(dim=-1).sum()
    f = -math.sqrt(width) * norm.gamma * scaled / scaled.norm(dim=-1, keepdim=True)
    image = Ellipsoid(norm)
    assert torch.allclose(image.support(P), H, rtol=1e-13)
    assert torch.allclose(image.maximizer(P), f, rtol=1e-12)
    assert torch.allclose(-(P * f).sum(), H, rtol=1e-12)
    assert float(image.residual(f)) < 1e-12


@given(width=st.integers(2, 12), tokens=st.integers(1, 4), seed=st.integers(0, 10**6))
@settings(max_examples=60)
def test_layernorms_value_is_attained_on_its_slice(width, tokens, seed):
    norm, P = make("layernorm", width), numbers(tokens, width, seed=seed)
    scaled = norm.gamma * P
    w = scaled - scaled.mean(-1, keepdim=True)
    H = math.sqrt(width) * w.norm(dim=-1).sum() - (P @ norm.beta).sum()
    f = norm.beta - math.sqrt(width) * norm.gamma * w / w.norm(dim=-1, keepdim=True)
    image = EllipsoidSlice(norm)
    assert torch.allclose(image.support(P), H, rtol=1e-12)
    assert torch.allclose(image.maximizer(P), f, rtol=1e-9, atol=1e-9)
    assert torch.allclose(-(P * f).sum(), H, rtol=1e-12, atol=1e-12)
    assert float(image.residual(f)) < 1e-12


def test_with_a_kinetic_cost_the_whole_space_has_the_value_of_optimal_transport():
    P = numbers(4, 6)
    kinetic = KineticCost(WholeSpace(), 0.3)
    assert math.isclose(float(kinetic.support(P)), float(P.square().sum()) / 0.6, rel_tol=1e-13)
    assert torch.allclose(kinetic.maximizer(P), -P / 0.3)


@both
@pytest.mark.parametrize("placement", ["none", "pre", "peri", "output", "post", "pre_post", "deepnorm"])
def test_with_a_kinetic_cost_every_placement_is_well_posed(name, placement):
    norm, P = make(name, 6, eps=1e-5), numbers(4, 6)
    state = norm(numbers(4, 6, seed=3)) if placement in ("post", "pre_post", "deepnorm") else None
    admissible = admissible_set(norm, placement, state=state, kinetic=0.3)
    H, f = admissible.support(P), admissible.maximizer(P)
    assert math.isfinite(float(H))
    assert math.isclose(float(H), float(-(P * f).sum() - 0.15 * f.square().sum()), rel_tol=1e-12)
    assert certify(admissible, P).agrees


def test_a_ball_of_the_last_weights_has_a_value_proportional_to_its_radius():
    """New: R |h'P|, attained at W* = -R P'h/|h'P|."""
    h, P = numbers(4, 8, seed=2), numbers(4, 6)
    for radius in (0.1, 1.0, 100.0):
        ball = FrobeniusBall(h, radius)
        assert math.isclose(float(ball.support(P)), radius * float((h.mT @ P).norm()), rel_tol=1e-13)
        assert torch.allclose(ball.weights(P), -radius * P.mT @ h / (h.mT @ P).norm())
        certificate = certify(ball, P)
        assert abs(certificate.velocities.gap) < 1e-12
        assert certificate.kkt < 1e-12


def test_weight_decay_on_the_last_weights_has_a_finite_value():
    """New: |h'P|^2/(2 lam), attained at W* = -P'h/lam."""
    h, P = numbers(4, 8, seed=2), numbers(4, 6)
    decay = LastMapDecay(h, 0.3)
    assert math.isclose(float(decay.support(P)), float((h.mT @ P).square().sum()) / 0.6, rel_tol=1e-13)
    assert torch.allclose(decay.weights(P), -P.mT @ h / 0.3)
    assert abs(certify(decay, P).velocities.gap) < 1e-12


# --- Kan's ellipsoid value for LayerNorm


@given(width=st.integers(2, 16), seed=st.integers(0, 10**6), scale=st.floats(0, 0.8))
@settings(max_examples=100)
def test_the_printed_value_exceeds_what_layernorm_attains(width, seed, scale):
    norm, P = make("layernorm", width, scale=scale), numbers(3, width, seed=seed)
    bound, H = float(ellipsoid_value(norm, P)), float(EllipsoidSlice(norm).support(P))
    assert bound >= H - 1e-12 * abs(H)
    blind = (norm.gamma * P).sum(-1).abs().max() / math.sqrt(width)
    assert bound - H > 1e-4 * float(blind) ** 2


def test_the_printed_maximiser_is_not_in_layernorms_image():
    """Seed, eq. 99 for LayerNorm: its velocity is off the slice, and no input of the module comes near its value."""
    norm, P = make("layernorm", 8, eps=1e-5), numbers(4, 8)
    scaled = norm.gamma * P
    printed = norm.beta - math.sqrt(8) * norm.gamma * scaled / scaled.norm(dim=-1, keepdim=True)
    assert math.isclose(-float((P * printed).sum()), float(ellipsoid_value(norm, P)), rel_tol=1e-12)
    assert float(EllipsoidSlice(norm).residual(printed)) > 0.1
    certificate = certify(EllipsoidSlice(norm), P)
    assert abs(certificate.velocities.gap) < 1e-8
    assert certificate.velocities.best < 0.98 * float(ellipsoid_value(norm, P))


@given(width=st.integers(2, 16), seed=st.integers(0, 10**6))
@settings(max_examples=60)
def test_the_printed_value_is_exact_where_gamma_p_is_centred(width, seed):
    norm, P = make("layernorm", width), numbers(3, width, seed=seed)
    centred = norm.centre(norm.gamma * P) / norm.gamma
    assert torch.allclose(ellipsoid_value(norm, centred), EllipsoidSlice(norm).support(centred), rtol=1e-11)


# --- uniqueness


def test_kans_unique_maximiser_is_one_of_many_where_gamma_p_vanishes():
    """Seed: "the unique optimal solution", eq. 99. At p_j = 0 it is 0/0, and every point of the ellipsoid attains H."""
    norm = make("rmsnorm", 6)
    P = numbers(3, 6)
    P[1] = 0
    image = Ellipsoid(norm)
    scaled = norm.gamma * P
    assert bool((-math.sqrt(6) * norm.gamma * scaled / scaled.norm(dim=-1, keepdim=True)).isnan().any())
    best = image.maximizer(P)
    for seed in range(5):
        other = best.clone()
        other[1] = norm(numbers(6, seed=seed))
        assert float(image.residual(other)) < 1e-12
        assert math.isclose(-float((P * other).sum()), float(image.support(P)), rel_tol=1e-13)


def test_layernorm_has_many_maximisers_where_gamma_p_is_constant_though_not_zero():
    norm = make("layernorm", 6)
    P = (2 / norm.gamma).expand(3, 6)
    image = EllipsoidSlice(norm)
    assert bool(image.ties(P).all())
    values = [-float((P * norm(numbers(3, 6, seed=seed))).sum()) for seed in range(20)]
    assert max(values) - min(values) < 1e-12
    assert math.isclose(values[0], float(image.support(P)), rel_tol=1e-12)


@both
@given(seed=st.integers(0, 10**6))
@settings(max_examples=25)
def test_elsewhere_the_maximiser_is_unique(name, seed):
    """H - value is |w| |du|^2/(2 sqrt d) at distance |du| from the maximiser on the sphere: positive everywhere else."""
    norm, P = make(name, 6), numbers(1, 6, seed=seed)
    image = admissible_set(norm, "peri")
    w = norm.centre(norm.gamma * P)
    other = norm(numbers(50, 1, 6, seed=seed + 1))
    apart = (norm.coordinates(other) - norm.coordinates(image.maximizer(P))).square().sum((-2, -1))
    lost = image.support(P) + (P * other).sum((-2, -1))
    assert torch.allclose(lost, float(w.norm()) * apart / (2 * math.sqrt(6)), rtol=1e-9, atol=1e-12)


# --- what weights can do


@both
@pytest.mark.parametrize(("tokens", "width", "count"), [(8, 12, 20), (8, 12, 8), (12, 5, 30)])
def test_features_of_full_rank_let_weights_attain_the_closed_form(name, tokens, width, count):
    """New: rank(h) = n."""
    norm, P = make(name, width, eps=1e-5), numbers(tokens, width)
    found = best_weights(norm, P, numbers(tokens, count, seed=2))
    assert found.rank == tokens
    assert abs(found.gap) < 1e-8


def equations(norm, P, h):
    """The matrix of s -> (I - hh^+) diag(s) U, U with the maximiser's rows u_j: weights with norm(h W') the maximiser exist where
    it has a zero s > 0, W' = h^+ diag(s) U, because a norm takes the length s_j off the row s_j u_j."""
    U = norm.coordinates(admissible_set(norm, "peri").maximizer(P))
    missed = torch.eye(len(P), dtype=P.dtype) - h @ torch.linalg.pinv(h)
    return U, torch.stack([torch.outer(missed[:, j], U[j]).flatten() for j in range(len(P))], -1)


@both
@pytest.mark.parametrize("rank", [2, 5, 7])
def test_fewer_features_keep_weights_strictly_below_the_closed_form(name, rank):
    """(n - rank)(d - 1) >= n here, so that almost surely only s = 0 solves the equations."""
    norm, P, h = make(name, 12, eps=1e-5), numbers(8, 12), features(8, 20, rank)
    assert float(torch.linalg.svdvals(equations(norm, P, h)[1])[-1]) > 1e-2
    assert best_weights(norm, P, h).gap > 1e-4


@both
def test_in_a_narrow_layer_fewer_features_than_tokens_can_attain_the_closed_form(name):
    """Corrected: rank(h) < n alone does not make the supremum smaller. Here n = 16, d = 3, rank 15, and weights attain it."""
    norm, P, h = make(name, 3), numbers(16, 3), features(16, 20, 15)
    image = admissible_set(norm, "peri")
    assert int(torch.linalg.matrix_rank(h)) == 15
    U, matrix = equations(norm, P, h)
    longer, error = nnls(matrix.numpy(), -matrix.sum(-1).numpy())  # s = 1 + longer
    assert error < 1e-12
    W = (torch.linalg.pinv(h) @ ((1 + torch.tensor(longer)).unsqueeze(-1) * U)).mT
    assert math.isclose(-float((P * norm(h @ W.mT)).sum()), float(image.support(P)), rel_tol=1e-12)


@given(
    name=st.sampled_from(sorted(NORMS)),
    width=st.integers(2, 8),
    tokens=st.integers(1, 6),
    count=st.integers(1, 8),
    eps=st.sampled_from([0.0, 1e-5, 1e-1]),
    size=st.floats(-6, 6),
    flat=st.integers(0, 2),
    seed=st.integers(0, 10**6),
)
@settings(max_examples=1000)
def test_an_output_norm_saturates_at_the_closed_form_and_never_exceeds_it(name, width, tokens, count, eps, size, flat, seed):
    """Any weights, any gains with zeros and negative ones; and the best weights approach the value as they grow."""
    norm = make(name, width, eps, scale=1.0)
    norm.weight[:flat] = 0
    image, P = admissible_set(norm, "peri"), numbers(tokens, width, seed=seed)
    H, rounding = float(image.support(P)), 1e-12 * float((P.norm(dim=-1) * image.maximizer(P).norm(dim=-1)).sum())
    h = numbers(tokens, count, seed=seed + 1)
    W = 10**size * numbers(width, count, seed=seed + 2)
    assert -float((P * norm(h @ W.mT)).sum()) <= H + rounding
    if count >= tokens and not bool(image.ties(P).any()):
        best = torch.linalg.pinv(h) @ -norm.centre(norm.gamma * P)
        values = [-float((P * norm(h @ (10**power * best))).sum()) for power in (0, 3, 6)]
        assert values[0] <= values[1] + rounding
        assert values[1] <= values[2] + rounding <= H + 2 * rounding
        assert H - values[2] < 1e-6 * (abs(H) + rounding)


# --- sampling


def test_sampling_falls_short_in_high_dimension_where_ascent_is_exact():
    """At d = 16, a hundred thousand samples of the image miss a tenth of the value."""
    norm, P = make("layernorm", 16, eps=1e-5), numbers(1, 16)
    image = EllipsoidSlice(norm)
    H = float(image.support(P) + (P @ norm.beta).sum())
    sampled = float((-(P * (norm(numbers(100_000, 16, seed=1)) - norm.beta)).sum(-1)).max())
    assert sampled < 0.95 * H
    assert abs(certify(image, P).velocities.gap) < 1e-8
