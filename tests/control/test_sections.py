"""Gains that are 0 in some channels, inside a norm around the state: what is left of the tangent
space and of the image.
"""

import math

import pytest
import torch

from ctrans.control.admissible import length
from ctrans.control.certificate import certify
from ctrans.control.model_check import check_model
from ctrans.control.regularization import Regularization
from ctrans.control.sets_by_norm import image_of
from ctrans.control.step_image import SectionImage, StepImage
from ctrans.control.tangent import TangentSection
from ctrans.dynamics.norm import NORMS
from tests.helpers import learned, small_model, tokens

WIDTH, TOKENS = 7, 3
MOVES = {"one": [2], "some": [0, 3, 4], "but one": [0, 1, 2, 4, 5, 6]}
norms = pytest.mark.parametrize(
    "name", [name for name in NORMS if NORMS[name](8).image in ("ellipsoid", "slice")]
)
channels = pytest.mark.parametrize("which", MOVES)


def setting(name, which, seed=0, eps=None):
    generator = torch.Generator().manual_seed(seed)
    norm = learned(
        NORMS[name](WIDTH, **({} if eps is None else {"eps": eps})).double(), 0.3, seed + 1
    ).requires_grad_(False)
    draw = [torch.randn(TOKENS, WIDTH, generator=generator, dtype=torch.float64) for _ in range(2)]
    moves = torch.zeros(WIDTH, dtype=torch.bool)
    moves[MOVES[which]] = True
    return norm, *draw, moves


@norms
@channels
def test_velocities_are_what_the_moving_channels_make_of_the_tangent_space(name, which):
    norm, x, P, moves = setting(name, which)
    X = norm.retract(x)
    space = TangentSection(norm, X, moves)
    for j in range(TOKENS):
        columns = torch.stack(
            [norm.tangent(X[j], moves * e) for e in torch.eye(WIDTH, dtype=torch.float64)], -1
        )
        expected = columns @ torch.linalg.pinv(columns, rtol=1e-9) @ P[j]
        torch.testing.assert_close(space.nearest(P)[j], expected, rtol=0, atol=1e-12)
    normal = P - space.nearest(P)
    pulled = torch.func.vjp(lambda f: norm.tangent(X, moves * f), P)[1](normal)[0]
    assert pulled.abs().max() < 1e-12  # S T'P = 0, and there H = 0
    if not space._trivial:
        assert torch.equal(space.support(P), torch.tensor(math.inf, dtype=torch.float64))
        assert certify(space, P).agrees


def test_all_channels_make_the_tangent_space_and_a_single_one_behind_layernorm_a_line():
    norm, x, _, moves = setting("layernorm", "but one")
    X = norm.retract(x)
    assert (
        TangentSection(norm, X, torch.ones_like(moves))._normals.any(-2).sum(-1).tolist()
        == [2] * TOKENS
    )
    assert (
        TangentSection(norm, X, moves)._normals.any(-2).sum(-1).tolist() == [2] * TOKENS
    )  # one channel less moves nothing less
    norm, _, _, moves = setting("layernorm", "one")
    assert TangentSection(norm, X, moves)._normals.any(-2).sum(-1).tolist() == [WIDTH - 1] * TOKENS


