"""What the models that a command looks at are given to read: a text, as tokens of theirs."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Integer
from torch import Tensor

from ctrans.cli.request import ModelRequest
from ctrans.cli.subjects import Subject
from ctrans.depth import check_count
from ctrans.interop.open_model import Opened
from ctrans.interop.tokens import BYTES, read_ids
from ctrans.model.text import read_text, windows
from solvers import ConfigError


@dataclasses.dataclass(frozen=True, eq=False)
class Text:
    """A text as one row of token ids of that vocabulary, to be cut into sequences; `said` is how it became tokens."""

    ids: Integer[np.ndarray, " _"]
    vocabulary: int
    said: str
    mask: int | None = None
    opened: Opened | None = None

    def sequences(self, count: int, length: int) -> Tensor:
        """So many sequences of that many tokens, spread evenly over the text. ConfigError for tokens beyond the vocabulary."""
        cut = windows(self.ids, check_count("batch", count), length)
        lowest, highest = int(cut.min()), int(cut.max())
        if not 0 <= lowest <= highest < self.vocabulary:
            raise ConfigError(
                f"{self.said}: they run from {lowest} to {highest}, and the model's vocabulary from 0 to {self.vocabulary - 1}: give "
                "tokens of this model by --ids FILE"
            )
        return cut

    def pairs(self, count: int, length: int) -> tuple[Tensor, Tensor]:
        """Tokens and their targets: the next tokens, or what an imported model was trained to tell (`Opened.pairs`)."""
        longer = self.sequences(count, length + 1)
        return (longer[:, :-1], longer[:, 1:]) if self.opened is None else self.opened.pairs(longer, self.mask)


def read(request: ModelRequest, found: Sequence[Subject]) -> Text:
    """The text that the request names, as tokens of those models."""
    subject = found[0]
    for other in found[1:]:
        _check_alike(subject, other)
    if request.ids is not None:
        if request.file is not None or request.text is not None:
            raise ConfigError("--ids gives token ids, and --file or --text a text: choose one")
        return Text(read_ids(request.ids), subject.vocabulary, f"token ids of {request.ids}", opened=subject.opened)
    tokeniser = BYTES if subject.opened is None else subject.opened.tokeniser()
    words = read_text(request.file, request.text)
    ids = tokeniser.encode(words)
    for other in found[1:]:
        own = tokeniser if other.opened is None else other.opened.tokeniser()
        if not np.array_equal(own.encode(words), ids):
            raise ConfigError(
                f"{subject.name} and {other.name} make other tokens of the text, and models are compared on the same ones: give "
                "token ids by --ids FILE"
            )
    return Text(ids, subject.vocabulary, tokeniser.said, tokeniser.mask, subject.opened)


def _check_alike(one: Subject, other: Subject) -> None:
    """Raises ConfigError unless both can be asked the same: the same tokens, and the same kind of prediction of them."""
    if other.vocabulary != one.vocabulary:
        raise ConfigError(
            f"{one.name} has {one.vocabulary} tokens and {other.name} {other.vocabulary}, and models are compared on the same tokens: "
            "compare models of one vocabulary"
        )
    tasks = [(True, True) if each.opened is None else (each.opened.causal, each.opened.predicts) for each in (one, other)]
    if tasks[0] != tasks[1]:
        words = ["predicts the next token" if task == (True, True) else "does not" for task in tasks]
        if words[0] == words[1]:
            words = ["has a head of logits" if predicts else "has none" for _, predicts in tasks]
        raise ConfigError(f"{one.name} {words[0]} and {other.name} {words[1]}: compare models that were trained alike")


@dataclasses.dataclass(frozen=True, eq=False)
class LookedAt:
    """The models that a command has looked at, and how many tokens of which text they read."""

    request: ModelRequest
    found: Sequence[Subject]
    text: Text
    tokens: Tensor

    @property
    def words(self) -> str | None:
        """What was recognised in imported models, how they read, and how much they read; None for our own models."""
        imported = {subject.name: subject.opened.described for subject in self.found if subject.opened is not None}
        if not imported:
            return None
        count, length = self.tokens.shape
        much = f"{count} sequence{'s' * (count > 1)} of {length} tokens{self._cut(self.found[0])}"
        recognised = [words if len(self.found) == 1 else f"{name}: {words}" for name, words in imported.items()]
        return "\n".join([*recognised, f"Text: {self.text.said}; {much}\n"])

    @property
    def summary(self) -> dict[str, Any] | None:
        """The same for JSON; of several models, by name."""
        if any(subject.label is not None for subject in self.found):
            return {"several": {subject.name: self._of(subject) for subject in self.found}}
        return self._of(self.found[0])

    def _of(self, subject: Subject) -> dict[str, Any] | None:
        opened = subject.opened
        if opened is None:
            return None
        return {
            "described": opened.described,
            "architecture": opened.model.config,
            "causal": opened.causal,
            "vocabulary": opened.vocabulary,
            "text": self.text.said,
            "sequences": self.tokens.shape[0],
            "tokens": self.tokens.shape[1],
        }

    def _cut(self, subject: Subject) -> str:
        """Words for sequences that the user wanted longer than the model can read."""
        longest, asked = subject.longest, self.request.context
        short = longest is not None and longest < asked and "context" in self.request.typed
        return f"; its context is {longest}, and {asked} were asked for" if short else ""
