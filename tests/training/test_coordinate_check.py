"""mup's coordinate check on small models."""

import math

import pytest

from ctrans import GPTConfig
from ctrans.training.coordinate_check import coordinate_check
from ctrans.training.data import from_text
from ctrans.training.settings import TrainConfig
from solvers import ConfigError
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
