"""Verdicts follow their rule, and every preset is a study that can be carried out and judged."""

import dataclasses
import math

import numpy as np
import pytest
import scipy.stats

from ctrans.measure.measures import MEASURES
from ctrans.study.bootstrap import mean_interval, rows_to_decide
from ctrans.study.cost import cost_of
from ctrans.study.finished import Finished
from ctrans.study.presets.claim import (
    NOT_REPRODUCED,
    REPRODUCED,
    UNDECIDED,
    Contrast,
    effect,
    judge,
)
from ctrans.study.presets.figures import figure_of
from ctrans.study.presets.preset import SIZES
from ctrans.study.presets.table import PRESETS
from ctrans.study.training import RunResult
from solvers import ConfigError
from tests.study.helpers import small


def finished(losses):
    """Runs of `small`, three seeds, one rate, that end at these losses by placement and seed."""
    runs = []
    for run in small(seeds=[0, 1, 2], learning_rates=[1e-3]).runs():
        curve = [
            {"step": 0, "validation_loss": 5.0},
            {"step": 4, "validation_loss": losses[run.model.placement][run.training.seed]},
        ]
        runs.append(Finished(run.key(""), run, RunResult("finished", "", curve, 1.0, {}), "", ""))
    return runs


CONTRAST = Contrast("peri ends lower", {"placement": "pre"}, {"placement": "peri"})


def verdict(pre, peri, contrasts=(CONTRAST,)):
    return judge("claim", "source", contrasts, finished({"pre": pre, "peri": peri}))


def test_an_effect_is_the_difference_by_seed_and_its_mean_lies_in_its_interval():
    found = verdict([3.0, 3.2, 3.4], [2.0, 2.1, 2.0])
    (effect,) = found.effects
    assert effect.mean == pytest.approx((1.0 + 1.1 + 1.4) / 3)
    assert effect.low <= 1.0
    assert effect.high >= 1.4
    assert (effect.low + effect.high) / 2 == pytest.approx(
        effect.mean
    )  # of three seeds it is Student's
    assert effect.seeds == 3
    assert found.verdict == REPRODUCED


def test_the_rule():
    assert verdict([2.0, 2.1, 2.0], [3.0, 3.2, 3.4]).verdict == NOT_REPRODUCED
    assert verdict([2.0, 3.0, 2.0], [2.1, 2.9, 2.0]).verdict == UNDECIDED
    assert (
        verdict([2.0, 2.0, 2.0], [2.0, 2.0, 2.0]).verdict == UNDECIDED
    )  # no difference shows nothing either way
    opposite = dataclasses.replace(CONTRAST, sign=-1)
    assert verdict([3.0, 3.0, 3.0], [2.0, 2.0, 2.0], [CONTRAST, opposite]).verdict == NOT_REPRODUCED


def test_two_seeds_decide_nothing():
    runs = [
        run for run in finished({"pre": [3.0] * 3, "peri": [2.0] * 3}) if run.run.training.seed < 2
    ]
    assert judge("claim", "source", [CONTRAST], runs).verdict == UNDECIDED
    assert judge("claim", "source", [CONTRAST], []).verdict == UNDECIDED


def test_what_depth_did_not_teach_is_not_judged():
    """Of a task with a depthless floor of 5, the best case must end below 2.5."""
    runs = finished({"pre": [3.0, 3.2, 3.4], "peri": [2.6, 2.6, 2.6]})
    assert judge("claim", "source", [CONTRAST], runs, depthless_loss=5.0).verdict == UNDECIDED
    assert judge("claim", "source", [CONTRAST], runs, depthless_loss=5.3).verdict == REPRODUCED
    assert judge(
        "claim", "source", [CONTRAST], runs, depthless_loss=5.3
    ).best_loss == pytest.approx(2.6)


@pytest.mark.parametrize("values", [(0.1, -0.05, 0.2), (1.0, 1.1, 0.9), (-0.3, 0.1)])
def test_seeds_to_decide_are_the_least_whose_interval_leaves_out_0(values):
    """Oracle: scipy's interval of a sample of this mean and deviation, n = 2, 3, 4, ..."""
    mean, deviation = np.mean(values), np.std(values, ddof=1)
    n = rows_to_decide(values)
    widths = {
        k: scipy.stats.t.ppf(0.975, k - 1) * deviation / math.sqrt(k) for k in range(2, n + 1)
    }
    assert widths[n] < abs(mean)
    assert all(width >= abs(mean) for k, width in widths.items() if k < n)


def test_nothing_decides_an_effect_of_0():
    assert rows_to_decide([1.0, -1.0]) is None
    assert rows_to_decide([1.0]) is None


def test_at_most_is_a_contrast_with_its_sign_turned():
    contrast = Contrast(
        "at most 0.5 apart", {"placement": "pre"}, {"placement": "peri"}, beyond=0.5, sign=-1
    )
    assert verdict([2.1, 2.2, 2.3], [2.0, 2.0, 2.0], [contrast]).verdict == REPRODUCED
    assert verdict([3.1, 3.2, 3.3], [2.0, 2.0, 2.0], [contrast]).verdict == NOT_REPRODUCED