@pytest.mark.cases(1)
@norms
@channels
@pytest.mark.parametrize("eps", [0.0, 0.3])
def test_no_state_of_a_step_exceeds_the_support_and_the_best_one_attains_it(name, which, eps):
    if eps and not hasattr(NORMS[name](8), "eps"):
        return
    norm, X, P, moves = setting(name, which, eps=eps or None)
    norm = norm.with_eps(eps)
    section = SectionImage(norm, X, moves)
    H = float(section.support(P))
    generator = torch.Generator().manual_seed(5)
    sizes = torch.logspace(-2, 6, 400, dtype=torch.float64)[:, None, None]
    f = sizes * torch.randn(400, TOKENS, WIDTH, generator=generator, dtype=torch.float64)
    reached = -(P * norm(X + 0.1 * moves * f)).sum((-2, -1))
    scale = section.scale(P)
    assert float(reached.max()) <= H + 1e-9 * scale
    found = certify(section, P)
    assert found.agrees, found.findings
    best = section.maximizer(P)
    assert float(-(P * best).sum()) == pytest.approx(H, rel=1e-12)
    assert float(section.residual(best)) < 1e-7
    point = X.clone().requires_grad_(True)
    optimiser = torch.optim.LBFGS(
        [point],
        max_iter=500,
        tolerance_grad=1e-14,
        tolerance_change=0,
        line_search_fn="strong_wolfe",
    )

    def loss():
        optimiser.zero_grad()
        value = (P * norm(torch.where(moves, point, X))).sum()
        value.backward()
        return value

    optimiser.step(loss)
    climbed = -float((P * norm(torch.where(moves, point, X))).sum().detach())
    assert climbed <= H + 1e-9 * scale
    slope = section._slope(P)
    a, b = slope[..., :-1], slope[..., -1:]
    if bool((b > 0.05 * length(P).amax()).all()) and bool(
        (a.norm(dim=-1) > 0).all()
    ):  # else the best is at infinity
        assert climbed == pytest.approx(H, rel=1e-5)


@norms
@channels
@pytest.mark.parametrize("dead", [[1], [0, 2], [3, 4, 6]])
def test_a_norm_with_gains_of_0_is_certified(name, which, dead):
    """Outputs do not tell what such a gain hides of a state."""
    norm, X, P, moves = setting(name, which)
    if norm.gains != "each":
        return
    norm.gamma[dead] = 0
    section = SectionImage(norm, X, moves)
    found = certify(section, P)
    assert found.agrees, found.findings
    f = torch.randn(
        50, TOKENS, WIDTH, generator=torch.Generator().manual_seed(7), dtype=torch.float64
    )
    assert float(section.residual(norm.with_eps(0.0)(X + 3 * moves * f)).max()) < (
        1e-6 if norm.eps == 0 else 1e-3
    )


def test_without_channels_that_stand_it_is_the_image_itself():
    norm, X, P, moves = setting("layernorm", "but one", eps=1e-5)
    every = torch.ones_like(moves)
    assert float(SectionImage(norm, X, every).support(P)) == pytest.approx(
        float(image_of(norm).support(P)), rel=1e-12
    )


@pytest.mark.slow
@pytest.mark.parametrize("norm", ["layernorm", "rmsnorm"])
def test_a_model_with_gains_of_0_in_some_channels_is_certified_whole(norm):
    model = small_model("post", residual="layerscale", norm=norm, depth=2)
    with torch.no_grad():
        model.depth.sublayers[0].residual.gain[3:8] = 0
        model.depth.sublayers[3].residual.gain[:15] = 0
    ids = tokens(1, 7)
    check = check_model(model, ids[:, :-1], ids[:, 1:], thorough=True)
    assert not check.missing
    assert check.agrees, check.failures
    assert (check.verdict, check.step_verdict) == ("degenerate", "well-posed for bounded gains")
    parts = [segment.certificate.words for segment in check.segments]
    assert [("channels" in words) for words in parts] == [True, False, False, True]
    kinetic = check_model(
        model, ids[:, :-1], ids[:, 1:], Regularization(kinetic=0.1), thorough=True
    )
    assert sorted(kinetic.missing) == ["segment 0 (attention)", "segment 3 (ffn)"]
    assert all("zero gain in some channels" in why for why in kinetic.missing.values())


def test_the_step_is_the_section_moved_and_scaled():
    norm, X, P, moves = setting("rmsnorm", "some", eps=1e-5)
    section = SectionImage(norm, X, moves)
    step = StepImage(section, X, 0.25)
    assert float(step.support(P)) == pytest.approx(
        (float(section.support(P)) + float((P * X).sum())) / 0.25, rel=1e-12
    )
    assert certify(step, P).agrees
