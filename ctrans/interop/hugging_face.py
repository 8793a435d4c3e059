"""Hugging Face models from a local directory: only safetensors, no network, no code except the
installed library's.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ctrans.base.given_files import check_encoding
from ctrans.dynamics.weights.on_demand import skeletons
from ctrans.interop.anatomy import Anatomy
from ctrans.interop.config_checks import check_settings, check_size, neutral
from ctrans.interop.config_errors import explaining_entries
from ctrans.interop.families import FAMILIES
from ctrans.interop.hugging_face_files import (
    CONFIG,
    INDEX,
    NO_WEIGHTS,
    OF_ADAPTER,
    PICKLES,
    directory_weights,
    read_config,
)
from ctrans.interop.imported import Imported
from ctrans.interop.missing_weights import in_words, without_wrappers
from ctrans.interop.model_class import model_class
from ctrans.interop.stored_weights import Stored, check_floating, check_readable, stored_dtype
from ctrans.interop.streamed import check_tied, put_model_on_demand, read
from ctrans.interop.transformers_library import import_transformers, reading
from solvers import ConfigError, unknown

IMAGE_TOWER = "vision_model"
TEXT_TOWER = "text_model"
TOWERS = (IMAGE_TOWER, TEXT_TOWER)
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
            model = open_local(model, anatomy, dtype, allow_pickle=allow_pickle)
        else:
            model = load_local(model, dtype, allow_pickle=allow_pickle)
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
        if images:
            tower: nn.Module = getattr(base, IMAGE_TOWER)
        else:
            tower = getattr(base, TEXT_TOWER)
        return tower
    is_encoder_decoder = getattr(getattr(model, "config", None), "is_encoder_decoder", False)
    if is_encoder_decoder and isinstance(getattr(base, "decoder", None), nn.Module):
        encoder: nn.Module = base.encoder
        return encoder
    return model


def load_local(
    directory: str | Path, dtype: torch.dtype | None = None, *, allow_pickle: bool = False
) -> nn.Module:
    """The model saved in that directory, of the class that its config names, in eval mode. Errors
    as `from_transformers`.
    """
    directory = Path(directory)
    transformers = import_transformers()
    kind, config, stored, _ = checked_directory(
        directory, dtype, allow_pickle=allow_pickle, on_demand=False
    )
    for index in (INDEX, PICKLES[1]):
        if (directory / index).is_file():
            check_encoding(directory / index)
    with reading(f"cannot load {str(directory)!r}"):
        model, seen = (kind or transformers.AutoModel).from_pretrained(
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
    whole_numbers = {
        _ending(name) for name, buffer in model.named_buffers() if not buffer.is_floating_point()
    }
    for name in sorted(stored.keys() - seen["unexpected_keys"]):
        if _ending(name) not in whole_numbers and not ignored(model, name):
            check_floating(stored[name])
    tied = set(getattr(model, "all_tied_weights_keys", None) or ())
    missing = set(map(str, seen["missing_keys"]))
    if missing:
        lacks = in_words(missing - tied or missing, stored, set(model.state_dict()) - tied)
        raise ConfigError(f"{str(directory)!r} {lacks}")
    for name, have, want in sorted(seen["mismatched_keys"]):
        raise ConfigError(
            f"{str(directory)!r} does not fit its {CONFIG}: {name} is {tuple(have)}, expected"
            f" {tuple(want)}"
        )
    check_unused(directory, model, seen["unexpected_keys"])
    check_once(directory, model, stored.keys() - seen["unexpected_keys"])
    check_tied(model, stored)
    evaluated: nn.Module = model.eval()
    return evaluated


def open_local(
    directory: str | Path, anatomy: Anatomy, dtype: torch.dtype | None, *, allow_pickle: bool
) -> nn.Module:
    """The model saved in that directory with matrices read on demand, in eval mode and without
    gradients. Errors as `from_transformers`.
    """
    directory = Path(directory)
    _, _, stored, make = checked_directory(
        directory, dtype, allow_pickle=allow_pickle, on_demand=True
    )
    with reading(f"cannot load {str(directory)!r}"), skeletons():
        model = make()
    source, unused = read(model, stored)
    check_unused(directory, model, unused)
    check_tied(model, stored)
    put_model_on_demand(model, anatomy, source)
    return model


def checked_directory(
    directory: Path, dtype: torch.dtype | None, *, allow_pickle: bool, on_demand: bool
) -> tuple[Any, Any, Mapping[str, Stored], Callable[[], nn.Module]]:
    """The class that a directory's config names or None, the library's config, the stored weights,
    and a function that makes the model without them.

    Raises ConfigError for an unreadable config, an unknown class, missing or damaged weights, and a
    model that is too large.
    """
    transformers = import_transformers()
    where = repr(str(directory / CONFIG))
    settings = read_config(directory)
    check_encoding(directory / CONFIG)
    check_family(where, settings, transformers)
    kind = model_class(where, settings, transformers)
    stored = directory_weights(directory, allow_pickle=allow_pickle)
    check_readable(stored)
    with reading(f"cannot load {str(directory)!r}"):
        with explaining_entries(where, settings):
            # runs no code of the directory and does not ask whether to
            read_settings = transformers.AutoConfig.from_pretrained(
                directory, local_files_only=True, trust_remote_code=False
            )
        config = neutral(read_settings)
        model_dtype = dtype or getattr(config, "dtype", None) or stored_dtype(stored)
        make = partial(build, kind, config, transformers.AutoModel, model_dtype)
        held = sum(math.prod(weight.shape) for weight in stored.values())
        with explaining_entries(where, config.to_dict()):
            check_size(where, make, model_dtype, held=held, on_demand=on_demand)
    return kind, config, stored, make


def ignored(model: nn.Module, name: str) -> bool:
    """Whether the library itself says that a stored weight of that name is not for the model."""
    patterns = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
    return any(re.search(pattern, name) for pattern in (*NO_WEIGHTS, *patterns))


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
    lost: list[str] = []
    names = sorted(name for name in unused if not ignored(model, name))
    of_adapter = [name for name in names if OF_ADAPTER.search(name)]
    if of_adapter:
        raise ConfigError(
            f"{str(directory)!r} holds weights of an adapter ({len(of_adapter)}), such as"
            f" {of_adapter[0]}, which its model does not use: merge them, as by"
            " merge_and_unload(), and save the result, or save the model without them"
        )
    for stored_name in names:
        name = without_wrappers(stored_name)
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
            if inside and stored_name not in lost:
                lost.append(stored_name)
    if lost:
        raise ConfigError(
            f"{str(directory)!r} holds weights that a model of its {CONFIG} does not use"
            f" ({len(lost)}), such as {', '.join(lost[:3])}: fix the {CONFIG}, or save the"
            " model without them"
        )


def check_once(directory: Path, model: Any, names: Iterable[str]) -> None:
    """Raises ConfigError if two of the stored names give the same weight of the model, with and
    without the base model's prefix, or by an old name and a new one. The library uses one of the
    two without a word.
    """
    import_transformers()
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightRenaming, rename_source_key

    renamings = [
        transform
        for transform in get_model_conversion_mapping(model)
        if isinstance(transform, WeightRenaming)
    ]
    base = f"{getattr(model, 'base_model_prefix', '')}."
    own_names = model.state_dict().keys()
    first: dict[str, str] = {}
    for name in sorted(name for name in names if not ignored(model, name)):
        used_as = name
        if name not in own_names:
            renamed, _ = rename_source_key(name, renamings, [])
            variants = (renamed, base + renamed, renamed.removeprefix(base))
            # a weight that the library merges with others has no name in the model
            used_as = next((one for one in variants if one in own_names), variants[-1])
        if used_as in first:
            raise ConfigError(
                f"{str(directory)!r} holds {used_as} twice, as {first[used_as]} and as {name}:"
                " save the model with one of the two"
            )
        first[used_as] = name


def build(kind: Any, config: Any, default: Any, dtype: torch.dtype) -> nn.Module:
    """A model of that class and config in eval mode and without gradients; with None for the class,
    of the default.
    """
    with torch.random.fork_rng(devices=[]):
        if kind is None:
            model: nn.Module = default.from_config(config, dtype=dtype, trust_remote_code=False)
        else:
            model = kind._from_config(config, dtype=dtype)
    return model.eval().requires_grad_(requires_grad=False)


def check_not_quantised(model: nn.Module) -> None:
    """Raises ConfigError for weights that are not floating-point numbers: maps with quantised
    weights have no derivative.
    """
    settings = getattr(getattr(model, "config", None), "quantization_config", None)
    quantised = [
        name for name, parameter in model.named_parameters() if not parameter.is_floating_point()
    ]
    if quantised:
        evidence = f"such as {quantised[0]}"
    elif settings is not None:
        evidence = "according to its config"
    else:
        return
    raise ConfigError(
        f"{type(model).__name__} has quantised weights, {evidence}: load it unquantised"
    )


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
