"""Options that commands share, and what they stand for."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click

from ctrans.cli.request import DTYPES
from ctrans.fields import ACTIVATIONS, ATTENTIONS, EXPERTS, FFNS, POSITIONS, QK_NORMS, ROUTERS, AttentionOptions, ExpertOptions
from ctrans.fields.attention_options import ROTARY_BASE
from ctrans.interop.architecture import PRESETS
from ctrans.interop.losses import LOSS_NAMES
from ctrans.model.config import FREE
from ctrans.model.initialisation import INITIALISATIONS
from ctrans.norm import NORMS, NormOptions
from ctrans.placement import PLACEMENTS, spell
from ctrans.residual import ALIASES, RESIDUALS
from ctrans.weights.functions_of_depth import BASES
from solvers import METHODS, ConfigError
from solvers.errors import unknown

Command = Callable[..., Any]


def one_of(names: Sequence[str] | dict[str, Any]) -> str:
    """The allowed names for a help text."""
    return "one of " + ", ".join(names)


EXPERT_DEFAULTS = ExpertOptions()
OTHERS = [name for name in METHODS if name != "euler" and ":" not in name]
METHOD_HELP = f"euler (with one step: the discrete model), {', '.join(OTHERS)}, or torchdiffeq:NAME."


def stack(*options: Callable[[Command], Command]) -> Callable[[Command], Command]:
    """Several options as one decorator, shown in this order."""
    return lambda command: functools.reduce(lambda wrapped, option: option(wrapped), reversed(options), command)


MIXED = "post/pre for attention and FFN, post*3+pre*9 block by block"
"""How placements are typed that differ within a model (`ctrans.placement.spell`)."""


def placements_option(*default: str) -> Callable[[Command], Command]:
    """Several placements, by default these."""
    return click.option(
        "--placement",
        "placements",
        multiple=True,
        default=default,
        show_default=True,
        metavar="NAME",
        shell_complete=lambda context, parameter, begun: [name for name in ("all", *PLACEMENTS) if name.startswith(begun)],
        help=f"Repeatable; all, or {one_of(PLACEMENTS)}; {MIXED}.",
    )


size_options = stack(
    click.option("--depth", default=12, show_default=True, help="Blocks, each an attention and an FFN sublayer."),
    click.option("--width", default=128, show_default=True, help="Width d of a token."),
    click.option("--heads", default=4, show_default=True, help="Attention heads; they divide the width."),
    click.option("--context", "--tokens", "context", default=128, show_default=True, help="Tokens per sequence."),
    click.option("--dt", default=1.0, show_default=True, help="Residual scale: the length of a segment in depth-time."),
)

norm_option = click.option(
    "--norm", default="layernorm", show_default=True, metavar="NAME", help=f"{one_of(NORMS).capitalize()}."
)

norm_details = stack(
    click.option(
        "--norm-groups", type=int, help="Groups of channels that group_rmsnorm normalises by themselves.  [default: --heads]"
    ),
    click.option("--norm-alpha", type=float, help="alpha of dyt and derf at first.  [default: 0.5]"),
    click.option("--norm-radius", type=float, help="Largest RMS of a token, or entry, that clipping leaves.  [default: 1]"),
)

map_options = stack(
    click.option("--attention", default="softmax", show_default=True, metavar="NAME", help=f"{one_of(ATTENTIONS).capitalize()}."),
    click.option("--ffn", default="mlp", show_default=True, metavar="NAME", help=f"{one_of(FFNS).capitalize()}."),
    click.option("--positions", default="learned", show_default=True, metavar="NAME", help=f"{one_of(POSITIONS).capitalize()}."),
    click.option("--rotary-base", default=ROTARY_BASE, show_default=True, help="Base of the angles of rotary positions."),
    click.option("--rotary-fraction", default=1.0, show_default=True, help="Part of each head that rotary positions turn."),
    click.option("--kv-heads", type=int, help="Heads of keys and values, which query heads share.  [default: --heads]"),
    click.option("--window", type=int, help="How many tokens a token reads, itself and those before it.  [default: all]"),
    click.option(
        "--qk-norm",
        is_flag=False,
        flag_value=next(iter(QK_NORMS)),
        default=None,
        callback=lambda context, parameter, value: value or False,
        metavar="[NAME]",
        help=f"Norm of queries and keys: {one_of(QK_NORMS)}.  [default: none; rms without a name]",
    ),
    click.option("--softcap", type=float, help="c: scores s become c tanh(s/c).  [default: none]"),
    click.option("--sinks", is_flag=True, help="A learned logit of each head in the denominator of its rows."),
    click.option("--gated-output", is_flag=True, help="Multiply the heads' averages by a sigmoid of the input."),
    click.option("--experts", default=EXPERT_DEFAULTS.experts, show_default=True, help="Routed experts, of --ffn moe."),
    click.option("--top-k", default=EXPERT_DEFAULTS.top_k, show_default=True, help="How many of them a token goes through."),
    click.option("--shared-experts", default=0, show_default=True, help="Experts that every token goes through beside."),
    click.option(
        "--router", default=EXPERT_DEFAULTS.router, show_default=True, metavar="NAME", help=f"{one_of(ROUTERS).capitalize()}."
    ),
    click.option(
        "--expert", default=EXPERT_DEFAULTS.expert, show_default=True, metavar="NAME", help=f"{one_of(EXPERTS).capitalize()}."
    ),
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

residual_options = stack(
    click.option(
        "--residual",
        default="plain",
        show_default=True,
        metavar="NAME",
        help=f"How a sublayer's output joins the state: {one_of([*RESIDUALS, *ALIASES])}.",
    ),
    click.option("--streams", type=int, help="Streams of the state, for hyper_connections and mhc.  [default: 4]"),
    click.option(
        "--residual-init", type=float, help="What a residual's gains begin at.  [default: layerscale 0.1, rezero 0, ngpt 0.05]"
    ),
)

parallel_option = stack(
    click.option(
        "--parallel-blocks",
        is_flag=True,
        help="Attention and FFN at once in every block: X + dt (attention(N X) + FFN(N X)).",
    ),
    click.option("--branch-norms", is_flag=True, help="There, an input norm for each of the two, not one for both."),
)

stack_option = click.option(
    "--stack-steps",
    type=int,
    help="Take the whole stack of blocks as one velocity with the same weights at every time (OT-Transformer), in so many steps of "
    "length --dt.  [default: every sublayer is a segment with weights of its own]",
)

architecture_options = stack(
    size_options, norm_option, norm_details, residual_options, parallel_option, stack_option, map_options, weight_options
)
ARCHITECTURE = (
    *("depth", "width", "heads", "context", "dt", "attention", "ffn", "initialisation", "embedding_std", "activation"),
    *(
        "residual",
        "residual_init",
        "streams",
        "parallel_blocks",
        "stack_steps",
        "branch_norms",
        "qk_norm",
        *(field.name for kind in (AttentionOptions, ExpertOptions, NormOptions) for field in dataclasses.fields(kind)),
    ),
)
"""Names of options that are fields of `GPTConfig`."""

text_options = stack(
    click.option(
        "--file",
        type=click.Path(path_type=Path),
        help="Read this file's bytes instead of the default text (Python's language documentation).",
    ),
    click.option("--text", help="Use this text instead."),
    click.option(
        "--ids",
        type=click.Path(path_type=Path),
        metavar="FILE",
        help="Read token ids instead of text: nanoGPT's val.bin (two bytes each), or a row of integers in an .npy file.",
    ),
    click.option(
        "--images",
        type=click.Path(path_type=Path),
        metavar="PATH",
        help="For a model of images: a folder of them (PNG, JPEG, BMP, WebP), scaled to the model's size and by its "
        "preprocessor_config.json; or an .npy array (count, channels, height, width), bytes or numbers as the model reads them; for a "
        "model of audio (count, frequencies, frames). Of a model with two towers, the one for images is looked at.",
    ),
    click.option("--batch", default=4, show_default=True, help="Sequences, spread evenly over the text."),
)

device_option = click.option("--device", default="cpu", show_default=True, help="cpu, cuda, cuda:1.")

device_options = stack(
    click.option("--dtype", default="float64", show_default=True, metavar="NAME", help=f"{one_of(DTYPES).capitalize()}."),
    device_option,
)

json_option = stack(
    click.option(
        "--json",
        "json_path",
        metavar="PATH",
        help="Write the result as one JSON object there; - is stdout, with nothing else on it.",
    ),
    click.option(
        "--html",
        "html_path",
        metavar="PATH",
        help="Write the result as a page too: one file with interactive charts and tables that sort, which needs no network "
        "(pip install 'ctrans[report]').",
    ),
    click.option("--verbose", is_flag=True, help="Also print formulas, more columns and further tables."),
)


def each(context: click.Context, parameter: click.Parameter, values: Sequence[Any]) -> Any:
    """The values of an option that is a model: None, the only one, or a tuple. Raises ConfigError for an empty one."""
    if "" in values:
        raise ConfigError(f"{parameter.opts[0]} '' names nothing: give a value, or leave the option out")
    return tuple(values) if len(values) > 1 else values[0] if values else None


def once(context: click.Context, parameter: click.Parameter, values: Sequence[Any]) -> Any:
    """`each` where one model is looked at; ConfigError for several, of which the last would win unsaid."""
    if len(values) > 1:
        raise one_alone([(parameter.opts[0], value) for value in values])
    return each(context, parameter, values)


def one_alone(given: Sequence[tuple[str, Any]]) -> ConfigError:
    """What a command says that looks at one model and is given these, as flags and values."""
    words = ", ".join(f"{flag} {str(value)!r}" for flag, value in given)
    return ConfigError(f"{len(given)} models are given, {words}, and one is looked at: choose one")


several_models = click.argument("named", metavar="[MODEL]...", nargs=-1, type=click.Path(path_type=Path))
one_model = click.argument("named", metavar="[MODEL]", nargs=-1, type=click.Path(path_type=Path))
"""Models as arguments: a local Hugging Face directory, nanoGPT's ckpt.pt, or what ctrans saved. Of several one command says why not."""

