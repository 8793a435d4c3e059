"""Files from users: ctrans reads regular files of bounded size, JSON of bounded depth, and arrays
without pickles. It raises an error for all others before it reads them.
"""

from __future__ import annotations

import json
import os
import re
import stat
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from ctrans.base.memory import memory
from ctrans.base.printable import one_line
from solvers import ConfigError

LARGEST_JSON = 256 << 20
"""The largest size of a JSON file in bytes; the largest tokenizers have 40 MB."""
LARGEST_TOML = 8 << 20
"""The largest size of a TOML file in bytes. Python reads about one million bytes a second."""
LONGEST_LINE = 16 << 20
"""The most characters in a line of a log; a monitor's report of 200 sublayers has about 14,000."""
MOST_NAMES = 1 << 25
"""The largest size of a safetensors header in bytes; a model of 10,000 blocks has 15 MB."""
DEEPEST_JSON = 100
"""The largest nesting depth of objects and lists in JSON."""
NO_FILE = {
    stat.S_ISDIR: "a directory",
    stat.S_ISFIFO: "a pipe, which may never end",
    stat.S_ISSOCK: "a socket",
    stat.S_ISCHR: "a device",
    stat.S_ISBLK: "a device",
}
"""The words for a path that is no regular file."""


def check_file(path: Path) -> int:
    """The size in bytes of a regular, readable file. Raises ConfigError for anything else; reading
    a pipe could wait forever.
    """
    try:
        # without waiting, as opening a pipe does
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except (OSError, ValueError) as error:  # ValueError: a path with a null byte
        raise cannot_read(path, error) from None
    try:
        status = os.fstat(handle)
    finally:
        os.close(handle)
    kind = no_regular_file(status.st_mode)
    if kind:
        raise ConfigError(f"cannot read {str(path)!r}: it is {kind}, and no regular file")
    return status.st_size


def check_name(path: Path) -> None:
    """Raises ConfigError for a path that is no UTF-8, which the readers of weights need."""
    try:
        str(path).encode()
    except UnicodeEncodeError:
        raise ConfigError(
            f"cannot read {str(path)!r}: its path is not UTF-8, and libraries read weights only"
            " from such a path: rename the directory or the file"
        ) from None


def no_regular_file(mode: int) -> str:
    """What a file of that mode is in words; "" for a regular file."""
    if stat.S_ISREG(mode):
        return ""
    for is_kind, description in NO_FILE.items():
        if is_kind(mode):
            return description
    return "something else"


def read_file(path: Path, limit: int | None = None) -> bytes:
    """The file's bytes. Raises ConfigError for more than `limit` bytes, by default half of this
    machine's memory.
    """
    size = check_file(path)
    if limit is None:
        limit = memory() // 2
    if size > limit:
        raise ConfigError(
            f"cannot read {str(path)!r}: it has {size:,} bytes, and ctrans reads at most {limit:,}:"
            " give a smaller file"
        )
    try:
        with path.open("rb") as file:
            return file.read(size)  # more would reserve memory
    except OSError as error:
        raise cannot_read(path, error) from None


def read_lines(path: Path) -> Iterator[str]:
    """The lines of a log, with their ends, one at a time. Raises ConfigError for what is no regular
    file, and for a line of more than `LONGEST_LINE` characters, as a file of zeros has.
    """
    check_file(path)
    try:
        # without a byte order mark, which would hide the first line
        with path.open(encoding="utf-8-sig", errors="replace") as file:
            while True:
                line = file.readline(LONGEST_LINE)
                if not line:
                    return
                if len(line) == LONGEST_LINE:
                    raise ConfigError(
                        f"{str(path)!r} has a line of over {LONGEST_LINE:,} characters: it is no"
                        " log of ctrans"
                    )
                yield line
    except OSError as error:
        raise cannot_read(path, error) from None


def check_safetensors(path: Path) -> None:
    """Raises ConfigError unless a safetensors file's header fits in the file, and is no larger than
    its weights plus 1 MiB and `MOST_NAMES`. Parsing takes 30 times the header's memory.
    """
    size = check_file(path)
    with path.open("rb") as file:
        header = int.from_bytes(file.read(8), "little")
    after_length = max(0, size - 8)
    weights = max(0, after_length - header)
    most = min(MOST_NAMES, after_length, weights + (1 << 20))
    if header > most:
        raise ConfigError(
            f"{str(path)!r} is no complete safetensors file: its header has {header:,} bytes, and"
            f" at most {most:,} are allowed"
        )


