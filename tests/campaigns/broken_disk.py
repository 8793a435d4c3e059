"""A disk that fails: an error of reading or writing, or no space, at one file operation of a
command, once or from there on.

The command then says so in a line, or does all that it would have done; and a run goes on to the
bits of one that nobody disturbed.
"""

import contextlib
import errno
import os
import shutil
from unittest import mock

from matplotlib.figure import Figure

from ctrans.model.sums import damage
from ctrans.training.run_directory import RunDirectory
from tests.campaigns.damaged import MODEL, SETTINGS, TEXT
from tests.campaigns.disk import BrokenDisk, raising
from tests.campaigns.harness import ask
from tests.campaigns.kills import bits, remains

ERRORS = (errno.EIO, errno.ENOSPC)
RUN = "run"
OPTIONS = [
    word
    for name, value in {**MODEL, **SETTINGS}.items()
    for word in (f"--{name.replace('_', '-')}", str(value))
]
NEW = ["train", *OPTIONS, "--file", "text", "--out", RUN]
RESUMED = ["train", "--resume", "--out", RUN]
REQUESTS = {
    "a new run": (False, NEW),
    "a run that overwrites another": (True, [*NEW, "--overwrite"]),
    "a run gone on with": (True, RESUMED),
    "a text": (True, ["generate", "--checkpoint", RUN, "--tokens", "2", "--prompt", "a"]),
    "a picture": (
        True,
        [
            "simulate",
            "--checkpoint",
            RUN,
            "--file",
            "text",
            "--batch",
            "1",
            "--no-reference",
            "--out",
            "seen",
        ],
    ),
}
"""What is asked, and whether it finds a run that is half done."""


@mock.patch.object(Figure, "savefig", new=mock.Mock())  # most of the time, and nothing on the disk
def faulty(place, part):
    """How often an operation was failed, and what was found wrong, in words. `place` is the working
    directory.
    """
    (place / "text").write_bytes(TEXT)
    half = _half_done(place)
    random, failed, faults, expected, met = part.random, 0, [], None, set()
    for what, (begun, args) in REQUESTS.items():
        with _fresh(place, half if begun else None):
            with BrokenDisk(place) as disk:
                right = ask(args)
            assert right.code == 0, right.said
            if args[0] == "train":
                ends = bits(place / RUN)
                expected = expected or ends
                assert ends == expected, (
                    "however often a run is disturbed, it ends in the same bits"
                )
        for number in sorted(part.among(range(1, disk.count + 1))):
            error, lasting = random.choice(ERRORS), random.random() < 0.5
            which = (
                f"{what}, {os.strerror(error)} at operation {number}{' and all after it' * lasting}"
            )
            with _fresh(place, half if begun else None):
                with BrokenDisk(place, number, raising(error), lasting=lasting):
                    answer = ask(args)
                failed += 1
                faults += [
                    f"{which}: {fault}"
                    for fault in _wrong(place, args, answer, right, expected, met)
                ]
    return failed, faults


def _wrong(place, args, answer, right, expected, met):
    """What is wrong after a request on a broken disk: with its answer, or with the run that is left
    and gone on with.

    `met` are the remains that were gone on with before.
    """
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
    left = remains(store.directory)
    if left not in met:
        met.add(left)
        again = ask(RESUMED if store.exists else NEW)
        if again.code != 0:
            yield f"it could not be gone on with: {again.said}"
        elif bits(store.directory) != expected:
            yield "gone on with, it ended in other bits"


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
