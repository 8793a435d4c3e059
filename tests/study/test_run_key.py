"""A kept run is found again though ctrans has gained options since, or changed a default."""

import dataclasses
import inspect
import json
from pathlib import Path

import pytest

from ctrans.model.config import GPTConfig
from ctrans.study import run_key, store
from ctrans.study.carry_out import carry_out_study, prospect
from ctrans.study.description import PlannedRun
from ctrans.study.store import open_store
from ctrans.training.settings import TrainConfig
from solvers import ConfigError
from tests.study.helpers import one_by_one, small

KEPT = json.loads((Path(__file__).parent / "kept_run.json").read_text())
"""A run as the first stores have it, and its key there."""


def gained(kind, **fields):
    """The class with new fields and their defaults."""
    made = dataclasses.make_dataclass(
        kind.__name__, [(name, type(value), value) for name, value in fields.items()], bases=(kind,), frozen=True
    )
    assert inspect.signature(made).parameters.keys() > inspect.signature(kind).parameters.keys()
    return made


def key(model=GPTConfig, training=TrainConfig, **changes):
    return PlannedRun(model(**KEPT["model"], **changes), training(**KEPT["training"]), {}).key(KEPT["fingerprint"])


def test_the_keys_of_the_first_stores_are_todays():
    """Where this fails, a field came to a configuration: give the value that means "as before" in `run_key.BEFORE`."""
    assert key() == KEPT["key"]


def test_an_option_that_came_leaves_the_keys_where_it_means_as_before(monkeypatch):
    monkeypatch.setitem(run_key.BEFORE, "model", {"gain": 1.0})
    monkeypatch.setitem(run_key.BEFORE, "training", {"lookahead": 0})
    later, trained_later = gained(GPTConfig, gain=1.0), gained(TrainConfig, lookahead=0)
    assert key(later, trained_later) == KEPT["key"]
    assert key(later, trained_later, gain=2.0) != KEPT["key"]


def test_a_default_that_changes_makes_another_run(monkeypatch):
    monkeypatch.setitem(run_key.BEFORE, "model", {"gain": 1.0})
    changed = gained(GPTConfig, gain=3.0)
    assert key(changed) != KEPT["key"]
    assert key(changed, gain=1.0) == KEPT["key"]
    assert key(changed) == key(gained(GPTConfig, gain=1.0), gain=3.0)


def test_a_store_that_lacks_a_field_is_read_with_what_it_was_then(tmp_path, monkeypatch):
    with open_store(tmp_path) as opened:
        carry_out_study(prospect(small(), opened), opened, one_by_one)
        keys = opened.keys()
        monkeypatch.setattr(store, "GPTConfig", gained(GPTConfig, gain=3.0))
        monkeypatch.setitem(run_key.BEFORE, "model", {"gain": 1.0})
        assert {run.run.model.gain for run in opened.runs()} == {1.0}
        assert {run.key for run in opened.runs()} == keys


def test_a_field_that_is_gone_is_named(tmp_path, monkeypatch):
    with open_store(tmp_path) as opened:
        carry_out_study(prospect(small(), opened), opened, one_by_one)
        monkeypatch.setitem(run_key.BEFORE, "model", {"gain": 1.0})  # as if a kept run had it
        with pytest.raises(ConfigError, match="runs with gain, which this ctrans does not know"):
            opened.runs()
