"""A gap between two settings beside its spread over seeds: scipy's t-test, and the rate at which
seeds alone make it.
"""

import math

import numpy as np
import pytest
from scipy import stats

from ctrans.study.bootstrap import gap_over_seeds
from solvers import ConfigError


@pytest.mark.parametrize(("n", "m"), [(3, 3), (2, 5), (8, 2)])
def test_it_is_the_t_test_of_equal_variances(n, m):
    draws = np.random.default_rng(0)
    one, two = draws.normal(2.0, 0.1, n).tolist(), draws.normal(2.1, 0.1, m).tolist()
    gap, spread, chance = gap_over_seeds(one, two)
    assert gap == pytest.approx(np.mean(two) - np.mean(one))
    assert spread == pytest.approx(math.sqrt((np.var(one) * n + np.var(two) * m) / (n + m - 2)))
    assert chance == pytest.approx(stats.ttest_ind(one, two).pvalue)


def test_one_run_against_several_seeds_is_the_prediction_interval():
    """t = gap/(s (1 + 1/n)^(1/2)) with n - 1 degrees."""
    one = [2.00, 2.05, 1.95, 2.02]
    gap, spread, chance = gap_over_seeds(one, [2.3])
    assert spread == pytest.approx(np.std(one, ddof=1))
    assert chance == pytest.approx(2 * stats.t.sf(gap / (spread * math.sqrt(1.25)), 3))
    assert gap_over_seeds([2.3], one)[0] == pytest.approx(-gap)


def test_seeds_alone_make_a_gap_as_often_as_it_says():
    draws = np.random.default_rng(0)
    chances = [
        gap_over_seeds(draws.normal(size=3).tolist(), draws.normal(size=3).tolist())[2]
        for _ in range(2000)
    ]
    for level in (0.05, 0.5):
        assert np.mean(np.array(chances) <= level) == pytest.approx(
            level, abs=3 * math.sqrt(level * (1 - level) / 2000)
        )


def test_equal_losses_leave_no_doubt():
    assert gap_over_seeds([2.0, 2.0], [2.0, 2.0]) == (0.0, 0.0, 1.0)
    assert gap_over_seeds([2.0, 2.0], [2.5, 2.5]) == (0.5, 0.0, 0.0)


@pytest.mark.parametrize(
    "losses",
    [([], [1.0, 2.0, 3.0]), ([1.0], [2.0]), ([1.0, 2.0], [math.inf]), ([1.0, math.nan], [2.0])],
)
def test_too_few_losses_and_those_of_a_diverged_run_are_refused(losses):
    with pytest.raises(ConfigError, match="give finite ones of two settings, three or more in all"):
        gap_over_seeds(*losses)
