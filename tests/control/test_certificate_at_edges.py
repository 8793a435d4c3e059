"""Legal problems where H cancels, rows are zero, gains vanish or features are few: certified, and a
wrong H is still seen.
"""

import dataclasses
import math

import pytest
import torch

from ctrans.control import StepImage, admissible_set, certify
from ctrans.control.norm_image import NormImage
from ctrans.control.sets_by_norm import image_of
from ctrans.dynamics.norm import NORMS, LayerNorm, RMSNorm
from tests.cases import PAPERS

every = pytest.mark.parametrize("name", PAPERS)


def numbers(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def make(name, width=8, eps=1e-5):
    return NORMS[name](width, eps).double().requires_grad_(False)


def holds(certificate):
    assert certificate.agrees, certificate.findings
    return certificate


@pytest.mark.slow
@pytest.mark.parametrize("left", [0.0, 1e-8, 1e-6, -1e-6])
def test_an_offset_against_which_h_cancels(left):
    norm, P = make("layernorm"), numbers(6, 8)
    reach, drift = float(norm.support(-P).sum()), P.sum(0)
    norm.beta.copy_(drift / drift.square().sum() * reach * (1 - left))
    certificate = holds(certify(admissible_set(norm, "peri"), P, features=numbers(6, 9, seed=1)))
    assert certificate.hamiltonian == pytest.approx(left * reach, abs=1e-12)
    assert certificate.scale == pytest.approx(2 * reach, rel=1e-5)
    assert abs(certificate.growth.exponent) < 1e-6


@pytest.mark.cases(1)
@every
@pytest.mark.parametrize("off", [0.0, 1e-10, 1e-6])
def test_a_step_from_the_lowest_point_of_its_image(name, off):
    norm, P = make(name), numbers(6, 8)
    X = norm.retract(norm.maximizer(-P) + off * numbers(6, 8, seed=2))
    certificate = holds(
        certify(StepImage(image_of(norm), X, 1.0), P, features=numbers(6, 9, seed=1))
    )
    assert certificate.hamiltonian == pytest.approx(0, abs=1e-9)


@pytest.mark.cases(1)
@every
def test_tokens_without_costate_or_features_behind_a_norm_without_eps(name):
    norm, P, h = make(name, eps=0.0), numbers(6, 8), numbers(6, 9, seed=1)
    P[0], h[2] = 0, 0
    certificate = holds(certify(admissible_set(norm, "peri"), P, features=h))
    rest = [0, 1, 3, 4, 5]
    assert (
        certificate.weights
        == certify(admissible_set(norm, "peri"), P[rest], features=h[rest]).weights
    )
    assert certificate.gained.exponent == pytest.approx(1, abs=1e-6)


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("name", "width", "tokens", "seed"),
    [
        ("rmsnorm", 1, 2, 23),
        ("rmsnorm", 1, 3, 20),
        ("layernorm", 2, 5, 11),
        ("layernorm", 2, 9, 4),
        ("rmsnorm", 4, 5, 11),
    ],
)
def test_weights_of_rank_one_are_judged_by_what_is_proven(name, width, tokens, seed):
    P, h = numbers(tokens, width, seed=seed), numbers(tokens, 1, seed=seed + 9)
    holds(certify(admissible_set(make(name, width), "peri"), P, features=h))


@every
def test_gains_that_are_tiny_beside_the_state_of_a_step(name):
    norm = make(name)
    norm.gamma.fill_(1e-6)
    certificate = holds(
        certify(StepImage(image_of(norm), numbers(6, 8, seed=2), 0.1), numbers(6, 8))
    )
    assert certificate.kkt_noise < 1e-6


@pytest.mark.cases(1)
@every
@pytest.mark.parametrize("eps", [0.0, 1e-5])
def test_zero_gains_under_a_kinetic_cost(name, eps):
    for seed in range(3):
        norm, P = (
            make(name, eps=eps),
            numbers(5, 8, seed=seed) * (numbers(5, 8, seed=seed + 5) > 0.5),
        )
        norm.gamma.copy_((numbers(8, seed=seed + 7) > 0).double())
        P[0] = 0
        holds(certify(admissible_set(norm, "peri", kinetic=0.3), P))


