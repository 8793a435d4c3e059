"""What a config of somebody else's may ask for, looked at before anything is built of it: no code,
no sizes below 1 or without end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from ctrans.model.config import MOST_BLOCKS
from ctrans.weights.on_demand import check_fits, memory
from solvers import ConfigError

MOST_PARTS = MOST_BLOCKS
"""Blocks or experts of a model."""
PARTS = ("layer", "expert")
"""In what entries of a config are called that count these."""
MOST_WEIGHTS = 10**13
"""Numbers of a model whose weights are made on demand: ten times those of the largest."""
AT_LEAST_ONE = (
    *("vocab_size", "hidden_size", "n_embd", "intermediate_size"),
    *("num_hidden_layers", "n_layer", "num_attention_heads", "n_head", "num_key_value_heads"),
)
"""Entries of a config that count something which every model has."""
KERNELS = (None, "eager", "sdpa")
"""Attention that the library itself computes; it would fetch and run others by their names."""
SLACK, SPARE = 4, 10**7
"""How many times the numbers in its files a model may have, and how many more: what is missing is
named when it is loaded.
"""


def check_settings(where: str, config: Mapping[str, Any]) -> None:
    """Raises ConfigError for a config, or a part of one, of quantised weights, of kernels from
    elsewhere, or of impossible sizes.
    """
    for name, value in _entries(config):
        if name == "quantization_config" and value is not None:
            raise ConfigError(f"{where} is of quantised weights: save the model unquantised")
        if name in ("attn_implementation", "_attn_implementation"):
            _check_kernels(where, name, value)
        if isinstance(value, int) and not isinstance(value, bool):
            if name in AT_LEAST_ONE and value < 1:
                raise ConfigError(f"{where} says {name} = {value}: it is at least 1 in every model")
            if value > MOST_PARTS and any(part in name for part in PARTS):
                raise ConfigError(f"{where} says {name} = {_short(value)}, and at most {MOST_PARTS:,} are built")


def check_size(where: str, make: Callable[[], nn.Module], dtype: torch.dtype, *, held: int | None, on_demand: bool) -> None:
    """Raises ConfigError for more numbers than there is memory for or, with what the files hold,
    than they give rise to.

    `make` makes the model: here without any numbers.
    """
    with torch.device("meta"):
        sizes = [parameter.numel() for parameter in make().parameters()]
    total = sum(sizes)
    if held is not None and total > SLACK * held + SPARE:
        raise ConfigError(f"{where} describes a model of {total:,} numbers, and the files of weights beside it hold {held:,}")
    if not on_demand:
        return
    if total > MOST_WEIGHTS:
        raise ConfigError(f"{where} describes a model of {total:,} numbers, and at most {MOST_WEIGHTS:,} are made on demand")
    if max(sizes, default=0) * dtype.itemsize > memory() // 4:
        check_fits(4 * max(sizes) * dtype.itemsize, "lower its width or its vocabulary")


def _entries(config: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Every entry of a config and of its parts, by name."""
    for name, value in config.items():
        yield str(name), value
        if isinstance(value, Mapping):
            yield from _entries(value)


def _check_kernels(where: str, name: str, value: Any) -> None:
    """One word, or words by part."""
    for kernel in value.values() if isinstance(value, Mapping) else [value]:
        if kernel not in KERNELS:
            raise ConfigError(
                f"{where} asks for {name} {kernel!r}, which would be fetched or has neither float64 nor second derivatives: set it "
                'to "sdpa" or "eager"'
            )


def _short(value: int) -> str:
    return f"{value:,}" if value < 10**15 else f"a number of {value.bit_length()} bits"
