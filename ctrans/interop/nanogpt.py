"""Reads and writes nanoGPT checkpoints: the same model under other names, with bit-identical
weights.

nanoGPT (github.com/karpathy/nanoGPT, model.py) is a `pre` model with LayerNorm, GELU, a tied head
and dt = 1.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import re
import sys
import warnings
from collections.abc import Mapping
from numbers import Real
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ctrans.dynamics.placement import spell
from ctrans.dynamics.weights.on_demand import check_present
from ctrans.interop.missing_weights import without_wrappers
from ctrans.interop.ot_transformer import OTTransformer
from ctrans.interop.pickled import is_dense, load_pickled
from ctrans.interop.weight_names import GPT2_NAMES
from ctrans.model.config import GPTConfig
from ctrans.model.gpt import GPT
from solvers import ConfigError, shown, unknown

Settings = Mapping[str, Any]
"""Parts of a checkpoint, or its model's arguments, by name."""

BUILT_IN = GPTConfig(placement="pre")
"""Values of the settings that nanoGPT does not have."""
OT = {"cts": False, "steps": 20, "ln1_on": True, "ln2_on": True, "lnf_on": True, "lmbda": 0.0}
"""Settings of the OT-Transformer's fork, and their defaults."""
OTHER = ("dropout", "tokenization", "random_seed")
"""Settings without effect on a model in evaluation."""
SETTINGS = {
    "vocab_size": "vocab_size",
    "context": "block_size",
    "depth": "n_layer",
    "width": "n_embd",
    "heads": "n_head",
    "bias": "bias",
}
"""Our settings that nanoGPT has, with its names."""
FREE = {*SETTINGS, "initialisation", "embedding_std"}
"""Settings that may differ: nanoGPT has them, or they act only before training."""
CHECKPOINT = "ckpt.pt"
"""The name of nanoGPT's checkpoint in its out directory."""
TIED = "lm_head.weight"
IGNORED = re.compile(r"transformer\.h\.\d+\.attn\.(bias|masked_bias)")
"""Causal masks that old versions keep among the weights."""


def from_nanogpt(source: str | Path | Settings, *, heads: int | None = None) -> GPT | OTTransformer:
    """The GPT of a nanoGPT `ckpt.pt` or its directory, of such a checkpoint in memory, or of a bare
    state dict (which needs `heads`).

    A checkpoint of the OT-Transformer's fork with `cts` gives an `OTTransformer`. Files are read
    only by torch.load(weights_only=True), so no code in them runs, and first in a process with
    limits. Weights of several dtypes are read in the smallest that holds them all. Raises
    ConfigError for a file of another kind, unknown settings, and weights that do not fit. Warns of
    dropout, which is off in the model.
    """
    model, notes = read_nanogpt(source, heads=heads)
    for note in notes:
        warnings.warn(note, stacklevel=3)
    return model


def read_nanogpt(
    source: str | Path | Settings, *, heads: int | None = None
) -> tuple[GPT | OTTransformer, tuple[str, ...]]:
    """`from_nanogpt`, with notes on settings that the model does not have in place of warnings."""
    if isinstance(source, (str, Path)):
        source_name = str(source)
        checkpoint = _read(_file(Path(source)))
    else:
        source_name = "the state dict"
        checkpoint = source
    weights: Settings = checkpoint
    arguments: Settings = {}
    if isinstance(checkpoint.get("model"), Mapping):
        weights = checkpoint["model"]
        arguments = checkpoint.get("model_args", {})
    if not isinstance(arguments, Mapping):
        raise ConfigError(
            f"{source_name!r} holds no nanoGPT model: its model_args are a"
            f" {type(arguments).__name__} and not a dict of settings"
        )
    _check_arguments(source_name, arguments)
    weights = _weights(source_name, weights)
    if heads is None:
        heads = arguments.get("n_head")
    if heads is None:
        raise ConfigError(
            f"{source_name!r} is a bare state dict, which does not state the number of heads: give"
            " heads=... (--heads)"
        )
    config = _config(source_name, weights, heads, arguments)
    dtypes = (weight.dtype for weight in weights.values())
    model = GPT(config).to(functools.reduce(torch.promote_types, dtypes))
    if not _ot(arguments, "lnf_on"):
        model.final_norm = nn.Identity()
    _load(model, source_name, weights)
    notes: tuple[str, ...] = ()
    dropout = arguments.get("dropout")
    if dropout:
        notes = (f"trained with dropout {dropout:g}, which is off here",)
    if not _ot(arguments, "cts"):
        return model, notes
    steps = _ot(arguments, "steps")
    kinetic = float(_ot(arguments, "lmbda"))
    return OTTransformer(model, steps, kinetic=kinetic), notes


