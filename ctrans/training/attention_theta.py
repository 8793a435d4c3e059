"""The balanced-mass factor of attention during a training."""

from __future__ import annotations

import torch
from torch import Tensor

from ctrans.base.shapes import TokenIds
from ctrans.dynamics.depth import Depth
from ctrans.dynamics.fields import ExposesRows
from ctrans.measure.attention.balanced_mass import balanced_mass
from ctrans.measure.walk import Instrument, StepContext, walk
from ctrans.model.gpt import GPT
from solvers import ConfigError

TOLERANCE = 1e-3
"""The tolerance of a row's theta. The mean over rows needs no smaller one, which would take
seconds.
"""


class MeanTheta(Instrument):
    """The mean of theta(p) = 4 max_S p(S)(1 - p(S)) over the attention rows of all heads and blocks
    (Emadi, definition 4.1) that may read more than one token.

    A row that is not solved exactly counts with its lower bound. Raises ConfigError for attention
    that does not expose its rows.
    """

    def begin(self, depth: Depth, x0: Tensor) -> None:
        self._means: list[Tensor] = []

    def forward(self, at: StepContext) -> None:
        sublayer = at.sublayer
        attention = sublayer.attention
        if attention is None:
            return
        if not isinstance(attention.field, ExposesRows):
            raise ConfigError(
                f"attention of type {type(attention.field).__name__} does not expose its rows:"
                " leave out --theta"
            )
        u = attention.given(sublayer.given(at.entered))
        mass = balanced_mass(attention.field.probabilities(u), tolerance=TOLERANCE)
        self._means.append(mass.lower[~mass.fixed].mean())

    def figures(self) -> float:
        return float(torch.stack(self._means).mean())


def mean_theta(model: GPT, tokens: TokenIds) -> float:
    """`MeanTheta` of the discrete model on these tokens."""
    theta: float = walk(model, tokens, instruments=[MeanTheta()])[0]
    return theta
