"""Options that commands share, and what they stand for."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click
import torch
from click.core import ParameterSource
from torch import Tensor

from ctrans.checkpoint import load, load_config
from ctrans.depth import check_count
from ctrans.depth_weights import BASES
from ctrans.gpt import FREE, GPT, GPTConfig, check_buildable
from ctrans.initialisation import INITIALISATIONS
from ctrans.norm import NORMS
from ctrans.placement import PLACEMENTS
from ctrans.report.files import check_writable, to_json, write_atomic
from ctrans.sublayer import ACTIVATIONS
from ctrans.text import VOCABULARY, read_text, to_tokens
from solvers import ConfigError
from solvers.errors import unknown

DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}
Command = Callable[..., Any]


def one_of(names: Sequence[str] | dict[str, Any]) -> str:
    """The allowed names for a help text."""
    return "one of " + ", ".join(names)


def stack(*options: Callable[[Command], Command]) -> Callable[[Command], Command]:
    """Several options as one decorator, shown in this order."""
    return lambda command: functools.reduce(lambda wrapped, option: option(wrapped), reversed(options), command)


placement_option = click.option(
    "--placement",
    "placements",
    multiple=True,
    default=("peri",),
    show_default=True,
    metavar="NAME",
    help=f"Repeatable; all, or {one_of(PLACEMENTS)}.",
)

size_options = stack(
    click.option("--depth", default=12, show_default=True, help="Blocks, each an attention and an FFN sublayer."),
    click.option("--width", default=128, show_default=True, help="Width d of a token."),
    click.option("--heads", default=4, show_default=True, help="Attention heads; they divide the width."),
    click.option("--context", default=128, show_default=True, help="Tokens per sequence."),
    click.option("--dt", default=1.0, show_default=True, help="Residual scale: the length of a segment in depth-time."),
)

norm_option = click.option(
    "--norm", default="layernorm", show_default=True, metavar="NAME", help=f"{one_of(NORMS).capitalize()}."
)

weight_options = stack(
    click.option(
        "--init",
        "initialisation",
        default="gpt2",
        show_default=True,
        metavar="NAME",
        help=f"{one_of(INITIALISATIONS).capitalize()}.",
    ),
    click.option(
        "--embedding-std",
        default=0.02,
        show_default=True,
        help="Standard deviation of the embeddings, so the size of X at depth 0.",
    ),
    click.option("--activation", default="gelu", show_default=True, metavar="NAME", help=f"{one_of(ACTIVATIONS).capitalize()}."),
    click.option("--seed", default=0, show_default=True, help="Seed of the weights."),
)

depth_weights_options = stack(
    click.option(
        "--depth-weights",
        default=FREE,
        show_default=True,
        metavar="NAME",
        help=f"Weights as functions of depth: {one_of([FREE, *BASES])}.",
    ),
    click.option("--knots", type=int, help="Coefficients of such a function, at any depth.  [default: 4]"),
)

architecture_options = stack(size_options, norm_option, weight_options)
ARCHITECTURE = ("depth", "width", "heads", "context", "dt", "initialisation", "embedding_std", "activation")

text_options = stack(
    click.option(
        "--file",
        type=click.Path(path_type=Path),
        help="Read this file's bytes instead of the default text (Python's language documentation).",
    ),
    click.option("--text", help="Use this text instead."),
    click.option("--batch", default=4, show_default=True, help="Sequences, spread evenly over the text."),
)

device_option = click.option("--device", default="cpu", show_default=True, help="cpu, cuda, cuda:1.")

device_options = stack(
    click.option("--dtype", default="float64", show_default=True, metavar="NAME", help=f"{one_of(DTYPES).capitalize()}."),
    device_option,
)

json_option = click.option(
    "--json", "json_path", metavar="PATH", help="Write the result as one JSON object there; - is stdout, with nothing else on it."
)


checkpoint_option = click.option(
    "--checkpoint",
    type=click.Path(path_type=Path),
    help="Directory of a saved model (config.json, model.safetensors), or of a training run, in place of a seeded one; --context "
    "may shorten its sequences.",
)


def out_option(name: str, beside: str = "png") -> Callable[[Command], Command]:
    """Where a command's files go; nothing is written by default when the JSON goes to stdout."""
    return click.option(
        "--out",
        type=click.Path(path_type=Path),
        help=f"Directory for {name}.json and {name}.{beside}.  [default: out/{name}; none with --json -]",
    )


