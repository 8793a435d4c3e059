"""The models that a command runs: seeded GPTs, saved GPTs, and models of other libraries."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ctrans import interop
from ctrans.base.given_files import check_file
from ctrans.base.memory import too_large_to_stay
from ctrans.base.option import options_of
from ctrans.base.threads import choose_threads, flops
from ctrans.cli.click_options import OptionValues, expand, expand_placements, one_model_only
from ctrans.cli.model_request import ModelRequest, get_dtype
from ctrans.cli.plugins import function_of
from ctrans.dynamics.depth import check_dt
from ctrans.dynamics.norm import NORMS
from ctrans.dynamics.placement import placements_in
from ctrans.interop.loss_names import LOSS_NAMES
from ctrans.interop.tokens import read_ids
from ctrans.measure.walk import Described
from ctrans.model.checkpoint import find_model, load, load_config
from ctrans.model.config import GPTConfig
from ctrans.model.gpt import GPT
from ctrans.model.size import check_buildable, number_of_weights
from ctrans.model.text import VOCABULARY, read_text
from ctrans.training.processes import get_device
from ctrans.training.tasks import TASKS
from ctrans.training.training_state import read_state
from solvers import ConfigError

ARCHITECTURE_OPTIONS = ("placements", "norms", "seed", *options_of(GPTConfig))
"""Options of a seeded model's architecture. Any other model has its own architecture."""


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class ModelSource:
    """A model that a command runs: what is known before it is built, and how to build it.

    - `config`: the architecture
    - `make`: builds the model
    - `name`: its name in results
    - `vocabulary`, `segments`: the number of tokens and of sublayers
    - `context`, `longest`: the length of the sequences that it reads, and the largest length that
      it can read (None if it has no limit)
    - `placements`: the names of its sublayers' placements
    - `resolved`: values of options that the model decided
    - `opened`: the model itself, if it is of another library
    - `streamed`: whether its weights are made on demand
    - `trained`: whether its weights may differ from an initialisation
    - `example`: rows and targets of --example
    - `task`: the task on which `ctrans train` trained it, "" for none
    """

    config: Described
    make: Callable[[], interop.AnyModel | interop.ModelWithLoss]
    name: str
    vocabulary: int
    segments: int
    context: int
    longest: int | None
    placements: tuple[str, ...]
    resolved: OptionValues = dataclasses.field(default_factory=dict)
    opened: interop.Opened | None = None
    streamed: bool = False
    trained: bool = False
    example: tuple[Tensor, Tensor | None] | None = None
    task: str = ""

    def model(self, request: ModelRequest) -> interop.AnyModel | interop.ModelWithLoss:
        """The model on the request's device, in evaluation mode, without gradients."""
        model = self.make().to(device=get_device(request.device))
        model = model.requires_grad_(requires_grad=False).eval()
        # an imported model was opened in its dtype; its library keeps some tables in float32
        if self.opened is not None:
            return model
        return model.to(dtype=get_dtype(request.dtype))


def find_models(request: ModelRequest) -> list[ModelSource]:
    """The models that the user named, or one seeded model for each norm and placement.

    Raises ConfigError for a model that cannot be built, for options that contradict it, and for
    several models if the command takes one.
    """
    named = request.named_models
    if len(named) > 1 and not request.compares:
        raise one_model_only([(f"--{option}", value) for option, value in named])
    for option, value in named:
        if value == "":
            raise ConfigError(f"--{option} '' names nothing: give a value, or leave the option out")
        check_foreign_options(request, option)
    check_before_models(request)
    if not named:
        check_foreign_options(request)
        norms = expand(request.norms, NORMS, "norm")
        placements = expand_placements(request.placements)
        return [
            seeded(request, {"placement": placement, "norm": norm})
            for norm in norms
            for placement in placements
        ]
    sources = [_named(option, request, value) for option, value in named]
    if len(sources) == 1:
        return sources
    names = labels([str(value) for _, value in named])
    return [
        dataclasses.replace(source, name=name) for source, name in zip(sources, names, strict=True)
    ]


def _named(option: str, request: ModelRequest, value: Any) -> ModelSource:
    """The model that the value of this option names."""
    if option == "checkpoint":
        return _saved(request, value)
    # imported here, because the readers of other libraries are large
    from ctrans.cli.foreign_models import FOREIGN_SOURCES

    return FOREIGN_SOURCES[option](request, value)


def check_foreign_options(request: ModelRequest, source: str | None = None) -> None:
    """Raises ConfigError for options that the model of this option does not take."""
    for name, value in (("anatomy", request.anatomy), ("loss", request.loss)):
        if value is not None and source in (None, "checkpoint"):
            raise ConfigError(
                f"--{name} is for a model of another library: leave it out, or add --model,"
                " --architecture or --python"
            )
    if request.example is not None and source != "python":
        raise ConfigError("--example is for the module of --python: leave it out, or add --python")


def check_before_models(request: ModelRequest) -> None:
    """Raises ConfigError for values that no model can make valid, before one is imported or
    opened: an unknown loss, a dt, files that cannot be read, several texts.
    """
    check_dt(request.config["dt"])
    if request.loss is not None and ":" in request.loss:
        function_of(request.loss)
    elif request.loss is not None and request.loss not in LOSS_NAMES:
        raise ConfigError(
            f"loss {request.loss!r} is not known: choose one of {', '.join(LOSS_NAMES)}, or name a"
            " function of yours as MODULE:FUNCTION"
        )
    if request.example is not None:
        function_of(request.example)
    if request.anatomy is not None:
        check_file(request.anatomy)
    if request.images is not None and not request.images.is_dir():
        check_file(request.images)
    if request.ids is not None:
        if request.file is not None or request.text is not None:
            raise ConfigError("--ids gives token ids, and --file or --text a text: choose one")
        read_ids(request.ids)
    elif request.text is not None:
        read_text(request.file, request.text)
    elif request.file is not None:
        check_file(request.file)


