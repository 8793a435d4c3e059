"""What is trained beside text: a task brings its data, and what of the architecture and the
settings follows from them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from ctrans.training.data import Data
from ctrans.training.digits import CONTEXT, VOCABULARY, digits


@dataclasses.dataclass(frozen=True)
class Task:
    """`data` reads it; `architecture` are fields of `GPTConfig` that it decides, `settings` of
    `TrainConfig` what they are unless said.
    """

    data: Callable[[], Data]
    architecture: Mapping[str, Any]
    settings: Mapping[str, Any]


TASKS: dict[str, Task] = {
    "digits": Task(
        digits,
        {"vocab_size": VOCABULARY, "context": CONTEXT, "causal": False},
        {"batch": 32, "iterations": 500, "warmup": 50, "eval_every": 50, "eval_windows": 360},
    ),
}
"""Tasks by name; a text's has none."""
