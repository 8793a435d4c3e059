"""One of several maps that act in parallel in a sublayer, with the gain and offset of its own norm
if it has one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ctrans.base.option import Count
from ctrans.base.shapes import PerChannel, Vectors
from ctrans.dynamics.norm.norm import GainParameters


class BranchGains(nn.Module, ABC):
    """gamma * u + beta after a norm without gains: N_i x = gamma_i * x_hat + beta_i for maps that
    share x_hat.
    """

    @property
    @abstractmethod
    def gamma(self) -> PerChannel:
        """gamma."""

    @property
    @abstractmethod
    def beta(self) -> PerChannel:
        """beta, or zeros if there is none."""

    @property
    def largest(self) -> float:
        """max|gamma|: |gamma * u + beta| <= max|gamma| |u| + |beta|. Distances grow by at most this
        factor.
        """
        return float(self.gamma.detach().abs().max())

    def forward(self, u: Vectors) -> Vectors:
        return self.gamma * u + self.beta


class OwnGains(GainParameters, BranchGains):
    """Trained gains, initialised at 1 and 0. beta stays 0 without `bias`."""

    def __init__(self, width: Count, *, bias: bool):
        super().__init__()
        self.make_gains(width, bias=bias)


class Branch(NamedTuple):
    """A map of a sublayer, `field`, with the input A u for the sublayer's u = s N_in X. A is its
    own `gains`, or the identity.

    `field` is any module from (*batch, tokens, width) to the same shape.
    """

    field: Any
    gains: BranchGains | None = None

    @property
    def steepest(self) -> float:
        """The Lipschitz constant of A."""
        if self.gains is None:
            return 1.0
        return self.gains.largest

    def given(self, u: Vectors) -> Vectors:
        """A u, the input of the map."""
        if self.gains is None:
            return u
        map_input: Tensor = self.gains(u)
        return map_input

    def reach(self, radius: float) -> float:
        """The largest length of a token of A u if no token of u is longer than `radius`."""
        return self.steepest * radius + self.offset

    @property
    def offset(self) -> float:
        """|beta|."""
        if self.gains is None:
            return 0.0
        return float(torch.linalg.vector_norm(self.gains.beta.detach().double()))
