"""Where the data of a run come from, in a form that a checkpoint keeps."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from ctrans.model.text import read_text
from ctrans.training.data import Data, from_bin, from_text
from ctrans.training.tasks import TASKS
from solvers import ConfigError, look_up

Source = Mapping[str, str | None]
"""{"task": name}, or the absolute path of a text as "file" or of a directory as "bin". Empty for
data that a program made. See `read_source`.
"""
Given = Data | bytes | str | Path | Source | None
"""How you may give data: as tokens; the bytes of a text; the path of a text or of a directory with
nanoGPT's files; a source; or None for the text that Python ships.
"""


def source_of(data: Given, context: int) -> tuple[dict[str, str | None], Data]:
    """Returns the source of the data, and the data. Raises ConfigError if they cannot be read."""
    if isinstance(data, Mapping):
        return dict(data), read_source(data, context)
    if isinstance(data, Data):
        return {}, data
    if isinstance(data, bytes):
        return {}, from_text(data, context)
    source: dict[str, str | None] = {"file": None, "bin": None}
    if data is not None:
        path = Path(data).absolute()
        kind = "bin" if os.path.isdir(path) else "file"
        source[kind] = str(path)
    return source, read_source(source, context)


def read_source(source: Source, context: int) -> Data:
    """Reads the data of the task, nanoGPT's files in the directory `bin`, or the bytes of `file`,
    by default of the text that Python ships. Raises ConfigError if it cannot.
    """
    if source.get("task") is not None:
        return look_up("task", str(source["task"]), TASKS).data()
    if not source:
        raise ConfigError(
            "a program gave the run its data: give them again, with --file or --bin if they are in"
            " files"
        )
    directory = source.get("bin")
    file = source.get("file")
    if directory is not None:
        return from_bin(directory, context)
    if file is None:
        name = "the text"
    else:
        name = repr(file)
    return from_text(read_text(file), context, name)
