import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ctrans.control import (
    Ellipsoid,
    EllipsoidHull,
    EllipsoidSlice,
    FrobeniusBall,
    KineticCost,
    LastMapDecay,
    TangentSpace,
    WholeSpace,
    admissible_set,
    ellipsoid_value,
)
from ctrans.control.trust_region import in_ball, on_sphere
from ctrans.dynamics.norm import NORMS, LayerNorm, RMSNorm
from ctrans.dynamics.placement import PLACEMENTS
from solvers import ConfigError
from tests.cases import PAPERS
from tests.helpers import learned

TOKENS, WIDTH, FEATURES = 4, 6, 7
DEVICES = ["cpu"] + (["cuda"] if torch.cuda.is_available() else [])


def numbers(*shape, seed=0, dtype=torch.float64):
    return torch.randn(
        *shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    ).to(dtype)


def make(name, width=WIDTH, eps=1e-5, dtype=torch.float64, gains=None):
    norm = learned(NORMS[name](width, eps).to(dtype), 0.3)
    if gains is not None:
        with torch.no_grad():
            norm.weight.copy_(torch.tensor(gains))
    return norm.requires_grad_(False)


def tangent(name, dtype=torch.float64, device="cpu"):
    norm = make(name, dtype=dtype).to(device)
    return TangentSpace(norm, norm(numbers(TOKENS, WIDTH, seed=5, dtype=dtype).to(device)))


def features(dtype=torch.float64, device="cpu", rank=FEATURES):
    return (numbers(TOKENS, rank, seed=6) @ numbers(rank, FEATURES, seed=7)).to(device, dtype)


def kinetic_energy(f, W):
    return 0.35 * (f * f).sum()


# every well-posed set, with its running cost written out a second time
WELL_POSED = {
    "ellipsoid": (lambda t, d: Ellipsoid(make("rmsnorm", dtype=t).to(d)), lambda f, W: 0),
    "slice": (lambda t, d: EllipsoidSlice(make("layernorm", dtype=t).to(d)), lambda f, W: 0),
    "filled": (lambda t, d: EllipsoidHull(make("layernorm", dtype=t).to(d)), lambda f, W: 0),
    "ball": (lambda t, d: FrobeniusBall(features(t, d), 2.5), lambda f, W: 0),
    "thin ball": (lambda t, d: FrobeniusBall(features(t, d, rank=2), 2.5), lambda f, W: 0),
    "weight decay": (
        lambda t, d: LastMapDecay(features(t, d), 0.7),
        lambda f, W: 0.35 * (W * W).sum(),
    ),
    "kinetic space": (lambda t, d: KineticCost(WholeSpace(), 0.7), kinetic_energy),
    "kinetic tangent": (lambda t, d: KineticCost(tangent("layernorm", t, d), 0.7), kinetic_energy),
    "kinetic ellipsoid": (
        lambda t, d: KineticCost(Ellipsoid(make("rmsnorm", dtype=t).to(d)), 0.7),
        kinetic_energy,
    ),
    "kinetic slice": (
        lambda t, d: KineticCost(EllipsoidSlice(make("layernorm", dtype=t).to(d)), 0.7),
        kinetic_energy,
    ),
    "kinetic filled": (
        lambda t, d: KineticCost(EllipsoidHull(make("layernorm", dtype=t).to(d)), 0.7),
        kinetic_energy,
    ),
    "kinetic ball": (
        lambda t, d: KineticCost(FrobeniusBall(features(t, d), 0.3), 0.7),
        kinetic_energy,
    ),
    "kinetic wide ball": (
        lambda t, d: KineticCost(FrobeniusBall(features(t, d), 30), 0.7),
        kinetic_energy,
    ),
}
well_posed = pytest.mark.parametrize("name", sorted(WELL_POSED))


def build(name, dtype=torch.float64, device="cpu"):
    return WELL_POSED[name][0](dtype, device)


def objective(name, P, f):
    """-<P, f> - cost(f), from the definition; the weights are the shortest that give f."""
    W = torch.linalg.pinv(features()) @ f
    return -(P * f).sum() - WELL_POSED[name][1](f, W)


