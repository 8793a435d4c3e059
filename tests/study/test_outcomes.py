"""Outcomes of made-up runs against Wortsman's definitions, worked out by hand."""

import pytest

from ctrans.study.database import Finished
from ctrans.study.outcomes import case_outcomes
from ctrans.study.training import RunResult
from tests.study.helpers import small

RATES = [1e-3, 1e-2, 1e-1, 1.0]


def runs(ends):
    """Runs from a loss of 5; by rate, the ends of the seeds: a loss, or how else one ended."""
    study = small(vary={"placement": ["pre"]}, learning_rates=RATES[: len(ends)], seeds=list(range(len(ends[0]))))
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
        ([[2.0, 2.0], ["failed", "failed"], [2.1, 2.1], [5.0, 5.0]], 1e-3),  # of one that failed nothing is known
        ([[2.0, 2.0], ["failed", 2.0], [2.1, 2.1], [5.0, 5.0]], 1e-3),
        ([["diverged", "diverged"], [6.0, 6.0]], None),
    ],
)
def test_the_largest_stable_rate_ends_an_unbroken_row(ends, largest):
    assert case_outcomes(runs(ends))["largest stable learning rate"] == largest
