"""Starts a training from a trained model, over the same depth-time, optionally with another number
of blocks.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ctrans.model.checkpoint import load
from ctrans.model.gpt import GPT
from solvers import ConfigError


def start_from(path: str | Path, given: Mapping[str, Any]) -> GPT:
    """Loads the model saved there, with weights that need gradients.

    If `given` has another `depth`, it returns `GPT.at_depth`: weights interpolated in depth-time
    between the middles of blocks, and dt scaled to keep T. For a stack, that setting is
    `stack_steps`. At the same depth the model is the same to the bit. Raises ConfigError for any
    other setting that contradicts the architecture.
    """
    model = load(path)
    own = vars(model.config)
    if model.config.is_stack:
        other = "stack_steps"
    else:
        other = "depth"
    for name, value in given.items():
        if name in own and name != other and own[name] != value:
            raise ConfigError(
                f"{name} = {value!r} contradicts the model to start from, which has {own[name]!r}:"
                f" leave the option out; only its {other} may change"
            )
    blocks = given.get(other, own[other])
    return (model if blocks == own[other] else model.at_depth(blocks)).requires_grad_(True)