def _file(path: Path) -> Path:
    """The checkpoint at that path, or in that directory. Raises ConfigError if there is none."""
    if os.path.isdir(path) and not os.path.isfile(path / CHECKPOINT):
        raise ConfigError(
            f"{str(path)!r} holds no {CHECKPOINT}: give nanoGPT's out directory, or the file"
        )
    if os.path.isdir(path):
        return path / CHECKPOINT
    return path


def _check_arguments(source_name: str, arguments: Settings) -> None:
    """Raises ConfigError for unknown settings, whose effect would be lost silently, and for invalid
    values.
    """
    settings = [*SETTINGS.values(), *OT, *OTHER]
    for name, value in arguments.items():
        if name not in settings:
            if isinstance(name, str):
                label = name
            else:
                label = shown(name)
            raise unknown(f"setting in the model_args of {source_name!r}", label, settings)
        if name in OT and not _is_like(value, OT[name]):
            raise ConfigError(
                f"{source_name!r} has {name} = {shown(value)}: it must be of type"
                f" {type(OT[name]).__name__}"
            )
        if value is not None and not isinstance(value, (Real, str)):
            raise ConfigError(
                f"{source_name!r} has {name} = {shown(value)}: it must be a number or a text"
            )
    dropout = arguments.get("dropout", 0.0)
    kinetic = _ot(arguments, "lmbda")
    if not isinstance(dropout, (int, float)) or not 0 <= dropout <= 1:
        raise ConfigError(
            f"{source_name!r} has dropout = {shown(dropout)}: it must be between 0 and 1"
        )
    if not 0 <= kinetic <= sys.float_info.max:
        raise ConfigError(
            f"{source_name!r} has lmbda = {shown(kinetic)}: it must be at least 0 and at most"
            f" {sys.float_info.max:.3g}"
        )
    if not _ot(arguments, "cts") and not _ot(arguments, "lnf_on"):
        raise ConfigError(
            f"{source_name!r} has no norm before its head (lnf_on = False without cts): ctrans has"
            " no such GPT"
        )


def _is_like(value: Any, default: Any) -> bool:
    """Whether the value is of the default's type. A whole number serves as a float."""
    return type(value) is type(default) or (type(default) is float and type(value) is int)


def _ot(arguments: Settings, name: str) -> Any:
    """A setting of the OT-Transformer's fork."""
    return arguments.get(name, OT[name])


def _load(model: GPT, source_name: str, weights: dict[str, Tensor]) -> None:
    """Loads the weights into the model. Raises ConfigError if a name or shape differs."""
    tied = weights.pop(TIED, None)
    table = weights["transformer.wte.weight"]
    if tied is not None and not _same_bits(tied, table):
        raise ConfigError(
            f"{source_name!r} has an untied head ({TIED} differs from transformer.wte.weight):"
            " nanoGPT's head is tied"
        )
    ours = {GPT2_NAMES.of(name): name for name in model.state_dict()}
    present = {name: tuple(weight.shape) for name, weight in weights.items()}
    expected = {name: tuple(model.state_dict()[our].shape) for name, our in ours.items()}
    for name in sorted(expected.keys() | present.keys()):
        if present.get(name) != expected.get(name):
            raise ConfigError(
                f"{source_name!r} is no nanoGPT model: {name!r} is {present.get(name, 'absent')},"
                f" expected {expected.get(name, 'absent')}"
            )
    model.load_state_dict({ours[name]: value for name, value in weights.items()})


