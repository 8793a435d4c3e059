"""Tables on terminals of 80 and of 60 columns: no digit and no exponent is cut, and no column is
lost.
"""

import itertools
import re

import pytest
from rich.console import Console

from ctrans.base.json_values import plain
from ctrans.dynamics.placement import PLACEMENTS
from ctrans.model.orders import Convergence
from ctrans.report.contents import page_of
from ctrans.report.fit import shown_rows
from ctrans.report.sections import Chapter, Page, table
from ctrans.report.terminal import FURTHER, show
from tests.cli.test_commands import run

SMALL = ["--depth", "1", "--width", "16", "--heads", "2", "--context", "8", "--batch", "1"]
COMMANDS = {
    "simulate": ["simulate", "--method", "tsit5", "--rtol", "1e-6", "--placement", "post", *SMALL],
    "hjb-check": [
        "hjb-check",
        "--norm",
        "layernorm",
        "--placement",
        "none",
        "--placement",
        "peri",
        "--dt",
        "0.1",
        *SMALL,
    ],
    "control": ["control", "--placement", "pre", "--placement", "peri", *SMALL],
    "screen": ["screen", "--quick", "--verbose", *SMALL],
    "screen, several": [
        "screen",
        "--quick",
        "--verbose",
        "--compare",
        "placement=pre,peri",
        *SMALL,
    ],
    "diagnose": ["diagnose", "--weight-decay", "1e-9", "--placement", "pre", *SMALL],
}


def full_width(args, monkeypatch):
    monkeypatch.setenv("COLUMNS", "400")
    return run(*args, "--json", "/dev/null").stdout


@pytest.mark.slow
@pytest.mark.parametrize("name", COMMANDS)
def test_every_number_of_a_wide_terminal_is_on_a_narrow_one(name, monkeypatch):
    changing = re.compile(r"\d+(\.\d+)? s\b|\d\.\d+$")  # times, which no two runs share
    wide = _numbers(changing.sub("", full_width(COMMANDS[name], monkeypatch)))
    for columns in (60, 80):
        monkeypatch.setenv("COLUMNS", str(columns))
        result = run(*COMMANDS[name], "--json", "/dev/null")
        assert result.exit_code == 0, result.output
        page = result.stdout.partition("Written: ")[0]
        assert max(map(len, page.splitlines())) <= columns
        assert "…" not in page
        missing = wide - _numbers(page)
        assert not missing, missing


def _numbers(page):
    return set(re.findall(r"(?<![\w.])\d\.\d+e[+-]\d+(?!\d)", page))


@pytest.mark.parametrize("width", [20, 30, 60])
def test_columns_that_do_not_fit_go_on_below_with_the_first_again(width):
    numbers = table(
        ["name", *(f"c{i}" for i in range(6))],
        [["first", *(i * 1.0001e-10 for i in range(1, 7))]],
        "numbers",
        "once",
    )
    console = Console(width=width)
    with console.capture() as capture:
        show(Page("", "", [Chapter("", [numbers])], {}), console)
    page = capture.get()
    assert all(f"{i}.0e-10" in page for i in range(1, 7))
    assert max(map(len, page.splitlines())) <= width
    assert page.count("first") == page.count("numbers") == " ".join(page.split()).count(FURTHER) + 1
    assert page.count("first") > (width < 60)
    assert page.count("once") == 1
    assert "…" not in page


@pytest.mark.parametrize("width", [60, 80])
def test_the_table_of_orders_names_each_method_and_placement_whole(width):
    results = [
        Convergence(limit, method, placement, (8, 16, 32, 64), (1 / 8, 1 / 16, 1 / 32, 1 / 64), 1)
        for limit, method in (("substeps", "torchdiffeq:euler"), ("depth", "symmetric"))
        for placement in PLACEMENTS
    ]
    found = [plain({**vars(each), "order": each.order}) for each in results]
    console = Console(width=width)
    with console.capture() as capture:
        show(page_of({"convergence": {"command": "convergence", "results": found}}), console)
    page = capture.get()
    assert all(
        word in page
        for word in ("substeps", "torchdiffeq:euler", "symmetric", "theory", *PLACEMENTS)
    )
    assert page.partition("How to read it")[0].count("1.00") == len(results)
    assert "…" not in page


@pytest.mark.parametrize("count", [*range(1, 40), 49, 97, 193, 1001])
@pytest.mark.parametrize("alternate", [False, True])
def test_rows_are_all_or_evenly_spread_with_both_ends(count, alternate):
    rows = shown_rows(count, 7, alternate=alternate)
    assert (rows[0], rows[-1]) == (0, count - 1)
    gaps = [b - a for a, b in itertools.pairwise(rows)]
    assert len(set(gaps[:-1])) <= 1
    assert not gaps or gaps[-1] <= gaps[0]
    assert len(rows) <= 30
    assert count > 14 or len(rows) == count
    assert not alternate or not gaps or gaps[0] % 2 == 1


def test_rows_of_a_model_of_twelve_blocks_have_one_step():
    assert shown_rows(25, 7) == list(range(0, 25, 4))


def test_a_number_that_no_width_holds_is_marked_as_cut():
    console = Console(width=16)
    with console.capture() as capture:
        show(
            Page(
                "",
                "",
                [Chapter("", [table(["name", "figure"], [["a long name", 123456.789e-200]])])],
                {},
            ),
            console,
        )
    page = capture.get()
    assert "1.2e-195" in page or "…" in page
