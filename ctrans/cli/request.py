"""Requests: frozen dataclasses whose fields are the options of a command."""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, TypeVar

import click
import torch
from click.core import ParameterSource

from ctrans.base.option import COUNT, check_options, option, options_of
from ctrans.cli.click_options import (
    GroupedCommand,
    OptionValues,
    argument,
    parameters_of,
    placements_option,
    settings_in,
    settings_of,
)
from ctrans.cli.exits import Exit
from ctrans.cli.say import stdout_apart
from ctrans.interop.loss_names import LOSS_NAMES
from ctrans.interop.presets import PRESETS
from ctrans.model.checkpoint import load_config
from ctrans.model.config import GPTConfig
from ctrans.training.processes import get_device
from solvers import ConfigError, look_up

MODEL_OPTIONS = ("checkpoint", "model", "architecture", "python")
"""Options that name a model. Without them the model is a seeded GPT."""
STDOUT = "ctrans.stdout"
"""The key of click's context for the stream that has the object of --json -."""
DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, kw_only=True)
class Request:
    """The request of any command. Fields made with `option` are options.

    - `command`: the command's name
    - `options`: the value of each option by name, in click's order; results show them
    - `typed`: the names of the options that the user typed
    """

    command: str
    options: OptionValues
    typed: frozenset[str]
    json_path: str | None = option(
        None,
        "Write the result as one JSON object to this file. - writes it to stdout and prints nothing"
        " else there.",
        group="Output",
        flags="--json",
        metavar="PATH",
    )
    html_path: str | None = option(
        None,
        "Also write the result as one HTML file. It has interactive figures and sortable tables,"
        " and needs no network (pip install 'ctrans[report]').",
        group="Output",
        flags="--html",
        metavar="PATH",
    )
    verbose: bool = option(
        default=False,
        help="Also print formulas, more columns and further tables.",
        group="Output",
    )

    unshown: ClassVar[frozenset[str]] = frozenset({"json_path", "html_path", "verbose"})
    """Options that results do not show."""
    defaults: ClassVar[OptionValues] = {}
    """The command's defaults, where they differ from those of the fields."""
    common: ClassVar[frozenset[str]] = frozenset()
    """The options that --help shows; if there are none, it shows all. --help-all always does."""

    @property
    def quiet(self) -> bool:
        """Whether stdout holds the JSON only."""
        return self.json_path == "-"

    def shown(self, **resolved: Any) -> dict[str, Any]:
        """The options for JSON. `resolved` replaces values or appends them."""
        values = {name: value for name, value in self.options.items() if name not in self.unshown}
        return {name: _in_words(value) for name, value in (values | resolved).items()}


@dataclass(frozen=True, kw_only=True)
class WrittenRequest(Request):
    """The request of a command that writes files; `out` is their directory."""

    out: Path | None = option(
        None,
        "Directory for the result's files.",
        group="Output",
        default_words="out/COMMAND; none with --json -",
    )

    unshown = Request.unshown | {"out"}


def _available(context: click.Context, parameter: click.Parameter, device: str) -> str:
    """Callback that raises ConfigError for a device that this machine does not have."""
    get_device(device)
    return device


def _in_single_precision(context: click.Context, parameter: click.Parameter, values: Any) -> Any:
    """Callback that makes float32 the default of --dtype if the option has a value."""
    if values:
        context.default_map = {**(context.default_map or {}), "dtype": "float32"}
    return values


