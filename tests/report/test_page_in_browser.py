"""Pages in a real browser: every picture is drawn, nothing is complained of, and all of it can be
asked, sorted, hidden and read.
"""

import itertools
import json
import shutil

import pytest

from ctrans.base.printable import printable
from ctrans.report.contents import page_of
from ctrans.report.html import render
from ctrans.report.sections import Chapter, Line, Page, Plot
from tests.report.test_page import CALLS, NAMES, call, version_1

BROWSER = (
    shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        BROWSER is None, reason="no Chromium here: install the distribution's package chromium"
    ),
]
QUIET = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


@pytest.fixture(scope="module")
def browser():
    sync_api = pytest.importorskip(
        "playwright.sync_api", reason="no playwright here: pip install 'ctrans[test]'"
    )
    with sync_api.sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=BROWSER, args=QUIET)
        yield opened
        opened.close()


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """A result of each command, made when it is first asked for."""
    root = tmp_path_factory.mktemp("kept")

    class Kept(dict):
        def __missing__(self, name):
            self[name] = call(name, root)
            return self[name]

    return Kept()


@pytest.fixture
def opened(browser, tmp_path):
    """Opens a page at a width; when the test ends, nothing must have been complained of."""
    contexts, complaints = [], []

    def of(page, width=1200, scheme="light"):
        path = tmp_path / "page.html"
        path.write_text(render(page), encoding="utf-8")
        context = browser.new_context(
            viewport={"width": width, "height": 800}, color_scheme=scheme, offline=True
        )
        contexts.append(context)
        shown = context.new_page()
        shown.on(
            "console",
            lambda message: (
                complaints.append(message.text) if message.type in ("error", "warning") else None
            ),
        )
        shown.on("pageerror", lambda error: complaints.append(str(error)))
        shown.on(
            "dialog",
            lambda dialog: (complaints.append("a name was run as a script"), dialog.dismiss()),
        )
        shown.goto(path.as_uri())
        shown.wait_for_selector("html[data-drawn]", state="attached")
        return shown

    yield of
    for context in contexts:
        context.close()
    assert complaints == []


def screening(found, names):
    """The screening of one model as that of several."""
    (model,) = found["models"].values()
    return {**version_1(found), "models": dict.fromkeys(names, model)}


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [400, 1200])
@pytest.mark.parametrize("name", sorted(CALLS))
def test_every_picture_is_drawn_at_every_width_light_and_dark(name, width, scheme, kept, opened):
    page = opened(page_of({name: kept[name]}), width, scheme)
    for details in page.locator("details.folded > summary").all():
        details.click()
    figures = page.locator("figure.chart").count()
    page.wait_for_selector(f"html[data-drawn='{figures}']", state="attached")
    assert page.locator("figure.chart .plot svg").count() == figures
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    ink, paper = page.evaluate(
        "[getComputedStyle(document.body).color, getComputedStyle(document.body).backgroundColor]"
    )
    assert contrast(ink, paper) > 7


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("name", sorted(CALLS))
def test_axe_finds_no_serious_fault_of_accessibility(name, scheme, kept, opened):
    axe = pytest.importorskip(
        "axe_playwright_python.sync_playwright", reason="no axe here: pip install 'ctrans[test]'"
    )
    page = opened(page_of({name: kept[name]}), 1200, scheme)
    page.evaluate("for (const each of document.querySelectorAll('details')) each.open = true")
    page.wait_for_timeout(200)
    found = axe.Axe().run(page).response["violations"]
    assert [
        (each["id"], each["nodes"][0]["html"])
        for each in found
        if each["impact"] in ("serious", "critical")
    ] == []


def contrast(*colours):
    """WCAG's ratio of relative luminances."""

    def luminance(colour):
        parts = [
            int(part) / 255 for part in colour.removeprefix("rgb(").removesuffix(")").split(",")
        ]
        red, green, blue = (
            p / 12.92 if p <= 0.03928 else ((p + 0.055) / 1.055) ** 2.4 for p in parts
        )
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    dark, light = sorted(map(luminance, colours))
    return (light + 0.05) / (dark + 0.05)


