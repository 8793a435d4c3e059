"""Checks of a foreign config before a model is built from it: no code, no sizes below 1, no
unbounded sizes.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from ctrans.base.memory import check_fits, memory
from ctrans.dynamics.depth import MOST_BLOCKS
from solvers import ConfigError

MOST_PARTS = MOST_BLOCKS
"""The largest number of blocks or experts of a model."""
MOST_BY_WORD = {"layer": MOST_PARTS, "expert": MOST_PARTS, "labels": 10**5}
"""The largest value of config entries with this word in their names. The library makes an object
for each block, expert and label.
"""
MOST_WEIGHTS = 10**13
"""The largest number of weights made on demand: ten times that of the largest models."""
AT_LEAST_ONE = (
    "vocab_size",
    "hidden_size",
    "n_embd",
    "intermediate_size",
    "num_hidden_layers",
    "n_layer",
    "num_attention_heads",
    "n_head",
    "num_key_value_heads",
)
"""Config entries that count something which every model has."""
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
    elsewhere or impossible sizes.
    """
    for name, value in _entries(config):
        if name == "quantization_config" and value is not None:
            raise ConfigError(f"{where} describes quantised weights: save the model unquantised")
        if name in ("attn_implementation", "_attn_implementation"):
            _check_kernels(where, name, value)
        if isinstance(value, int) and not isinstance(value, bool):
            if name in AT_LEAST_ONE and value < 1:
                raise ConfigError(f"{where} says {name} = {value}: it must be at least 1")
            limits = [limit for word, limit in MOST_BY_WORD.items() if word in name]
            if limits and value > min(limits):
                raise ConfigError(
                    f"{where} says {name} = {_short(value)}: the largest allowed number is"
                    f" {min(limits):,}"
                )


def check_size(
    where: str,
    make: Callable[[], nn.Module],
    dtype: torch.dtype,
    *,
    held: int | None,
    on_demand: bool,
) -> None:
    """Raises ConfigError if the model has too many numbers for the memory, or for the `held`
    numbers in its weight files.

    `make` makes the model; here it runs on the meta device, without numbers. Its buffers are never
    made on demand.
    """
    with torch.device("meta"):
        model = make()
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


def _short(value: int) -> str:
    if value < 10**15:
        return f"{value:,}"
    return f"a number of {value.bit_length()} bits"
