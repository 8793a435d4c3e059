"""Checks of a foreign config before a model is built from it: no code, no sizes below 1, no
unbounded sizes, no numbers that are not finite. An error names the file, the entry, its value, and
what is allowed.
"""

from __future__ import annotations

import difflib
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from ctrans.base.memory import check_fits, memory
from ctrans.dynamics.depth import MOST_BLOCKS
from ctrans.interop.config_errors import BLOCKS, HEADS, check_groups
from solvers import ConfigError

MOST_PARTS = MOST_BLOCKS
"""The largest number of blocks or experts of a model."""
MOST_BY_WORD = {"layer": MOST_PARTS, "expert": MOST_PARTS, "labels": 10**5}
"""The largest value of config entries with this word in their names. The library makes an object
for each block, expert and label.
"""
MOST_WEIGHTS = 10**13
"""The largest number of weights made on demand: ten times that of the largest models."""
LARGEST_WIDTH = 10**8
"""The largest width, vocabulary, or number of heads; the product of two and of 4 is an int64."""
LONGEST_CONTEXT = 10**9
"""The largest number of positions."""
WIDTHS = (
    "vocab_size",
    "hidden_size",
    "n_embd",
    "d_model",
    "dim",
    "embedding_size",
    "intermediate_size",
    "moe_intermediate_size",
    "n_inner",
    "hidden_dim",
    "d_ff",
    "ffn_dim",
    "encoder_ffn_dim",
    "decoder_ffn_dim",
    "head_dim",
    "d_kv",
    *HEADS,
    "num_key_value_heads",
)
"""Config entries with a width, or a number of heads. Some may be null."""
SIZES = {
    **dict.fromkeys(WIDTHS, LARGEST_WIDTH),
    **dict.fromkeys(("n_positions", "n_ctx", "max_position_embeddings"), LONGEST_CONTEXT),
    **dict.fromkeys(BLOCKS, MOST_PARTS),
}
"""Config entries that count something which every model has, with the largest number."""
DTYPES = ("dtype", "torch_dtype")
"""Config entries that name a dtype."""
LABELS = ("id2label", "label2id")
"""Config entries that are tables."""
PROBABILITY = re.compile(r"pdrop|dropout|drop_?path|layerdrop|drop_prob")
"""Names of entries that are the probability of a dropout."""
EPSILON = re.compile(r"(eps|epsilon)$")
"""Names of entries that keep a denominator from 0."""
ROPE = ("rope_scaling", "rope_parameters")
"""Entries that describe rotary positions, in some families for each kind of block."""
BASE = re.compile(r"rope_theta|rope_local_base_freq|rotary_emb_base|rotary_base")
"""Names of entries whose powers are the periods of rotary positions."""
STRETCH = re.compile(r"(\w+_)?factor|beta_(fast|slow)|original_max_position_embeddings")
"""Names of entries that stretch the periods, inside of those of `ROPE`."""
NEUTRAL = {
    "return_dict": True,
    "output_attentions": False,
    "output_hidden_states": False,
    "torchscript": False,
    "use_cache": False,
    "chunk_size_feed_forward": 0,
}
"""Config entries that change how a model returns its output, not what it computes."""
KERNELS = (None, "eager", "sdpa")
"""Attention kernels of the library itself. It would download and run others by name."""
SLACK = 4
SPARE = 10**7
"""A model may have at most SLACK * (numbers in its files) + SPARE numbers. Loading names the
weights that are missing.
"""


def check_settings(where: str, config: Mapping[str, Any]) -> None:
    """Raises ConfigError if a config, or a part of it, has quantised weights, kernels from
    elsewhere, impossible sizes, or numbers that are not finite.
    """
    for name, value in _entries(config):
        _check_kind(where, name, value)
        if name == "quantization_config" and value is not None:
            raise ConfigError(f"{where} describes quantised weights: save the model unquantised")
        if name in ("attn_implementation", "_attn_implementation"):
            _check_kernels(where, name, value)
        if isinstance(value, int) and not isinstance(value, bool):
            if name in SIZES and not 1 <= value <= SIZES[name]:
                raise ConfigError(
                    f"{where} says {name} = {_short(value)}: it must be at least 1 and at most"
                    f" {SIZES[name]:,}"
                )
            limits = [limit for word, limit in MOST_BY_WORD.items() if word in name]
            if limits and value > min(limits):
                raise ConfigError(
                    f"{where} says {name} = {_short(value)}: the largest allowed number is"
                    f" {min(limits):,}"
                )
    for name, value in _entries(config):
        _check_positions(where, name, value)


def _check_kind(where: str, name: str, value: Any) -> None:
    """Raises ConfigError for a number that is not finite, or not in the range of its name, and for
    a dtype or table of labels that is none. Limits of time, in lists, may be infinite.
    """
    allowed = ""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if name in DTYPES and value is not None and not _is_dtype(value):
        allowed = "one of float64, float32, float16, bfloat16, or null"
    elif name in LABELS and value is not None and not isinstance(value, Mapping):
        allowed = "an object, or null"
    elif is_number and PROBABILITY.search(name) and not 0 <= value <= 1:
        allowed = "a number from 0 to 1"
    elif is_number and EPSILON.search(name) and not 0 <= value < math.inf:
        allowed = "a finite number of at least 0"
    elif isinstance(value, float) and not math.isfinite(value):
        allowed = "a finite number"
    elif isinstance(value, list) and any(isinstance(x, float) and math.isnan(x) for x in value):
        allowed = "numbers"
    if allowed:
        raise ConfigError(f"{where} says {name} = {_short(value)}: it must be {allowed}")


