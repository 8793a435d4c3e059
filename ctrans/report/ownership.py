"""Which files a command may replace: those that ctrans wrote, and with --overwrite any.

Two kinds stay also with --overwrite: what the command reads, and the checkpoints of training runs.
Every command asks here before it computes. What a file is, its own bytes say. Any other file of a
result, as a model's weights, is ours if the result has its SHA-256: another program may write a
file of that name beside the result.
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
from collections.abc import Iterable, Sequence
from pathlib import Path

from ctrans.base.given_files import read_json
from ctrans.model.sums import SUMS, checkpoint_of
from ctrans.report.files import takes_data
from solvers import ConfigError

ENOUGH = 4096
"""Bytes in which a file says who wrote it."""
OWN = {
    ".json": re.compile(rb'\s*\{\s*"command":\s*"[a-z-]+",\s*"options":\s*\{'),
    ".html": re.compile(rb'[\s\S]*<meta name="generator" content="ctrans">'),
    ".sarif": re.compile(rb'[\s\S]*"name":\s*"ctrans"'),
    ".csv": re.compile(rb"key,case,seed,learning_rate,|case,name,value\r?\n"),
    ".xml": re.compile(rb'[\s\S]*<testsuites name="ctrans'),
    ".parquet": re.compile(rb"[\s\S]*written by ctrans"),
    ".png": re.compile(rb"\x89PNG[\s\S]*tEXtSoftware\x00ctrans"),
}
"""How files that ctrans wrote begin, by suffix. A Parquet file has what it says at its end."""
SAYS_ITSELF = (".csv", ".html", ".parquet", ".png")
"""Files of a result that are known by their own bytes, also beside an earlier result."""
OF_MATPLOTLIB = re.compile(rb"\x89PNG[\s\S]*tEXtSoftware\x00Matplotlib")
"""How the pictures of earlier versions of ctrans begin, and those of other programs."""
LOSS = "loss.png"
"""The picture of `ctrans train`. That of another command has the command's name."""
LOCKS = frozenset({".lock", ".study.lock"})
"""The locks of runs and studies, which are empty files."""
WAY_ON = "choose another place, or replace it with --overwrite"
"""The advice for a file that stays, of a command that has --overwrite."""
WRITABLE = stat.S_IWUSR | stat.S_IWGRP | stat.S_IWOTH
SHA256 = "sha256"
"""The key of a result for the SHA-256 of its other files, by their names."""


def check_replaceable(
    path: Path, *, overwrite: bool, inputs: Sequence[Path] = (), way_on: str = WAY_ON
) -> None:
    """Raises ConfigError for a file with content that ctrans did not write, unless `overwrite`; for
    one of the `inputs`, or of a model among them; and for any place in a checkpoint of a run.
    `way_on` is the advice for a file of others.
    """
    if takes_data(path):
        return
    check_no_checkpoint(path)
    if path.is_symlink() and path.is_dir() and not overwrite:
        raise ConfigError(f"{str(path)!r} is a link to a directory: {way_on}")
    if not path.is_file():
        return
    if path.name in LOCKS:
        raise ConfigError(f"{str(path)!r} is the lock of a run or a study: choose another place")
    is_own = is_own_file(path)
    _check_no_input(path, inputs, is_own=is_own)
    if overwrite:
        return
    if not path.stat().st_mode & WRITABLE:
        raise ConfigError(f"{str(path)!r} is read-only: {way_on}")
    if is_own:
        return
    raise ConfigError(f"{str(path)!r} exists, and ctrans did not write it: {way_on}")


