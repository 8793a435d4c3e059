"""Attention and FFN in parallel: one map that is their sum, as in GPT-J, PaLM, Phi and Cohere; with
one norm each as in GPT-NeoX.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ctrans.base.shapes import TokenRows
from ctrans.dynamics.fields.branch import Branch, BranchGains
from ctrans.dynamics.fields.protocols import (
    ExplainsUnsupported,
    ExposesWeights,
    HasBound,
    HasOutputProjection,
    Kind,
    Matrix,
    TokenBound,
)


class ParallelMaps(nn.Module):
    """f(u) = attention(A u) + ffn(B u), for X + dt (attention(N X) + FFN(N X)). A and B are
    `BranchGains` or the identity.

    Two norms may differ in gain and offset only, N_i X = gamma_i * x_hat + beta_i; then u = x_hat
    is the result of a norm without gains (GPT-NeoX, Falcon). With one norm, u = N X (GPT-J, Wang
    and Komatsuzaki 2021; PaLM, Chowdhery et al. 2022). No sequence of two steps computes the same,
    because the FFN does not get attention's output.

    It is one map, because a segment has one smooth field: a sublayer's properties and its output
    norm refer to the sum. It ends in one linear map, [W_O W_2] of both features. `branches` gives
    the properties that only attention has, its rows and heads. Keyword arguments go to attention.
    """

    mixes_tokens = True

    def __init__(
        self,
        attention: nn.Module,
        ffn: nn.Module,
        gains: tuple[BranchGains | None, BranchGains | None] = (None, None),
    ):
        super().__init__()
        self.attention = attention
        self.ffn = ffn
        self.attention_gains, self.ffn_gains = gains

    def forward(self, u: TokenRows, **context: Any) -> TokenRows:
        attention, ffn = self.branches.values()
        y: Tensor = attention.field(attention.given(u), **context) + ffn.field(ffn.given(u))
        return y

    @property
    def branches(self) -> Mapping[Kind, Branch]:
        return {
            "attention": Branch(self.attention, self.attention_gains),
            "ffn": Branch(self.ffn, self.ffn_gains),
        }

    @property
    def matrices(self) -> Callable[[], Iterator[Matrix]]:
        """The matrices of attention, then those of the FFN. Missing unless both maps expose
        theirs.
        """
        attention, ffn = self._all(
            ExposesWeights, "does not show its weight matrices by `matrices()`"
        )

        def both() -> Iterator[Matrix]:
            yield from attention.matrices()
            yield from ffn.matrices()

        return both

    @property
    def bound(self) -> Callable[[], TokenBound]:
        """The sum of both bounds, |f(u)_i| <= |attention(A u)_i| + |ffn(B u)_i|. Missing unless
        both maps have one.
        """
        self._all(HasBound, "does not say how large its output can be")

        def both() -> TokenBound:
            attention, ffn = (
                branch.field.bound().behind(branch.steepest, branch.offset)
                for branch in self.branches.values()
            )
            return TokenBound(
                attention.gain + ffn.gain,
                attention.offset + ffn.offset,
                attention.curvature + ffn.curvature,
            )

        return both

    @property
    def output_projection(self) -> LinearMaps:
        """[W_O W_2] for the concatenated features. Missing unless both maps have an output
        projection. Raises ConfigError if one raises it.
        """
        attention, ffn = self._all(HasOutputProjection, "does not name its last linear map")
        return LinearMaps(attention.output_projection, ffn.output_projection)

    def pre_projection(self, u: TokenRows) -> Float[Tensor, "*batch tokens features"]:
        """[h_attention(A u) h_ffn(B u)]."""
        features = [
            branch.field.pre_projection(branch.given(u)) for branch in self.branches.values()
        ]
        return torch.cat(features, -1)

    @property
    def why_not(self) -> str:
        """The first reason that a map gives, or ""."""
        for branch in self.branches.values():
            if isinstance(branch.field, ExplainsUnsupported) and branch.field.why_not:
                return branch.field.why_not
        return ""

    def _all(self, protocol: type, lacks: str) -> list[Any]:
        """Both maps if both have the protocol. Raises AttributeError otherwise, so that the sum
        does not have it either.
        """
        fields = [branch.field for branch in self.branches.values()]
        for field in fields:
            if not isinstance(field, protocol):
                raise AttributeError(f"{type(field).__name__} {lacks}")
        return fields


class LinearMaps(nn.Module):
    """h -> W_1 h_1 + W_2 h_2 + b_1 + b_2, h = [h_1 h_2]: acts as an `nn.Linear` with [W_1 W_2]. Its
    parameters are those of both.
    """

    def __init__(self, first: nn.Linear, second: nn.Linear):
        super().__init__()
        self.first = first
        self.second = second

    @property
    def weight(self) -> Tensor:
        return torch.cat([self.first.weight, self.second.weight], 1)

    @property
    def bias(self) -> Tensor | None:
        biases: list[Tensor] = [
            part.bias for part in (self.first, self.second) if part.bias is not None
        ]
        if not biases:
            return None
        return torch.stack(biases).sum(0)

    def forward(self, h: Tensor) -> Tensor:
        first, second = h.split([self.first.in_features, self.second.in_features], -1)
        y: Tensor = self.first(first) + self.second(second)
        return y