@well_posed
def test_the_maximiser_is_admissible_attains_h_and_satisfies_kkt(name):
    admissible, P = build(name), numbers(TOKENS, WIDTH)
    f, H = admissible.maximizer(P), admissible.support(P)
    assert admissible.verdict != "degenerate"
    assert float(admissible.residual(f)) < 1e-12
    assert float(admissible.kkt(P, f)) < 1e-12
    assert torch.allclose(objective(name, P, f), H, rtol=1e-12, atol=1e-12)
    assert not bool(admissible.ties(P).any())


@pytest.mark.cases(10)
@well_posed
@given(seed=st.integers(0, 10**6))
@settings(max_examples=30)
def test_no_velocity_made_by_the_model_has_more_than_h(name, seed):
    admissible, P = build(name), numbers(TOKENS, WIDTH, seed=seed)
    chart = admissible.chart(P)
    z = chart.project(chart.spread * numbers(20, *chart.shape, seed=seed + 1))
    if chart.axes == (-1,):  # also from next to the maximiser, where the supremum is close
        z = torch.cat([z, chart.project(admissible.maximizer(P) + 0.1 * z)])
    payoffs = chart.payoff(z).reshape(len(z), -1).sum(-1)
    assert bool((payoffs <= admissible.support(P) + 1e-10).all())


@well_posed
def test_kkt_and_feasibility_tell_other_velocities_apart(name):
    admissible, P = build(name), numbers(TOKENS, WIDTH)
    other = admissible.maximizer(numbers(TOKENS, WIDTH, seed=9))
    assert float(admissible.kkt(P, other)) > 1e-2
    best = admissible.maximizer(P)
    off = best + 0.1 * numbers(TOKENS, WIDTH, seed=10)
    share = float((off - best).norm() / best.norm())  # of a large maximiser it is small
    assert float(admissible.kkt(P, off)) > min(1e-3, share / 2)


@well_posed
def test_the_gradient_of_h_is_minus_the_maximiser(name):
    admissible, P = build(name), numbers(TOKENS, WIDTH).requires_grad_()
    (gradient,) = torch.autograd.grad(admissible.support(P), P)
    assert torch.allclose(gradient, -admissible.maximizer(P), rtol=1e-11, atol=1e-11)
    assert torch.autograd.gradcheck(admissible.support, P, fast_mode=True)
    assert torch.autograd.gradcheck(admissible.maximizer, P, fast_mode=True)


@well_posed
def test_h_is_convex(name):
    admissible, P, Q = build(name), numbers(TOKENS, WIDTH), numbers(TOKENS, WIDTH, seed=3)
    middle = admissible.support((P + Q) / 2)
    assert float(middle) < float((admissible.support(P) + admissible.support(Q)) / 2)


@well_posed
def test_a_batch_is_its_elements_one_by_one(name):
    admissible, P = build(name), numbers(2, 3, TOKENS, WIDTH)
    rows = P.flatten(0, 1)
    for method in (admissible.support, admissible.maximizer, admissible.ties):
        expected = torch.stack([method(row) for row in rows]).unflatten(0, (2, 3))
        assert torch.allclose(method(P).double(), expected.double(), atol=1e-12)
    f = admissible.maximizer(P) + 0.1
    residuals = torch.stack([admissible.residual(row) for row in f.flatten(0, 1)])
    assert torch.allclose(admissible.residual(f).flatten(), residuals)
    assert admissible.kkt(P, f).shape == (2, 3)


@well_posed
@pytest.mark.parametrize("device", DEVICES)
def test_single_precision_and_the_device_are_kept(name, device):
    single, P = (
        build(name, torch.float32, device),
        numbers(TOKENS, WIDTH, dtype=torch.float32).to(device),
    )
    H, f = single.support(P), single.maximizer(P)
    assert H.dtype == f.dtype == torch.float32
    assert H.device.type == f.device.type == device
    assert torch.allclose(
        H.cpu().double(), build(name).support(P.cpu().double()), rtol=1e-4, atol=1e-4
    )
    assert float(single.kkt(P, f)) < 1e-4


