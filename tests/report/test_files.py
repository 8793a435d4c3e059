"""Files of results: whole or as they were, whatever fails or is killed while they are written."""

import errno
import os
import stat
from pathlib import Path

import pytest

from ctrans.base.durable_files import PROCESS
from ctrans.report.files import takes_data, write_atomic
from solvers import ConfigError
from tests.campaigns.disk import BrokenDisk, raising


class Killed(BaseException):
    """The process ends here: what follows of it changes nothing on the disk."""


def dying(path):
    raise Killed


@pytest.mark.parametrize("before", [None, b"the old result"])
@pytest.mark.parametrize(
    "fail",
    [raising(errno.ENOSPC), raising(errno.EIO), dying],
    ids=["full disk", "broken disk", "killed"],
)
@pytest.mark.parametrize("lasting", [False, True])
def test_a_result_is_whole_or_as_before_when_any_operation_fails(before, fail, lasting, tmp_path):
    with BrokenDisk(tmp_path) as disk:
        write_atomic(tmp_path / "count" / "result.json", b"the new result")
    assert disk.count > 5
    seen, said = set(), set()
    for number in range(1, disk.count + 1):
        path = tmp_path / str(number) / "result.json"
        path.parent.mkdir()
        if before is not None:
            path.write_bytes(before)
        try:
            with BrokenDisk(tmp_path, number, fail, lasting=lasting):
                write_atomic(path, b"the new result")
        except (ConfigError, Killed) as error:
            said.add(str(error).partition(":")[0].replace(repr(str(path)), "PATH"))
        found = path.read_bytes() if path.exists() else None
        assert found in (before, b"the new result")
        seen.add(found)
        write_atomic(path, b"the new result")
        assert [each.name for each in path.parent.iterdir()] == ["result.json"], (
            "what a killed process left is gone"
        )
    assert seen == {before, b"the new result"}
    assert said == ({""} if fail is dying else {"cannot write PATH"})


def test_a_link_in_place_of_the_file_in_making_is_not_followed(tmp_path, monkeypatch):
    monkeypatch.setattr("threading.get_native_id", lambda: 7)
    (tmp_path / "others").write_bytes(b"of somebody else")
    (tmp_path / f".result.json.{PROCESS}7").symlink_to(tmp_path / "others")
    write_atomic(tmp_path / "result.json", b"new")
    assert (tmp_path / "others").read_bytes() == b"of somebody else"
    assert (tmp_path / "result.json").read_bytes() == b"new"
    assert not (tmp_path / "result.json").is_symlink()


@pytest.mark.parametrize("kind", ["pipe", "descriptor"])
def test_a_pipe_gets_the_result_and_stays(kind, tmp_path):
    path = tmp_path / "result.json"
    if kind == "pipe":
        os.mkfifo(path)
        reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    else:
        reader, writer = os.pipe()
        path.symlink_to(f"/proc/self/fd/{writer}")
    try:
        write_atomic(path, b"the result")
        assert os.read(reader, 100) == b"the result"
    finally:
        os.close(reader)
    assert not stat.S_ISREG(path.lstat().st_mode)


def test_a_link_to_stdout_gets_the_result_where_stdout_is_a_file(tmp_path):
    path, target = tmp_path / "stdout", tmp_path / "target"
    with target.open("wb") as file:
        path.symlink_to(f"/proc/self/fd/{file.fileno()}")
        write_atomic(path, b"the result")
    assert target.read_bytes() == b"the result"
    assert path.is_symlink()


def test_a_link_by_proc_to_a_file_is_an_ordinary_link(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    precious, link = tmp_path / "precious.txt", tmp_path / "link.json"
    precious.write_text("mine")
    link.symlink_to("/proc/self/cwd/precious.txt")
    assert not takes_data(link)
    write_atomic(link, b"the result")
    assert precious.read_text() == "mine"
    assert link.read_bytes() == b"the result"


def test_a_descriptor_by_its_own_path_gets_the_result(tmp_path):
    target = tmp_path / "target"
    with target.open("wb") as file:
        write_atomic(Path(f"/dev/fd/{file.fileno()}"), b"the result")
    assert target.read_bytes() == b"the result"
