"""A run's directory: checkpoints that are whole or not there, and the links `last` and `best` to
two of them.

    checkpoints/step-00000100/   config.json, model.safetensors, optimiser.safetensors, train.json, SHA256SUMS
    checkpoints/base/            of a run of low-rank updates: what they update; step-00000100 has adapter.safetensors for the model's
    last, best                   links into checkpoints/
    log.jsonl                    one JSON object per iteration
    .lock                        locked by the process that trains here

A checkpoint is written under another name, flushed to the disk, and renamed; then the links are
replaced. A process killed at any moment leaves a `last` that can be read. A run that overwrites
another writes into checkpoints-2 (or back again), and the link `last` is what makes it the run:
until then the one before is whole, and after it is removed. `sha256sum -c SHA256SUMS` checks a
checkpoint by hand.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import os
import shlex
import shutil
import tempfile
from collections.abc import Callable, Iterator, Set
from pathlib import Path

import safetensors

from ctrans.model.checkpoint import BASE, BEST, LAST, remove_base
from ctrans.model.sums import SUMS, damage, sums
from solvers import ConfigError

LOCK = ".lock"
GENERATIONS = ("checkpoints", "checkpoints-2")
"""Where checkpoints are: a run that overwrites another has its own in the other one, until the
first of them is whole.
"""
STEP = "step-" + 8 * "[0-9]"
"""What the checkpoints' directories are called; what a user keeps beside them is left alone."""
KEEP = "alarm.json"
"""The newest checkpoint with such a file beside it stays: it was made before a danger that a
watcher told of.
"""
KEPT = 2
"""How many of the newest checkpoints stay, besides the best: a damaged one leaves another to go on
from.
"""


