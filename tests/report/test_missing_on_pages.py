"""What was not measured stands on the pages, also of results that version 0.3 wrote."""

import json
from dataclasses import replace

import pytest

from ctrans.base.json_values import plain
from ctrans.control.model_check import check_model
from ctrans.control.regularization import Regularization
from ctrans.examine import certified, principled, screened
from ctrans.examine.screening.case import Effort, StepVerdict
from ctrans.examine.screening.screen import STEPS, screen
from ctrans.measure.measured import Measured
from ctrans.report.view import view
from ctrans.report.words import verdicts
from ctrans.training.monitor import MonitorLog
from ctrans.training.monitor.log import LOG, LogWriter, read_log
from ctrans.training.monitor.log_lines import Header, Report
from tests.helpers import small_model, tokens

WHY = "this model has no loss"


@pytest.fixture(scope="module")
def screening():
    text = tokens(1, 7)
    effort = Effort(tokens=6, starts=1, certified=1, layers=1, vectors=1, blocks=0, updates=1)
    effort = replace(effort, curvature=False, lanczos=0)
    found = screen(small_model("peri"), text[:, :-1], text[:, 1:], effort)
    steps = {name: step for name, step in found.steps.items() if name != "updates"}
    return replace(found, steps=steps, missing={"updates": WHY})


def written(result):
    """The JSON object of a result."""
    return json.loads(json.dumps(plain(result)))


def chapter(table, title):
    """The parts of a page's chapter."""
    return next(chapter.parts for chapter in view(table, "a") if chapter.title == title)


def lines(table, title):
    return [line for words in chapter(table, title) for line in words.lines]


def verdicts_of(table):
    """The rows of the table of verdicts: each step with its verdict."""
    tables = [
        part for part in chapter(table, "Summary") if getattr(part, "title", "") == "Verdicts"
    ]
    return {row[0].text: row[-1].text for row in tables[0].rows}


def test_a_step_without_a_verdict_has_no_row_and_is_shown_as_not_applicable(screening):
    table = screened.measured({"a": screening})
    assert not table.of("verdict: updates")
    assert table.missing["a"]["verdict: updates"] == WHY
    shown = verdicts_of(table)
    assert list(shown) == list(STEPS)
    assert {step for step, verdict in shown.items() if verdict == "n/a"} == {"updates"}
    assert f"n/a: {verdicts()['n/a']}" in lines(table, "What the verdicts mean")
    assert f"updates: n/a. {WHY}" in lines(table, "Reasons")
    assert f"updates: {WHY}" in lines(table, "Not measured")


def test_what_a_step_lacks_is_not_measured(screening):
    table = screened.measured({"a": screening})
    assert "full screening" in table.missing["a"]["log stretch"]
    assert any("the spectrum of J_0:D" in line for line in lines(table, "Not measured"))


def test_a_screening_that_version_03_wrote_has_the_same_page(screening):
    models = written(screened.as_object({"a": screening}))
    missing = models["models"]["a"].pop("missing")
    steps = {**models["models"]["a"]["steps"]}
    for step, why in missing.items():
        steps[step] = written(StepVerdict("n/a", "–", why))
    models["models"]["a"]["steps"] = {step: steps[step] for step in STEPS}
    table = screened.measured_in(models)
    assert table.missing == screened.measured({"a": screening}).missing
    assert verdicts_of(table) == verdicts_of(screened.measured({"a": screening}))
    assert table.reasons == screened.measured({"a": screening}).reasons


def checks():
    text = tokens(1, 7)
    check = check_model(
        small_model("pre"), text[:, :-1], text[:, 1:], Regularization(kinetic=0.1), thorough=True
    )
    return {"layernorm": {"pre": replace(check, missing={"segment 1 (ffn)": "a dead gain"})}}


def test_a_check_that_version_03_wrote_has_the_same_table():
    refused = {"post": "a kinetic cost does not apply"}
    table = certified.measured(checks(), refused)
    assert table.missing == {
        "post": {"verdict, Transformer": "a kinetic cost does not apply"},
        "pre": {
            "segment 1 (ffn)": "a dead gain",
            "penalty needed": "1 of 7 parts were skipped, and may need a penalty too",
        },
    }
    assert "n/a: a kinetic cost does not apply" in table.notes[""]
    assert "segment 1 (ffn) is skipped: a dead gain" in table.notes["pre"]
    today = {"checks": written(checks()), "missing": refused}
    assert certified.measured_in(today).missing == table.missing
    old = {"checks": written(checks()), "not_applicable": refused}
    row = old["checks"]["layernorm"]["pre"]
    row["skipped"] = row.pop("missing")
    assert certified.measured_in(old).missing == table.missing


def test_a_principle_that_version_03_wrote_has_the_same_table():
    text = tokens(1, 7)
    found = principled.principled(small_model("pre"), text[:, :-1], text[:, 1:])
    found = replace(found, attained=None, missing={"left by all weights": "weights on demand"})
    table = principled.measured({"a": found})
    today = written(principled.as_object({"a": found}))
    assert principled.measured_in(today).missing == table.missing
    old = {**today, "attained": {"a": "weights on demand"}}
    del old["missing"]
    assert principled.measured_in(old).missing == table.missing


def reasons_in(log: MonitorLog):
    return log.reports[0].missing, log.probes[0]["missing"]


def test_a_log_of_version_03_is_read(tmp_path):
    reasons = {"block 0": "an error"}
    writer = LogWriter(tmp_path, Header("a model", ["block 0"], ["attention"], [1], 5))
    writer.report(Report(5, {"loss": 1.0}, reasons))
    writer.probe(5, {"theta": 0.5, "missing": {"curvature": "no memory"}})
    assert reasons_in(read_log(tmp_path)) == (reasons, {"curvature": "no memory"})
    text = (tmp_path / LOG).read_text()
    assert text.count('"missing"') == 2
    (tmp_path / LOG).write_text(text.replace('"missing"', '"unknown"'))
    assert reasons_in(read_log(tmp_path)) == (reasons, {"curvature": "no memory"})


def test_without_a_reason_no_page_says_that_something_was_not_measured():
    assert [chapter.title for chapter in view(Measured(), "a")] == []