MODELS = """[...document.querySelectorAll(".plot")[0].querySelectorAll("[data-model]")]
    .map((line) => line.dataset.model)"""
"""The models that the first chart shows."""
Y_TICKS = """[...document.querySelector(".plot").querySelectorAll("text.y.tick")]
    .map((tick) => tick.textContent)"""


def test_models_hide_and_scales_change_by_the_keyboard_alone(kept, opened):
    page = opened(page_of({"simulate": kept["simulate"]}))
    assert set(page.evaluate(MODELS)) == {"pre", "post"}
    page.locator("#choices input").first.focus()
    page.keyboard.press("Space")
    assert set(page.evaluate(MODELS)) == {"post"}
    logarithmic = page.evaluate(Y_TICKS)
    page.locator(".scale").first.focus()
    page.keyboard.press("Enter")
    linear = [float(tick) for tick in page.evaluate(Y_TICKS)]
    assert [str(tick) for tick in linear] != logarithmic
    steps = {round(high - low, 9) for low, high in itertools.pairwise(linear)}
    assert len(steps) == 1, "equal steps"
    page.locator("#theme").focus()
    reached = set()
    for _ in range(60):
        page.keyboard.press("Tab")
        reached.add(page.evaluate("document.activeElement.className || document.activeElement.id"))
    assert {"sort", "scale", "sheet"} <= reached


def test_one_model_has_no_boxes_and_lines_of_one_chart_have_their_names_below_it(opened):
    lines = [
        Line("model", [1.0, 2.0], [1.0, 2.0], "pre"),
        Line("slope 1", [1.0, 2.0], [1.0, 2.0], bound=True, predicted=True, local=True),
    ]
    page = opened(page_of_plot(Plot("A chart", "size", "error", lines)))
    assert not page.locator("#models").is_visible()
    assert page.locator(".key").inner_text() == "slope 1"


def page_of_plot(*plots):
    result = {"command": "screen"}
    return Page("A page", "of charts", [Chapter("Charts", plots)], {"screen": result})


def test_the_pointer_reads_the_nearest_figure(opened):
    line = Line("model", [0.0, 1.0, 2.0], [1.0, 123.4567, 10.0], "pre")
    page = opened(page_of_plot(Plot("A chart", "segment", "gain", [line])))
    mark = page.locator(".plot .mark").nth(1).bounding_box()
    page.mouse.move(mark["x"] + 8, mark["y"] + 8)
    assert page.locator(".reading").inner_text().splitlines() == ["model", "segment 1", "123.5"]
    page.mouse.move(2, 2)
    assert not page.locator(".reading").is_visible()


def test_dragging_shows_a_part_and_a_double_click_all_of_it(opened):
    line = Line("model", [float(x) for x in range(21)], [float(x) for x in range(21)], "pre")
    page = opened(page_of_plot(Plot("A chart", "segment", "gain", [line], log=False)))
    ticks = (
        """[...document.querySelectorAll("text.x.tick")].map((tick) => Number(tick.textContent))"""
    )
    whole = page.evaluate(ticks)
    marks = page.locator(".plot .mark")
    first, last = marks.nth(5).bounding_box(), marks.nth(10).bounding_box()
    page.mouse.move(first["x"], first["y"])
    page.mouse.down()
    page.mouse.move(last["x"], last["y"])
    page.mouse.up()
    part = page.evaluate(ticks)
    assert 4 <= min(part) < max(part) <= 10
    page.mouse.dblclick(last["x"], last["y"])
    assert page.evaluate(ticks) == whole


