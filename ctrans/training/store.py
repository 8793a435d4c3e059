"""A run's directory: checkpoints that are whole or not there, and the links `last` and `best` to two of them.

    checkpoints/step-00000100/   config.json, model.safetensors, optimiser.safetensors, train.json, SHA256SUMS
    last, best                   links into checkpoints/
    log.jsonl                    one JSON object per iteration

A checkpoint is written under another name, flushed to the disk, and renamed; then the links are replaced. A process killed at
any moment leaves a `last` that can be read. `sha256sum -c SHA256SUMS` checks a checkpoint by hand.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import safetensors

from solvers import ConfigError

CHECKPOINTS, LAST, BEST, SUMS = "checkpoints", "last", "best", "SHA256SUMS"
STEP = "step-" + 8 * "[0-9]"
"""What the checkpoints' directories are called; what a user keeps beside them is left alone."""
NAME = 64 + len("  ")
"""Where the name begins in a line of sums."""
KEPT = 2
"""How many of the newest checkpoints stay, besides the best: a damaged one leaves another to go on from."""


@dataclasses.dataclass(frozen=True)
class Store:
    """The directory of one run."""

    directory: Path

    @property
    def exists(self) -> bool:
        """Whether a checkpoint was ever finished here; a link that leads nowhere counts, since others may still be good."""
        return (self.directory / LAST).is_symlink()

    def step_directory(self, step: int) -> Path:
        """Where the checkpoint of that iteration lies."""
        return self.directory / CHECKPOINTS / f"step-{step:08d}"

    def steps(self) -> list[int]:
        """The iterations with a checkpoint, ascending."""
        return sorted(int(path.name.removeprefix("step-")) for path in (self.directory / CHECKPOINTS).glob(STEP))

    def temporary(self, step: int) -> Path:
        """Where that checkpoint is written before it is renamed."""
        return self.directory / CHECKPOINTS / f".step-{step:08d}"

    def save(self, step: int, best: int | None, write: Callable[[Path], None]) -> None:
        """Makes a checkpoint of what `write(directory)` puts into a fresh directory, and the link `best` lead to step `best`.

        Raises ConfigError where it cannot be written, as on a full disk; the checkpoints before it are then untouched.
        """
        with self.unharmed(step):
            temporary = self.prepare(step)
            write(temporary)
            self.commit(step, best)

    def prepare(self, step: int) -> Path:
        """A fresh directory to write that checkpoint into."""
        temporary = self.temporary(step)
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        return temporary

    def commit(self, step: int, best: int | None) -> None:
        """Hashes, flushes and renames what was written for that step; replaces the links; removes what nothing needs any more."""
        temporary, final = self.temporary(step), self.step_directory(step)
        (temporary / SUMS).write_bytes(sums(temporary))
        for path in (*temporary.rglob("*"), temporary):
            if path.is_file():
                path.chmod(0o644)
            _flush(path)
        os.rename(temporary, final)
        _flush(final.parent)
        self.settle(step, best)

    def settle(self, last: int, best: int | None) -> None:
        """Makes the links lead to these two, and removes the checkpoints that nothing needs any more."""
        self._link(LAST, last)
        if best is not None:
            self._link(BEST, best)
        self.prune(last, best)

    def prune(self, last: int, best: int | None) -> None:
        """Removes checkpoints after `last` and all but the newest before it, save the best; and what was never finished."""
        for unfinished in (self.directory / CHECKPOINTS).glob(f".{STEP}"):
            shutil.rmtree(unfinished)
        kept = {*[step for step in self.steps() if step <= last][-KEPT:], best}
        for step in self.steps():
            if step not in kept:  # renamed first, so that what has a checkpoint's name is whole
                os.rename(self.step_directory(step), self.temporary(step))
                shutil.rmtree(self.temporary(step))

    def clear(self) -> None:
        """Makes the directory, and removes links and checkpoints that are in it."""
        for name in (LAST, BEST):
            (self.directory / name).unlink(missing_ok=True)
        (self.directory / CHECKPOINTS).mkdir(parents=True, exist_ok=True)
        self.prune(-1, None)

    @contextlib.contextmanager
    def unharmed(self, step: int) -> Iterator[None]:
        """Turns a failure to write the checkpoint of that step into one sentence, and removes what there is of it."""
        try:
            yield
        except (OSError, safetensors.SafetensorError, ConfigError) as error:
            shutil.rmtree(self.temporary(step), ignore_errors=True)
            reason = (error.strerror if isinstance(error, OSError) else None) or error
            raise ConfigError(
                f"cannot save step {step} in {str(self.directory)!r}: {reason}; {self._what_is_left()}; "
                "free some space, then go on with --resume"
            ) from None

    def _what_is_left(self) -> str:
        steps = self.steps()
        return f"the checkpoint of step {steps[-1]} is intact" if steps else "there is no earlier checkpoint"

    def verified_last(self) -> Path:
        """The directory that `last` leads to. ConfigError naming what is damaged in it, and another checkpoint that is not."""
        last = self.directory / LAST
        fault = damage(last)
        if fault is None:
            return last
        good = [step for step in reversed(self.steps()) if damage(self.step_directory(step)) is None]
        advice = (
            f"to go on from step {good[0]}: ln -sfn {CHECKPOINTS}/{self.step_directory(good[0]).name} {last}"
            if good
            else "no other checkpoint of this run is whole: start again with --overwrite"
        )
        raise ConfigError(f"{fault}; {advice}")

    def _link(self, name: str, step: int) -> None:
        temporary = self.directory / f".{name}"
        temporary.unlink(missing_ok=True)
        temporary.symlink_to(Path(CHECKPOINTS) / self.step_directory(step).name)
        os.replace(temporary, self.directory / name)
        _flush(self.directory)


def damage(checkpoint: Path) -> str | None:
    """What is wrong with the files of a checkpoint, in words, or None where all are there and each has its recorded hash."""
    try:
        recorded, actual = (checkpoint / SUMS).read_bytes(), sums(checkpoint)
    except OSError as error:
        return f"cannot read {error.filename!r}: {error.strerror}"
    if recorded == actual:
        return None
    lines = recorded.splitlines()
    wrong = [line[NAME:].decode() for line in actual.splitlines() if line not in lines]
    if wrong:
        return f"{str(checkpoint / wrong[0])!r} is damaged: its SHA-256 is not the one in {SUMS}"
    return f"{str(checkpoint / SUMS)!r} is damaged, or a file that it lists is missing"


def sums(checkpoint: Path) -> bytes:
    """The SHA-256 of every file, as `sha256sum` writes them."""
    files = [path for path in sorted(checkpoint.rglob("*")) if path.is_file() and path.name != SUMS]
    return "".join(f"{_digest(path)}  {path.relative_to(checkpoint)}\n" for path in files).encode()


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
