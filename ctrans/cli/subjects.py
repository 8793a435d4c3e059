"""What a command looks at: seeded GPTs, a saved one, or somebody else's model, and the tokens that they read."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
from click.core import ParameterSource
from jaxtyping import Integer
from rich.console import Console
from torch import Tensor

from ctrans.cli import options
from ctrans.depth import check_count, check_dt
from ctrans.interop.architecture import PRESETS, from_architecture
from ctrans.interop.hugging_face import import_transformers
from ctrans.interop.imported import Imported
from ctrans.interop.open_model import Opened, open_imported, open_model
from ctrans.interop.tokens import BYTES, quiet, read_ids
from ctrans.model.checkpoint import load, load_config
from ctrans.model.gpt import GPT, check_buildable, number_of_weights
from ctrans.model.text import VOCABULARY, read_text, windows
from ctrans.norm import NORMS
from ctrans.placement import PLACEMENTS
from ctrans.weights.on_demand import too_large_to_stay
from solvers import ConfigError

BROUGHT = ("placements", "norm", "norms", "seed", *options.ARCHITECTURE)
"""Settings of an architecture, which a saved model brings along."""


@dataclasses.dataclass(frozen=True, eq=False)
class Subject:
    """A model to look at: what is known of it, and how it is made when its turn comes.

    `opened` is the model of `--model` or `--architecture`, which has to be there before anything is known of it. `streamed` is
    whether its weights are made on demand.
    """

    config: Any  # GPTConfig, or Architecture of an imported model: a `Described`
    make: Callable[[], GPT | Imported]
    vocabulary: int
    placements: tuple[str, ...]
    opened: Opened | None = None
    streamed: bool = False

    def model(self, dtype: torch.dtype, device: torch.device) -> GPT | Imported:
        """The model, ready to be looked at: no gradients, evaluation mode."""
        made = self.make().to(device=device).requires_grad_(False).eval()
        # an imported model is read in its dtype, and keeps tables in float32 that its library keeps so
        return made if isinstance(made, Imported) else made.to(dtype=dtype)


def subjects(settings: dict[str, Any], placements: Sequence[str], norms: Sequence[str]) -> list[Subject]:
    """Every norm with every placement asked for, or the one model of an option in `SOURCES`, which then fills the settings.

    `stream` becomes what was decided: whether weights of any model are made on demand. Raises ConfigError for what cannot be, and
    for options that contradict the model.
    """
    given = [name for name in SOURCES if name is not None and settings[name] is not None]
    if len(given) > 1:
        raise ConfigError(f"{' and '.join(f'--{name}' for name in given)} are given, and each is a model: choose one")
    found = SOURCES[given[0] if given else None](settings, placements, norms)
    settings["stream"] = any(subject.streamed for subject in found)
    return found


def _seeded(settings: dict[str, Any], placements: Sequence[str], norms: Sequence[str]) -> list[Subject]:
    configs = [
        options.make_config(settings, placement, norm)
        for norm in options.expand(norms, NORMS, "norm")
        for placement in options.expand(placements, PLACEMENTS, "placement")
    ]
    found = []
    for config in configs:
        large = too_large_to_stay(number_of_weights(config) * torch.get_default_dtype().itemsize)
        on_demand = large if settings["stream"] is None else settings["stream"]
        check_buildable(config, settings["seed"], on_demand=on_demand)
        make = partial(GPT, config, seed=settings["seed"], on_demand=on_demand)
        found.append(Subject(config, make, VOCABULARY, (config.placement,), streamed=on_demand))
    return found


def _saved(settings: dict[str, Any], placements: Sequence[str], norms: Sequence[str]) -> list[Subject]:
    path = settings["checkpoint"]
    _check_alone("--checkpoint", [name for name in BROUGHT if name != "context"])
    if settings["stream"]:
        raise ConfigError(f"the checkpoint {str(path)!r} can only be read whole: leave out --stream")
    config = load_config(path)
    check_buildable(config, settings["seed"])
    length = min(settings["context"], config.context)
    settings.update({name: getattr(config, name) for name in options.ARCHITECTURE}, context=length, norm=config.norm)
    return [Subject(config, lambda: load(path), config.vocab_size, (config.placement,))]


def _foreign(settings: dict[str, Any], placements: Sequence[str], norms: Sequence[str]) -> list[Subject]:
    _check_alone("--model", [name for name in BROUGHT if name not in ("context", "dt")])
    check_dt(settings["dt"])
    dtype = options.get_dtype(settings["dtype"])
    return _opened(settings, open_model(settings["model"], dtype, dt=settings["dt"], on_demand=settings["stream"]))


def _described(settings: dict[str, Any], placements: Sequence[str], norms: Sequence[str]) -> list[Subject]:
    _check_alone("--architecture", [name for name in BROUGHT if name not in ("context", "dt", "depth", "seed")])
    source, dtype = settings["architecture"], options.get_dtype(settings["dtype"])
    given = click.get_current_context().get_parameter_source("depth") is ParameterSource.COMMANDLINE
    with quiet(import_transformers()):
        model = from_architecture(
            source,
            seed=settings["seed"],
            blocks=settings["depth"] if given else None,
            dt=check_dt(settings["dt"]),
            dtype=dtype,
            on_demand=settings["stream"],
        )
    place = Path(source)
    directory = None if source in PRESETS else place if place.is_dir() else place.parent
    return _opened(settings, open_imported(model, directory))


def _opened(settings: dict[str, Any], opened: Opened) -> list[Subject]:
    """The one model, whose architecture fills the settings."""
    config, depth = opened.model.config, opened.model.depth
    unknown = dict.fromkeys(name for name in options.ARCHITECTURE if name not in ("context", "dt"))
    context = settings["context"] if config.context is None else min(settings["context"], config.context)
    settings.update({**unknown, "depth": depth.blocks, "width": config.width, "norm": config.norm, "context": context})
    names = tuple(dict.fromkeys(sublayer.placement.name for sublayer in depth.sublayers))
    return [Subject(config, lambda: opened.model, opened.vocabulary, names, opened, depth.streamed)]


SOURCES: dict[str | None, Callable[[dict[str, Any], Sequence[str], Sequence[str]], list[Subject]]] = {
    "checkpoint": _saved,
    "model": _foreign,
    "architecture": _described,
    None: _seeded,
}
"""Where models come from, by the option that says so; without one they are drawn from a seed."""


def _check_alone(option: str, brought: Sequence[str]) -> None:
    context = click.get_current_context()
    given = [name for name in brought if context.get_parameter_source(name) is ParameterSource.COMMANDLINE]
    if given:
        raise ConfigError(f"{option} brings its own {' and '.join(given)}: leave the option out, or leave out {option}")


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


def read(settings: dict[str, Any], found: Sequence[Subject]) -> Text:
    """The text that `text_options` say, as tokens of those models."""
    subject = found[0]
    if settings["ids"] is not None:
        if settings["file"] is not None or settings["text"] is not None:
            raise ConfigError("--ids gives token ids, and --file or --text a text: choose one")
        return Text(read_ids(settings["ids"]), subject.vocabulary, f"token ids of {settings['ids']}", opened=subject.opened)
    tokeniser = BYTES if subject.opened is None else subject.opened.tokeniser()
    ids = tokeniser.encode(read_text(settings["file"], settings["text"]))
    return Text(ids, subject.vocabulary, tokeniser.said, tokeniser.mask, subject.opened)


def weights_of(settings: dict[str, Any]) -> str:
    """Whose weights they are, for a title."""
    for name in ("checkpoint", "model"):
        if settings[name] is not None:
            return f"weights of {settings[name]}"
    if settings["architecture"] is not None:
        return "fresh weights of {architecture}, seed {seed}".format(**settings)
    return "{initialisation} weights, seed {seed}".format(**settings)


def say_model(console: Console, found: Sequence[Subject], text: Text, tokens: Tensor) -> None:
    """What was recognised in an imported model, how it reads, and what is looked at; nothing for our own models."""
    opened = found[0].opened
    if opened is not None:
        count, length = tokens.shape
        looked_at = f"{count} sequence{'s' * (count > 1)} of {length} tokens{_cut(found[0])}"
        words = f"{opened.described}\nText: {text.said}; {looked_at}\n"
        console.print(words, highlight=False, markup=False, soft_wrap=True)


def _cut(subject: Subject) -> str:
    """Words for sequences that the user wanted longer than the model can read."""
    context, longest = click.get_current_context(), subject.config.context
    typed = context.get_parameter_source("context") is ParameterSource.COMMANDLINE
    asked = context.params["context"]
    return f"; its context is {longest}, and {asked} were asked for" if typed and longest is not None and longest < asked else ""


def summary(found: Sequence[Subject], text: Text, tokens: Tensor) -> dict[str, Any] | None:
    """The same for JSON."""
    opened = found[0].opened
    if opened is None:
        return None
    kept = {"architecture": opened.model.config, "causal": opened.causal, "vocabulary": opened.vocabulary, "text": text.said}
    return {"described": opened.described, **kept, "sequences": tokens.shape[0], "tokens": tokens.shape[1]}
