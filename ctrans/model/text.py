"""Text as tokens: bytes, with a vocabulary of 256. Any file works, and nothing is downloaded."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from jaxtyping import Integer

from ctrans.base.given_files import read_file
from ctrans.base.memory import check_fits
from ctrans.base.shapes import TokenBatch
from solvers import ConfigError, shown

VOCABULARY = 256
WORK = 1000
"""The least memory in bytes that a computation needs for each token."""


def default_text() -> bytes:
    """The language documentation that comes with CPython (`pydoc_data.topics`): 450 to 700 kB of
    English prose.
    """
    try:
        from pydoc_data.topics import topics
    except ImportError:
        raise ConfigError(
            "this Python has no pydoc_data, the default text: give a text by --file PATH or --text"
            " '...'"
        ) from None
    return "\n\n".join(topics[key] for key in sorted(topics)).encode()


def read_text(file: str | Path | None = None, text: str | None = None) -> bytes:
    """The bytes of a file, of a text in UTF-8, or of the default text. Raises ConfigError for a
    file that cannot be read.
    """
    if file is not None and text is not None:
        raise ConfigError("both a file and a text are given: choose one of --file and --text")
    if text is not None:
        try:
            return text.encode(errors="surrogateescape")
        except UnicodeEncodeError as error:
            raise ConfigError(
                f"the text has half a character at place {error.start}: give text, or bytes by"
                " --file"
            ) from None
    if file is None:
        return default_text()
    return read_file(Path(file))


def to_tokens(data: bytes, batch: int, length: int) -> TokenBatch:
    """`batch` windows of `length` tokens each, spread evenly over the data: (batch, length).

    A text shorter than `length` gives shorter windows. Raises ConfigError for fewer than two
    tokens, which have no next token.
    """
    return windows(np.frombuffer(data, dtype=np.uint8), batch, length)


def windows(ids: Integer[np.ndarray, " _"], batch: int, length: int) -> TokenBatch:
    """The same for token ids. Raises ConfigError for numbers that are no ids of 64 bits."""
    if ids.dtype.kind not in "iu":
        raise ConfigError(
            f"the token ids are numbers of {ids.dtype}, such as {shown(ids.flat[0].item())}: give"
            " whole numbers"
        )
    if ids.dtype == np.uint64 and len(ids) and ids.max() > np.iinfo(np.int64).max:
        raise ConfigError(f"the token id {ids.max()} is too large: give ids of a vocabulary")
    if len(ids) < 2:
        raise ConfigError(f"the text has {len(ids)} tokens: give at least two tokens of text")
    length = min(length, len(ids))
    sequences = f"{batch:,} sequences of {length:,} tokens take"
    check_fits(WORK * batch * length, "lower --batch or --context", sequences)
    starts = np.linspace(0, len(ids) - length, batch).astype(int)
    rows = np.stack([ids[start : start + length] for start in starts])
    return torch.from_numpy(rows.astype(np.int64))