def _same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether both have the same shape, dtype and bits. A nan equals itself."""
    if (a.shape, a.dtype) != (b.shape, b.dtype):
        return False
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def to_nanogpt(model: GPT) -> dict[str, Any]:
    """The model as nanoGPT's checkpoint {"model", "model_args"}, for torch.save(..., "ckpt.pt").

    Raises ConfigError, naming the setting, for a model that nanoGPT does not have.
    """
    check_present(model, "exported")
    for field in dataclasses.fields(GPTConfig):
        value = getattr(model.config, field.name)
        built_in = getattr(BUILT_IN, field.name)
        if field.name == "ffn_width" and value == 4 * model.config.width:
            value = None
        if field.name not in FREE and value != built_in:
            raise ConfigError(
                f"{field.name} = {value!r}: nanoGPT has only {built_in!r}, so this model cannot be"
                " exported"
            )
    weights = {
        GPT2_NAMES.of(name): value.detach().clone() for name, value in model.state_dict().items()
    }
    weights[TIED] = weights["transformer.wte.weight"]
    arguments = {theirs: getattr(model.config, ours) for ours, theirs in SETTINGS.items()}
    return {"model": weights, "model_args": {**arguments, "dropout": 0.0}}


def _read(path: Path) -> Settings:
    checkpoint = load_pickled(path)
    if not isinstance(checkpoint, dict):
        raise ConfigError(
            f"{str(path)!r} holds {type(checkpoint).__name__}, not a nanoGPT checkpoint"
        )
    # without attributes of dictionaries, which a file may set
    settings: dict[str, Any] = {}
    for name, value in dict.items(checkpoint):
        if isinstance(value, dict):
            settings[name] = dict(dict.items(value))
        else:
            settings[name] = value
    return settings


def _weights(source_name: str, entries: Settings) -> dict[str, Tensor]:
    """The weights by nanoGPT's names, without attributes of tensors, which a file may set. Raises
    ConfigError for entries that are no weights, and for a name with and without a wrapper's prefix.
    """
    weights: dict[str, Tensor] = {}
    for name, value in entries.items():
        if isinstance(name, str):
            plain = without_wrappers(str(name))
        else:
            plain = ""
        if plain in weights:
            raise ConfigError(
                f"{source_name!r} is no nanoGPT model: it has {plain!r} twice, once with the prefix"
                " of a wrapper, such as '_orig_mod.'"
            )
        if IGNORED.fullmatch(plain):
            continue
        if isinstance(value, Tensor):
            weight = Tensor.detach(value)
        else:
            weight = value
        is_weight = is_dense(weight) and weight.is_floating_point() and weight.itemsize >= 2
        if not plain or not is_weight:
            raise ConfigError(
                f"{source_name!r} holds no nanoGPT model: some entries are not weights, which are"
                " dense floating-point tensors of at least two bytes a number, such as"
                f" {shown(name)} = {shown(value)}"
            )
        weights[plain] = weight
    return weights


def _config(
    source_name: str, weights: Mapping[str, Tensor], heads: int, arguments: Settings
) -> GPTConfig:
    """The architecture, read from the shapes. Raises ConfigError if the settings differ from it."""
    try:
        vocab_size, width = weights["transformer.wte.weight"].shape
        context = weights["transformer.wpe.weight"].shape[0]
    except (KeyError, ValueError, IndexError):
        raise ConfigError(
            f"{source_name!r} is no nanoGPT model: it lacks the embeddings transformer.wte and"
            " transformer.wpe"
        ) from None
    blocks = {name.split(".")[2] for name in weights if name.startswith("transformer.h.")}
    settings: dict[str, Any] = {
        "vocab_size": vocab_size,
        "context": context,
        "depth": len(blocks),
        "width": width,
        "heads": heads,
        "bias": any(name.startswith("transformer.") and name.endswith(".bias") for name in weights),
    }
    for ours, theirs in SETTINGS.items():
        stated = arguments.get(theirs, settings[ours])
        if stated != settings[ours]:
            raise ConfigError(
                f"{source_name!r} is no nanoGPT model: it has {theirs} = {shown(stated)}, but its"
                f" weights give {settings[ours]!r}"
            )
    attention = _placement(arguments, "ln1_on")
    ffn = _placement(arguments, "ln2_on")
    if attention == ffn:
        placement = attention
    else:
        placement = spell((attention, ffn))
    return dataclasses.replace(BUILT_IN, placement=placement, **settings)


def _placement(arguments: Settings, norm: str) -> str:
    """The placement of a map whose norm this setting turns on."""
    if _ot(arguments, norm):
        return "pre"
    return "none"
