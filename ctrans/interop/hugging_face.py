"""Hugging Face models from a local directory: safetensors only, no network, no code but the
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

import safetensors
import torch
from torch import nn

from ctrans.given_files import check_file, read_json
from ctrans.interop.anatomy import Anatomy
from ctrans.interop.config_checks import check_settings, check_size
from ctrans.interop.families import FAMILIES
from ctrans.interop.foreign_errors import one_line
from ctrans.interop.imported import Imported
from ctrans.interop.streamed import Stored, put_model_on_demand, read, stored_dtype, stored_weights
from ctrans.interop.transformers_library import import_transformers, reading
from ctrans.weights.on_demand import skeletons
from solvers import ConfigError
from solvers.errors import unknown

CONFIG, WEIGHTS, INDEX, ADAPTER = "config.json", "model.safetensors", "model.safetensors.index.json", "adapter_config.json"

TOWERS = ("vision_model", "text_model")
"""Attributes of models that compare images and texts."""


def from_transformers(
    model: nn.Module | str | Path,
    *,
    dt: float = 1.0,
    anatomy: Anatomy | None = None,
    dtype: torch.dtype | None = None,
    on_demand: bool = False,
) -> Imported:
    """A Hugging Face model, or the one saved in a local directory, as an object with `depth`,
    `embed`, `head`, `trajectory`.

    The weights are the model's own, not copies. What surrounds each attention and FFN is read from
    what the blocks compute and said by `str(result.config)`; `anatomy` names the parts of models
    whose names are not known. Of an encoder with a decoder the encoder is taken. `dtype` is the one
    to load in, by default the config's, or that of the files. With `on_demand`, the matrices of a
    directory's model are read when they are used, by memory map, and dropped after: the same
    numbers, in the memory of one sublayer (see `ctrans.weights.on_demand`).

    Raises ConfigError, in a line, for a directory without config, with missing, damaged or pickled
    weights, quantised weights, an unknown family, and a structure that is not recognised.
    """
    if not isinstance(model, nn.Module):
        anatomy = Anatomy() if anatomy is None else anatomy
        model = open_local(model, anatomy, dtype) if on_demand else load_local(model, dtype)
    elif dtype is not None or on_demand:
        raise ConfigError(
            f"dtype = {dtype} and on_demand = {on_demand} are for models that are loaded: give a directory, or convert this one by "
            "model.to(dtype)"
        )
    check_not_quantised(model)
    return Imported(one_stack(model), dt=dt, anatomy=anatomy)


def one_stack(model: nn.Module, *, images: bool | None = None) -> nn.Module:
    """The encoder of a model that has a decoder behind it, as T5, BART and Whisper; any other model
    as it is.

    Of a model with two towers (CLIP, SigLIP) it is the one that reads `images`, or text:
    ConfigError unless that is said.
    """
    base: Any = getattr(model, getattr(model, "base_model_prefix", "") or "-", model)
    if all(isinstance(getattr(base, name, None), nn.Module) for name in TOWERS):
        if images is None:
            raise ConfigError(f"{type(model).__name__} has two towers: give one of them, its {' or its '.join(TOWERS)}")
        tower: nn.Module = getattr(base, TOWERS[not images])
        return tower
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False) and isinstance(
        getattr(base, "decoder", None), nn.Module
    ):
        encoder: nn.Module = base.encoder
        return encoder
    return model


def load_local(directory: str | Path, dtype: torch.dtype | None = None) -> nn.Module:
    """The model saved in that directory, of the class that its config names, in eval mode. Errors
    as `from_transformers`.
    """
    directory = Path(directory)
    transformers = import_transformers()
    checked = _checked(directory, dtype, on_demand=False)
    with reading(f"cannot load {str(directory)!r}"):
        model, seen = (model_class(checked.settings, transformers) or transformers.AutoModel).from_pretrained(
            directory,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # they are named below
            dtype="auto" if dtype is None else dtype,
        )
    if seen["missing_keys"]:
        names = sorted(map(str, seen["missing_keys"]))
        raise ConfigError(f"{str(directory)!r} is not whole: {len(names)} weights are missing, such as {names[0]}")
    for name, have, want in sorted(seen["mismatched_keys"]):
        raise ConfigError(f"{str(directory)!r} does not fit its {CONFIG}: {name} is {tuple(have)}, expected {tuple(want)}")
    check_all_blocks(directory, model, seen["unexpected_keys"])
    evaluated: nn.Module = model.eval()
    return evaluated


def open_local(directory: str | Path, anatomy: Anatomy, dtype: torch.dtype | None = None) -> nn.Module:
    """The model saved in that directory, its matrices read on demand, in eval mode and without
    gradients. Errors as `from_transformers`.
    """
    directory = Path(directory)
    checked = _checked(directory, dtype, on_demand=True)
    with reading(f"cannot load {str(directory)!r}"), skeletons():
        model = checked.make()
    source, unused = read(model, checked.stored)
    check_all_blocks(directory, model, unused)
    put_model_on_demand(model, anatomy, source)
    return model


@dataclasses.dataclass(frozen=True)
class CheckedDirectory:
    """A directory whose files look right: the entries of its config, where its weights lie, and
    what makes the model without them.
    """

    settings: Mapping[str, Any]
    stored: Mapping[str, Stored]
    make: Callable[[], nn.Module]


def _checked(directory: Path, dtype: torch.dtype | None, *, on_demand: bool) -> CheckedDirectory:
    """Raises ConfigError for a config that is not read, weights that are missing or damaged, and a
    model that is too large.
    """
    transformers, where = import_transformers(), repr(str(directory / CONFIG))
    settings = read_config(directory)
    check_family(where, settings, transformers)
    _check_weights(directory)
    stored = stored_weights([directory / name for name in weight_files(directory)])
    with reading(f"cannot load {str(directory)!r}"):
        # no code of the directory's is run, and no question asked
        config = transformers.AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
        kept = dtype or getattr(config, "dtype", None) or stored_dtype(stored)
        make = partial(build, settings, config, transformers.AutoModel, kept)
        held = sum(math.prod(weight.shape) for weight in stored.values())
        check_size(where, make, kept, held=held, on_demand=on_demand)
    return CheckedDirectory(settings, stored, make)


def check_all_blocks(directory: Path, model: nn.Module, unused: Iterable[str]) -> None:
    """Raises ConfigError where weights that the model does not use are those of blocks beyond its
    own.
    """
    for path, part in model.named_modules():
        if isinstance(part, nn.ModuleList):
            inside = re.compile(rf"(?:^|.*\.){re.escape(path)}\.(\d+)\.")
            numbers = [int(found[1]) for name in unused if (found := inside.match(name))]
            if numbers and max(numbers) >= len(part):
                raise ConfigError(
                    f"{str(directory)!r} holds weights of {path}.{max(numbers)}, and its {CONFIG} says {len(part)} blocks: mend the "
                    "number there"
                )


def build(settings: Mapping[str, Any], config: Any, default: Any, dtype: torch.dtype) -> nn.Module:
    """A model of that config in eval mode and without gradients, of the class that the settings
    name or of the default family.
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
    kind: Any = getattr(transformers, str(named[0]), None) if isinstance(named, list) and named else None
    return kind if isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel) else None


