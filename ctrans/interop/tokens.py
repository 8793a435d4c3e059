"""How text becomes a model's tokens: by the tokenizer in its directory, or byte by byte; or token
ids are given.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Integer

from ctrans.base.given_files import cannot_read, check_file, read_array, read_json
from ctrans.interop.subprocess_guard import run_guarded
from ctrans.interop.transformers_library import import_transformers, quiet
from ctrans.model.text import VOCABULARY
from solvers import ConfigError

WHOLE = "tokenizer.json"
"""A complete tokenizer as data."""
TOKENIZERS = (
    WHOLE,
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
    "vocab.json",
    "vocab.txt",
)
"""Files of which a directory with a tokenizer has at least one."""
SETTINGS = "tokenizer_config.json"
Ids = Integer[np.ndarray, " _"]


def as_numbers(ids: list[int]) -> list[str]:
    """Token ids as text."""
    return [f" {i}" for i in ids]


@dataclasses.dataclass(frozen=True)
class Tokeniser:
    """From bytes to token ids. `said` describes it in one line; `mask` is the id of the mask token,
    or None; `words` gives tokens as text.
    """

    said: str
    encode: Callable[[bytes], Ids]
    mask: int | None = None
    words: Callable[[list[int]], list[str]] = as_numbers


BYTES = Tokeniser(
    "bytes as token ids",
    lambda text: np.frombuffer(text, dtype=np.uint8),
    words=lambda ids: [
        chr(i) if i < 128 else f"\\x{i:02x}" for i in ids
    ],  # higher bytes may be parts of a character
)
"""The tokenizer of seeded models, and of models without one."""


def find_tokeniser(directory: Path | None, vocabulary: int) -> Tokeniser:
    """The tokenizer in that directory; without one, bytes as ids 0 .. 255, if the vocabulary is
    large enough.

    A module without a directory and with a smaller vocabulary reads bytes modulo its size. The
    installed library builds the tokenizer from data files only: no code, no pickle, no network.
    Raises ConfigError for a tokenizer that is damaged or names its own code, and for a directory
    without a tokenizer if the vocabulary is smaller than 256.
    """
    if directory is not None and any(os.path.isfile(directory / name) for name in TOKENIZERS):
        return _from_files(directory)
    if directory is None and 0 < vocabulary < VOCABULARY:
        said = (
            f"{BYTES.said}, modulo {vocabulary}, because its vocabulary has fewer than 256 tokens."
            " The loss of a trained model is meaningless on this text; give its own tokens by"
            " --ids FILE, or a batch by --example MODULE:FUNCTION"
        )
        return Tokeniser(
            said, lambda text: np.frombuffer(text, dtype=np.uint8) % np.uint8(vocabulary)
        )
    if vocabulary < VOCABULARY:
        where = repr(str(directory))
        raise ConfigError(
            f"{where} has no tokenizer, and its vocabulary of {vocabulary} is too small for bytes"
            " (256): give token ids by --ids FILE"
        )
    if directory is None or vocabulary == VOCABULARY:
        return BYTES
    doubt = (
        f"; in its vocabulary of {vocabulary} these ids probably mean another text: give its own"
        " ids by --ids FILE, or put its tokenizer into its directory"
    )
    return dataclasses.replace(BYTES, said=BYTES.said + doubt)


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


def map_tokens(path: Path) -> Ids:
    """The token ids of a file of nanoGPT, memory-mapped. Raises ConfigError for an invalid file."""
    size = check_file(path)
    if size % 2 or not size:
        raise ConfigError(
            f"{str(path)!r} has {size} bytes: give a file of tokens, which take two bytes each"
        )
    try:
        return np.memmap(path, dtype=np.dtype("<u2"), mode="r")
    except OSError as error:
        raise cannot_read(path, error) from None


IDS: dict[str, Callable[[Path], Ids]] = {".bin": map_tokens, ".npy": _read_ids}
"""Readers of files of token ids, by suffix."""


def _from_files(directory: Path) -> Tokeniser:
    transformers = import_transformers()
    whole = os.path.isfile(directory / WHOLE)
    _check_settings(directory / SETTINGS, may_name_code=whole)
    # A family's own class would rebuild a complete tokenizer by that family's rules.
    if whole:
        family = transformers.PreTrainedTokenizerFast
    else:
        family = transformers.AutoTokenizer

    def load() -> Any:
        return family.from_pretrained(directory, local_files_only=True, trust_remote_code=False)

    def describe() -> list[int | None]:
        tokenizer = load()
        return [len(tokenizer), tokenizer.mask_token_id]

    def encode(text: bytes) -> Ids:
        try:
            decoded = text.decode()
        except UnicodeDecodeError as error:
            where = f"byte {error.start} is no UTF-8"
            raise ConfigError(
                f"this model reads text, but {where}: give text, or token ids by --ids"
            ) from None

        def ids() -> Any:
            return load()(decoded, add_special_tokens=False)["input_ids"]

        return np.array(_attempt(directory, ids, len(text)), dtype=np.int64)

    def words(found: list[int]) -> list[str]:
        def texts() -> list[str]:
            tokenizer = load()
            return [
                tokenizer.convert_tokens_to_string([each])
                for each in tokenizer.convert_ids_to_tokens(found)
            ]

        made: list[str] = _attempt(directory, texts, len(found))
        return made

    size, mask = _attempt(directory, describe)
    return Tokeniser(f"the tokenizer in {str(directory)!r} ({size} tokens)", encode, mask, words)


SECONDS, BYTES_A_SECOND = 20, 100_000
"""Limits for a tokenizer: seconds to build it, and bytes of text for each further second, a tenth
of what common tokenizers read.
"""
MEMORY, MEMORY_A_BYTE = 2 << 30, 500
"""Limits for a tokenizer: additional memory, and memory for each byte of text."""


def _attempt(directory: Path, act: Callable[[], Any], length: int = 0) -> Any:
    """The result of `act`, without output of the library. Raises ConfigError in one line for any of
    its errors.

    A tokenizer's rules can take unlimited time and memory, or end the process, so it runs in its
    own process.
    """
    with quiet():
        try:
            return run_guarded(
                act,
                seconds=SECONDS + length // BYTES_A_SECOND,
                memory=MEMORY + MEMORY_A_BYTE * length,
            )
        except ConfigError as error:
            raise ConfigError(
                f"the tokenizer in {str(directory)!r} does not work: {error}"
            ) from None


def _check_settings(path: Path, *, may_name_code: bool) -> None:
    """Raises ConfigError for settings that are damaged, or that name code without which the
    tokenizer cannot be built.
    """
    if not os.path.isfile(path):
        return
    settings = read_json(path)
    if not isinstance(settings, dict) or ("auto_map" in settings and not may_name_code):
        if isinstance(settings, dict):
            what = "names code of its own, which is never run"
        else:
            what = "holds no JSON object"
        raise ConfigError(
            f"{str(path)!r} {what}: save the tokenizer as tokenizer.json alone, or give token ids"
            " by --ids FILE"
        )