@dataclass(frozen=True, kw_only=True)
class ModelRequest(WrittenRequest):
    """The request of a command that runs models on a text.

    - `placements`: placements as typed; "all" stands for the whole table
    - `config`: the other fields of `GPTConfig`, for seeded models
    - `named`: models as arguments: a local Hugging Face directory, nanoGPT's ckpt.pt, or a model
      that ctrans saved
    - `checkpoint`, `model`, `architecture`, `python`: models as options; use `named_models`, which
      joins them with the arguments
    """

    named: tuple[Path, ...] = argument("[MODEL]")
    placements: tuple[str, ...] = placements_option("peri")
    config: OptionValues = settings_of(GPTConfig, without=("placement",))
    seed: int = option(0, "Seed of the weights.", group="Weights")
    file: Path | None = option(
        None,
        "Read this file's bytes as the text.",
        group="Data",
        default_words="Python's language documentation",
    )
    text: str | None = option(None, "Read this text.", group="Data")
    ids: Path | None = option(
        None,
        "Read token ids instead of text: nanoGPT's val.bin (two bytes for each), or a row of"
        " integers in an .npy file.",
        group="Data",
        metavar="FILE",
    )
    images: Path | None = option(
        None,
        "Read images: a folder (PNG, JPEG, BMP, WebP), which ctrans scales to the model's size by"
        " its preprocessor_config.json; or an .npy array (count, channels, height, width) of bytes"
        " or of the numbers that the model reads. For a model of audio the array is (count,"
        " frequencies, frames). Of a model with two towers ctrans takes the image tower.",
        group="Data",
        metavar="PATH",
    )
    batch: int = option(4, "Sequences, spread evenly over the text.", group="Data", limits=COUNT)
    dtype: str = option("float64", "Type of the numbers.", group="Device", choices=DTYPES)
    device: str = option("cpu", "cpu, cuda, cuda:1.", group="Device", callback=_available)
    checkpoint: tuple[Path, ...] = option(
        (),
        "Use a model that ctrans saved or a training run instead of a seeded model. A saved model"
        " is a directory with config.json and model.safetensors. --context can shorten its"
        " sequences. screen and diagnose compare models: with them you can repeat this option and"
        " the next three.",
        group="Other models",
    )
    model: tuple[Path, ...] = option(
        (),
        "Use a model of another library: a Hugging Face directory or nanoGPT's ckpt.pt. The"
        " Hugging Face directory is local (GPT-2, BERT, Llama, Qwen, Gemma, OLMo and similar"
        " models); a directory with a ckpt.pt works too. ctrans downloads nothing. The directory's"
        " tokenizer reads the text. Without a tokenizer each byte is a token, or you give --ids."
        " The loss is that of the next token; for masked language models (BERT) ctrans masks every"
        " seventh token and takes its loss. --dt (1 is the model itself), --context, --dtype and"
        " --device apply; the model sets the rest of the architecture.",
        group="Other models",
        metavar="PATH",
    )
    architecture: tuple[str, ...] = option(
        (),
        "Use an architecture of another library with weights drawn from --seed. The library's"
        " initialisation draws them. Give a Hugging Face config.json, or a published shape, one of"
        f" {', '.join(PRESETS)}. --depth changes the number of blocks. The default of --dtype is"
        " then float32.",
        group="Other models",
        metavar="NAME",
        is_eager=True,
        callback=_in_single_precision,
    )
    python: tuple[str, ...] = option(
        (),
        "Use the nn.Module that this function of yours returns. If it does not read token ids, give"
        " --images or --example. This runs the code of the Python module (installed, in this"
        " directory, or a .py file). The only other options that run code are --plugin, --example"
        " and --loss with a function.",
        group="Other models",
        metavar="MODULE:FUNCTION",
    )
    example: str | None = option(
        None,
        "What the model of --python reads, if not token ids. Your function returns a batch (a"
        " tensor, or the keyword arguments of the model's forward), or a pair of a batch and"
        " targets for --loss. This runs its code. ctrans uses this batch unless you give --images"
        " or a text.",
        group="Other models",
        metavar="MODULE:FUNCTION",
    )
    anatomy: Path | None = option(
        None,
        "Where to find the model's blocks, attention and ffn, if ctrans does not find them. Each"
        " is a path of attributes, or several in the order in which they act: blocks ="
        ' "model.layers".',
        group="Other models",
        metavar="FILE.toml",
    )
    loss: str | None = option(
        None,
        "The loss of a model of another library, for the backward figures: "
        + "; ".join(f"{name} ({what})" for name, what in LOSS_NAMES.items())
        + "; or a function of yours that takes the model's output and the targets, and returns a"
        " number (this runs its code).",
        group="Other models",
        metavar="NAME|MODULE:FUNCTION",
        default_words="next or mlm, by the model's attention; random without a head of logits",
    )
    allow_pickle: bool = option(
        default=False,
        help="Also read the pytorch_model.bin of a Hugging Face directory without safetensors."
        " torch's restricted unpickler reads it, which builds tensors and runs no code.",
        group="Other models",
    )
    stream: bool | None = option(
        None,
        "Draw or read the weights of each sublayer when a pass reaches it, and drop them"
        " afterwards. This needs the memory of one sublayer. The result is the same, bit for bit. A"
        " screening skips the steps that need all weights at once.",
        group="Other models",
        default_words="if the weights would take a quarter of the memory",
    )

    defaults: ClassVar[OptionValues] = {"depth": 12, "context": 128}
    compares: ClassVar[bool] = False
    """Whether the command takes several models."""
    common: ClassVar[frozenset[str]] = frozenset(
        {
            "placements",
            "context",
            "depth",
            "width",
            "heads",
            "dt",
            "norm",
            "seed",
            "file",
            "device",
            "checkpoint",
            "model",
            "architecture",
            "json_path",
            "html_path",
            "verbose",
            "out",
        }
    )
    unshown = WrittenRequest.unshown | {"placements", "norms"}

    @property
    def norms(self) -> tuple[str, ...]:
        """The norms as typed."""
        return (self.config["norm"],)

    @property
    def context(self) -> int:
        """The number of tokens of a sequence."""
        length: int = self.config["context"]
        return length

    @functools.cached_property
    def named_models(self) -> tuple[tuple[str, Any], ...]:
        """Option and value of each model that the user named; () for seeded models.

        An argument counts as --checkpoint if ctrans saved it, and as --model otherwise. Raises
        ConfigError for one that is named twice.
        """
        named: list[tuple[str, Any]] = []
        for path in self.named:
            named.append(("checkpoint" if is_ours(path) else "model", path))
        for option_name in MODEL_OPTIONS:
            named += [(option_name, value) for value in getattr(self, option_name)]
        for named_model in named:
            if named.count(named_model) > 1:
                raise ConfigError(f"{str(named_model[1])!r} is named twice: name each model once")
        return tuple(named)

    def shown(self, **resolved: Any) -> dict[str, Any]:
        single_models: dict[str, Any] = {}
        for name in MODEL_OPTIONS:
            values = self.options[name]
            if len(values) < 2:
                single_models[name] = values[0] if values else None
        return super().shown(**{**single_models, **resolved})