@well_posed
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_costate_that_is_not_finite_is_refused(name, bad):
    P = numbers(TOKENS, WIDTH)
    P[1, 2] = bad
    for method in (build(name).support, build(name).maximizer, build(name).ties):
        with pytest.raises(ConfigError, match="not finite"):
            method(P)


# --- images of norms


@pytest.mark.cases(1)
@pytest.mark.parametrize(("name", "width"), [("rmsnorm", 2), ("layernorm", 3)])
@given(
    gains=st.lists(st.sampled_from([0.0, -1.3, -0.5, 0.4, 1.0, 2.0]), min_size=3, max_size=3),
    kinetic=st.sampled_from([None, 0.01, 0.5, 20.0]),
    filled=st.booleans(),
    seed=st.integers(0, 10**6),
)
@settings(max_examples=40)
def test_images_that_are_curves_or_discs_match_a_dense_search(
    name, width, gains, kinetic, filled, seed
):
    """d = 2 (RMSNorm) and d = 3 (LayerNorm): u runs over a circle, or with eps over a disc, in the
    range of C.
    """
    norm = make(name, width, gains=gains[:width])
    image = (Ellipsoid if name == "rmsnorm" else EllipsoidSlice)(norm)
    velocities = EllipsoidHull(norm) if filled else image
    admissible = velocities if kinetic is None else KineticCost(velocities, kinetic)
    P = numbers(1, width, seed=seed)
    plane = torch.linalg.svd(norm.centre(torch.eye(width, dtype=torch.float64))).U[:, :2]
    angles = torch.linspace(0, 2 * math.pi, 4001, dtype=torch.float64)
    lengths = (
        torch.linspace(0, 1, 101, dtype=torch.float64)
        if filled
        else torch.ones(1, dtype=torch.float64)
    )
    circle = math.sqrt(width) * torch.stack([angles.cos(), angles.sin()], -1) @ plane.mT
    f = norm.beta + norm.gamma * (lengths[:, None, None] * circle)
    values = -(f @ P[0]) - (kinetic or 0) / 2 * f.square().sum(-1)
    assert float(values.max()) <= float(admissible.support(P)) + 1e-10
    short = float(admissible.support(P)) - float(values.max())
    assert short < (1e-2 if filled else 5e-4) * (1 + (kinetic or 0))
    assert float(admissible.residual(admissible.maximizer(P))) < 1e-10


@given(
    sign=st.lists(st.sampled_from([-1.0, 1.0]), min_size=WIDTH, max_size=WIDTH),
    seed=st.integers(0, 1000),
)
@settings(max_examples=25)
def test_a_negative_gain_mirrors_the_ellipsoid_onto_itself(sign, seed):
    norm, P = make("rmsnorm"), numbers(TOKENS, WIDTH, seed=seed)
    mirrored = make("rmsnorm", gains=(norm.gamma * torch.tensor(sign)).tolist())
    assert torch.allclose(Ellipsoid(norm).support(P), Ellipsoid(mirrored).support(P))
    assert torch.allclose(Ellipsoid(norm).maximizer(P), Ellipsoid(mirrored).maximizer(P))
    assert torch.allclose(
        KineticCost(Ellipsoid(norm), 0.5).support(P),
        KineticCost(Ellipsoid(mirrored), 0.5).support(P),
    )


@pytest.mark.parametrize("name", PAPERS)
def test_zero_gains_keep_the_velocity_at_beta_there(name):
    norm = make(name, gains=[0.0, 0.0, 1.0, -0.5, 2.0, 0.3])
    P = numbers(TOKENS, WIDTH)
    for kinetic in (None, 0.01, 100.0):
        admissible = admissible_set(norm, "peri", kinetic=kinetic)
        f = admissible.maximizer(P)
        assert torch.equal(f[:, :2], norm.beta[:2].expand(TOKENS, 2))
        assert float(admissible.kkt(P, f)) < 1e-12
        assert not bool(admissible.ties(P).any())


def test_a_gain_of_zero_everywhere_leaves_one_velocity():
    norm, P = make("layernorm", gains=[0.0] * WIDTH), numbers(TOKENS, WIDTH)
    for kinetic in (None, 2.0):
        f = admissible_set(norm, "output", kinetic=kinetic).maximizer(P)
        assert torch.equal(f, norm.beta.expand_as(P))


