"""Pictures: a zero on a logarithmic axis is shown, and is not taken for an unknown figure."""

import pytest

from ctrans.report.picture import draw
from ctrans.report.sections import Line, Plot


def plot(count):
    """`count` models, of which each has a 0 at first."""
    return Plot(
        "Gain",
        "segment",
        "gain",
        [Line(f"model {i}", [0, 1, 2], [0.0, 0.1, 1.0 + i]) for i in range(count)],
    )


def test_a_zero_is_a_hollow_mark_at_the_foot_of_its_panel_and_the_legend_says_so():
    figure = draw([plot(1)], "")
    figure.canvas.draw()
    panel = figure.axes[0]
    (zero,) = [
        line
        for line in panel.get_lines()
        if line.get_marker() == "v" and line.get_markerfacecolor() == "none"
    ]
    assert list(zero.get_xdata()) == [0]
    height = panel.transAxes.inverted().transform(
        zero.get_transform().transform((0, zero.get_ydata()[0]))
    )[1]
    assert 0 < height < 0.1
    assert "0, below the axis (hollow)" in [
        text.get_text() for legend in figure.legends for text in legend.get_texts()
    ]


def test_a_zero_in_a_map_is_as_dark_as_the_least_and_not_the_grey_of_what_is_unknown():
    image = next(axes for axes in draw([plot(8)], "").axes if axes.get_images()).get_images()[0]
    shown = image.get_array()
    assert (shown[..., 3] == 1).all(), "what is unknown has no colour"
    brightness = shown[..., :3].sum(axis=-1)
    assert brightness[0, 0] == brightness.min() < brightness.max()


@pytest.mark.parametrize("log", [True, False])
@pytest.mark.parametrize(
    "values",
    [[1.7e308, -1.7e308, 5e-324], [1.7e308] * 3, [5e-324] * 3, [-1.7e308, 0.0, float("nan")]],
)
@pytest.mark.parametrize("kind", ["lines", "bars", "frames"])
@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_figures_at_the_ends_of_floats_are_drawn(values, log, kind):
    lines = [Line("a", [0, 1, 2], values, low=values, high=values)]
    shown = {"frames": {"1": [values], "2": [values]}} if kind == "frames" else {"kind": kind}
    draw(
        [Plot("Loss", "step", "loss", lines, log=log, events=[(1.7e308, "alarm")], **shown)], ""
    ).canvas.draw()
