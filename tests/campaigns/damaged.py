"""Damaged checkpoints of training runs: a flipped bit, files of another run, links that lead
elsewhere. Every reader refuses each.
"""

import itertools
import os
import shutil

from ctrans.cli.generate import trained_with
from ctrans.model.checkpoint import find_model, load
from ctrans.model.config import GPTConfig
from ctrans.training.run_directory import RunDirectory
from ctrans.training.settings import TrainConfig
from ctrans.training.train import plan_to_resume, train
from solvers import ConfigError

TEXT = bytes(range(32, 127)) * 30
MODEL = {"width": 8, "heads": 2, "depth": 1, "context": 8, "dt": 0.5}
SETTINGS = {
    "batch": 2,
    "iterations": 6,
    "eval_every": 2,
    "save_every": 2,
    "eval_windows": 2,
    "warmup": 1,
}


def make_run(place, **changes):
    """A short run; the changes are settings of the training."""
    (place.parent / "text").write_bytes(TEXT)
    train(
        GPTConfig(**MODEL), TrainConfig(**{**SETTINGS, **changes}), place.parent / "text", out=place
    )
    return RunDirectory(place)


def as_generate(directory):
    place = find_model(directory)
    load(place)
    trained_with(place)


def as_resume(directory):
    plan_to_resume(directory, {})


READERS = {"load": load, "generate": as_generate}


def accepted_by(directory, readers=READERS):
    """Who reads that directory without a word; what is no ConfigError comes through."""
    return [name for name, read in readers.items() if not _refused(read, directory)]


def _refused(read, directory):
    try:
        read(directory)
    except ConfigError:
        return True
    return False


def flips(store, count, random):
    """So many flipped bits, one at a time: what reads the checkpoint with it, and where it is."""
    place = store.last.resolve()
    files = sorted(path for path in place.rglob("*") if path.is_file())
    for _ in range(count):
        path = random.choice(files)
        whole = path.read_bytes()
        bit = random.randrange(8 * len(whole))
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        try:
            yield (
                f"{path.name}, bit {bit}",
                [
                    *accepted_by(place),
                    *accepted_by(store.directory, {"resume": as_resume}),
                ],
            )
        finally:
            path.write_bytes(whole)


def exchanges(first, second):
    """Every proper part of a checkpoint's files replaced by those of another run's: what reads
    it.
    """
    one, other = first.last.resolve(), second.last.resolve()
    names = sorted(path.name for path in one.iterdir())
    differ = [name for name in names if (one / name).read_bytes() != (other / name).read_bytes()]
    for size in range(1, len(differ)):
        for chosen in itertools.combinations(differ, size):
            whole = {name: (one / name).read_bytes() for name in chosen}
            for name in chosen:
                shutil.copyfile(other / name, one / name)
            try:
                yield (
                    ", ".join(chosen),
                    [
                        *accepted_by(one),
                        *accepted_by(first.directory, {"resume": as_resume}),
                    ],
                )
            finally:
                for name, content in whole.items():
                    (one / name).write_bytes(content)


def links(store):
    """A `best` that is missing, leads nowhere, or is a loop: what reads the run's directory."""
    best = store.directory / "best"
    whole = os.readlink(best)
    for target in (None, "checkpoints/step-99999999", "best", "nowhere", "last/../../nowhere"):
        best.unlink()
        if target is not None:
            best.symlink_to(target)
        try:
            yield f"best -> {target}", accepted_by(store.directory)
        finally:
            best.unlink(missing_ok=True)
            best.symlink_to(whole)
