"""SHA256SUMS: hashes of all files of a checkpoint, so that ctrans never reads a damaged checkpoint
or one with files of another run.

A file that SHA256SUMS does not list and that ctrans does not read, such as a user's notes, is no
damage.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Set
from pathlib import Path
from typing import Any

from ctrans.base.given_files import read_file, read_json
from solvers import ConfigError

SUMS = "SHA256SUMS"
GENERATIONS = ("checkpoints", "checkpoints-2")
"""The directories of a run's checkpoints. A run that overwrites another one uses the free one."""
STEP = "step-[0-9][0-9][0-9][0-9][0-9][0-9][0-9][0-9]"
"""The pattern of names of checkpoints. Other files of users stay."""
STATE = "train.json"
"""The file of a training run next to its model. A checkpoint with this file has sums."""
NAME = 64 + len("  ")
"""The position of the name in a line of sums."""
LARGEST = 1 << 20
"""The most bytes of sums; a checkpoint of 1,000 processes has 130,000."""
LONGEST_NAME = 100
"""The most characters of a name in a message."""
OPTIMISER = "optimiser.safetensors"
SHARDS = "optimiser"
"""The directory of the processes' files in a checkpoint. Without it the optimiser is in one file.
"""
ESSENTIAL = (
    ("config.json",),
    ("model.safetensors", "adapter.safetensors"),
    (OPTIMISER, SHARDS),
    (STATE,),
)
"""The files of a checkpoint, or directories, of which ctrans reads one of each group."""
FURTHER = ("monitor.json", "alarm.json")
"""Files that ctrans reads if a checkpoint has them."""
READ = frozenset([*(name for group in ESSENTIAL for name in group), *FURTHER])


def sums(checkpoint: Path) -> bytes:
    """The SHA-256 of each file in the format of `sha256sum`."""
    return _lines(_files(checkpoint), checkpoint)


def _files(checkpoint: Path) -> list[Path]:
    paths = sorted(checkpoint.rglob("*"))
    return [path for path in paths if path.is_file() and path != checkpoint / SUMS]


def listed_files(checkpoint: Path) -> set[str] | None:
    """The names that SHA256SUMS lists; None without sums, as of a checkpoint that is not whole. A
    kill may leave an empty file or the start of a line.
    """
    try:
        recorded = _recorded(checkpoint)
    except ConfigError:
        return None
    if not recorded.endswith(b"\n"):
        return None
    return {_name(line) for line in recorded.splitlines()}


def _recorded(checkpoint: Path) -> bytes:
    """The content of SHA256SUMS. Raises ConfigError for one that cannot be read, that is no regular
    file, or that is too large.
    """
    return read_file(checkpoint / SUMS, LARGEST)


def _lines(files: Iterable[Path], checkpoint: Path) -> bytes:
    """A line of sums for each of these files."""
    lines = (f"{_digest(path)}  {path.relative_to(checkpoint)}\n" for path in files)
    return os.fsencode("".join(lines))


def _is_read(path: Path, checkpoint: Path) -> bool:
    """Whether ctrans reads a file of that name in a checkpoint."""
    return path.relative_to(checkpoint).parts[0] in READ


def damage(checkpoint: Path) -> str | None:
    """The damage to a checkpoint's files in words; None if all recorded files exist and have their
    hashes, and none is there that ctrans would read besides them.
    """
    try:
        recorded = _recorded(checkpoint)
        recorded_lines = recorded.splitlines()
        names = {_name(line) for line in recorded_lines}
        files = [
            path
            for path in _files(checkpoint)
            if _is_read(path, checkpoint) or str(path.relative_to(checkpoint)) in names
        ]
        actual = _lines(files, checkpoint)
    except OSError as error:
        return f"cannot read {error.filename!r}: {error.strerror}"
    except ConfigError as error:
        return str(error)
    if recorded == actual:
        return None
    actual_lines = actual.splitlines()
    for line in actual_lines:
        if line not in recorded_lines and _name(line) in names:
            return f"{_shown(checkpoint, line)} is damaged: its SHA-256 is not the one in {SUMS}"
    for line in recorded_lines:
        if line not in actual_lines:
            return f"{_shown(checkpoint, line)} is missing"
    for line in actual_lines:
        if line not in recorded_lines:
            return _unlisted(checkpoint, _name(line), names)
    return f"{str(checkpoint / SUMS)!r} is damaged"


def has_a_file_too_many(damage: str) -> bool:
    """Whether the damage is a file that belongs elsewhere, while the checkpoint itself is whole."""
    return damage.endswith(MOVE_AWAY)


MOVE_AWAY = "move it away"


def _unlisted(checkpoint: Path, name: str, names: Set[str]) -> str:
    """The damage of a file that ctrans reads and `SUMS` does not list: `SUMS` lost its line, or the
    file is of another checkpoint.
    """
    part = name.partition("/")[0]
    listed_parts = {listed.partition("/")[0] for listed in names}
    group = next((group for group in ESSENTIAL if part in group), ())
    if group and not listed_parts & set(group):
        return f"{str(checkpoint / SUMS)!r} is damaged: it does not list {name!r}"
    path = str(checkpoint / name)
    return f"{path!r} is not of this checkpoint: {SUMS} does not list it; {MOVE_AWAY}"


def checkpoint_of(path: Path) -> Path | None:
    """The checkpoint of a training run that the path is or lies in, links followed; or the
    directory of a run's checkpoints. None for any other path.
    """
    place = Path(os.path.realpath(path))
    for directory in (place, *place.parents):
        if all(os.path.exists(directory / name) for name in (SUMS, STATE)):
            return directory
        if directory.name in GENERATIONS and any(directory.glob(f"{STEP}/{SUMS}")):
            return directory
    return None


def are_of_two_runs(first: Path, second: Path) -> bool:
    """Whether two checkpoints' train.json name two runs, by their names, their data or their first
    validation losses. A file that cannot be read names none.
    """
    one, other = (_names_of_run(checkpoint) for checkpoint in (first, second))
    return any(one[key] != other[key] for key in one.keys() & other.keys())


def _names_of_run(checkpoint: Path) -> dict[str, Any]:
    """What a run has in the state of each of its checkpoints. An earlier version gave no name."""
    try:
        content = read_json(checkpoint / STATE)
        names = {key: content.get(key) for key in ("run", "fingerprint")}
        names["first"] = content["progress"]["first"]
    except (ConfigError, LookupError, TypeError, AttributeError):
        return {}
    return {key: name for key, name in names.items() if name is not None and name != ""}


def check_bound(checkpoint: Path) -> None:
    """Raises ConfigError for a training run's checkpoint that is damaged or has files of another
    run. A model saved alone has no sums.
    """
    if not any(os.path.exists(checkpoint / name) for name in (SUMS, STATE)):
        return
    fault = damage(checkpoint)
    if fault is None:
        return
    if not has_a_file_too_many(fault):
        fault += ": restore the whole checkpoint, or give another one of the run"
    raise ConfigError(fault)


def _name(line: bytes) -> str:
    """The file's name in a line of sums."""
    return os.fsdecode(line[NAME:])


def _shown(checkpoint: Path, line: bytes) -> str:
    """The path in a line of sums for a message. A damaged line may be one long name."""
    name = _name(line)
    if len(name) > LONGEST_NAME:
        name = f"{name[:LONGEST_NAME]}..."
    return repr(str(checkpoint / name))


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
