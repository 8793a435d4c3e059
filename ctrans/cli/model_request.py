"""Requests of commands that run models: which models, and what they read."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import click
import torch

from ctrans.base.option import COUNT, option
from ctrans.cli.click_options import OptionValues, argument, placements_option, settings_of
from ctrans.cli.request import WrittenRequest
from ctrans.interop.loss_names import LOSS_NAMES
from ctrans.interop.presets import PRESETS
from ctrans.model.checkpoint import load_config
from ctrans.model.config import GPTConfig
from ctrans.training.processes import get_device
from solvers import ConfigError, look_up

MODEL_OPTIONS = ("checkpoint", "model", "architecture", "python")
"""Options that name a model. Without them the model is a seeded GPT."""
DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}


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
    fewest_rows: ClassVar[int] = 1
    """Images, or rows of an example, that the command reads by default, at least."""
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
            "explain",
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


def get_dtype(name: str) -> torch.dtype:
    """The dtype of that name. Raises ConfigError for an unknown one."""
    return look_up("dtype", name, DTYPES)
