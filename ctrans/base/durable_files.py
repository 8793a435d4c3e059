"""Files that are written whole or not at all, and are on the disk when the call returns."""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
from pathlib import Path
from typing import BinaryIO

LONGEST = 100
"""The bytes of a file's name that its temporary name has; file systems allow 255, or 143."""


def write_durably(path: Path, data: bytes) -> None:
    """Writes the file whole or leaves the old one, and returns when it is on the disk. Raises
    OSError.
    """
    # a name that a file may have leaves no room for the dot and the number
    beginning = os.fsdecode(os.fsencode(path.name)[:LONGEST])
    temporary, file = _new_file(path.with_name(f".{beginning}.{threading.get_native_id()}"))
    try:
        with file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    flush(path.parent)  # the new name is on the disk when its directory is


def _new_file(path: Path) -> tuple[Path, BinaryIO]:
    """A file that did not exist, by that path with digits after it if needed: a file of that name
    may be a user's, or a link to another one.
    """
    for number in itertools.chain([""], itertools.count()):
        free_path = path.with_name(f"{path.name}{number}")
        with contextlib.suppress(FileExistsError):
            return free_path, free_path.open("xb")
    raise AssertionError("there is always another number")


def flush(path: Path) -> None:
    """Returns when the file, or the directory's names, are on the disk. Raises OSError."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
