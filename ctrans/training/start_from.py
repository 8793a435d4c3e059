"""A trained model as the start of another training, over the same depth-time in another number of
blocks.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ctrans.model.checkpoint import load
from ctrans.model.gpt import GPT
from solvers import ConfigError


def start_from(path: str | Path, given: Mapping[str, Any]) -> GPT:
    """The model saved there with weights that need gradients; with `depth` among the given
    settings, `GPT.at_depth` of it: weights interpolated in depth-time between the blocks' middles,
    dt scaled so that T stays. Of a stack it is `stack_steps` that may differ.

    At the depth that it has it is the same model to the bit. Raises ConfigError for another setting
    that contradicts its architecture.
    """
    model = load(path)
    own = vars(model.config)
    other = "stack_steps" if model.config.is_stack else "depth"
    for name, value in given.items():
        if name in own and name != other and own[name] != value:
            raise ConfigError(
                f"{name} = {value!r} contradicts the model to start from, which has {own[name]!r}: leave the option out; its {other} alone "
                "may be another"
            )
    blocks = given.get(other, own[other])
    return (model if blocks == own[other] else model.at_depth(blocks)).requires_grad_(True)
