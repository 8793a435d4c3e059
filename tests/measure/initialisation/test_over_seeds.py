"""Measured over seeds beside theory: confidence intervals, growth of hidden states, gradients of
the last layer by depth.
"""

import dataclasses
import math

import numpy as np
import pytest
import torch
from scipy import stats

from ctrans.measure.initialisation.over_seeds import (
    Interval,
    Setting,
    gradient_slope,
    hidden_growth,
    interval,
    last_gradient,
)
from ctrans.measure.initialisation.theory import gains
from ctrans.model.initialisation import INITIALISATIONS
from solvers import ConfigError

SMALL = Setting(width=32, tokens=6)


def noise(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def farthest(growth):
    """The distance of the interval that lies farthest outside its range."""
    return max(
        m.outside(low, high)
        for m, low, high in zip(growth.measured, growth.low, growth.high, strict=True)
    )


def test_intervals_are_scipys():
    samples = np.random.default_rng(0).normal(size=12)
    low, high = stats.t.interval(0.95, 11, loc=samples.mean(), scale=stats.sem(samples))
    found = interval(samples.tolist())
    assert (found.low, found.high) == pytest.approx((low, high))
    assert interval(samples.tolist(), 10).high > found.high
    assert interval([2.0]) == Interval(2.0, -math.inf, math.inf)
    assert Interval(0.0, -1.0, 1.0).outside(1.0, 2.0) == 0
    assert Interval(0.0, -1.0, 1.0).outside(1.1, 2.0) == pytest.approx(0.05)


def test_inputs_have_numbers_of_their_own():
    """torch's generator takes a seed modulo 2^32: an offset of 2^32 gave the numbers of the
    weights.
    """
    assert not torch.equal(SMALL.inputs(3), noise(1, 6, 32, seed=3))


def test_the_ranges_are_lemma_2s():
    (growth,) = hidden_growth("pre", 6, 2, SMALL)
    assert growth.low == pytest.approx([1.5, 2.0, 2.5, 3.0, 3.5, 4.0])
    assert growth.high == pytest.approx([2.5, 4.0, 5.5, 7.0, 8.5, 10.0])
    attention, ffn = hidden_growth("post", 6, 2, SMALL)
    assert ffn.low == ffn.high == pytest.approx([1.5] * 6)
    assert attention.low == [1.0] * 6
    assert attention.high == pytest.approx([2.0] * 6)


@pytest.mark.slow
def test_what_is_outside_of_its_range_does_not_hold():
    (growth,) = hidden_growth("pre", 6, 24, SMALL)
    assert farthest(growth) <= 0
    assert farthest(dataclasses.replace(growth, high=[1.5] * 6)) > 0


@pytest.mark.slow
def test_before_the_attentions_norm_hidden_states_of_post_grow_as_tokens_align():
    """E|x|^2/d from 1 + 1/n for independent tokens, towards 2: not 3/2, as it is printed."""
    attention, _ = hidden_growth("post", 6, 24, SMALL)
    assert attention.measured[0].high < 1.4
    assert attention.measured[-1].mean > attention.measured[0].mean + 0.3


def test_lemma_2_is_about_two_placements():
    with pytest.raises(ConfigError, match="'peri'"):
        hidden_growth("peri", 2, 2, SMALL)


@pytest.mark.slow
def test_a_single_token_attains_the_upper_end_of_lemma_2():
    (growth,) = hidden_growth("pre", 3, 200, Setting(width=32, tokens=1))
    assert farthest(dataclasses.replace(growth, low=growth.high)) <= 0


@pytest.mark.cases(1)
@pytest.mark.parametrize("hidden", [16, 64])
def test_the_gain_of_the_ffn_is_exact(hidden):
    """E|W_2 relu(W_1 z)|^2/d for |z|^2 = d."""
    setting = Setting(width=16, ffn_width=hidden, initialisation="he")
    z = 4.0 * torch.nn.functional.normalize(noise(4000, 16), dim=-1)
    squares = []
    for seed in range(40):
        ffn = setting.model("pre", 1, seed).depth.sublayers[1].field
        squares.append(float(ffn(z[seed : seed + 1].unsqueeze(0)).detach().square().mean()))
    assert interval(squares).outside(*[gains("he", 1, 16, hidden)[1]] * 2) <= 0


@pytest.mark.slow
@pytest.mark.parametrize(("placement", "slope"), [("post", 0.0), ("pre", -0.5), ("peri", -0.5)])
def test_the_slopes_from_depth_16_to_64_are_theorem_1s(placement, slope):
    assert abs(gradient_slope(placement).mean - slope) <= 0.1


def test_a_slope_needs_two_depths():
    with pytest.raises(ConfigError, match="at least two different depths"):
        gradient_slope("pre", (16, 16), 2, SMALL)


@pytest.mark.cases(2)
@pytest.mark.parametrize("initialisation", INITIALISATIONS)
def test_every_initialisation_grows_within_its_range(initialisation):
    setting = dataclasses.replace(SMALL, initialisation=initialisation, heads=2, ffn_width=64)
    (growth,) = hidden_growth("pre", 4, 16, setting)
    assert growth.measured[-1].outside(growth.low[-1], growth.high[-1]) <= 0
    assert last_gradient("pre", 4, 0, setting) > 0


def test_variances_of_drawn_weights_are_products_in_the_gains():
    """10/d, drawn as std^2 = 10/fan_in: ten times LeCun's variance in each of two matrices."""
    lecun, large, small = (gains(name, 4, 32, 64)[1] for name in ("lecun", "large", "small"))
    assert large == pytest.approx(100 * lecun)
    assert small == pytest.approx(lecun / 100)


def test_the_same_seed_gives_the_same_gradient():
    assert last_gradient("pre", 3, 5, SMALL) == last_gradient("pre", 3, 5, SMALL)
    assert last_gradient("pre", 3, 5, SMALL) != last_gradient("pre", 3, 6, SMALL)
