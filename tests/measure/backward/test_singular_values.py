"""The matrix-free singular values against dense ones."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ctrans.measure.backward.singular_values import compose, leading_singular, linearise
from solvers import ConfigError


def linear(matrices, dtype=torch.float64):
    """x -> A x for a batch of matrices."""
    return linearise(
        lambda x: (matrices @ x.unsqueeze(-1)).squeeze(-1),
        torch.zeros(*matrices.shape[:-2], matrices.shape[-1], dtype=dtype),
    )


def of_spectrum(values, rows, seed):
    generator = torch.Generator().manual_seed(seed)
    values = torch.as_tensor(values, dtype=torch.float64)
    u, v = (
        torch.linalg.qr(torch.randn(n, len(values), generator=generator, dtype=torch.float64)).Q
        for n in (rows, len(values))
    )
    return u @ values.diag() @ v.mT


spectra = st.lists(st.floats(0, 10), min_size=1, max_size=30)


@given(spectra, st.integers(0, 5), st.integers(0, 10_000))
@settings(max_examples=60)
def test_the_largest_singular_value_is_found_whatever_the_spectrum(values, more, seed):
    matrix = of_spectrum(values, len(values) + more, seed)
    found = leading_singular(linear(matrix), problem=1)
    assert found.largest == pytest.approx(max(values), rel=1e-3, abs=1e-9)


@pytest.mark.cases(1)
@pytest.mark.parametrize("size", [100, 400])
def test_an_edge_without_gap_is_resolved_to_the_tolerance(size):
    """A Gaussian matrix: the largest values crowd together."""
    for seed in range(10):
        matrix = torch.randn(
            size, size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
        )
        found = leading_singular(linear(matrix), problem=1)
        exact = float(torch.linalg.matrix_norm(matrix, 2))
        assert found.largest == pytest.approx(exact, rel=1e-3)
        assert found.largest <= exact * (1 + 1e-12)


@pytest.mark.slow
def test_the_error_estimate_covers_the_error():
    ratios = []
    for seed in range(40):
        matrix = torch.randn(
            120, 120, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
        )
        found = leading_singular(linear(matrix), problem=1, tolerance=3e-3)
        exact = float(torch.linalg.matrix_norm(matrix, 2))
        ratios.append((exact - found.largest) / (found.error * found.largest))
    assert sum(ratio <= 1 for ratio in ratios) >= 38


@pytest.mark.slow
def test_the_error_covers_99_of_100_spectra_without_a_gap():
    ratios = []
    for size in (50, 200, 400):
        even = torch.linspace(1 / size, 1, size, dtype=torch.float64)
        for values in (
            even,
            even.sqrt(),
            even.square(),
            torch.logspace(-2, 0, size, dtype=torch.float64),
        ):
            matrix = of_spectrum(values, size, 0)
            exact = float(torch.linalg.svdvals(matrix)[0])
            for seed in range(9):
                generator = torch.Generator().manual_seed(seed)
                found = leading_singular(
                    linear(matrix), problem=1, tolerance=1e-3, generator=generator
                )
                assert found.largest <= exact * (1 + 1e-12)
                ratios.append((exact - found.largest) / (found.error * found.largest))
    assert sum(ratio > 1 for ratio in ratios) <= len(ratios) / 100
    assert max(ratios) < 2


def test_restarts_keep_what_was_found():
    matrix = of_spectrum([1 + 0.001 * k for k in range(200)], 200, 0)
    short = leading_singular(linear(matrix), problem=1, cycle=8, tolerance=1e-4, limit=400)
    assert short.products > 16
    assert short.largest == pytest.approx(1.199, rel=3e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_several_values_and_their_vectors_with_repeated_ones(dtype):
    matrix = of_spectrum([5, 3, 3, 1] + [0.5] * 12, 16, 0).to(dtype)
    found = leading_singular(linear(matrix, dtype), problem=1, count=4, each=True, tolerance=1e-5)
    assert found.values.tolist() == pytest.approx([5, 3, 3, 1], rel=1e-4)
    right = found.right
    assert torch.allclose(right @ right.mT, torch.eye(4, dtype=dtype), atol=1e-4)
    assert torch.linalg.vector_norm(right @ matrix.mT, dim=-1).tolist() == pytest.approx(
        [5, 3, 3, 1], rel=1e-4
    )


def test_each_problem_of_a_batch_is_on_its_own():
    matrices = torch.stack(
        [of_spectrum([s, s / 2, s / 3, 0.1], 6, seed) for seed, s in enumerate((1e-3, 1, 50))]
    )
    found = leading_singular(linear(matrices), problem=1, count=2, each=True, tolerance=1e-6)
    assert torch.allclose(found.values, torch.linalg.svdvals(matrices)[:, :2], rtol=1e-6)
    assert found.largest == pytest.approx(50, rel=1e-6)


@pytest.mark.parametrize("value", [0.0, 2.0])
def test_zero_and_multiples_of_isometries_are_no_trouble(value):
    found = leading_singular(
        linear(value * torch.eye(5, dtype=torch.float64)), problem=1, count=3, each=True
    )
    assert found.values.tolist() == pytest.approx([value] * 3)
    assert found.errors.tolist() == pytest.approx([0.0] * 3, abs=1e-12)


@pytest.mark.parametrize("scale", [1e-16, 1e-12, 1e10, 1e16])
def test_float32_has_the_largest_value_of_any_scale(scale):
    matrices = (scale * of_spectrum([3, 2, 1], 6, 0)).float()
    found = leading_singular(linear(matrices, torch.float32), problem=1, tolerance=1e-3)
    assert found.values.item() == pytest.approx(3 * scale, rel=2e-3)
    assert 0 <= found.errors.item() < 0.01 * 3 * scale


def test_squares_near_the_largest_number_are_no_trouble():
    matrices = torch.stack([1.3e154 * torch.eye(2, dtype=torch.float64), torch.eye(2).double()])
    found = leading_singular(linear(matrices), problem=1)
    assert found.values.flatten().tolist() == pytest.approx([1.3e154, 1])


def test_a_square_whose_entries_alone_are_finite_is_unknown():
    """J = s 1 1' has J'J v = 16 s^2 v for v = 1/2, whose entries are finite and whose length is
    not.
    """
    s = 1.5e307**0.5
    matrices = torch.stack([torch.full((4, 4), s, dtype=torch.float64), torch.eye(4).double()])
    found = leading_singular(linear(matrices), problem=1)
    assert found.values[0].isnan()
    assert found.values[1].item() == pytest.approx(1)


def test_a_problem_that_is_not_finite_leaves_the_others_alone():
    matrices = torch.stack(
        [of_spectrum([1, 0.5], 2, 0), torch.full((2, 2), torch.nan, dtype=torch.float64)]
    )
    found = leading_singular(linear(matrices), problem=1)
    assert found.values[0].item() == pytest.approx(1)
    assert found.values[1].isnan()


def test_a_guess_is_used_and_cannot_hide_a_larger_value():
    matrix = torch.diag(torch.tensor([1.0, 2.0, *[0.1] * 60], dtype=torch.float64))
    wrong = torch.eye(62, dtype=torch.float64)[0]
    assert leading_singular(linear(matrix), problem=1, start=wrong).largest == pytest.approx(
        2, rel=1e-3
    )
    noise = torch.randn(400, 400, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    right = torch.linalg.svd(noise).Vh[0]
    cold, warm = (
        leading_singular(linear(noise), problem=1, start=start, tolerance=1e-5)
        for start in (None, right)
    )
    assert warm.products < 0.8 * cold.products


def test_push_and_pull_are_the_jacobian_and_its_transpose_and_chains_compose():
    weight = torch.randn(4, 6, dtype=torch.float64)
    first, x = (
        linearise(lambda x: torch.tanh(x @ weight.mT), torch.randn(6, dtype=torch.float64)),
        None,
    )
    second = linearise(torch.sin, first.y)
    x = first.x
    jacobian = torch.autograd.functional.jacobian(lambda x: torch.sin(torch.tanh(x @ weight.mT)), x)
    chain = compose([first, second])
    v, u = torch.randn(6, dtype=torch.float64), torch.randn(4, dtype=torch.float64)
    assert torch.allclose(chain.push(v), jacobian @ v)
    assert torch.allclose(chain.pull(u), jacobian.mT @ u)
    assert torch.allclose(chain.y, torch.sin(torch.tanh(weight @ x)))


@pytest.mark.parametrize("wrong", [{"count": 0}, {"tolerance": 0.0}, {"cycle": 2}, {"limit": 0}])
def test_senseless_requests_are_refused(wrong):
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        leading_singular(linear(torch.eye(4, dtype=torch.float64)), problem=1, **wrong)