def check_not_quantised(model: nn.Module) -> None:
    """Raises ConfigError for weights that are not floating-point numbers: fields of quantised
    weights have no derivative.
    """
    kept = getattr(getattr(model, "config", None), "quantization_config", None)
    whole = [name for name, parameter in model.named_parameters() if not parameter.is_floating_point()]
    if kept is not None or whole:
        what = f"such as {whole[0]}" if whole else "as its config says"
        raise ConfigError(f"{type(model).__name__} has quantised weights, {what}: load it unquantised")


def read_config(directory: Path) -> dict[str, Any]:
    """The config of a directory. Raises ConfigError where there is none."""
    if not os.path.isdir(directory):
        raise ConfigError(f"{str(directory)!r} is no directory: give one with {CONFIG} and {WEIGHTS} (nothing is downloaded)")
    if not os.path.isfile(directory / CONFIG):
        raise ConfigError(f"{str(directory)!r} has no {CONFIG}: give a directory that save_pretrained() wrote")
    return read_settings(directory / CONFIG)


def read_settings(path: Path) -> dict[str, Any]:
    """The entries of a config file. Raises ConfigError for a file that holds something else."""
    config = read_json(path)
    if not isinstance(config, dict):
        raise ConfigError(f"{str(path)!r} holds no object: it is no model's config")
    return config


def check_family(where: str, config: Mapping[str, Any], transformers: Any) -> None:
    """Raises ConfigError for a config of a family that is not built in, and all that
    `check_settings` refuses.

    Code that a config brings (`auto_map`) is never run: a built-in family is read by the library's
    own, and nothing else is read.
    """
    if not isinstance(config.get("model_type"), str):
        raise ConfigError(
            f"{where} has no model_type, which says of which family the model is: give a directory that save_pretrained() wrote"
        )
    family = config["model_type"]
    if family not in transformers.CONFIG_MAPPING:
        if "auto_map" in config:
            raise ConfigError(f"{where} brings its own code, which is never run: its family {family!r} is not built in")
        raise unknown(f"model_type of {where}", family, list(FAMILIES))
    check_settings(where, config)


def weight_files(directory: Path) -> list[str]:
    """The names of the files of weights: the one, as the library prefers, or the index's.

    Raises ConfigError for an index that cannot be read as one, or names files elsewhere.
    """
    if not os.path.isfile(directory / WEIGHTS) and os.path.isfile(directory / INDEX):
        index = read_json(directory / INDEX)
        try:
            names = sorted({str(name) for name in index["weight_map"].values()})
        except (KeyError, TypeError, AttributeError) as error:
            raise ConfigError(f"{str(directory / INDEX)!r} is no index of shards: {one_line(error)}") from None
        outside = next((name for name in names if name != Path(name).name or name in ("", "..")), None)
        if outside is not None:
            raise ConfigError(f"{str(directory / INDEX)!r} names {outside!r}: shards are files beside it, and no others are read")
        return names
    return [WEIGHTS]


def _check_weights(directory: Path) -> None:
    """Raises ConfigError unless all shards are there and are whole safetensors files."""
    if os.path.exists(directory / ADAPTER):
        raise ConfigError(f"{str(directory)!r} holds an adapter for another model: merge the two and save the result")
    shards = weight_files(directory)
    missing = [name for name in shards if not os.path.isfile(directory / name)]
    if missing:
        pickled = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in directory.glob(pattern))
        hint = f"; {pickled[0]} is a pickle and is not read: save with safe_serialization=True" if pickled else ""
        raise ConfigError(f"{str(directory)!r} lacks {len(missing)} of {len(shards)} files of weights, {missing[0]} first{hint}")
    for name in shards:
        check_file(directory / name)
        try:
            with safetensors.safe_open(directory / name, "pt"):
                pass
        except (safetensors.SafetensorError, OSError) as error:
            raise ConfigError(f"{str(directory / name)!r} is no whole safetensors file: {one_line(error)}") from None
