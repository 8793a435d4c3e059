"""Models by the name or config file of an architecture, of any size, with random weights."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ctrans.base.memory import check_fits, too_large_to_stay
from ctrans.dynamics.depth import check_count
from ctrans.dynamics.weights.on_demand import skeletons
from ctrans.interop.anatomy import Anatomy
from ctrans.interop.config_checks import MOST_PARTS, check_names, check_size, neutral
from ctrans.interop.hugging_face import (
    build,
    check_family,
    read_config,
    read_settings,
)
from ctrans.interop.imported import Imported
from ctrans.interop.streamed import drawn, put_in_place, put_model_on_demand
from ctrans.interop.transformers_library import import_transformers, reading
from ctrans.model.config import check_seed
from solvers import unknown


def _gpt2(blocks: int, width: int, heads: int) -> dict[str, Any]:
    return {"model_type": "gpt2", "n_layer": blocks, "n_embd": width, "n_head": heads}


def _gated(
    family: str,
    blocks: int,
    width: int,
    heads: int,
    groups: int,
    hidden: int,
    vocabulary: int,
    theta: float,
    context: int,
    **other: Any,
) -> dict[str, Any]:
    return {
        "model_type": family,
        "num_hidden_layers": blocks,
        "hidden_size": width,
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "intermediate_size": hidden,
        "vocab_size": vocabulary,
        "max_position_embeddings": context,
        "rope_parameters": {"rope_type": "default", "rope_theta": theta},
        **other,
    }


Description = str | Path | Mapping[str, Any]

PRESETS: dict[str, dict[str, Any]] = {
    "gpt2": _gpt2(12, 768, 12),
    "gpt2-medium": _gpt2(24, 1024, 16),
    "gpt2-large": _gpt2(36, 1280, 20),
    "gpt2-xl": _gpt2(48, 1600, 25),
    "llama-7b": _gated("llama", 32, 4096, 32, 32, 11008, 32000, 1e4, 4096, rms_norm_eps=1e-5),
    "llama-13b": _gated("llama", 40, 5120, 40, 40, 13824, 32000, 1e4, 4096, rms_norm_eps=1e-5),
    "llama-70b": _gated("llama", 80, 8192, 64, 8, 28672, 32000, 1e4, 4096, rms_norm_eps=1e-5),
    "llama3-8b": _gated("llama", 32, 4096, 32, 8, 14336, 128256, 5e5, 8192, rms_norm_eps=1e-5),
    "llama3-70b": _gated("llama", 80, 8192, 64, 8, 28672, 128256, 5e5, 8192, rms_norm_eps=1e-5),
    "qwen2.5-7b": _gated("qwen2", 28, 3584, 28, 4, 18944, 152064, 1e6, 131072, rms_norm_eps=1e-6),
    "gemma2-9b": _gated(
        "gemma2", 42, 3584, 16, 8, 14336, 256000, 1e4, 8192, head_dim=256, query_pre_attn_scalar=256
    ),
    "gemma2-27b": _gated(
        "gemma2",
        46,
        4608,
        32,
        16,
        36864,
        256000,
        1e4,
        8192,
        head_dim=128,
        query_pre_attn_scalar=144,
    ),
    "olmo2-7b": _gated("olmo2", 32, 4096, 32, 32, 11008, 100352, 5e5, 4096, rms_norm_eps=1e-6),
    "olmo2-13b": _gated("olmo2", 40, 5120, 40, 40, 13824, 100352, 5e5, 4096, rms_norm_eps=1e-6),
}
"""Published models, as their config.json describes them. `transformers` has their families."""


def from_architecture(
    architecture: Description,
    *,
    seed: int = 0,
    blocks: int | None = None,
    dt: float = 1.0,
    dtype: torch.dtype = torch.float32,
    on_demand: bool | None = None,
    anatomy: Anatomy | None = None,
) -> Imported:
    """The model that a preset or a config file describes. Its weights are drawn from `seed` as the
    library initialises that family.

    - `architecture`: a name in `PRESETS`, a config.json, a directory that holds one, or its entries
    - `blocks`: replaces the number of blocks
    - `dt`: the residual scale; 1 is the library's model
    - `dtype`: of the weights
    - `on_demand`: whether weights are drawn when they are used and dropped afterwards, the same
      each time. None means: if all weights would take more than a quarter of this machine's memory
    - `anatomy`: paths of the blocks and their parts, for a family whose layout is not found
      automatically

    Raises ConfigError for an unknown architecture.

    >>> from_architecture("llama-70b").depth.blocks
    80
    """
    anatomy = anatomy or Anatomy()
    model = skeleton(architecture, seed=seed, blocks=blocks, dtype=dtype)
    size = sum(parameter.numel() * parameter.itemsize for parameter in model.parameters())
    if on_demand is None:
        on_demand = too_large_to_stay(size)
    else:
        on_demand = on_demand
    if not on_demand:
        check_fits(size, "have them drawn on demand (on_demand=True, --stream)")
    with reading(f"the {type(model).__name__} of this architecture does not run"):
        (put_model_on_demand if on_demand else put_in_place)(model, anatomy, drawn(model, seed))
        return Imported(model, dt=dt, anatomy=anatomy)


def skeleton(
    architecture: Description,
    *,
    seed: int = 0,
    blocks: int | None = None,
    dtype: torch.dtype = torch.float32,
) -> nn.Module:
    """The library's model of that architecture without its matrices, in eval mode. Options and
    errors as in `from_architecture`.
    """
    check_seed(seed)
    transformers = import_transformers()
    settings = _settings(architecture, transformers)
    own = {name: value for name, value in settings.items() if name != "model_type"}
    if isinstance(architecture, Mapping):
        named = settings["model_type"]
    else:
        named = str(architecture)
    with reading(f"architecture {named!r} makes no model"):
        kind = transformers.CONFIG_MAPPING[settings["model_type"]]
        if isinstance(architecture, Mapping):
            check_names(f"architecture {named!r}", own, kind)
        config = neutral(kind(**own))
        if blocks is not None:
            _set_blocks(config, blocks)
        make = partial(build, settings, config, transformers.AutoModelForCausalLM, dtype)
        check_size(f"architecture {named!r}", make, dtype, held=None, on_demand=True)
        # a skeleton draws only vectors, if its family draws them
        with skeletons(), torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return make()


def _settings(architecture: Description, transformers: Any) -> Mapping[str, Any]:
    if isinstance(architecture, Mapping):
        check_family("the architecture", architecture, transformers)
        return architecture
    if str(architecture) in PRESETS:
        return PRESETS[str(architecture)]
    path = Path(architecture)
    if not str(architecture) or not os.path.exists(path):
        raise unknown("architecture", str(architecture), [*PRESETS, "a config.json"])
    if os.path.isfile(path):
        settings = read_settings(path)
    else:
        settings = read_config(path)
    check_family(repr(str(path)), settings, transformers)
    return settings


def _set_blocks(config: Any, blocks: int) -> None:
    check_count("blocks", blocks, MOST_PARTS)
    config.num_hidden_layers = blocks
    kinds = getattr(config, "layer_types", None)  # one entry for each block
    if kinds is not None:
        config.layer_types = [kinds[i % len(kinds)] for i in range(blocks)]
