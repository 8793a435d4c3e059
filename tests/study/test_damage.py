"""A draw of the campaign of damaged study files, each day another one: the seed is in the
message.
"""

import os
import random
import shutil
import sys

import pytest

from ctrans.study.database import BESIDE, FILE, LOCK, open_store
from solvers import ConfigError
from tests.campaigns import studies
from tests.campaigns.harness import Part

SEED = 2026


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    place = tmp_path_factory.mktemp("study")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        yield studies.Undisturbed(place, lambda train: train())


@pytest.mark.slow
@pytest.mark.parametrize("number", range(3))
def test_a_damaged_study_gets_a_line_and_no_wrong_figure_and_ends_as_it_would_have(study, number):
    part = Part(SEED, 0.02, number, parts=3)
    for name, content, kind in part.random.sample(list(studies.damages(study, part)), 3):
        study.placed(content)
        faults, _ = study.wrong(**kind)
        assert not faults, f"seed {SEED}, {name}: {faults}"


def test_each_odd_value_of_a_row_is_seen(study):
    """Without a command around it: `open_store` names the row of each odd value, but for those that
    are the stored one.
    """
    scripts = studies.odd_values(study)
    for name in random.Random(SEED).sample(sorted(scripts), 60):
        study.placed(study.whole)
        before = study.dumped()
        study.changed(scripts[name])
        same = study.dumped() == before
        assert unseen(study) == same, f"seed {SEED}, {name}"


def test_a_study_whose_list_of_tables_was_lost_does_not_begin_anew(study):
    """The number of tables is at byte 104 of the file: with 0 it seemed to be new, and its runs
    were lost.
    """
    damaged = bytearray(study.whole)
    assert int.from_bytes(damaged[103:105], "big") == 2
    damaged[104] = 0
    study.placed(bytes(damaged))
    with pytest.raises(ConfigError, match="cannot use"), open_store(study.directory):
        pass
    assert (study.directory / FILE).read_bytes() == damaged


def unseen(study):
    """Whether the study is opened without a word."""
    try:
        with open_store(study.directory, write=False) as store:
            return not store.damaged
    except ConfigError:
        return False


@pytest.mark.slow
@pytest.mark.skipif(
    shutil.which("cc") is None or not sys.platform.startswith("linux"),
    reason="needs a C compiler and Linux",
)
def test_a_study_on_a_disk_that_fails_or_killed_at_a_file_operation_goes_on(study):
    counts, faults = studies.on_a_disk_of_its_own(study, Part(SEED, 0.01))
    assert not faults, f"seed {SEED}: {faults}"
    assert min(counts.values()) >= 5


@pytest.mark.parametrize("write", [True, False])
@pytest.mark.parametrize("name", [LOCK, FILE, *(FILE + end for end in BESIDE)])
def test_a_pipe_in_the_place_of_a_file_is_named_and_not_waited_for(name, write, tmp_path):
    with open_store(tmp_path) as store:
        store.tell("name", "mine")
    (tmp_path / name).unlink(missing_ok=True)
    os.mkfifo(tmp_path / name)
    if name == LOCK and not write:
        with open_store(tmp_path, write=False) as store:
            assert store.about("name") == "mine"
        return
    with (
        pytest.raises(ConfigError, match="pipe" if write or name != FILE else "there is no"),
        open_store(tmp_path, write=write),
    ):
        pass
