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


def start_from(path: str | Path, options: Mapping[str, Any]) -> GPT:
    """Loads the model saved there, with weights that need gradients.

    If `options` has another `depth`, it returns `GPT.at_depth`: weights interpolated in depth-time
    between the middles of blocks, and dt scaled to keep T. For a stack, that setting is
    `stack_steps`. At the same depth the model is the same to the bit. Raises ConfigError for any
    other setting that contradicts the architecture.
    """
    model = load(path)
    architecture = vars(model.config)
    if model.config.is_stack:
        depth_name = "stack_steps"
    else:
        depth_name = "depth"
    for name, value in options.items():
        contradicts = name in architecture and architecture[name] != value
        if contradicts and name != depth_name:
            raise ConfigError(
                f"{name} = {value!r} contradicts the model to start from, which has"
                f" {architecture[name]!r}: leave the option out; only its {depth_name} may change"
            )
    blocks = options.get(depth_name, architecture[depth_name])
    if blocks != architecture[depth_name]:
        model = model.at_depth(blocks)
    return model.requires_grad_()