@pytest.mark.parametrize("name", PAPERS)
def test_a_zero_costate_row_ties_and_follows_the_stated_rule(name):
    norm, P = make(name), numbers(TOKENS, WIDTH)
    P[1] = 0
    image = admissible_set(norm, "peri")
    assert image.ties(P).tolist() == [False, True, False, False]
    u = math.sqrt(WIDTH / 2) * torch.tensor([1.0, -1, 0, 0, 0, 0], dtype=torch.float64)
    assert torch.allclose(image.maximizer(P)[1], norm.beta + norm.gamma * u)
    assert torch.allclose(image.support(P), image.support(P[[0, 2, 3]]))
    assert bool(torch.isfinite(torch.autograd.grad(image.support(P.requires_grad_()), P)[0]).all())


def test_zero_costate_with_an_offset_has_h_zero_and_a_tie_everywhere():
    image, P = EllipsoidSlice(make("layernorm")), torch.zeros(TOKENS, WIDTH, dtype=torch.float64)
    assert float(image.support(P)) == 0
    assert bool(image.ties(P).all())
    assert float(image.kkt(P, image.maximizer(P))) < 1e-15


@given(size=st.floats(1e-6, 1e6), seed=st.integers(0, 1000))
@settings(max_examples=40)
def test_layernorm_ties_where_only_the_centred_part_vanishes(size, seed):
    norm = make("layernorm")
    P = numbers(TOKENS, WIDTH, seed=seed)
    P[2] = size / norm.gamma
    image = EllipsoidSlice(norm)
    assert image.ties(P).tolist() == [False, False, True, False]
    assert float(image.residual(image.maximizer(P))) < 1e-12
    assert math.isclose(
        float(image.support(P[2:3])), -float(P[2] @ norm.beta), rel_tol=1e-12, abs_tol=1e-12 * size
    )
    assert not bool(Ellipsoid(make("rmsnorm", gains=norm.gamma.tolist())).ties(P).any())


def test_next_to_a_tie_the_maximiser_stays_on_the_slice():
    norm = make("layernorm")
    P = (1 + 1e-13 * numbers(TOKENS, WIDTH)) / norm.gamma
    image = EllipsoidSlice(norm)
    assert not bool(image.ties(P).any())
    assert float(image.residual(image.maximizer(P))) < 1e-13


# --- the nearest point: trust-region problems


@given(
    curvature=st.lists(st.sampled_from([0.0, 0.1, 0.1, 0.5, 1.0, 3.0]), min_size=5, max_size=5),
    radius=st.floats(0.1, 10),
    scale=st.sampled_from([1e-3, 1.0, 1e3]),
    seed=st.integers(0, 10**6),
)
@settings(max_examples=100)
def test_the_secular_equation_finds_the_global_minimum_on_a_sphere(curvature, radius, scale, seed):
    """Oracle: mu is the largest real root of det((A + mu)^2 - bb'/r^2), an eigenvalue (Gander,
    Golub, von Matt 1989).
    """
    a, b = np.array(curvature), scale * numbers(5, seed=seed).numpy()
    companion = np.block([[-np.diag(a), np.outer(b, b) / radius**2], [np.eye(5), -np.diag(a)]])
    eigenvalues = np.linalg.eigvals(companion)
    mu = eigenvalues[np.abs(eigenvalues.imag) < 1e-6 * np.abs(eigenvalues).max()].real.max()
    expected = -b / (a + mu)
    s, hard = on_sphere(torch.tensor(a), torch.tensor(b), radius)
    assert not bool(hard)
    assert np.allclose(s.numpy(), expected, rtol=1e-5, atol=1e-5 * radius)
    assert math.isclose(float(s.norm()), radius, rel_tol=1e-12)


