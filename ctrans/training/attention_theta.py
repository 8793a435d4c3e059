"""The balanced-mass factor of a model's attention while it trains."""

from __future__ import annotations

import torch
from jaxtyping import Int
from torch import Tensor

from ctrans.model.gpt import GPT
from ctrans.stability.attention.balanced_mass import balanced_mass

TOLERANCE = 1e-3
"""How exactly a row's theta is wanted: it is averaged over rows, and a closer bracket takes seconds."""


@torch.no_grad()
def mean_theta(model: GPT, tokens: Int[Tensor, "*batch tokens"]) -> float:
    """Mean of theta(p) = 4 max_S p(S)(1 - p(S)) over the attention rows of all heads and blocks (Emadi, definition 4.1).

    Rows are those of the discrete model. A row that is not solved exactly counts with its lower bound.
    """
    states = model.trajectory(tokens).states
    found = []
    for sublayer, x in zip(model.depth.sublayers, states, strict=False):
        if sublayer.kind == "attention":
            u = x if sublayer.input_norm is None else sublayer.input_norm(x)
            found.append(balanced_mass(sublayer.field.probabilities(u), tolerance=TOLERANCE).lower.mean())
    return float(torch.stack(found).mean())