def test_the_interval_of_a_mean_covers_it_as_often_as_it_says():
    generator = np.random.default_rng(0)
    draws = [mean_interval(generator.normal(1.0, 1.0, 30)) for _ in range(60)]
    assert (
        sum(low <= 1.0 <= high for low, high in draws) >= 51
    )  # binomial(60, 0.93): below 51 once in 50
    assert all(math.isnan(value) for value in mean_interval([]))


@pytest.mark.cases(1)
@pytest.mark.parametrize("seeds", [3, 5])
def test_the_interval_of_a_few_seeds_covers_their_mean_as_often_as_it_says(seeds):
    """The percentile bootstrap alone covers 75% with three seeds, 84% with five."""
    generator = np.random.default_rng(0)
    draws = [mean_interval(generator.normal(1.0, 1.0, seeds)) for _ in range(200)]
    assert (
        sum(low <= 1.0 <= high for low, high in draws) >= 181
    )  # binomial(200, 0.95): below 181 once in 170
    values = generator.normal(size=seeds)
    low, high = mean_interval(values)
    theirs = scipy.stats.t.interval(0.95, seeds - 1, values.mean(), scipy.stats.sem(values))
    assert (low, high) == pytest.approx(theirs)


def test_one_seed_has_no_interval():
    assert all(math.isnan(value) for value in mean_interval([1.0]))
    assert all(math.isnan(value) for value in mean_interval([1.0, 2.0, math.nan, 3.0]))


def test_the_best_of_many_settings_is_chosen_on_other_seeds():
    """Of settings that differ by chance alone the lowest of one seed lies below any given one: that
    is no gain.
    """
    generator = np.random.default_rng(0)
    rates = [1e-3 * 1.1**i for i in range(12)]
    study = small(seeds=[0, 1, 2, 3], learning_rates=rates, vary={"placement": ["peri"]})
    usual = Contrast("gains by tuning", {"learning_rate": rates[0]}, {}, over="best")
    means = []
    for _ in range(20):
        runs = []
        for run in study.runs():
            curve = [
                {"step": 0, "validation_loss": 9.0},
                {"step": 4, "validation_loss": generator.normal(3.0, 0.1)},
            ]
            runs.append(Finished("", run, RunResult("finished", "", curve, 1.0, {}), "", ""))
        means.append(np.mean(list(usual.by_seed(runs).values())))
    # one study's mean deviates by 0.1 sqrt(2/4), so that of twenty by 0.016; the lowest of twelve
    # lies 0.16 below their mean
    assert abs(np.mean(means)) < 0.08


def test_a_run_that_failed_is_not_one_that_did_not_diverge():
    run = dataclasses.replace(
        finished({"pre": [1.0] * 3, "peri": [1.0] * 3})[0],
        result=RunResult("failed", "", [], 1.0, {}),
    )
    assert figure_of(run, "diverged") is None


@pytest.mark.cases(10)
@pytest.mark.parametrize("scale", SIZES)
@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_is_a_study_whose_runs_its_contrasts_find(name, scale):
    preset = PRESETS[name]
    study = preset.study(name, scale)
    curve = [{"step": 0, "validation_loss": 5.0}, {"step": 4, "validation_loss": 4.0}]
    kept = [
        Finished(run.key(""), run, RunResult("finished", "", curve, 1.0, {}), "", "")
        for run in study.runs()
    ]
    for contrast in preset.contrasts:
        assert f"run: {contrast.figure}" in MEASURES
        plain = dataclasses.replace(contrast, figure="loss")
        if scale == "small" or "batch" not in contrast.more:
            assert len(plain.by_seed(kept)) == len(preset.seeds) >= 3
    assert preset.claim
    assert preset.source


@pytest.mark.cases(10)
@pytest.mark.parametrize("name", PRESETS)
def test_small_is_small(name):
    """20 minutes on two processors, at the 12 GFLOP/s that a run of `recall` took on one; 3 hours
    for a text, at the 80 GFLOP/s of a wider model in bfloat16.
    """
    study = PRESETS[name].study(name, "small")
    limit, speed = (1 / 3, 12e9) if study.task else (3, 80e9)
    assert cost_of(study.runs(), speed).hours(2) < limit


def test_a_preset_of_a_text_reads_that_text_and_no_other():
    preset = PRESETS["text"]
    assert preset.study("text", "small").source["bin"] == "out/dictionaries"
    assert preset.study("text", "paper").source["bin"] is None


def test_a_wrong_scale_is_refused():
    with pytest.raises(ConfigError, match="small or paper"):
        PRESETS["depth"].study("depth", "tiny")


