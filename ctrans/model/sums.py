"""SHA256SUMS: hashes of all files of a checkpoint, so that ctrans never reads a damaged checkpoint
or one with files of another run.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from solvers import ConfigError

SUMS = "SHA256SUMS"
STATE = "train.json"
"""The file of a training run next to its model. A checkpoint with this file has sums."""
NAME = 64 + len("  ")
"""The position of the name in a line of sums."""


def sums(checkpoint: Path) -> bytes:
    """The SHA-256 of each file in the format of `sha256sum`."""
    files = [path for path in sorted(checkpoint.rglob("*")) if path.is_file() and path.name != SUMS]
    return "".join(f"{_digest(path)}  {path.relative_to(checkpoint)}\n" for path in files).encode()


def damage(checkpoint: Path) -> str | None:
    """The damage to a checkpoint's files in words; None if all files exist and have their recorded
    hashes.
    """
    try:
        recorded = (checkpoint / SUMS).read_bytes()
        actual = sums(checkpoint)
    except OSError as error:
        return f"cannot read {error.filename!r}: {error.strerror}"
    if recorded == actual:
        return None
    listed = recorded.splitlines()
    there = actual.splitlines()
    for lines, others, what in (
        (there, listed, f"is damaged: its SHA-256 is not the one in {SUMS}"),
        (listed, there, "is missing"),
    ):
        wrong = [line[NAME:].decode(errors="replace") for line in lines if line not in others]
        if wrong:
            return f"{str(checkpoint / wrong[0])!r} {what}"
    return f"{str(checkpoint / SUMS)!r} is damaged"


def check_bound(checkpoint: Path) -> None:
    """Raises ConfigError for a training run's checkpoint that is damaged or has files of another
    run. A model saved alone has no sums.
    """
    run = [name for name in (SUMS, STATE) if os.path.exists(checkpoint / name)]
    if run:
        found = damage(checkpoint)
    else:
        found = None
    if found is not None:
        raise ConfigError(f"{found}: restore the whole checkpoint, or give another one of the run")


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
