"""Runs that are killed, at random moments or at a file operation, and taken up again: they end in
the bits of one that nobody disturbs.

Each run is a copy of this process, so that a kill costs no import; this process itself never
differentiates, as its copies do.
"""

import os
import shutil
import signal
import time
import warnings
from functools import partial

import safetensors.torch
import torch._dynamo

from ctrans.model.config import GPTConfig
from ctrans.model.sums import damage
from ctrans.training import log
from ctrans.training.run_directory import RunDirectory
from ctrans.training.settings import TrainConfig
from ctrans.training.train import resume, train
from solvers import ConfigError
from tests.campaigns.damaged import MODEL, SETTINGS, TEXT
from tests.campaigns.disk import OPEN, BrokenDisk

ATTEMPTS = 60
"""After so many kills in a row a run is left to end, so that a campaign does."""

assert torch._dynamo, "what a first step imports for seconds is here before any copy is made"


def in_a_copy(act, kill_after=None):
    """The exit code of a copy of this process that runs it, None where it was killed before it
    ended; and the seconds.
    """
    started = time.monotonic()
    with warnings.catch_warnings(action="ignore"):
        process = os.fork()
    if process == 0:
        try:
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, 1), os.dup2(null, 2)
            act()
            os._exit(0)
        except ConfigError:
            os._exit(2)
        finally:
            os._exit(3)
    ended, status = 0, 0
    while kill_after is not None and not ended and time.monotonic() - started < kill_after:
        time.sleep(min(0.002, kill_after))
        ended, status = os.waitpid(process, os.WNOHANG)
    if not ended:
        if kill_after is not None:
            os.kill(process, signal.SIGKILL)
        _, status = os.waitpid(process, 0)
    return None if os.WIFSIGNALED(status) else os.WEXITSTATUS(status), time.monotonic() - started


def beginning(place, seed, *, overwrite=False):
    """What begins the run of that seed."""
    text = place.parent / "text"
    text.write_bytes(TEXT)
    return lambda: train(
        GPTConfig(**MODEL), TrainConfig(**SETTINGS, seed=seed), text, out=place, overwrite=overwrite
    )


def bits(place):
    """All that the last checkpoint says, bit for bit: tensors as bytes, since the order in a file's
    header is drawn by its writer. And what the log says of each iteration, but for its time.
    """
    last = RunDirectory(place).last.resolve()
    tensors = {path.name: safetensors.torch.load_file(path) for path in last.glob("*.safetensors")}
    found = {
        (file, name): value.numpy().tobytes()
        for file, held in tensors.items()
        for name, value in held.items()
    }
    rows = [(row["step"], row.get("loss"), row.get("validation_loss")) for row in log.read(place)]
    return found | {path.name: path.read_bytes() for path in last.glob("*.json")} | {log.LOG: rows}


def killed_and_resumed(place, expected, count, random, seconds):
    """Kills of runs, until there are so many: how many there were, and what was found wrong, in
    words.
    """
    kills, faults, number = 0, [], 0
    while kills < count:
        number += 1
        run = place / f"run-{number}"
        begin = beginning(run, 0)
        code, attempts = None, 0
        while code is None and attempts < ATTEMPTS:
            code, _ = in_a_copy(begin, random.uniform(0, seconds))
            attempts += 1
            kills += code is None
            store = RunDirectory(run)
            if store.exists:
                if damage(store.last) is not None:
                    faults.append(f"run {number}, kill {attempts}: {damage(store.last)}")
                begin = partial(resume, run)
            if kills >= count:
                break
        if code not in (0, None):
            faults.append(f"run {number} ended with {code}")
        if code is None and in_a_copy(begin)[0] != 0:
            faults.append(f"run {number} could not be gone on with")
        if bits(run) != expected:
            faults.append(f"run {number} ended in other bits")
    return kills, number, faults


def killed_while_overwriting(place, old, new, count, random, seconds):
    """Runs that are to overwrite one that is done, killed: the one or the other is there, and
    whole.
    """
    kills, faults, number = 0, [], 0
    while kills < count:
        number += 1
        run = place / f"overwritten-{number}"
        in_a_copy(beginning(run, 1))
        code, _ = in_a_copy(beginning(run, 0, overwrite=True), random.uniform(0, seconds))
        kills += code is None
        store = RunDirectory(run)
        if not store.exists or damage(store.last) is not None:
            faults.append(f"overwriting {number}: {damage(store.last)}")
            continue
        if in_a_copy(partial(resume, run))[0] != 0:
            faults.append(f"overwriting {number} could not be gone on with")
        elif bits(run) not in (old, new):
            faults.append(f"overwriting {number} ended in other bits")
    return kills, number, faults


def remains(directory):
    """The names and links of a run, and how many lines its logs have: whole checkpoints of the same
    names hold the same.
    """
    names = sorted(
        (str(path), path.is_symlink() and os.readlink(path)) for path in directory.rglob("*")
    )
    logs = [directory / log.LOG, *sorted(directory.glob(f".*.{log.LOG}"))]
    return *names, *(path.read_bytes().count(b"\n") if path.exists() else 0 for path in logs)


def killed_at_operations(place, old, new, part):
    """Runs that begin, and that overwrite another, killed at those file operations that the part
    has: how many, and what was wrong.

    What is left is gone on with, unless the same was before.
    """
    run, kept, count, faults, met = place / "operations", place / "kept", 0, [], set()
    in_a_copy(beginning(kept, 1))
    for what, before in {"beginning": None, "overwriting": kept}.items():
        begin = beginning(run, 0, overwrite=before is not None)
        _placed(run, before)
        in_a_copy(partial(_told, run, begin))
        for number in sorted(part.among(range(1, int((place / "count").read_text()) + 1))):
            _placed(run, before)
            code, _ = in_a_copy(partial(_killed, run, begin, number))
            count += code is None
            store, left = RunDirectory(run), remains(run)
            if store.exists and damage(store.last) is not None:
                faults.append(f"{what}, killed at operation {number}: {damage(store.last)}")
            elif left not in met:
                met.add(left)
                again = partial(resume, run) if store.exists else beginning(run, 0)
                _placed(place / "left", run)
                if in_a_copy(again)[0] != 0 or bits(run) not in (
                    (new,) if before is None else (old, new)
                ):
                    faults.append(
                        f"{what}, killed at operation {number}: it could not be gone on with to the"
                        " same bits"
                    )
                _placed(
                    run, place / "left"
                )  # and a run that overwrites what is left is as one that finds nothing
                if before is not None and (
                    in_a_copy(beginning(run, 0, overwrite=True))[0] != 0 or bits(run) != new
                ):
                    faults.append(
                        f"{what}, killed at operation {number}: overwritten once more, it ended in"
                        " other bits"
                    )
    return count, faults


def _placed(run, before):
    shutil.rmtree(run, ignore_errors=True)
    if before is not None and before.exists():  # killed before it made anything
        shutil.copytree(before, run, symlinks=True)


def _told(run, begin):
    with BrokenDisk(run) as disk:
        begin()
    with OPEN(run.parent / "count", "w") as file:
        file.write(str(disk.count))


def _killed(run, begin, number):
    with BrokenDisk(run, number, lambda path: os.kill(os.getpid(), signal.SIGKILL)):
        begin()
