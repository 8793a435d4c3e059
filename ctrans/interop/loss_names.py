"""Losses that a user can name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

Loss = Callable[[Any, Any], Tensor]
"""From all that a model returns, and targets, to a number."""
LOSS_NAMES: dict[str, str] = {
    "next": (
        "cross-entropy of each next token, with products with the embeddings as logits if there is"
        " no head"
    ),
    "mlm": "the same of every seventh token, which is hidden",
    "mean": "the mean of the output, a stand-in",
    "random": "the mean product of the output with fixed Gaussian numbers, a stand-in",
    "none": "no loss, and no results that need one",
}
"""Losses by name, and what each is."""
