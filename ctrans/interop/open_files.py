"""Opens a checkpoint of another library for the analyses of ctrans: a Hugging Face directory or a
`ckpt.pt` of nanoGPT.
"""

from __future__ import annotations

import dataclasses
import math
import os
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ctrans.base.memory import check_fits, too_large_to_stay
from ctrans.base.printable import one_line
from ctrans.dynamics.depth import Depth
from ctrans.interop.anatomy import Anatomy
from ctrans.interop.config_errors import explaining_entries
from ctrans.interop.hugging_face import from_transformers, load_local, open_local
from ctrans.interop.hugging_face_files import CONFIG, directory_weights, read_settings
from ctrans.interop.loss_names import Loss
from ctrans.interop.nanogpt import CHECKPOINT, read_nanogpt
from ctrans.interop.opened import Opened, open_probed
from ctrans.interop.ot_transformer import OTTransformer
from ctrans.interop.transformers_library import quiet, reading
from solvers import ConfigError

PICKLED = (".pt", ".pth")
"""Suffixes of files that torch.save writes."""


def find_checkpoint(path: Path) -> Path:
    """The Hugging Face directory, or the file of the checkpoint."""
    if os.path.isfile(path) and path.suffix in PICKLED:
        return path
    is_directory = os.path.isdir(path)
    if is_directory and os.path.isfile(path / CONFIG):
        return path
    if is_directory and os.path.isfile(path / CHECKPOINT):
        return path / CHECKPOINT
    advice = (
        f"give a directory with {CONFIG} (Hugging Face), or a {CHECKPOINT} or its directory"
        " (nanoGPT)"
    )
    if is_directory:
        raise ConfigError(f"{str(path)!r} holds neither {CONFIG} nor {CHECKPOINT}: {advice}")
    file, _, function = str(path).rpartition(":")
    if function.isidentifier() and file.endswith(".py"):
        raise ConfigError(
            f"{str(path)!r} is no directory: for a function that makes a module use --python {path}"
        )
    if os.path.exists(path):
        problem = "is no checkpoint"
    else:
        problem = "does not exist (nothing is downloaded)"
    raise ConfigError(f"{str(path)!r} {problem}: {advice}")


def is_nanogpt(checkpoint: Path) -> bool:
    """Whether `find_checkpoint` found a file of nanoGPT, and not a Hugging Face directory."""
    return checkpoint.suffix in PICKLED


def open_files(
    checkpoint: Path,
    dtype: torch.dtype,
    *,
    dt: float,
    on_demand: bool | None,
    anatomy: Anatomy,
    loss: str | Loss | None,
    heads: int | None,
    images: bool,
    allow_pickle: bool,
) -> Opened:
    """Opens what `find_checkpoint` found. Options and errors as in `open_model`."""
    if is_nanogpt(checkpoint):
        return _from_nanogpt(checkpoint, dtype, loss=loss, dt=dt, on_demand=on_demand, heads=heads)
    return _from_transformers(
        checkpoint,
        dtype,
        loss=loss,
        dt=dt,
        on_demand=on_demand,
        anatomy=anatomy,
        images=images,
        allow_pickle=allow_pickle,
    )


def _from_nanogpt(
    path: Path,
    dtype: torch.dtype,
    *,
    loss: str | Loss | None,
    dt: float,
    on_demand: bool | None,
    heads: int | None,
) -> Opened:
    if on_demand:
        raise ConfigError(f"{str(path)!r} cannot be read on demand: leave out on_demand (--stream)")
    with warnings.catch_warnings(action="ignore"):  # about pickles, which raise an error anyway
        model, notes = read_nanogpt(path, heads=heads)
    model = model.to(dtype).requires_grad_(requires_grad=False).eval()
    if isinstance(model, OTTransformer):
        description = str(model.with_scale(dt).config)
    else:
        config = dataclasses.replace(model.config, dt=dt)
        model.config = config
        model.depth = Depth(model.depth.sublayers, dt)
        if config.depth == 1:
            blocks = "1 block"
        else:
            blocks = f"{config.depth} blocks"
        description = (
            f"nanoGPT: {blocks} of width {config.width}, {config.heads} heads,"
            f" placement {config.placement}, {config.norm}"
        )
    return Opened(
        model,
        path.parent,
        "; ".join([description, *notes]),
        loss,
        model.config.vocab_size,
        causal=model.config.causal,
        predicts=True,
    )


def _from_transformers(
    directory: Path,
    dtype: torch.dtype,
    *,
    loss: str | Loss | None,
    dt: float,
    on_demand: bool | None,
    anatomy: Anatomy,
    images: bool,
    allow_pickle: bool,
) -> Opened:
    _check_foreign(directory)
    size = _entries(directory, allow_pickle=allow_pickle) * dtype.itemsize
    if on_demand is None:
        on_demand = too_large_to_stay(size)
    if not on_demand:
        check_fits(
            size,
            "choose a smaller --dtype, or read the weights on demand (on_demand=True, --stream)",
        )
    with quiet(), reading(f"cannot open {str(directory)!r}"):
        try:
            loaded: Any
            if on_demand:
                loaded = open_local(directory, anatomy, dtype, allow_pickle=allow_pickle)
            else:
                loaded = load_local(directory, dtype, allow_pickle=allow_pickle)
            # fused kernels of experts have no float64
            if hasattr(loaded, "set_experts_implementation"):
                loaded.set_experts_implementation("eager")
            imported = partial(from_transformers, loaded, dt=dt, anatomy=anatomy, images=images)
            settings = read_settings(directory / CONFIG)
            with explaining_entries(repr(str(directory / CONFIG)), settings):
                return open_probed(
                    loaded.requires_grad_(requires_grad=False), imported, directory, loss
                ).eval()
        except RuntimeError as error:  # some modules have kernels only for some dtypes
            kind = str(dtype).removeprefix("torch.")
            raise ConfigError(
                f"{str(directory)!r} does not run in {kind}, choose another --dtype:"
                f" {one_line(error)}"
            ) from None


def _check_foreign(directory: Path) -> None:
    """Raises ConfigError for a checkpoint of ctrans, which has its own option."""
    config = read_settings(directory / CONFIG)
    if "placement" in config and "model_type" not in config:
        raise ConfigError(f"{str(directory)!r} is a checkpoint of ctrans: pass it as --checkpoint")


def _entries(directory: Path, *, allow_pickle: bool) -> int:
    """How many numbers the files of weights hold; 0 if they cannot be read, for which loading
    raises the error.
    """
    try:
        stored = directory_weights(directory, allow_pickle=allow_pickle)
    except ConfigError:
        return 0
    return sum(math.prod(weight.shape) for weight in stored.values())
