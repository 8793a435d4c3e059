"""What a user asks of a command: one frozen request, whose fields are the command's options."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, TypeVar

import click
import torch
from click.core import ParameterSource

from ctrans.cli.click_options import GroupedCommand, argument, each, parameters_of, placements_option, settings_in, settings_of
from ctrans.interop.architecture import PRESETS
from ctrans.interop.losses import LOSS_NAMES
from ctrans.model.checkpoint import load_config
from ctrans.model.config import GPTConfig
from ctrans.option import COUNT, check_options, option
from solvers import ConfigError
from solvers.errors import look_up

MODEL_OPTIONS = ("checkpoint", "model", "architecture", "python")
"""Options that name a model, in place of a seeded one."""
DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """The request of any command. Fields made with `option` are its options.

    - `command`: its name
    - `options`: the value of each option by name, in click's order; results show them
    - `typed`: the names of the options that the user typed
    """

    command: str
    options: Mapping[str, Any]
    typed: frozenset[str]
    json_path: str | None = option(
        None,
        "Write the result as one JSON object to this file; - is stdout, and nothing else is printed there.",
        group="Output",
        flags="--json",
        metavar="PATH",
    )
    html_path: str | None = option(
        None,
        "Write the result as a page, too: one HTML file with interactive figures and sortable tables. It needs no network "
        "(pip install 'ctrans[report]').",
        group="Output",
        flags="--html",
        metavar="PATH",
    )
    verbose: bool = option(False, "Also print formulas, more columns and further tables.", group="Output")

    unshown: ClassVar[frozenset[str]] = frozenset({"json_path", "html_path", "verbose"})
    """Options that no result shows."""
    defaults: ClassVar[Mapping[str, Any]] = {}
    """The command's defaults, where they differ from those of the fields."""

    @classmethod
    def read(cls, parameters: Mapping[str, Any]) -> Mapping[str, Any]:
        """The fields' values, from click's parameters."""
        return parameters

    @property
    def quiet(self) -> bool:
        """Whether stdout is for the JSON alone."""
        return self.json_path == "-"

    def shown(self, **resolved: Any) -> dict[str, Any]:
        """The options for JSON. `resolved` replaces values, or adds them at the end."""
        values = {name: value for name, value in self.options.items() if name not in self.unshown}
        return {name: _in_words(value) for name, value in (values | resolved).items()}


@dataclasses.dataclass(frozen=True, kw_only=True)
class WrittenRequest(Request):
    """The request of a command that writes files; `out` is their directory."""

    out: Path | None = option(
        None, "Directory for the result's files.", group="Output", default_words="out/COMMAND; none with --json -"
    )

    unshown: ClassVar[frozenset[str]] = Request.unshown | {"out"}


