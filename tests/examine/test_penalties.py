"""How the penalty needed is shown."""

import math
import re

import pytest
import torch

from ctrans.control.decay_threshold import DecayThreshold
from ctrans.examine.penalties import penalty


def shown(lower, upper):
    return penalty(DecayThreshold(lower, upper, bias=0.0, gains=False))


def ends(words):
    """The two numbers of an interval. Two of one power, d.d, have it at the second only."""
    first, second = re.fullmatch(r"([\d.]+(?:e-?\d+)?)-([\d.]+(?:e-?\d+)?)", words).groups()
    power = re.search(r"e-?\d+$", second)
    if power and re.fullmatch(r"\d\.\d", first):
        first += power.group()
    return float(first), float(second)


def test_the_shown_interval_contains_the_true_one():
    """It is rounded outwards: a penalty at its upper end suffices."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(500):
        size, share = torch.rand(2, generator=generator, dtype=torch.float64).tolist()
        lower = 10 ** (10 * size - 5)
        upper = lower * (1.2 + 2 * share)
        low, high = ends(shown(lower, upper))
        assert low <= lower * (1 + 1e-12)
        assert high >= upper * (1 - 1e-12)
        assert low >= 0.89 * lower
        assert high <= 1.11 * upper


@pytest.mark.parametrize(
    ("lower", "upper", "words"),
    [
        (0.672, 0.87196, "0.67-0.88"),
        (39.59, 42.91, "39-43"),
        (110.0, 149.0, "110-150"),
        (0.0, 0.0, "0"),
        (2.0, 2.0, "2"),
        (1.0, math.inf, "≥ 1"),
    ],
)
def test_some_intervals(lower, upper, words):
    assert shown(lower, upper) == words
