"""A store with runs on other data than the study's present ones: which are shown, and what is said
of the others.
"""

import string
from types import SimpleNamespace

import pytest

from ctrans.study.carry_out import carry_out_study, prospect
from ctrans.study.database import open_store
from ctrans.study.engine import data_of
from ctrans.study.run_key import PLUGINS
from ctrans.study.training import RunResult, train_run
from ctrans.training import log
from ctrans.training.data import from_text
from solvers import ConfigError
from tests.study.helpers import one_by_one, small

EARLIER = 5.0
LATER = 6.0


def finish(plan, store, loss):
    """Stores all runs that are left, each ended at this loss."""
    curve = [{"step": 0, "validation_loss": loss}]
    result = RunResult("finished", "", curve, 1.0, {}, {})
    store.begin_on(plan.fingerprints)
    store.add([(key, run, result) for key, run in plan.left.items()], "")


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "book.txt"
    path.write_text(string.ascii_lowercase * 40)
    return path


def study_of(path):
    source = {"file": str(path), "bin": None}
    return small(source=source, vary={"placement": ["pre"]}, learning_rates=[1e-3])


def reported(path, store):
    """The losses that a report shows, and its remarks."""
    plan = prospect(study_of(path), store, as_begun=True)
    losses = {finished.best for finished in plan.kept(store)}
    return losses, " ".join(plan.remarks)


@pytest.mark.slow
def test_a_report_shows_the_runs_on_the_present_data(text, tmp_path):
    with open_store(tmp_path) as store:
        finish(prospect(study_of(text), store), store, EARLIER)
        assert reported(text, store) == ({EARLIER}, "")
        text.write_text(string.ascii_uppercase * 40)
        finish(prospect(study_of(text), store), store, LATER)
        losses, remarks = reported(text, store)
        assert losses == {LATER}
        assert "runs of this study on other data, 1 of them" in remarks
        text.unlink()  # the newest data are shown where the present ones are unknown
        assert reported(text, store)[0] == {LATER}


def test_a_report_says_that_the_data_changed_if_they_have_no_runs(text, tmp_path):
    with open_store(tmp_path) as store:
        finish(prospect(study_of(text), store), store, EARLIER)
        text.write_text(string.ascii_uppercase * 40)
        losses, remarks = reported(text, store)
        assert losses == {EARLIER}
        assert "data changed: these runs are of the earlier data" in remarks


def test_a_report_of_a_study_without_its_data_shows_its_runs(text, tmp_path):
    with open_store(tmp_path) as store:
        finish(prospect(study_of(text), store), store, EARLIER)
        text.unlink()
        losses, remarks = reported(text, store)
        assert losses == {EARLIER}
        assert "book.txt" in remarks
        assert "cannot be compared" in remarks


def test_a_report_names_the_data_of_the_runs_and_not_others_that_are_missing(text, tmp_path):
    with open_store(tmp_path) as store:
        plan = prospect(study_of(text), store)
        carry_out_study(plan, store, one_by_one)
        other = study_of(text.with_name("gone.txt"))
        plan = prospect(other, store, as_begun=True)
        assert plan.study.source["file"] == str(text)
        assert "gone.txt" in " ".join(plan.remarks)


def test_runs_on_data_that_changed_meanwhile_are_not_stored(text, tmp_path):
    with open_store(tmp_path) as store:
        plan = prospect(study_of(text), store)
        text.write_text(string.ascii_uppercase * 40)
        data_of.cache_clear()
        with pytest.raises(ConfigError, match="has other data than when the study began"):
            carry_out_study(plan, store, one_by_one)
        assert not plan.kept(store)


def test_a_training_whose_log_lost_rows_has_failed(text, monkeypatch):
    (run,) = study_of(text).runs()
    data = from_text(text.read_bytes(), run.model.context)
    assert train_run(run, data).ending == "finished"

    def without_its_start(*given):
        return list(log.read(*given))[2:]

    monkeypatch.setattr("ctrans.study.training.log", SimpleNamespace(read=without_its_start))
    failed = train_run(run, data)
    assert failed.ending == "failed"
    assert "has 3 of 5 steps" in failed.message


def test_runs_with_a_plugin_that_was_edited_are_done_anew(text, tmp_path, monkeypatch):
    study = study_of(text)
    with open_store(tmp_path) as store:
        for digest, done in (("first", False), ("first", True), ("edited", False), ("first", True)):
            monkeypatch.setitem(PLUGINS, "digest", digest)
            plan = prospect(study, store)
            assert (not plan.left) == done, digest
            finish(plan, store, EARLIER)
        assert "with other plugins" in " ".join(plan.remarks)


def test_runs_from_before_plugins_were_in_their_keys_are_kept(text, tmp_path, monkeypatch):
    with open_store(tmp_path) as store:
        finish(prospect(study_of(text), store), store, EARLIER)
        monkeypatch.setitem(PLUGINS, "digest", "of now")
        assert not prospect(study_of(text), store).left
