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
from ctrans.cli.model_request import ModelRequest, get_dtype
from ctrans.cli.model_sources import ModelSource, needs_images, settle_threads, tokens_of
from ctrans.cli.size_checks import check_attention_ends, check_positions_used
from ctrans.examine.comparison.recording import Recording
from ctrans.interop.tokens import BYTES, as_numbers, read_ids
from ctrans.model.config import GPTConfig
from ctrans.model.size import check_buildable
from ctrans.model.text import read_text, windows
from ctrans.training.processes import get_device
from ctrans.training.tasks import TASKS
from solvers import ConfigError, shown

TASK_ROWS = 1024
"""The most held-out rows of a task that are read."""


@dataclass(frozen=True, eq=False)
class Text:
    """A text as one row of token ids of a vocabulary; `description` names the
    tokeniser.
    """

    ids: Integer[np.ndarray, " _"]
    vocabulary: int
    description: str
    mask: int | None = None
    opened: interop.Opened | None = None
    texts_of: Callable[[list[int]], list[str]] = as_numbers

    def sequences(self, count: int, length: int, walks: int = 1) -> Tensor:
        """walks x count sequences of `length` tokens, spread evenly over the text: (walks count,
        length). Raises ConfigError for tokens outside the vocabulary.
        """
        if self.ids.dtype == np.uint64:  # from 2^63 they have no int64
            read = self.ids
        else:
            read = windows(self.ids, walks * count, length).numpy()
        lowest = int(read.min())
        highest = int(read.max())
        if not 0 <= lowest <= highest < self.vocabulary:
            raise ConfigError(
                f"{self.description}: they run from {lowest} to {highest}, and the model's"
                f" vocabulary from 0 to {self.vocabulary - 1}: give tokens of this model by --ids"
                " FILE"
            )
        return windows(self.ids, walks * count, length)

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
    - `available`: how many there are
    - `description`, `holds`: where they come from, alone and with a verb
    - `unit`: the word for one of them
    - `loss`: the name of the model's loss
    - `exact`: whether the user chose the number of rows
    - `targets`: targets for the user's loss
    - `reader`: the model, if rows are token ids without targets
    """

    take: Callable[[int], Tensor]
    available: int
    description: str
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
        row_count = walks * count
        if not self.exact:
            row_count = min(row_count, max(1, self.available // walks) * walks)
        if self.available < row_count:
            raise self._too_few(row_count, walks)
        x = self.take(row_count)
        if self.reader is None:
            return x
        return x[:, :length]

    def _too_few(self, row_count: int, walks: int) -> ConfigError:
        purpose = ""
        if walks > 1:
            purpose = f" ({row_count // walks} for the model, and as many for comparison)"
        alternative = ""
        if self.available >= walks:
            alternative = f", or lower --batch to {self.available // walks}"
        unit = self.unit if self.available == 1 else f"{self.unit}s"
        return ConfigError(
            f"{self.holds} {self.available} {unit}, and {row_count} are wanted{purpose}: give"
            f" more{alternative}"
        )

    def pairs(self, count: int, length: int, walks: int = 1) -> tuple[Tensor, Tensor]:
        """Rows and targets. Without the user's targets: those of token ids (`Opened.pairs`), or -1,
        which no loss reads.
        """
        x = self.sequences(count, length, walks)
        if self.targets is not None:
            return x, self.targets[: len(x)]
        if self.reader is None:
            shape = x.shape if self.loss == "none" else x.shape[:1]
            return x, torch.full(shape, -1)
        if self.loss == "given":  # the user's loss may not accept targets of -1
            return self.reader.pairs(x)
        # the last token has no target
        return self.reader.pairs(torch.cat([x, torch.full_like(x[:, :1], -1)], 1))


def read_inputs(request: ModelRequest, sources: Sequence[ModelSource]) -> Text | InputRows:
    """The request's text as tokens of these models, its images, or the batch of its example.

    Raises ConfigError for inputs that contradict each other, and for models that cannot read the
    same input.
    """
    first = sources[0]
    if first.example is not None:
        return _of_example(request, first, *first.example)
    if first.vocabulary == 0 or request.images is not None:
        return _pictures(request, sources)
    for source in sources[1:]:
        _check_alike(first, source)
    named = _inputs_in(request, "file", "text", "ids")
    if first.task and not named and all(source.task == first.task for source in sources):
        return _of_task(request, first.task)
    if request.ids is not None:
        return Text(
            read_ids(request.ids),
            first.vocabulary,
            f"token ids of {request.ids}",
            opened=first.opened,
        )
    text = read_text(request.file, request.text)
    tokenisers = [
        BYTES if source.opened is None else source.opened.tokeniser() for source in sources
    ]
    ids = tokenisers[0].encode(text)
    for source, tokeniser in zip(sources[1:], tokenisers[1:], strict=True):
        if not np.array_equal(tokeniser.encode(text), ids):
            raise ConfigError(
                f"{first.name} and {source.name} make other tokens of the text, and ctrans compares"
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


def _of_task(request: ModelRequest, task: str) -> InputRows:
    """Rows of the task that no training reads, with their targets. Raises ConfigError for another
    length, which would cut what is asked.
    """
    rows, targets = TASKS[task].data().validation_windows(TASK_ROWS)
    if "context" in request.typed and request.context != rows.shape[1]:
        raise ConfigError(
            f"--context {request.context}: rows of the task {task} have {rows.shape[1]} tokens:"
            " leave it out, or give a text or --ids"
        )
    description = f"held-out rows of the task {task}"
    return InputRows(
        take=lambda count: rows[:count],
        available=len(rows),
        description=description,
        holds=f"the task {task} has",
        unit="row",
        loss="given",
        exact="batch" in request.typed,
        targets=targets,
    )


def _inputs_in(request: ModelRequest, *names: str) -> list[str]:
    """Those of these options that have a value."""
    return [name for name in names if getattr(request, name) is not None]


def _pictures(request: ModelRequest, sources: Sequence[ModelSource]) -> InputRows:
    opened = sources[0].opened
    if opened is None or opened.vocabulary:
        raise ConfigError(
            f"--images is for a model of images, and {sources[0].name} reads token ids: leave it"
            " out"
        )
    if request.images is None:
        raise needs_images(opened.config.model)
    text_options = _inputs_in(request, "file", "text", "ids")
    if text_options:
        raise ConfigError(
            f"--images and --{text_options[0]} are given, and the model reads one of them: choose"
            " one"
        )
    shapes = {source.opened.reads for source in sources if source.opened is not None}
    if len(shapes) > 1:
        raise ConfigError(
            f"the models read images of {len(shapes)} sizes: compare models of one size"
        )
    from ctrans.interop.image_inputs import images_for  # here: few models read images

    dtype = next(opened.parameters()).dtype
    images = images_for(request.images, shapes.pop(), dtype, opened.directory)
    holds = f"{str(images.path)!r} holds"
    return InputRows(
        take=images.batch,
        available=images.count,
        description=images.description,
        holds=holds,
        unit="image",
        loss=opened.loss,
        exact="batch" in request.typed,
    )


def _of_example(
    request: ModelRequest, source: ModelSource, rows: Tensor, targets: Tensor | None
) -> Text | InputRows:
    """The example's batch, or the text or images that the user named in its place."""
    assert source.opened is not None, "an example is for a model that was opened"
    input_options = _inputs_in(request, "file", "text", "ids", "images")
    if input_options:
        if targets is not None:
            raise ConfigError(
                f"--example gives a batch with targets, and --{input_options[0]} another: choose"
                " one"
            )
        return read_inputs(request, [replace(source, example=None)])
    reader = None
    if source.vocabulary and targets is None:
        reader = source.opened
    description = f"the batch of {request.example}"
    return InputRows(
        take=lambda count: rows[:count],
        available=len(rows),
        description=description,
        holds=f"{description} has",
        unit="row",
        loss=source.opened.loss,
        exact="batch" in request.typed,
        targets=targets,
        reader=reader,
    )


