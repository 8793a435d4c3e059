"""How large a model is: the number of its weights, and whether they fit in memory."""

from __future__ import annotations

import contextlib
import sys
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ctrans.base.memory import SHARE, check_fits, memory
from ctrans.dynamics.fields import FIELDS
from ctrans.model.config import GPTConfig, check_seed


def number_of_weights(config: GPTConfig) -> int:
    """The number of entries of all weight matrices: those of embeddings and of all blocks."""
    embedded = config.vocab_size
    if not config.tied:
        embedded += config.vocab_size
    if config.places.embedding:
        embedded += config.context
    return embedded * config.width + config.sets_of_block_weights * weights_of_block(config)


def weights_of_block(config: GPTConfig) -> int:
    """The number of entries of one block's weight matrices."""
    try:
        maps = _maps_without_numbers(config)
    except RuntimeError:  # a matrix larger than the address space
        return sys.maxsize
    weights = [weight for field in maps for weight in field.parameters()]
    return sum(weight.numel() for weight in weights if weight.dim() > 1)


def _maps_without_numbers(config: GPTConfig) -> list[nn.Module]:
    """A block's maps on device "meta"."""
    with torch.device("meta"):
        return [table[getattr(config, kind)](config) for kind, table in FIELDS.items()]


class _Largest(TorchFunctionMode):
    """Keeps the bytes of the largest tensor that the first thousand operations make. The fused
    attention kernel makes no scores.
    """

    size = 0
    operations_left = 1000

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operations_left -= 1
        if self.operations_left < 0:
            raise RuntimeError("enough")  # a map in a loop over tokens
        if func is F.scaled_dot_product_attention:
            result = torch.empty_like(args[0])
        else:
            result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor):
            # a view has the bytes of its base
            self.size = max(self.size, result.untyped_storage().nbytes())
        return result


def first_activations(config: GPTConfig, sequences: int, tokens: int, dtype: torch.dtype) -> int:
    """The bytes of the largest tensor in one attention and FFN of so many sequences: a lower bound
    of what a pass needs. It is found on device "meta", where tensors have no numbers.
    """
    largest = _Largest()
    with largest, contextlib.suppress(RuntimeError, NotImplementedError):  # what numbers decide
        x = torch.empty(sequences, tokens, config.width, dtype=dtype, device="meta")
        maps = [field.to(dtype) for field in _maps_without_numbers(config)]
        for field in maps:
            field(x)
    return largest.size


def check_buildable(
    config: GPTConfig,
    seed: int,
    *,
    on_demand: bool = False,
    shape: tuple[int, int] | None = None,
    dtype: torch.dtype | None = None,
) -> None:
    """Raises ConfigError for an invalid seed, and for weights that do not fit in this machine's
    memory; with the shape (sequences, tokens) of an input, for weights and first activations.
    """
    check_seed(seed)
    if dtype is None:
        dtype = torch.get_default_dtype()
    weights = number_of_weights(config)
    remedy = "lower width, depth or context"
    if on_demand:
        weights -= (config.sets_of_block_weights - 1) * weights_of_block(config)
    else:
        remedy += ", or have them drawn on demand (on_demand=True, --stream)"
    check_fits(weights * dtype.itemsize, remedy)
    if shape is None:
        return
    sequences, tokens = shape
    entries_of_token = tokens * config.heads + config.hidden_width  # scores and features
    largest = sequences * tokens * entries_of_token * dtype.itemsize
    if largest * SHARE > memory():
        check_fits(
            weights * dtype.itemsize + first_activations(config, sequences, tokens, dtype),
            "lower --batch, --context or --width",
            f"the weights and one sublayer's activations for {sequences:,} sequences of"
            f" {tokens:,} tokens need",
        )