@dataclasses.dataclass(frozen=True)
class RunDirectory:
    """The directory of one run, whose checkpoints are in `generation`, by default where `last`
    leads.
    """

    directory: Path
    generation: str | None = None

    @property
    def exists(self) -> bool:
        """Whether anything of a run is here: a checkpoint, or a `last` of any form, since others
        may still be good.
        """
        return bool(self.steps()) or (self.generation is None and os.path.lexists(self.directory / LAST))

    @property
    def checkpoints(self) -> Path:
        """Where the checkpoints are."""
        return self.directory / (self.generation or self._current())

    def _current(self) -> str:
        """Of the two, the one that `last` leads to, or else the one with checkpoints."""
        for link in (LAST, BEST):
            with contextlib.suppress(OSError):
                name = Path(os.readlink(self.directory / link)).parent.name
                if name in GENERATIONS:
                    return name
        return next((name for name in GENERATIONS if any((self.directory / name).glob(STEP))), GENERATIONS[0])

    def beside(self) -> RunDirectory:
        """A new run's directory in the same place: the run that is here stays until the new one has
        a whole checkpoint.

        Raises ConfigError where a link's name is taken by what no run made.
        """
        for path in self._copies():
            if not (path / SUMS).is_file():
                raise ConfigError(f"{str(path)!r} was not made by a run: move it away, or choose another --out")
        current = self.checkpoints.name if self.exists else None
        return RunDirectory(self.directory, next(name for name in GENERATIONS if name != current))

    @property
    def last(self) -> Path:
        """The link `last`, or the first checkpoint of a run that was killed between making that and
        the link.
        """
        link = self.directory / LAST
        return self.step_directory(0) if self.steps() == [0] and not os.path.lexists(link) else link

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Inside, no other process can train in this directory, which is made; the lock ends with
        the process, however that ends.

        Raises ConfigError where another process has it, and where the directory cannot be written
        to.
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
        return self.checkpoints / f"step-{step:08d}"

    def steps(self) -> list[int]:
        """The iterations with a checkpoint, ascending."""
        return sorted(int(path.name.removeprefix("step-")) for path in self.checkpoints.glob(STEP))

    def temporary(self, step: int) -> Path:
        """Where that checkpoint is written before it is renamed."""
        return self.checkpoints / f".step-{step:08d}"

    @contextlib.contextmanager
    def saving(
        self, step: int, *, best: int | None, good: int, first: bool = True, wait: Callable[[], None] = lambda: None
    ) -> Iterator[Path]:
        """Inside, a fresh directory is there to write a checkpoint into. After that it is the
        checkpoint of that step, `best` leads to step `best`, and the newest checkpoint up to step
        `good` stays.

        Of several processes that write, the `first` makes and commits it, and they `wait` for each
        other. Raises ConfigError where it cannot be written, as on a full disk; the checkpoints
        before it are then untouched.
        """
        temporary = self.temporary(step)
        with self.unharmed(step):
            if first:
                shutil.rmtree(temporary, ignore_errors=True)
                temporary.mkdir(parents=True)
            wait()
            yield temporary
            if first:
                self.commit(step, best=best, good=good)
        wait()

    def commit(self, step: int, *, best: int | None, good: int) -> None:
        """Hashes, flushes and renames what was written for that step; replaces the links; removes
        what nothing needs any more.
        """
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
        """Makes the links lead to these two (`best` to `last` where there is none), and removes the
        checkpoints that nothing needs any more.
        """
        copies = self._copies()
        for path in copies:  # as after a copy that follows links: the run that is overwritten
            os.rename(path, path.with_name(f".{path.name}.copy"))
        steps = self.steps()  # those of the run whose checkpoint is whole now, wherever `last` leads
        self._link(LAST, last)
        self._link(BEST, best if best in steps else last)
        self.prune(last, {best, self.newest(good)})
        self.forget_others()
        for path in copies:
            shutil.rmtree(path.with_name(f".{path.name}.copy"))

    def newest(self, step: int) -> int | None:
        """The newest checkpoint up to that step."""
        return max((made for made in self.steps() if made <= step), default=None)

    def go_back(self, good: int) -> None:
        """Makes `last` lead to the newest checkpoint up to step `good`, where there is one. Raises
        ConfigError where it cannot.
        """
        newest = self.newest(good)
        if newest is not None:
            with self.changing():
                self._link(LAST, newest)

    def prune(self, last: int, needed: Set[int | None]) -> None:
        """Removes checkpoints after `last` and all but the newest before it, save those needed; and
        what was never finished.
        """
        for unfinished in self.checkpoints.glob(f".{STEP}"):
            shutil.rmtree(unfinished)
        warned = [step for step in self.steps() if (self.step_directory(step) / KEEP).exists()]
        kept = {*[step for step in self.steps() if step <= last][-KEPT:], *warned[-1:], *needed}
        for step in self.steps():
            if step not in kept:  # renamed first, so that what has a checkpoint's name is whole
                os.rename(self.step_directory(step), self.temporary(step))
                shutil.rmtree(self.temporary(step))

    def forget_others(self) -> None:
        """Removes the checkpoints of a run that this one has overwritten, or that has overwritten
        this one and has no checkpoint.
        """
        for name in GENERATIONS:
            if name != self.checkpoints.name:
                other = RunDirectory(self.directory, name)
                other.prune(-1, set())
                other.forget_base()
                with contextlib.suppress(OSError):  # not there, or with something in it that no run made
                    (self.directory / name).rmdir()

    def forget_base(self) -> None:
        """Removes the weights that a run's updates were of; a directory of that name that no run
        made stays.
        """
        remove_base(self.checkpoints / BASE)

    def check_writable(self) -> None:
        """Raises ConfigError, before any work is done, unless files can be made in the directory,
        which is made.
        """
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
        """Turns a failure to write the checkpoint of that step into one sentence, and removes what
        there is of it.
        """
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
        """The directory that `last` leads to. ConfigError naming what is damaged in it, and another
        checkpoint that is not.
        """
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
        link = f"ln -sfn {self.step_directory(good).relative_to(self.directory)} {shlex.quote(str(self.directory / LAST))}"
        raise ConfigError(f"{fault}; to go on from step {good}: {aside}{link}")

    def _copies(self) -> list[Path]:
        """The complaint about a path that exists and is no link."""
        paths = [self.directory / name for name in (LAST, BEST)]
        return [path for path in paths if path.exists() and not path.is_symlink()]

    def _link(self, name: str, step: int) -> None:
        temporary = self.directory / f".{name}"
        temporary.unlink(missing_ok=True)
        temporary.symlink_to(self.step_directory(step).relative_to(self.directory))
        try:
            os.replace(temporary, self.directory / name)
        finally:
            temporary.unlink(missing_ok=True)
        _flush(self.directory)


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
