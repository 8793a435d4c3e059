"""Every norm's set of velocities: H, its maximiser and what is reached, against ascents, brute
force and scipy.
"""

import math

import pytest
import torch
from scipy.optimize import minimize

from ctrans.control import KineticCost, StepImage, admissible_set, certify
from ctrans.control.gains import has_offset
from ctrans.control.model_check import check_model
from ctrans.control.regularization import Regularization
from ctrans.control.sets_by_norm import image_of, reachable
from ctrans.dynamics.norm import NORMS
from ctrans.dynamics.placement import PLACEMENTS
from ctrans.model.config import GPTConfig
from ctrans.model.gpt import GPT
from solvers import ConfigError
from tests.cases import covering
from tests.helpers import learned, small_model, tokens

WIDTH, TOKENS = 6, 4
every = pytest.mark.parametrize("name", sorted(NORMS))


def numbers(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def make(name, eps=1e-5, width=WIDTH, gains=True):
    norm = NORMS[name](width, eps).double()
    return (learned(norm, 0.2) if gains else norm).requires_grad_(False)


def holds(certificate):
    assert certificate.agrees, certificate.findings
    return certificate


@pytest.mark.cases(1)
@every
def test_behind_every_norm_h_is_finite_and_certified(name):
    norm, P = make(name), numbers(TOKENS, WIDTH)
    certificate = holds(
        certify(admissible_set(norm, "peri"), P, features=numbers(TOKENS, WIDTH + 1, seed=1))
    )
    assert certificate.verdict == (
        "well-posed for bounded gains" if list(norm.parameters()) else "well-posed"
    )
    assert certificate.attained == norm.attained
    assert certificate.hamiltonian == pytest.approx(float(norm.support(-P).sum()), rel=1e-14)
    assert (certificate.gained is None) == (not list(norm.parameters()))


@every
def test_without_eps_h_is_attained_by_all_but_squashing_norms(name):
    norm = make(name, eps=0.0)
    assert admissible_set(norm, "output").attained == (name not in ("dyt", "derf"))


@pytest.mark.cases(1)
@every
def test_a_discrete_step_inside_every_norm_is_certified(name):
    norm, P, X = make(name), numbers(TOKENS, WIDTH), numbers(TOKENS, WIDTH, seed=3)
    certificate = holds(
        certify(StepImage(image_of(norm), X, 0.5), P, features=numbers(TOKENS, WIDTH + 1, seed=1))
    )
    assert certificate.hamiltonian == pytest.approx(
        2 * float(norm.support(-P).sum() + (P * X).sum()), rel=1e-12
    )


@every
@pytest.mark.parametrize("lam", [0.05, 5.0])
def test_a_kinetic_cost_is_certified_whether_or_not_it_leaves_the_edge(name, lam):
    norm, P = make(name), numbers(TOKENS, WIDTH)
    charged = admissible_set(norm, "peri", kinetic=lam)
    holds(certify(charged, P))
    f = charged.maximizer(P)
    assert float(charged.residual(f)) < 1e-12
    z = norm(torch.cat([size * numbers(3000, WIDTH, seed=4) for size in (0.01, 0.3, 1.0, 5.0)]))
    for p, best in zip(P, f, strict=True):
        sampled = -(z @ p) - lam / 2 * z.square().sum(-1)
        top = -(p @ best) - lam / 2 * best.square().sum()
        assert float(sampled.max()) <= float(top) + 1e-9
    # nothing but 0 costs nothing: with a small charge the edge is best, with a large one the inside
    # where there is one
    assert float(charged.support(P)) <= float(norm.support(-P).sum()) + 1e-12


@pytest.mark.cases(4)
@every
def test_the_nearest_point_is_that_of_a_general_optimiser(name):
    norm, y = make(name), 2 * numbers(1, WIDTH, seed=7)
    found = reachable(norm).nearest(y)

    def distance(values):
        x = torch.tensor(values, dtype=torch.float64, requires_grad=True)
        value = (norm(x) - y[0]).square().sum()
        (slope,) = torch.autograd.grad(value, x)
        return float(value.detach()), slope.numpy()

    starts = [0.3 * numbers(WIDTH, seed=seed).numpy() for seed in range(8)]
    best = min(minimize(distance, start, jac=True, options={"gtol": 1e-10}).fun for start in starts)
    assert best == pytest.approx(float((found - y).square().sum()), rel=1e-5)


@every
def test_a_wrong_h_and_a_wrong_maximiser_are_seen(name, monkeypatch):
    norm, P = make(name), numbers(TOKENS, WIDTH)
    allowed = image_of(norm)
    right = type(allowed).support
    monkeypatch.setattr(type(allowed), "support", lambda self, P: 1.001 * right(self, P))
    assert not certify(allowed, P).agrees
    monkeypatch.undo()
    top = type(allowed).maximizer
    monkeypatch.setattr(
        type(allowed),
        "maximizer",
        lambda self, P: self.norm.beta + 0.99 * (top(self, P) - self.norm.beta),
    )
    assert not certify(allowed, P).agrees


@pytest.mark.cases(5)
@every
def test_trained_gains_make_h_grow_at_the_proven_slope(name):
    """By brute force over the sphere of gains and offsets of length 1, H being recomputed from the
    norm itself.
    """
    norm, P = make(name, gains=False), numbers(TOKENS, WIDTH)
    slope = image_of(norm).slope_in_gains(P)
    linear = norm.linear_parameters()
    if not linear:
        assert slope is None
        return
    best = 0.0
    names = sorted(linear)
    own = dict(norm.named_parameters())
    for seed in range(3000):
        parts = [numbers(len(own[key]), seed=97 * seed + k) for k, key in enumerate(names)]
        size = math.sqrt(sum(float(part.square().sum()) for part in parts))
        for key, part in zip(names, parts, strict=True):
            own[key].copy_(part / size)
        best = max(best, float(norm.support(-P).sum()))
    assert best <= slope.upper * (1 + 1e-12)
    assert slope.lower <= slope.upper * (1 + 1e-12)
    assert best >= 0.75 * slope.lower
    assert (slope.offset > 0) == has_offset(norm)


@pytest.mark.cases(1)
@every
def test_a_decay_of_gains_is_for_gains(name):
    """H by an oracle that knows no closed form: theta <- d support/d theta / lam, which never lets
    the payoff fall, from 20 starts.
    """
    norm, P, lam = make(name), numbers(TOKENS, WIDTH), 0.5
    if not norm.linear_parameters():
        with pytest.raises(
            ConfigError, match="leave gain_decay out, as H is finite whatever is trained"
        ):
            admissible_set(norm, "peri", gain_decay=lam)
        return
    decay = admissible_set(norm, "peri", gain_decay=lam)
    holds(certify(decay, P))
    H, best = float(decay.support(P)), 0.0
    own = [norm.get_parameter(key) for key in norm.linear_parameters()]
    for seed in range(20):
        for k, parameter in enumerate(own):
            parameter.copy_(numbers(*parameter.shape, seed=31 * seed + k))
        for _ in range(200):
            with torch.enable_grad():
                wanted = [parameter.requires_grad_() for parameter in own]
                slopes = torch.autograd.grad(norm.support(-P).sum(), wanted)
            for parameter, slope in zip(own, slopes, strict=True):
                parameter.requires_grad_(False).copy_(slope / lam)
        best = max(
            best,
            float(norm.support(-P).sum())
            - lam / 2 * sum(float(each.square().sum()) for each in own),
        )
    assert best <= decay.ceiling(P) * (1 + 1e-12)
    assert best == pytest.approx(H, rel=1e-6)


@pytest.mark.cases(3)
@pytest.mark.parametrize("name", ["scalenorm", "group_rmsnorm", "dyt", "derf"])
@pytest.mark.parametrize("width", [1, 2])
def test_a_decay_of_gains_is_certified_where_signs_are_all_there_is(name, width):
    norm = (
        NORMS[name](width, 0.0, **({"norm_groups": width} if name == "group_rmsnorm" else {}))
        .double()
        .requires_grad_(False)
    )
    holds(certify(admissible_set(norm, "peri", gain_decay=2.0), numbers(TOKENS, width, seed=5)))


@every
def test_around_the_state_the_ode_is_degenerate_or_none(name):
    norm, P, X = make(name), numbers(TOKENS, WIDTH), numbers(TOKENS, WIDTH, seed=3)
    if not norm.has_tangent:
        with pytest.raises(ConfigError, match="no step of an ODE"):
            admissible_set(norm, "post", state=X)
        return
    space = admissible_set(norm, "post", state=norm.retract(X))
    assert certify(space, P, features=numbers(TOKENS, WIDTH + 1, seed=1)).verdict == "degenerate"
    normal = norm.normals(norm.retract(X)) @ numbers(norm.normals(X).shape[-1], seed=5)
    assert float(space.support(normal)) == 0


@pytest.mark.slow
def test_costates_with_zeros_and_gains_with_zeros_are_certified():
    for name in ("dyt", "group_rmsnorm", "derf"):
        norm, P = make(name), numbers(TOKENS, WIDTH)
        P[0], P[1, 2] = 0, 0
        norm.gamma[1] = 0
        found = holds(
            certify(admissible_set(norm, "peri"), P, features=numbers(TOKENS, WIDTH + 1, seed=1))
        )
        assert found.ties == (1 if name == "group_rmsnorm" else 2)
        holds(certify(KineticCost(reachable(norm), 0.3), P))


CASES = [{"name": k, "dtype": d} for k in range(len(NORMS)) for d in range(2)]


@pytest.mark.parametrize("case", covering(CASES))
def test_single_precision_certifies_too(case):
    name, dtype = (
        sorted(NORMS)[CASES[case]["name"]],
        (torch.float32, torch.float64)[CASES[case]["dtype"]],
    )
    holds(certify(admissible_set(make(name).to(dtype), "peri"), numbers(TOKENS, WIDTH).to(dtype)))


@pytest.mark.cases(1)
@every
@pytest.mark.parametrize("placement", ["peri", "post"])
def test_a_models_segments_are_certified_behind_and_inside_every_norm(name, placement):
    made = small_model(placement, norm=name, depth=1, width=8)
    check = check_model(made, tokens(1, 5), tokens(1, 5, seed=1), thorough=True)
    assert check.agrees, check.failures
    ode = placement == "peri" or make(name).has_tangent
    assert check.has_ode == ode
    trained = "well-posed for bounded gains" if list(make(name).parameters()) else "well-posed"
    assert check.step_verdict == trained
    assert check.verdict == ("degenerate" if placement == "post" and ode else trained)
    if not ode:
        assert check.form == "discrete"
        assert "is no step of an ODE" in check.instead
        assert all(
            segment.step is None and "(z - X)/dt" in segment.certificate.words
            for segment in check.segments
        )


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("residual", "verdict"),
    [("layerscale", "bounded gains"), ("mhc", "well-posed"), ("plain", "well-posed")],
)
def test_trained_gains_of_a_residual_are_assumed_by_the_verdict(residual, verdict):
    """Behind a norm without gains H is finite whatever is trained, unless a residual's gains carry
    it with them.
    """
    config = GPTConfig(
        256,
        depth=1,
        width=8,
        heads=2,
        context=4,
        placement="peri",
        norm="plain_rmsnorm",
        residual=residual,
    )
    model = GPT(config).double().requires_grad_(False)
    check = check_model(model, torch.arange(4)[None], torch.arange(1, 5)[None], thorough=True)
    assert check.verdict == (
        "well-posed for bounded gains" if verdict == "bounded gains" else "well-posed"
    )
    assert check.agrees
    if residual == "layerscale":
        with pytest.raises(ConfigError, match="does not hold those of the residual"):
            check_at_gains(model, Regularization(gain_decay=0.1))


def check_at_gains(model, remedy):
    return check_model(
        model, torch.arange(4)[None], torch.arange(1, 5)[None], remedy, thorough=True
    )


@pytest.mark.parametrize("norm", ["dyt", "derf", "clip_length", "clip_entries"])
def test_ngpt_needs_a_norm_with_tangent_spaces(norm):
    with pytest.raises(ConfigError, match="has no tangent spaces"):
        GPTConfig(placement="post", residual="ngpt", norm=norm)


@pytest.mark.parametrize(("tokens", "features"), [(10, 9), (5, 9), (10, 12)])
def test_a_decayed_last_map_is_certified_whatever_the_number_of_tokens(tokens, features):
    generator = torch.Generator().manual_seed(0)
    h = torch.randn(tokens, features, generator=generator, dtype=torch.float64)
    P = torch.randn(tokens, 8, generator=generator, dtype=torch.float64)
    found = certify(
        admissible_set(None, PLACEMENTS["pre"], features=h, last_map_decay=0.1), P, features=h
    )
    assert found.verdict == "well-posed, the rest fixed"
