"""Sizes of a request that are refused before a model is drawn: memory and time that no use has."""

from __future__ import annotations

import torch

from ctrans.model.config import GPTConfig
from solvers import ConfigError

UNUSED = 1 << 28
"""The most bytes of embeddings of places that have no text."""
MOST_SCORES = 10**13
"""The most scores of attention in a pass on a CPU. 10^13 take hours."""


def check_positions_used(config: GPTConfig, tokens: int, dtype: torch.dtype) -> None:
    """Raises ConfigError for a table of positions of which the text uses a small part, if the rest
    takes more than `UNUSED` bytes.
    """
    if not config.places.embedding:
        return
    itemsize = torch.get_default_dtype().itemsize + dtype.itemsize  # drawn in one, used in another
    unused = (config.context - tokens) * config.width * itemsize
    if unused > UNUSED:
        raise ConfigError(
            f"context = {config.context:,}: the embeddings of places without text take"
            f" {unused / 1e9:.3g} GB, since the text has {tokens:,} tokens: lower --context to"
            f" {tokens}, or give a longer text by --file"
        )


def check_attention_ends(config: GPTConfig, sequences: int, tokens: int) -> None:
    """Raises ConfigError for softmax attention with more than `MOST_SCORES` scores in a pass."""
    if config.attention != "softmax":
        return
    scores = sequences * config.heads * tokens**2 * config.depth
    if scores > MOST_SCORES:
        raise ConfigError(
            f"context = {config.context:,}: attention between {tokens:,} tokens has {scores:.2g}"
            f" scores in a pass, and a CPU computes some 10^9 a second: lower --context"
        )
