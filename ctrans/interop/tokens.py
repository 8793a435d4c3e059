"""Token ids: bytes as ids, and files of ids."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
from jaxtyping import Integer

from ctrans.base.given_files import cannot_read, check_file, read_array
from solvers import ConfigError

Ids = Integer[np.ndarray, " _"]


def as_numbers(ids: list[int]) -> list[str]:
    """Token ids as text."""
    return [f" {i}" for i in ids]


@dataclasses.dataclass(frozen=True)
class Tokeniser:
    """From bytes to token ids. `description` is one line; `mask` is the id of the mask token, or
    None; `texts` gives tokens as text.
    """

    description: str
    encode: Callable[[bytes], Ids]
    mask: int | None = None
    texts: Callable[[list[int]], list[str]] = as_numbers


def _bytes_as_ids(text: bytes) -> Ids:
    return np.frombuffer(text, dtype=np.uint8)


def _characters(ids: list[int]) -> list[str]:
    """Bytes as text. Bytes above ASCII may be parts of a character, and are written as numbers."""
    return [f"\\x{i:02x}" if i > 127 else chr(i) for i in ids]


BYTES = Tokeniser("bytes as token ids", _bytes_as_ids, texts=_characters)
"""The tokenizer of seeded models, and of models without one."""


def read_ids(path: str | Path) -> Ids:
    """Token ids of a file: `.npy` holds a row of integers; `.bin` two bytes for each id, as
    `val.bin` of nanoGPT's prepare.py.

    Raises ConfigError for another suffix, and for a file that cannot be read or holds something
    else.
    """
    path = Path(path)
    if path.suffix not in IDS:
        # any file of even size can be read as pairs of bytes
        raise ConfigError(
            f"{str(path)!r} is neither .bin (two bytes each, as nanoGPT's prepare.py writes them)"
            " nor .npy (numpy.save of a row of integers): rename a file of ids, or give text by"
            " --file"
        )
    return IDS[path.suffix](path)


def _read_ids(path: Path) -> Ids:
    def fits(ids: np.ndarray) -> bool:
        return ids.ndim == 1 and ids.dtype.kind in "iu"

    ids: Ids = read_array(path, fits, "a row of integers, as numpy.save(path, ids) writes it")
    return ids


STRETCH = 1 << 16
"""How many ids at the start of a file are looked at, to see how many bytes an id takes."""
LEAST_STRETCH = 1024
"""Fewer ids say nothing about it."""
MOST_IN_UPPER_BYTES = 15
"""The upper two bytes of an id below 2^20, which no vocabulary reaches."""

LARGE_ID = 256
"""An id that a small alphabet, whose ids are all small, does not have."""


def map_tokens(path: Path) -> Ids:
    """The token ids of a file of nanoGPT, memory-mapped. Raises ConfigError for an invalid file."""
    size = check_file(path)
    if size % 2 != 0 or size == 0:
        raise ConfigError(
            f"{str(path)!r} has {size} bytes: give a file of tokens, which take two bytes each"
        )
    try:
        ids = np.memmap(path, dtype=np.dtype("<u2"), mode="r")
    except OSError as error:
        raise cannot_read(path, error) from None
    if _takes_four_bytes(ids[:STRETCH]):
        raise ConfigError(
            f"{str(path)!r} has at most {MOST_IN_UPPER_BYTES} at every second place, as ids of four"
            " bytes have, and ctrans reads two bytes for each: write it by"
            " np.fromfile(FILE, np.uint32).astype(np.uint16).tofile(FILE), for ids below 65,536"
        )
    return ids


def _takes_four_bytes(ids: Ids) -> bool:
    """Whether the file of these ids has four bytes or more for each: their upper halves, at every
    second place, are 0, or nearly so where ids are above 65,535. No long text has such tokens.
    """
    if len(ids) < LEAST_STRETCH:
        return False
    lower = ids[::2]
    upper = ids[1::2]
    if not upper.any():
        return bool(lower.any())
    return int(upper.max()) <= MOST_IN_UPPER_BYTES and int(lower.max()) >= LARGE_ID


def check_unchanged(ids: Ids) -> None:
    """Raises ConfigError if the file of mapped ids has another size than when it was opened: to
    read beyond its end would kill the process (SIGBUS).

    It does not see a file that changes between this check and the reading, nor other ids in a file
    of the same size. A file that was removed or renamed can be read on.
    """
    if not isinstance(ids, np.memmap) or ids.filename is None:
        return
    try:
        size = os.stat(ids.filename).st_size
    except OSError:
        return
    expected = ids.offset + ids.nbytes
    if size != expected:
        raise ConfigError(
            f"{str(ids.filename)!r} changed while it was read: it had {expected:,} bytes and has"
            f" {size:,}; restore it, and give a changed file another name"
        )


IDS: dict[str, Callable[[Path], Ids]] = {".bin": map_tokens, ".npy": _read_ids}
"""Readers of files of token ids, by suffix."""