checkpoint_option = click.option(
    "--checkpoint",
    multiple=True,
    callback=each,
    type=click.Path(path_type=Path),
    help="Directory of a model that ctrans saved (config.json, model.safetensors), or of a training run, in place of a seeded one; "
    "--context may shorten its sequences. This and the options below are repeatable where models are compared: screen, diagnose.",
)

model_option = click.option(
    "--model",
    multiple=True,
    callback=each,
    type=click.Path(path_type=Path),
    metavar="PATH",
    help="Somebody else's model in place of a seeded one: a local Hugging Face directory (GPT-2, BERT, Llama, Qwen, Gemma, OLMo and "
    "others alike), nanoGPT's ckpt.pt, or a directory with one. Nothing is downloaded. Text goes through the directory's tokenizer; "
    "without one its bytes are the tokens, or --ids has them. The loss is that of the next token, or of every seventh, hidden, for "
    "models that fill gaps (BERT). --dt (1 is the model itself), --context, --dtype and --device work; "
    "the rest of the architecture is the model's.",
)


def _in_single_precision(context: click.Context, parameter: click.Parameter, values: Sequence[str]) -> Any:
    """`each`, and what it does to the default of --dtype."""
    value = each(context, parameter, values)
    if value is not None:
        context.default_map = {**(context.default_map or {}), "dtype": "float32"}
    return value