def test_the_hard_case_fills_the_flattest_direction_with_plus():
    curvature = torch.tensor([2.0, 1.0, 1.0, 3.0], dtype=torch.float64)
    b = torch.tensor([1.0, 0.0, 0.0, -2.0], dtype=torch.float64)
    s, hard = on_sphere(curvature, b, 5.0)
    assert bool(hard)
    assert torch.allclose(
        s, torch.tensor([-1.0, math.sqrt(25 - 1 - 1), 0.0, 1.0], dtype=torch.float64)
    )
    s, hard = on_sphere(curvature, b, 1.0)
    assert not bool(hard)
    assert torch.allclose(s[1:3], torch.zeros(2, dtype=torch.float64))


def test_an_almost_hard_case_is_solved_with_the_sign_that_b_asks_for():
    curvature = torch.tensor([2.0, 1.0], dtype=torch.float64)
    for tiny in (1e-6, 1e-10, 1e-14):
        s, _ = on_sphere(curvature, torch.tensor([1.0, tiny], dtype=torch.float64), 5.0)
        assert torch.allclose(
            s, torch.tensor([-1.0, -math.sqrt(24)], dtype=torch.float64), atol=1e-4
        )


@given(radius=st.floats(0.01, 100), seed=st.integers(0, 10**6))
@settings(max_examples=50)
def test_the_minimum_in_a_ball_is_the_free_one_or_lies_on_the_sphere(radius, seed):
    curvature = numbers(5, seed=seed).square()
    b = numbers(3, 5, seed=seed + 1)
    free = -b / curvature
    s = in_ball(curvature, b, radius)
    inside = free.norm(dim=-1) <= radius
    sphere, _ = on_sphere(curvature, b, radius)
    assert torch.allclose(s, torch.where(inside.unsqueeze(-1), free, sphere), rtol=1e-9, atol=1e-9)


@given(seed=st.integers(0, 2**31))
@settings(max_examples=50)
def test_points_of_the_sphere_are_their_own_nearest_in_the_ball(seed):
    """Their multiplier is 0, which Newton's steps reach to rounding only."""
    curvature = numbers(3, seed=seed).square() + 0.1
    s = numbers(200, 3, seed=seed + 1)
    s = 1.5 * s / s.norm(dim=-1, keepdim=True)
    assert torch.allclose(in_ball(curvature, -curvature * s, 1.5), s, rtol=0, atol=1e-12)


def test_an_isotropic_image_has_its_closed_form_nearest_point():
    norm = make("layernorm", gains=[0.7] * WIDTH)
    y = numbers(TOKENS, WIDTH)
    w = norm.centre(y - norm.beta)
    on_it = norm.beta + 0.7 * math.sqrt(WIDTH) * w / w.norm(dim=-1, keepdim=True)
    assert torch.allclose(EllipsoidSlice(norm).nearest(y), on_it, atol=1e-13)
    inside = norm.beta + w * (0.7 * math.sqrt(WIDTH) / w.norm(dim=-1, keepdim=True)).clamp_max(1)
    assert torch.allclose(EllipsoidHull(norm).nearest(y), inside, atol=1e-13)


@pytest.mark.parametrize("name", PAPERS)
def test_the_centre_of_an_image_is_equidistant_from_two_of_its_points_but_inside_when_filled(name):
    norm = make(name)
    image = admissible_set(norm, "peri")
    y = norm.beta.expand(TOKENS, WIDTH)
    P = -0.5 * y
    shell, filled = KineticCost(image, 0.5), admissible_set(norm, "peri", kinetic=0.5)
    assert bool(shell.ties(P).all())
    opposite = 2 * y - image.nearest(y)
    assert torch.allclose(opposite - y, y - image.nearest(y))
    assert float(shell.kkt(P, opposite)) < 1e-12
    assert not bool(filled.ties(P).any())
    assert torch.allclose(filled.maximizer(P), y, atol=1e-12)


@pytest.mark.slow
def test_the_nearest_weights_in_a_ball_match_projected_gradient():
    h, y, radius = features(), numbers(TOKENS, WIDTH, seed=2), 0.5
    W = torch.zeros(WIDTH, FEATURES, dtype=torch.float64)
    step = 1 / torch.linalg.matrix_norm(h, 2).square()
    for _ in range(20000):
        W = W - step * (h @ W.mT - y).mT @ h
        W = W * (radius / W.norm()).clamp_max(1)
    assert torch.allclose(FrobeniusBall(h, radius).nearest(y), h @ W.mT, atol=1e-9)


