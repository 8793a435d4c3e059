"""Training data: tokens on disk or in memory, an honest validation split, and batches that are a
function of the step.

There is no state to save: iteration s of a run always sees the same sequences, whatever happened
before it and however many processes share them.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float, Int, Integer
from torch import Tensor

from ctrans.given_files import cannot_read, check_file
from ctrans.model.text import read_text
from solvers import ConfigError
from solvers.errors import look_up

SHARE = 10
"""The last tenth of a text is for validation."""
PIECE = 1 << 24
"""Tokens looked at together when a whole file is checked: 32 MB."""
PLACES, LENGTH = 1024, 1024
"""How many stretches of how many tokens the fingerprint of a split looks at: all of it up to a
million.
"""
COUNTED = 1 << 22
"""Tokens of each split whose frequencies are counted at most, from its beginning."""
TRAIN, VALIDATION = "train.bin", "val.bin"
Tokens = Integer[np.ndarray, " _"]


@dataclasses.dataclass(frozen=True)
class Data:
    """Two token sequences that do not overlap, and sequences of `context` tokens drawn from them.

    Raises ConfigError where one of them is shorter than a sequence and its targets.
    """

    train: Tokens
    validation: Tokens
    context: int
    name: str

    def __post_init__(self) -> None:
        for what, tokens in (("training", self.train), ("validation", self.validation)):
            if len(tokens) <= self.context:
                raise ConfigError(
                    f"{self.name} has {len(tokens)} tokens for {what} and a sequence needs {self.context + 1}: "
                    "lower context, or give more text"
                )

    def batch(
        self, step: int, micro: int, *, batch: int, seed: int, rank: int = 0, world: int = 1
    ) -> tuple[Int[Tensor, "share context"], Int[Tensor, "share context"]]:
        """This process's share of a micro-batch, tokens and their targets: starts floor(u (N - n)),
        u uniform in [0, 1).

        u comes from a counter-based generator (Philox) at (seed; step, micro). The micro-batch does
        not depend on `world`; process `rank` takes its rank-th contiguous part. Raises ConfigError
        where the processes cannot share it evenly.
        """
        share = share_of(batch, world)
        # raw words, since numpy promises the same ones in every version, and not the same
        # integers() or random()
        words = np.random.Philox(key=seed, counter=[0, 0, micro, step]).random_raw(batch)
        starts = self._starts((words >> 11) * 2.0**-53)
        return self._windows(self.train, starts[rank * share : (rank + 1) * share])

    def validation_windows(self, count: int) -> tuple[Int[Tensor, "windows context"], Int[Tensor, "windows context"]]:
        """At most `count` sequences of the validation split and their targets, evenly spaced,
        always the same.
        """
        last = len(self.validation) - self.context - 1
        return self._windows(self.validation, np.unique(np.linspace(0, last, min(count, last + 1)).astype(np.int64)))

    def check_batch(self, sequences: int) -> None:
        """Raises ConfigError where an iteration would take more tokens than there are."""
        if sequences * self.context > len(self.train):
            raise ConfigError(
                f"{sequences} sequences of {self.context} tokens an iteration are more than the {len(self.train)} training tokens "
                f"of {self.name}: lower batch, accumulate or context, or give more text"
            )

    def check_vocabulary(self, size: int) -> None:
        """Raises ConfigError for a token beyond the vocabulary. Reads all tokens, a piece at a
        time.
        """
        for what, tokens in (("training", self.train), ("validation", self.validation)):
            for start in range(0, len(tokens), PIECE):
                highest = int(tokens[start : start + PIECE].max())
                if highest >= size:
                    raise ConfigError(
                        f"{self.name} has token {highest} in its {what} tokens {start} to {min(start + PIECE, len(tokens)) - 1} "
                        f"and the vocabulary ends at {size - 1}: give --vocab-size {highest + 1} or more, or other data"
                    )

    def fingerprint(self) -> str:
        """A hash of both lengths and of evenly spaced stretches of each split: whether a resumed
        run sees the data it was started with.
        """
        digest = hashlib.sha256()
        for tokens in (self.train, self.validation):
            digest.update(len(tokens).to_bytes(8, "little"))
            for start in np.linspace(0, max(0, len(tokens) - LENGTH), PLACES).astype(int):
                digest.update(tokens[start : start + LENGTH].tobytes())
        return digest.hexdigest()

    def frequencies_loss(self) -> float:
        """-sum_v q_v log p_v in nats a token: where a model ends that has learned how often tokens
        come and nothing else.

        p are the training split's frequencies, with one more of each token so that none is 0, q the
        validation split's; of each split its first `COUNTED` tokens.
        """
        heads = [tokens[:COUNTED] for tokens in (self.train, self.validation)]
        size = 1 + max(int(tokens.max()) for tokens in heads)
        train, validation = (np.bincount(tokens, minlength=size) for tokens in heads)
        p, q = (train + 1) / (train + 1).sum(), validation / validation.sum()
        return float(-(q * np.log(p)).sum())

    def _starts(self, u: Float[np.ndarray, " batch"]) -> Integer[np.ndarray, " batch"]:
        """Where sequences begin, for numbers in [0, 1)."""
        return (u * (len(self.train) - self.context)).astype(np.int64)

    def _windows(self, tokens: Tokens, starts: Integer[np.ndarray, " windows"]) -> tuple[Tensor, Tensor]:
        windows = torch.from_numpy(np.stack([tokens[start : start + self.context + 1] for start in starts]).astype(np.int64))
        return windows[:, :-1], windows[:, 1:]


def share_of(batch: int, world: int) -> int:
    """How many of a micro-batch's sequences each process takes; ConfigError where they cannot share
    it evenly.
    """
    share, rest = divmod(batch, world)
    if rest:
        raise ConfigError(f"a batch of {batch} sequences cannot be shared by {world} processes: make it a multiple of {world}")
    return share


def from_text(text: bytes, context: int, name: str = "the text") -> Data:
    """The bytes as tokens; the last tenth is kept for validation and no training sequence reaches
    into it.
    """
    tokens = np.frombuffer(text, dtype=np.uint8)
    cut = len(tokens) - len(tokens) // SHARE
    return Data(tokens[:cut], tokens[cut:], context, name)


def from_bin(directory: str | Path, context: int) -> Data:
    """nanoGPT's `train.bin` and `val.bin`, uint16, mapped and not read. ConfigError naming the file
    and what is wrong with it.
    """
    train, validation = (map_tokens(Path(directory) / name) for name in (TRAIN, VALIDATION))
    return Data(train, validation, context, repr(str(directory)))


Source = Mapping[str, str | None]
"""Absolute paths of data, so that a resumed run finds them from any directory: see `read_source`.
Empty where a program made them.
"""
Given = Data | bytes | str | Path | Source | None
"""How data may be given: as tokens; a text's bytes; the path of a text or of a directory with
nanoGPT's files; None for the text that Python ships; or as a source.
"""


def source_of(given: Given, context: int) -> tuple[dict[str, str | None], Data]:
    """Where the data come from, and the data. Raises ConfigError where they cannot be read."""
    if isinstance(given, Mapping):
        return dict(given), read_source(given, context)
    if isinstance(given, Data):
        return {}, given
    if isinstance(given, bytes):
        return {}, from_text(given, context)
    path = None if given is None else Path(given).absolute()
    is_text = path is None or not os.path.isdir(path)
    source = {"file": str(path) if path and is_text else None, "bin": None if is_text else str(path)}
    return source, read_source(source, context)


def read_source(source: Source, context: int) -> Data:
    """The task's own; nanoGPT's files in the directory `bin`, or the bytes of `file`, or of the
    default text. Errors as they raise.
    """
    if source.get("task") is not None:
        from ctrans.training.tasks import TASKS

        made = look_up("task", str(source["task"]), TASKS)
        return made.data()
    if not source:
        raise ConfigError("the run was given its data by a program: give them again, --file or --bin if they are in files")
    if source["bin"] is not None:
        return from_bin(source["bin"], context)
    return from_text(read_text(source["file"]), context, "the text" if source["file"] is None else repr(source["file"]))


def map_tokens(path: Path) -> Tokens:
    """The token ids of one such file. ConfigError naming what is wrong with it."""
    size = check_file(path)
    if size % 2 or not size:
        raise ConfigError(f"{str(path)!r} has {size} bytes: tokens of two bytes each make an even number, and at least two")
    try:
        return np.memmap(path, dtype=np.dtype("<u2"), mode="r")
    except OSError as error:
        raise cannot_read(path, error) from None
