"""What a command looks at: seeded GPTs, a saved one, or somebody else's model."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ctrans.cli.click_options import expand, expand_placements, one_alone
from ctrans.cli.plugins import called, function_of
from ctrans.cli.request import MODEL_OPTIONS, ModelRequest, get_dtype
from ctrans.depth import check_dt
from ctrans.interop.anatomy import read_anatomy
from ctrans.interop.architecture import PRESETS, from_architecture
from ctrans.interop.image_inputs import read_array
from ctrans.interop.losses import LOSS_NAMES, AnyModel, Loss, ModelWithLoss
from ctrans.interop.module_adapter import Example
from ctrans.interop.open_model import open_imported, open_model
from ctrans.interop.opened import Opened
from ctrans.interop.transformers_library import import_transformers, quiet
from ctrans.model.checkpoint import load, load_config
from ctrans.model.config import GPTConfig
from ctrans.model.gpt import GPT, check_buildable, number_of_weights
from ctrans.model.text import VOCABULARY
from ctrans.norm import NORMS
from ctrans.option import options_of
from ctrans.placement import placements_in
from ctrans.threads import choose_threads, flops
from ctrans.walk import Described
from ctrans.weights.on_demand import too_large_to_stay
from solvers import ConfigError

BROUGHT = ("placements", "norms", "seed", *options_of(GPTConfig))
"""Options of an architecture. A model that is not drawn from a seed has its own."""


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Subject:
    """A model to look at: what is known of it, and how it is made when its turn comes.

    - `config`: its architecture
    - `make`: makes it
    - `weights`: whose weights it has, in words
    - `vocabulary`, `blocks`, `segments`, `width`: how many tokens, blocks and sublayers there are,
      and d
    - `context`, `longest`: the length of the sequences that it is to read, and of those that it can
      (None if it does not say)
    - `placements`: the names of its sublayers' placements
    - `brought`: values of options that the model decided, and not the user
    - `opened`: the model of `--model` or `--architecture`, which has to be there before anything is
      known of it
    - `streamed`: whether its weights are made on demand
    - `trained`: whether its weights may be others than an initialisation's
    - `called`: what it is called where its placement is not what the user named
    - `label`: what it is called among several that were named
    - `given`: rows and targets of --example
    """

    config: Described
    make: Callable[[], AnyModel | ModelWithLoss]
    weights: str
    vocabulary: int
    blocks: int
    segments: int
    width: int
    context: int
    longest: int | None
    placements: tuple[str, ...]
    brought: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    opened: Opened | None = None
    streamed: bool = False
    trained: bool = False
    called: str | None = None
    label: str | None = None
    given: tuple[Tensor, Tensor | None] | None = None

    @property
    def name(self) -> str:
        """What results call the model: its label among several that were named, what it was named,
        or its placement.
        """
        return self.label or self.called or self.config.placement

    @property
    def title(self) -> str:
        """The model in a line, for a picture."""
        return f"{self.blocks} block{'s' * (self.blocks != 1)}, width {self.width}, dt = {self.config.dt:g}{self._options}, {self.weights}"

    @property
    def _options(self) -> str:
        """The residual and the form of the blocks, where these are not the usual ones."""
        if not isinstance(self.config, GPTConfig):
            return ""
        residual = "" if self.config.residual == "plain" else f", residual {self.config.residual}"
        blocks = ", parallel blocks" + " with two norms" * self.config.branch_norms
        steps = f", one velocity in {self.config.segments} steps" if self.config.is_stack else ""
        return residual + blocks * self.config.parallel_blocks + steps

    def model(self, dtype: torch.dtype, device: torch.device) -> AnyModel | ModelWithLoss:
        """The model, ready to be looked at: no gradients, evaluation mode."""
        made = self.make().to(device=device).requires_grad_(False).eval()
        # an imported model is read in its dtype, and keeps tables in float32 that its library keeps
        # so
        return made if self.opened is not None else made.to(dtype=dtype)


def find(request: ModelRequest) -> list[Subject]:
    """Every norm with every placement asked for, the one model of an option in `SOURCES`, or
    several that were named.

    Raises ConfigError for what cannot be, and for options that contradict the model.
    """
    if request.several:
        return _each_named(request)
    check_foreign_options(request)
    return SOURCES[next((name for name in MODEL_OPTIONS if getattr(request, name) is not None), None)](request)


def check_foreign_options(request: ModelRequest) -> None:
    """Raises ConfigError for options of somebody else's model where there is none."""
    foreign = any(getattr(request, name) is not None for name in MODEL_OPTIONS if name != "checkpoint")
    for name, value in (("anatomy", request.anatomy), ("loss", request.loss)):
        if value is not None and not foreign:
            raise ConfigError(f"--{name} is for somebody else's model: leave it out, or add --model, --architecture or --python")
    if request.example is not None and request.python is None:
        raise ConfigError(
            "--example is for the module of --python, as files say what their model reads: leave it out, or add --python"
        )