@dataclass(frozen=True, kw_only=True)
class ComparisonRequest(ModelRequest):
    """The request of a command that takes several models."""

    named: tuple[Path, ...] = argument("[MODEL]...")

    compares = True


def is_ours(path: Path) -> bool:
    """Whether the path holds a model that ctrans saved."""
    try:
        load_config(path)
        return True
    except ConfigError:
        return False


def _in_words(value: Any) -> Any:
    """Paths, alone or in a tuple, as text."""
    if isinstance(value, tuple):
        return [_in_words(entry) for entry in value]
    if isinstance(value, Path):
        return str(value)
    return value


Asked = TypeVar("Asked", bound=Request)


def request_of(kind: type[Asked], context: click.Context) -> Asked:
    """The request of a command from click's parameters. Raises ConfigError for values that
    `check_options` does not allow.
    """
    options = context.params
    values: dict[str, Any] = {
        field: {name: options[name] for name in names} for field, names in settings_in(kind).items()
    }
    values |= {field.name: options[field.name] for field in fields(kind) if field.name in options}
    typed = [
        name
        for name in options
        if context.get_parameter_source(name) is ParameterSource.COMMANDLINE
    ]
    request = kind(
        command=str(context.command.name),
        options=MappingProxyType(dict(options)),
        typed=frozenset(typed),
        **values,
    )
    check_options(request)
    return request


def command_of(
    kind: type[Asked], name: str, epilog: str | None = None
) -> Callable[[Callable[[Asked], None]], click.Command]:
    """Makes a command of a function that takes a request. The command has the request's options."""

    def decorate(command: Callable[[Asked], None]) -> click.Command:
        @click.pass_context
        def call(context: click.Context, /, **_: object) -> None:
            request = request_of(kind, context)
            try:
                with contextlib.ExitStack() as stack:
                    if request.quiet:  # models of users may print
                        stack.enter_context(stdout_apart())
                        context.meta[STDOUT] = sys.stdout
                        stack.enter_context(contextlib.redirect_stdout(sys.stderr))
                    command(request)
            except SystemExit as stop:
                # rich exits where nobody reads
                nobody_reads = isinstance(stop.__context__, BrokenPipeError)
                if isinstance(stop, Exit) or nobody_reads:
                    raise
                raise ConfigError(
                    "code of a model or a plugin ended the command by sys.exit: remove that call"
                ) from None

        click_command = GroupedCommand(
            name,
            context_settings={"default_map": kind.defaults},
            callback=call,
            params=parameters_of(kind),
            help=inspect.getdoc(command),
            epilog=epilog,
        )
        click_command.common = kind.common
        return click_command

    return decorate


def check_exclusive(request: Request, *pairs: tuple[str, str]) -> None:
    """Raises ConfigError if both options of a pair are given."""
    kind: Any = type(request)  # a class is hashable, which mypy does not know
    about = options_of(kind)
    for pair in pairs:
        if all(getattr(request, name) not in (None, False) for name in pair):
            first, second = (about[name].flag(name) for name in pair)
            raise ConfigError(f"{first} and {second} exclude each other: choose one")


def absolute_paths(**paths: Path | None) -> dict[str, str | None]:
    """Paths as text that any directory may read."""
    return {name: None if path is None else str(path.absolute()) for name, path in paths.items()}


def get_dtype(name: str) -> torch.dtype:
    """The dtype of that name. Raises ConfigError for an unknown one."""
    return look_up("dtype", name, DTYPES)
