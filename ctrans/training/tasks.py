"""Tasks other than text: each has its data, and the parts of the architecture and settings that
follow from them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from ctrans.training.data import Data
from ctrans.training.depth_tasks import (
    COUNTED_TO,
    KEYS,
    MODULUS,
    OF_SYMBOLS,
    ORDERED,
    PAIRS,
    SUMS,
    SYMBOLS,
    SYMBOLS_OF_ROW,
    VALUES,
    counting,
    modular,
    recall,
    sorting,
)
from ctrans.training.digits import CONTEXT, VOCABULARY, digits


@dataclasses.dataclass(frozen=True)
class Task:
    """A task.

    - `data`: reads its data
    - `architecture`: the fields of `GPTConfig` that it fixes
    - `settings`: its defaults for fields of `TrainConfig`
    """

    data: Callable[[], Data]
    architecture: Mapping[str, Any]
    settings: Mapping[str, Any]


OF_ROWS = {"batch": 32, "iterations": 1000, "warmup": 100, "eval_every": 100, "eval_windows": 256}
"""Defaults for rows that are generated. They took the default model of `ctrans train` 90 s on one
core."""

TASKS: dict[str, Task] = {
    "digits": Task(
        digits,
        {"vocab_size": VOCABULARY, "context": CONTEXT, "causal": False},
        {"batch": 32, "iterations": 500, "warmup": 50, "eval_every": 50, "eval_windows": 360},
    ),
    "recall": Task(recall, {"vocab_size": KEYS + VALUES, "context": 4 * PAIRS - 1}, OF_ROWS),
    "counting": Task(
        counting, {"vocab_size": SYMBOLS + COUNTED_TO, "context": SYMBOLS_OF_ROW}, OF_ROWS
    ),
    "modular": Task(modular, {"vocab_size": MODULUS + 1, "context": 4 * SUMS - 1}, OF_ROWS),
    "sorting": Task(sorting, {"vocab_size": OF_SYMBOLS, "context": 2 * ORDERED - 1}, OF_ROWS),
}
"""Tasks by name."""
