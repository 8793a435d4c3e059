"""Files that are written whole or not at all."""

import os

from ctrans.base.durable_files import write_durably


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
