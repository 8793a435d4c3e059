"""Files that are written whole or not at all."""

import os
import subprocess
import sys
import threading

from ctrans.base import durable_files
from ctrans.base.durable_files import write_durably, write_parts_durably


def test_bytes_are_on_the_disk_before_they_have_their_name(tmp_path, monkeypatch):
    calls = []
    for name in ("fsync", "replace"):
        call = getattr(os, name)
        monkeypatch.setattr(
            os, name, lambda *args, name=name, call=call: (calls.append(name), call(*args))[1]
        )
    write_durably(tmp_path / "file", b"x")
    assert calls == [
        "fsync",
        "replace",
        "fsync",
    ]  # the file, its name, the directory that holds the name


def test_the_longest_name_of_a_file_can_be_written(tmp_path):
    for name in ("x" * 255, "\u00e4" * 127):
        write_durably(tmp_path / name, b"x")
        assert (tmp_path / name).read_bytes() == b"x"
    assert len(list(tmp_path.iterdir())) == 2


OTHER = """
import runpy, sys, threading
from pathlib import Path
module = runpy.run_path(sys.argv[1])
threading.get_native_id = lambda: int(sys.argv[2])
module["write_durably"](Path(sys.argv[3]), b"bbb")
"""


def test_processes_with_one_thread_number_each_write_whole_files(tmp_path):
    """As those of two containers, or of two machines with one file system."""
    path = tmp_path / "file"
    given = [durable_files.__file__, str(threading.get_native_id()), str(path)]

    def parts():
        yield b"aaa"
        subprocess.run([sys.executable, "-c", OTHER, *given], check=True)
        assert path.read_bytes() == b"bbb"
        yield b"aaa"

    write_parts_durably(path, parts())
    assert path.read_bytes() == b"aaaaaa"
    assert [each.name for each in tmp_path.iterdir()] == ["file"]


def test_a_file_in_the_place_of_a_link_to_a_directory_has_the_mode_of_a_file(tmp_path):
    write_durably(tmp_path / "new", b"x")
    (tmp_path / "directory").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to("directory")
    write_durably(tmp_path / "link", b"x")
    assert (tmp_path / "link").lstat().st_mode == (tmp_path / "new").lstat().st_mode