def test_tables_sort_by_value_and_back(kept, opened):
    page = opened(page_of({"simulate": kept["simulate"]}))
    head = page.locator("th:visible", has_text="size at the end").first
    sorted_by = (
        "(cell) => [...cell.closest('table').tBodies[0].rows].map((row) =>"
        " Number(row.cells[cell.cellIndex].dataset.v))"
    )
    head.locator("button").click()
    up = head.evaluate(sorted_by)
    assert len(up) > 1
    assert up == sorted(up)
    assert head.get_attribute("aria-sort") == "ascending"
    head.locator("button").click()
    assert head.evaluate(sorted_by) == sorted(up, reverse=True)


def test_more_than_seven_models_are_a_map(kept, opened):
    page = opened(page_of({"screen": screening(kept["screen"], [f"model {i}" for i in range(40)])}))
    charts = page.locator("figure.chart:visible").count()
    assert page.locator("figure.chart.map:visible").count() == charts
    assert page.locator(".plot").first.locator(".row").count() == 40
    page.locator("#none").click()
    for box in page.locator("#choices input").all()[:2]:
        box.check()
    assert page.locator(".plot").first.locator(".line").count() == 2


def test_a_map_colours_what_is_beyond_a_limit_and_no_figure_that_is_healthy(opened):
    """Figures of 1 and 1.01 within a limit of 100 have one colour, 200 has another."""
    healthy = [Line(f"model {i}", [0.0], [1 + i / 1000], "pre") for i in range(10)]
    ill = Line("ill", [0.0], [200.0], "pre")
    chart = Plot("A chart", "segment", "gain", [*healthy, ill], limits=(None, 100.0))
    page = opened(page_of_plot(chart))
    colours = page.evaluate("""[...document.querySelectorAll(".row rect")].map((rect) =>
        rect.getAttribute("fill").match(/\\d+/g).map(Number))""")
    *within, beyond = colours
    for red, green, blue in within:
        assert red < green < blue
    for part in zip(*within, strict=True):
        assert max(part) - min(part) <= 3
    assert beyond[0] > beyond[1] > beyond[2]


def test_names_that_are_markup_are_shown_as_they_are(kept, opened):
    page = opened(page_of({"screen": screening(kept["screen"], NAMES)}))
    labels = page.locator("#choices label").all_text_contents()
    assert labels == [printable(name) for name in NAMES]
    assert page.locator("img").count() == 0


def test_the_json_comes_back_out(kept, opened):
    page = opened(page_of({"screen": kept["screen"]}))
    with page.expect_download() as download:
        page.locator("#download").click()
    assert json.loads(download.value.path().read_text()) == kept["screen"]
    assert download.value.suggested_filename == "screen.json"


def test_a_slider_moves_between_moments(opened):
    frames = {str(step): [[1.0, 1.0, float(step)]] for step in (10, 20, 30)}
    line = Line("run", [0.0, 1.0, 2.0], [1.0, 1.0, 30.0])
    chart = Plot("rms by depth", "segment", "rms of the state", [line], frames=frames, log=False)
    page = opened(page_of_plot(chart))
    marks = page.locator(".plot .mark")
    before, height = page.evaluate(Y_TICKS), marks.nth(2).bounding_box()["y"]
    page.locator(".moment").focus()
    page.keyboard.press("Home")
    assert marks.nth(2).bounding_box()["y"] > height
    assert page.locator("output").inner_text() == "10"
    assert page.evaluate(Y_TICKS) == before, "what moves is the line, not the axis"


PAPER = 703
"""Pixels of A4's width within the page's margins of 12 mm."""


