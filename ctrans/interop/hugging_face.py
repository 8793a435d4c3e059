"""Hugging Face models from a local directory: only safetensors, no network, no code except the
installed library's.
"""

from __future__ import annotations

import dataclasses
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ctrans.base.given_files import read_json
from ctrans.dynamics.weights.on_demand import skeletons
from ctrans.interop.anatomy import Anatomy
from ctrans.interop.config_checks import check_settings, check_size, neutral
from ctrans.interop.families import FAMILIES
from ctrans.interop.imported import Imported
from ctrans.interop.pickled import pickled_weights
from ctrans.interop.streamed import (
    Stored,
    check_floating,
    check_tied,
    put_model_on_demand,
    read,
    stored_dtype,
    stored_weights,
)
from ctrans.interop.transformers_library import import_transformers, reading
from solvers import ConfigError, unknown

CONFIG, WEIGHTS, INDEX, ADAPTER = (
    "config.json",
    "model.safetensors",
    "model.safetensors.index.json",
    "adapter_config.json",
)
PICKLES = "pytorch_model.bin", "pytorch_model.bin.index.json"
"""The file of weights, and the index of shards, of a model that was saved as a pickle."""

NO_WEIGHTS = (
    r"rotary_emb\w*\.(original_)?inv_freq$",
    r"(^|\.)position_ids$",
    r"(attn|attention)\.(bias|masked_bias|causal_mask)$",
)
"""Patterns of buffers that older versions of the library stored and the newer ones compute."""
TOWERS = ("vision_model", "text_model")
"""Attributes of models that compare images and texts."""


def from_transformers(
    model: nn.Module | str | Path,
    *,
    dt: float = 1.0,
    anatomy: Anatomy | None = None,
    dtype: torch.dtype | None = None,
    on_demand: bool = False,
    allow_pickle: bool = False,
    images: bool | None = None,
) -> Imported:
    """A Hugging Face model, or one saved in a local directory, with `depth`, `embed`, `head` and
    `trajectory`.

    - `model`: the model, whose weights are used and not copied, or a directory. Of an encoder with
      a decoder, the encoder is used. The description says so
    - `dt`: multiplies the length of each segment; 1 is the model
    - `anatomy`: paths of the parts of a model whose names are not known
    - `dtype`: to load in. Default: the dtype of the config, or of the files
    - `on_demand`: reads matrices by memory map when they are used and drops them afterwards. The
      numbers are the same, and only one sublayer is in memory (see
      `ctrans.dynamics.weights.on_demand`)
    - `allow_pickle`: also reads `pytorch_model.bin`, by torch's restricted unpickler
    - `images`: of a model with two towers (CLIP, SigLIP), the image tower or the text tower

    The structure around each attention and FFN is read from what the blocks compute;
    `str(result.config)` describes it.

    Raises ConfigError for a directory without config; for missing, damaged, pickled or quantised
    weights; for an unknown family; and for a structure that is not recognised.
    """
    if not isinstance(model, nn.Module):
        anatomy = anatomy or Anatomy()
        if on_demand:
            model = open_local(model, anatomy, dtype, allow_pickle)
        else:
            model = load_local(model, dtype, allow_pickle)
    elif dtype is not None or on_demand:
        raise ConfigError(
            f"dtype = {dtype} and on_demand = {on_demand} are only for models loaded from a"
            " directory: convert this one by model.to(dtype)"
        )
    check_not_quantised(model)
    stack = one_stack(model, images=images)
    imported = Imported(stack, dt=dt, anatomy=anatomy)
    if stack is not model:
        path = next(path for path, part in model.named_modules() if part is stack)
        imported.config = dataclasses.replace(
            imported.config,
            model=f"{imported.config.model}, only the {path} of {type(model).__name__}",
        )
    return imported


