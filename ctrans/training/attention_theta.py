"""The balanced-mass factor of a model's attention while it trains."""

from __future__ import annotations

import torch
from jaxtyping import Int
from torch import Tensor

from ctrans.depth import Depth
from ctrans.fields import ExposesHeads
from ctrans.model.gpt import GPT
from ctrans.stability.attention.balanced_mass import balanced_mass
from ctrans.walk import Instrument, StepContext, walk
from solvers import ConfigError

TOLERANCE = 1e-3
"""How exactly a row's theta is wanted: it is averaged over rows, and a closer bracket takes
seconds.
"""


class MeanTheta(Instrument):
    """Mean of theta(p) = 4 max_S p(S)(1 - p(S)) over the attention rows of all heads and blocks
    (Emadi, definition 4.1).

    A row that is not solved exactly counts with its lower bound. Raises ConfigError for attention
    that does not show its rows.
    """

    def begin(self, depth: Depth, x0: Tensor) -> None:
        self._means: list[Tensor] = []

    def forward(self, at: StepContext) -> None:
        sublayer = at.sublayer
        attention = sublayer.attention
        if attention is None:
            return
        if not isinstance(attention.field, ExposesHeads):
            raise ConfigError(f"attention of type {type(attention.field).__name__} does not show its rows: leave out --theta")
        u = attention.given(sublayer.given(at.entered))
        self._means.append(balanced_mass(attention.field.probabilities(u), tolerance=TOLERANCE).lower.mean())

    def figures(self) -> float:
        return float(torch.stack(self._means).mean())


def mean_theta(model: GPT, tokens: Int[Tensor, "*batch tokens"]) -> float:
    """`MeanTheta` of the discrete model on these tokens."""
    found: float = walk(model, tokens, instruments=[MeanTheta()])[0]
    return found
