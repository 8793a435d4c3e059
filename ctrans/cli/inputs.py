"""What the models of a command read: a text as tokens, images, or the user's own batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Integer
from torch import Tensor

from ctrans import interop
from ctrans.cli.model_sources import ModelSource, needs_images, settle_threads, tokens_of
from ctrans.cli.request import ModelRequest, get_dtype
from ctrans.interop.tokens import BYTES, as_numbers, read_ids
from ctrans.model.config import GPTConfig
from ctrans.model.size import check_buildable
from ctrans.model.text import read_text, windows
from ctrans.training.processes import get_device
from solvers import ConfigError


@dataclass(frozen=True, eq=False)
class Text:
    """A text as one row of token ids of a vocabulary. `said` names its tokeniser."""

    ids: Integer[np.ndarray, " _"]
    vocabulary: int
    said: str
    mask: int | None = None
    opened: interop.Opened | None = None
    words: Callable[[list[int]], list[str]] = as_numbers

    def sequences(self, count: int, length: int, walks: int = 1) -> Tensor:
        """walks x count sequences of `length` tokens, spread evenly over the text: (walks count,
        length). Raises ConfigError for tokens outside the vocabulary.
        """
        cut = windows(self.ids, walks * count, length)
        lowest = int(cut.min())
        highest = int(cut.max())
        if not 0 <= lowest <= highest < self.vocabulary:
            raise ConfigError(
                f"{self.said}: they run from {lowest} to {highest}, and the model's vocabulary from"
                f" 0 to {self.vocabulary - 1}: give tokens of this model by --ids FILE"
            )
        return cut

    def pairs(self, count: int, length: int, walks: int = 1) -> tuple[Tensor, Tensor]:
        """Tokens and targets: the next tokens, or an imported model's own (`Opened.pairs`)."""
        longer = self.sequences(count, length + 1, walks)
        if self.opened is None:
            return (longer[:, :-1], longer[:, 1:])
        return self.opened.pairs(longer, self.mask)


@dataclass(frozen=True, eq=False)
class InputRows:
    """Images or arrays, or the batch that the user's function returned.

    - `take`: gives so many of them
    - `there`: how many there are
    - `said`, `holds`: where they come from, alone and with a verb
    - `unit`: the word for one of them
    - `loss`: the name of the model's loss
    - `exact`: whether the user chose the number of rows
    - `targets`: targets for the user's loss
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
    reader: interop.Opened | None = None

    def sequences(self, count: int, length: int, walks: int = 1) -> Tensor:
        """count rows for each walk, or fewer if the user chose no number. Token ids are cut to
        `length`.

        Raises ConfigError if there are fewer rows than the user wants, or than walks.
        """
        wanted = walks * count
        if not self.exact:
            wanted = min(wanted, max(1, self.there // walks) * walks)
        if self.there < wanted:
            if walks > 1:
                each = f" ({wanted // walks} for the model, and as many for comparison)"
            else:
                each = ""
            if self.there >= walks:
                most = f", or lower --batch to {self.there // walks}"
            else:
                most = ""
            units = f"{self.there} {self.unit}{'s' * (self.there != 1)}"
            raise ConfigError(
                f"{self.holds} {units}, and {wanted} are wanted{each}: give more{most}"
            )
        x = self.take(wanted)
        if self.reader is None:
            return x
        return x[:, :length]

    def pairs(self, count: int, length: int, walks: int = 1) -> tuple[Tensor, Tensor]:
        """Rows and targets. Without the user's targets: those of token ids (`Opened.pairs`), or -1,
        which no loss reads.
        """
        x = self.sequences(count, length, walks)
        if self.targets is not None:
            return x, self.targets[: len(x)]
        if self.reader is None:
            return x, torch.full(x.shape if self.loss == "none" else x.shape[:1], -1)
        if self.loss == "given":  # the user's loss may not accept targets of -1
            return self.reader.pairs(x)
        return self.reader.pairs(
            torch.cat([x, torch.full_like(x[:, :1], -1)], 1)
        )  # the last token has no target


def read_inputs(request: ModelRequest, found: Sequence[ModelSource]) -> Text | InputRows:
    """The request's text as tokens of these models, its images, or the batch of its example.

    Raises ConfigError for inputs that contradict each other, and for models that cannot read the
    same input.
    """
    first = found[0]
    if first.given is not None:
        return _given(request, first, *first.given)
    if first.vocabulary == 0 or request.images is not None:
        return _pictures(request, found)
    for other in found[1:]:
        _check_alike(first, other)
    if request.ids is not None:
        if request.file is not None or request.text is not None:
            raise ConfigError("--ids gives token ids, and --file or --text a text: choose one")
        return Text(
            read_ids(request.ids),
            first.vocabulary,
            f"token ids of {request.ids}",
            opened=first.opened,
        )
    words = read_text(request.file, request.text)
    tokenisers = [BYTES if source.opened is None else source.opened.tokeniser() for source in found]
    ids = tokenisers[0].encode(words)
    for other, tokeniser in zip(found[1:], tokenisers[1:], strict=True):
        if not np.array_equal(tokeniser.encode(words), ids):
            raise ConfigError(
                f"{first.name} and {other.name} make other tokens of the text, and ctrans compares"
                " models on the same tokens: give token ids by --ids FILE"
            )
    return Text(
        ids,
        first.vocabulary,
        tokenisers[0].description,
        tokenisers[0].mask,
        first.opened,
        tokenisers[0].texts,
    )


def _asked(request: ModelRequest, *names: str) -> list[str]:
    return [name for name in names if getattr(request, name) is not None]


def _pictures(request: ModelRequest, found: Sequence[ModelSource]) -> InputRows:
    opened = found[0].opened
    if opened is None or opened.vocabulary:
        raise ConfigError(
            f"--images is for a model of images, and {found[0].name} reads token ids: leave it out"
        )
    if request.images is None:
        raise needs_images(opened.config.model)
    if others := _asked(request, "file", "text", "ids"):
        raise ConfigError(
            f"--images and --{others[0]} are given, and the model reads one of them: choose one"
        )
    shapes = {each.opened.reads for each in found if each.opened is not None}
    if len(shapes) > 1:
        raise ConfigError(
            f"the models read images of {len(shapes)} sizes: compare models of one size"
        )
    from ctrans.interop.image_inputs import images_for  # here: few models read images

    dtype = next(opened.parameters()).dtype
    images = images_for(request.images, shapes.pop(), dtype, opened.directory)
    holds = f"{str(images.path)!r} holds"
    return InputRows(
        images.batch,
        images.count,
        images.description,
        holds,
        "image",
        opened.loss,
        "batch" in request.typed,
    )


def _given(
    request: ModelRequest, source: ModelSource, rows: Tensor, targets: Tensor | None
) -> Text | InputRows:
    """The example's batch, or the text or images that the user named in its place."""
    assert source.opened is not None, "an example is for a model that was opened"
    if asked := _asked(request, "file", "text", "ids", "images"):
        if targets is not None:
            raise ConfigError(
                f"--example gives a batch with targets, and --{asked[0]} another: choose one"
            )
        return read_inputs(request, [replace(source, given=None)])
    if source.vocabulary and targets is None:
        reader = source.opened
    else:
        reader = None
    said = f"the batch of {request.example}"
    exact = "batch" in request.typed
    return InputRows(
        lambda count: rows[:count],
        len(rows),
        said,
        f"{said} has",
        "row",
        source.opened.loss,
        exact,
        targets,
        reader,
    )


