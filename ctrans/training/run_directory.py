"""A run's directory: checkpoints that are whole or not there, and the links `last` and `best` to two of them.

    checkpoints/step-00000100/   config.json, model.safetensors, optimiser.safetensors, train.json, SHA256SUMS
    last, best                   links into checkpoints/
    log.jsonl                    one JSON object per iteration
    .lock                        locked by the process that trains here

A checkpoint is written under another name, flushed to the disk, and renamed; then the links are replaced. A process killed at
any moment leaves a `last` that can be read. `sha256sum -c SHA256SUMS` checks a checkpoint by hand.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import hashlib
import os
import shlex
import shutil
import tempfile
from collections.abc import Callable, Iterator, Set
from pathlib import Path

import safetensors

from solvers import ConfigError

CHECKPOINTS, LAST, BEST, SUMS, LOCK = "checkpoints", "last", "best", "SHA256SUMS", ".lock"
STEP = "step-" + 8 * "[0-9]"
"""What the checkpoints' directories are called; what a user keeps beside them is left alone."""
NAME = 64 + len("  ")
"""Where the name begins in a line of sums."""
KEPT = 2
"""How many of the newest checkpoints stay, besides the best: a damaged one leaves another to go on from."""


@dataclasses.dataclass(frozen=True)
class RunDirectory:
    """The directory of one run."""

    directory: Path

    @property
    def exists(self) -> bool:
        """Whether anything of a run is here: a checkpoint, or a `last` of any form, since others may still be good."""
        return bool(self.steps()) or os.path.lexists(self.directory / LAST)

    @property
    def last(self) -> Path:
        """The link `last`, or the first checkpoint of a run that was killed between making that and the link."""
        link = self.directory / LAST
        return self.step_directory(0) if self.steps() == [0] and not os.path.lexists(link) else link

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Inside, no other process can train in this directory, which is made; the lock ends with the process, however that ends.

        Raises ConfigError where another process has it, and where the directory cannot be written to.
        """
        with self.changing():
            self.directory.mkdir(parents=True, exist_ok=True)
            file = (self.directory / LOCK).open("a")
        with file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ConfigError(
                    f"another process is training in {str(self.directory)!r}: wait for its end, or choose another --out"
                ) from None
            except OSError:
                pass  # a file system without locks: nothing to be known
            yield  # the file stays, or one who waits for it and one who makes it anew would both have a lock

    def step_directory(self, step: int) -> Path:
        """Where the checkpoint of that iteration lies."""
        return self.directory / CHECKPOINTS / f"step-{step:08d}"

    def steps(self) -> list[int]:
        """The iterations with a checkpoint, ascending."""
        return sorted(int(path.name.removeprefix("step-")) for path in (self.directory / CHECKPOINTS).glob(STEP))

    def temporary(self, step: int) -> Path:
        """Where that checkpoint is written before it is renamed."""
        return self.directory / CHECKPOINTS / f".step-{step:08d}"

    def save(self, step: int, write: Callable[[Path], None], *, best: int | None, good: int) -> None:
        """Makes a checkpoint of what `write(directory)` puts into a fresh directory, and the link `best` lead to step `best`.
        The newest one up to step `good` stays.

        Raises ConfigError where it cannot be written, as on a full disk; the checkpoints before it are then untouched.
        """
        with self.unharmed(step):
            temporary = self.prepare(step)
            write(temporary)
            self.commit(step, best=best, good=good)

    def prepare(self, step: int) -> Path:
        """A fresh directory to write that checkpoint into."""
        temporary = self.temporary(step)
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        return temporary

    def commit(self, step: int, *, best: int | None, good: int) -> None:
        """Hashes, flushes and renames what was written for that step; replaces the links; removes what nothing needs any more."""
        temporary, final = self.temporary(step), self.step_directory(step)
        (temporary / SUMS).write_bytes(sums(temporary))
        for path in (*temporary.rglob("*"), temporary):
            if path.is_file():
                path.chmod(0o644)
            _flush(path)
        os.rename(temporary, final)
        _flush(final.parent)
        self.settle(step, best=best, good=good)

    def settle(self, last: int, *, best: int | None, good: int) -> None:
        """Makes the links lead to these two (`best` to `last` where there is none), and removes the checkpoints that nothing
        needs any more.
        """
        self._link(LAST, last)
        self._link(BEST, best if best in self.steps() else last)
        self.prune(last, {best, self.newest(good)})

    def newest(self, step: int) -> int | None:
        """The newest checkpoint up to that step."""
        return max((made for made in self.steps() if made <= step), default=None)

    def go_back(self, good: int) -> None:
        """Makes `last` lead to the newest checkpoint up to step `good`, where there is one. Raises ConfigError where it cannot."""
        newest = self.newest(good)
        if newest is not None:
            with self.changing():
                self._link(LAST, newest)

    def prune(self, last: int, needed: Set[int | None]) -> None:
        """Removes checkpoints after `last` and all but the newest before it, save those needed; and what was never finished."""
        for unfinished in (self.directory / CHECKPOINTS).glob(f".{STEP}"):
            shutil.rmtree(unfinished)
        kept = {*[step for step in self.steps() if step <= last][-KEPT:], *needed}
        for step in self.steps():
            if step not in kept:  # renamed first, so that what has a checkpoint's name is whole
                os.rename(self.step_directory(step), self.temporary(step))
                shutil.rmtree(self.temporary(step))

    def clear(self) -> None:
        """Removes links and checkpoints. ConfigError, with nothing removed, where a link's name is taken by what no run made."""
        copies = self._copies()
        for path in copies:
            if not (path / SUMS).is_file():
                raise ConfigError(f"{str(path)!r} was not made by a run: move it away, or choose another --out")
        for path in copies:
            shutil.rmtree(path)
        for name in (LAST, BEST):
            (self.directory / name).unlink(missing_ok=True)
        self.prune(-1, set())

    def check_writable(self) -> None:
        """Raises ConfigError, before any work is done, unless files can be made in the directory, which is made."""
        with self.changing():
            self.directory.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self.directory):
                pass

    @contextlib.contextmanager
    def changing(self) -> Iterator[None]:
        """Turns a failure to change the directory into one sentence."""
        try:
            yield
        except OSError as error:
            raise ConfigError(
                f"cannot write to directory {str(self.directory)!r}: {error.strerror or error}; "
                f"{self._what_is_left() + '; ' if self.exists else ''}free some space, or choose another place"
            ) from None

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
        if not self.exists:
            raise ConfigError(
                f"there is no run in {str(self.directory)!r} to resume: give the --out of one, or leave out --resume"
            )
        copies = self._copies()
        fault = f"{str(copies[0])!r} is no link, as after a copy that follows links" if copies else damage(self.last)
        if fault is None:
            return self.last
        good = next((step for step in reversed(self.steps()) if damage(self.step_directory(step)) is None), None)
        if good is None:
            raise ConfigError(f"{fault}; no other checkpoint of this run is whole: start again with --overwrite")
        aside = "".join(f"mv {shlex.quote(str(path))} {shlex.quote(f'{path}.copy')} && " for path in copies)
        link = f"ln -sfn {CHECKPOINTS}/{self.step_directory(good).name} {shlex.quote(str(self.directory / LAST))}"
        raise ConfigError(f"{fault}; to go on from step {good}: {aside}{link}")

    def _copies(self) -> list[Path]:
        """What has a link's name and is none."""
        paths = [self.directory / name for name in (LAST, BEST)]
        return [path for path in paths if path.exists() and not path.is_symlink()]

    def _link(self, name: str, step: int) -> None:
        temporary = self.directory / f".{name}"
        temporary.unlink(missing_ok=True)
        temporary.symlink_to(Path(CHECKPOINTS) / self.step_directory(step).name)
        try:
            os.replace(temporary, self.directory / name)
        finally:
            temporary.unlink(missing_ok=True)
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
