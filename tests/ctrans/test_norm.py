import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ctrans.norm import NORMS, LayerNorm, RMSNorm
from solvers import ConfigError
from tests.helpers import learned

WIDTH = 6


def make(name, eps=0.0, width=WIDTH, scale=0.3):
    return learned(NORMS[name](width, eps).double(), scale)


def points(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


both = pytest.mark.parametrize("name", sorted(NORMS))


@both
def test_forward_is_gain_times_standardised_plus_offset(name):
    norm, x = make(name, eps=1e-3), points(3, 5, WIDTH)
    assert torch.allclose(norm(x), norm.gamma * norm.standardize(x) + norm.beta, atol=1e-14)


@both
def test_image_satisfies_its_equations_and_coordinates_undo_the_norm(name):
    norm, x = make(name), points(20, WIDTH)
    z = norm(x)
    assert float(norm.residual(z).max()) < 1e-14
    assert torch.allclose(norm.coordinates(z), norm.standardize(x), atol=1e-12)


@both
def test_with_eps_the_image_lies_strictly_inside(name):
    norm, x = make(name, eps=1e-2), points(20, WIDTH)
    u = norm.coordinates(norm(x))
    assert bool((u.square().sum(-1) < WIDTH).all())


@both
@given(zeros=st.integers(1, WIDTH - 2), seed=st.integers(0, 1000))
@settings(max_examples=60)
def test_residual_is_zero_on_the_flattened_image_and_positive_off_it(name, zeros, seed):
    norm = make(name)
    with torch.no_grad():
        norm.weight[:zeros] = 0
    z = norm(points(4, WIDTH, seed=seed))
    assert float(norm.residual(z).detach().max()) < 1e-13
    off = z.clone()
    off[..., 0] += 0.1
    assert float(norm.residual(off).detach().min()) >= 0.1 - 1e-12
    outside = norm.beta + 10 * (z - norm.beta)
    if zeros < WIDTH - 1 and bool(((z - norm.beta).abs().sum(-1) > 1).all()):
        assert float(norm.residual(outside).detach().min()) > 0


@both
@pytest.mark.parametrize("eps", [0.0, 1e-2])
def test_jacobian_equals_autograds(name, eps):
    norm, x = make(name, eps), points(4, WIDTH)
    for token, dense in zip(x, norm.jacobian(x), strict=True):
        assert torch.allclose(torch.autograd.functional.jacobian(norm, token), dense, atol=1e-13)


@both
def test_jacobian_scales_inversely_and_its_norm_is_bounded(name):
    norm, x = make(name), points(50, WIDTH)
    j = norm.jacobian(x)
    assert torch.allclose(norm.jacobian(7 * x), j / 7, atol=1e-13)
    bound = norm.gamma.abs().max() / norm.sigma(x).squeeze(-1)
    assert bool((torch.linalg.matrix_norm(j, ord=2) <= bound * (1 + 1e-12)).all())


@both
def test_tangent_is_the_projection_onto_the_images_tangent_space_by_dense_algebra(name):
    norm = make(name)
    x, f = norm(points(WIDTH)), points(WIDTH, seed=1)
    u, gamma = norm.coordinates(x), norm.gamma
    # the tangent space in u-coordinates is what is orthogonal to u (and to 1): project by least squares on a basis of it
    normals = torch.stack([u, torch.ones(WIDTH, dtype=torch.float64)] if norm.centred else [u])
    basis = torch.linalg.svd(normals).Vh[len(normals) :]
    expected = gamma * (basis.T @ (basis @ (f / gamma)))
    assert torch.allclose(norm.tangent(x, f), expected, atol=1e-13)


@both
def test_tangent_is_idempotent_and_directions_stay_on_the_image_to_second_order(name):
    norm = make(name)
    x, f = norm(points(10, WIDTH)), points(10, WIDTH, seed=1)
    v = norm.tangent(x, f)
    assert torch.allclose(norm.tangent(x, v), v, atol=1e-13)
    off = [float(norm.residual(x + h * v).max()) for h in (1e-2, 1e-3)]
    assert off[0] / off[1] == pytest.approx(100, rel=1e-2)


@both
def test_retraction_is_the_identity_on_the_image_and_lands_on_it(name):
    norm = make(name)
    z = norm(points(10, WIDTH))
    assert torch.allclose(norm.retract(z), z, atol=1e-13)
    assert float(norm.residual(norm.retract(points(10, WIDTH, seed=3))).max()) < 1e-13


@both
def test_retraction_agrees_with_the_tangent_projection_to_second_order(name):
    norm = make(name)
    x, f = norm(points(10, WIDTH)), points(10, WIDTH, seed=1)
    gaps = [float((norm.retract(x + h * f) - x - h * norm.tangent(x, f)).norm()) for h in (1e-3, 1e-4)]
    assert gaps[0] / gaps[1] == pytest.approx(100, rel=0.05)


@both
@given(seed=st.integers(0, 10_000))
@settings(max_examples=100)
def test_support_bounds_every_point_of_the_image_and_is_attained(name, seed):
    norm, p = make(name), points(WIDTH, seed=seed)
    z = norm(points(200, WIDTH, seed=seed + 1))
    top = norm.support(p)
    assert bool((z @ p <= top + 1e-12).all())
    best = norm.maximizer(p)
    assert float(norm.residual(best).detach()) < 1e-13
    assert float((best @ p - top).detach()) == pytest.approx(0, abs=1e-12)


def test_rms_support_is_larger_than_layernorms_unless_the_costate_is_centred():
    layer, rms = LayerNorm(WIDTH, 0).double(), RMSNorm(WIDTH, 0).double()
    p = points(WIDTH)
    assert float(rms.support(p)) > float(layer.support(p)) + 0.1
    assert float(rms.support(layer.centre(p))) == pytest.approx(float(layer.support(p)), rel=1e-14)


def test_ties_are_recognised_and_broken_by_the_stated_rule():
    layer, rms = LayerNorm(WIDTH, 0).double(), RMSNorm(WIDTH, 0).double()
    constant, zero = torch.full((WIDTH,), 0.7, dtype=torch.float64), torch.zeros(WIDTH, dtype=torch.float64)
    assert bool(layer.ties(constant))
    assert not bool(rms.ties(constant))
    assert bool(rms.ties(zero))
    expected = math.sqrt(WIDTH / 2) * torch.tensor([1.0, -1, 0, 0, 0, 0], dtype=torch.float64)
    for norm in (layer, rms):
        assert torch.allclose(norm.maximizer(zero), expected, atol=1e-15)


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


def test_rmsnorm_with_offset_is_refused():
    with pytest.raises(ConfigError, match="no offset"):
        RMSNorm(WIDTH, bias=True)


@both
def test_norms_have_forward_mode_and_second_derivatives(name):
    norm, x = make(name, 1e-5), points(2, WIDTH).requires_grad_()
    assert torch.autograd.gradcheck(norm, x, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(norm, x)
