"""Files that are written whole or not at all, and are on the disk when the call returns."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
import threading
from collections.abc import Iterable
from pathlib import Path

LONGEST = 100
"""The bytes of a file's name that its temporary name has; file systems allow 255, or 143."""
PROCESS = secrets.randbits(64)
"""A number of this process and its forks. Thread numbers are unique on one machine, and outside of
containers.
"""


def write_durably(path: Path, data: bytes) -> None:
    """Writes the file whole or leaves the old one, and returns when it is on the disk. Raises
    OSError.
    """
    write_parts_durably(path, [data])


def write_parts_durably(path: Path, parts: Iterable[bytes]) -> None:
    """The same for parts that are made one at a time, as from a file that is too large for memory.
    An error in making one leaves the old file. The new file has the old one's mode.
    """
    # a name that a file may have leaves no room for the dot and the numbers
    beginning = os.fsdecode(os.fsencode(path.name)[:LONGEST])
    temporary = path.with_name(f".{beginning}.{PROCESS}{threading.get_native_id()}")
    temporary.unlink(missing_ok=True)  # what else has this name is a link to another file
    try:
        with temporary.open("xb") as file:
            with contextlib.suppress(OSError):  # missing, or a file system without modes
                mode = os.stat(path).st_mode
                if stat.S_ISREG(mode):
                    os.fchmod(file.fileno(), stat.S_IMODE(mode))
            file.writelines(parts)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    flush(path.parent)  # the new name is on the disk when its directory is


def remedy(error: OSError) -> str:
    """What to do about an error of writing."""
    if isinstance(error, PermissionError) or error.errno == errno.EROFS:
        return "make it writable"
    if isinstance(error, (FileExistsError, NotADirectoryError)):
        return "move away what has its name"
    return "free some space"


def flush(path: Path) -> None:
    """Returns when the file, or the directory's names, are on the disk. Raises OSError."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
