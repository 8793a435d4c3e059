"""What `ctrans report` makes of results of earlier versions, and of several commands."""

import json

import pytest
from click.testing import CliRunner

from ctrans.cli import main
from ctrans.report.contents import page_of
from ctrans.report.sections import Table, Words
from solvers import ConfigError

HELD = {
    "holds": True,
    "excess": -5.1e-05,
    "tolerance": 1e-09,
    "cases": 100,
    "case": 57,
    "words": "norm reset: 1.04703 against 1.04708",
}
STATEMENT = {
    "name": "norm-reset",
    "section": 9,
    "source": "Emadi, lemma 3.3",
    "says": "|N(x)|_rms <= max|gamma| + max|beta|",
    "printed": "",
    "seed": HELD,
    "corrected": HELD,
    "seconds": 0.18,
    "verdict": "as printed",
}
VERIFIED = {
    "command": "verify",
    "environment": {"ctrans": "0.3.0"},
    "holds": True,
    "findings": [],
    "seconds": 0.18,
    "statements": {"norm-reset": STATEMENT},
}
"""A result of `ctrans verify`, as version 0.3 wrote it."""
SCREENED = {"command": "screen", "environment": {"ctrans": "0.2.0"}, "models": {"pre": {}}}


def run(*args):
    return CliRunner().invoke(main, [str(arg) for arg in args], prog_name="ctrans")


def tables(page):
    return [part for chapter in page.chapters for part in chapter.parts if isinstance(part, Table)]


def test_a_verification_of_version_1_has_the_answer_and_the_table_of_today():
    page = page_of({"v.json": VERIFIED})
    assert [answer.text.partition(".")[0] for answer in page.answers] == [
        "No counterexample was found to any of 1 statement (1 as printed; 0 s)"
    ]
    (by_section,) = [sheet for sheet in tables(page) if sheet.title == "Statements by section"]
    assert [cell.text for cell in by_section.rows[0]] == ["9. attention sensitivity", "1"]
    (sheet,) = [sheet for sheet in tables(page) if sheet.title == "Statements"]
    texts = [cell.text for cell in sheet.rows[0]]
    assert texts[0] == "norm-reset"
    assert texts[2:6] == ["as printed", STATEMENT["says"], "-5.1e-05", "100"]


def test_a_violated_statement_of_version_1_is_a_finding():
    finding = {
        "check": "statement violated",
        "topic": "theory",
        "severity": "broken",
        "place": "section 9, norm-reset",
        "value": 0.5,
        "figure": "norm reset: 2 against 1",
        "limit": "above 1e-09",
        "source": "Emadi, lemma 3.3",
        "impact": "The form of the statement that should hold fails for this case.",
        "remediation": "Report it with the command and verify.json.",
        "places": [],
    }
    violated = {**STATEMENT, "corrected": {**HELD, "holds": False}, "verdict": "violated"}
    stored = {**VERIFIED, "findings": [finding], "statements": {"norm-reset": violated}}
    page = page_of({"v.json": stored})
    assert page.answers[0].text == "1 of 1 statement did not hold: norm-reset."
    assert "Findings, the most severe first" in [chapter.title for chapter in page.chapters]


@pytest.mark.parametrize(
    ("command", "instead"),
    [("families", "docs/howto/model-families.md"), ("rate", "ctrans study FILE.toml")],
)
def test_a_result_of_a_removed_command_is_refused_with_what_to_use(command, instead, tmp_path):
    stored = tmp_path / "f.json"
    stored.write_text(json.dumps({"command": command}))
    result = run("report", stored, "--out", tmp_path / "out")
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1), result.output
    assert f"the command ctrans {command} was removed" in result.stderr
    assert instead in result.stderr


def test_a_result_of_another_shape_is_refused_by_its_file_its_version_and_the_missing_key():
    with pytest.raises(ConfigError) as raised:
        page_of({"new.json": VERIFIED, "old.json": SCREENED})
    message = str(raised.value)
    assert message.startswith("old.json: ctrans screen does not write this today, and ctrans 0.2.0")
    assert "the key 'steps' is missing. Run ctrans screen again" in message


def test_of_several_results_only_those_that_cannot_be_read_are_named():
    without = {**VERIFIED, "statements": [3]}
    with pytest.raises(ConfigError, match=r"^wrong: ctrans verify does not write this"):
        page_of({"right": VERIFIED, "wrong": without})


@pytest.mark.parametrize(
    "result",
    [
        SCREENED,
        {"command": "simulate", "placements": {"pre": 3}},
        {"command": "simulate", "placements": 3},
        {**VERIFIED, "statements": None},
        {**VERIFIED, "findings": [{"check": 3}]},
    ],
)
def test_no_exception_of_python_is_named_to_a_user(result):
    with pytest.raises(ConfigError) as raised:
        page_of({"a.json": result})
    assert "Error" not in str(raised.value)


def test_the_table_of_statements_is_headed_as_such_and_says_a_section_once():
    sheets = tables(page_of({"v.json": VERIFIED}))
    (sheet,) = [sheet for sheet in sheets if sheet.title == "Statements"]
    assert [column.name for column in sheet.columns][:2] == ["statement", "section"]
    assert sheet.rows[0][1].text == "9. attention sensitivity"


def test_answers_of_several_commands_have_the_names_of_their_files():
    simulated = {"command": "simulate", "placements": {}}
    stored = {"a.json": VERIFIED, "b.json": {**SCREENED, "models": {}}, "c.json": simulated}
    page = page_of(stored)
    assert page.answers[0].text.startswith("a.json: No counterexample")
    headings = [
        part.text
        for chapter in page.chapters
        for part in chapter.parts
        if isinstance(part, Words) and part.text.startswith("ctrans ")
    ]
    assert headings[0] == "ctrans verify: a.json"
    assert page_of({"a.json": VERIFIED}).answers[0].text.startswith("No counterexample")
