"""A store with runs on other data than the study's present ones: which are shown, and what is said
of the others.
"""

import string

import pytest

from ctrans.study.carry_out import prospect
from ctrans.study.database import open_store
from ctrans.study.training import RunResult
from tests.study.helpers import small

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
        assert reported(text, store) == ({EARLIER}, "")