@pytest.mark.cases(1)
@every
@pytest.mark.parametrize("rank", [1, 6])
@pytest.mark.parametrize("wrong", [0.5, 0.999, 1.001])
def test_a_wrong_h_is_seen(name, rank, wrong, monkeypatch):
    right = NormImage.support
    monkeypatch.setattr(NormImage, "support", lambda self, P: wrong * right(self, P))
    h = numbers(6, rank, seed=1) @ numbers(rank, 9, seed=2)
    assert not certify(admissible_set(make(name), "peri"), numbers(6, 8), features=h).agrees


@pytest.mark.cases(1)
@every
def test_a_growth_beyond_h_or_the_proven_slope_is_seen_where_features_are_few(name):
    certificate = certify(
        admissible_set(make(name), "peri"), numbers(6, 8), features=numbers(6, 2, seed=1)
    )
    holds(certificate)
    grown = certificate.growth
    assert grown.limit == pytest.approx(certificate.hamiltonian, rel=1e-7)
    low = dataclasses.replace(
        certificate, growth=dataclasses.replace(grown, limit=0.9 * max(grown.values))
    )
    assert "no weights within a bound exceed H" in [
        finding for finding, true in low.findings.items() if not true
    ]
    slope = dataclasses.replace(
        certificate.gain_slope,
        upper=0.9 * certificate.gained.values[-1] / certificate.gained.radii[-1],
    )
    assert not dataclasses.replace(certificate, gain_slope=slope).agrees


def by_hand(P, gamma):
    """sum_j sqrt(d) |gamma p_j| in exact binary sizes: Python's own hypot neither overflows nor
    underflows.
    """
    return sum(
        math.sqrt(len(row)) * math.hypot(*(g * p for g, p in zip(gamma, row, strict=True)))
        for row in P.tolist()
    )


@pytest.mark.cases(4)
@pytest.mark.parametrize("features", [False, True])
@pytest.mark.parametrize(
    ("dtype", "size"),
    [
        (torch.float32, 1e-23),
        (torch.float32, 1e-37),
        (torch.float32, 1e25),
        (torch.float64, 1e-170),
        (torch.float64, 1e-300),
        (torch.float64, 1e200),
    ],
)
def test_costates_whose_squares_are_no_numbers(dtype, size, features):
    norm = RMSNorm(3).to(dtype).requires_grad_(False)
    norm.weight.copy_(torch.tensor([1.0, 0.5, 2.0]))
    P = size * torch.tensor([[1, 2, -1], [0.5, 1, 0]], dtype=dtype)
    given = torch.eye(2, dtype=dtype) if features else None
    certificate = holds(certify(admissible_set(norm, "peri"), P, features=given))
    exact = by_hand(P, norm.weight.tolist())
    assert certificate.hamiltonian == pytest.approx(exact, rel=1e-5, abs=0)
    assert certificate.velocities.best == pytest.approx(exact, rel=1e-4, abs=0)
    ordinary = certify(admissible_set(norm, "peri"), (P / size).to(dtype), features=given)
    assert certificate.verdict == ordinary.verdict
    assert certificate.findings.keys() >= {
        words for words in ordinary.findings if "found" not in words
    }


@pytest.mark.parametrize("kind", [RMSNorm, LayerNorm])
@pytest.mark.parametrize("size", [1e-23, 2e19, 1e25, 1e37])
def test_support_in_float32_where_squares_are_no_numbers(kind, size):
    P = size * torch.tensor([[1.0, 2, -1], [0.5, 1, 0]])
    found = admissible_set(kind(3).requires_grad_(False), "peri").support(P)
    exact = admissible_set(kind(3).double().requires_grad_(False), "peri").support(P.double())
    assert float(found) == pytest.approx(float(exact), rel=1e-5, abs=0)


def test_a_velocity_above_h_is_no_agreement(monkeypatch):
    # the state of things before: H = 0 in silence, where |gamma p|^2 underflows
    monkeypatch.setattr(
        NormImage, "support", lambda self, P: torch.zeros(P.shape[:-2], dtype=P.dtype)
    )
    monkeypatch.setattr(NormImage, "scale", lambda self, P: 0.0)
    for size in (1e-23, 1.0):
        assert not certify(
            admissible_set(RMSNorm(3).requires_grad_(False), "peri"),
            size * torch.tensor([[1.0, 2, -1]]),
        ).agrees