def check_loss(found: Sequence[Subject], command: str) -> None:
    """Raises ConfigError where the user wants no loss, of a command that asks for nothing but what
    follows from one.
    """
    if any(subject.opened is not None and subject.opened.loss == "none" for subject in found):
        names = ", ".join(name for name in LOSS_NAMES if name != "none")
        raise ConfigError(
            f"--loss none leaves {command} nothing to look at, as all of it follows from a loss: choose one of {names}"
        )


def resolved(found: Sequence[Subject]) -> dict[str, Any]:
    """What became of options that a model or its size decided, by name."""
    first, *others = (subject.brought for subject in found)
    agreed = {name: value if all(each.get(name) == value for each in others) else None for name, value in first.items()}
    return {**agreed, "stream": any(subject.streamed for subject in found)}


def _each_named(request: ModelRequest) -> list[Subject]:
    """The models that were named, each by what tells it from the others."""
    if not request.compares:
        raise one_alone([(f"--{option}", value) for option, value in request.several])
    if len(set(request.several)) < len(request.several):
        twice = next(value for option, value in request.several if request.several.count((option, value)) > 1)
        raise ConfigError(f"{str(twice)!r} is named twice: name each model once")
    found = []
    for (option, value), label in zip(request.several, labels([str(value) for _, value in request.several]), strict=True):
        (subject,) = find(dataclasses.replace(request, several=(), **{option: value}))
        found.append(dataclasses.replace(subject, label=label))
    return found


def labels(names: Sequence[str]) -> list[str]:
    """Different paths without the directories that all of them begin with, and the file name that
    all of them end in.
    """
    parts = [Path(name).parts for name in names]
    while all(len(part) > 1 for part in parts) and len({part[0] for part in parts}) == 1:
        parts = [part[1:] for part in parts]
    while all(len(part) > 1 for part in parts) and len({part[-1] for part in parts}) == 1:
        parts = [part[:-1] for part in parts]
    short = ["/".join(part) for part in parts]
    return short if len(set(short)) == len(names) else list(names)


def _seeded(request: ModelRequest) -> list[Subject]:
    return [
        seeded(request, {"placement": placement, "norm": norm})
        for norm in expand(request.norms, NORMS, "norm")
        for placement in expand_placements(request.placements)
    ]


def seeded(request: ModelRequest, changes: Mapping[str, Any]) -> Subject:
    """The request's architecture with these fields changed, and weights from its seed."""
    config = GPTConfig(VOCABULARY, **{**request.config, **changes})
    large = too_large_to_stay(number_of_weights(config) * torch.get_default_dtype().itemsize)
    on_demand = large if request.stream is None else request.stream
    check_buildable(config, request.seed, on_demand=on_demand)
    weights = f"{config.initialisation} weights, seed {request.seed}"
    make = partial(GPT, config, seed=request.seed, on_demand=on_demand)
    return _of_config(config, make, weights, context=config.context, streamed=on_demand)