def _check_positions(where: str, name: str, value: Any) -> None:
    """Raises ConfigError for numbers of rotary positions that are not above 0. The library computes
    with others, and gives nan or other positions.
    """
    numbers = []
    if BASE.fullmatch(name):
        numbers.append((name, value))
    if name in ROPE and isinstance(value, Mapping):
        inner_entries = _entries(value)
        numbers += [(inner, number) for inner, number in inner_entries if STRETCH.fullmatch(inner)]
    for entry, number in numbers:
        if number is None:
            continue
        if isinstance(number, list):  # one for each block or frequency
            is_allowed = all(map(_is_positive, number))
        else:
            is_allowed = _is_positive(number)
        if not is_allowed:
            raise ConfigError(
                f"{where} says {entry} = {_short(number)}: it must be a number above 0, or null"
            )


def _is_positive(number: Any) -> bool:
    if isinstance(number, Mapping):  # one for each kind of block
        return all(map(_is_positive, number.values()))
    return type(number) in (int, float) and 0 < number < math.inf


def _is_dtype(value: Any) -> bool:
    """Whether it is the name of a dtype of floating-point numbers."""
    if not isinstance(value, str):
        return False
    dtype = getattr(torch, value.removeprefix("torch."), None)
    return isinstance(dtype, torch.dtype) and dtype.is_floating_point


def check_size(
    where: str,
    make: Callable[[], nn.Module],
    dtype: torch.dtype,
    *,
    held: int | None,
    on_demand: bool,
) -> None:
    """Raises ConfigError if the model has too many numbers for the memory, or for the `held`
    numbers in its weight files, and as `check_groups` does.

    `make` makes the model; here it runs on the meta device, without numbers. Its buffers are never
    made on demand.
    """
    with torch.device("meta"):
        model = make()
    check_groups(where, model)
    check_fits(
        sum(buffer.nbytes for buffer in model.buffers()),
        f"lower the sizes in {where}",
        "the buffers need",
    )
    sizes = [parameter.numel() for parameter in model.parameters()]
    total = sum(sizes)
    if held is not None and total > SLACK * held + SPARE:
        raise ConfigError(
            f"{where} describes a model of {total:,} numbers, but its weight files hold {held:,}"
        )
    if not on_demand:
        return
    if total > MOST_WEIGHTS:
        raise ConfigError(
            f"{where} describes a model of {total:,} numbers: the largest allowed number is"
            f" {MOST_WEIGHTS:,}"
        )
    if max(sizes, default=0) * dtype.itemsize > memory() // 4:
        check_fits(4 * max(sizes) * dtype.itemsize, "lower its width or its vocabulary")


def check_names(where: str, entries: Mapping[str, Any], kind: Any) -> None:
    """Raises ConfigError for an entry that the library's config `kind` does not know and whose name
    is close to one that is not given. It would be lost silently. Other entries pass, as the library
    keeps entries of other families and versions.
    """
    entries_of_kind = {*vars(kind()), *kind.attribute_map, *dir(kind)}
    free = entries_of_kind - set(entries)
    for name in entries:
        if name in entries_of_kind:
            continue
        near = difflib.get_close_matches(name, free, n=1, cutoff=0.8)
        if near:
            raise ConfigError(f"{where} has no entry {name!r}: did you mean {near[0]!r}?")


def neutral(config: Any) -> Any:
    """The library's config with the `NEUTRAL` entries, also in its parts."""
    parts = [getattr(config, name, None) for name in getattr(config, "sub_configs", {})]
    for part in [config, *(part for part in parts if part is not None)]:
        for name, value in NEUTRAL.items():
            if getattr(part, name, value) != value:
                setattr(part, name, value)
    return config


def _entries(config: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """All entries of a config and of its nested parts, by name."""
    for name, value in config.items():
        yield str(name), value
        if isinstance(value, Mapping):
            yield from _entries(value)


def _check_kernels(where: str, name: str, value: Any) -> None:
    """A kernel's name, or names by part of the model."""
    if isinstance(value, Mapping):
        kernels = list(value.values())
    else:
        kernels = [value]
    for kernel in kernels:
        if kernel not in KERNELS:
            raise ConfigError(
                f"{where} asks for {name} {kernel!r}, which may be downloaded code, or lack float64"
                ' and second derivatives: set it to "sdpa" or "eager"'
            )


def _short(value: Any) -> str:
    if not isinstance(value, int) or isinstance(value, bool):
        return json.dumps(value)[:80]
    if abs(value) < 10**15:
        return f"{value:,}"
    return f"a number of {value.bit_length()} bits"