def test_on_paper_nothing_is_folded_or_cut_and_all_stands_as_before_after(kept, opened):
    """Printed from the dark scheme: light, colours with their names, tables that are wider than the
    paper go on below.
    """
    page = opened(
        page_of({"screen": screening(kept["screen"], NAMES), "simulate": kept["simulate"]}),
        1200,
        "dark",
    )
    before = page.evaluate("document.body.innerText")
    page.evaluate("""() => addEventListener("beforeprint", () => {
          const right = (each) => each.getBoundingClientRect().right - document.body.getBoundingClientRect().left;
          const of = (what) => [...document.querySelectorAll(what)].filter((each) => each.getBoundingClientRect().width);
          window.seen = {
            folded: document.querySelectorAll("details:not([open])").length, theme: document.documentElement.dataset.theme,
            tables: of("table").map(right), pictures: of(".plot svg").map((each) => each.getBoundingClientRect().width),
            drawn: of("figure.chart").length, names: of("#choices label").length, pressed: of("button:not(.sort), input").length,
          };
        })""")
    assert page.pdf(format="A4").startswith(b"%PDF")
    seen = page.evaluate("window.seen")
    assert (seen["folded"], seen["theme"], seen["pressed"]) == (0, "light", 0)
    assert max(seen["tables"] + seen["pictures"]) <= PAPER
    assert len(seen["pictures"]) >= seen["drawn"] > 0
    assert seen["names"] == len(NAMES) + 2
    page.wait_for_selector("html[data-theme='dark']")
    assert page.evaluate("document.body.innerText") == before


def test_a_table_that_is_wider_than_the_paper_loses_no_column(kept, opened):
    page = opened(page_of({"screen": kept["screen"]}))
    heads = """[...document.querySelectorAll("table")].filter((each) => each.offsetWidth)
        .flatMap((each) => [...each.tHead.rows[0].cells].map((cell) => cell.textContent))"""
    folded = "for (const each of document.querySelectorAll('details')) each.open = true"
    page.evaluate(folded)
    whole = page.evaluate(heads)
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert page.evaluate(heads) != whole, "the quantities are in several tables"
    assert set(page.evaluate(heads)) == set(whole)
    page.evaluate("dispatchEvent(new Event('afterprint'))")
    assert page.evaluate(heads) == whole


def test_a_zero_is_a_hollow_mark_at_the_foot_of_a_logarithmic_axis_and_in_its_place_on_a_linear_one(
    opened,
):
    picture = Plot(
        "With a zero", "segment", "gain", [Line("one", [0.0, 1.0, 2.0], [0.0, 1.0, 10.0], "pre")]
    )
    page = opened(page_of_plot(picture))
    marks, zeros = page.locator(".plot .mark"), page.locator(".plot .zero")
    assert (marks.count(), zeros.count()) == (2, 1)
    assert zeros.first.evaluate("(mark) => getComputedStyle(mark).fill") == "none"
    foot, least = zeros.first.bounding_box()["y"], marks.first.bounding_box()["y"]
    assert foot > least
    page.locator(".scale").click()
    assert (marks.count(), zeros.count()) == (3, 0)


LARGEST, LEAST = 1.7e308, 5e-324
FIGURES = [
    [LARGEST, -LARGEST, LEAST],
    [LARGEST] * 3,
    [LEAST] * 3,
    [0.0] * 3,
    [float("inf")] * 3,
    [-1.0, float("nan"), float("inf")],
    [1.0, 1.0 + 1e-9, 1.0],
]


@pytest.mark.parametrize("kind", ["lines", "map", "bars", "points"])
def test_figures_of_any_size_are_drawn_without_a_complaint(kind, opened):
    lines_of_kind = {"lines": 2, "map": 9, "bars": 2, "points": 1}[kind]
    plots = [
        Plot(
            "A chart",
            "segment",
            "gain",
            [
                Line(f"model {i}", [0.0, 1.0, 2.0], values, "pre", shade=[0.0, 1.0, 2.0])
                for i in range(lines_of_kind)
            ],
            log=log,
            log_x=log and kind == "lines",
            kind="lines" if kind == "map" else kind,
            limits=(0.1, 10.0),
        )
        for values in FIGURES
        for log in (True, False)
    ]
    page = opened(page_of_plot(*plots))
    assert page.locator(".plot svg").count() == len(plots)
    assert "NaN" not in page.locator("main").inner_html()
