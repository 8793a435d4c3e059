"""Bounds in pictures have a form of their own, and long work says how long it will take."""

import matplotlib.colors
import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from ctrans.report import progress
from ctrans.report.axes import bound_style, bound_styles, mark_places
from ctrans.report.progress import duration, progress_bar
from tests.cli.test_commands import QUICK, run, strict


@pytest.mark.parametrize("count", [2, 3, 7])
def test_bounds_that_coincide_show_their_own_colours_and_no_other(count):
    colours = ["#d62728", "#1f77b4", "#2ca02c", "#ff7f0e", "#9467bd", "#8c564b", "#e377c2"][:count]
    figure = Figure(figsize=(8, 1), dpi=100)
    FigureCanvasAgg(figure)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.axis("off")
    for i, colour in enumerate(colours):
        axes.plot(
            [0, 1],
            [0.5, 0.5],
            color=colour,
            linewidth=4,
            linestyle=bound_style(i, count),
            antialiased=False,
            dash_capstyle="butt",
        )
    axes.set(xlim=(0, 1), ylim=(0, 1))
    figure.canvas.draw()
    row = np.asarray(figure.canvas.buffer_rgba())[50, :, :3]
    seen = {matplotlib.colors.to_hex(pixel / 255) for pixel in row}
    assert set(colours) <= seen <= {*colours, "#ffffff"}


def test_only_bounds_that_lie_upon_each_other_take_turns():
    """Others would have gaps that the eye does not follow."""
    one, near, other = [1.0, 2.0, 3.0], [1.0, 2.01, 3.0], [1.0, 2.0, 9.0]
    assert bound_styles([one, [], near, other]) == [
        bound_style(0, 2),
        bound_style(0, 1),
        bound_style(1, 2),
        bound_style(0, 1),
    ]


@pytest.mark.parametrize("count", [1, 7, 25, 1000])
def test_marks_of_lines_that_coincide_take_turns(count):
    places = [
        {*range(count)[slice(start, None, every)]}
        for start, every in (mark_places(i, count) for i in range(7))
    ]
    assert all(places)
    assert all(len(each) <= 16 for each in places)
    assert count < 20 or not places[0] & places[1]


class Clock:
    now = 0.0

    def perf_counter(self):
        return self.now


@pytest.mark.parametrize(("each", "said"), [(2.0, "convergence: about 80 s in all"), (0.1, "")])
def test_work_of_over_ten_seconds_says_once_how_long_it_takes(each, said, monkeypatch, capsys):
    monkeypatch.setattr(progress, "LONG", 10.0)
    monkeypatch.setattr(progress, "time", clock := Clock())
    with progress_bar("convergence", 40) as advance:
        for _ in range(40):
            clock.now += each
            advance("a method")
    assert capsys.readouterr().err.strip() == said


def test_what_is_made_once_before_the_first_piece_is_not_taken_for_the_time_of_each(
    monkeypatch, capsys
):
    monkeypatch.setattr(progress, "LONG", 10.0)
    monkeypatch.setattr(progress, "time", clock := Clock())
    with progress_bar("screen", 24) as advance:
        for each in (6.0, *[1.0] * 23):
            clock.now += each
            advance("a segment")
    assert clock.now == 29
    assert capsys.readouterr().err.strip() == "screen: about 30 s in all"


def test_an_estimate_of_pieces_unlike_the_rest_is_said_again(monkeypatch, capsys):
    """Eight pieces of 30 s and 152 of 1 s: 80 minutes by the second piece, 6 minutes in the end."""
    monkeypatch.setattr(progress, "LONG", 10.0)
    monkeypatch.setattr(progress, "time", clock := Clock())
    with progress_bar("screen", 160) as advance:
        for each in (*[30.0] * 8, *[1.0] * 152):
            clock.now += each
            advance("a segment")
    said = capsys.readouterr().err.splitlines()
    assert said[0] == "screen: about 80 minutes in all"
    assert 2 < len(said) < 6
    assert clock.now / progress.AMISS <= 60 * int(said[-1].split()[2]) <= clock.now * progress.AMISS


def test_durations_in_words():
    assert [duration(s) for s in (11, 88, 95, 3600, 7200)] == [
        "10 s",
        "90 s",
        "2 minutes",
        "60 minutes",
        "2 hours",
    ]


@pytest.mark.cases(1)
@pytest.mark.parametrize("broken", ["ctrans.report.picture.png", "ctrans.cli.ending.render"])
@pytest.mark.parametrize("out", ["directory", "stdout"])
def test_a_picture_or_a_page_that_cannot_be_made_takes_no_result_with_it(
    broken, out, tmp_path, monkeypatch
):
    def fails(*_):
        raise OSError(2, "No such file or directory", "page.css")

    monkeypatch.setattr(broken, fails)
    places = ["--out", tmp_path] + (["--json", "-"] if out == "stdout" else [])
    result = run(
        "simulate", "--placement", "peri", *QUICK, *places, "--html", tmp_path / "page.html"
    )
    assert result.exit_code == 2
    assert "page.css" in result.stderr
    kept = strict(result.stdout if out == "stdout" else (tmp_path / "simulate.json").read_text())
    assert kept["command"] == "simulate"
