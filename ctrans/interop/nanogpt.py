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
COMPILED = "_orig_mod."
"""The prefix that torch.compile adds to each name."""


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
        named = str(source)
    else:
        named = "the state dict"
    if isinstance(source, (str, Path)):
        checkpoint = _read(_file(Path(source)))
    else:
        checkpoint = source
    weights: Settings = checkpoint
    arguments: Settings = {}
    if isinstance(checkpoint.get("model"), Mapping):
        weights = checkpoint["model"]
        arguments = checkpoint.get("model_args", {})
    if not isinstance(arguments, Mapping):
        raise ConfigError(
            f"{named!r} holds no nanoGPT model: its model_args are a {type(arguments).__name__} and"
            " not a dict of settings"
        )
    _check_arguments(named, arguments)
    weights = _weights(named, weights)
    if heads is None:
        heads = arguments.get("n_head")
    else:
        heads = heads
    if heads is None:
        raise ConfigError(
            f"{named!r} is a bare state dict, which does not state the number of heads: give"
            " heads=... (--heads)"
        )
    config = _config(named, weights, heads, arguments)
    model = GPT(config).to(
        functools.reduce(torch.promote_types, (value.dtype for value in weights.values()))
    )
    if not _ot(arguments, "lnf_on"):
        model.final_norm = nn.Identity()
    _load(model, named, weights)
    notes = tuple(
        f"trained with dropout {p:g}, which is off here" for p in [arguments.get("dropout")] if p
    )
    if not _ot(arguments, "cts"):
        return model, notes
    return (
        OTTransformer(model, _ot(arguments, "steps"), kinetic=float(_ot(arguments, "lmbda"))),
        notes,
    )


def _file(path: Path) -> Path:
    """The checkpoint at that path, or in that directory. Raises ConfigError if there is none."""
    if os.path.isdir(path) and not os.path.isfile(path / CHECKPOINT):
        raise ConfigError(
            f"{str(path)!r} holds no {CHECKPOINT}: give nanoGPT's out directory, or the file"
        )
    if os.path.isdir(path):
        return path / CHECKPOINT
    return path


def _check_arguments(named: str, arguments: Settings) -> None:
    """Raises ConfigError for unknown settings, whose effect would be lost silently, and for invalid
    values.
    """
    known = [*SETTINGS.values(), *OT, *OTHER]
    for name, value in arguments.items():
        if name not in known:
            raise unknown(
                f"setting in the model_args of {named!r}",
                name if isinstance(name, str) else shown(name),
                known,
            )
        if (
            name in OT
            and type(value) is not type(OT[name])
            and not (name == "lmbda" and type(value) is int)
        ):
            raise ConfigError(
                f"{named!r} has {name} = {shown(value)}: it must be of type"
                f" {type(OT[name]).__name__}"
            )
        if value is not None and not isinstance(value, (Real, str)):
            raise ConfigError(
                f"{named!r} has {name} = {shown(value)}: it must be a number or a text"
            )
    dropout = arguments.get("dropout", 0.0)
    kinetic = _ot(arguments, "lmbda")
    if not isinstance(dropout, (int, float)) or not 0 <= dropout <= 1:
        raise ConfigError(f"{named!r} has dropout = {shown(dropout)}: it must be between 0 and 1")
    if not 0 <= kinetic <= sys.float_info.max:
        raise ConfigError(
            f"{named!r} has lmbda = {shown(kinetic)}: it must be at least 0 and at most"
            f" {sys.float_info.max:.3g}"
        )
    if not _ot(arguments, "cts") and not _ot(arguments, "lnf_on"):
        raise ConfigError(
            f"{named!r} has no norm before its head (lnf_on = False without cts): ctrans has no"
            " such GPT"
        )


def _ot(arguments: Settings, name: str) -> Any:
    return arguments.get(name, OT[name])