def _of_config(config: GPTConfig, make: Callable[[], GPT], weights: str, **more: Any) -> Subject:
    """A model of ours. `more` are further fields of `Subject`."""
    return Subject(
        config=config,
        make=make,
        weights=weights,
        vocabulary=config.vocab_size,
        blocks=config.depth,
        segments=config.segments,
        width=config.width,
        longest=config.context,
        placements=_names(config),
        **more,
    )


def _saved(request: ModelRequest) -> list[Subject]:
    path = request.checkpoint
    assert path is not None, "who asks for a saved model says where it is"
    _check_alone("--checkpoint", request, but=("context",))
    if request.stream:
        raise ConfigError(f"the checkpoint {str(path)!r} can only be read whole: leave out --stream")
    config = load_config(path)
    check_buildable(config, request.seed)
    length = min(request.context, config.context)
    own = {name: getattr(config, name) for name in request.config}
    brought = {**own, "context": length, "norm": config.norm}
    weights = f"weights of {path}"
    return [_of_config(config, partial(load, path), weights, context=length, brought=brought, trained=True)]


def _foreign(request: ModelRequest) -> list[Subject]:
    assert request.model is not None, "who asks for somebody's model says where it is"
    _check_alone("--model", request, but=("context", "dt", "heads"))
    opened = open_model(
        request.model,
        get_dtype(request.dtype),
        dt=check_dt(request.config["dt"]),
        on_demand=request.stream,
        loss=_loss(request),
        heads=request.config["heads"] if "heads" in request.typed else None,
        images=request.images is not None,
        **_named_parts(request),
    )
    return [_of_opened(opened, request, f"weights of {request.model}", Path(request.model).name, trained=True)]


def _made(request: ModelRequest) -> list[Subject]:
    """What a function of the user's returns: a module, or what `open_model` makes of one."""
    assert request.python is not None, "who asks for code to be run names it"
    _check_alone("--python", request, but=("context", "dt"))
    if request.stream:
        raise ConfigError(f"{request.python!r} returns a model that is there already: leave out --stream")
    made, dtype = called(request.python), get_dtype(request.dtype)
    if isinstance(made, Opened):
        raise ConfigError(f"{request.python!r} returns what open_model gives: return the module itself")
    if not isinstance(made, nn.Module):
        raise ConfigError(f"{request.python!r} returns a {type(made).__name__}: return an nn.Module")
    example, given = (None, None) if request.example is None else _example(request.example)
    if example is None and request.images is not None and not hasattr(getattr(made, "config", None), "model_type"):
        if request.images.suffix != ".npy":
            raise ConfigError(
                f"{request.python!r} does not say of which size its images are: give --images an .npy array of them"
            )
        example = torch.from_numpy(read_array(request.images)[:2].copy()).to(dtype)
    opened = open_model(
        made, dtype, dt=check_dt(request.config["dt"]), loss=_loss(request), example=example, **_named_parts(request)
    )
    return [
        dataclasses.replace(
            _of_opened(opened, request, f"weights of {request.python}", Path(request.python).name, trained=True), given=given
        )
    ]


def _loss(request: ModelRequest) -> str | Loss | None:
    """The loss by its name, or the user's function."""
    return function_of(request.loss) if request.loss is not None and ":" in request.loss else request.loss


def _example(value: str) -> tuple[Example, tuple[Tensor, Tensor | None]]:
    """What the model reads as the user's function gives it, and of that the rows and targets of its
    batch.
    """
    made = called(value)
    example, targets = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    inner = next(iter(example.values())) if isinstance(example, Mapping) and len(example) == 1 else None
    named = inner if isinstance(inner, Mapping) else example  # of a forward whose one argument is a mapping, by its name
    rows = next(iter(named.values()), None) if isinstance(named, Mapping) else named
    if not isinstance(rows, Tensor) or not (targets is None or isinstance(targets, Tensor)):
        what = f"a {type(rows).__name__}" if targets is None else f"a {type(rows).__name__} and a {type(targets).__name__}"
        raise ConfigError(
            f"{value!r} returns {what}: return a tensor, or a mapping of a forward's keyword arguments, such a tensor first; or a pair of "
            "that and a tensor of targets"
        )
    if targets is not None and targets.shape[:1] != rows.shape[:1]:
        raise ConfigError(f"{value!r} returns {len(rows)} rows and targets {tuple(targets.shape)}: give as many targets")
    return example, (rows, targets)


