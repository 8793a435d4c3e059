"""What the models that a command looks at are given to read: a text, as tokens of theirs, or
images.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from jaxtyping import Integer
from torch import Tensor

from ctrans.cli.model_sources import Subject, tokens_of
from ctrans.cli.request import ModelRequest
from ctrans.interop.image_inputs import images_for
from ctrans.interop.opened import Opened
from ctrans.interop.tokens import BYTES, as_numbers, read_ids
from ctrans.model.text import read_text, windows
from solvers import ConfigError


@dataclasses.dataclass(frozen=True, eq=False)
class Text:
    """A text as one row of token ids of that vocabulary, to be cut into sequences; `said` is how it
    became tokens.
    """

    ids: Integer[np.ndarray, " _"]
    vocabulary: int
    said: str
    mask: int | None = None
    opened: Opened | None = None
    words: Callable[[list[int]], list[str]] = as_numbers

    def sequences(self, count: int, length: int, walks: int = 1) -> Tensor:
        """For each of so many walks as many sequences of that many tokens, spread evenly over the
        text. ConfigError for tokens beyond the vocabulary.
        """
        cut = windows(self.ids, walks * count, length)
        lowest, highest = int(cut.min()), int(cut.max())
        if not 0 <= lowest <= highest < self.vocabulary:
            raise ConfigError(
                f"{self.said}: they run from {lowest} to {highest}, and the model's vocabulary from 0 to {self.vocabulary - 1}: give "
                "tokens of this model by --ids FILE"
            )
        return cut

    def pairs(self, count: int, length: int, walks: int = 1) -> tuple[Tensor, Tensor]:
        """Tokens and their targets: the next tokens, or what an imported model was trained to tell
        (`Opened.pairs`).
        """
        longer = self.sequences(count, length + 1, walks)
        return (longer[:, :-1], longer[:, 1:]) if self.opened is None else self.opened.pairs(longer, self.mask)


@dataclasses.dataclass(frozen=True, eq=False)
class InputRows:
    """Images or arrays, or the batch that a function of the user's returned.

    - `take`: gives the first so many of them, or so many spread evenly; `there`: how many there are
    - `said`: where they come from; `holds`: the same with a verb; `unit`: what one of them is
      called
    - `loss`: the name of the model's loss
    - `exact`: whether the user chose how many to read
    - `targets`: for the user's loss
    - `reader`: the model, if rows are token ids without targets
    """

    take: Callable[[int], Tensor]
    there: int
    said: str
    holds: str
    unit: str
    loss: str
    exact: bool
    targets: Tensor | None = None
    reader: Opened | None = None

    def sequences(self, count: int, length: int, walks: int = 1) -> Tensor:
        """So many rows for each walk. If the user chose no number there may be fewer. InputRows of
        token ids have at most that length.

        Raises ConfigError where there are fewer than the user wants, or than walks.
        """
        wanted = walks * count
        if not self.exact:
            wanted = min(wanted, max(1, self.there // walks) * walks)
        if self.there < wanted:
            each = f" ({wanted // walks} to look at, and as many as another text beside them)" if walks > 1 else ""
            most = f", or lower --batch to {self.there // walks}" if self.there >= walks else ""
            units = f"{self.there} {self.unit}{'s' * (self.there != 1)}"
            raise ConfigError(f"{self.holds} {units}, and {wanted} are wanted{each}: give more{most}")
        x = self.take(wanted)
        return x if self.reader is None else x[:, :length]

    def pairs(self, count: int, length: int, walks: int = 1) -> tuple[Tensor, Tensor]:
        """InputRows and their targets. Without targets: those of token ids (`Opened.pairs`), or -1,
        which no loss reads.
        """
        x = self.sequences(count, length, walks)
        if self.targets is not None:
            return x, self.targets[: len(x)]
        if self.reader is None:
            return x, torch.full(x.shape if self.loss == "none" else x.shape[:1], -1)
        if self.loss == "given":  # it may know nothing of targets of -1
            return self.reader.pairs(x)
        return self.reader.pairs(torch.cat([x, torch.full_like(x[:, :1], -1)], 1))  # what follows the last is not known


def read(request: ModelRequest, found: Sequence[Subject]) -> Text | InputRows:
    """The text that the request names, as tokens of those models; or its images, or the batch of
    its example.
    """
    subject = found[0]
    if subject.given is not None:
        return _given(request, subject)
    if subject.vocabulary == 0 or request.images is not None:
        return _pictures(request, found)
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
    return Text(ids, subject.vocabulary, tokeniser.said, tokeniser.mask, subject.opened, tokeniser.words)


def _pictures(request: ModelRequest, found: Sequence[Subject]) -> InputRows:
    opened = found[0].opened
    if opened is None or opened.vocabulary:
        raise ConfigError(f"--images is for a model of images, and {found[0].name} reads token ids: leave it out")
    if request.images is None:
        raise ConfigError(
            f"{opened.config.model} reads no text: give --images PATH, a folder of images or an .npy array, or for --python what it "
            "reads by --example MODULE:FUNCTION"
        )
    others = [name for name in ("file", "text", "ids") if getattr(request, name) is not None]
    if others:
        raise ConfigError(f"--images and --{others[0]} are given, and each is what the model reads: choose one")
    shapes = {each.opened.reads for each in found if each.opened is not None}
    if len(shapes) > 1:
        raise ConfigError(f"the models read images of {len(shapes)} sizes: compare models of one size")
    dtype = next(opened.parameters()).dtype
    images = images_for(request.images, shapes.pop(), dtype, opened.directory)
    holds = f"{str(images.path)!r} holds"
    return InputRows(images.batch, images.there, images.said, holds, "image", opened.loss, "batch" in request.typed)


def _given(request: ModelRequest, subject: Subject) -> Text | InputRows:
    """The example's batch; a text or images that are asked for in its place."""
    assert subject.given is not None, "who asks for it has it"
    assert subject.opened is not None, "an example is for a model that was opened"
    asked = [name for name in ("file", "text", "ids", "images") if getattr(request, name) is not None]
    rows, targets = subject.given
    if asked and targets is not None:
        raise ConfigError(f"--example gives a batch with targets, and --{asked[0]} another: choose one")
    if asked:
        return read(request, [dataclasses.replace(subject, given=None)])
    reader = subject.opened if subject.vocabulary and targets is None else None
    said = f"the batch of {request.example}"
    take, exact = partial(_first, rows), "batch" in request.typed
    return InputRows(take, len(rows), said, f"{said} has", "row", subject.opened.loss, exact, targets, reader)


