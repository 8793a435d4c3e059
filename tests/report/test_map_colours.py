"""The colours of maps: what is healthy looks alike, what is beyond a limit does not."""

import pytest

from ctrans.report.map_colours import colour_of, span
from ctrans.report.picture import draw
from ctrans.report.sections import Line, Plot


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


@pytest.mark.parametrize("healthy", [2.0, 2.5, 8.0])
def test_what_is_within_the_limits_is_blue_also_at_a_limit(healthy):
    assert is_blue(colour_of(healthy, 0.0, 10.0, (2.0, 8.0)))


@pytest.mark.parametrize("ill", [0.0, 1.999, 8.001, 10.0])
def test_what_is_beyond_the_limits_is_orange_to_red(ill):
    red, green, blue, _ = colour_of(ill, 0.0, 10.0, (2.0, 8.0))
    assert red > green > blue


def test_without_limits_a_map_has_no_colour_of_alarm():
    colour = colour_of(0.0, 0.0, 1.0, (None, None))
    assert colour[:3] == pytest.approx((0, 0x22 / 255, 0x4E / 255), abs=0.01)


def test_a_picture_shows_the_one_figure_that_is_beyond_a_limit():
    """Of 40 models one is beyond the limit; the others differ by a few percent."""
    lines = [Line(f"model {i}", [0.0, 1.0], [1 + i / 1000] * 2, "pre") for i in range(40)]
    lines.append(Line("ill", [0.0, 1.0], [1.0, 150.0], "pre"))
    figure = draw([Plot("A chart", "segment", "gain", lines, limits=(None, 100.0))], "")
    colours = figure.axes[0].images[0].get_array()
    assert all(is_blue(colour) for row in colours[:-1] for colour in row)
    assert not is_blue(colours[-1][1])
