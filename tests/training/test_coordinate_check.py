"""mup's coordinate check on small models."""

import json
import math

import numpy as np
import pytest
import scipy.stats

from ctrans import GPTConfig
from ctrans.report.pages.coordinate_page import growth_words
from ctrans.training.coordinate_check import Power, coordinate_check, power_of
from ctrans.training.data import from_text
from ctrans.training.rows import Labelled
from ctrans.training.settings import TrainConfig
from solvers import ConfigError
from tests.cli.test_commands import run
from tests.training.helpers import TEXT

CONFIG = GPTConfig(
    vocab_size=256, context=8, depth=2, width=32, heads=2, placement="pre", initialisation="lecun", embedding_std=1.0
)
SETTINGS = TrainConfig(batch=4, learning_rate=1e-3, weight_decay=0.0)


def check(widths=(32, 64, 128), updates=2, **changes):
    return coordinate_check(CONFIG, widths, from_text(TEXT, 8), TrainConfig(**{**vars(SETTINGS), **changes}), updates=updates)


def test_states_do_not_grow_with_the_width_at_the_start_and_adams_updates_do():
    start, *_, end = check()
    sizes = [start.sizes[width] for width in (32, 64, 128)]
    for k in range(4):
        assert math.log(sizes[2][k] / sizes[0][k], 4) == pytest.approx(0, abs=0.1)
    assert all(math.isnan(slope) for slope in start.slopes())
    # entries of updates are all as large, so that a product with a vector grows with its length
    assert end.slopes()[-1] > 0.4


def test_the_sizes_are_those_of_the_states_and_slopes_are_of_the_changes():
    start, end = check(widths=(32, 64), updates=1)
    assert len(start.sizes[32]) == 2 * CONFIG.depth + 1
    expected = [math.log(end.changes[64][k] / end.changes[32][k], 2) for k in range(5)]
    assert end.slopes() == pytest.approx(expected)


@pytest.mark.parametrize("widths", [(32,), (32, 40), (0, 32)])
def test_widths_that_make_no_models_are_refused(widths):
    with pytest.raises(ConfigError, match="give at least two, multiples of a head's width 16"):
        check(widths=widths)


def test_an_exponent_has_the_standard_error_of_a_regression():
    widths, values = (16, 32, 64, 128), (1.0, 1.9, 3.4, 8.4)
    expected = scipy.stats.linregress([math.log(w) for w in widths], [math.log(v) for v in values])
    found = power_of(widths, values)
    assert (found.exponent, found.error) == pytest.approx((expected.slope, expected.stderr))
    assert math.isnan(power_of(widths[:2], values[:2]).error)
    assert math.isnan(power_of(widths, (1.0, 0.0, 1.0, 2.0)).exponent)


def test_words_say_no_more_than_was_measured():
    assert growth_words(Power(0.5, 0.03)) == "grows like width^+0.50 +- 0.03"
    assert growth_words(Power(-0.5, math.nan)) == "shrinks like width^-0.50"
    assert growth_words(Power(0.05, 0.03)) == "is not told from standing still (width^+0.05 +- 0.03)"


def test_the_command_names_the_place_that_grows_most(tmp_path):
    widths = [item for width in (16, 32, 64) for item in ("--widths", width)]
    result = run("coordinate-check", "--context", 8, "--batch", 2, "--depth", 1, "--width", 16, *widths, "--out", tmp_path)
    assert result.exit_code == 0, result.stderr
    found = json.loads((tmp_path / "coordinate-check.json").read_text())
    assert found["places"] == ["block 1, attention", "block 1, FFN", "logits"]
    last = [power["exponent"] for power in found["change_powers"][-1]]
    most = found["places"][last.index(max(last))]
    assert found["verdict"].startswith(f"most at {most}: its change ")
    assert f"{max(last):+.2f}" in found["verdict"]
    assert "after 3 updates, from width 16 to 64" in found["verdict"]
    assert (tmp_path / "coordinate-check.png").stat().st_size > 10_000
    refused = run("coordinate-check", "--widths", 20, "--widths", 40)
    assert (refused.exit_code, "multiples of a head's width 16" in refused.stderr) == (2, True)


def test_tokens_without_a_target_have_no_part_in_the_update():
    rows = np.random.default_rng(0).integers(0, 256, (20, 9))
    other = np.concatenate([rows[:, :8], (rows[:, 8:] + 1) % 256], axis=1)
    found = [
        coordinate_check(CONFIG, (32, 64), Labelled(each.reshape(-1), each.reshape(-1), 8, "rows"), SETTINGS, updates=1)
        for each in (rows, other)
    ]
    assert found[0][0] == found[1][0]  # the same tokens
    assert found[0][1].changes != found[1][1].changes  # and other targets
    assert min(found[0][1].changes[32]) > 0
