"""Columns of a table fold between words, not within them."""

import io

import pytest
from rich.console import Console

from ctrans.report.fit import GAP, folded_widths, groups_of
from ctrans.report.sections import Chapter, Page, table
from ctrans.report.terminal import show

STATEMENT = "|N(x)|_rms <= max|gamma| + max|beta|"
ROW = ["norm-reset", "9. attention sensitivity", "as printed", STATEMENT, -5.1e-5, 100]


def printed(width):
    console = Console(width=width, record=True, file=io.StringIO())
    sheet = table(["statement", "section", "verdict", "what holds", "reached", "cases"], [ROW])
    show(Page("", "", [Chapter("Summary", [sheet])], {}), console)
    return console.export_text()


@pytest.mark.parametrize("width", [50, 60, 70, 80, 100])
def test_a_word_of_a_table_stays_whole_on_every_terminal(width):
    words = printed(width).split()
    assert {"attention", "sensitivity", "printed", "|N(x)|_rms", "max|gamma|"} <= set(words)
    assert all(len(line.rstrip()) <= width for line in printed(width).splitlines())


def test_the_widest_columns_fold_and_none_below_its_need():
    full = [10, 24, 10, 36, 8, 5]
    needs = [10, 11, 7, 10, 8, 5]
    widths = folded_widths(full, needs, 80)
    assert sum(widths) + GAP * (len(full) - 1) == 80
    assert all(
        need <= width <= whole for need, width, whole in zip(needs, widths, full, strict=True)
    )
    assert widths[0] == 10
    assert max(widths) - widths[1] <= 1, "the widest are levelled"


def test_columns_that_fit_and_columns_that_cannot_fit_have_no_widths_of_ours():
    assert folded_widths([10, 20], [5, 5], 32) is None
    assert folded_widths([10, 20], [5, 5], 31) == [10, 19]
    assert folded_widths([10, 20], [10, 20], 31) is None


def test_leading_columns_that_leave_no_room_are_not_repeated():
    assert groups_of([10, 10, 10], 2, 40) == [[0, 1, 2]]
    assert groups_of([10, 10, 10], 2, 30) == [[0, 1], [0, 2]]
