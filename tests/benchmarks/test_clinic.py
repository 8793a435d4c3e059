"""What the texts of checks say of the clinic is what its rows say."""

import json
import re
from pathlib import Path

import pytest

from benchmarks.clinic.report import found, needs_cure, outcome_of
from ctrans.findings import tried
from ctrans.monitor import ALARMS
from ctrans.stability.diagnosis.diagnostic_checks import CHECKS

ROWS = Path(__file__).parents[2] / "benchmarks" / "results" / "clinic" / "open-3.jsonl"


def outcomes():
    rows = [json.loads(line) for line in ROWS.read_text().splitlines()]
    told = {}
    for row in rows:
        if row["fault"] and row.get("arms") and found(row) and needs_cure(row):
            told.setdefault(row["found"][0][0], []).append(outcome_of(row, "advice"))
    return told


def test_each_check_says_how_often_its_advice_healed():
    said = {}
    for name, check in {**CHECKS, **ALARMS}.items():
        if counts := re.search(r"carried out on (\d+) runs? of the clinic's open half: healed (\d+), harmed (\d+)", check.source):
            said[name] = [int(count) for count in counts.groups()]
    assert said == {name: [len(own), own.count("healed"), own.count("harm")] for name, own in outcomes().items()}


@pytest.mark.parametrize("runs", [1, 3])
def test_the_sentence_counts_its_runs(runs):
    assert f"on {runs} run{'s' if runs > 1 else ''} of" in tried(runs, 0, 0)
