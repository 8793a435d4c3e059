"""A disk that can be told to fail at one file operation.

What Python asks of the system is counted: files opened, read, written and flushed, directories
listed, names looked up and changed. What a library does by itself, as safetensors when it maps a
file into memory, is not.
"""

import builtins
import io
import os

BY_NAME = (
    *(
        "open",
        "listdir",
        "scandir",
        "stat",
        "lstat",
        "readlink",
        "mkdir",
        "rename",
        "replace",
        "link",
        "symlink",
    ),
    *("unlink", "remove", "rmdir", "chmod", "truncate"),
)
"""The operations of `os` that are told a path."""
OPEN = io.open


class BrokenDisk:
    """Counts the file operations beneath a directory. `fail(path)` is called at the one of that
    number (none for 0), and at all after it where the fault is `lasting`.
    """

    def __init__(self, place, number=0, fail=None, *, lasting=False):
        self.place, self.number, self.fail, self.lasting, self.count = (
            str(place),
            number,
            fail,
            lasting,
            0,
        )

    def __enter__(self):
        watched = {(os, name): self._by_path(getattr(os, name)) for name in BY_NAME}
        watched |= {(module, "open"): self._open for module in (io, builtins)} | {
            (os, "fsync"): self._of_handle(os.fsync)
        }
        self._before = {(module, name): getattr(module, name) for module, name in watched}
        self._put(watched)
        return self

    def __exit__(self, *of):
        self._put(self._before)

    def _put(self, functions):
        for (module, name), function in functions.items():
            setattr(module, name, function)

    def operation(self, path=None):
        """Counts one, and fails where it is to."""
        self.count += 1
        if self.number and (
            self.count == self.number or (self.lasting and self.count > self.number)
        ):
            self.fail(path)

    def _mine(self, path):
        return isinstance(path, (str, os.PathLike)) and os.path.abspath(path).startswith(self.place)

    def _by_path(self, plain):
        def operation(path=".", *args, **kwargs):
            if self._mine(path):
                self.operation(os.fspath(path))
            return plain(path, *args, **kwargs)

        return operation

    def _of_handle(self, plain):
        def operation(handle):
            self.operation()
            return plain(handle)

        return operation

    def _open(
        self, path, mode="r", buffering=-1, encoding=None, errors=None, newline=None, **kwargs
    ):
        """As the built-in one, every reading and writing of the file an operation."""
        if not self._mine(path):
            return OPEN(path, mode, buffering, encoding, errors, newline, **kwargs)
        self.operation(os.fspath(path))
        raw = File(self, path, mode.replace("b", "").replace("t", ""), **kwargs)
        kind = (
            io.BufferedRandom
            if "+" in mode
            else io.BufferedReader
            if "r" in mode
            else io.BufferedWriter
        )
        return (
            kind(raw)
            if "b" in mode
            else io.TextIOWrapper(kind(raw), io.text_encoding(encoding), errors, newline)
        )


class File(io.FileIO):
    """A file that tells the disk of every reading and writing."""

    def __init__(self, disk, *args, **kwargs):
        self.disk = disk
        super().__init__(*args, **kwargs)

    def readinto(self, buffer):
        self.disk.operation(self.name)
        return super().readinto(buffer)

    def readall(self):
        self.disk.operation(self.name)
        return super().readall()

    def write(self, data):
        self.disk.operation(self.name)
        return super().write(data)


def raising(number):
    """What raises the error of that number, as the system does."""

    def fail(path):
        raise OSError(number, os.strerror(number), *([] if path is None else [str(path)]))

    return fail