def _check_alike(one: ModelSource, other: ModelSource) -> None:
    """Raises ConfigError unless both models have the same vocabulary and predict the same."""
    if other.vocabulary != one.vocabulary:
        raise ConfigError(
            f"{one.name} has {one.vocabulary} tokens and {other.name} {other.vocabulary}, and"
            " ctrans compares models on the same tokens: compare models of one vocabulary"
        )
    tasks = [
        (True, True) if each.opened is None else (each.opened.causal, each.opened.predicts)
        for each in (one, other)
    ]
    if tasks[0] != tasks[1]:
        words = [
            "predicts the next token" if task == (True, True) else "does not" for task in tasks
        ]
        if words[0] == words[1]:
            words = ["has a head of logits" if predicts else "has none" for _, predicts in tasks]
        raise ConfigError(
            f"{one.name} {words[0]} and {other.name} {words[1]}: compare models that were trained"
            " alike"
        )


@dataclass(frozen=True, eq=False)
class Batch:
    """The models that a command runs, and what they read, on the request's device. `targets` are
    None for a pass without a loss.
    """

    request: ModelRequest
    found: Sequence[ModelSource]
    text: Text | InputRows
    tokens: Tensor
    targets: Any

    @property
    def words(self) -> str | None:
        """What ctrans recognised in imported models, and what they read. None without such
        models.
        """
        imported = {
            source.name: source.opened.described
            for source in self.found
            if source.opened is not None
        }
        if not imported:
            return None
        first = self.found[0]
        asked = self.request.context
        count = len(self.tokens)
        length = tokens_of(first, self.tokens)
        much = f"{count} sequence{'s' * (count > 1)} of {length} tokens"
        if first.longest is not None and first.longest < asked and "context" in self.request.typed:
            much += f"; its context is {first.longest}, and you asked for {asked}"
        recognised = [
            words if len(self.found) == 1 else f"{name}: {words}"
            for name, words in imported.items()
        ]
        read = "Text" if isinstance(self.text, Text) else "Input"
        return "\n".join([*recognised, f"{read}: {self.text.said}; {much}\n"])

    @property
    def summary(self) -> dict[str, Any] | None:
        """The same for JSON; of several named models, by name."""
        if len(self.request.named_models) > 1:
            return {"several": {source.name: self._of(source) for source in self.found}}
        return self._of(self.found[0])

    def _of(self, source: ModelSource) -> dict[str, Any] | None:
        opened = source.opened
        if opened is None:
            return None
        return {
            "described": opened.described,
            "architecture": opened.model.config,
            "causal": opened.causal,
            "vocabulary": opened.vocabulary,
            "text": self.text.said,
            "sequences": self.tokens.shape[0],
            "tokens": tokens_of(source, self.tokens),
        }


def read_batch(
    request: ModelRequest, found: Sequence[ModelSource], *, targets: bool = True, walks: int = 1
) -> Batch:
    """`batch` sequences for each of these walks, as long as all of the models can read, with their
    targets if asked for. Sets the number of threads that the largest model needs for one walk.

    Raises ConfigError as `read_inputs`, and for a GPT whose weights and activations of one sublayer
    do not fit in this machine's memory.
    """
    text = read_inputs(request, found)
    device = get_device(request.device)
    length = min(source.context for source in found)
    read = (
        text.pairs(request.batch, length, walks)
        if targets
        else [text.sequences(request.batch, length, walks)]
    )
    for source in found:
        if isinstance(source.config, GPTConfig) and device.type == "cpu":
            shape = (len(read[0]) // walks, read[0].shape[1])
            check_buildable(
                source.config,
                request.seed,
                on_demand=source.streamed,
                shape=shape,
                dtype=get_dtype(request.dtype),
            )
    x, *y = (part.to(device) for part in read)
    settle_threads(found, x[::walks], get_dtype(request.dtype))
    return Batch(request, found, text, x, y[0] if y else None)
