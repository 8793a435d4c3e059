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
    recorded_lines = recorded.splitlines()
    actual_lines = actual.splitlines()
    for line in actual_lines:
        if line not in recorded_lines:
            path = checkpoint / _name(line)
            return f"{str(path)!r} is damaged: its SHA-256 is not the one in {SUMS}"
    for line in recorded_lines:
        if line not in actual_lines:
            return f"{str(checkpoint / _name(line))!r} is missing"
    return f"{str(checkpoint / SUMS)!r} is damaged"


def check_bound(checkpoint: Path) -> None:
    """Raises ConfigError for a training run's checkpoint that is damaged or has files of another
    run. A model saved alone has no sums.
    """
    if not any(os.path.exists(checkpoint / name) for name in (SUMS, STATE)):
        return
    fault = damage(checkpoint)
    if fault is not None:
        raise ConfigError(f"{fault}: restore the whole checkpoint, or give another one of the run")


def _name(line: bytes) -> str:
    """The file's name in a line of sums."""
    return line[NAME:].decode(errors="replace")


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
