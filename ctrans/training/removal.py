"""Removes checkpoints, and nothing in them that ctrans did not write.

Of a whole checkpoint ctrans wrote what its SHA256SUMS lists under a name that ctrans gives; of an
unfinished one, the files with such names. All else stays, in a directory `step-00000100-others`.
"""

from __future__ import annotations

import itertools
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

from ctrans.base.given_files import read_json
from ctrans.model.checkpoint import ADAPTER, WEIGHTS, of_ours
from ctrans.model.sums import OPTIMISER, READ, SHARDS, STATE, SUMS, listed_files
from solvers import ConfigError

UNFINISHED = re.compile(rf"\.({'|'.join(map(re.escape, sorted(READ | {SUMS})))})\.\d+")
"""The names that files have while they are written."""


def is_checkpoint(path: Path, step: int) -> bool:
    """Whether ctrans made the directory, as the checkpoint of that step. A copy of another step's
    checkpoint is of its user, and so are a link and a directory of another program with files of
    the same names.

    One whose train.json is missing or damaged is still ours by its SHA256SUMS or its weights. A
    model alone is of its user, who saved it there.
    """
    if not _is_directory(path):
        return False
    try:
        state = read_json(path / STATE)
        named_step = state["progress"]["step"]
    except (ConfigError, LookupError, TypeError):
        named_step = None
    if type(named_step) is int:
        return bool(named_step == step)
    if STATE in (listed_files(path) or ()):
        return True
    if not any(os.path.lexists(path / name) for name in (SUMS, STATE, OPTIMISER, SHARDS)):
        return False
    return of_ours(path / WEIGHTS) or of_ours(path / ADAPTER)


def remove_checkpoint(checkpoint: Path) -> None:
    """Removes a checkpoint that has its temporary name `.step-00000100`, or one that is not
    finished. Without a file of ctrans it stays as it is, unless it is empty.
    """
    if not _is_directory(checkpoint):
        return
    names = [entry.name for entry in checkpoint.iterdir()]
    if names and not any(map(_is_name_of_ours, names)):
        return
    listed = listed_files(checkpoint)

    def is_ours(path: str) -> bool:
        return _is_path_of_ours(path) and (listed is None or path in {*listed, SUMS})

    others = checkpoint.with_name(checkpoint.name.removeprefix(".") + "-others")
    _set_others_aside(checkpoint, checkpoint, others, is_ours)
    shutil.rmtree(checkpoint)


def make_room(path: Path) -> str:
    """Gives what a user has in the place of a new checkpoint the name `step-00000100-others`.
    Returns the name.
    """
    name = free_name(f"{path.parent / path.name.removeprefix('.')}-others")
    if os.path.lexists(path):
        os.rename(path, name)
    return name


def free_name(path: str) -> str:
    """The path, or with a number after it, that nothing has."""
    name = path
    for number in itertools.count(1):
        if not os.path.lexists(name):
            break
        name = f"{path}{number}"
    return name


def _is_name_of_ours(name: str) -> bool:
    """Whether ctrans gives this name in a checkpoint, or gave it to a file that it was writing."""
    return name in READ or name == SUMS or UNFINISHED.fullmatch(name) is not None


def _is_path_of_ours(relative_path: str) -> bool:
    """The same of a path. A directory with such a name is that of the optimiser's shards."""
    return _is_name_of_ours(relative_path.partition("/")[0])


def _set_others_aside(
    directory: Path, checkpoint: Path, others: Path, is_ours: Callable[[str], bool]
) -> None:
    """Moves to `others` what is not ours in the directory, whatever it is, without following
    links.
    """
    for path in sorted(directory.iterdir()):
        if not _holds_ours(path, checkpoint, is_ours):
            place = others / path.relative_to(checkpoint)
            place.parent.mkdir(parents=True, exist_ok=True)
            os.rename(path, free_name(str(place)))
        elif _is_directory(path):
            _set_others_aside(path, checkpoint, others, is_ours)


def _holds_ours(path: Path, checkpoint: Path, is_ours: Callable[[str], bool]) -> bool:
    """Whether the path is a file of ours, or a directory with one. An empty directory is ours by
    its name.
    """
    has_our_name = is_ours(str(path.relative_to(checkpoint)))
    if not _is_directory(path):
        return has_our_name
    entries = list(path.iterdir())
    if not entries:
        return has_our_name
    return any(_holds_ours(entry, checkpoint, is_ours) for entry in entries)


def _is_directory(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()