def _in_single_precision(context: click.Context, parameter: click.Parameter, values: Any) -> Any:
    """`each`; the default of --dtype becomes float32."""
    value = each(context, parameter, values)
    if value is not None:
        context.default_map = {**(context.default_map or {}), "dtype": "float32"}
    return value


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelRequest(WrittenRequest):
    """The request of a command that runs models on a text.

    - `placements`: as they were typed: "all" stands for the whole table
    - `config`: the other fields of `GPTConfig`, of the seeded models
    - `named`: models as arguments: a local Hugging Face directory, nanoGPT's ckpt.pt, or what
      ctrans saved
    - `checkpoint`, `model`, `architecture`, `python`: where the model comes from in place of a
      seed, also if it was an argument
    - `several`: option and value of each model, where there is more than one; the options' own
      fields are then None
    """

    named: tuple[Path, ...] = argument("[MODEL]")
    placements: tuple[str, ...] = placements_option("peri")
    config: Mapping[str, Any] = settings_of(GPTConfig, without=("placement",))
    seed: int = option(0, "Seed of the weights.", group="Weights")
    file: Path | None = option(
        None, "Read this file's bytes as the text.", group="Data", default_words="Python's language documentation"
    )
    text: str | None = option(None, "Read this text.", group="Data")
    ids: Path | None = option(
        None,
        "Read token ids instead of text: nanoGPT's val.bin (two bytes each), or a row of integers in an .npy file.",
        group="Data",
        metavar="FILE",
    )
    images: Path | None = option(
        None,
        "Read images, for a model of images: a folder (PNG, JPEG, BMP, WebP), scaled to the model's size as its "
        "preprocessor_config.json says; or an .npy array (count, channels, height, width) of bytes or of numbers as the model reads "
        "them. For a model of audio the array is (count, frequencies, frames). Of a model with two towers ctrans takes the one for images.",
        group="Data",
        metavar="PATH",
    )
    batch: int = option(4, "Sequences, spread evenly over the text.", group="Data", limits=COUNT)
    dtype: str = option("float64", "Type of the numbers.", group="Device", choices=DTYPES)
    device: str = option("cpu", "cpu, cuda, cuda:1.", group="Device")
    checkpoint: Path | None = option(
        None,
        "Use a model that ctrans saved (a directory with config.json and model.safetensors), or that of a training run, instead of a "
        "seeded one. --context may shorten its sequences. screen and diagnose compare models: there you can repeat this option and "
        "the next three.",
        group="Other models",
        multiple=True,
        callback=each,
    )
    model: Path | None = option(
        None,
        "Use somebody else's model instead of a seeded one: a local Hugging Face directory (GPT-2, BERT, Llama, Qwen, Gemma, OLMo and "
        "similar ones), nanoGPT's ckpt.pt, or a directory with one. Nothing is downloaded. The directory's tokenizer reads the text; "
        "without one each byte is a token, or --ids has the tokens. The loss is that of the next token, or for masked language models "
        "(BERT) that of every seventh token, which is masked. --dt (1 is the model itself), --context, --dtype and --device apply; "
        "the rest of the architecture is the model's.",
        group="Other models",
        metavar="PATH",
        multiple=True,
        callback=each,
    )
    architecture: str | None = option(
        None,
        "Use somebody else's architecture with weights drawn from --seed, as its library initialises it: a Hugging Face config.json, "
        f"or a published shape, one of {', '.join(PRESETS)}. --depth changes the number of blocks. --dtype is float32 unless you give it.",
        group="Other models",
        metavar="NAME",
        multiple=True,
        is_eager=True,
        callback=_in_single_precision,
    )
    python: str | None = option(
        None,
        "Use the nn.Module that this function of yours returns. If it does not read token ids, give --images or --example. This runs "
        "the code of the module (installed, in this directory, or a .py file). Only --plugin, --example and a --loss of that form run "
        "code, too.",
        group="Other models",
        metavar="MODULE:FUNCTION",
        multiple=True,
        callback=each,
    )
    example: str | None = option(
        None,
        "What the model of --python reads, if it is not token ids: your function returns a batch (a tensor, or the keyword arguments "
        "of the model's forward), or a pair of that and targets for --loss. This runs its code. ctrans uses this batch unless you give "
        "--images or a text.",
        group="Other models",
        metavar="MODULE:FUNCTION",
    )
    anatomy: Path | None = option(
        None,
        "Where a model has its parts, if ctrans does not find them: blocks, attention, ffn. Each is a path of attributes, or several "
        'in the order in which they act: blocks = "model.layers".',
        group="Other models",
        metavar="FILE.toml",
    )
    loss: str | None = option(
        None,
        "Which loss the backward figures of somebody else's model belong to: "
        + "; ".join(f"{name} ({what})" for name, what in LOSS_NAMES.items())
        + "; or a function of yours that takes the model's output and the targets and returns a number (this runs its code).",
        group="Other models",
        metavar="NAME|MODULE:FUNCTION",
        default_words="next or mlm, as the model reads; random for one without a head of logits",
    )
    stream: bool | None = option(
        None,
        "Make the weights of each sublayer when it is reached, and drop them afterwards: drawn anew, or read from the files. This "
        "needs the memory of one sublayer. The result is the same, bit for bit; a screening leaves out what needs all weights at once.",
        group="Other models",
        default_words="if the weights would take a quarter of the memory",
    )
    several: tuple[tuple[str, Any], ...] = ()

    defaults: ClassVar[Mapping[str, Any]] = {"depth": 12, "context": 128}
    compares: ClassVar[bool] = False
    """Whether several models may be named."""
    unshown: ClassVar[frozenset[str]] = WrittenRequest.unshown | {"placements", "norms"}

    @property
    def norms(self) -> tuple[str, ...]:
        """The norms, as they were typed."""
        return (self.config["norm"],)

    @property
    def context(self) -> int:
        """How many tokens a sequence has."""
        length: int = self.config["context"]
        return length

    @classmethod
    def read(cls, parameters: Mapping[str, Any]) -> Mapping[str, Any]:
        given = [("checkpoint" if is_ours(path) else "model", path) for path in parameters["named"]]
        given += [(option, value) for option in MODEL_OPTIONS for value in _values(parameters[option])]
        several = tuple(given) if len(given) > 1 else ()
        return {**parameters, "several": several, **dict.fromkeys(MODEL_OPTIONS), **({} if several else dict(given))}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ComparisonRequest(ModelRequest):
    """The request of a command that takes several models."""

    named: tuple[Path, ...] = argument("[MODEL]...")

    compares = True