def one_stack(model: nn.Module, *, images: bool | None = None) -> nn.Module:
    """The encoder of a model with a decoder, such as T5, BART and Whisper; any other model itself.

    For a model with two towers (CLIP, SigLIP), `images` selects the image tower or the text tower.
    Raises ConfigError if it is None.
    """
    base: Any = getattr(model, getattr(model, "base_model_prefix", "") or "-", model)
    if all(isinstance(getattr(base, name, None), nn.Module) for name in TOWERS):
        if images is None:
            raise ConfigError(
                f"{type(model).__name__} has two towers: give its {' or its '.join(TOWERS)}"
            )
        tower: nn.Module = getattr(base, TOWERS[not images])
        return tower
    both = getattr(getattr(model, "config", None), "is_encoder_decoder", False) and isinstance(
        getattr(base, "decoder", None), nn.Module
    )
    encoder: nn.Module = base.encoder if both else model
    return encoder


def load_local(
    directory: str | Path, dtype: torch.dtype | None = None, allow_pickle: bool = False
) -> nn.Module:
    """The model saved in that directory, of the class that its config names, in eval mode. Errors
    as `from_transformers`.
    """
    directory = Path(directory)
    transformers = import_transformers()
    settings, config, stored, _ = _checked(directory, dtype, allow_pickle, on_demand=False)
    with reading(f"cannot load {str(directory)!r}"):
        model, seen = (
            model_class(settings, transformers) or transformers.AutoModel
        ).from_pretrained(
            directory,
            config=config,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=all(weight.make is None for weight in stored.values()),
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # an error below names them
            dtype=dtype or "auto",
        )
    # the library casts without a word; buffers may be whole numbers, and some families rename what
    # stands before the last two parts
    whole = {
        _ending(name) for name, buffer in model.named_buffers() if not buffer.is_floating_point()
    }
    for name in sorted(stored.keys() - seen["unexpected_keys"]):
        if _ending(name) not in whole and not ignored(model, name):
            check_floating(stored[name])
    if seen["missing_keys"]:
        names = sorted(map(str, seen["missing_keys"]))
        raise ConfigError(
            f"{str(directory)!r} is not complete: {len(names)} weights are missing, such as"
            f" {names[0]}"
        )
    for name, have, want in sorted(seen["mismatched_keys"]):
        raise ConfigError(
            f"{str(directory)!r} does not fit its {CONFIG}: {name} is {tuple(have)}, expected"
            f" {tuple(want)}"
        )
    check_unused(directory, model, seen["unexpected_keys"])
    check_tied(model, stored)
    evaluated: nn.Module = model.eval()
    return evaluated


def open_local(
    directory: str | Path, anatomy: Anatomy, dtype: torch.dtype | None, allow_pickle: bool
) -> nn.Module:
    """The model saved in that directory with matrices read on demand, in eval mode and without
    gradients. Errors as `from_transformers`.
    """
    directory = Path(directory)
    _, _, stored, make = _checked(directory, dtype, allow_pickle, on_demand=True)
    with reading(f"cannot load {str(directory)!r}"), skeletons():
        model = make()
    source, unused = read(model, stored)
    check_unused(directory, model, unused)
    check_tied(model, stored)
    put_model_on_demand(model, anatomy, source)
    return model


def _checked(
    directory: Path, dtype: torch.dtype | None, allow_pickle: bool, *, on_demand: bool
) -> tuple[Mapping[str, Any], Any, Mapping[str, Stored], Callable[[], nn.Module]]:
    """The entries of a directory's config, the library's config, the stored weights, and a function
    that makes the model without them.

    Raises ConfigError for an unreadable config, missing or damaged weights, and a model that is too
    large.
    """
    transformers = import_transformers()
    where = repr(str(directory / CONFIG))
    settings = read_config(directory)
    check_family(where, settings, transformers)
    stored = directory_weights(directory, allow_pickle)
    with reading(f"cannot load {str(directory)!r}"):
        # runs no code of the directory and does not ask whether to
        config = neutral(
            transformers.AutoConfig.from_pretrained(
                directory, local_files_only=True, trust_remote_code=False
            )
        )
        kept = dtype or getattr(config, "dtype", None) or stored_dtype(stored)
        make = partial(build, settings, config, transformers.AutoModel, kept)
        held = sum(math.prod(weight.shape) for weight in stored.values())
        check_size(where, make, kept, held=held, on_demand=on_demand)
    return settings, config, stored, make


