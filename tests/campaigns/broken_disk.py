"""A disk that fails: an error of reading or writing, or no space, at one file operation of a command, once or from there on.

The command then says so in a line, or does all that it would have done; and a run goes on to the bits of one that nobody disturbed.
What Python asks of the system is counted: files opened, read, written and flushed, directories listed, names looked up and changed. What
a library does by itself, as safetensors when it maps a file into memory, is not.
"""

import builtins
import contextlib
import errno
import io
import os
import shutil
from unittest import mock

from matplotlib.figure import Figure

from ctrans.model.sums import damage
from ctrans.training.run_directory import RunDirectory
from tests.campaigns.damaged import MODEL, SETTINGS, TEXT
from tests.campaigns.harness import ask
from tests.campaigns.kills import bits

BY_NAME = (
    *("open", "listdir", "scandir", "stat", "lstat", "readlink", "mkdir", "rename", "replace", "link", "symlink"),
    *("unlink", "remove", "rmdir", "chmod", "truncate"),
)
"""The operations of `os` that are told a path."""
ERRORS = (errno.EIO, errno.ENOSPC)
OPEN = io.open

RUN = "run"
OPTIONS = [word for name, value in {**MODEL, **SETTINGS}.items() for word in (f"--{name.replace('_', '-')}", str(value))]
NEW = ["train", *OPTIONS, "--file", "text", "--out", RUN]
RESUMED = ["train", "--resume", "--out", RUN]
REQUESTS = {
    "a new run": (False, NEW),
    "a run that overwrites another": (True, [*NEW, "--overwrite"]),
    "a run gone on with": (True, RESUMED),
    "a text": (True, ["generate", "--checkpoint", RUN, "--tokens", "2", "--prompt", "a"]),
    "a picture": (True, ["simulate", "--checkpoint", RUN, "--file", "text", "--batch", "1", "--no-reference", "--out", "seen"]),
}
"""What is asked, and whether it finds a run that is half done."""


class BrokenDisk:
    """Counts the file operations beneath a directory. `fail(path)` is called at the one of that number (none for 0), and at all after it
    where the fault is `lasting`."""

    def __init__(self, place, number=0, fail=None, *, lasting=False):
        self.place, self.number, self.fail, self.lasting, self.count = str(place), number, fail, lasting, 0

    def __enter__(self):
        watched = {(os, name): self._by_path(getattr(os, name)) for name in BY_NAME}
        watched |= {(module, "open"): self._open for module in (io, builtins)} | {(os, "fsync"): self._of_handle(os.fsync)}
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
        if self.number and (self.count == self.number or (self.lasting and self.count > self.number)):
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

    def _open(self, path, mode="r", buffering=-1, encoding=None, errors=None, newline=None, **kwargs):
        """As the built-in one, every reading and writing of the file an operation."""
        if not self._mine(path):
            return OPEN(path, mode, buffering, encoding, errors, newline, **kwargs)
        self.operation(os.fspath(path))
        raw = File(self, path, mode.replace("b", "").replace("t", ""), **kwargs)
        kind = io.BufferedRandom if "+" in mode else io.BufferedReader if "r" in mode else io.BufferedWriter
        return kind(raw) if "b" in mode else io.TextIOWrapper(kind(raw), io.text_encoding(encoding), errors, newline)


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


@mock.patch.object(Figure, "savefig")  # most of the time, and nothing on the disk
def faulty(place, share, random):
    """How many operations there are and how often one was failed, and what was found wrong, in words. `place` is the working directory."""
    (place / "text").write_bytes(TEXT)
    half = _half_done(place)
    operations, failed, faults, expected, met = 0, 0, [], None, set()
    for what, (begun, args) in REQUESTS.items():
        with _fresh(place, half if begun else None):
            with BrokenDisk(place) as disk:
                right = ask(args)
            assert right.code == 0, right.said
            if args[0] == "train":
                ends = bits(place / RUN)
                expected = expected or ends
                assert ends == expected, "however often a run is disturbed, it ends in the same bits"
        operations += disk.count
        for number in sorted(random.sample(range(1, disk.count + 1), max(1, round(disk.count * share)))):
            error, lasting = random.choice(ERRORS), random.random() < 0.5
            which = f"{what}, {os.strerror(error)} at operation {number}{' and all after it' * lasting}"
            with _fresh(place, half if begun else None):
                with BrokenDisk(place, number, raising(error), lasting=lasting):
                    answer = ask(args)
                failed += 1
                faults += [f"{which}: {fault}" for fault in _wrong(place, args, answer, right, expected, met)]
    return operations, failed, faults


def _wrong(place, args, answer, right, expected, met):
    """What is wrong after a request on a broken disk: with its answer, or with the run that is left and gone on with.

    `met` are the remains that were gone on with before."""
    if answer.faults:
        yield answer.said
    if args[0] != "train":
        if answer.code == 0 and args[0] == "generate" and answer.out != right.out:
            yield f"another answer than without: {answer.out!r}"
        return
    store = RunDirectory(place / RUN)
    if answer.code == 0 and bits(store.directory) != expected:
        yield "it ended well, in other bits"
    if store.exists and damage(store.last) is not None:
        yield f"what is left is no run: {damage(store.last)}"
        return
    left = _remains(store.directory)
    if left not in met:
        met.add(left)
        again = ask(RESUMED if store.exists else NEW)
        if again.code != 0:
            yield f"it could not be gone on with: {again.said}"
        elif bits(store.directory) != expected:
            yield "gone on with, it ended in other bits"


def _remains(directory):
    """The names and links of a run, and how many lines its log has: whole checkpoints of the same names hold the same."""
    names = sorted((str(path), path.is_symlink() and os.readlink(path)) for path in directory.rglob("*"))
    log = directory / "log.jsonl"
    return *names, log.read_bytes().count(b"\n") if log.exists() else 0


def _half_done(place):
    """A run with two checkpoints, whose disk failed then."""
    with _fresh(place, None), BrokenDisk(place) as disk:
        ask(NEW)
    with BrokenDisk(place, disk.count * 2 // 3, raising(errno.EIO), lasting=True):
        assert ask(NEW).code == 2
    steps = RunDirectory(place / RUN).steps()
    assert len(steps) > 1, steps
    assert steps[-1] < SETTINGS["iterations"], steps
    return shutil.move(place / RUN, place / "half")


@contextlib.contextmanager
def _fresh(place, run):
    """The directory with that run in it, if any, and afterwards without anything that was made."""
    if run is not None:
        shutil.copytree(run, place / RUN, symlinks=True)
    try:
        yield
    finally:
        for name in (RUN, "seen"):
            shutil.rmtree(place / name, ignore_errors=True)
