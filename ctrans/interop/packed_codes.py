"""Weights that a quantisation packed into codes of its own, which ctrans does not read: they are
known by what they are, since each format has other names.

A model holds whole numbers as vectors, and as masks and tables of positions. A matrix of whole
numbers is otherwise one of codes. What is left of its layer, scales and codebooks, is no weight.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

from ctrans.interop.scaled_codes import OF_QUANTISATION, scales_of
from ctrans.interop.stored_weights import CODES, COMPLEX, FLOATS, Stored
from ctrans.interop.weight_names import BLOCK
from solvers import ConfigError, shown

READ_METHODS = (
    "bitsandbytes",
    "compressed-tensors",
    "fbgemm_fp8",
    "fp8",
    "modelopt",
    "mxfp8",
    "quark",
)
"""Values of `quant_method` with a layout that ctrans reads: codes of fp8 or 8 bits, with scales
next to them. Other layouts of these methods are known by their tensors.
"""
PACKED = re.compile(
    r"(qweight|qzeros|weight_packed|weight_shape|_blocks|quant_map|absmax|quant_state\S*|zero_point)$"
)
"""Names of codes, and of what belongs to them, also where they are vectors."""
VECTORS = re.compile(
    r"(ids|index|indices|idx|mask|num_batches_tracked|num_updates|extra_state|weight_format)$"
)
"""Names of vectors of whole numbers that healthy checkpoints hold: positions, indices, masks and
counters, the state of Transformer Engine, and the layout of bitsandbytes.
"""
TABLES = re.compile(
    r"(ids|mask|extra_state|bbox|tid2eid|group_idx"
    r"|(^|[._])(position|relative|rel|rp|bias)(\w*_)?(idxs?|index|indices|buckets?))$"
)
"""Names of tables of whole numbers with two axes or more that healthy checkpoints hold: of
positions, as in Swin and LeViT, of masks, and of experts by token. Bare `indices` are codes.
"""
LONGEST_VECTOR = 1 << 20
"""The most whole numbers of a vector in a block that are no codes."""
BOOLEANS = ("BOOL", "bool")
"""The names of the dtype of masks, with safetensors and with torch."""


def check_method(where: str, config: Mapping[str, Any]) -> None:
    """Raises ConfigError for a config, or a part of it, that names a quantisation which ctrans does
    not read.
    """
    for key, settings in _quantisations(config):
        method = settings.get("quant_method")
        if method is not None and method not in READ_METHODS:
            raise ConfigError(
                f"{where} says quant_method = {shown(method)} in its {key}, and ctrans reads"
                f" {', '.join(READ_METHODS)}: save the model unquantised, and without this entry"
            )


def check_no_codes(stored: Mapping[str, Stored]) -> None:
    """Raises ConfigError for tensors that are codes of an unknown quantisation: they have two axes
    or more, are as large as a matrix, or are all that a layer has.
    """
    coded = [name for name, weight in stored.items() if weight.dtype in CODES]
    scales = {scale for name in coded for scale in scales_of(name)}
    modules = _modules_with_numbers(stored)
    for name, weight in stored.items():
        if name in scales:
            continue
        if not PACKED.search(name) and not _are_codes(name, weight, modules):
            continue
        raise ConfigError(
            f"{str(weight.path)!r} holds {name}, codes of a quantisation that ctrans does not"
            f" read ({weight.dtype} {weight.shape}): save it unquantised"
        )


def is_table(name: str, weight: Stored) -> bool:
    """Whether a tensor of whole numbers has the name of a mask, a table or a counter."""
    if len(weight.shape) > 1:
        return TABLES.search(name) is not None
    return VECTORS.search(name) is not None


def _are_codes(name: str, weight: Stored, modules: set[str]) -> bool:
    """Whether a tensor that is no buffer holds codes. `modules` are those that have floating-point
    numbers. Parameters named `weight` have an error of their own.
    """
    is_known = weight.dtype in FLOATS or weight.dtype in CODES or weight.dtype in COMPLEX
    if is_known or weight.dtype in BOOLEANS or name.endswith("weight"):
        return False
    if len(weight.shape) > 1:
        return True
    is_in_a_block = BLOCK.search(name) is not None
    is_all_of_a_layer = name.rpartition(".")[0] not in modules
    return is_in_a_block and (is_all_of_a_layer or math.prod(weight.shape) > LONGEST_VECTOR)


def _modules_with_numbers(stored: Mapping[str, Stored]) -> set[str]:
    """The paths of modules that hold floating-point numbers or codes of them at any depth."""
    modules: set[str] = set()
    for name, weight in stored.items():
        if weight.dtype not in FLOATS and weight.dtype not in CODES:
            continue
        module = name.rpartition(".")[0]
        while module and module not in modules:
            modules.add(module)
            module = module.rpartition(".")[0]
    return modules


def _quantisations(config: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The entries of a config, and of its parts, that describe a quantisation."""
    for part in (config, *config.values()):
        if not isinstance(part, dict):
            continue
        for key in OF_QUANTISATION:
            settings = part.get(key)
            if isinstance(settings, dict):
                yield key, settings