def _named_parts(request: ModelRequest) -> dict[str, Any]:
    """What the anatomy's file names, as `open_model` takes it."""
    return {} if request.anatomy is None else vars(read_anatomy(request.anatomy))


def _described(request: ModelRequest) -> list[Subject]:
    source, seed = request.architecture, request.seed
    assert source is not None, "who asks for an architecture names it"
    _check_alone("--architecture", request, but=("context", "dt", "depth", "seed"))
    dtype = get_dtype(request.dtype)
    with quiet(import_transformers()):
        model = from_architecture(
            source,
            seed=seed,
            blocks=request.config["depth"] if "depth" in request.typed else None,
            dt=check_dt(request.config["dt"]),
            dtype=dtype,
            on_demand=request.stream,
            anatomy=None if request.anatomy is None else read_anatomy(request.anatomy),
        )
    place = Path(source)
    directory = None if source in PRESETS else place if os.path.isdir(place) else place.parent
    return [
        _of_opened(
            open_imported(model, directory, _loss(request)), request, f"fresh weights of {source}, seed {seed}", place.name
        )
    ]


def _of_opened(opened: Opened, request: ModelRequest, weights: str, called: str, *, trained: bool = False) -> Subject:
    """The one model, so called, whose architecture takes the place of the options'."""
    config, depth = opened.config, opened.model.depth
    context = opened.longest(request.context)
    longest = context if config.context is None and context < request.context else config.context
    unknown = dict.fromkeys(name for name in request.config if name not in ("context", "dt"))
    return Subject(
        config=config,
        make=lambda: opened.model,
        weights=weights,
        vocabulary=opened.vocabulary,
        blocks=depth.blocks,
        segments=len(depth.sublayers),
        width=config.width,
        context=context,
        longest=longest,
        placements=tuple(dict.fromkeys(sublayer.placement.name for sublayer in depth.sublayers)),
        brought={**unknown, "depth": depth.blocks, "width": config.width, "norm": config.norm, "context": context},
        opened=opened,
        streamed=depth.streamed,
        trained=trained,
        called=called,
    )


SOURCES: dict[str | None, Callable[[ModelRequest], list[Subject]]] = {
    "checkpoint": _saved,
    "model": _foreign,
    "architecture": _described,
    "python": _made,
    None: _seeded,
}
"""Where models come from, by the option that says so; without one they are drawn from a seed."""


def _names(config: GPTConfig) -> tuple[str, ...]:
    names = tuple(placement.name for placement in placements_in(config.placement))
    if not config.is_stack:
        return names
    return ("output",) if config.placements[-1].ffn.final_norm else ("none",)  # the velocity's


def _check_alone(option: str, request: ModelRequest, *, but: Sequence[str]) -> None:
    given = [name for name in BROUGHT if name in request.typed and name not in but]
    if given:
        raise ConfigError(f"{option} brings its own {' and '.join(given)}: leave the option out, or leave out {option}")


def settle_threads(found: Sequence[Subject], tokens: Tensor, dtype: torch.dtype) -> None:
    """As many threads as the largest of these models is worth on these tokens, where the processor
    computes (`ctrans.threads`).
    """
    if tokens.device.type == "cpu":
        sizes = (flops(subject.width, len(tokens), tokens_of(subject, tokens)) for subject in found)
        choose_threads(max(sizes), dtype.itemsize)


def tokens_of(subject: Subject, inputs: Tensor) -> int:
    """How many tokens the model makes of each of these sequences or images."""
    if subject.opened is None or subject.opened.vocabulary:
        return inputs.shape[1]
    with torch.no_grad():
        return subject.opened.embed(inputs[:1].cpu()).shape[-2]
