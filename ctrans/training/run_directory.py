"""The directory of a run: its checkpoints, and the links `last` and `best` to two of them.

    checkpoints/step-00000100/   config.json, model.safetensors, optimiser.safetensors, train.json,
                                 SHA256SUMS
    checkpoints/base/            weights under low-rank updates; step-00000100 then has
                                 adapter.safetensors for model.safetensors
    last, best                   links into checkpoints/
    log.jsonl                    one JSON object per iteration
    .lock                        locked by the process that trains here
    .overwriting                 there while checkpoints of an overwritten run are to be removed

A checkpoint is written under another name, flushed to the disk, and renamed; then the links are
replaced. A process killed at any time leaves a readable `last`. A run that overwrites another one
writes into checkpoints-2 (or from there into checkpoints), and sets the logs aside under the name
of their checkpoints. When its first checkpoint is whole, `last` points to it, and the old run and
its logs are removed. The empty file `.overwriting` tells them from a user's copy of the
checkpoints, which stays. `sha256sum -c SHA256SUMS` checks a checkpoint by hand.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import shlex
import tempfile
from collections.abc import Callable, Iterator, Set
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import safetensors

from ctrans.base.durable_files import flush, remedy
from ctrans.base.given_files import check_name
from ctrans.model.checkpoint import BASE, BEST, LAST, remove_base
from ctrans.model.sums import (
    GENERATIONS,
    STEP,
    SUMS,
    damage,
    has_a_file_too_many,
    sums,
)
from ctrans.training.directory_lock import DirectoryLock, locked
from ctrans.training.removal import free_name, is_checkpoint, make_room, remove_checkpoint
from solvers import ConfigError

LOGGER = logging.getLogger("ctrans.training")
LOCK = ".lock"
OVERWRITING = ".overwriting"
WAY_ON = "go on with --resume from the last checkpoint, with the place of the run as --out"
"""The advice for a run whose directory was moved away."""
PLACES = (LAST, BEST, LOCK, OVERWRITING, *GENERATIONS)
"""The names in the directory of a run, besides those of its logs."""
KEEP = "alarm.json"
"""The newest checkpoint with this file is kept: a watcher saved it before a danger."""
KEPT = 2
"""The number of newest checkpoints that are kept, with the best one: if one is damaged, another can
be used.
"""


@dataclasses.dataclass(frozen=True)
class RunDirectory:
    """The directory of one run. Its checkpoints are in `generation`, by default where `last`
    points. With a `lock` it writes only while the path leads to the directory that was locked.
    """

    directory: Path
    generation: str | None = None
    lock: DirectoryLock | None = None

    @property
    def exists(self) -> bool:
        """Whether there is a run: a checkpoint, or a `last`, even a broken one."""
        return bool(self.steps()) or (
            self.generation is None and os.path.lexists(self.directory / LAST)
        )

    @property
    def checkpoints(self) -> Path:
        """The directory of checkpoints."""
        return self.directory / (self.generation or self._current())

    def _current(self) -> str:
        """The generation that `last` points to, or else the one with checkpoints."""
        for link in (LAST, BEST):
            with suppress(OSError):
                name = Path(os.readlink(self.directory / link)).parent.name
                if name in GENERATIONS:
                    return name
        for name in GENERATIONS:
            if any((self.directory / name).glob(STEP)):
                return name
        return GENERATIONS[0]

    def beside(self) -> RunDirectory:
        """The directory of a new run in the same place. The old run stays until the new one has a
        whole checkpoint.

        Raises ConfigError if something else has the name of a link.
        """
        for path in self._copies():
            if not (path / SUMS).is_file():
                raise ConfigError(
                    f"{str(path)!r} was not made by a run: move it away, or choose another --out"
                )
        if not self.exists:
            return self._with(GENERATIONS[0])
        return self._other()

    def _with(self, generation: str) -> RunDirectory:
        """The same directory with the checkpoints of that generation."""
        return dataclasses.replace(self, generation=generation)

    @property
    def other_generation(self) -> str:
        """The name of the directory of checkpoints that this run does not use. The logs of a run
        that this one overwrites are set aside under it, also if that run has no checkpoint.
        """
        return next(name for name in GENERATIONS if name != self.checkpoints.name)

    @property
    def last(self) -> Path:
        """The link `last`, or the first checkpoint if the run was killed before it made the
        link.
        """
        link = self.directory / LAST
        if self.steps() == [0] and not os.path.lexists(link):
            return self.step_directory(0)
        return link

    @contextmanager
    def locked(self) -> Iterator[RunDirectory]:
        """Makes the directory, locks it against training by other processes, and gives it with its
        lock. The lock ends with the process.

        Raises ConfigError if another process has the lock, or the directory cannot be written to.
        """
        activity = f"is training in {str(self.directory)!r}"
        with ExitStack() as stack:
            with self.changing():
                self.directory.mkdir(parents=True, exist_ok=True)
                lock = stack.enter_context(locked(self.directory / LOCK, activity, WAY_ON))
            yield dataclasses.replace(self, lock=lock)

    def check_ours(self) -> None:
        """Raises ConfigError if the path leads no longer to the directory that was locked."""
        if self.lock is not None:
            self.lock.check_held()

    def step_directory(self, step: int) -> Path:
        """The directory of the checkpoint of that iteration."""
        return self.checkpoints / f"step-{step:08d}"

    def steps(self) -> list[int]:
        """The iterations with checkpoints, ascending. Directories of users with such names are
        none.
        """
        paths = {int(path.name.removeprefix("step-")): path for path in self.checkpoints.glob(STEP)}
        return sorted(step for step, path in paths.items() if is_checkpoint(path, step))

    def temporary(self, step: int) -> Path:
        """The directory in which that checkpoint is written, before its renaming."""
        return self.checkpoints / f".step-{step:08d}"

    @contextmanager
    def saving(
        self,
        step: int,
        *,
        best: int | None,
        good: int,
        first: bool = True,
        wait: Callable[[], None] | None = None,
    ) -> Iterator[Path]:
        """Makes a directory into which the caller writes a checkpoint, and then commits it. The
        link `best` points to step `best`, and the newest checkpoint up to step `good` is kept.

        Of several processes that write, the `first` one makes and commits it, and they `wait` for
        each other. Raises ConfigError if it cannot be written, as on a full disk; earlier
        checkpoints then stay as they were.
        """
        temporary = self.temporary(step)
        with self.unharmed(step):
            if first:
                self.check_ours()
                remove_checkpoint(temporary)
                make_room(temporary)
                # a directory that was locked is not made anew, if it has gone
                self.checkpoints.mkdir(parents=self.lock is None, exist_ok=True)
                temporary.mkdir()
            if wait is not None:
                wait()
            yield temporary
            if first:
                self.check_ours()
                (temporary / SUMS).write_bytes(sums(temporary))
                for path in (*temporary.rglob("*"), temporary):
                    if path.is_file():
                        path.chmod(0o644)
                    flush(path)
                make_room(self.step_directory(step))
                if not self.steps() and self._other().steps():
                    self._mark_overwriting()
                os.rename(temporary, self.step_directory(step))
                flush(self.checkpoints)
                self.settle(step, best=best, good=good)
        if wait is not None:
            wait()

    def settle(self, last: int, *, best: int | None, good: int) -> None:
        """Points the links to these steps (`best` to `last` if its step has no checkpoint), and
        removes old checkpoints.
        """
        self.check_ours()
        copies: list[Path] = []
        for path in self._copies():  # directories instead of links: a copy of the run followed them
            copies.append(Path(free_name(str(path.with_name(f".{path.name}.copy")))))
            os.rename(path, copies[-1])
        steps = self.steps()  # of this run, wherever `last` points
        self._link(LAST, last)
        if best is not None and best in steps:
            self._link(BEST, best)
        else:
            self._link(BEST, last)
        self.prune(last, {best, self.newest(good)})
        self.forget_others()
        for path in copies:
            remove_checkpoint(path)

    def newest(self, step: int) -> int | None:
        """The newest checkpoint up to that step, or None."""
        return max((saved for saved in self.steps() if saved <= step), default=None)

    def go_back(self, good: int) -> None:
        """Points `last` to the newest checkpoint up to step `good`, if there is one. Raises
        ConfigError if it cannot.
        """
        self.check_ours()
        newest = self.newest(good)
        if newest is not None:
            with self.changing():
                self._link(LAST, newest)

    def prune(self, last: int, needed: Set[int | None]) -> None:
        """Removes checkpoints after `last`, those before it except the newest and the `needed`
        ones, and unfinished ones.
        """
        for unfinished in self.checkpoints.glob(f".{STEP}"):
            remove_checkpoint(unfinished)
        steps = self.steps()
        newest = [step for step in steps if step <= last][-KEPT:]
        warned = [step for step in steps if (self.step_directory(step) / KEEP).exists()]
        retained = {*newest, *warned[-1:], *needed}
        for step in steps:
            if step not in retained:
                # rename first, so that all checkpoints are whole
                make_room(self.temporary(step))
                os.rename(self.step_directory(step), self.temporary(step))
                remove_checkpoint(self.temporary(step))

    def forget_others(self) -> None:
        """Removes the checkpoints of the other generation: a run that this one overwrote, or one
        that was killed before its first checkpoint. A copy that a user made there stays.
        """
        other = self._other()
        if other.steps() and not self._is_overwriting():
            return
        other.prune(-1, set())
        other.forget_base()
        with suppress(OSError):  # missing, or with files of users
            other.checkpoints.rmdir()
        if self._is_overwriting():
            (self.directory / OVERWRITING).unlink()

    def take_place(self) -> None:
        """Makes the place of this new run's checkpoints free of one that was killed before it
        overwrote the other generation. What a user has there gets the name `checkpoints-2-others`.
        """
        if self.steps() and not self._is_overwriting():
            kept = make_room(self.checkpoints)
            LOGGER.warning(
                "%r has checkpoints that the run to be overwritten did not make: it is kept as %r",
                str(self.checkpoints),
                kept,
            )
        self.prune(-1, set())

    def _other(self) -> RunDirectory:
        """The other generation."""
        return self._with(self.other_generation)

    def _is_overwriting(self) -> bool:
        """Whether a run has overwritten another one, and the checkpoints of one are left."""
        mark = self.directory / OVERWRITING
        return mark.is_file() and mark.stat().st_size == 0

    def _mark_overwriting(self) -> None:
        """Says that the other generation is one that this one overwrites."""
        if not self._is_overwriting():
            mark = self.directory / OVERWRITING
            make_room(mark)
            mark.touch()
            flush(self.directory)

    def forget_base(self) -> None:
        """Removes the base weights of low-rank updates. A directory of that name by others
        stays.
        """
        remove_base(self.checkpoints / BASE)

    def check_writable(self) -> None:
        """Makes the directory. Raises ConfigError if it cannot be written to, or if checkpoints
        there could not be read.
        """
        check_name(self.directory.absolute())
        with self.changing():
            self.directory.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self.directory):
                pass

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Turns an OSError inside into a ConfigError."""
        self.check_ours()
        try:
            yield
        except OSError as error:
            self.check_ours()
            advice = f"{remedy(error)}, or choose another place"
            if self.exists:
                advice = f"{self._what_is_left()}; {advice}"
            place = f"directory {str(self.directory)!r}"
            if error.filename is not None and os.path.isfile(str(error.filename)):
                place = repr(str(error.filename))
            raise ConfigError(
                f"cannot write to {place}: {error.strerror or error}; {advice}"
            ) from None

    @contextmanager
    def unharmed(self, step: int) -> Iterator[None]:
        """Turns an error in writing the checkpoint of that step into a ConfigError, and removes the
        unfinished checkpoint.
        """
        try:
            yield
        except (OSError, safetensors.SafetensorError, ConfigError) as error:
            self.check_ours()  # what is at the path may be of another run
            with suppress(OSError):
                remove_checkpoint(self.temporary(step))
            reason = getattr(error, "strerror", None) or error
            advice = "free some space"
            if isinstance(error, OSError):
                advice = remedy(error)
            way = "start again"
            if self.steps():
                way = "go on with --resume"
            elif self._overwritten_run_is_left():
                way = "start again, or go on with the earlier run by --resume"
            raise ConfigError(
                f"cannot save step {step} in {str(self.directory)!r}: {reason};"
                f" {self._what_is_left()}; {advice}, then {way}"
            ) from None

    def _what_is_left(self) -> str:
        steps = self.steps()
        if steps:
            return f"the checkpoint of step {steps[-1]} is intact"
        if self._overwritten_run_is_left():
            return "the run that was to be overwritten is intact"
        return "there is no earlier checkpoint"

    def _overwritten_run_is_left(self) -> bool:
        """Whether a checkpoint of another generation is there."""
        return bool(self._other().steps())

    def verified_last(self) -> Path:
        """The directory that `last` points to. If it is damaged, raises ConfigError with the fault
        and another, whole checkpoint; or, of a whole one with a file of another one, with that
        file.
        """
        if not self.exists:
            raise ConfigError(
                f"there is no run in {str(self.directory)!r} to resume: give the --out of one, or"
                " leave out --resume"
            )
        check_name(self.directory.absolute())
        copies = self._copies()
        if copies:
            fault = f"{str(copies[0])!r} is no link, as after a copy that follows links"
        else:
            last_fault = self._misled() or damage(self.last)
            if last_fault is None:
                return self.last
            if has_a_file_too_many(last_fault):
                raise ConfigError(last_fault)
            fault = last_fault
        good = self._newest_whole()
        if good is None:
            raise ConfigError(
                f"{fault}; no other checkpoint of this run is whole: start again with --overwrite"
            )
        commands = [
            f"mv {shlex.quote(str(path))} {shlex.quote(free_name(f'{path}.copy'))}"
            for path in copies
        ]
        commands.append(
            f"ln -sfn {self.step_directory(good).relative_to(self.directory)}"
            f" {shlex.quote(str(self.directory / LAST))}"
        )
        raise ConfigError(f"{fault}; to go on from step {good}: {' && '.join(commands)}")

    def _misled(self) -> str | None:
        """In words that `last` leads out of the run's checkpoints, as an absolute link does in a
        copy of the run; None if it does not.
        """
        place = self.last.resolve()
        if place.parent == self.checkpoints.resolve():
            return None
        return f"{str(self.last)!r} leads to {str(place)!r}, which is no checkpoint of this run"

    def _newest_whole(self) -> int | None:
        """The step of the newest checkpoint that is not damaged, or None."""
        for step in reversed(self.steps()):
            if damage(self.step_directory(step)) is None:
                return step
        return None

    def _copies(self) -> list[Path]:
        """The paths of links that are no links, also of links that a kill left unfinished."""
        paths = [self.directory / name for name in (LAST, BEST)]
        unfinished = [self.directory / f".{name}" for name in (LAST, BEST)]
        paths += [path for path in unfinished if (path / SUMS).is_file()]
        return [path for path in paths if path.exists() and not path.is_symlink()]

    def _link(self, name: str, step: int) -> None:
        temporary = self.directory / f".{name}"
        if _leads_to_checkpoint(temporary):  # of a process that was killed
            temporary.unlink()
        temporary = Path(free_name(str(temporary)))
        temporary.symlink_to(self.step_directory(step).relative_to(self.directory))
        try:
            os.replace(temporary, self.directory / name)
        finally:
            temporary.unlink(missing_ok=True)
        flush(self.directory)


def _leads_to_checkpoint(path: Path) -> bool:
    """Whether the path is a link as a run makes it."""
    return path.is_symlink() and os.path.dirname(os.readlink(path)) in GENERATIONS
