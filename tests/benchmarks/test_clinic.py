"""What the texts of checks say of the clinic is what its rows say."""

import json
import re
from pathlib import Path

import pytest

from benchmarks.clinic.cures import ADVICE
from benchmarks.clinic.report import count, found, needs_cure, outcome_of
from benchmarks.clinic.treatments import TREATMENTS
from ctrans.examine.diagnosis.diagnostic_checks import CHECKS
from ctrans.measure.findings import record_of
from ctrans.training.monitor import ALARMS

ROOT = Path(__file__).parents[2]


def kept(name):
    return [
        json.loads(line)
        for line in (ROOT / "benchmarks" / "results" / "clinic" / name).read_text().splitlines()
    ]


def outcomes():
    rows = kept("open-3.jsonl")
    told = {}
    for row in rows:
        if row["fault"] and row.get("arms") and found(row) and needs_cure(row):
            told.setdefault(row["found"][0][0], []).append(outcome_of(row, "advice"))
    return told


def test_each_check_says_how_often_its_advice_healed():
    said = {}
    for name, check in {**CHECKS, **ALARMS}.items():
        if counts := re.search(
            r"carried out on (\d+) runs? of the clinic's open half: healed (\d+), harmed (\d+)",
            check.source,
        ):
            said[name] = [int(count) for count in counts.groups()]
    assert said == {
        name: [len(own), own.count("healed"), own.count("harm")] for name, own in outcomes().items()
    }


@pytest.mark.parametrize("runs", [1, 3])
def test_the_sentence_counts_its_runs(runs):
    assert f"on {runs} run{'s' if runs > 1 else ''} of" in record_of(runs, 0, 0)


def test_each_check_and_each_alarm_has_a_treatment():
    assert ADVICE.keys() == {*CHECKS, *ALARMS}
    assert set(ADVICE.values()) <= TREATMENTS.keys()


def test_readme_and_page_say_what_the_sealed_rows_say():
    rows = [row for row in kept("sealed.jsonl") if row["fault"] and row["ending"] != "does not fit"]
    told = [
        outcome_of(row, "advice") for row in rows if row["arms"] and found(row) and needs_cure(row)
    ]
    missed = sum(not found(row) for row in rows)
    readme, page = (
        " ".join((ROOT / name).read_text().split()) for name in ("README.md", "docs/why/clinic.md")
    )
    needing = [row for row in rows if needs_cure(row)]
    assert (
        f"Of {len(needing)} [planted](docs/why/clinic.md) faults that needed a fix, `diagnose` and"
        f" `watch` found {len(told)}. Their advice fixed {told.count('healed')} of these and made"
        f" {told.count('harm')} worse." in readme
    )
    assert f"| found, of all | at least 97% | {count(rows, found)} |" in page
    assert f"| found, of those that needed a fix | | {count(needing, found)} |" in page
    unharmed = [row for row in rows if not needs_cure(row)]
    assert f"**No harm**: {len(unharmed)} patients" in page
    assert f"among them {sum(not found(row) for row in unharmed)} of the {missed}" in page
    assert (
        f"{len(rows)} faults, {len(needing)} needed a fix, and {len(told)} of these were found."
        in page
    )
    assert (
        f"The advice fixed {told.count('healed')} of them and made {told.count('harm')} worse"
        in page
    )
