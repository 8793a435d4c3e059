"""The study file under two names."""

import subprocess

import pytest

from ctrans.study.database import FILE, open_store
from solvers import ConfigError


def test_a_store_with_another_name_is_read_and_not_written_until_it_is_a_file_of_its_own(tmp_path):
    """Two studies would each lock their own directory, and write one file."""
    with open_store(tmp_path / "study") as store:
        store.tell("name", "mine")
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked" / FILE).hardlink_to(tmp_path / "study" / FILE)
    for name in ("study", "linked"):
        with open_store(tmp_path / name, write=False) as store:
            assert store.about("name") == "mine"
        with pytest.raises(ConfigError, match="has another name") as error:
            open_store(tmp_path / name).__enter__()
    subprocess.run(str(error.value).partition("its own: ")[2], shell=True, check=True)
    for name in ("study", "linked"):
        with open_store(tmp_path / name) as store:
            store.tell("name", name)
    with open_store(tmp_path / "study", write=False) as store:
        assert store.about("name") == "study"
