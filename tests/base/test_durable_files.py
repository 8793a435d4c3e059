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
