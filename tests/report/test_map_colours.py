"""The colours of maps: what is healthy looks alike, what is beyond a limit does not."""

import pytest

from ctrans.report.map_colours import colour_map, span


@pytest.mark.parametrize(
    ("low", "high", "log", "widened"),
    [
        (1.0, 1.01, False, (0.7525, 1.2575)),
        (0.0, 0.0, False, (-0.5, 0.5)),
        (0.0, 5.0, False, (0.0, 5.0)),
        (-2.0, -1.9, True, (-2.45, -1.45)),
        (-2.0, 1.0, True, (-2.0, 1.0)),
    ],
)
def test_a_range_is_a_decade_or_half_of_its_largest_figure_at_least(low, high, log, widened):
    assert span(low, high, log=log) == pytest.approx(widened)


def is_blue(colour):
    red, green, blue, _ = colour
    return red < green < blue


def test_what_is_within_the_limits_is_blue_and_what_is_beyond_is_orange_to_red():
    colours = colour_map(0.0, 10.0, (2.0, 8.0))
    assert [is_blue(colours(share)) for share in (0.0, 0.15, 0.25, 0.75, 0.85, 1.0)] == [
        False,
        False,
        True,
        True,
        False,
        False,
    ]
    red, green, blue, _ = colours(1.0)
    assert red > green > blue


def test_without_limits_a_map_has_no_colour_of_alarm():
    colours = colour_map(0.0, 1.0, (None, None))
    assert colours(0.0)[:3] == pytest.approx((0, 0x22 / 255, 0x4E / 255), abs=0.01)