def ignored(model: nn.Module, name: str) -> bool:
    """Whether the library itself says that a stored weight of that name is not for the model."""
    own = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
    return any(re.search(pattern, name) for pattern in (*NO_WEIGHTS, *own))


def _ending(name: str) -> str:
    return ".".join(name.split(".")[-2:])


def check_unused(directory: Path, model: nn.Module, unused: Iterable[str]) -> None:
    """Raises ConfigError if stored weights that are not used belong to the model: to a block beyond
    the last one, to a block, or to a module with a weight, such as a bias.

    Whole parts that the model does not have pass: files hold heads, poolers and decoders for other
    classes of the same family.
    """
    base = f"{getattr(model, 'base_model_prefix', '')}."
    parts = dict(model.named_modules())
    lost = dict[str, None]()
    for name in sorted(name for name in unused if not ignored(model, name)):
        for full in (name, base + name, name.removeprefix(base)):
            path = ""
            inside = False
            for step in full.split(".")[:-1]:
                blocks = parts[path]
                inside = inside or isinstance(blocks, nn.ModuleList)
                if path:
                    inner = f"{path}.{step}"
                else:
                    inner = step
                if inner not in parts:
                    if isinstance(blocks, nn.ModuleList) and step.isdecimal():
                        raise ConfigError(
                            f"{str(directory)!r} holds weights of {inner}, but its {CONFIG} says"
                            f" {len(blocks)} blocks: fix the number there"
                        )
                    break
                path = inner
            else:
                inside = inside or isinstance(getattr(parts[path], "weight", None), torch.Tensor)
            if inside:
                lost |= {name: None}
            else:
                lost |= {}
    if lost:
        raise ConfigError(
            f"{str(directory)!r} holds weights that a model of its {CONFIG} does not use"
            f" ({len(lost)}), such as {', '.join(list(lost)[:3])}: fix the {CONFIG}, or save the"
            " model without them"
        )


def build(settings: Mapping[str, Any], config: Any, default: Any, dtype: torch.dtype) -> nn.Module:
    """A model of that config in eval mode and without gradients. Its class is the one that the
    settings name, or the default.
    """
    kind = model_class(settings, import_transformers())
    with torch.random.fork_rng(devices=[]):
        if kind is None:
            model: nn.Module = default.from_config(config, dtype=dtype, trust_remote_code=False)
        else:
            model = kind._from_config(config, dtype=dtype)
    return model.eval().requires_grad_(False)


def model_class(settings: Mapping[str, Any], transformers: Any) -> Any:
    """The library's class that a config names, or None."""
    named = settings.get("architectures")
    if isinstance(named, list) and named:
        kind = getattr(transformers, str(named[0]), None)
    else:
        kind = None
    if isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel):
        return kind
    return None


def check_not_quantised(model: nn.Module) -> None:
    """Raises ConfigError for weights that are not floating-point numbers: maps with quantised
    weights have no derivative.
    """
    kept = getattr(getattr(model, "config", None), "quantization_config", None)
    whole = [
        name for name, parameter in model.named_parameters() if not parameter.is_floating_point()
    ]
    if kept is not None or whole:
        if whole:
            what = f"such as {whole[0]}"
        else:
            what = "according to its config"
        raise ConfigError(
            f"{type(model).__name__} has quantised weights, {what}: load it unquantised"
        )


def read_config(directory: Path) -> dict[str, Any]:
    """The config of a directory. Raises ConfigError if there is none."""
    if not os.path.isdir(directory):
        raise ConfigError(
            f"{str(directory)!r} is no directory: give one with {CONFIG} and {WEIGHTS} (nothing is"
            " downloaded)"
        )
    if not os.path.isfile(directory / CONFIG):
        raise ConfigError(
            f"{str(directory)!r} has no {CONFIG}: give a directory written by save_pretrained()"
        )
    return read_settings(directory / CONFIG)


