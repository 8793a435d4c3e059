import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize

from ctrans.dynamics.norm import NORMS, LayerNorm, NormOptions, RMSNorm, SphereNorm, norm_settings
from solvers import ConfigError
from tests.cases import PAPERS
from tests.helpers import learned

WIDTH = 6


def make(name, eps=0.0, width=WIDTH, scale=0.3):
    return learned(NORMS[name](width, eps).double(), scale)


def points(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


MADE = {name: make(name) for name in NORMS}
every = pytest.mark.parametrize("name", sorted(NORMS))
spheres = pytest.mark.parametrize(
    "name", sorted(name for name, norm in MADE.items() if isinstance(norm, SphereNorm))
)
surfaces = pytest.mark.parametrize(
    "name", sorted(name for name, norm in MADE.items() if norm.has_tangent)
)
full = pytest.mark.parametrize(
    "name", sorted(name for name, norm in MADE.items() if not norm.has_tangent)
)
both = pytest.mark.parametrize("name", PAPERS)


@every
def test_forward_is_gain_times_standardised_plus_offset(name):
    norm, x = make(name, eps=1e-3), points(3, 5, WIDTH)
    assert torch.allclose(norm(x), norm.gamma * norm.standardize(x) + norm.beta, atol=1e-14)


@every
def test_image_satisfies_its_equations_and_coordinates_undo_the_norm(name):
    norm, x = make(name), points(20, WIDTH)
    z = norm(x)
    assert float(norm.constraint_violation(z).max()) < 1e-14
    assert torch.allclose(norm.coordinates(z), norm.standardize(x), atol=1e-12)
    far = norm.beta + 3 * (norm.maximizer(x) - norm.beta)
    assert float(norm.constraint_violation(far).min()) > 1


@surfaces
def test_with_eps_the_image_lies_strictly_inside(name):
    norm, x = make(name, eps=1e-2), points(20, WIDTH)
    u = norm.coordinates(norm(x))
    assert bool((u.square().sum(-1) < WIDTH).all())


@pytest.mark.cases(1)
@both
@given(zeros=st.integers(1, WIDTH - 2), seed=st.integers(0, 1000))
@settings(max_examples=60)
def test_residual_is_zero_on_the_flattened_image_and_positive_off_it(name, zeros, seed):
    norm = make(name)
    with torch.no_grad():
        norm.weight[:zeros] = 0
    z = norm(points(4, WIDTH, seed=seed))
    assert float(norm.constraint_violation(z).detach().max()) < 1e-13
    off = z.clone()
    off[..., 0] += 0.1
    assert float(norm.constraint_violation(off).detach().min()) >= 0.1 - 1e-12
    outside = norm.beta + 10 * (z - norm.beta)
    if zeros < WIDTH - 1 and bool(((z - norm.beta).abs().sum(-1) > 1).all()):
        assert float(norm.constraint_violation(outside).detach().min()) > 0


@every
@pytest.mark.parametrize("eps", [0.0, 1e-2])
def test_jacobian_equals_autograds_and_slope_bounds_it(name, eps):
    norm, x = make(name, eps), torch.cat([scale * points(3, WIDTH) for scale in (0.3, 1.0, 3.0)])
    dense = torch.stack([torch.autograd.functional.jacobian(norm, token) for token in x])
    assert torch.allclose(dense, norm.jacobian(x), atol=1e-13)
    found = torch.linalg.matrix_norm(dense, ord=2)
    assert bool((found <= norm.slope(x) * (1 + 1e-12)).all())
    assert float(norm.slope(x).detach().max()) <= norm.steepest * (1 + 1e-12)


@every
def test_the_degree_is_what_it_says(name):
    norm, x = make(name), points(50, WIDTH)
    away = norm(7 * x) - norm.beta
    if norm.degree is not None:
        assert torch.allclose(away, 7.0**norm.degree * (norm(x) - norm.beta), atol=1e-12)
        assert torch.allclose(
            norm.jacobian(7 * x), 7.0 ** (norm.degree - 1) * norm.jacobian(x), atol=1e-13
        )
    else:
        assert not torch.allclose(away, norm(x) - norm.beta, atol=1e-2)
        assert not torch.allclose(away, 7 * (norm(x) - norm.beta), atol=1e-2)


@surfaces
def test_tangent_is_the_projection_onto_the_images_tangent_space_by_dense_algebra(name):
    norm = make(name)
    x, f = norm(points(WIDTH)), points(WIDTH, seed=1)
    gamma = norm.gamma
    # in u-coordinates it is what is orthogonal to the normals times gamma: project by least squares
    # on a basis of it
    normals = (gamma.unsqueeze(-1) * norm.normals(x)).T
    basis = torch.linalg.svd(normals).Vh[len(normals) :]
    assert torch.allclose(norm.tangent(x, f), gamma * (basis.T @ (basis @ (f / gamma))), atol=1e-13)
    # and it is what the derivative of the norm reaches, as the image of that is the tangent space
    reached = torch.linalg.svd(norm.jacobian(points(WIDTH)).detach()).U[:, : WIDTH - len(normals)]
    assert float((reached.T @ norm.normals(x)).abs().max()) < 1e-12


@surfaces
def test_tangent_is_idempotent_and_directions_stay_on_the_image_to_second_order(name):
    norm = make(name)
    x, f = norm(points(10, WIDTH)), points(10, WIDTH, seed=1)
    v = norm.tangent(x, f)
    assert torch.allclose(norm.tangent(x, v), v, atol=1e-13)
    off = [float(norm.constraint_violation(x + h * v).max()) for h in (1e-2, 1e-3)]
    assert off[0] / off[1] == pytest.approx(100, rel=1e-2)


@surfaces
def test_retraction_is_the_identity_on_the_image_and_lands_on_it(name):
    norm = make(name)
    z = norm(points(10, WIDTH))
    assert torch.allclose(norm.retract(z), z, atol=1e-13)
    assert float(norm.constraint_violation(norm.retract(points(10, WIDTH, seed=3))).max()) < 1e-13


@surfaces
def test_retraction_agrees_with_the_tangent_projection_to_second_order(name):
    norm = make(name)
    x, f = norm(points(10, WIDTH)), points(10, WIDTH, seed=1)
    gaps = [
        float((norm.retract(x + h * f) - x - h * norm.tangent(x, f)).norm()) for h in (1e-3, 1e-4)
    ]
    assert gaps[0] / gaps[1] == pytest.approx(100, rel=0.05)


@full
def test_a_full_image_has_no_tangent_and_says_why(name):
    norm, x = make(name), points(WIDTH)
    for call in (
        lambda: norm.tangent(x, x),
        lambda: norm.retract(x),
        lambda: norm.normals(x),
        lambda: norm.outside_domain(x),
    ):
        with pytest.raises(ConfigError, match="is no step of an ODE: use the discrete model"):
            call()
    with pytest.raises(ConfigError, match="does not divide a token by its size"):
        norm.sigma(x)


@pytest.mark.cases(7)
@every
@given(seed=st.integers(0, 10_000))
@settings(max_examples=50)
def test_support_bounds_every_point_of_the_image_and_the_maximiser_has_it(name, seed):
    norm, p = make(name), points(WIDTH, seed=seed)
    z = norm(10 ** (seed % 3) * points(200, WIDTH, seed=seed + 1))
    top = norm.support(p)
    assert bool((z @ p <= top + 1e-12).all())
    best = norm.maximizer(p)
    assert float(norm.constraint_violation(best).detach()) < 1e-13
    assert float((best @ p - top).detach()) == pytest.approx(0, abs=1e-12)


@pytest.mark.cases(6)
@every
def test_support_is_what_an_optimiser_finds_through_the_norm_and_no_more(name):
    """By scipy, from a random start, over inputs within a ball of radius 1000 in the end, with
    autograd's slopes.
    """
    norm, p = make(name, eps=1e-8).requires_grad_(False), points(WIDTH, seed=5)

    def payoff(values):
        x = torch.tensor(values, dtype=torch.float64, requires_grad=True)
        value = -(p @ norm(x))
        (slope,) = torch.autograd.grad(value, x)
        return float(value.detach()), slope.numpy()

    found = [
        -minimize(
            payoff, 0.3 * points(WIDTH, seed=seed).numpy(), jac=True, options={"gtol": 1e-12}
        ).fun
        for seed in range(5)
    ]
    assert max(found) == pytest.approx(float(norm.support(p)), rel=1e-6)
    assert max(found) <= float(norm.support(p)) * (1 + 1e-12)


@every
@pytest.mark.parametrize("eps", [0.0, 1e-3])
def test_inputs_of_a_length_come_as_near_to_the_support_as_is_said_and_attain_it_only_where_that_is_said(
    name, eps
):
    norm, p = make(name, eps).requires_grad_(False), points(4, WIDTH)
    centre = -getattr(norm, "shift", torch.zeros(1)) / getattr(norm, "alpha", torch.ones(1))
    signs = torch.sign(norm.gamma * p * getattr(norm, "alpha", torch.ones(1)))
    ways = {"box": signs, "ball": p, "ellipsoids": norm.gamma * p}
    way = ways.get(
        norm.image, norm.gamma * p - (norm.gamma * p).mean(-1, keepdim=True) * norm.centred
    )
    if norm.image == "ellipsoids":
        way = torch.nn.functional.normalize(norm.apart(way), dim=-1).flatten(-2)
    way = way / way.norm(dim=-1, keepdim=True)
    for radius in (0.5, 2.0, 8.0):
        reached = (p * norm(centre + radius * way)).sum(-1)
        short = norm.support(p) - reached
        assert bool((short <= norm.shortfall(p, radius) + 1e-12).all())
        assert bool((short > 0).all()) or norm.attained
        assert bool((short >= -1e-13).all())
    if norm.attained:
        assert torch.allclose((p * norm(centre + 9 * way)).sum(-1), norm.support(p), atol=1e-12)


def test_rms_support_is_larger_than_layernorms_unless_the_costate_is_centred():
    layer, rms = LayerNorm(WIDTH, 0).double(), RMSNorm(WIDTH, 0).double()
    p = points(WIDTH)
    assert float(rms.support(p)) > float(layer.support(p)) + 0.1
    assert float(rms.support(layer.centre(p))) == pytest.approx(float(layer.support(p)), rel=1e-14)


def test_ties_are_recognised_and_broken_by_the_stated_rule():
    layer, rms = LayerNorm(WIDTH, 0).double(), RMSNorm(WIDTH, 0).double()
    constant, zero = (
        torch.full((WIDTH,), 0.7, dtype=torch.float64),
        torch.zeros(WIDTH, dtype=torch.float64),
    )
    assert bool(layer.ties(constant))
    assert not bool(rms.ties(constant))
    assert bool(rms.ties(zero))
    expected = math.sqrt(WIDTH / 2) * torch.tensor([1.0, -1, 0, 0, 0, 0], dtype=torch.float64)
    for norm in (layer, rms):
        assert torch.allclose(norm.maximizer(zero), expected, atol=1e-15)


@every
def test_a_costate_of_zero_ties_and_others_do_not(name):
    norm = make(name)
    assert bool(norm.ties(torch.zeros(2, WIDTH, dtype=torch.float64)).all())
    assert (
        float(
            norm.constraint_violation(
                norm.maximizer(torch.zeros(WIDTH, dtype=torch.float64))
            ).detach()
        )
        < 1e-13
    )
    assert not bool(norm.ties(points(5, WIDTH)).any())


@every
def test_no_output_is_longer_than_the_level(name):
    norm = make(name).requires_grad_(False)
    z = norm(torch.cat([size * points(500, WIDTH) for size in (0.1, 1.0, 1e3)]))
    corner = torch.cat([norm.maximizer(points(200, WIDTH, seed=2)), z])
    assert float(corner.square().mean(-1).sqrt().max()) <= norm.level * (1 + 1e-12)
    assert float(corner.abs().mean(-1).max()) <= norm.level * (1 + 1e-12)


def test_geometry_that_a_zero_gain_makes_undefined_is_refused():
    norm = LayerNorm(WIDTH, 0)
    with torch.no_grad():
        norm.weight[2] = 0
    for call in (
        lambda: norm.tangent(norm.weight, norm.weight),
        lambda: norm.retract(norm.weight),
        lambda: norm.coordinates(norm.weight),
    ):
        with pytest.raises(ConfigError, match=r"gamma\[2\] = 0"):
            call()


@pytest.mark.parametrize(
    "name", sorted(name for name, norm in NORMS.items() if not norm.has_offset)
)
def test_an_offset_is_refused_where_there_is_none(name):
    with pytest.raises(ConfigError, match="no offset"):
        NORMS[name](WIDTH, bias=True)


@pytest.mark.parametrize(
    ("name", "said", "words"),
    [
        (
            "rmsnorm",
            {"norm_alpha": 0.5},
            "norm_alpha = 0.5 has no meaning for norm 'rmsnorm': leave it out, or choose dyt, derf",
        ),
        (
            "dyt",
            {"norm_groups": 2},
            "norm_groups = 2 has no meaning for norm 'dyt': leave it out, or choose group_rmsnorm",
        ),
        (
            "group_rmsnorm",
            {"norm_groups": 4},
            "norm_groups = 4: give a whole number that divides the width 6",
        ),
        ("group_rmsnorm", {"norm_groups": 0}, "norm_groups = 0: give a whole number"),
        ("dyt", {"norm_alpha": 0.0}, "norm_alpha = 0.0: give a number from 1e-12"),
        (
            "clip_length",
            {"norm_radius": math.inf},
            "norm_radius = inf: give a number from 1e-12 to 1e",
        ),
        (
            "clip_entries",
            {"norm_radius": True},
            "norm_radius = True: give a number from 1e-12 to 1e",
        ),
    ],
)
def test_options_that_make_no_sense_are_refused(name, said, words):
    with pytest.raises(ConfigError, match=words):
        norm_settings(name, NormOptions(**said), WIDTH)


@every
def test_norms_have_forward_mode_and_second_derivatives(name):
    norm, x = make(name, 1e-5), points(2, WIDTH).requires_grad_()
    assert torch.autograd.gradcheck(norm, x, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(norm, x)


@every
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lower_precision_keeps_its_type_and_is_close(name, dtype):
    norm, x = make(name, 1e-5), points(20, WIDTH)
    found = norm.to(dtype)(x.to(dtype))
    assert found.dtype == dtype
    assert torch.allclose(found.double(), make(name, 1e-5)(x), atol=50 * torch.finfo(dtype).eps)


@every
def test_where_a_norm_is_linear_in_parameters_it_names_them(name):
    """The derivative along them, each times its factor, is the norm's own output; a norm that names
    none has none to train.
    """
    norm, x = make(name), points(5, WIDTH)
    factors = norm.linear_parameters()
    if not factors:
        assert not list(norm.parameters())
        return
    own = {key: value for key, value in norm.named_parameters() if key in factors}
    assert own.keys() == factors.keys()

    def made(values):
        return torch.func.functional_call(norm, values, (x,))

    assert torch.allclose(torch.func.jvp(made, (own,), (factors,))[1], norm(x), atol=1e-12)


@spheres
def test_another_eps_shares_the_gains(name):
    norm, x = make(name, 1e-3), points(5, WIDTH)
    twin = norm.with_eps(1e-1)
    assert not torch.allclose(twin(x), norm(x), atol=1e-3)
    assert torch.allclose(twin.with_eps(1e-3)(x), norm(x), atol=1e-14)
    assert twin.linear_parameters().keys() == {f"norm.{key}" for key in norm.linear_parameters()}


@both
def test_constraint_violation_is_the_larger_relative_error_of_length_and_mean(name):
    """At z = beta + gamma u: max(abs(d - |u|^2), abs(1'u) where the norm subtracts the mean)/d."""
    norm, u = MADE[name], torch.cat([points(20, WIDTH, seed=7), points(20, WIDTH, seed=8) + 1])
    expected = (WIDTH - u.square().sum(-1)).abs()
    if norm.centred:
        assert (u.sum(-1).abs() > expected).any(), "no case where the mean decides"
        expected = torch.maximum(expected, u.sum(-1).abs())
    found = norm.constraint_violation(norm.beta + norm.gamma * u).detach()
    assert torch.allclose(found, expected / WIDTH, rtol=1e-12, atol=1e-13)


def test_constraint_violation_of_a_ball_is_0_inside():
    norm = MADE["clip_length"]
    direction = points(WIDTH, seed=9)
    direction = direction * math.sqrt(WIDTH) * norm.radius / direction.norm()
    for length, expected in ((0.5, 0.0), (1.0, 0.0), (1.5, 1.25)):
        assert float(norm.constraint_violation(length * direction)) == pytest.approx(
            expected, abs=1e-14
        )


def test_the_maximiser_of_one_channel_is_a_point_of_the_image():
    p = torch.tensor([[1.0], [-2.0]], dtype=torch.float64)
    for norm in (LayerNorm(1).double(), RMSNorm(1).double()):
        with torch.no_grad():
            norm.weight.fill_(0.7)
            if isinstance(norm, LayerNorm):
                norm.bias.fill_(0.2)
            torch.testing.assert_close((p * norm.maximizer(p)).sum(-1), norm.support(p))
