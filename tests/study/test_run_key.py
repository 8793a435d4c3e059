"""A kept run is found again though ctrans has gained options since, or changed a default."""

import dataclasses
import json
from pathlib import Path

import pytest

from ctrans.model.config import GPTConfig
from ctrans.study import description, finished, run_key
from ctrans.study.carry_out import carry_out_study, prospect
from ctrans.study.database import open_store
from ctrans.training.data_sources import read_source
from ctrans.training.settings import TrainConfig
from solvers import ConfigError
from tests.study.helpers import one_by_one, small

KEPT = json.loads((Path(__file__).parent / "kept_run.json").read_text())
"""Runs as stores have them, of the first ones and of later ones, and their keys."""
KINDS = {"model": GPTConfig, "training": TrainConfig}


def gained(kind, **fields):
    """The class with new fields and their defaults."""
    new = [(name, type(value), value) for name, value in fields.items()]
    return dataclasses.make_dataclass(kind.__name__, new, bases=(kind,), frozen=True)


def with_fields(monkeypatch, **fields):
    """GPTConfig has gained these."""
    made = gained(GPTConfig, **fields)
    monkeypatch.setattr(finished, "GPTConfig", made)
    monkeypatch.setattr(description, "GPTConfig", made)
    monkeypatch.setattr(description, "MODEL", description.MODEL | fields.keys())


@pytest.fixture
def kept(tmp_path):
    with open_store(tmp_path) as opened:
        carry_out_study(prospect(small(), opened), opened, one_by_one)
        yield opened


@pytest.mark.parametrize("when", KEPT)
def test_keys_are_what_they_were(when):
    run = KEPT[when]
    assert run_key.run_key(run["model"], run["training"], run["fingerprint"], ()) == run["key"]


def test_every_field_that_came_since_says_what_was_before_it():
    """Where this fails, a configuration gained a field: give `run_key.BEFORE` the value with which
    ctrans does what it did.
    """
    for name, kind in KINDS.items():
        fields = {field.name for field in dataclasses.fields(kind)}
        assert fields - KEPT["first"][name].keys() == run_key.BEFORE[name].keys()


def test_runs_of_before_the_fields_are_found(kept):
    """As the first stores have them: fewer fields, and the key of those."""
    study = small()
    fingerprint = read_source(study.source, 8).fingerprint()
    with kept.connection as connection:
        for key, *texts in connection.execute("SELECT key, model, training FROM runs").fetchall():
            old = [
                {
                    field: value
                    for field, value in json.loads(text).items()
                    if field not in run_key.BEFORE[name]
                }
                for name, text in zip(KINDS, texts, strict=True)
            ]
            row = run_key.run_key(*old, fingerprint, ()), *map(json.dumps, old), key
            connection.execute(
                "UPDATE runs SET key = ?, model = ?, training = ? WHERE key = ?", row
            )
    assert not {each.key for each in kept.runs()} & prospect(study, None).runs.keys()
    plan = prospect(study, kept)
    assert not plan.left
    found = [run.run for run in plan.kept(kept)]
    assert len(found) == 4
    assert all(run in found for run in study.runs())


def test_an_option_that_came_leaves_kept_runs_where_it_means_as_before(kept, monkeypatch):
    monkeypatch.setitem(run_key.BEFORE["model"], "gain", 1.0)
    with_fields(monkeypatch, gain=1.0)
    assert not prospect(small(), kept).left
    assert (
        len(prospect(small(vary={"placement": ["pre", "peri"], "gain": [1.0, 2.0]}), kept).left)
        == 4
    )


def test_a_default_that_changes_makes_other_runs(kept, monkeypatch):
    monkeypatch.setitem(run_key.BEFORE["model"], "gain", 1.0)
    with_fields(monkeypatch, gain=3.0)
    assert len(prospect(small(), kept).left) == 4
    assert {run.run.model.gain for run in kept.runs()} == {1.0}
    plan = prospect(small(vary={"placement": ["pre", "peri"], "gain": [1.0]}), kept)
    assert not plan.left
    assert len(plan.kept(kept)) == 4


def test_runs_on_other_data_are_not_found(kept, tmp_path):
    (tmp_path / "book.txt").write_bytes(b"other words, other words" * 1000)
    assert (
        len(prospect(small(source={"file": str(tmp_path / "book.txt"), "bin": None}), kept).left)
        == 4
    )


def test_a_field_that_is_gone_is_named(kept, monkeypatch):
    monkeypatch.setitem(run_key.BEFORE["model"], "gain", 1.0)  # as if a kept run had it
    with pytest.raises(ConfigError, match="runs with gain, which this ctrans does not know"):
        kept.runs()
