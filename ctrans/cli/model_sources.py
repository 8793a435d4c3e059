"""The models that a command runs: seeded GPTs, saved GPTs, and models of other libraries."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ctrans.base.memory import too_large_to_stay
from ctrans.base.option import options_of
from ctrans.base.threads import choose_threads, flops
from ctrans.cli.click_options import OptionValues, expand, expand_placements, one_model_only
from ctrans.cli.plugins import called, function_of
from ctrans.cli.request import ModelRequest, get_dtype
from ctrans.dynamics.depth import check_dt
from ctrans.dynamics.norm import NORMS
from ctrans.dynamics.placement import placements_in
from ctrans.interop import Opened
from ctrans.interop.anatomy import read_anatomy
from ctrans.interop.architecture import PRESETS, from_architecture, skeleton
from ctrans.interop.families import READS
from ctrans.interop.image_inputs import read_images
from ctrans.interop.losses import LOSS_NAMES, AnyModel, Loss, ModelWithLoss
from ctrans.interop.module_adapter import Example
from ctrans.interop.open_model import open_imported, open_model
from ctrans.interop.transformers_library import quiet
from ctrans.measure.walk import Described
from ctrans.model.checkpoint import load, load_config
from ctrans.model.config import GPTConfig
from ctrans.model.gpt import GPT
from ctrans.model.size import check_buildable, number_of_weights
from ctrans.model.text import VOCABULARY
from ctrans.training.processes import get_device
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
    - `given`: rows and targets of --example
    """

    config: Described
    make: Callable[[], AnyModel | ModelWithLoss]
    name: str
    vocabulary: int
    segments: int
    context: int
    longest: int | None
    placements: tuple[str, ...]
    resolved: OptionValues = dataclasses.field(default_factory=dict)
    opened: Opened | None = None
    streamed: bool = False
    trained: bool = False
    given: tuple[Tensor, Tensor | None] | None = None

    def model(self, request: ModelRequest) -> AnyModel | ModelWithLoss:
        """The model on the request's device, in evaluation mode, without gradients."""
        made = self.make().to(device=get_device(request.device)).requires_grad_(False).eval()
        # an imported model was opened in its dtype; its library keeps some tables in float32
        if self.opened is not None:
            return made
        return made.to(dtype=get_dtype(request.dtype))


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
    if not named:
        check_foreign_options(request)
        norms = expand(request.norms, NORMS, "norm")
        placements = expand_placements(request.placements)
        return [
            seeded(request, {"placement": placement, "norm": norm})
            for norm in norms
            for placement in placements
        ]
    found = [SOURCES[option](request, value) for option, value in named]
    if len(found) == 1:
        return found
    names = labels([str(value) for _, value in named])
    return [
        dataclasses.replace(source, name=name) for source, name in zip(found, names, strict=True)
    ]


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


def check_loss(found: Sequence[ModelSource], command: str) -> None:
    """Raises ConfigError for --loss none with a command that needs a loss."""
    if any(source.opened is not None and source.opened.loss == "none" for source in found):
        names = ", ".join(name for name in LOSS_NAMES if name != "none")
        raise ConfigError(
            f"--loss none leaves {command} without a result, which needs a loss: choose one of"
            f" {names}"
        )


def resolved(found: Sequence[ModelSource]) -> dict[str, Any]:
    """The values of options that the models decided; None if they differ."""
    first, *others = (source.resolved for source in found)
    agreed = {
        name: value if all(each.get(name) == value for each in others) else None
        for name, value in first.items()
    }
    return {**agreed, "stream": any(source.streamed for source in found)}


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
    _check_alone("--checkpoint", request, but=("context",))
    if request.stream:
        raise ConfigError(f"ctrans reads the checkpoint {str(path)!r} whole: leave out --stream")
    config = load_config(path)
    check_buildable(config, request.seed)
    length = min(request.context, config.context)
    own = {name: getattr(config, name) for name in request.config}
    resolved = {**own, "context": length, "norm": config.norm}
    return _of_config(config, partial(load, path), context=length, resolved=resolved, trained=True)


def _of_files(request: ModelRequest, path: Path) -> ModelSource:
    """A checkpoint of another library."""
    _check_alone("--model", request, but=("context", "dt", "heads"))
    opened = open_model(
        path,
        get_dtype(request.dtype),
        dt=check_dt(request.config["dt"]),
        on_demand=request.stream,
        loss=_loss(request),
        heads=request.config["heads"] if "heads" in request.typed else None,
        images=request.images is not None,
        allow_pickle=request.allow_pickle,
        **_named_parts(request),
    )
    return _of_opened(opened, request, path.name, trained=True)


def _of_python(request: ModelRequest, function: str) -> ModelSource:
    """The module that a function of the user returns."""
    _check_alone("--python", request, but=("context", "dt"))
    if request.stream:
        raise ConfigError(f"{function!r} returns a model with all its weights: leave out --stream")
    made = called(function)
    dtype = get_dtype(request.dtype)
    if isinstance(made, Opened):
        raise ConfigError(
            f"{function!r} returns a model that open_model made: return the module itself"
        )
    if not isinstance(made, nn.Module):
        raise ConfigError(f"{function!r} returned {type(made).__name__}: return an nn.Module")
    if request.example is None:
        example, given = (None, None)
    else:
        example, given = _example(request.example)
    if (
        example is None
        and request.images is not None
        and not hasattr(getattr(made, "config", None), "model_type")
    ):
        if request.images.suffix != ".npy":
            raise ConfigError(
                f"the module of {function!r} does not state its image size: give --images an .npy"
                " array of images"
            )
        example = torch.from_numpy(read_images(request.images)[:2].copy()).to(dtype)
    opened = open_model(
        made.to(dtype),
        dtype,
        dt=check_dt(request.config["dt"]),
        loss=_loss(request),
        example=example,
        **_named_parts(request),
    )
    return _of_opened(opened, request, Path(function).name, trained=True, given=given)


