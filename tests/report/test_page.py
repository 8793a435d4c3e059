"""Pages: made of a command's JSON alone, whole without a network, and safe whatever models and
files are called.
"""

import base64
import dataclasses
import gzip
import json
import re
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
from click.testing import CliRunner

from ctrans.base.printable import printable
from ctrans.cli import COMMANDS, OLD_COMMANDS, main
from ctrans.control.admissible import VERDICTS
from ctrans.dynamics.placement import PLACEMENTS
from ctrans.examine.screening.screen import STEPS
from ctrans.examine.screening.screening_checks import CHECKS
from ctrans.measure.findings import Reading
from ctrans.report import html
from ctrans.report.contents import ENTRIES, page_of
from ctrans.report.html import render
from ctrans.report.sections import Cell, Chapter, Column, Line, Page, Plot, Table, Words, cell
from ctrans.report.words import JUDGED, TERMS, terms_in, verdicts
from ctrans.study.presets.table import PRESETS
from ctrans.training.monitor.log import LogWriter
from ctrans.training.monitor.log_lines import Header, Report
from ctrans.training.monitor.training_measures import GAUGES
from docs._site.tables import verdicts_table
from solvers import ConfigError
from tests.cli.test_study import kept
from tests.training.monitor.test_watch import write

CONVERGED = {
    "limit": "substeps",
    "method": "euler",
    "placement": "pre",
    "sizes": [2, 4],
    "errors": [0.2, 0.1],
    "formal": 1,
    "order": 1.0,
}
TINY = ["--depth", "1", "--width", "8", "--heads", "2", "--context", "6", "--batch", "1"]
CALLS = {
    "simulate": ["--placement", "pre", "--placement", "post", *TINY],
    "screen": ["--placement", "peri", "--quick", *TINY],
    "diagnose": [*TINY],
    "hjb-check": ["--placement", "peri", *TINY],
    "control": ["--placement", "peri", *TINY],
    "convergence": ["--method", "euler", "--placement", "pre", "--limit", "substeps"],
    "train": ["--iterations", "2", "--eval-every", "1", "--threads", "1", *TINY],
    "verify": ["--only", "theorem-4", "--cases", "3"],
    "watch": ["LOG"],
    "study": ["xiong-warmup", "--report"],
}
WITHOUT_OUT = ("verify",)
"""Commands that write no directory."""


def call(name, root):
    """A small request of that command, after which there are root/<name>.json and .html; what it
    looks at is made in root.
    """
    (root / "log").mkdir(exist_ok=True)
    write(root / "log")
    if name == "study":
        kept(
            root / "study",
            PRESETS["xiong-warmup"].study("xiong-warmup", "small"),
            lambda run: 1e3 * run.training.learning_rate,
        )
    arguments = [root / "log" if word == "LOG" else word for word in CALLS[name]]
    out = [] if name in WITHOUT_OUT else ["--out", root / name]
    result = run(
        name, *arguments, "--json", root / f"{name}.json", "--html", root / f"{name}.html", *out
    )
    assert result.exit_code == 0, result.output
    return json.loads((root / f"{name}.json").read_text())


def version_1(result):
    """The result as version 0.3 wrote it. A test changes this, and the page follows."""
    return {key: value for key, value in result.items() if key != "measured"}


SMALL = 300_000
"""Bytes of the page of a usual result: what a mail or a chat takes."""
LARGEST = 1_000_000
"""Bytes of the page of a large result."""


class Reader(HTMLParser):
    """Everything that a page refers to, its ids, and its words outside of scripts."""

    def __init__(self, text):
        super().__init__()
        self.references, self.ids, self.words, self.tags, self._inside = [], [], [], [], ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self._inside = tag
        for name, value in attrs:
            if name in ("src", "href") and not value.startswith("#"):
                self.references.append(value)
            if name == "id":
                self.ids.append(value)

    def handle_endtag(self, tag):
        self._inside = ""

    def handle_data(self, data):
        if self._inside not in ("script", "style"):
            self.words.append(data)


def run(*args):
    return CliRunner().invoke(main, [str(arg) for arg in args], prog_name="ctrans")


