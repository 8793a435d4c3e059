"""The lock of a directory in which one process at a time writes.

A lock is on a file, and the file on no name. If someone moves the directory away or removes the
lock's file, another process can lock a new file at the same path. So the process that has the lock
asks before it writes whether the path still leads to its own file.
"""

from __future__ import annotations

import dataclasses
import fcntl
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO

from ctrans.base.given_files import no_regular_file
from solvers import ConfigError


@dataclasses.dataclass(frozen=True)
class DirectoryLock:
    """A locked file: its path, its device and number on the file system, and what to do if the path
    leads elsewhere.
    """

    path: Path
    identity: tuple[int, int]
    way_on: str

    def check_held(self) -> None:
        """Raises ConfigError if the path leads to no file, or to another one than the locked one.
        Whoever writes then would write into a directory of others.
        """
        try:
            identity = _identity(os.stat(self.path))
        except OSError:
            identity = None
        if identity != self.identity:
            raise ConfigError(
                f"{str(self.path.parent)!r} is no longer the directory in which this command began:"
                f" it was moved or replaced, or its {self.path.name} was removed. Nothing more is"
                f" written there: {self.way_on}"
            )


@contextmanager
def locked(path: Path, activity: str, way_on: str) -> Iterator[DirectoryLock]:
    """Makes the file if needed, and locks it against other processes. `way_on` is the advice for a
    directory that is no longer there. Without `flock`, the file system locks nothing.

    Raises ConfigError that says what the other process does (`activity`), if one has the lock, and
    for no regular file; OSError if the file cannot be made.
    """
    file = _lock(path, activity)
    with file:  # open until the end: with a new one, two processes could each have a lock
        yield DirectoryLock(path, _identity(os.fstat(file.fileno())), way_on)


def _identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino


def _lock(path: Path, activity: str) -> IO[bytes]:
    with ExitStack() as stack:
        # without waiting, as opening a pipe does
        try:
            handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
        except IsADirectoryError:
            raise ConfigError(
                f"cannot lock {str(path)!r}: it is a directory, and no regular file: move it away"
            ) from None
        file = stack.enter_context(open(handle, "r+b", buffering=0))
        kind = no_regular_file(os.fstat(handle).st_mode)
        if kind:
            raise ConfigError(
                f"cannot lock {str(path)!r}: it is {kind}, and no regular file: move it away"
            )
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"another process {activity}: wait for its end, or choose another --out"
            ) from None
        except OSError:
            pass  # a file system without locks
        stack.pop_all()
        return file