def check_loss_name(request: ModelRequest, command: str) -> None:
    """Raises ConfigError for --loss none with a command that needs a loss."""
    if request.loss == "none":
        names = ", ".join(name for name in LOSS_NAMES if name != "none")
        raise ConfigError(
            f"--loss none leaves {command} without a result, which needs a loss: choose one of"
            f" {names}"
        )


def resolved(sources: Sequence[ModelSource]) -> dict[str, Any]:
    """The values of options that the models decided; None if they differ."""
    agreed: dict[str, Any] = {}
    for name, value in sources[0].resolved.items():
        if all(source.resolved.get(name) == value for source in sources[1:]):
            agreed[name] = value
        else:
            agreed[name] = None
    return {**agreed, "stream": any(source.streamed for source in sources)}


def labels(names: Sequence[str]) -> list[str]:
    """Different paths, without the directories that all begin with and the parts that all end
    in.
    """
    parts = [Path(name).parts for name in names]
    while all(len(part) > 1 for part in parts) and len({part[0] for part in parts}) == 1:
        parts = [part[1:] for part in parts]
    while all(len(part) > 1 for part in parts) and len({part[-1] for part in parts}) == 1:
        parts = [part[:-1] for part in parts]
    short = ["/".join(part) for part in parts]
    if len(set(short)) == len(names):
        return short
    return list(names)


def seeded(request: ModelRequest, changes: OptionValues) -> ModelSource:
    """The request's architecture with these fields changed, and weights from its seed."""
    config = GPTConfig(VOCABULARY, **{**request.config, **changes})
    large = too_large_to_stay(number_of_weights(config) * torch.get_default_dtype().itemsize)
    if request.stream is None:
        on_demand = large
    else:
        on_demand = request.stream
    check_buildable(config, request.seed, on_demand=on_demand)
    make = partial(GPT, config, seed=request.seed, on_demand=on_demand)
    return _of_config(config, make, context=config.context, streamed=on_demand)


def _of_config(config: GPTConfig, make: Callable[[], GPT], **more: Any) -> ModelSource:
    """A GPT of ctrans. `more` are further fields of `ModelSource`."""
    placements = tuple(placement.name for placement in placements_in(config.placement))
    if config.is_stack:  # the placement of its velocity
        if config.placements[-1].ffn.final_norm:
            placements = ("output",)
        else:
            placements = ("none",)
    return ModelSource(
        config=config,
        make=make,
        name=config.placement,
        vocabulary=config.vocab_size,
        segments=config.segments,
        longest=config.context,
        placements=placements,
        **more,
    )


def _saved(request: ModelRequest, path: Path) -> ModelSource:
    check_alone("--checkpoint", request, but=("context",))
    if request.stream:
        raise ConfigError(f"ctrans reads the checkpoint {str(path)!r} whole: leave out --stream")
    config = load_config(path)
    check_buildable(config, request.seed)
    length = min(request.context, config.context)
    architecture = {name: getattr(config, name) for name in request.config}
    resolved = {**architecture, "context": length, "norm": config.norm}
    source = _of_config(
        config, partial(load, path), context=length, resolved=resolved, trained=True
    )
    return dataclasses.replace(source, task=_task_of(path))


def _task_of(path: Path) -> str:
    """The task that the checkpoint's run learns; "" for a text, or without such a run."""
    checkpoint = find_model(path)
    try:
        task = read_state(checkpoint).source.get("task")
    except ConfigError:  # a saved model has none, and damage is found when the model is loaded
        return ""
    return task if task in TASKS else ""


def needs_images(model: str) -> ConfigError:
    """The error for a model of images that the user gave none for."""
    return ConfigError(
        f"{model} reads no text: give --images PATH, a folder of images or an .npy array, or with"
        " --python its input by --example MODULE:FUNCTION"
    )


def check_alone(option: str, request: ModelRequest, *, but: Sequence[str]) -> None:
    """Raises ConfigError for options of the architecture that the model of this option sets."""
    typed = [name for name in ARCHITECTURE_OPTIONS if name in request.typed and name not in but]
    if typed:
        raise ConfigError(
            f"{option} brings its own {' and '.join(typed)}: leave the option out, or leave out"
            f" {option}"
        )


def settle_threads(sources: Sequence[ModelSource], tokens: Tensor, dtype: torch.dtype) -> None:
    """On the CPU, sets the number of threads that the largest model needs on these tokens
    (`ctrans.base.threads`).
    """
    if tokens.device.type == "cpu":
        sizes = (
            flops(source.config.width, len(tokens), tokens_of(source, tokens)) for source in sources
        )
        choose_threads(max(sizes), dtype.itemsize)


def tokens_of(source: ModelSource, inputs: Tensor) -> int:
    """The number of tokens that the model makes of each sequence or image."""
    if source.opened is None or source.opened.vocabulary:
        return inputs.shape[1]
    with torch.no_grad():
        return source.opened.embed(inputs[:1].cpu()).shape[-2]