def check_result(
    directory: Path,
    command: str,
    names: Iterable[str],
    *,
    overwrite: bool,
    inputs: Sequence[Path] = (),
    way_on: str = WAY_ON,
) -> None:
    """Raises ConfigError unless a result of this command may be written to the directory: files of
    these names exist only beside an earlier result of the command that wrote them, and are none of
    the `inputs`.

    The picture of version 0.3 and before does not say who wrote it. Beside a result of such a
    version it may be replaced.
    """
    result = directory / f"{command}.json"
    has_earlier_result = result.is_file() and is_own_file(result)
    check_replaceable(result, overwrite=overwrite, inputs=inputs, way_on=way_on)
    for name in names:
        path = directory / name
        if path.is_symlink() and path.is_dir():
            check_replaceable(path, overwrite=overwrite, way_on=way_on)
        if not path.is_file() or takes_data(path):
            continue
        is_of_result = has_earlier_result and name in (f"{command}.png", LOSS)
        is_earlier_picture = (
            is_of_result and _begins_as(path, OF_MATPLOTLIB) and not _says_measured(result)
        )
        if path.suffix in SAYS_ITSELF and not is_earlier_picture:
            check_replaceable(path, overwrite=overwrite, inputs=inputs, way_on=way_on)
            continue
        is_own = is_earlier_picture or (has_earlier_result and _is_recorded(path, result))
        _check_no_input(path, inputs, is_own=is_own)
        if overwrite or is_own:
            continue
        if has_earlier_result:
            raise ConfigError(
                f"{str(path)!r} is not the file that {result.name} beside it names: something else"
                f" wrote it, or a killed command. {way_on[0].upper()}{way_on[1:]}"
            )
        raise ConfigError(
            f"{str(path)!r} exists, and no {result.name} of ctrans is beside it: {way_on}"
        )


def sha256_of_files(directory: Path, names: Iterable[str]) -> dict[str, str]:
    """The SHA-256 of each of these files, by name, as a result has it."""
    return {name: _sha256(directory / name) for name in names}


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _is_recorded(path: Path, result: Path) -> bool:
    """Whether the result names this file with its SHA-256. A result of an earlier version of ctrans
    has none.
    """
    try:
        recorded = read_json(result)[SHA256][path.name]
        return bool(recorded == _sha256(path))
    except (OSError, ConfigError, LookupError, TypeError):
        return False


def _says_measured(result: Path) -> bool:
    """Whether the result has the key that those of version 0.3 and before lack."""
    try:
        return "measured" in read_json(result)
    except (ConfigError, TypeError):
        return False


def check_no_checkpoint(path: Path) -> None:
    """Raises ConfigError for a path in a checkpoint of a training run, or among its checkpoints."""
    checkpoint = checkpoint_of(path.parent)
    if checkpoint is not None:
        raise ConfigError(
            f"{str(path)!r} would lie in {str(checkpoint)!r}, among the checkpoints of a training"
            f" run, which have only the files in their {SUMS}: choose another place"
        )


def _check_no_input(path: Path, inputs: Sequence[Path], *, is_own: bool) -> None:
    """Raises ConfigError if the file is one of the inputs, or in a directory among them and not
    `is_own`, a result of ctrans.
    """
    place = place_of(path)
    for given in inputs:
        if given.is_dir():
            is_read = not is_own and place.is_relative_to(os.path.realpath(given))
        else:
            is_read = place == place_of(given) or _is_same(path, given)
        if is_read:
            raise ConfigError(
                f"{str(path)!r} exists, and this command reads it; ctrans never replaces its input:"
                " choose another place"
            )


def place_of(path: Path) -> Path:
    """The path with the links of its directory followed. A file that is a link is replaced
    itself.
    """
    return Path(os.path.realpath(path.parent), path.name)


def _is_same(path: Path, other: Path) -> bool:
    try:
        return os.path.samefile(path, other)
    except OSError:
        return False


def is_own_file(path: Path) -> bool:
    """Whether ctrans wrote the file, as its own bytes say. An empty one is anybody's, and one that
    cannot be read is not ours.
    """
    suffix = path.suffix.lower()
    try:
        with path.open("rb") as file:
            if suffix == ".parquet":
                file.seek(max(0, path.stat().st_size - ENOUGH))
            says = file.read(ENOUGH)
    except OSError:
        return False  # a replacement needs no right to read the file, so it would be lost
    if len(says) < ENOUGH and not says.strip():
        return True
    pattern = OWN.get(suffix)
    if pattern is None:  # --json and --html take any name
        return any(OWN[suffix].match(says) for suffix in (".json", ".html"))
    return pattern.match(says) is not None


def is_own_picture(path: Path) -> bool:
    """Whether ctrans wrote the picture, as its own bytes say. An empty one is not known to be."""
    return _begins_as(path, OWN[".png"])


def _begins_as(path: Path, pattern: re.Pattern[bytes]) -> bool:
    try:
        with path.open("rb") as file:
            return pattern.match(file.read(ENOUGH)) is not None
    except OSError:
        return False
