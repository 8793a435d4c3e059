"""Training data: tokens on disk or in memory, a separate validation split, and batches that depend
on the step alone.

There is no state to save: iteration s of a run always has the same sequences, for any number of
processes.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
from jaxtyping import Float, Int, Integer
from torch import Tensor

from ctrans.base.option import COUNT, Count, Range, Seed
from ctrans.interop.tokens import check_unchanged, map_tokens
from solvers import ConfigError

SHARE = 10
"""The last tenth of a text is for validation."""
PIECE = 1 << 24
"""The number of tokens checked at once: 32 MB."""
PLACES = 1024
LENGTH = 1024
"""A sampled fingerprint hashes `PLACES` stretches of `LENGTH` tokens of each split. That is all of
a split of at most `PLACES` `LENGTH` tokens.
"""
WHOLE = "blake2b-256:"
"""The start of a fingerprint of all tokens of long splits. Without it, the fingerprint is sampled.
"""
MOST_IDS = 1 << 24
"""Token ids are below this number. The largest vocabularies have some 10^6."""
COUNTED = 1 << 22
"""The largest number of tokens of each split whose frequencies are counted."""
STRETCHES = 64
"""In so many stretches these tokens lie over the split, if it is longer."""
TRAIN = "train.bin"
VALIDATION = "val.bin"
Tokens = Integer[np.ndarray, " _"]
Index = Annotated[int, Range(0, COUNT.high)]


@dataclasses.dataclass(frozen=True)
class Data:
    """A training and a validation split, and sequences of `context` tokens drawn from them.

    Raises ConfigError if a split is shorter than a sequence and its targets, is no array of
    integers, or has an id below 0 or from `MOST_IDS`.
    """

    train: Tokens
    validation: Tokens
    context: Count
    name: str

    def __post_init__(self) -> None:
        for split, tokens in self._splits.items():
            if len(tokens) <= self.context:
                raise ConfigError(
                    f"{self.name} has {len(tokens)} tokens for {split} and a sequence needs"
                    f" {self.context + 1}: lower context, or give more text"
                )
            if tokens.dtype.kind not in "iu":
                raise ConfigError(
                    f"{self.name} has the {split} token {tokens[0]} of type {tokens.dtype}: give"
                    " whole numbers, such as an array of int64"
                )
            limits = np.iinfo(tokens.dtype)
            if limits.min < 0 or limits.max >= MOST_IDS:
                self.check_vocabulary(MOST_IDS)

    @property
    def _splits(self) -> dict[str, Tokens]:
        return {"training": self.train, "validation": self.validation}

    def batch(
        self,
        step: Index,
        micro: Index,
        *,
        batch: Count,
        seed: Seed,
        rank: Index = 0,
        world: Count = 1,
    ) -> tuple[Int[Tensor, "share context"], Int[Tensor, "share context"]]:
        """The tokens and targets of a micro-batch for this process. Sequences start at floor(u (N -
        n)), u uniform in [0, 1).

        u comes from a counter-based generator (Philox) at (seed; step, micro). The micro-batch does
        not depend on `world`; process `rank` takes its rank-th contiguous part. Raises ConfigError
        if the processes cannot share it evenly.
        """
        share = share_of(batch, world)
        # numpy keeps raw words the same in all versions, but not integers() or random()
        raw_words = np.random.Philox(key=seed, counter=[0, 0, micro, step]).random_raw(batch)
        starts = self._starts((raw_words >> 11) * 2.0**-53)
        return self._windows(self.train, starts[rank * share : (rank + 1) * share])

    def validation_windows(
        self, count: Count
    ) -> tuple[Int[Tensor, "windows context"], Int[Tensor, "windows context"]]:
        """At most `count` sequences of the validation split and their targets, evenly spaced and
        fixed.
        """
        last = len(self.validation) - self.context - 1
        starts = np.unique(np.linspace(0, last, min(count, last + 1)).astype(np.int64))
        return self._windows(self.validation, starts)

    def check_batch(self, sequences: int) -> None:
        """Raises ConfigError if an iteration has more tokens than the training split."""
        if sequences * self.context > len(self.train):
            raise ConfigError(
                f"{sequences} sequences of {self.context} tokens an iteration are more than the"
                f" {len(self.train)} training tokens of {self.name}: lower batch, accumulate or"
                " context, or give more text"
            )

    def check_vocabulary(self, size: int) -> None:
        """Raises ConfigError for a token outside of the vocabulary. Reads all tokens."""
        for split, tokens in self._splits.items():
            for start in range(0, len(tokens), PIECE):
                check_unchanged(tokens)
                highest = int(tokens[start : start + PIECE].max())
                lowest = int(tokens[start : start + PIECE].min())
                if lowest < 0:
                    raise ConfigError(
                        f"{self.name} has token {lowest} in its {split} tokens: give ids from 0"
                    )
                if highest >= size:
                    if highest < MOST_IDS:
                        fix = f"--vocab-size {highest + 1} or more, or other data"
                    else:
                        fix = f"ids below {MOST_IDS}"
                    raise ConfigError(
                        f"{self.name} has token {highest} in its {split} tokens {start} to"
                        f" {min(start + PIECE, len(tokens)) - 1} and the vocabulary ends at"
                        f" {size - 1}: give {fix}"
                    )

    def fingerprint(self) -> str:
        """A hash of all tokens of both splits, by which a resumed run checks its data.

        It reads the data once: 0.8 GB a second on one core, if they are in memory.
        """
        if all(len(tokens) <= PLACES * LENGTH for tokens in self._splits.values()):
            return self._sampled_fingerprint()  # of all tokens, and as earlier versions saved it
        digest = hashlib.blake2b(digest_size=32)
        for tokens in self._splits.values():
            digest.update(len(tokens).to_bytes(8, "little"))
            for start in range(0, len(tokens), PIECE):
                check_unchanged(tokens)
                digest.update(tokens[start : start + PIECE].tobytes())
        return WHOLE + digest.hexdigest()

    def matches(self, fingerprint: str) -> bool:
        """Whether the fingerprint is of these data. One that an earlier version of ctrans saved of
        long data is compared by the tokens that it sampled.
        """
        if fingerprint.startswith(WHOLE):
            return self.fingerprint() == fingerprint
        return self._sampled_fingerprint() == fingerprint

    def _sampled_fingerprint(self) -> str:
        """A hash of the length and of evenly spaced stretches of each split."""
        digest = hashlib.sha256()
        for tokens in self._splits.values():
            digest.update(len(tokens).to_bytes(8, "little"))
            for start in np.linspace(0, max(0, len(tokens) - LENGTH), PLACES).astype(int):
                digest.update(tokens[start : start + LENGTH].tobytes())
        return digest.hexdigest()

    def frequencies_loss(self) -> float:
        """-mean log p(target) in nats per target of the validation split: the loss of a model that
        has learned how often each target comes and nothing else.

        p are the frequencies of the training split, with each count raised by 1. Of each split at
        most `COUNTED` tokens count.
        """
        (_, learned), (_, targets), size = self._counted()
        return float(-np.log(_frequencies(learned, size)[targets]).mean())

    def depthless_loss(self) -> float:
        """-mean log p(target | known) in nats per target of the validation split: the loss of a
        table of what a model without depth knows. That is the current token and, in rows, its
        place.

        p(v | u) = (n_uv + p_v)/(n_u + 1), with the counts n and the frequencies p of the training
        split. Of each split at most `COUNTED` tokens count. It is no bound: a trained model without
        depth may smooth its table better.
        """
        (inputs, learned), (test_inputs, targets), size = self._counted()
        pairs, pair_counts = np.unique(inputs * size + learned, return_counts=True)
        test_pairs = test_inputs * size + targets
        index = np.minimum(np.searchsorted(pairs, test_pairs), len(pairs) - 1)
        seen = np.where(pairs[index] == test_pairs, pair_counts[index], 0)
        input_counts = np.bincount(inputs, minlength=1 + int(test_inputs.max()))[test_inputs]
        smoothed = (seen + _frequencies(learned, size)[targets]) / (input_counts + 1)
        return float(-np.log(smoothed).mean())

    def guess_loss(self) -> float:
        """ln(number of different targets of the training split), in nats: the loss of a guess among
        the answers. Counts as `frequencies_loss` does.
        """
        (_, targets), _, _ = self._counted()
        return math.log(len(np.unique(targets)))

    def floors(self) -> dict[str, float]:
        """The frequencies' and the depthless loss, by their names in results."""
        return {
            "frequencies_loss": self.frequencies_loss(),
            "depthless_loss": self.depthless_loss(),
        }

    def _counted(self) -> tuple[tuple[Tokens, Tokens], tuple[Tokens, Tokens], int]:
        """`_pairs` of a sample of each split, and 1 + the largest target."""
        for tokens in self._splits.values():
            check_unchanged(tokens)
        train = self._pairs(self._sample(self.train).astype(np.int64))
        validation = self._pairs(self._sample(self.validation).astype(np.int64))
        largest = max(int(targets.max()) for _, targets in (train, validation))
        return train, validation, 1 + largest

    def _sample(self, tokens: Tokens) -> Tokens:
        """At most `COUNTED` tokens, in stretches that lie evenly over the split: a long text often
        begins with words that its rest does not have.
        """
        if len(tokens) <= COUNTED:
            return tokens
        length = COUNTED // STRETCHES
        starts = np.linspace(0, len(tokens) - length, STRETCHES).astype(int)
        return np.concatenate([tokens[start : start + length] for start in starts])

    def _pairs(self, tokens: Tokens) -> tuple[Tokens, Tokens]:
        """What a model without depth knows at each target, as a number, and the targets."""
        return tokens[:-1], tokens[1:]

    def _starts(self, u: Float[np.ndarray, " batch"]) -> Integer[np.ndarray, " batch"]:
        """The starts of sequences, for u in [0, 1)."""
        return (u * (len(self.train) - self.context)).astype(np.int64)

    def _windows(
        self, tokens: Tokens, starts: Integer[np.ndarray, " windows"]
    ) -> tuple[Tensor, Tensor]:
        check_unchanged(tokens)
        rows = [tokens[start : start + self.context + 1] for start in starts]
        windows = torch.from_numpy(np.stack(rows).astype(np.int64))
        return windows[:, :-1], windows[:, 1:]