architecture_option = click.option(
    "--architecture",
    multiple=True,
    metavar="NAME",
    is_eager=True,
    callback=_in_single_precision,
    help="Somebody else's architecture with weights drawn from --seed as its library initialises it: a Hugging Face config.json, or a "
    f"published shape, {one_of(PRESETS)}. --depth changes the number of blocks; --dtype is float32 unless given.",
)

stream_option = click.option(
    "--stream/--no-stream",
    default=None,
    help="Make each sublayer's weights when it is reached and drop them after, in the memory of one of them: drawn anew, or read "
    "from the files. What is computed is the same, bit for bit; a screening leaves out what needs all weights at once.  "
    "[default: where the weights would take a quarter of the memory]",
)

python_option = click.option(
    "--python",
    "python",
    multiple=True,
    callback=each,
    metavar="MODULE:FUNCTION",
    help="What that function of yours returns, an nn.Module, in place of a seeded model; of what it reads, if not token ids, --images or "
    "--example says. This runs the code of the module (installed, in this directory, or a .py file), which no other option does but "
    "--plugin, --example and a --loss of that form.",
)

anatomy_option = click.option(
    "--anatomy",
    type=click.Path(path_type=Path),
    metavar="FILE.toml",
    help="Where a model has its parts, if that is not seen: blocks, attention, ffn, each a path of attributes (or several, in the order "
    'in which they act): blocks = "model.layers".',
)

loss_option = click.option(
    "--loss",
    metavar="NAME|MODULE:FUNCTION",
    help="What the backward figures of somebody else's model are of: "
    + "; ".join(f"{name} ({what})" for name, what in LOSS_NAMES.items())
    + "; or a function of yours, of what the model returns and targets, to a number (this runs its code, as --python does).  "
    "[default: next or mlm, as the model reads; random for one without a head of logits]",
)

example_option = click.option(
    "--example",
    metavar="MODULE:FUNCTION",
    help="What the model of --python reads, where it is no token ids: that function of yours returns a batch, a tensor or the keyword "
    "arguments of its forward, or a pair of that and targets for --loss. This runs its code, as --python does. Without --images or a text "
    "that batch is what is looked at.",
)

model_options = stack(
    checkpoint_option,
    model_option,
    architecture_option,
    python_option,
    example_option,
    anatomy_option,
    loss_option,
    stream_option,
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


def expand_placements(names: Sequence[str]) -> list[str]:
    """The placements as `ctrans.placement.spell` has them, each once, `all` standing for the whole table; errors likewise."""
    each = dict.fromkeys(name for given in names for name in (PLACEMENTS if given == "all" else [given]))
    return [spell(name) if set("/*+") & set(name) else expand([name], PLACEMENTS, "placement")[0] for name in each]
