"""The trial of treatments: what the acts change, the rule, and the page's table."""

import dataclasses
from pathlib import Path

import pytest
import torch

from benchmarks.clinic import treatment
from benchmarks.clinic.acts import acts_for
from ctrans.examine.diagnosis.diagnostic_checks import CHECKS
from ctrans.measure.findings import Finding

PAGE = Path(__file__).parents[2] / "docs" / "why" / "clinic.md"


def found(check):
    fields = {
        each.name: "" for each in dataclasses.fields(Finding) if each.default is dataclasses.MISSING
    }
    return Finding(**{**fields, "check": check, "severity": "note", "value": 1.0, "places": []})


def weights(large=1.0, gain=1.0):
    draws = torch.Generator().manual_seed(0)
    numbers = {}
    for k in range(3):
        numbers[f"layers.{k}.mlp.down.weight"] = torch.randn(8, 8, generator=draws)
        numbers[f"layers.{k}.norm.weight"] = torch.ones(8)
    numbers["layers.1.mlp.down.weight"] *= large
    numbers["layers.1.norm.weight"][2] = gain
    return numbers


def changed(numbers, *checks):
    given = {name: lambda each=each: each.clone() for name, each in numbers.items()}
    return {act.weight: act.new for act in acts_for([found(check) for check in checks], given)}


def test_a_large_weight_gets_the_size_of_the_same_weight_in_other_blocks_and_keeps_its_direction():
    (new,) = changed(weights(large=50.0), "sublayer output too large").values()
    old = weights()
    beside = [float(old[f"layers.{k}.mlp.down.weight"].norm()) for k in (0, 2)]
    assert float(new.norm()) == pytest.approx(sum(beside) / 2, rel=1e-5)
    assert float(
        torch.cosine_similarity(new.flatten(), old["layers.1.mlp.down.weight"].flatten(), 0)
    ) == pytest.approx(1.0)


def test_a_gain_of_100_gets_the_median_and_the_others_keep_their_bits():
    (new,) = changed(weights(gain=100.0), "gain too large").values()
    assert torch.equal(new, torch.ones(8))


def test_nothing_changes_without_the_finding_or_without_such_a_weight():
    assert not changed(
        weights(large=50.0, gain=100.0),
        *CHECKS.keys() - {"gain too large", "sublayer output too large"},
    )
    assert not changed(weights(large=7.0, gain=45.0), "gain too large", "sublayer output too large")


@pytest.mark.parametrize(
    ("healed", "of", "placebo", "passes"),
    [(8, 8, 0, True), (7, 7, 0, False), (4, 8, 0, False), (8, 8, 3, False)],
)
def test_the_rule_asks_for_eight_patients_and_for_intervals_that_are_apart(
    healed, of, placebo, passes
):
    """Wilson's intervals for 8 of 8, 4 of 8, 0 of 8 and 3 of 8 are 68-100%, 22-78%, 0-32% and
    14-69%.
    """
    results = [["healed"] * hits + ["no change"] * (of - hits) for hits in (healed, placebo)]
    assert treatment.passes(*results) is passes


def test_the_page_has_the_table_of_the_kept_rows():
    rows = PAGE.read_text().splitlines()
    for line in treatment.report(treatment.rows())[:-1]:
        cells = line.split(" | ")
        del cells[1]  # how often it did not act
        assert line.startswith("| ---") or " | ".join(cells) in rows


def test_the_kept_rows_have_the_result_of_the_removed_reaction_lower():
    first = [row for row in treatment.rows() if row["seed"] in treatment.FIRST]
    (line,) = (
        line for line in treatment.report_reactions(first) if line.startswith("| `lower` | all |")
    )
    shares = line.split(" | ")
    row = next(row for row in PAGE.read_text().splitlines() if row.startswith("| `lower`"))
    assert shares[4] in row
    assert shares[6] in row