def trained(losses, *, ending="finished", frequencies_loss=None):
    """A run with these training losses, of which the last one is its validation loss too."""
    (run, *_) = small(seeds=[0], learning_rates=[1e-3]).runs()
    curve = [{"step": step, "loss": loss} for step, loss in enumerate(losses, 1)]
    curve = [{"step": 0, "validation_loss": 5.0}, *curve]
    curve.append({"step": len(losses), "validation_loss": losses[-1]})
    environment = {} if frequencies_loss is None else {"frequencies_loss": frequencies_loss}
    result = RunResult(ending, "", curve, 1.0, environment)
    return Finished(run.key(""), run, result, "", "")


@pytest.mark.parametrize(
    ("run", "diverged"),
    [
        (trained([3.0] * 50 + [1.0] * 300), 0.0),
        (trained([1.0] * 50 + [2.5] * 99 + [1.0] * 50), 0.0),
        (trained([1.0] * 50 + [2.5] * 100 + [1.0] * 50), 1.0),
        (trained([1.0] * 50 + [math.nan] * 100 + [1.0]), 1.0),
        (trained([1.0] * 50, ending="diverged"), 1.0),
        (trained([3.0] * 300, frequencies_loss=2.9), 1.0),
        (trained([3.0] * 300, frequencies_loss=3.1), 0.0),
        (trained([3.0], ending="failed"), None),
    ],
    ids=str,
)
def test_a_run_has_diverged_by_the_rule_in_words(run, diverged):
    assert figure_of(run, "diverged") == diverged


def test_the_spike_score_is_the_share_of_steps_far_above_those_before_them():
    noise = np.random.default_rng(0).normal(2.0, 0.1, size=1128)
    noise = np.clip(noise, 1.8, 2.2)
    spiky = noise.copy()
    spiky[[300, 700]] = 4.0

    # by hand: the mean and deviation of 128 steps, with numpy
    expected = np.mean(
        [
            spiky[step] > spiky[step - 128 : step].mean() + 6 * spiky[step - 128 : step].std()
            for step in range(128, 1128)
        ]
    )
    assert expected == 2 / 1000
    assert figure_of(trained(list(spiky)), "spike score") == pytest.approx(expected)
    assert figure_of(trained(list(noise)), "spike score") == 0.0
    assert figure_of(trained([1.0] * 100), "spike score") is None


def test_losses_that_are_not_finite_are_spikes_and_leave_those_behind_them_as_they_are():
    noise = np.random.default_rng(0).uniform(1.8, 2.2, size=400)
    broken = np.insert(noise, [200, 201, 350], [math.nan, math.inf, math.nan])

    assert figure_of(trained(list(broken)), "spike score") == pytest.approx(3 / (403 - 128))


def with_sizes(sizes):
    run = trained([1.0] * 5)
    measured = {"after": {"moments": {"mean_abs": sizes, "variance": sizes}}}
    return dataclasses.replace(run, result=dataclasses.replace(run.result, trained=measured))


@pytest.mark.parametrize("segments", [2, 3, 5, 7, 8])
@pytest.mark.parametrize("power", [0.5, 1.0, 2.0])
def test_the_growth_exponent_is_that_of_a_power_for_any_number_of_segments(segments, power):
    sizes = [0.3 * k**power for k in range(segments + 1)]

    assert figure_of(with_sizes(sizes), "growth exponent") == pytest.approx(power)


@pytest.mark.parametrize("sizes", [[1.0, 2.0], [0.0, 0.0, 1.0], [1.0, 1.0, math.inf]])
def test_without_a_finite_growth_exponent_there_is_none(sizes):
    assert figure_of(with_sizes(sizes), "growth exponent") is None


def test_a_figure_that_is_no_number_counts_as_unknown():
    run = trained([1.0] * 5)
    known = {"theta": [0.1], "log_S": [1.0]}
    measured = {
        "before": {"attention": known},
        "after": {"attention": {**known, "log_S": [math.nan]}},
    }
    run = dataclasses.replace(run, result=dataclasses.replace(run.result, trained=measured))

    assert figure_of(run, "S drift") is None
    assert figure_of(run, "theta") == 0.1


def test_an_effect_with_a_limit_says_the_figure_too():
    """The effect of "at most 1.1" is 1.1 - figure, which nobody must take for the figure."""
    contrast = Contrast("at most 1.1", {}, figure="growth exponent", beyond=1.1, sign=-1)
    study = PRESETS["kan-figure-1"].study("kan-figure-1", "small")
    curve = [{"step": 0, "validation_loss": 2.0}]
    # mean |X_k| of 1 at the middle and 2^0.25 at the end: an exponent of 1/4
    trained = {"after": {"moments": {"mean_abs": [1.0, 1.0, 1.0, 1.0, 2**0.25]}}}
    runs = [
        Finished(run.key(""), run, RunResult("finished", "", curve, 1.0, {}, trained), "", "")
        for run in study.runs()
    ]
    found = effect(contrast, runs)
    assert found.mean == pytest.approx(0.85)
    assert (found.beyond, found.difference) == (1.1, pytest.approx(0.25))
