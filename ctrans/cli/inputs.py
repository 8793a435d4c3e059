"""What the models that a command looks at are given to read: a text, as tokens of theirs, or images."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Integer
from torch import Tensor

from ctrans.cli.model_sources import Subject, tokens_of
from ctrans.cli.request import ModelRequest
from ctrans.depth import check_count
from ctrans.interop.image_inputs import Images, images_for
from ctrans.interop.opened import Opened
from ctrans.interop.tokens import BYTES, as_numbers, read_ids
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
    words: Callable[[list[int]], list[str]] = as_numbers

    def sequences(self, count: int, length: int, walks: int = 1) -> Tensor:
        """For each of so many walks as many sequences of that many tokens, spread evenly over the text. ConfigError for tokens beyond the
        vocabulary.
        """
        cut = windows(self.ids, walks * check_count("batch", count), length)
        lowest, highest = int(cut.min()), int(cut.max())
        if not 0 <= lowest <= highest < self.vocabulary:
            raise ConfigError(
                f"{self.said}: they run from {lowest} to {highest}, and the model's vocabulary from 0 to {self.vocabulary - 1}: give "
                "tokens of this model by --ids FILE"
            )
        return cut

    def pairs(self, count: int, length: int, walks: int = 1) -> tuple[Tensor, Tensor]:
        """Tokens and their targets: the next tokens, or what an imported model was trained to tell (`Opened.pairs`)."""
        longer = self.sequences(count, length + 1, walks)
        return (longer[:, :-1], longer[:, 1:]) if self.opened is None else self.opened.pairs(longer, self.mask)


@dataclasses.dataclass(frozen=True, eq=False)
class Pictures:
    """The same of images, or of other arrays, of which there are no targets. `exact` is whether the user said how many."""

    images: Images
    loss: str
    exact: bool

    @property
    def said(self) -> str:
        return self.images.said

    def sequences(self, count: int, length: int, walks: int = 1) -> Tensor:
        """So many images, or where nobody said how many as many as there are; their number of tokens is the model's."""
        return self.images.batch(
            _as_many(count, walks, self.images.there, self.exact, f"{str(self.images.path)!r} holds", "image")
        )

    def pairs(self, count: int, length: int, walks: int = 1) -> tuple[Tensor, Tensor]:
        """Images, and targets that no loss looks at: -1 for each number where there is to be no loss."""
        x = self.sequences(count, length, walks)
        return x, torch.full(x.shape if self.loss == "none" else x.shape[:1], -1)


@dataclasses.dataclass(frozen=True, eq=False)
class Batch:
    """What a function of the user's gave: rows of a tensor, and targets for the user's loss, None where there are none.

    `reader` is the model that reads rows of token ids, None where they are something else.
    """

    rows: Tensor
    targets: Tensor | None
    said: str
    loss: str
    exact: bool
    reader: Opened | None = None

    def sequences(self, count: int, length: int, walks: int = 1) -> Tensor:
        """So many of the first rows, or where nobody said how many as many as there are; of token ids no more than that length."""
        x = self.rows[: _as_many(count, walks, len(self.rows), self.exact, f"{self.said} has", "row")]
        return x if self.reader is None else x[:, :length]

    def pairs(self, count: int, length: int, walks: int = 1) -> tuple[Tensor, Tensor]:
        """Rows and their targets; where there are none, those of token ids (`Opened.pairs`), or some that no loss looks at."""
        x = self.sequences(count, length, walks)
        if self.targets is None and self.reader is not None:
            if self.loss == "given":  # it may know nothing of targets of -1
                return self.reader.pairs(x)
            return self.reader.pairs(torch.cat([x, torch.full_like(x[:, :1], -1)], 1))  # what follows the last is not known
        if self.targets is not None:
            return x, self.targets[: len(x)]
        return x, torch.full(x.shape if self.loss == "none" else x.shape[:1], -1)


def _as_many(count: int, walks: int, there: int, exact: bool, holds: str, what: str) -> int:
    """How many of what is there are read in so many walks. Raises ConfigError for too few, of what the user wants or of one a walk."""
    wanted = walks * check_count("batch", count)
    if not exact:
        wanted = min(wanted, max(1, there // walks) * walks)
    if there < wanted:
        each = f" ({wanted // walks} to look at, and as many as another text beside them)" if walks > 1 else ""
        most = f", or lower --batch to {there // walks}" if there >= walks else ""
        raise ConfigError(f"{holds} {there} {what}{'s' * (there != 1)}, and {wanted} are wanted{each}: give more{most}")
    return wanted


def read(request: ModelRequest, found: Sequence[Subject]) -> Text | Pictures | Batch:
    """The text that the request names, as tokens of those models; or its images, or the batch of its example."""
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


def _pictures(request: ModelRequest, found: Sequence[Subject]) -> Pictures:
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
    return Pictures(images_for(request.images, shapes.pop(), dtype, opened.directory), opened.loss, "batch" in request.typed)


def _given(request: ModelRequest, subject: Subject) -> Text | Pictures | Batch:
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
    return Batch(rows, targets, f"the batch of {request.example}", subject.opened.loss, "batch" in request.typed, reader)


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
class InputSummary:
    """The models that a command has looked at, and how many tokens of which text they read."""

    request: ModelRequest
    found: Sequence[Subject]
    text: Text | Pictures | Batch
    tokens: Tensor

    @property
    def words(self) -> str | None:
        """What was recognised in imported models, how they read, and how much they read; None for our own models."""
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
