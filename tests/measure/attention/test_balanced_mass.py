import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ctrans.measure.attention.balanced_mass import EXACT, balanced_mass, smallest_difference
from ctrans.theory.theta import greedy_prefix, peaked_bound, softmax_jacobian
from solvers import ConfigError


def noise(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def subsets(entries):
    """Every subset as a row of zeros and ones; the complements in reverse order."""
    return ((torch.arange(2**entries).unsqueeze(-1) >> torch.arange(entries)) & 1).double()


def brute(p):
    """4 max_S p(S) p(not S), over every S."""
    masses = p @ subsets(p.shape[-1]).T
    return (4 * masses * masses.flip(-1)).amax(-1) / p.sum(-1).square()


@pytest.mark.slow
@given(st.integers(1, 13), st.floats(-3, 1.3), st.booleans(), st.integers(0, 10_000))
@settings(max_examples=150)
def test_exact_theta_is_brute_force(entries, spread, tied, seed):
    logits = 10**spread * noise(5, entries, seed=seed)
    p = (logits.round(decimals=1) if tied else logits).softmax(-1)
    found = balanced_mass(p)
    assert found.width.max() == 0
    assert (found.lower - brute(p)).abs().max() <= 1e-15


@pytest.mark.slow
def test_exact_theta_is_brute_force_at_twenty_entries():
    p = noise(3, 20).softmax(-1)
    assert (balanced_mass(p).lower - brute(p)).abs().max() <= 1e-15


@pytest.mark.slow
@given(
    st.integers(EXACT + 1, 34),
    st.sampled_from([0.0, 0.01, 0.04, 0.3, 1.0, 2.0, 5.0]),
    st.integers(0, 10_000),
)
@settings(max_examples=40)
def test_a_bracket_encloses_the_exact_value_and_is_as_narrow_as_asked(entries, spread, seed):
    p = (spread * noise(2, entries, seed=seed)).softmax(-1)
    exact = 1 - smallest_difference(p).square()
    found = balanced_mass(p)
    assert (found.lower <= exact + 1e-15).all()
    assert (exact <= found.upper + 1e-15).all()
    # up to the largest of `LEVELS` entries, the last resort is exact
    assert found.width.max() <= 1e-9


@pytest.mark.cases(1)
@pytest.mark.parametrize("entries", [32, 35, 64, 100, 257])
def test_rows_of_normal_logits_are_known_to_a_billionth(entries):
    for spread in (0.3, 1.0, 1.5, 2.0, 4.0):
        assert balanced_mass((spread * noise(300, entries)).softmax(-1)).width.max() <= 1e-9


@pytest.mark.slow
@given(st.integers(17, 100), st.floats(0, 1))
def test_nearly_equal_entries_of_odd_number_are_exact_by_parity(half, share):
    """p_i = q + r_i with sum abs(r) below q: delta = q - sum abs(r - median)."""
    entries = 2 * half + 1
    wobble = noise(entries)
    p = 1 + wobble * share / (4 * wobble.abs().sum())
    p = p / p.sum()
    median = p.median()
    found = balanced_mass(p)
    assert float(found.width) <= 1e-15
    assert float(found.upper) == pytest.approx(
        1 - float(median - (p - median).abs().sum()) ** 2, abs=1e-15
    )


@pytest.mark.slow
@given(st.integers(31, 200), st.floats(0.5, 0.999), st.integers(0, 1000))
def test_a_top_mass_above_one_half_makes_theta_exact(entries, top, seed):
    p = torch.cat(
        [
            torch.tensor([top], dtype=torch.float64),
            (1 - top) * noise(entries, seed=seed).softmax(-1),
        ]
    )
    found = balanced_mass(p)
    assert float(found.width) == 0
    assert float(found.lower) == pytest.approx(4 * top * (1 - top), abs=1e-14)


def test_heavy_entries_with_a_light_tail_are_bounded_from_above():
    """Five equal entries and a tail of 1e-3: no split is nearer to even than 3 against 2 and the
    tail.
    """
    p = torch.cat([torch.full((5,), 0.1998), torch.full((100,), 1e-5)]).double()
    p = p / p.sum()
    found = balanced_mass(p)
    delta = float(p[0] - 100 * p[-1])
    assert float(found.upper) == pytest.approx(1 - delta**2, abs=1e-12)
    assert float(found.width) <= 1e-12


def test_theta_of_the_regimes_is_in_closed_form():
    for entries in (1, 2, 5, 8, 31, 64, 301):
        uniform = torch.full((entries,), 1 / entries, dtype=torch.float64)
        assert float(balanced_mass(uniform).upper) == pytest.approx(
            1 - (entries % 2) / entries**2, abs=1e-15
        )
        one_hot = torch.eye(entries, dtype=torch.float64)
        assert balanced_mass(one_hot).upper.abs().max() == 0
    assert float(balanced_mass(torch.tensor([0.4, 0.1, 0.4, 0.1])).lower) == pytest.approx(
        1.0, abs=1e-7
    )


@pytest.mark.slow
@given(st.integers(1, 9), st.floats(0.1, 5), st.integers(0, 1000))
@settings(max_examples=50)
def test_the_softmax_jacobians_norm_is_theta_over_tau(entries, tau, seed):
    p = (noise(entries, seed=seed) / tau).softmax(-1)
    signs = 2 * subsets(entries) - 1
    norm = (signs @ softmax_jacobian(p, tau)).abs().sum(-1).amax()
    assert float(norm) == pytest.approx(float(balanced_mass(p).lower) / tau, abs=1e-14)


def test_greedy_prefixes_miss_theta_though_the_paper_says_they_do_not():
    """Emadi, E.2, claims equality for up to 16 entries."""
    missed = {}
    for entries in (4, 8, 16):
        p = noise(400, entries).softmax(-1)
        gap = balanced_mass(p).lower - greedy_prefix(p)
        assert gap.min() >= -1e-14
        missed[entries] = (float((gap > 1e-12).double().mean()), float(gap.max()))
    assert 0.3 < missed[4][0] < 0.55
    assert missed[16][0] > 0.95
    assert max(gap for _, gap in missed.values()) > 0.05


def test_the_peaked_corollary_fails_above_one_half_and_holds_below():
    p = torch.tensor([0.3, 0.25, 0.25, 0.2], dtype=torch.float64)
    kappa = 0.7
    assert float(balanced_mass(p).lower) == pytest.approx(1.0, abs=1e-15)
    assert 4 * kappa * (1 - kappa) == pytest.approx(0.84)
    assert float(peaked_bound(p)) == 1.0


@pytest.mark.slow
@given(st.integers(1, 12), st.floats(-1, 1), st.integers(0, 10_000))
def test_theta_never_exceeds_the_corrected_peaked_bound(entries, spread, seed):
    p = (10**spread * noise(4, entries, seed=seed)).softmax(-1)
    assert (balanced_mass(p).upper <= peaked_bound(p) + 1e-14).all()


def test_rows_of_different_lengths_are_solved_together_as_alone():
    causal = (
        noise(3, 60, 60)
        .masked_fill(torch.ones(60, 60, dtype=torch.bool).triu(1), -math.inf)
        .softmax(-1)
    )
    together = balanced_mass(causal)
    for head, row in [(0, 0), (1, 1), (2, 29), (0, 30), (1, 45), (2, 59)]:
        alone = balanced_mass(causal[head, row, : row + 1])
        assert float(alone.lower) <= float(together.upper[head, row]) + 1e-15
        assert float(together.lower[head, row]) <= float(alone.upper) + 1e-15
    assert together.width.max() <= 1e-9


def test_masked_rows_are_reported_as_such():
    p = torch.zeros(2, 3, 40)
    p[0, 0] = 1 / 40
    found = balanced_mass(p)
    assert found.masked.tolist() == [[False, True, True], [True, True, True]]
    assert found.lower[found.masked].tolist() == [0.0] * 5
    assert not found.lower.isnan().any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_of_low_precision_are_scaled_to_sum_to_one(dtype):
    p = noise(50, 300).to(dtype).softmax(-1)
    found = balanced_mass(p)
    assert found.lower.dtype == torch.float64
    assert found.upper.max() <= 1


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ([0.5, 0.6], "row 1 does not sum to 1"),
        ([math.nan, 1.0], "row 1 is not finite"),
        ([math.inf, 0.0], "row 1 is not finite"),
        ([1.5, -0.5], "row 1 has a negative entry"),
    ],
)
def test_rows_that_are_no_distributions_are_named(row, message):
    with pytest.raises(ConfigError, match=message):
        balanced_mass(torch.tensor([[0.5, 0.5], row]))
    with pytest.raises(ConfigError, match="tolerance"):
        balanced_mass(torch.tensor([0.5, 0.5]), tolerance=0.0)


@pytest.mark.untyped
def test_no_entries_give_no_rows_and_a_tolerance_may_be_of_numpy():
    assert balanced_mass(torch.zeros(2, 0)).lower.shape == (2,)
    balanced_mass(torch.tensor([0.5, 0.5]), tolerance=np.float32(1e-6))
