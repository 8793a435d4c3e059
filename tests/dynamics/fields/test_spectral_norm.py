"""The bound on the spectral norm of large matrices: never below it, and close to it."""

import sys

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ctrans.dynamics.fields.spectral_norm import (
    EXACT,
    SLACK,
    norm_of_product,
    norms_found_once,
    spectral_norm,
    upper_bound,
)

MATRICES = {
    "gaussian": lambda g: torch.randn(300, 170, generator=g),
    "of low rank": lambda g: torch.randn(170, 4, generator=g) @ torch.randn(4, 300, generator=g),
    "of equal singular values": lambda g: torch.linalg.qr(torch.randn(300, 170, generator=g)).Q,
    "with one direction that stands out": (
        lambda g: torch.eye(170) + torch.outer(*torch.randn(2, 170, generator=g))
    ),
    "of a crowded spectrum": lambda g: torch.diag(1 - torch.linspace(0, 1e-3, 170)),
    "zero": lambda g: torch.zeros(170, 180),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", MATRICES)
def test_the_bound_lies_above_the_largest_singular_value_and_not_far(name, dtype):
    m = MATRICES[name](torch.Generator().manual_seed(3)).to(dtype)
    exact = float(torch.linalg.svdvals(m.double())[0])
    assert exact <= upper_bound(m) <= (1 + 2 * SLACK) * exact
    assert upper_bound(m.T) >= exact


@pytest.mark.slow
def test_large_matrices_get_the_bound_and_small_ones_their_norm():
    m = torch.randn(EXACT + 6, EXACT + 1, generator=torch.Generator().manual_seed(0))
    exact = float(torch.linalg.matrix_norm(m.double(), 2))
    assert exact < spectral_norm(m) <= (1 + SLACK) * exact
    assert spectral_norm(m[:, :EXACT]) == pytest.approx(
        float(torch.linalg.matrix_norm(m[:, :EXACT].double(), 2)), rel=1e-9
    )


class Largest(TorchDispatchMode):
    """How many entries the largest tensor has that is made inside."""

    entries = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        for each in made if isinstance(made, tuple) else (made,):
            self.entries = max(self.entries, each.numel() if isinstance(each, torch.Tensor) else 0)
        return made


@pytest.mark.parametrize(
    ("rows", "inner", "columns"), [(30, 4, 50), (30, 40, 20), (5, 40, 50), (20_000, 4, 20_000)]
)
def test_the_norm_of_a_product_is_found_without_forming_it(rows, inner, columns):
    drawn = torch.Generator().manual_seed(1)
    rank = min(rows, inner, columns)
    frames = [
        torch.linalg.qr(torch.randn(n, rank, generator=drawn, dtype=torch.float64)).Q
        for n in (rows, inner, inner, columns)
    ]
    between, (s, t) = frames[1], torch.rand(2, rank, generator=drawn, dtype=torch.float64)
    left, right = frames[0] @ s.diag() @ between.T, between @ t.diag() @ frames[3].T
    with Largest() as largest:
        assert norm_of_product(left, right) == pytest.approx(float((s * t).max()), rel=1e-8)
    assert largest.entries <= max(left.numel(), right.numel())


def test_a_matrix_that_is_not_finite_has_no_finite_norm():
    for value in (float("nan"), float("inf"), -float("inf")):
        m = torch.ones(3, 4)
        m[1, 2] = value
        assert spectral_norm(m) == float("inf")


def test_the_random_numbers_of_others_are_left_alone():
    before = torch.get_rng_state()
    upper_bound(torch.ones(5, 4))
    assert torch.equal(torch.get_rng_state(), before)


def test_norms_are_found_once_and_never_of_a_matrix_that_has_changed(monkeypatch):
    computed = []
    monkeypatch.setattr(
        sys.modules[spectral_norm.__module__],
        "upper_bound",
        lambda m: computed.append(m) or float(m[0, 0]),
    )
    m = torch.ones(EXACT + 1, EXACT + 1)
    with norms_found_once():
        assert spectral_norm(m) == spectral_norm(m.detach()[:]) == 1.0
        assert len(computed) == 1
        assert spectral_norm(m.T) == 1.0, (
            "another matrix: its norm is the same, but that is not known here"
        )
        m.mul_(2)
        assert spectral_norm(m) == 2.0
        for value in (3.0, 4.0):  # whose memory may be that of the one before
            assert spectral_norm(torch.full_like(m, value)) == value
    assert len(computed) == 5
    assert spectral_norm(m) == spectral_norm(m)
    assert len(computed) == 7
