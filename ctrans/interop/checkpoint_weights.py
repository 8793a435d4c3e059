"""The weights of a checkpoint by name, each read when it is asked for, without a model.

It reads a Hugging Face directory, a directory or run of ctrans, a file of safetensors, a
distributed checkpoint, and a pickle of weights if that is allowed.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from torch import Tensor

from ctrans.base.given_files import read_json
from ctrans.interop.distributed_checkpoint import METADATA, distributed_weights, gains_less_one
from ctrans.interop.hugging_face import CONFIG, NO_WEIGHTS, directory_weights
from ctrans.interop.pickled import pickled_weights
from ctrans.interop.streamed import CODES, FLOATS, Stored, read_weight, stored_weights
from ctrans.interop.weight_names import GAIN
from ctrans.model.checkpoint import BEST, LAST, find_model
from solvers import ConfigError

SAFETENSORS, PICKLED = ".safetensors", (".bin", ".pt", ".pth")
BLOCK = 128
"""Rows and columns that share a scale of fp8."""
PACKED = re.compile(
    r"(qweight|qzeros|weight_packed|weight_shape|_blocks|quant_map|absmax|quant_state\S*|zero_point)$"
)
"""Names of codes that several formats pack in ways of their own."""
ONE_PLUS = re.compile(
    r"gemma[23]?(_text)?|recurrent_gemma|t5gemma2?|vaultgemma|nemotron|qwen3_(next|5)\w*"
)
"""Families that store a norm's gain less 1."""


def checkpoint_weights(
    path: Path, *, allow_pickle: bool = False
) -> dict[str, Callable[[], Tensor]]:
    """By name, a function that reads the weight.

    Codes of fp8 and of 8 bits with scales become numbers. Gains that a family stores less 1 become
    gains. Raises ConfigError for a path without weights, and for other quantised weights.
    """
    stored = {
        name: weight
        for name, weight in _stored(path, allow_pickle).items()
        if not re.search("|".join(NO_WEIGHTS), name)
    }
    less_one = (
        gains_less_one(path)
        if os.path.isfile(path / METADATA)
        else ONE_PLUS.fullmatch(_family(path))
    )
    found: dict[str, Callable[[], Tensor]] = {}
    for name, weight in stored.items():
        if PACKED.search(name):
            raise ConfigError(
                f"{str(weight.path)!r} holds {name}, codes of a quantisation that ctrans does not"
                " read: save it unquantised"
            )
        if weight.dtype in CODES:
            found[name] = _dequantised(name, weight, stored)
        elif weight.dtype in FLOATS:
            one_plus = less_one and GAIN.search(name) and "linear_attn" not in name
            if one_plus:
                found[name] = partial(_one_plus, weight)
            else:
                found[name] = partial(read_weight, weight)
        elif name.endswith("weight"):
            raise ConfigError(
                f"{str(weight.path)!r} holds {name} as {weight.dtype}, and ctrans reads"
                f" {', '.join(FLOATS | CODES)}: save it so"
            )
    scales = {
        each
        for name, weight in stored.items()
        if weight.dtype in CODES
        for each in _scales_of(name)
    }
    return {name: read for name, read in found.items() if name not in scales}


def _scales_of(name: str) -> list[str]:
    """Names of what multiplies the codes of a weight, as fp8 models, compressed-tensors and
    bitsandbytes store it.
    """
    return [f"{name}_scale_inv", f"{name}_scale", re.sub(r"weight$", "SCB", name)]


def _stored(path: Path, allow_pickle: bool) -> Mapping[str, Stored]:
    if os.path.isfile(path) and path.suffix == SAFETENSORS:
        return stored_weights([path])
    if os.path.isfile(path) and path.suffix in PICKLED:
        if not allow_pickle:
            raise ConfigError(
                f"{str(path)!r} is a pickle and is not read: give safetensors, or allow it"
                " (--allow-pickle)"
            )
        return pickled_weights(path)
    if os.path.isfile(path / METADATA):
        return distributed_weights(path)
    if os.path.isdir(path):
        run = os.path.lexists(path / BEST) or os.path.lexists(path / LAST)
        return directory_weights(find_model(path) if run else path, allow_pickle)
    raise ConfigError(
        f"{str(path)!r} holds no weights: give a directory of Hugging Face or ctrans, a distributed"
        f" checkpoint, or a {SAFETENSORS} file"
    )


def _family(path: Path) -> str:
    """The family in the config next to the weights; empty if there is none."""
    config = (path if os.path.isdir(path) else path.parent) / CONFIG
    if os.path.isfile(config):
        said = read_json(config)
    else:
        said = None
    if isinstance(said, dict):
        return str(said.get("model_type", ""))
    return ""


def _one_plus(weight: Stored) -> Tensor:
    return 1 + read_weight(weight).float()


def _dequantised(name: str, codes: Stored, stored: Mapping[str, Stored]) -> Callable[[], Tensor]:
    """A function that multiplies the codes by their scales. Raises ConfigError for scales that are
    missing or do not fit.
    """
    scale = next((stored[each] for each in _scales_of(name) if each in stored), None)
    if scale is None and codes.dtype == "I8":
        raise ConfigError(
            f"{str(codes.path)!r} holds {name} as I8 without scales: save it unquantised"
        )
    if scale is None:
        return partial(read_weight, codes)
    rows, columns = (*codes.shape, 1, 1)[:2]
    many = scale.shape
    if many in ((), (1,), (rows,), (rows, 1)):
        block = 1, columns
    elif len(many) == 2 and many == (-(-rows // BLOCK), -(-columns // BLOCK)):
        block = BLOCK, BLOCK
    elif len(many) == 2 and many[0] == rows and columns % many[1] == 0:
        block = 1, columns // many[1]
    else:
        raise ConfigError(
            f"{str(codes.path)!r} holds {name} {codes.shape} with scales {many}, which do not fit:"
            " save it unquantised"
        )
    return partial(_multiplied, codes, scale, block, 127.0 if scale.name.endswith("SCB") else 1.0)


def _multiplied(codes: Stored, scale: Stored, block: tuple[int, int], unit: float) -> Tensor:
    factors = read_weight(scale).float() / unit
    if factors.dim() == 1 and factors.numel() > 1:
        factors = factors.unsqueeze(1)
    numbers = read_weight(codes).float()
    if factors.dim() == 2 and factors.numel() > 1:
        factors = factors.repeat_interleave(block[0], 0)[: len(numbers)].repeat_interleave(
            block[1], 1
        )[:, : numbers.shape[1]]
    return numbers.mul_(factors)
