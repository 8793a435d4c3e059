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
    if request.ids is not None:
        if request.file is not None or request.text is not None:
            raise ConfigError("--ids gives token ids, and --file or --text a text: choose one")
        return Text(read_ids(request.ids), subject.vocabulary, f"token ids of {request.ids}", opened=subject.opened)
    tokeniser = BYTES if subject.opened is None else subject.opened.tokeniser()
    ids = tokeniser.encode(read_text(request.file, request.text))
    return Text(ids, subject.vocabulary, tokeniser.said, tokeniser.mask, subject.opened)


@dataclasses.dataclass(frozen=True, eq=False)
class LookedAt:
    """The models that a command has looked at, and how many tokens of which text they read."""

    request: ModelRequest
    found: Sequence[Subject]
    text: Text
    tokens: Tensor

    @property
    def words(self) -> str | None:
        """What was recognised in an imported model, how it reads, and how much it read; None for our own models."""
        subject = self.found[0]
        if subject.opened is None:
            return None
        count, length = self.tokens.shape
        much = f"{count} sequence{'s' * (count > 1)} of {length} tokens{self._cut(subject)}"
        return f"{subject.opened.described}\nText: {self.text.said}; {much}\n"

    @property
    def summary(self) -> dict[str, Any] | None:
        """The same for JSON."""
        opened = self.found[0].opened
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
