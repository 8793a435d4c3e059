"""Which files a command may replace: those that ctrans wrote, and with --overwrite any.

Every command asks here before it computes. What a file is, its first bytes say; a picture is ours
where the result that it belongs to is.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from ctrans.report.files import takes_data
from solvers import ConfigError

HEAD = 4096
"""Bytes in which a file says who wrote it."""
OWN = {
    ".json": re.compile(rb'\s*\{\s*"command":\s*"[a-z-]+",\s*"options":\s*\{'),
    ".html": re.compile(rb'[\s\S]*<meta name="generator" content="ctrans">'),
    ".sarif": re.compile(rb'[\s\S]*"name":\s*"ctrans"'),
    ".xml": re.compile(rb'[\s\S]*<testsuites name="ctrans'),
}
"""How files that ctrans wrote begin, by suffix."""


def check_replaceable(path: Path, *, overwrite: bool) -> None:
    """Raises ConfigError for a file with content that ctrans did not write, unless `overwrite`."""
    if overwrite or not path.is_file() or takes_data(path) or _is_own(path):
        return
    raise ConfigError(
        f"{str(path)!r} exists, and ctrans did not write it: choose another place, or replace it"
        " with --overwrite"
    )


def check_result(directory: Path, command: str, names: Iterable[str], *, overwrite: bool) -> None:
    """Raises ConfigError unless a result of this command may be written to the directory: files of
    these names exist only beside an earlier result of the command.
    """
    result = directory / f"{command}.json"
    check_replaceable(result, overwrite=overwrite)
    if overwrite or result.is_file():
        return
    for name in names:
        path = directory / name
        if path.is_file() and not takes_data(path):
            raise ConfigError(
                f"{str(path)!r} exists, and no {command}.json of ctrans is beside it: choose"
                " another place, or replace it with --overwrite"
            )


def _is_own(path: Path) -> bool:
    """Whether ctrans wrote the file, as its first bytes say. An empty one is anybody's."""
    try:
        with path.open("rb") as file:
            head = file.read(HEAD)
    except OSError:
        return True  # what cannot be read is refused where it is written
    if not head.strip():
        return True
    pattern = OWN.get(path.suffix.lower())
    if pattern is None:
        return any(known.match(head) for known in OWN.values())
    return pattern.match(head) is not None