def read_settings(path: Path) -> dict[str, Any]:
    """The entries of a config file. Raises ConfigError for a file that holds something else."""
    config = read_json(path)
    if not isinstance(config, dict):
        raise ConfigError(f"{str(path)!r} is no model's config: it must hold a JSON object")
    return config


def check_family(where: str, config: Mapping[str, Any], transformers: Any) -> None:
    """Raises ConfigError for a config whose family is not built in, and as `check_settings` does.

    Code that a config names (`auto_map`) is never run: only families of the installed library are
    read.
    """
    if not isinstance(config.get("model_type"), str):
        raise ConfigError(
            f"{where} has no model_type, the family of the model: give a directory written by"
            " save_pretrained()"
        )
    family = config["model_type"]
    if family not in transformers.CONFIG_MAPPING:
        if "auto_map" in config:
            raise ConfigError(
                f"{where} names code of its own, which is never run: its family {family!r} is not"
                " built in"
            )
        raise unknown(f"model_type of {where}", family, list(FAMILIES))
    check_settings(where, config)


def weight_files(directory: Path, names: tuple[str, str] = (WEIGHTS, INDEX)) -> list[str]:
    """The names of the weight files: the single file, which the library prefers, or those of the
    index. Errors as `weight_map`.
    """
    return sorted(set(weight_map(directory, names).values())) or [names[0]]


def weight_map(directory: Path, names: tuple[str, str] = (WEIGHTS, INDEX)) -> dict[str, str]:
    """The file of each weight, from the index; empty if there is the single file, or no index.

    Raises ConfigError for an invalid index, and for one that names files elsewhere.
    """
    path = directory / names[1]
    if os.path.isfile(directory / names[0]) or not os.path.isfile(path):
        return {}
    index = read_json(path)
    for key in ("metadata", "weight_map"):  # the library writes into the metadata
        if not isinstance(index, dict) or not isinstance(index.get(key), dict):
            raise ConfigError(
                f"{str(path)!r} is no index of shards: its {key} must be a JSON object"
            )
    files: dict[str, str] = index["weight_map"]
    if not files:
        raise ConfigError(f"{str(path)!r} is no index of shards: its weight_map names no weights")
    for name, shard in files.items():
        if not isinstance(shard, str):
            raise ConfigError(
                f"{str(path)!r} is no index of shards: its weight_map must give {name!r} the name"
                " of a file"
            )
        if shard != Path(shard).name or shard in ("", ".."):
            raise ConfigError(
                f"{str(path)!r} names {shard!r}: shards must be files in the same directory"
            )
    return files


def directory_weights(directory: Path, allow_pickle: bool) -> dict[str, Stored]:
    """The weights in the directory's files, in pickles only if that is allowed. Raises ConfigError
    unless all files exist and are complete.
    """
    if os.path.exists(directory / ADAPTER):
        raise ConfigError(
            f"{str(directory)!r} holds an adapter for another model: merge them and save the result"
        )
    shards = weight_files(directory)
    missing = [name for name in shards if not os.path.isfile(directory / name)]
    if missing and allow_pickle:
        others = weight_files(directory, PICKLES)
    else:
        others = []
    if others and all(os.path.isfile(directory / name) for name in others):
        return {
            name: weight
            for file in others
            for name, weight in pickled_weights(directory / file).items()
        }
    if missing:
        found = sorted(
            path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in directory.glob(pattern)
        )
        if found:
            hint = f"; {found[0]} is a pickle and is not read: save with safe_serialization=True"
        else:
            hint = ""
        if PICKLES[0] in found and not allow_pickle:
            hint += ", or allow it (--allow-pickle)"
        else:
            hint += ""
        raise ConfigError(
            f"{str(directory)!r} lacks {len(missing)} of {len(shards)} weight files, such as"
            f" {missing[0]}{hint}"
        )
    return stored_weights([directory / name for name in shards], weight_map(directory))
