"""The picture of a screening where a logarithmic axis has no place for a figure."""

import dataclasses

import pytest

from ctrans.report.screen_figure import screen_figure
from ctrans.stability.screening.screen import EFFORTS, screen
from tests.helpers import small_model, tokens

TINY = dataclasses.replace(EFFORTS["quick"], tokens=6, certified=1, layers=2, starts=2)


@pytest.fixture(scope="module")
def with_a_zero():
    """A screening whose first attention layer passes nothing on through its rows."""
    text = tokens(2, 7)
    found = screen(small_model("pre", depth=2), text[:, :-1], text[:, 1:], TINY)
    attention = found.steps["attention"]
    first, second = attention.result.layers
    layers = [dataclasses.replace(first, path=0.0), second]
    result = dataclasses.replace(attention.result, layers=layers)
    return dataclasses.replace(found, steps={**found.steps, "attention": dataclasses.replace(attention, result=result)})


def test_a_zero_is_a_hollow_mark_at_the_foot_of_its_panel_and_the_legend_says_so(with_a_zero):
    figure = screen_figure({"one": with_a_zero}, "")
    panel = next(axes for axes in figure.axes if axes.get_title() == "attention's rows alone")
    (zero,) = [line for line in panel.get_lines() if line.get_marker() == "v" and line.get_fillstyle() == "none"]
    assert list(zero.get_xdata()) == [0]
    height = panel.transAxes.inverted().transform(zero.get_transform().transform((0, zero.get_ydata()[0])))[1]
    assert 0 < height < 0.1
    assert "0, below the axis (hollow)" in [text.get_text() for legend in figure.legends for text in legend.get_texts()]


def test_a_zero_in_a_heat_map_is_as_dark_as_the_least_and_not_the_grey_of_what_is_unknown(with_a_zero):
    figure = screen_figure({f"model {i}": with_a_zero for i in range(8)}, "")
    image = next(axes for axes in figure.axes if axes.get_title() == "attention's rows alone").get_images()[0]
    shown = image.get_array()
    assert not shown.mask.any()
    assert shown[0, 0] == shown.min() == image.norm.vmin