# --- linear spaces


@pytest.mark.parametrize("name", PAPERS)
def test_the_tangent_space_is_the_range_of_the_norms_jacobian(name):
    norm, x = make(name, eps=0.0), numbers(TOKENS, WIDTH, seed=5)
    space, y = TangentSpace(norm, norm(x)), numbers(TOKENS, WIDTH)
    J = norm.jacobian(x)
    projector = J @ torch.linalg.pinv(J, rtol=1e-10)
    assert torch.allclose(space.nearest(y), (projector @ y.unsqueeze(-1)).squeeze(-1), atol=1e-10)
    v = norm.tangent(space.state, y)
    assert float(space.residual(v)) < 1e-13
    assert float(space.residual(y)) > 0.1


@pytest.mark.parametrize("name", PAPERS)
def test_h_over_tangents_is_finite_exactly_where_the_projections_adjoint_vanishes(name):
    space, P = tangent(name), numbers(TOKENS, WIDTH)
    normals = space._normals
    along = (normals @ numbers(TOKENS, normals.shape[-1], 1, seed=8)).squeeze(-1)
    adjoint = torch.autograd.functional.vjp(lambda f: space.norm.tangent(space.state, f), P, along)[
        1
    ]
    assert float(adjoint.abs().max()) < 1e-13
    assert float(space.support(along)) == 0
    assert float(space.support(P)) == math.inf
    assert torch.equal(space.maximizer(along), torch.zeros_like(P))
    mixed = torch.where(torch.arange(TOKENS)[:, None] == 1, P, along)
    assert space.ties(mixed).tolist() == [True, False, True, True]
    assert float(space.support(mixed)) == math.inf


def test_the_whole_space_has_h_zero_at_zero_only():
    space, P = WholeSpace(), torch.zeros(2, TOKENS, WIDTH, dtype=torch.float64)
    P[1, 0, 0] = 1e-300
    assert space.support(P).tolist() == [0, math.inf]
    assert space.verdict == "degenerate"


@pytest.mark.parametrize(
    "space",
    [WholeSpace(), tangent("layernorm"), tangent("rmsnorm")],
    ids=["whole", "slice", "ellipsoid"],
)
def test_witnesses_are_admissible_of_norm_r_and_steepest(space):
    P = numbers(2, TOKENS, WIDTH)
    f = space.witness(P, 7.0)
    assert torch.allclose(f.norm(dim=(-2, -1)), torch.full((2,), 7.0, dtype=torch.float64))
    assert float(space.residual(f).max()) < 1e-13
    gains = -(P * f).sum((-2, -1))
    others = space.nearest(numbers(500, TOKENS, WIDTH, seed=3))
    others = 7 * others / others.norm(dim=(-2, -1), keepdim=True)
    assert float(-(P[0] * others).sum((-2, -1)).max() - gains[0]) < 0
    with pytest.raises(ConfigError, match="witness"):
        space.maximizer(P)


def test_a_tangent_space_of_dimension_zero_is_no_degenerate_problem():
    norm = make("layernorm", width=2)
    space = TangentSpace(norm, norm(numbers(3, 2)))
    assert space.verdict == "well-posed"
    assert float(space.support(numbers(3, 2, seed=1))) == 0


@pytest.mark.parametrize(
    ("state", "message"),
    [
        (numbers(TOKENS, WIDTH), "4 tokens"),
        (torch.full((TOKENS, WIDTH), math.nan).double(), "state has entries .* not finite"),
    ],
)
def test_a_state_off_the_norms_image_has_no_tangent_space(state, message):
    with pytest.raises(ConfigError, match=message):
        TangentSpace(make("layernorm"), state)


def test_a_state_that_a_norm_with_eps_made_has_a_tangent_space():
    norm = make("layernorm", eps=0.1)
    assert TangentSpace(norm, norm(numbers(TOKENS, WIDTH))).verdict == "degenerate"


# --- last linear maps


