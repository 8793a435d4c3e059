import math

import pytest
import torch
from torch import nn

from ctrans.dynamics.depth import Depth
from ctrans.dynamics.sublayer import Sublayer
from ctrans.measure.backward.lyapunov import lyapunov
from solvers import ConfigError
from tests.helpers import FREE, NAMES, small_model, tokens


class Matrix(nn.Module):
    """x -> A x on each token."""

    def __init__(self, a):
        super().__init__()
        self.a = a

    def forward(self, x):
        return x @ self.a.mT


def linear_depth(matrix, blocks, dt):
    return Depth(
        [Sublayer(Matrix(matrix), kind) for _ in range(blocks) for kind in ("attention", "ffn")], dt
    )


@pytest.mark.slow
def test_a_constant_linear_field_has_the_logarithms_of_its_eigenvalues():
    rates = torch.tensor([2.0, 0.5, -1.0], dtype=torch.float64)
    basis = torch.randn(3, 3, dtype=torch.float64)
    matrix = basis @ rates.diag() @ torch.linalg.inv(basis)
    found = lyapunov(
        linear_depth(matrix, 150, 0.1), torch.randn(1, 3, dtype=torch.float64), count=3
    )
    assert found.exponents == pytest.approx(
        [math.log1p(0.1 * float(rate)) / 0.1 for rate in rates], abs=0.15
    )
    assert found.time == pytest.approx(30)


@pytest.mark.cases(2)
@pytest.mark.parametrize("placement", FREE)
def test_the_exponents_sum_to_the_logarithm_of_the_determinant(placement):
    model = small_model(placement, width=4)
    x = model.embed(tokens(2, 3))
    found = lyapunov(model.depth, x, count=12)
    exact = [
        float(
            torch.linalg.slogdet(
                torch.autograd.functional.jacobian(model.depth, each).reshape(12, 12)
            ).logabsdet
        )
        for each in x
    ]
    assert sum(found.exponents) * found.time == pytest.approx(sum(exact) / 2, rel=1e-9)
    assert sum(map(sum, found.growth)) == pytest.approx(sum(exact) / 2, rel=1e-9)


@pytest.mark.parametrize("placement", NAMES)
def test_the_exponents_of_a_set_are_bounded_by_the_singular_values(placement):
    """R_11 ... R_kk is the volume of k columns, at most the product of the k largest singular
    values.
    """
    model = small_model(placement, width=4)
    x = model.embed(tokens(1, 3))[0]
    singular = torch.linalg.svdvals(
        torch.autograd.functional.jacobian(model.depth, x).reshape(12, 12)
    ).log()
    found = lyapunov(model.depth, x, count=5)
    for k in range(1, 6):
        assert sum(found.exponents[:k]) * found.time <= float(singular[:k].sum()) + 1e-9
    assert found.exponents == sorted(found.exponents, reverse=True)


def test_a_norm_around_the_state_removes_directions():
    model = small_model("post", width=4, eps=0.0)
    found = lyapunov(model.depth, model.embed(tokens(1, 1))[0], count=4)
    assert found.exponents[0] > -math.inf
    assert found.exponents[-1] < -10


def test_the_means_that_a_norm_removes_have_no_rate_and_the_lengths_have_theirs():
    model = small_model("post", width=4)
    found = lyapunov(model.depth, model.embed(tokens(2, 3)), count=12)
    removed = [rate == -math.inf for rate in found.exponents]
    assert removed == [False] * 9 + [True] * 3
    # eps = 1e-5 leaves a little of a change of a token's length
    assert all(
        -25 < rate * found.time / len(model.depth.sublayers) < -5 for rate in found.exponents[6:9]
    )
    assert found.deviations[-3:] == [0.0] * 3
    assert all(map(math.isfinite, found.deviations))


def test_it_ends_where_the_state_does():
    model = small_model("pre")
    model.depth.sublayers[3].field.down.weight.mul_(math.inf)
    found = lyapunov(model.depth, model.embed(tokens(1)))
    assert len(found.growth) == 3
    assert found.time == pytest.approx(0.3)
    assert "segment 3" in found.note


def test_counts_are_checked_and_cut():
    model = small_model("pre", width=2, heads=1)
    assert len(lyapunov(model.depth, model.embed(tokens(1, 1)), count=9).exponents) == 2
    with pytest.raises(ConfigError, match="count"):
        lyapunov(model.depth, model.embed(tokens(1, 1)), count=0)
