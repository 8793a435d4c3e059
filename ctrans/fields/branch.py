"""One of the maps that act at once in a sublayer, with the gain and offset of a norm of its own
where it has one.
"""

from __future__ import annotations

import abc
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ctrans.norm.norm import GainParameters


class BranchGains(nn.Module, abc.ABC):
    """gamma * u + beta of what a norm without gains gives: N_i x = gamma_i * x_hat + beta_i for
    maps that share x_hat.
    """

    @property
    @abc.abstractmethod
    def gamma(self) -> Float[Tensor, " width"]:
        """gamma."""

    @property
    @abc.abstractmethod
    def beta(self) -> Float[Tensor, " width"]:
        """beta, zeros where there is none."""

    @property
    def largest(self) -> float:
        """max|gamma|: |gamma * u + beta| <= max|gamma| |u| + |beta|, and no two inputs come further
        apart than by that factor.
        """
        return float(self.gamma.detach().abs().max())

    def forward(self, u: Float[Tensor, "*batch width"]) -> Float[Tensor, "*batch width"]:
        return self.gamma * u + self.beta


class OwnGains(GainParameters, BranchGains):
    """Trained ones, 1 and 0 at first; beta stays 0 without `bias`."""

    def __init__(self, width: int, bias: bool):
        super().__init__()
        self.make_gains(width, bias)


class Branch(NamedTuple):
    """A map of a sublayer, `field`, which is given A u of the sublayer's u = s N_in X: A its own
    `gains`, or the identity.

    `field` is any module from (*batch, tokens, width) to the same shape.
    """

    field: Any
    gains: BranchGains | None = None

    @property
    def steepest(self) -> float:
        """|A|_2 of differences."""
        return 1.0 if self.gains is None else self.gains.largest

    def given(self, u: Float[Tensor, "*batch width"]) -> Float[Tensor, "*batch width"]:
        """A u, what the map itself is given."""
        given: Tensor = u if self.gains is None else self.gains(u)
        return given

    def reach(self, radius: float) -> float:
        """How long a token can be that the map is given, where no token of u is longer than
        `radius`.
        """
        return radius if self.gains is None else self.gains.largest * radius + self.offset

    @property
    def offset(self) -> float:
        """|beta|."""
        return 0.0 if self.gains is None else float(torch.linalg.vector_norm(self.gains.beta.detach().double()))