def _task_of(source: ModelSource) -> tuple[bool, bool]:
    """Whether the model is causal, and whether it has a head of logits."""
    if source.opened is None:
        return True, True
    return source.opened.causal, source.opened.predicts


def _check_alike(first: ModelSource, second: ModelSource) -> None:
    """Raises ConfigError unless both models have the same vocabulary and predict the same."""
    if second.vocabulary != first.vocabulary:
        raise ConfigError(
            f"{first.name} has {first.vocabulary} tokens and {second.name} {second.vocabulary}, and"
            " ctrans compares models on the same tokens: compare models of one vocabulary"
        )
    tasks = [_task_of(first), _task_of(second)]
    if tasks[0] == tasks[1]:
        return
    next_token = (True, True)
    if next_token in tasks:
        phrases = [
            "predicts the next token" if task == next_token else "does not" for task in tasks
        ]
    else:
        phrases = ["has a head of logits" if predicts else "has none" for _, predicts in tasks]
    raise ConfigError(
        f"{first.name} {phrases[0]} and {second.name} {phrases[1]}: compare models that were"
        " trained alike"
    )


@dataclass(frozen=True, eq=False)
class Batch:
    """The models that a command runs, and what they read, on the request's device. `targets` are
    None for a pass without a loss.
    """

    request: ModelRequest
    sources: Sequence[ModelSource]
    text: Text | InputRows
    tokens: Tensor
    targets: Any

    @property
    def recognised(self) -> str | None:
        """What ctrans recognised in imported models, and what they read. Of other models, what they
        read in place of a text, or None.
        """
        imported = {
            source.name: source.opened.described
            for source in self.sources
            if source.opened is not None
        }
        if not imported and isinstance(self.text, Text):
            return None
        if not imported:
            return f"Input: {self.text.description}\n"
        first = self.sources[0]
        context = self.request.context
        count = len(self.tokens)
        length = tokens_of(first, self.tokens)
        sequences = "sequences" if count > 1 else "sequence"
        amount = f"{count} {sequences} of {length} tokens"
        is_too_short = first.longest is not None and first.longest < context
        if is_too_short and "context" in self.request.typed:
            amount += f"; its context is {first.longest}, and you asked for {context}"
        if len(self.sources) == 1:
            lines = list(imported.values())
        else:
            lines = [f"{name}: {described}" for name, described in imported.items()]
        kind = "Text" if isinstance(self.text, Text) else "Input"
        return "\n".join([*lines, f"{kind}: {self.text.description}; {amount}\n"])

    @property
    def summary(self) -> dict[str, Any] | None:
        """The same for JSON; of several named models, by name."""
        if len(self.request.named_models) > 1:
            return {"several": {source.name: self._of(source) for source in self.sources}}
        return self._of(self.sources[0])

    def _of(self, source: ModelSource) -> dict[str, Any] | None:
        opened = source.opened
        if opened is None:
            return None
        return {
            "described": opened.described,
            "architecture": opened.model.config,
            "causal": opened.causal,
            "vocabulary": opened.vocabulary,
            "text": self.text.description,
            "sequences": self.tokens.shape[0],
            "tokens": tokens_of(source, self.tokens),
        }


