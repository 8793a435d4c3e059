"""Outcomes of made-up runs against Wortsman's definitions, worked out by hand."""

import math

import numpy as np
import pytest

from ctrans.study.finished import Finished
from ctrans.study.outcomes import (
    BY_FLOOR,
    BY_SHARE,
    DEEPER,
    Floor,
    case_outcomes,
    curves,
    rate_by_floor,
    stable_rule,
)
from ctrans.study.training import RunResult
from tests.study.helpers import small

RATES = [1e-3, 1e-2, 1e-1, 1.0]


def runs(ends):
    """Runs from a loss of 5; by rate, the ends of the seeds: a loss, or how else one ended."""
    study = small(
        vary={"placement": ["pre"]},
        learning_rates=RATES[: len(ends)],
        seeds=list(range(len(ends[0]))),
    )
    found = []
    for run in study.runs():
        end = ends[RATES.index(run.training.learning_rate)][run.training.seed]
        first = [] if end == "failed" else [{"step": 0, "validation_loss": 5.0}]
        last = [] if isinstance(end, str) else [{"step": 4, "validation_loss": end}]
        ending = end if isinstance(end, str) else "finished"
        found.append(Finished("", run, RunResult(ending, "", first + last, 1.0, {}), "", ""))
    return found


def test_sensitivity_is_the_mean_loss_above_the_best_with_no_loss_above_the_first():
    found = case_outcomes(runs([[3.0], [2.0], ["diverged"], [7.0]]))
    assert found["best loss"] == 2.0
    assert found["best learning rate"] == 1e-2
    assert found["sensitivity"] == pytest.approx(((3 - 2) + 0 + (5 - 2) + (5 - 2)) / 4)


@pytest.mark.parametrize(
    ("ends", "largest"),
    [
        (
            [[2.0, 2.0], [2.2, 2.25], [4.0, 2.0], [2.0, 2.0]],
            1e-2,
        ),  # one seed misses more than it may; what is stable above is no matter
        (
            [[2.6, 2.6], [2.5, "diverged"], [2.0, 2.1], [5.0, 5.0]],
            1e-1,
        ),  # from the best upwards: what is unstable below is no matter
        (
            [[2.0, 2.0], ["failed", "failed"], [2.1, 2.1], [5.0, 5.0]],
            1e-3,
        ),  # of one that failed nothing is known
        ([[2.0, 2.0], ["failed", 2.0], [2.1, 2.1], [5.0, 5.0]], 1e-3),
        ([["diverged", "diverged"], [6.0, 6.0]], None),
    ],
)
def test_the_largest_stable_rate_ends_an_unbroken_row(ends, largest):
    assert case_outcomes(runs(ends))["largest stable learning rate"] == largest


FLOOR = Floor(2.0, 2.5)


def test_the_rate_by_the_floor_is_where_a_piecewise_linear_curve_crosses_the_level():
    # the best is 1 at 1e-3, the level 1.5: from 1.2 at 1e-2 to 2.2 at 1e-1 it is crossed after 0.3
    # of a decade
    ends = {1e-1: [2.2], 1e-3: [1.0], 1e-4: [1.9], 1e-2: [1.2], 1.0: [1.1]}
    found = rate_by_floor(ends, FLOOR)
    assert found.rate == pytest.approx(10**-1.7)
    assert not found.at_least


@pytest.mark.parametrize("seed", range(20))
def test_the_rate_by_the_floor_is_that_of_a_dense_search(seed):
    draws = np.random.default_rng(seed)
    logs = np.sort(draws.uniform(-4, 0, 6))
    means = draws.permutation([0.5, *draws.uniform(0.5, 2.4, 5)])
    spread = draws.uniform(0, 0.1, 6)
    ends = {
        float(10**at): [mean - by, mean + by]
        for at, mean, by in zip(logs, means, spread, strict=True)
    }
    grid = np.linspace(logs[means.argmin()], logs[-1], 400_001)
    over = np.flatnonzero(np.interp(grid, logs, means) > (means.min() + FLOOR.depth) / 2)
    found = rate_by_floor(dict(reversed(ends.items())), FLOOR)
    assert found.at_least == (len(over) == 0)
    assert math.log10(found.rate) == pytest.approx(
        grid[over[0]] if len(over) else logs[-1], abs=2e-5
    )


@pytest.mark.parametrize("never", [math.nan, math.inf])
def test_what_is_not_finite_or_above_a_guess_counts_as_a_guess(never):
    # means 1.0 and (1 + 2.5)/2 = 1.75: the level 1.5 lies two thirds of the decade up
    expected = pytest.approx(10 ** (-3 + 2 / 3))
    assert rate_by_floor({1e-3: [1.0, 1.0], 1e-2: [1.0, never]}, FLOOR).rate == expected
    assert rate_by_floor({1e-3: [1.0, 1.0], 1e-2: [1.0, 9.0]}, FLOOR).rate == expected


def test_a_curve_that_never_crosses_gives_a_lower_bound():
    for ends in ({1e-3: [1.0], 1e-2: [1.5]}, {1e-3: [1.9], 1e-2: [1.0]}, {1e-3: [1.0]}):
        found = rate_by_floor(ends, FLOOR)
        assert (found.rate, found.at_least) == (max(ends), True)


def test_a_case_near_the_floor_has_no_rate_and_says_why():
    edge = (1 - DEEPER) * FLOOR.depth
    assert rate_by_floor({1e-3: [edge], 1e-2: [2.5]}, FLOOR).rate is not None
    for ends in ({1e-3: [edge + 1e-9], 1e-2: [2.5]}, {1e-3: [math.nan]}, {}):
        found = rate_by_floor(ends, FLOOR)
        assert found.rate is None
        assert found.reason


def test_outcomes_by_the_floor_take_diverged_runs_as_a_guess_and_no_failed_ones():
    ends = [
        [1.0],
        [1.0],
        ["diverged"],
        [1.0],
    ]  # from 1.0 at 1e-2 to 2.5 at 1e-1: the level 1.5 after a third
    found = case_outcomes(runs(ends), FLOOR)
    assert found["largest stable learning rate"] == pytest.approx(10 ** (-2 + 1 / 3))
    assert found["at least"] == 0
    assert case_outcomes(runs([[1.0], [1.1]]), FLOOR)["at least"] == 1
    for none, why in (([[1.0], ["failed"]], "1 of 2 runs failed"), ([[1.0]], "one learning rate")):
        case = runs(none)
        assert case_outcomes(case, FLOOR)["largest stable learning rate"] is None
        (reason,) = stable_rule(case, FLOOR)["missing"].values()
        assert why in reason


def test_a_result_names_its_rule_and_its_floor():
    each = runs([[1.0], [1.1]])
    assert stable_rule(each, FLOOR) == {
        "rule": BY_FLOOR,
        "missing": {},
        "depthless_loss": 2.0,
        "guess_loss": 2.5,
    }
    assert stable_rule(each, None) == {
        "rule": BY_SHARE,
        "missing": {},
        "depthless_loss": None,
        "guess_loss": None,
    }


def test_a_run_that_ended_without_a_loss_stays_in_the_curve_with_its_first_one():
    at_end = curves(runs([[1.0, "diverged", 3.0]]))
    ((_, spread),) = at_end.items()
    assert spread["steps"] == [0, 4]
    assert spread["mean"] == [5.0, 3.0]
    assert spread["highest"] == [5.0, 5.0]