def read_json(path: Path, limit: int = LARGEST_JSON) -> Any:
    """The value in a JSON file. Raises ConfigError for a file that is no JSON, larger than `limit`
    bytes or nested too deep.
    """
    data = read_file(path, limit)
    try:
        value = json.loads(data)
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{str(path)!r} is no JSON: byte {error.start} is no {error.encoding.upper()}: save it"
            " as UTF-8"
        ) from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{str(path)!r} is no JSON: {one_line(error)}") from None
    if nested_too_deep(value):
        raise _too_deep(path)
    return value


def check_encoding(path: Path) -> None:
    """Raises ConfigError for text with a byte order mark, and in UTF-16 or UTF-32. `read_json`
    reads such files. The libraries of Hugging Face, which read the same files again, fail in
    their own words, or take the mark for a part of the first word.
    """
    check_file(path)
    try:
        with path.open("rb") as file:
            beginning = file.read(4)
    except OSError as error:
        raise cannot_read(path, error) from None
    encoding = json.detect_encoding(beginning)
    if encoding == "utf-8":
        return
    if encoding == "utf-8-sig":
        description = "begins with a byte order mark"
    else:
        description = f"is {encoding[:6].upper()}"
    raise ConfigError(
        f"{str(path)!r} {description}, and Hugging Face reads only UTF-8 without a byte order mark:"
        " save it so"
    )


def read_toml(path: Path) -> dict[str, Any]:
    """The table in a TOML file. Raises ConfigError for a file that is no TOML, too large or nested
    too deep.
    """
    data = read_file(path, LARGEST_TOML)
    try:
        text = data.decode("utf-8-sig")  # editors on Windows write a byte order mark
        has_long_key = _long_key(text)
        table: dict[str, Any] = {}
        if not has_long_key:
            table = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{str(path)!r} is no TOML: {one_line(error)}") from None
    if has_long_key or nested_too_deep(table):
        raise _too_deep(path)
    return table


def _too_deep(path: Path) -> ConfigError:
    return ConfigError(
        f"{str(path)!r} is nested more than {DEEPEST_JSON} deep, which ctrans does not read:"
        " give another file"
    )


def _long_key(text: str) -> bool:
    """Whether TOML may have a dotted key of over `DEEPEST_JSON` parts, for which Python needs time
    by the square. Parts in quotes can look like values, so that all of them count.
    """
    pieces = re.split(r"[,=\[\]{}\n]", text)
    longest_bare = max(len(re.findall(r"[\w-][ \t]*\.", piece)) for piece in pieces)
    if longest_bare > DEEPEST_JSON:
        return True
    quoted = re.findall(r"[\"'][ \t]*\.|\.[ \t]*[\"']", text)
    return len(quoted) > 10 * DEEPEST_JSON


def read_array(path: Path, fits: Callable[[np.ndarray], bool], description: str) -> Any:
    """An array that `numpy.save` wrote, memory-mapped. Raises ConfigError for another file, and,
    with the description of those that fit, for an array that does not.
    """
    check_file(path)
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except OSError as error:
        raise cannot_read(path, error) from None
    # damaged bytes lead numpy to ValueError, SyntaxError, EOFError and more
    except Exception as error:
        raise ConfigError(f"{str(path)!r} is no array of numpy.save: {one_line(error)}") from None
    if not isinstance(array, np.ndarray):
        raise ConfigError(f"{str(path)!r} holds {type(array).__name__}: give {description}")
    if not fits(array):
        raise ConfigError(
            f"{str(path)!r} holds {array.dtype} of shape {array.shape}: give {description}"
        )
    return array


def nested_too_deep(document: Any) -> bool:
    """Whether objects and lists of JSON are nested more than `DEEPEST_JSON` deep, values
    included.
    """
    depth = 0
    values = [document]
    while values:
        depth += 1
        if depth > DEEPEST_JSON:
            return True
        inside: list[Any] = []
        for value in values:
            if isinstance(value, dict):
                inside.extend(value.values())
            elif isinstance(value, list):
                inside.extend(value)
        values = inside
    return False


def cannot_read(path: Path, error: OSError | ValueError) -> ConfigError:
    """The error for a file that cannot be opened or read."""
    reason = getattr(error, "strerror", None) or error
    return ConfigError(f"cannot read {str(path)!r}: {reason}")
