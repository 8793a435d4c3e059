"""What a command says of a place to which it cannot write, and of what it wrote."""

import errno
import os
import re

import pytest

from ctrans.training import log
from ctrans.training.run_directory import RunDirectory
from solvers import ConfigError
from tests.cli.test_commands import run

TINY = ("--depth", 1, "--width", 16, "--heads", 2, "--context", 8, "--batch", 1)


@pytest.mark.slow
def test_a_run_that_diverges_before_its_first_iteration_names_only_files_that_are_there(tmp_path):
    diverging = ("--dt", "1e30", "--placement", "none", "--iterations", 3)
    ended = run("train", *TINY, *diverging, "--out", tmp_path)
    assert ended.exit_code == 1, ended.output
    (names,) = re.findall(r"^Written: (.*)$", ended.stdout, re.MULTILINE)
    assert f"{tmp_path}/train.json" in names
    assert all(os.path.exists(name) for name in names.split(", "))


@pytest.mark.parametrize(("name", "fault"), [("train.json", "read-only"), ("loss.png", "exists")])
def test_a_resumed_run_does_not_advise_the_option_that_it_excludes(name, fault, tmp_path):
    (tmp_path / "train.json").write_text('{"command": "train", "options": {}}')
    if fault == "read-only":
        (tmp_path / name).chmod(0o444)
    else:
        (tmp_path / name).write_text("mine")
    refused = run("train", "--resume", "--out", tmp_path)
    assert refused.exit_code == 2
    assert f"{name}' {'is ' * (fault == 'read-only')}{fault}" in refused.stderr
    assert "move it away" in refused.stderr
    assert "--overwrite" not in refused.stderr


@pytest.mark.parametrize("name", ["simulate.json", "simulate.png"])
def test_a_link_to_a_directory_in_the_place_of_a_result_stays(name, tmp_path):
    (tmp_path / "directory").mkdir()
    (tmp_path / name).symlink_to("directory")
    refused = run("simulate", *TINY, "--out", tmp_path)
    assert (refused.exit_code, "is a link to a directory" in refused.stderr) == (2, True)
    assert (tmp_path / name).is_symlink()


def failing(number, path=None):
    return OSError(number, os.strerror(number), path)


ADVICE = {
    errno.EACCES: "make it writable",
    errno.EROFS: "make it writable",
    errno.EEXIST: "move away what has its name",
    errno.ENOSPC: "free some space",
}


@pytest.mark.parametrize("number", ADVICE)
def test_an_error_of_writing_gets_the_advice_that_helps(number, tmp_path):
    advice = ADVICE[number]
    with (
        pytest.raises(ConfigError, match=f"log': .*; {advice}, then"),
        log.writing(tmp_path / "log", "then go on"),
    ):
        raise failing(number)
    changing = RunDirectory(tmp_path).changing
    with pytest.raises(ConfigError, match=f"directory '{tmp_path}': .*; {advice}, or"), changing():
        raise failing(number)
    lock = tmp_path / ".lock"
    lock.touch()
    with pytest.raises(ConfigError, match=f"cannot write to '{lock}': "), changing():
        raise failing(number, str(lock))
