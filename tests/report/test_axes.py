"""Titles and legends of pictures: whole words, inside of the picture, whatever names models
have.
"""

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from ctrans.report.axes import broken, legend_below, title_above

LONG = "post*3+pre*9+peri*12+output*24, llama-of-somebody-with-a-very-long-name/checkpoint-000100"


def drawn(labels, size=(13, 4.6)):
    figure = Figure(figsize=size, layout="constrained")
    canvas = FigureCanvasAgg(figure)
    axes = figure.subplots()
    for label in labels:
        axes.plot([0, 1], [0, 1], label=label)
    legend = legend_below(figure, *axes.get_legend_handles_labels())
    title_above(figure, f"12 blocks, width 64, weights of {LONG}/{LONG}")
    canvas.draw()
    return figure, legend, canvas.get_renderer()


@pytest.mark.cases(1)
@pytest.mark.parametrize("count", [1, 3, 8])
@pytest.mark.parametrize("size", [(13, 4.6), (6.4, 5.2)])
def test_no_label_and_no_title_is_cut(count, size):
    figure, legend, renderer = drawn([f"{i}: {LONG}" for i in range(count)], size)
    whole = figure.bbox
    for text in [*legend.get_texts(), figure._suptitle]:
        box = text.get_window_extent(renderer)
        assert whole.x0 <= box.x0
        assert box.x1 <= whole.x1
    assert len(legend.get_texts()) == count


@pytest.mark.cases(1)
@pytest.mark.parametrize(("count", "columns"), [(3, 3), (8, 8), (9, 5), (16, 8)])
def test_short_labels_share_lines_that_are_filled_evenly(count, columns):
    _, legend, _ = drawn([f"{i}" for i in range(count)])
    assert legend._ncols == columns


def test_lines_are_broken_behind_signs_and_lose_no_letter():
    lines = broken(LONG, 30).splitlines()
    assert "".join(line.replace(" ", "") for line in lines) == LONG.replace(" ", "")
    assert max(map(len, lines)) <= 30
    assert all(line[-1] in "+,/-" or line.endswith("a") for line in lines[:-1])
    assert broken("short", 30) == "short"