def data(text, name):
    """What a script element of the page holds, unpacked."""
    element = rf'<script type="text/plain" id="{name}">([A-Za-z0-9+/=]+)</script>'
    return json.loads(gzip.decompress(base64.b64decode(re.search(element, text)[1])))


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """A command's result and its page, made once."""
    root, made = tmp_path_factory.mktemp("pages"), {}

    def of(name):
        if name not in made:
            made[name] = (call(name, root), (root / f"{name}.html").read_text())
        return made[name]

    return of


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(CALLS))
def test_a_commands_page_is_whole_and_holds_its_json(name, results):
    found, text = results(name)
    page = Reader(text)
    assert data(text, "results") == found
    assert page.references == ["data:,"]
    assert len(set(page.ids)) == len(page.ids)
    assert len(text.encode()) < SMALL
    drawn = [attributes["data-chart"] for tag, attributes in page.tags if tag == "figure"]
    assert drawn == [str(i) for i in range(len(data(text, "charts")["charts"]))]
    assert f"ctrans {name}" in page.words
    assert render(page_of({name: found})) == text, "the page of kept JSON is the command's own"


def test_a_pages_figures_are_the_jsons():
    measured = {
        "status": "success",
        "message": "",
        "placement": "pre",
        "times": [0.0, 1.0],
        "mean_abs": [0.5, 2.0],
        "variance": [1.0, 3.0],
        "rms": [1.0, 1.7],
        "common": [0.0, 0.1],
        "warnings": [],
        "discrete": True,
        "evaluations": 1,
        "accepted": 1,
        "rejected": 0,
        "seconds": 0.1,
    }
    rest = {
        "bounds": {"mean_abs": [0.5, 4.0], "variance": [1.0, 9.0], "rms": [1.0, 3.0]},
        "used": [1.0, 0.5],
        "drift": None,
        "distance": [0.0, 0.25],
        "discrete_distance": [0.0, 0.25],
    }
    page = page_of({"a": {"command": "simulate", "placements": {"pre": measured | rest}}})
    charts = [part for chapter in page.chapters for part in chapter.parts if isinstance(part, Plot)]
    assert [(line.bound, list(line.y)) for line in charts[0].lines] == [
        (False, [0.5, 2.0]),
        (True, [0.5, 4.0]),
    ]
    answer, table = page.chapters[0].parts
    assert answer.text.startswith(
        "Through the depth the hidden states change in size by a factor of 4, and"
    )
    assert [each.text for each in table.rows[0]] == ["pre", "0.5", "2", "50%", "0.25"]


@pytest.mark.slow
def test_a_screening_says_what_its_verdicts_mean_and_what_helps(results):
    """For a stranger: every step's question, every verdict in words, each quantity outside of its
    limits with its remedy.
    """
    found, _ = results("screen")
    model = found["models"]["peri"]
    lazy = CHECKS["depth does nothing"]
    broken = with_quantities(model, "forward", **{"added by depth": 0.001})
    page = page_of({"screen": {**version_1(found), "models": {"a": model, "b": broken}}})
    table = next(part for part in page.chapters[0].parts if isinstance(part, Table))
    assert table.title == "Verdicts"
    assert [row[1].text for row in table.rows] == [STEPS[step].question for step in model["steps"]]
    found_in_b = next(part for part in page.chapters[1].parts if part.title == "b")
    assert [each["check"] for each in found_in_b.findings if each["topic"] == "screening"] == [
        "depth does nothing"
    ]
    assert lazy.remediation in [each["remediation"] for each in found_in_b.findings]
    verdicts = {finding["verdict"] for finding in model["steps"].values()}
    told = {line.partition(": ")[0] for line in explained(page)}
    assert verdicts <= told


def explained(page):
    """What the page says of each verdict that it uses."""
    chapter = next(each for each in page.chapters if each.title == "What the verdicts mean")
    return [line for part in chapter.parts for line in part.lines]


GUIDE = Path(__file__).parents[2] / "docs/commands/screen.md"
INSIDE = [
    *VERDICTS,
    "held",
    "follows weights",
    "moves",
    "holds",
    "violated",
    "non-finite",
    "unknown",
    "n/a",
]
CALLED = {check.verdict for check in CHECKS.values()}


@pytest.mark.cases(24)
@pytest.mark.parametrize("word", [*INSIDE, *sorted(CALLED)])
def test_every_verdict_of_a_screening_has_its_meaning_on_the_page_and_in_the_guide(word, results):
    found, _ = results("screen")
    peri = found["models"]["peri"]
    finding = {**peri["steps"]["forward"], "verdict": word}
    page = page_of(
        {"screen": {**version_1(found), "models": {"a": {**peri, "steps": {"forward": finding}}}}}
    )
    assert f"{word}: {verdicts()[word]}" in explained(page)
    assert " ".join(verdicts_table().split()) in " ".join(GUIDE.read_text(encoding="utf-8").split())


