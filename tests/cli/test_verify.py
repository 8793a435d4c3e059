import json

import pytest
from click.testing import CliRunner

from ctrans.cli import main
from ctrans.dynamics.norm import SphereNorm
from ctrans.theory.all_statements import select


def run(*args):
    return CliRunner().invoke(main, ["verify", *args])


def test_a_section_is_verified_and_written(tmp_path):
    result = run(
        "--only", "8", "--cases", "4", "--out", str(tmp_path), "--json", str(tmp_path / "copy.json")
    )
    assert result.exit_code == 0, result.output
    assert "8. uncertainty" in result.output
    assert "corrected" in result.output
    report = json.loads((tmp_path / "verify.json").read_text())
    assert report == json.loads((tmp_path / "copy.json").read_text())
    assert report["holds"] is True
    assert list(report["statements"]) == [s.name for s in select(["8"])]
    theorem = report["statements"]["theorem-6"]
    assert theorem["verdict"] == "corrected"
    assert theorem["seed"]["holds"] is False
    assert "W_1 of the ends: 32 against 11.313" in theorem["seed"]["words"]
    assert theorem["corrected"]["cases"] == 4
    assert theorem["corrected"]["excess"] <= theorem["corrected"]["tolerance"]


def test_many_statements_are_counted_by_section_and_few_stand_one_by_one(tmp_path):
    many = run("--only", "9", "--cases", "2", "--out", str(tmp_path))
    assert "\n9. attention sensitivity" in many.stdout
    assert len(many.stdout.splitlines()) < 25
    assert "common-state-floor" not in many.stdout
    few = run("--only", "common-state-floor", "--cases", "2", "--out", str(tmp_path))
    assert "common-state-floor, new: " in few.stdout


def test_json_on_stdout_is_alone_there_and_writes_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = run("--only", "lemma-1", "--cases", "2", "--json", "-")
    assert json.loads(result.stdout)["options"] == {"only": ["lemma-1"], "cases": 2, "seed": 0}
    assert list(tmp_path.iterdir()) == []


def test_a_violated_statement_ends_with_1_and_its_case(tmp_path, monkeypatch):
    monkeypatch.setattr(
        SphereNorm, "jacobian", lambda self, x: 1.001 * x.new_ones(self.width, self.width)
    )
    result = run("--only", "lemma-9", "--only", "lemma-1", "--cases", "3", "--out", str(tmp_path))
    assert result.exit_code == 1
    assert "lemma-9 (Kan, lemma 9; Emadi, lemma A.1)" in result.stderr
    assert "closed form against autograd" in result.stderr
    assert "lemma-1 " not in result.stderr
    report = json.loads((tmp_path / "verify.json").read_text())
    assert report["holds"] is False
    assert [r["verdict"] for r in report["statements"].values()] == ["as printed", "violated"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--only", "lemma-99"], "a name such as lemma-9"),
        (["--cases", "0"], "cases = 0"),
    ],
)
def test_what_makes_no_sense_is_refused_before_anything_is_computed(tmp_path, arguments, message):
    result = run(*arguments, "--out", str(tmp_path / "out"))
    assert result.exit_code == 2
    assert message in result.stderr
    assert not (tmp_path / "out").exists()
