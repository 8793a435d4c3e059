"""What a training keeps next to the weights of a model, in a file of any kind: states of its
optimiser, gradients, averages and masks. They are no weights, and are named and left out.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

from solvers import ConfigError, shown

Value = TypeVar("Value")

STATE = re.compile(
    r"(?P<whole>(^|\.)(optim(_\w+)?|optimi[sz]er\w*|(max_)?exp_avg(_sq)?|momentum_buffer"
    r"|lr_scheduler|dataloader|rng_state\w*|_extra_state\w*)(?=\.|$))"
    r"|\.grad$|(^|[._])mask$"
)
"""Names of what is no weight: a part of the name says so. All that is below the `whole` of a part
at the beginning of a name is left out together.
"""
COPIES = re.compile(
    r"(?P<whole>^((model_)?ema|(fp32_)?master)(_(model|params|weights|state_dict))?)\."
)
"""Names of a second copy of all weights, such as an average. Alone in a file they are the model."""
BESIDE = re.compile(
    r"(?P<weight>(^|.*[._])(weight|bias))"
    r"_(m|v|mom|momentum|moment\w*|(exp_)?avg(_sq)?|ema|grad|master|fp32)$"
)
"""Names of what a training keeps of a weight beside it, as `weight_m` beside `weight`."""
UNNAMED = re.compile(r"(^|\.)_extra_state")
"""Names of settings of Transformer Engine, which many models have in each layer."""


def without_state(path: Path, tensors: Mapping[str, Value]) -> tuple[dict[str, Value], list[str]]:
    """The tensors without those of a training, and the names of what was left out, in quotes: each
    part with all that is below it once. Raises ConfigError if nothing else is there.
    """
    kept = {
        name: value
        for name, value in tensors.items()
        if not STATE.search(name) and not _is_beside_a_weight(name, tensors)
    }
    if tensors and not kept:
        raise ConfigError(
            f"{str(path)!r} holds only what a training keeps next to the weights, such as"
            f" {shown(next(iter(tensors)))}: give the file of the model"
        )
    of_model = {name: value for name, value in kept.items() if not COPIES.search(name)}
    if of_model:
        kept = of_model
    left_out = [
        shown(_part(name)) for name in tensors if name not in kept and not UNNAMED.search(name)
    ]
    return kept, list(dict.fromkeys(left_out))


def _is_beside_a_weight(name: str, tensors: Mapping[str, Value]) -> bool:
    found = BESIDE.match(name)
    return found is not None and found["weight"] in tensors


def _part(name: str) -> str:
    """The part of a training to which a name belongs, if it begins with it; else the name."""
    for pattern in (STATE, COPIES):
        found = pattern.match(name)
        if found is not None and found["whole"]:
            return found["whole"]
    return name