def test_what_a_quantity_is_called_says_beyond_which_limits():
    assert verdicts().keys() - JUDGED.keys() == CALLED
    assert verdicts()["explodes"].endswith(
        "(growth exponent above 2, or condition above 100, or W_2 growth above 100, or attention"
        " path above 30)"
    )


def with_quantities(model, step, **quantities):
    """The model's JSON of version 1 with other figures in one step, and no other step."""
    found = model["steps"][step]
    changed = {**found, "quantities": {**found["quantities"], **quantities}, "result": None}
    return {**model, "steps": {step: changed}}


@pytest.mark.slow
def test_what_is_of_larger_weights_is_yellow_and_what_is_of_these_is_red(results):
    found, _ = results("screen")
    peri = found["models"]["peri"]
    for step, quantities, verdict, mark in (
        ("forward", {"|x| in weights": 2.0}, "outruns weights", "note"),
        ("backward", {"condition": 1000.0}, "explodes", "bad"),
        ("forward", {}, "held", ""),
    ):
        model = with_quantities(peri, step, **quantities)
        model["steps"][step]["verdict"] = verdict
        page = page_of({"screen": {**version_1(found), "models": {"a": model}}})
        sheet = next(part for part in page.chapters[0].parts if isinstance(part, Table))
        assert sheet.rows[0][-1].mark == mark


@pytest.mark.parametrize("quantities", [{}, {"condition": 1000.0}])
def test_a_diagnosis_without_findings_does_not_hide_what_is_outside_its_limits(quantities, results):
    found, _ = results("screen")
    peri = found["models"]["peri"]
    model = with_quantities(peri, "backward", **quantities)
    model["diagnosis"] = {**peri["diagnosis"], "findings": []}
    (answer,) = page_of({"screen": {**version_1(found), "models": {"a": model}}}).answers
    assert "nothing found in single parts" in answer.text
    assert ("outside their limits" in answer.text, answer.mark) == (
        bool(quantities),
        "bad" if quantities else "good",
    )


@pytest.mark.parametrize(
    ("severities", "text", "mark"),
    [
        ([], "nothing found", "good"),
        (["note", "broken", "note"], "(1 broken, 2 note)", "bad"),
        (["note"], "(1 note)", "note"),
    ],
)
def test_findings_stand_beside_the_verdicts(severities, text, mark, results):
    found, _ = results("screen")
    peri = found["models"]["peri"]
    finding = CHECKS.finding("depth does nothing", Reading(0.0, "there", "it"))
    findings = [
        dataclasses.asdict(dataclasses.replace(finding, severity=severity))
        for severity in severities
    ]
    changed = {**peri, "diagnosis": {**peri["diagnosis"], "findings": findings}}
    (answer,) = page_of({"screen": {**version_1(found), "models": {"a": changed}}}).answers
    assert (text in answer.text, answer.mark) == (True, mark)


def test_terms_of_the_reasons_are_said_where_they_stand(results):
    found, _ = results("screen")
    reasons = next(
        chapter for chapter in page_of({"screen": found}).chapters if chapter.title == "Reasons"
    )
    *said, terms = reasons.parts
    text = " ".join(line for part in said for line in part.lines)
    named = [line.partition(":")[0] for line in terms.lines]
    assert (
        {"segment", "H", "theta", "W_2", "Lyapunov exponent", "theorem 5.1", "nats", "c^"}
        <= set(named)
        <= TERMS.keys()
    )
    assert all(name in text for name in named)
    assert terms_in("as in a Hessian, segmented") == []
    assert [
        line.partition(":")[0]
        for line in terms_in("of two segments, H is infinite and grows like R^1.00")
    ] == [
        "segment",
        "H",
        "R^",
    ]


@pytest.mark.slow
def test_results_of_one_command_share_a_page_and_others_follow(results):
    found, other = results("screen")[0], results("simulate")[0]
    page = page_of({"before": found, "after": found, "b": other})
    sheet = next(part for part in page.chapters[0].parts if isinstance(part, Table))
    assert [column.name for column in sheet.columns][2:] == ["before: peri", "after: peri"]
    assert {"Charts", "Summary"} <= {chapter.title for chapter in page.chapters}


NAMES = [
    "<img src=x onerror=alert(1)>",
    "</script><script>alert(2)</script>",
    "<b>&amp;\"quoted'",
    "{{ 7 * 7 }}",
    "a\u2028b",
]


@pytest.mark.parametrize("name", NAMES)
def test_a_name_that_is_markup_is_a_name(name, results):
    found, _ = results("screen")
    text = render(page_of({name: {**version_1(found), "models": {name: found["models"]["peri"]}}}))
    page, plain = Reader(text), Reader(render(page_of({"screen": found})))
    assert [tag for tag, _ in page.tags] == [tag for tag, _ in plain.tags]
    assert printable(name) in page.words
    assert list(data(text, "results")["models"]) == [name]


