"""What the texts of checks say of the clinic is what its rows say."""

import json
import re
from pathlib import Path

import pytest

from benchmarks.clinic import (
    faults,
    seal,
    second_model_faults,
    second_report,
    second_training_faults,
)
from benchmarks.clinic import second_judging as judge
from benchmarks.clinic.cures import ADVICE
from benchmarks.clinic.judging import CATEGORIES
from benchmarks.clinic.peer_report import peer_shares
from benchmarks.clinic.peer_scripts import CHANGES, script
from benchmarks.clinic.report import found, needs_cure, outcome_of
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


def text_of(name):
    return " ".join((ROOT / name).read_text().split())


def test_readme_and_page_say_what_the_second_sealed_rows_say():
    rows = kept("second-sealed.jsonl")
    sick = second_report.needing(rows)
    told = [row for row in sick if judge.found(row)]
    healed, harmed = (sum(map(test, told)) for test in (judge.healed, judge.harmed))
    readme, page = text_of("README.md"), text_of("docs/why/clinic.md")
    assert (
        f"Of {len(sick)} [planted](docs/why/clinic.md) faults that needed a fix, `diagnose --search`"
        f" and `watch` found {len(told)}. They fixed {healed} and made {harmed} worse." in readme
    )
    assert f"Of {len(sick)} faults that needed a fix, they found {len(told)}" in page
    assert (
        f"{len(second_report.patients(rows))} patients and {len(second_report.controls(rows))} con"
        in page
    )
    for measure in second_report.asked_for(rows):
        assert measure.row in page
    for share in peer_shares(rows, kept("second-peers.jsonl")):
        assert share.row in page


def test_page_says_what_the_first_sealed_rows_say():
    rows = [row for row in kept("sealed.jsonl") if row["fault"] and row["ending"] != "does not fit"]
    needing = [row for row in rows if needs_cure(row)]
    told = [row for row in needing if found(row)]
    healed = sum(outcome_of(row, "advice") == "healed" for row in told)
    page = text_of("docs/why/clinic.md")
    assert f"found {sum(map(found, rows))} of {len(rows)} sealed patients" in page
    assert f"Of the {len(needing)} that needed a fix, it found {len(told)}" in page
    assert f"the advice fixed {healed} of these" in page


def test_no_name_of_a_second_fault_is_of_another_one():
    old = {*faults.MODEL_FAULTS, *faults.TRAINING_FAULTS}
    assert not old & {*second_model_faults.ADDED, *second_training_faults.ADDED}
    assert not second_model_faults.ADDED.keys() & second_training_faults.ADDED.keys()


def test_each_fault_has_a_category_and_each_treatment_that_it_names():
    for trial in (seal.FIRST, seal.SECOND):
        for fault in (*trial.model.values(), *trial.training.values()):
            assert fault.category in CATEGORIES
            assert not fault.cure or fault.cure in TREATMENTS


def test_each_script_of_a_peer_differs_from_the_healthy_one():
    for fault in CHANGES:
        assert script(fault) != script("")
        compile(script(fault), fault, "exec")


@pytest.mark.parametrize(
    ("hits", "of", "said"), [(95, 100, "met"), (85, 100, "not met"), (5, 100, "refuted")]
)
def test_a_share_is_refuted_if_its_interval_is_on_the_wrong_side(hits, of, said):
    assert judge.verdict(hits, of, 0.9, at_least=True) == said