def _loss(request: ModelRequest) -> str | Loss | None:
    """The name of the loss, or the user's function."""
    if request.loss is not None and ":" in request.loss:
        return function_of(request.loss)
    return request.loss


def _example(value: str) -> tuple[Example, tuple[Tensor, Tensor | None]]:
    """The model's input that the user's function returns; and the rows and targets of its batch."""
    made = called(value)
    if isinstance(made, tuple) and len(made) == 2:
        example, targets = made
    else:
        example, targets = (made, None)
    if isinstance(example, Mapping) and len(example) == 1:
        inner = next(iter(example.values()))
    else:
        inner = None
    # the forward's one argument may be a mapping
    if isinstance(inner, Mapping):
        arguments = inner
    else:
        arguments = example
    if isinstance(arguments, Mapping):
        rows = next(iter(arguments.values()), None)
    else:
        rows = arguments
    if not isinstance(rows, Tensor) or not (targets is None or isinstance(targets, Tensor)):
        if targets is None:
            what = f"a {type(rows).__name__}"
        else:
            what = f"a {type(rows).__name__} and a {type(targets).__name__}"
        raise ConfigError(
            f"{value!r} returns {what}: return a tensor, or a mapping of the forward's keyword"
            " arguments with a tensor first; or a pair of one of them and a tensor of targets"
        )
    if targets is not None and targets.shape[:1] != rows.shape[:1]:
        raise ConfigError(
            f"{value!r} returns {len(rows)} rows and targets {tuple(targets.shape)}: give as many"
            " targets"
        )
    return example, (rows, targets)


def _named_parts(request: ModelRequest) -> dict[str, Any]:
    """The parts that the file of --anatomy names, as keywords of `open_model`."""
    if request.anatomy is None:
        return {}
    return vars(read_anatomy(request.anatomy))


def _of_architecture(request: ModelRequest, name: str) -> ModelSource:
    """A published shape, or that of a config.json, with fresh weights."""
    _check_alone("--architecture", request, but=("context", "dt", "depth", "seed"))
    with quiet():
        if request.images is None:  # before images of any size pass
            outline = skeleton(name)
            if READS.get(getattr(outline, "main_input_name", "")) == "images":
                raise needs_images(type(outline).__name__)
        model = from_architecture(
            name,
            seed=request.seed,
            blocks=request.config["depth"] if "depth" in request.typed else None,
            dt=check_dt(request.config["dt"]),
            dtype=get_dtype(request.dtype),
            on_demand=request.stream,
            anatomy=None if request.anatomy is None else read_anatomy(request.anatomy),
        )
    path = Path(name)
    if name in PRESETS:
        directory = None
    elif path.is_dir():
        directory = path
    else:
        directory = path.parent
    return _of_opened(open_imported(model, directory, _loss(request)), request, path.name)


def needs_images(model: str) -> ConfigError:
    """The error for a model of images that the user gave none for."""
    return ConfigError(
        f"{model} reads no text: give --images PATH, a folder of images or an .npy array, or with"
        " --python its input by --example MODULE:FUNCTION"
    )


def _of_opened(opened: Opened, request: ModelRequest, name: str, **more: Any) -> ModelSource:
    """A model of another library with this name. `more` are further fields of `ModelSource`."""
    config = opened.config
    depth = opened.model.depth
    context = opened.longest(request.context)
    if config.context is None and context < request.context:
        longest = context
    else:
        longest = config.context
    unknown = dict.fromkeys(key for key in request.config if key not in ("context", "dt"))
    return ModelSource(
        config=config,
        make=lambda: opened.model,
        name=name,
        vocabulary=opened.vocabulary,
        segments=len(depth.sublayers),
        context=context,
        longest=longest,
        placements=tuple(dict.fromkeys(sublayer.placement.name for sublayer in depth.sublayers)),
        resolved={
            **unknown,
            "depth": depth.blocks,
            "width": config.width,
            "norm": config.norm,
            "context": context,
        },
        opened=opened,
        streamed=depth.streamed,
        **more,
    )


SOURCES: dict[str, Callable[[ModelRequest, Any], ModelSource]] = {
    "checkpoint": _saved,
    "model": _of_files,
    "architecture": _of_architecture,
    "python": _of_python,
}
"""How to find a model, by the option that names it."""


def _check_alone(option: str, request: ModelRequest, *, but: Sequence[str]) -> None:
    """Raises ConfigError for options of the architecture that the model of this option sets."""
    given = [name for name in ARCHITECTURE_OPTIONS if name in request.typed and name not in but]
    if given:
        raise ConfigError(
            f"{option} brings its own {' and '.join(given)}: leave the option out, or leave out"
            f" {option}"
        )


def settle_threads(found: Sequence[ModelSource], tokens: Tensor, dtype: torch.dtype) -> None:
    """On the CPU, sets the number of threads that the largest model needs on these tokens
    (`ctrans.base.threads`).
    """
    if tokens.device.type == "cpu":
        sizes = (
            flops(source.config.width, len(tokens), tokens_of(source, tokens)) for source in found
        )
        choose_threads(max(sizes), dtype.itemsize)


def tokens_of(source: ModelSource, inputs: Tensor) -> int:
    """The number of tokens that the model makes of each sequence or image."""
    if source.opened is None or source.opened.vocabulary:
        return inputs.shape[1]
    with torch.no_grad():
        return source.opened.embed(inputs[:1].cpu()).shape[-2]
