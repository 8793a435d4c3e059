"""Results on disk: JSON that every reader accepts, pictures, written whole or not at all."""

from __future__ import annotations

import io
import json
import os
import re
import tempfile
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from ctrans.base.durable_files import write_durably
from ctrans.base.json_values import plain
from solvers import ConfigError

DESCRIPTOR = re.compile(r"/proc/(self|thread-self|\d+)/fd/\d+")
"""The path of a process's open file."""
WRITER = {"Software": "ctrans"}
"""What a picture has of the program that wrote it."""


def to_json(value: Any) -> str:
    """The value as JSON text."""
    return json.dumps(plain(value), indent=1, allow_nan=False)


def write_atomic(path: Path, data: bytes) -> None:
    """Writes the file whole, on the disk, or leaves what was there. Raises ConfigError naming the
    path where it cannot. A device or a pipe stays, and gets the data.
    """
    try:
        if takes_data(path):
            path.write_bytes(data)
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        write_durably(path, data)
    except (OSError, ValueError) as error:  # ValueError: no system holds such a path
        raise ConfigError(
            f"cannot write {str(path)!r}: {getattr(error, 'strerror', None) or error}; choose"
            " another place"
        ) from None


def takes_data(path: Path) -> bool:
    """Whether the path is a device, a pipe or a process's descriptor, as /dev/stdout or /dev/fd/3.
    A file in its place would take it from all programs. A link to a file elsewhere below /proc is
    an ordinary link.
    """
    if path.exists() and not path.is_file() and not path.is_dir():
        return True
    if DESCRIPTOR.fullmatch(f"{os.path.realpath(path.parent)}/{path.name}"):
        return True
    return path.is_symlink() and DESCRIPTOR.fullmatch(os.readlink(path)) is not None


def check_writable(directory: Path) -> None:
    """Raises ConfigError, before any work is done, unless files can be made in that directory
    (which is created).
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            pass
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"cannot write to directory {str(directory)!r}:"
            f" {getattr(error, 'strerror', None) or error}; choose another place"
        ) from None


def png(figure: Figure, dpi: int = 130) -> bytes:
    """The figure as a PNG file's bytes, which say that ctrans wrote them. `savefig` would draw it
    twice.
    """
    figure.set_dpi(dpi)
    buffer = io.BytesIO()
    FigureCanvasAgg(figure).print_png(buffer, metadata=WRITER)  # type: ignore[no-untyped-call]  # matplotlib gives it no types
    return buffer.getvalue()
