"""Tasks other than text: each has its data, and the parts of the architecture and settings that
follow from them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from ctrans.training.data import Data
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


TASKS: dict[str, Task] = {
    "digits": Task(
        digits,
        {"vocab_size": VOCABULARY, "context": CONTEXT, "causal": False},
        {"batch": 32, "iterations": 500, "warmup": 50, "eval_every": 50, "eval_windows": 360},
    ),
}
"""Tasks by name."""