@pytest.mark.parametrize("command", ["unheard-of", "export"])
def test_a_file_that_holds_no_result_has_no_page(command):
    with pytest.raises(ConfigError, match=f"'{command}' wrote it, and holds no result"):
        page_of({"x": {"command": command, "options": {}, "environment": {}}})


def test_every_result_has_a_page_known_or_not():
    page = page_of(
        {
            "x": {
                "command": "unheard-of",
                "count": 3,
                "families": {"gpt2": {"placement": "pre", "theta": True}},
                "empty": [],
            }
        }
    )
    assert {"gpt2", "pre", "yes", "count", "3"} <= set(Reader(render(page)).words)


@pytest.mark.parametrize(
    ("kept", "words"),
    [
        ({}, "at least one"),
        ({"a": {"no": "command"}}, "no result of a ctrans command"),
        ({"a": []}, "no result of a ctrans command"),
        ({"a": {"command": "screen"}}, "ctrans screen does not write this"),
        (
            {"a": {"command": "simulate", "placements": {"pre": 3}}},
            "ctrans simulate does not write this",
        ),
        (
            {"a": {"command": "convergence", "results": [dict(CONVERGED, sizes=["inf", 4])]}},
            r"ctrans convergence does not write this: Convergence\.sizes\[0\] = inf is not a whole",
        ),
    ],
)
def test_what_is_no_result_is_refused(kept, words):
    with pytest.raises(ConfigError, match=words):
        page_of(kept)


@pytest.mark.parametrize("name", sorted(ENTRIES))
def test_contents_are_of_commands(name):
    assert name in {*COMMANDS, *OLD_COMMANDS}


def test_report_puts_files_side_by_side(results, tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "screen.json").write_text(json.dumps(results("screen")[0]))
    result = run(
        "report",
        tmp_path / "a" / "screen.json",
        tmp_path / "b" / "screen.json",
        "--out",
        tmp_path / "out",
    )
    assert result.exit_code == 0, result.output
    text = (tmp_path / "out" / "report.html").read_text()
    assert {"a: peri", "b: peri"} <= set(Reader(text).words)
    assert list(json.loads((tmp_path / "out" / "report.json").read_text())["results"]) == ["a", "b"]


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ([], "Missing argument"),
        (["nowhere.json"], "cannot read 'nowhere.json'"),
        (["text"], "is no JSON"),
        (["list"], "no result of a ctrans command"),
        (["list", "list"], "named twice"),
    ],
)
def test_a_file_that_is_no_result_gets_a_line(args, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text").write_text("hello")
    (tmp_path / "list").write_text("[1]")
    result = run("report", *args)
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1), result.output
    assert words in result.stderr
    assert not (tmp_path / "out").exists()


def test_a_page_that_cannot_be_written_is_said_before_anything_is_computed(tmp_path):
    result = run("simulate", *TINY, "--html", tmp_path, "--json", "-")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "is a directory: give a file in it" in result.stderr


def test_the_directory_of_a_page_is_made(tmp_path):
    result = run("simulate", *TINY, "--html", tmp_path / "new" / "page.html", "--json", "-")
    assert result.exit_code == 0, result.output
    assert (tmp_path / "new" / "page.html").exists()


def test_without_its_libraries_a_page_is_refused_by_name(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "jinja2", None)
    html._template.cache_clear()
    result = run("simulate", *TINY, "--html", tmp_path / "page.html", "--json", "-")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "pip install 'ctrans[report]'" in result.stderr


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (1.23456, "1.23"),
        (0, "0"),
        ("inf", "∞"),
        ("nan", "not a number"),
        (None, "–"),
        (True, "yes"),
        (1e-9, "1.0e-09"),
        ([1, 2.5], "1, 2.5"),
        (12345, "12,345"),
        ("words", "words"),
    ],
)
def test_cells_are_three_digits_or_words(value, text):
    assert cell(value).text == text


def test_placements_have_colours_of_their_own():
    assert len({placement.colour for placement in PLACEMENTS.values()}) == len(PLACEMENTS)


@pytest.mark.slow
def test_forty_models_make_a_page_that_is_small_enough(results):
    found, _ = results("screen")
    many = {
        **version_1(found),
        "models": {f"model {i}": found["models"]["peri"] for i in range(40)},
    }
    assert len(render(page_of({"screen": many})).encode()) < LARGEST