@given(seed=st.integers(0, 10**6), radius=st.floats(1e-3, 1e3))
@settings(max_examples=30)
def test_weights_in_a_ball_reach_h_and_no_more(seed, radius):
    h, P = features(), numbers(TOKENS, WIDTH, seed=seed)
    ball = FrobeniusBall(h, radius)
    W = ball.weights(P)
    assert math.isclose(float(W.norm()), radius, rel_tol=1e-12)
    assert math.isclose(-float((P * (h @ W.mT)).sum()), float(ball.support(P)), rel_tol=1e-12)
    others = numbers(100, WIDTH, FEATURES, seed=seed)
    others = radius * others / others.norm(dim=(-2, -1), keepdim=True)
    assert float(-(P * (h @ others.mT)).sum((-2, -1)).max()) < float(ball.support(P))


def test_features_orthogonal_to_the_costate_tie_with_the_rule_zero():
    h = features(rank=2)
    P = numbers(TOKENS, WIDTH)
    P = P - h @ torch.linalg.pinv(h) @ P
    ball = FrobeniusBall(h, 3.0)
    assert bool(ball.ties(P).all())
    assert float(ball.support(P)) < 1e-12
    assert torch.equal(ball.maximizer(P), torch.zeros_like(P))


def test_features_that_vanish_leave_the_velocity_zero():
    P = numbers(TOKENS, WIDTH)
    h = torch.zeros(TOKENS, FEATURES, dtype=torch.float64)
    for admissible in (FrobeniusBall(h, 1.0), LastMapDecay(h, 1.0)):
        assert float(admissible.support(P)) == 0
        assert torch.equal(admissible.maximizer(P), torch.zeros_like(P))
        assert float(admissible.residual(P)) == 1


def test_a_velocity_outside_the_ball_or_the_features_range_is_recognised():
    ball = FrobeniusBall(features(rank=2), 2.0)
    f = ball.maximizer(numbers(TOKENS, WIDTH))
    assert math.isclose(float(ball.residual(1.5 * f)), 0.5, rel_tol=1e-10)
    assert float(ball.residual(numbers(TOKENS, WIDTH))) > 0.1
    assert float(ball.residual(0.5 * f)) < 1e-13


def test_weight_decay_is_a_soft_radius():
    """Both maximisers are the same at the radius that weight decay chooses, R = |h'P|/lam."""
    h, P = features(), numbers(TOKENS, WIDTH)
    decay = LastMapDecay(h, 0.3)
    radius = float(decay.weights(P).norm())
    assert torch.allclose(FrobeniusBall(h, radius).maximizer(P), decay.maximizer(P))
    assert math.isclose(
        float(decay.support(P)), float(FrobeniusBall(h, radius).support(P)) / 2, rel_tol=1e-12
    )


# --- which set a placement has

EXPECTED = {
    "none": (WholeSpace, "degenerate"),
    "pre": (WholeSpace, "degenerate"),
    "peri": (EllipsoidSlice, "well-posed for bounded gains"),
    "output": (EllipsoidSlice, "well-posed for bounded gains"),
    "post": (TangentSpace, "degenerate"),
    "pre_post": (TangentSpace, "degenerate"),
    "deepnorm": (TangentSpace, "degenerate"),
}


@pytest.mark.parametrize("placement", sorted(PLACEMENTS))
def test_each_placement_has_its_set_and_verdict_and_a_kinetic_cost_makes_it_well_posed(placement):
    norm, P = make("layernorm"), numbers(TOKENS, WIDTH)
    state = norm(P) if PLACEMENTS[placement].state_norm else None
    admissible = admissible_set(norm, placement, state=state)
    assert (type(admissible), admissible.verdict) == EXPECTED[placement]
    assert (float(admissible.support(P)) == math.inf) == (admissible.verdict == "degenerate")
    remedied = admissible_set(norm, PLACEMENTS[placement], state=state, kinetic=0.5)
    assert remedied.verdict == "well-posed"
    assert math.isfinite(float(remedied.support(P)))
    assert "0.5/2 |f|^2" in remedied.words


def test_rmsnorm_gives_the_whole_ellipsoid():
    assert type(admissible_set(make("rmsnorm"), "peri")) is Ellipsoid