def _frequencies(tokens: Tokens, size: int) -> Float[np.ndarray, " size"]:
    """The share of each id, with each count raised by 1."""
    counts = np.bincount(tokens, minlength=size) + 1
    share: Float[np.ndarray, " size"] = counts / counts.sum()
    return share


def share_of(batch: Count, world: Count) -> int:
    """The number of sequences of a micro-batch for each process. Raises ConfigError if they cannot
    share it evenly.
    """
    share, remainder = divmod(int(batch), int(world))
    if remainder:
        raise ConfigError(
            f"a batch of {batch} sequences cannot be shared by {world} processes: make it a"
            f" multiple of {world}"
        )
    return share


def from_text(text: bytes, context: Count, name: str = "the text") -> Data:
    """The bytes as tokens. The last tenth is for validation, and no training sequence overlaps
    it.
    """
    tokens = np.frombuffer(text, dtype=np.uint8)
    cut = len(tokens) - len(tokens) // SHARE
    return Data(tokens[:cut], tokens[cut:], context, name)


def from_bin(directory: str | Path, context: Count) -> Data:
    """nanoGPT's `train.bin` and `val.bin`, uint16, memory-mapped. Raises ConfigError for a file
    that is missing or invalid.
    """
    train = map_tokens(Path(directory) / TRAIN)
    validation = map_tokens(Path(directory) / VALIDATION)
    return Data(train, validation, context, repr(str(directory)))