def _load(model: GPT, named: str, weights: dict[str, Tensor]) -> None:
    """Loads the weights into the model. Raises ConfigError if a name or shape differs."""
    tied = weights.pop(TIED, None)
    table = weights["transformer.wte.weight"]
    if tied is not None and not (
        (tied.shape, tied.dtype) == (table.shape, table.dtype)
        and torch.equal(
            *(each.contiguous().view(torch.uint8) for each in (tied, table))
        )  # bits: nan equals itself
    ):
        raise ConfigError(
            f"{named!r} has an untied head ({TIED} differs from transformer.wte.weight): nanoGPT's"
            " head is tied"
        )
    ours = {GPT2_NAMES.of(name): name for name in model.state_dict()}
    expected = {name: tuple(model.state_dict()[own].shape) for name, own in ours.items()}
    for name in sorted(expected.keys() | weights.keys()):
        have, want = (
            tuple(weights[name].shape) if name in weights else "absent",
            expected.get(name, "absent"),
        )
        if have != want:
            raise ConfigError(f"{named!r} is no nanoGPT model: {name!r} is {have}, expected {want}")
    model.load_state_dict({ours[name]: value for name, value in weights.items()})


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
    return {
        name: dict(dict.items(value)) if isinstance(value, dict) else value
        for name, value in dict.items(checkpoint)
    }


def _weights(named: str, given: Settings) -> dict[str, Tensor]:
    """The weights by nanoGPT's names, without attributes of tensors, which a file may set. Raises
    ConfigError for entries that are no weights, and for a name with and without `COMPILED`.
    """
    found: dict[str, Tensor] = {}
    for name, value in given.items():
        if isinstance(name, str):
            plain = str(name).removeprefix(COMPILED)
        else:
            plain = ""
        if plain in found:
            raise ConfigError(
                f"{named!r} is no nanoGPT model: it has {plain!r} twice, once with the prefix"
                f" {COMPILED!r}"
            )
        if IGNORED.fullmatch(plain):
            continue
        if isinstance(value, Tensor):
            weight = Tensor.detach(value)
        else:
            weight = value
        if (
            not plain
            or not is_dense(weight)
            or not weight.is_floating_point()
            or weight.itemsize < 2
        ):
            raise ConfigError(
                f"{named!r} holds no nanoGPT model: some entries are not weights, which are dense"
                f" floating-point tensors of at least two bytes a number, such as {shown(name)} ="
                f" {shown(value)}"
            )
        found[plain] = weight
    return found


def _config(
    named: str, weights: Mapping[str, Tensor], heads: int, arguments: Settings
) -> GPTConfig:
    """The architecture, read from the shapes. Raises ConfigError if the settings differ from it."""
    try:
        vocab_size, width = weights["transformer.wte.weight"].shape
        context = weights["transformer.wpe.weight"].shape[0]
    except (KeyError, ValueError, IndexError):
        raise ConfigError(
            f"{named!r} is no nanoGPT model: it lacks the embeddings transformer.wte and"
            " transformer.wpe"
        ) from None
    found: dict[str, Any] = {
        "vocab_size": vocab_size,
        "context": context,
        "depth": len({name.split(".")[2] for name in weights if name.startswith("transformer.h.")}),
        "width": width,
        "heads": heads,
        "bias": any(name.startswith("transformer.") and name.endswith(".bias") for name in weights),
    }
    for ours, theirs in SETTINGS.items():
        said = arguments.get(theirs, found[ours])
        if said != found[ours]:
            raise ConfigError(
                f"{named!r} is no nanoGPT model: it has {theirs} = {shown(said)}, but its weights"
                f" give {found[ours]!r}"
            )
    attention, ffn = ("pre" if _ot(arguments, name) else "none" for name in ("ln1_on", "ln2_on"))
    if attention == ffn:
        placement = attention
    else:
        placement = spell((attention, ffn))
    return dataclasses.replace(BUILT_IN, placement=placement, **found)
