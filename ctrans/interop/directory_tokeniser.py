"""How text becomes a model's tokens: by the tokenizer in its directory, or byte by byte."""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from ctrans.base.given_files import check_encoding, read_json
from ctrans.interop.subprocess_guard import run_guarded
from ctrans.interop.tokens import BYTES, Ids, Tokeniser
from ctrans.interop.transformers_library import import_transformers, quiet
from ctrans.model.text import VOCABULARY
from solvers import ConfigError

LOGGER = logging.getLogger("ctrans.interop")
COMPLETE = "tokenizer.json"
"""A complete tokenizer as data."""
TOKENIZERS = (
    COMPLETE,
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
    "vocab.json",
    "vocab.txt",
)
"""Files of which a directory with a tokenizer has at least one."""
MERGES = "merges.txt"
"""The file that vocab.json needs next to it."""
SETTINGS = "tokenizer_config.json"
TEXTS = (
    COMPLETE,
    SETTINGS,
    "vocab.json",
    "vocab.txt",
    MERGES,
    "special_tokens_map.json",
    "added_tokens.json",
)
"""Files of text that the library reads for a tokenizer."""
SECONDS = 20
"""Limit of a tokenizer: seconds to build it."""
BYTES_A_SECOND = 100_000
"""Bytes of text for each further second, a tenth of what common tokenizers read."""
MEMORY = 2 << 30
"""Limit of a tokenizer: additional memory."""
MEMORY_A_BYTE = 500
"""Memory for each byte of text."""


def find_tokeniser(directory: Path | None, vocabulary: int) -> Tokeniser:
    """The tokenizer in that directory; without one, bytes as ids 0 .. 255, if the vocabulary is
    large enough.

    A module without a directory and with a smaller vocabulary reads bytes modulo its size. The
    installed library builds the tokenizer from data files only: no code, no pickle, no network.
    Raises ConfigError for a tokenizer that is damaged or names its own code, and for a directory
    without a tokenizer if the vocabulary is smaller than 256.
    """
    no_files: list[str] = []
    if directory is not None:
        no_files = _no_files(directory)
    is_there = directory is not None and any(
        os.path.isfile(directory / name) for name in TOKENIZERS
    )
    reads_bytes_modulo = directory is None and vocabulary > 0
    if not is_there and vocabulary < VOCABULARY and not reads_bytes_modulo:
        why = f"{str(directory)!r} has no tokenizer"
        fix = "give token ids by --ids FILE"
        if no_files:
            why = no_files[0]
            fix = f"restore the file, or {fix}"
        raise ConfigError(
            f"{why}, and its vocabulary of {vocabulary} is too small for bytes (256): {fix}"
        )
    for problem in no_files:
        LOGGER.warning("%s, so it is not read: restore the file", problem)
    if directory is not None and is_there:
        return _from_files(directory)
    if 0 < vocabulary < VOCABULARY:
        return _modulo(vocabulary)
    if directory is None or vocabulary == VOCABULARY:
        return BYTES
    doubt = (
        f"; in its vocabulary of {vocabulary} these ids probably mean another text: give its own"
        " ids by --ids FILE, or put its tokenizer into its directory"
    )
    return dataclasses.replace(BYTES, description=BYTES.description + doubt)


def _no_files(directory: Path) -> list[str]:
    """Which entries of the directory have the name of a tokenizer's file and are none."""
    problems = []
    for name in dict.fromkeys((*TOKENIZERS, *TEXTS)):
        path = directory / name
        if not os.path.lexists(path) or os.path.isfile(path):
            continue
        if os.path.islink(path) and not os.path.exists(path):
            problem = "is a link to a file that does not exist"
        elif os.path.isdir(path):
            problem = "is a directory"
        else:
            problem = "is no regular file"
        problems.append(f"{str(path)!r} {problem}")
    return problems


def _modulo(vocabulary: int) -> Tokeniser:
    """Bytes modulo the size of a vocabulary that is smaller than 256."""
    description = (
        f"{BYTES.description}, modulo {vocabulary}, because its vocabulary has fewer than 256"
        " tokens. The loss of a trained model is meaningless on this text; give its own tokens by"
        " --ids FILE, or a batch by --example MODULE:FUNCTION"
    )

    def encode(text: bytes) -> Ids:
        return np.frombuffer(text, dtype=np.uint8) % np.uint8(vocabulary)

    return Tokeniser(description, encode)


def _from_files(directory: Path) -> Tokeniser:
    """The tokenizer that the library builds from the directory's files."""
    transformers = import_transformers()
    is_complete = os.path.isfile(directory / COMPLETE)
    _check_settings(directory / SETTINGS, may_name_code=is_complete)
    for name in TEXTS:
        if os.path.isfile(directory / name):
            check_encoding(directory / name)
    # A family's own class would rebuild a complete tokenizer by that family's rules.
    if is_complete:
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

        encoded = np.array(_attempt(directory, ids, len(text)), dtype=np.int64)
        if text.strip() and not len(encoded):
            raise _no_tokenizer(directory, "it makes no token of the text")
        return encoded

    def texts(ids: list[int]) -> list[str]:
        def decode() -> list[str]:
            tokenizer = load()
            return [
                tokenizer.convert_tokens_to_string([token])
                for token in tokenizer.convert_ids_to_tokens(ids)
            ]

        decoded: list[str] = _attempt(directory, decode, len(ids))
        return decoded

    size, mask = _attempt(directory, describe)
    return Tokeniser(f"the tokenizer in {str(directory)!r} ({size} tokens)", encode, mask, texts)


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
            raise _no_tokenizer(directory, str(error)) from None


def _no_tokenizer(directory: Path, reason: str) -> ConfigError:
    """The error for a directory whose tokenizer does not work: its file, the reason, what to do."""
    name = next(name for name in TOKENIZERS if os.path.isfile(directory / name))
    if not os.path.getsize(directory / name):
        reason = "it is empty"
    elif name == "vocab.json" and not os.path.isfile(directory / MERGES):
        reason = f"it needs {MERGES} next to it"
    elif name == COMPLETE:
        reason = _fault_of_complete(directory / name) or reason
    elif reason.startswith("Couldn't instantiate"):
        reason = "the library makes no tokenizer of it"
    elif name.endswith(".model") and "tiktoken" in reason:  # the library's last attempt
        reason = "it is no SentencePiece model"
    return ConfigError(
        f"the tokenizer in {str(directory)!r} does not work, {name}: {reason}; restore the file, or"
        " remove it and give token ids by --ids FILE"
    )


def _fault_of_complete(path: Path) -> str:
    """What is wrong with a tokenizer.json, as far as its form shows; "" if it shows nothing."""
    try:
        content = read_json(path)
    except ConfigError:
        return "it is no JSON"
    if not isinstance(content, dict):
        return "it holds no JSON object"
    missing = [key for key in ("model", "added_tokens") if key not in content]
    if missing:
        return f"it lacks {' and '.join(map(repr, missing))}"
    return ""


def _check_settings(path: Path, *, may_name_code: bool) -> None:
    """Raises ConfigError for settings that are damaged, or that name code without which the
    tokenizer cannot be built.
    """
    if not os.path.isfile(path):
        return
    settings = read_json(path)
    if not isinstance(settings, dict):
        problem = "holds no JSON object"
    elif "auto_map" in settings and not may_name_code:
        problem = "names code of its own, which is never run"
    else:
        return
    raise ConfigError(
        f"{str(path)!r} {problem}: save the tokenizer as tokenizer.json alone, or give token ids"
        " by --ids FILE"
    )