def is_ours(path: Path) -> bool:
    """Whether ctrans saved what is there; of anything else, whoever opens it says what it is."""
    try:
        load_config(path)
        return True
    except ConfigError:
        return False


def _in_words(value: Any) -> Any:
    """Paths, alone or in a tuple, as text."""
    return [_in_words(each) for each in value] if isinstance(value, tuple) else str(value) if isinstance(value, Path) else value


def _values(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else () if value is None else (value,)


Asked = TypeVar("Asked", bound=Request)


def request_of(kind: type[Asked], context: click.Context) -> Asked:
    """The request of a command that is being called. Raises ConfigError for values beyond their
    limits (`check_options`).
    """
    given, settings = context.params, settings_in(kind)
    values: dict[str, Any] = {field: {name: given[name] for name in names} for field, names in settings.items()}
    fields = {field.name for field in dataclasses.fields(kind)} - values.keys()
    values |= {name: value for name, value in kind.read(given).items() if name in fields}
    typed = [name for name in given if context.get_parameter_source(name) is ParameterSource.COMMANDLINE]
    made = kind(command=str(context.command.name), options=MappingProxyType(dict(given)), typed=frozenset(typed), **values)
    check_options(made)
    return made


def command_of(kind: type[Asked], name: str, epilog: str | None = None) -> Callable[[Callable[[Asked], None]], click.Command]:
    """Makes a function of one request a command with the request's options."""

    def decorate(command: Callable[[Asked], None]) -> click.Command:
        @click.pass_context
        def call(context: click.Context, /, **_: object) -> None:
            command(request_of(kind, context))

        return GroupedCommand(
            name,
            context_settings={"default_map": kind.defaults},
            callback=call,
            params=parameters_of(kind),
            help=inspect.getdoc(command),
            epilog=epilog,
        )

    return decorate


def get_dtype(name: str) -> torch.dtype:
    """The dtype of that name; ConfigError otherwise."""
    return look_up("dtype", name, DTYPES)


def get_device(name: str) -> torch.device:
    """The device of that name; ConfigError where this machine has none such."""
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (
        RuntimeError,
        AssertionError,
        ImportError,
        ValueError,
        TypeError,
    ):  # each backend that is not there says so in its way
        raise ConfigError(
            f"device {name!r} is not available here: use --device cpu, or install a torch that supports it"
        ) from None
    if device.type == "meta":
        raise ConfigError("device 'meta' holds no numbers: use --device cpu")
    return device