def _first(rows: Tensor, count: int) -> Tensor:
    return rows[:count]


def _check_alike(one: Subject, other: Subject) -> None:
    """Raises ConfigError unless both can be asked the same: the same tokens, and the same kind of
    prediction of them.
    """
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
class InputSummary:
    """The models that a command has looked at, and how many tokens of which text they read."""

    request: ModelRequest
    found: Sequence[Subject]
    text: Text | InputRows
    tokens: Tensor

    @property
    def words(self) -> str | None:
        """What was recognised in imported models, how they read, and how much they read; None for
        our own models.
        """
        imported = {subject.name: subject.opened.described for subject in self.found if subject.opened is not None}
        if not imported:
            return None
        count, length = len(self.tokens), tokens_of(self.found[0], self.tokens)
        much = f"{count} sequence{'s' * (count > 1)} of {length} tokens{self._cut(self.found[0])}"
        recognised = [words if len(self.found) == 1 else f"{name}: {words}" for name, words in imported.items()]
        read = "Text" if isinstance(self.text, Text) else "Input"
        return "\n".join([*recognised, f"{read}: {self.text.said}; {much}\n"])

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
            "tokens": tokens_of(subject, self.tokens),
        }

    def _cut(self, subject: Subject) -> str:
        """Words for sequences that the user wanted longer than the model can read."""
        longest, asked = subject.longest, self.request.context
        short = longest is not None and longest < asked and "context" in self.request.typed
        return f"; its context is {longest}, and {asked} were asked for" if short else ""