def expand(names: Sequence[str], table: dict[str, Any], what: str) -> list[str]:
    """The names, each once, `all` standing for the whole table; ConfigError for one that is not in it."""
    wanted = dict.fromkeys(name for given in names for name in (table if given == "all" else [given]))
    for name in wanted:
        if name not in table:
            raise unknown(what, name, [*table, "all"])
    return list(wanted)


def get_dtype(name: str) -> torch.dtype:
    """The dtype of that name; ConfigError otherwise."""
    if name not in DTYPES:
        raise unknown("dtype", name, DTYPES)
    return DTYPES[name]


def get_device(name: str) -> torch.device:
    """The device of that name; ConfigError where this machine has none such."""
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError):
        raise ConfigError(
            f"device {name!r} is not available here: use --device cpu, or install a torch that supports it"
        ) from None
    if device.type == "meta":
        raise ConfigError("device 'meta' holds no numbers: use --device cpu")
    return device


def architectures(settings: dict[str, Any], placements: Sequence[str], norms: Sequence[str]) -> list[GPTConfig]:
    """Every norm with every placement asked for, or the one architecture of `--checkpoint`, which then fills the settings.

    ConfigError for what cannot be, and for options that contradict the checkpoint.
    """
    path = settings["checkpoint"]
    if path is None:
        names = [
            (norm, placement)
            for norm in expand(norms, NORMS, "norm")
            for placement in expand(placements, PLACEMENTS, "placement")
        ]
        configs = [make_config(settings, placement, norm) for norm, placement in names]
    else:
        context = click.get_current_context()
        own = [name for name in ("placements", "norm", "norms", "seed", *ARCHITECTURE) if name != "context"]
        given = [name for name in own if context.get_parameter_source(name) is ParameterSource.COMMANDLINE]
        if given:
            raise ConfigError(
                f"--checkpoint brings its own {' and '.join(given)}: leave the option out, or leave out --checkpoint"
            )
        saved = load_config(path)
        length = min(settings["context"], saved.context)
        settings.update({name: getattr(saved, name) for name in ARCHITECTURE}, context=length, norm=saved.norm)
        configs = [saved]
    for config in configs:
        check_buildable(config, settings["seed"])
    return configs


def make_config(settings: dict[str, Any], placement: str, norm: str) -> GPTConfig:
    """The architecture that `architecture_options` describe; ConfigError for what cannot be."""
    return GPTConfig(VOCABULARY, placement=placement, norm=norm, **{name: settings[name] for name in ARCHITECTURE})


def read_tokens(settings: dict[str, Any], length: int) -> Tensor:
    """Sequences of that many tokens from what `text_options` say."""
    check_count("batch", settings["batch"])
    return to_tokens(read_text(settings["file"], settings["text"]), settings["batch"], length)


def printable(settings: dict[str, Any]) -> dict[str, Any]:
    """The options for JSON."""
    return {key: str(value) if isinstance(value, Path) else value for key, value in settings.items()}


def make_model(config: GPTConfig, settings: dict[str, Any], dtype: torch.dtype, device: torch.device) -> GPT:
    """The checkpoint's or a seeded GPT, ready to be looked at: no gradients, evaluation mode."""
    path = settings["checkpoint"]
    return (
        (GPT(config, seed=settings["seed"]) if path is None else load(path))
        .to(device=device, dtype=dtype)
        .requires_grad_(False)
        .eval()
    )


def out_directory(out: Path | None, json_path: str | None, name: str) -> Path | None:
    """Where files go: as asked, nowhere when the JSON goes to stdout, else out/<name>.

    Called when all else about a request is checked and nothing is computed: ConfigError unless files can be written there.
    """
    directory = out if out is not None else None if json_path == "-" else Path("out") / name
    if json_path not in (None, "-"):
        check_writable(Path(json_path).parent)
    if directory is not None:
        check_writable(directory)
    return directory


def write_json(result: dict[str, Any], json_path: str | None, directory: Path | None, name: str) -> None:
    """Writes the result object wherever it was asked for."""
    text = to_json(result) + "\n"
    if directory is not None:
        write_atomic(directory / f"{name}.json", text.encode())
    if json_path == "-":
        click.echo(text, nl=False)
    elif json_path is not None:
        write_atomic(Path(json_path), text.encode())


def environment(device: torch.device) -> dict[str, Any]:
    """What a result depends on besides its options."""
    from ctrans import __version__

    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return {"ctrans": __version__, "torch": torch.__version__, "device": name, "threads": torch.get_num_threads()}
