"""The files of a Hugging Face directory: its config, and the files of its weights. No model is
built.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from ctrans.base.given_files import read_json
from ctrans.interop.pickled import pickled_weights
from ctrans.interop.stored_weights import Stored, check_all_found, check_shard, stored_weights
from solvers import ConfigError

CONFIG = "config.json"
EARLIER_CONFIG = f".{CONFIG}.earlier"
"""The config of an earlier model while an export writes other weights in its place."""
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
SHARD = re.compile(r"model-\d{5}-of-\d{5}\.safetensors")
"""How save_pretrained() names the shards of a model."""
ADAPTER = "adapter_config.json"
OF_ADAPTER = re.compile(r"^base_model\.model\.|(^|\.)(lora_\w+|base_layer|ia3_l|hada_w\d\w*)(\.|$)")
"""Names of weights that adapters (PEFT) add to a model, or give to its own."""
PICKLES = "pytorch_model.bin", "pytorch_model.bin.index.json"
"""The file of weights, and the index of shards, of a model that was saved as a pickle."""
LARGEST_INDEX = 32 << 20
"""The largest size of an index of shards in bytes; one of 100,000 weights has 9 MB."""
MOST_SHARDS = 10_000
"""The most files of an index; the largest models have some 200."""

NO_WEIGHTS = (
    r"rotary_emb\w*\.(original_)?inv_freq$",
    r"(^|\.)position_ids$",
    r"(attn|attention)\.(bias|masked_bias|causal_mask)$",
)
"""Patterns of buffers that older versions of the library stored and the newer ones compute."""


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


def weight_files(directory: Path, names: tuple[str, str] = (WEIGHTS, INDEX)) -> list[str]:
    """The names of the weight files: the single file, which the library prefers, or those of the
    index. Errors as `weight_map`.
    """
    return _files_of(weight_map(directory, names), names)


def _files_of(index: dict[str, str], names: tuple[str, str] = (WEIGHTS, INDEX)) -> list[str]:
    return sorted(set(index.values())) or [names[0]]


def weight_map(directory: Path, names: tuple[str, str] = (WEIGHTS, INDEX)) -> dict[str, str]:
    """The file of each weight, from the index; empty if there is the single file, or no index.

    Raises ConfigError for an invalid index, and for one that names files elsewhere.
    """
    path = directory / names[1]
    if os.path.isfile(directory / names[0]) or not os.path.isfile(path):
        return {}
    index = read_json(path, LARGEST_INDEX)
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
    shards = dict.fromkeys(files.values())
    if len(shards) > MOST_SHARDS:
        raise ConfigError(
            f"{str(path)!r} names {len(shards):,} files, and ctrans reads at most {MOST_SHARDS:,}:"
            " save the model in fewer shards"
        )
    for shard in shards:
        if shard != Path(shard).name or shard in ("", ".."):
            raise ConfigError(
                f"{str(path)!r} names {shard!r}: shards must be files in the same directory"
            )
    return files


def sharded_files(directory: Path) -> list[Path]:
    """The index of a sharded model in the directory and its shards as save_pretrained() names them,
    the index first.
    """
    shards = sorted(path for path in directory.glob("model-*") if SHARD.fullmatch(path.name))
    paths = [directory / INDEX, *shards]
    return [path for path in paths if os.path.lexists(path) and not path.is_dir()]


def directory_weights(directory: Path, *, allow_pickle: bool) -> dict[str, Stored]:
    """The weights in the directory's files, in pickles only if that is allowed. Raises ConfigError
    unless all files exist and are complete.
    """
    if os.path.exists(directory / ADAPTER):
        raise ConfigError(
            f"{str(directory)!r} holds an adapter for another model: merge them and save the result"
        )
    index = weight_map(directory)
    shards = _files_of(index)
    missing = [name for name in shards if not os.path.isfile(directory / name)]
    if missing and allow_pickle:
        index_of_pickles = weight_map(directory, PICKLES)
        pickles = _files_of(index_of_pickles, PICKLES)
        if all(os.path.isfile(directory / name) for name in pickles):
            weights: dict[str, Stored] = {}
            for name in pickles:
                shard = pickled_weights(directory / name)
                check_shard(directory / name, shard, index_of_pickles)
                weights.update(shard)
            check_all_found(weights, index_of_pickles)
            return weights
    if missing:
        pickles = sorted(
            path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in directory.glob(pattern)
        )
        hint = ""
        if pickles:
            hint = f"; {pickles[0]} is a pickle and is not read: save with safe_serialization=True"
        if PICKLES[0] in pickles and not allow_pickle:
            hint += ", or allow it (--allow-pickle)"
        raise ConfigError(
            f"{str(directory)!r} lacks {len(missing)} of {len(shards)} weight files, such as"
            f" {missing[0]}{hint}"
        )
    return stored_weights([directory / name for name in shards], index)