def test_a_chart_of_moments_has_a_slider():
    frames = {str(step): [[1.0, float(step)]] for step in (0, 50, 100)}
    chart = Plot(
        "rms", "segment", "rms", [Line("run", [0.0, 1.0], [1.0, 100.0])], frames=frames, over="Step"
    )
    page = Page(
        "t",
        "a",
        [Chapter("c", [Words("w"), chart, Table("s", [Column("x")], [[Cell("1", 1.0)]])])],
        {},
    )
    sliders = [
        attributes
        for tag, attributes in Reader(render(page)).tags
        if attributes.get("class") == "moment"
    ]
    assert [(slider["max"], slider["value"]) for slider in sliders] == [("2", "2")]


def logged(steps, value, names=2):
    """A result of ctrans watch whose state of every place is `value` at every step."""
    header = {"model": "m", "places": ["a"] * names, "total": None}
    found = {
        "over_time": {"loss": [1.0] * len(steps)},
        "steps": steps,
        "by_depth": {"rms": [[value] * names] * len(steps)},
    }
    rest = {
        "log": header | {"every": 1},
        "ended": "",
        "steps": steps,
        "loss": [1.0],
        "last": {},
        "findings": [],
        "probes": [],
    }
    return {"command": "watch", **rest, "history": found}


def test_runs_side_by_side_share_a_slider():
    """At a moment each run shows its last report until then, and none before its first."""
    page = page_of({"early": logged([1, 5], 2.0), "late": logged([4], 3.0)})
    (chart,) = [
        part
        for chapter in page.chapters
        for part in chapter.parts
        if isinstance(part, Plot) and part.frames
    ]
    assert {moment: [figures[0] for figures in each] for moment, each in chart.frames.items()} == {
        "1": [2.0, None],
        "4": [2.0, 3.0],
        "5": [2.0, 3.0],
    }
    assert [list(line.y) for line in chart.lines] == [[2.0, 2.0], [3.0, 3.0]]


@pytest.mark.slow
def test_a_watched_run_of_100_000_steps_is_a_page_that_is_small_enough(tmp_path):
    """100 blocks of 32 heads reported every 50 steps: the log thins itself, the result keeps fewer,
    and the page says how many.
    """
    writer = LogWriter(
        tmp_path, Header("GPT", ["block"] * 200, ["attention", "ffn"] * 100, [32, 0] * 100, 50)
    )
    scopes = {"state": 201, "sublayer": 200, "head": 3200}
    values = {
        gauge: [1.2345 + i for i in range(scopes[each.scope])]
        for gauge, each in GAUGES.items()
        if each.scope in scopes
    }
    single = {gauge: 1.2345 for gauge, each in GAUGES.items() if each.scope == "run"}
    for i in range(511):  # as many as the log keeps of 2,000
        writer.report(Report(200 * i, {**single, **values}))
    result = run("watch", tmp_path, "--html", tmp_path / "watch.html")
    assert result.exit_code == 0, result.output
    text = (tmp_path / "watch.html").read_text()
    found = data(text, "results")["history"]
    assert (found["steps"][0], found["steps"][-1]) == (0, 102_000)
    assert len(text.encode()) < LARGEST
    assert f"moves over {len(found['steps'])} of 511 reports" in text


def test_cases_of_a_study_have_the_colours_of_their_placements(results):
    found, _ = results("study")
    losses = {
        json.dumps({"placement": name}): {
            "rates": [1e-3, 1e-2],
            "mean": [2.0, 3.0],
            "lowest": [1.0, 2.0],
            "highest": [3.0, 4.0],
        }
        for name in ("pre", "peri")
    }
    page = page_of({"study": {**version_1(found), "losses": losses}})
    (chart,) = [
        plot
        for chapter in page.chapters
        for plot in chapter.charts
        if plot.title == "Loss by learning rate"
    ]
    assert chart.log_x
    assert [(line.model, line.placement, list(line.y)) for line in chart.lines] == [
        ("placement pre", "pre", [2.0, 3.0]),
        ("placement peri", "peri", [2.0, 3.0]),
    ]


def test_a_report_goes_where_html_says_alone(results, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("a.json").write_text(json.dumps(results("simulate")[0]))
    result = run("report", "a.json", "--html", "pages/a.html")
    assert result.exit_code == 0, result.output
    assert Path("pages/a.html").read_text() == render(page_of({"a.json": results("simulate")[0]}))
    assert sorted(path.name for path in Path("out/report").iterdir()) == ["report.json"]
    assert result.stdout.startswith("Through the depth"), "the terminal shows what the page shows"