@pytest.mark.parametrize("placement", ["none", "pre"])
def test_bounds_on_the_last_linear_map_make_a_free_placement_well_posed(placement):
    h, P = features(), numbers(TOKENS, WIDTH)
    ball, decay = (
        admissible_set(None, placement, features=h, **bound)
        for bound in ({"radius": 2.0}, {"last_map_decay": 2.0})
    )
    assert torch.equal(ball.support(P), FrobeniusBall(h, 2.0).support(P))
    assert torch.equal(decay.support(P), LastMapDecay(h, 2.0).support(P))
    both = admissible_set(None, placement, features=h, radius=2.0, kinetic=1.0)
    assert both.words == "f = h W', |W|_F <= 2; running cost 1/2 |f|^2"


@pytest.mark.parametrize(
    ("placement", "options", "message"),
    [
        ("peri", {}, "'peri' needs norm, its output norm"),
        ("post", {"state": numbers(TOKENS, WIDTH)}, "'post' needs norm, its state norm"),
        ("post", {"norm": make("layernorm")}, "'post' needs state"),
        (
            "pre",
            {"state": numbers(TOKENS, WIDTH)},
            "'pre' allows the same velocities at every state",
        ),
        ("pre", {"radius": 1.0}, "'pre' needs features"),
        ("pre", {"last_map_decay": 1.0}, "'pre' needs features"),
        ("pre", {"features": features()}, "'pre' got features without a bound"),
        (
            "pre",
            {"features": features(), "radius": 1.0, "last_map_decay": 1.0},
            "'pre' got both radius and last_map_decay",
        ),
        (
            "pre",
            {"features": features(), "last_map_decay": 1.0, "kinetic": 1.0},
            "'pre' got two running costs",
        ),
        (
            "pre",
            {"features": features(), "radius": -1.0},
            "radius = -1.0: give a positive finite number",
        ),
        ("none", {"kinetic": math.nan}, "kinetic = nan"),
        (
            "output",
            {"norm": make("layernorm"), "features": features(), "radius": 1.0},
            "'output' has an output norm, which",
        ),
        (
            "deepnorm",
            {"norm": make("layernorm"), "state": numbers(1, 6), "last_map_decay": 1.0},
            "'deepnorm' .* last_map_decay out",
        ),
        ("perri", {}, "did you mean 'peri'"),
    ],
)
def test_contradictory_or_missing_options_are_refused_by_the_placements_name(
    placement, options, message
):
    with pytest.raises(ConfigError, match=message):
        admissible_set(options.pop("norm", None), placement, **options)


@pytest.mark.parametrize(
    ("P", "message"),
    [
        (numbers(TOKENS, WIDTH + 1), "width 7, the admissible set 6"),
        (
            numbers(TOKENS, WIDTH, dtype=torch.float32),
            "dtype torch.float32, the admissible set torch.float64",
        ),
        (numbers(WIDTH), "shape"),
        (torch.ones(TOKENS, WIDTH, dtype=torch.int64), "give floats"),
    ],
)
def test_a_costate_that_does_not_fit_is_refused(P, message):
    for admissible in (EllipsoidSlice(make("layernorm")), tangent("layernorm")):
        with pytest.raises(ConfigError, match=message):
            admissible.check(P)


def test_sets_refuse_the_other_kind_of_norm_and_a_norm_without_an_inside():
    with pytest.raises(ConfigError, match="EllipsoidSlice"):
        Ellipsoid(LayerNorm(WIDTH))
    with pytest.raises(ConfigError, match="use Ellipsoid"):
        EllipsoidSlice(RMSNorm(WIDTH))
    with pytest.raises(ConfigError, match="eps = 0"):
        EllipsoidHull(RMSNorm(WIDTH, 0.0))
    assert type(admissible_set(RMSNorm(WIDTH, 0.0), "peri", kinetic=1.0).velocities) is Ellipsoid


def test_the_value_as_printed_is_h_for_rmsnorm():
    norm, P = make("rmsnorm"), numbers(2, TOKENS, WIDTH)
    assert torch.allclose(ellipsoid_value(norm, P), Ellipsoid(norm).support(P), rtol=1e-14)