def read_batch(
    request: ModelRequest, sources: Sequence[ModelSource], *, targets: bool = True, walks: int = 1
) -> Batch:
    """`batch` sequences for each of these walks, as long as all of the models can read, with their
    targets if asked for. Sets the number of threads that the largest model needs for one walk.

    Raises ConfigError as `read_inputs`, and for a GPT whose weights and activations of one sublayer
    do not fit in this machine's memory.
    """
    text = read_inputs(request, sources)
    device = get_device(request.device)
    length = min(source.context for source in sources)
    target_tokens = None
    count = request.batch
    if isinstance(text, InputRows) and "batch" not in request.typed:
        count = max(count, request.fewest_rows)
    if targets:
        tokens, target_tokens = text.pairs(count, length, walks)
    else:
        tokens = text.sequences(count, length, walks)
    for source in sources:
        if isinstance(source.config, GPTConfig) and device.type == "cpu":
            shape = (len(tokens) // walks, tokens.shape[1])
            if not source.trained:
                check_positions_used(source.config, tokens.shape[1], get_dtype(request.dtype))
            check_attention_ends(source.config, *shape)
            check_buildable(
                source.config,
                request.seed,
                on_demand=source.streamed,
                shape=shape,
                dtype=get_dtype(request.dtype),
            )
    tokens = tokens.to(device)
    if target_tokens is not None:
        target_tokens = target_tokens.to(device)
    settle_threads(sources, tokens[::walks], get_dtype(request.dtype))
    return Batch(request, sources, text, tokens, target_tokens)


def recorded_batch(
    request: ModelRequest, source: ModelSource, recording: Recording, *, targets: bool
) -> Batch:
    """The tokens of a recording, with its targets; without those, the next tokens, or an imported
    model's own.

    Raises ConfigError for tokens outside of the model's vocabulary.
    """
    tokens = recording.tokens
    description = f"tokens of {recording.path}"
    rows = InputRows(
        take=lambda count: tokens[:count],
        available=len(tokens),
        description=description,
        holds=f"{str(recording.path)!r} holds",
        unit="row",
        loss="next" if source.opened is None else source.opened.loss,
        exact=True,
        targets=recording.targets,
        reader=source.opened,
    )
    if source.vocabulary:
        _check_recorded_ids(recording, source.vocabulary)
    device = get_device(request.device)
    target_tokens = None
    if targets and recording.targets is None and source.opened is None:
        target_tokens = torch.cat([tokens[:, 1:], torch.full_like(tokens[:, :1], -1)], 1)
    elif targets:
        _, target_tokens = rows.pairs(len(tokens), tokens.shape[1])
    if target_tokens is not None:
        target_tokens = target_tokens.to(device)
    if tokens.is_floating_point():
        tokens = tokens.to(get_dtype(request.dtype))
    tokens = tokens.to(device)
    settle_threads([source], tokens, get_dtype(request.dtype))
    return Batch(request, [source], rows, tokens, target_tokens)


def _check_recorded_ids(recording: Recording, vocabulary: int) -> None:
    tokens = recording.tokens
    fits = tokens.dtype == torch.int64 and tokens.dim() == 2 and tokens.numel() > 0
    if not fits or int(tokens.min()) < 0 or int(tokens.max()) >= vocabulary:
        raise ConfigError(
            f"the tokens of {str(recording.path)!r}, {shown(tokens)}, are no ids of this model:"
            f" record integers (sequences, tokens) from 0 to {vocabulary - 1}"
        )
