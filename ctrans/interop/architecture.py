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
from ctrans.interop.config_errors import explaining_entries
from ctrans.interop.hugging_face import build, check_family
from ctrans.interop.hugging_face_files import read_config, read_settings
from ctrans.interop.imported import Imported
from ctrans.interop.model_class import model_class
from ctrans.interop.presets import PRESETS
from ctrans.interop.streamed import drawn, put_in_place, put_model_on_demand
from ctrans.interop.transformers_library import import_transformers, reading
from ctrans.model.config import check_seed
from solvers import unknown

Description = str | Path | Mapping[str, Any]
"""A name in `PRESETS`, a config.json or a directory that holds one, or its entries."""


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
    if not on_demand:
        check_fits(size, "have them drawn on demand (on_demand=True, --stream)")
    with reading(f"the {type(model).__name__} of this architecture does not run"):
        if on_demand:
            put_model_on_demand(model, anatomy, drawn(model, seed))
        else:
            put_in_place(model, anatomy, drawn(model, seed))
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
    entries = {name: value for name, value in settings.items() if name != "model_type"}
    if isinstance(architecture, Mapping):
        label = settings["model_type"]
    else:
        label = str(architecture)
    with reading(f"architecture {label!r} makes no model"):
        kind = transformers.CONFIG_MAPPING[settings["model_type"]]
        if isinstance(architecture, Mapping):
            check_names(f"architecture {label!r}", entries, kind)
        with explaining_entries(f"architecture {label!r}", entries):
            config = neutral(kind(**entries))
        if blocks is not None:
            _set_blocks(config, blocks)
        model_kind = model_class(f"architecture {label!r}", settings, transformers)
        make = partial(build, model_kind, config, transformers.AutoModelForCausalLM, dtype)
        with explaining_entries(f"architecture {label!r}", config.to_dict()):
            check_size(f"architecture {label!r}", make, dtype, held=None, on_demand=True)
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
