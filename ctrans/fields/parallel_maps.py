"""Attention and FFN at once: one map that is their sum, as GPT-J, PaLM, Phi and Cohere have it, and
with a norm for each GPT-NeoX.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ctrans.fields.branch import Branch, BranchGains
from ctrans.fields.protocols import ExplainsUnsupported, ExposesWeights, HasBound, HasOutputProjection, Kind, Matrix, TokenBound


class ParallelMaps(nn.Module):
    """f(u) = attention(A u) + ffn(B u), A and B gains of their own (`BranchGains`) or the identity:
    X + dt (attention(N X) + FFN(N X)).

    With two norms that differ in gain and offset alone, N_i X = gamma_i * x_hat + beta_i, u = x_hat
    is what a norm without gains gives (GPT-NeoX, Falcon); with one norm u = N X (GPT-J, Wang and
    Komatsuzaki 2021; PaLM, Chowdhery et al. 2022). No step of one after the other computes that, as
    the FFN does not see what attention adds.

    One map and not two that act in one segment: a segment is one smooth field, so that whatever is
    asked of a sublayer is asked of the sum, and an output norm acts on it. It ends in one linear
    map, [W_O W_2] of both features. What only an attention says, its rows and heads, is asked of
    `branches`. Keyword arguments are attention's.
    """

    mixes_tokens = True

    def __init__(self, attention: nn.Module, ffn: nn.Module, gains: tuple[BranchGains | None, BranchGains | None] = (None, None)):
        super().__init__()
        self.attention, self.ffn = attention, ffn
        self.attention_gains, self.ffn_gains = gains

    def forward(self, u: Float[Tensor, "*batch tokens width"], **context: Any) -> Float[Tensor, "*batch tokens width"]:
        attention, ffn = self.branches.values()
        y: Tensor = attention.field(attention.given(u), **context) + ffn.field(ffn.given(u))
        return y

    @property
    def branches(self) -> Mapping[Kind, Branch]:
        return {"attention": Branch(self.attention, self.attention_gains), "ffn": Branch(self.ffn, self.ffn_gains)}

    @property
    def matrices(self) -> Callable[[], Iterator[Matrix]]:
        """Those of attention and then of the FFN; not there where one does not show its own."""
        attention, ffn = self._all(ExposesWeights, "does not show its weight matrices by `matrices()`")

        def both() -> Iterator[Matrix]:
            yield from attention.matrices()
            yield from ffn.matrices()

        return both

    @property
    def bound(self) -> Callable[[], TokenBound]:
        """The sum of both bounds, |f(u)_i| <= |attention(A u)_i| + |ffn(B u)_i|; not there where
        one has none.
        """
        self._all(HasBound, "does not say how large its output can be")

        def both() -> TokenBound:
            each = [branch.field.bound().behind(branch.steepest, branch.offset) for branch in self.branches.values()]
            return TokenBound(*(sum(values) for values in zip(*each, strict=True)))

        return both

    @property
    def output_projection(self) -> LinearMaps:
        """[W_O W_2] of the features side by side; not there where a map names no last one. Raises
        ConfigError where it says why.
        """
        return LinearMaps(
            *(field.output_projection for field in self._all(HasOutputProjection, "does not name its last linear map"))
        )

    def pre_projection(self, u: Float[Tensor, "*batch tokens width"]) -> Float[Tensor, "*batch tokens features"]:
        """[h_attention(A u) h_ffn(B u)]."""
        return torch.cat([branch.field.pre_projection(branch.given(u)) for branch in self.branches.values()], -1)

    @property
    def why_not(self) -> str:
        """The first reason that one of them gives, or ""."""
        fields = (branch.field for branch in self.branches.values())
        return next((field.why_not for field in fields if isinstance(field, ExplainsUnsupported) and field.why_not), "")

    def _all(self, protocol: type, lacks: str) -> list[Any]:
        """Both maps, where both have the protocol; AttributeError otherwise, so that the sum has it
        if they do.
        """
        fields = [branch.field for branch in self.branches.values()]
        if (odd := next((field for field in fields if not isinstance(field, protocol)), None)) is not None:
            raise AttributeError(f"{type(odd).__name__} {lacks}")
        return fields


class LinearMaps(nn.Module):
    """h -> W_1 h_1 + W_2 h_2 + b_1 + b_2, h = [h_1 h_2]: what `nn.Linear` is to [W_1 W_2], by the
    parameters of two.
    """

    def __init__(self, first: nn.Linear, second: nn.Linear):
        super().__init__()
        self.first, self.second = first, second

    @property
    def weight(self) -> Tensor:
        return torch.cat([self.first.weight, self.second.weight], 1)

    @property
    def bias(self) -> Tensor | None:
        each: list[Tensor] = [part.bias for part in (self.first, self.second) if part.bias is not None]
        return torch.stack(each).sum(0) if each else None

    def forward(self, h: Tensor) -> Tensor:
        first, second = h.split([self.first.in_features, self.second.in_features], -1)
        y: Tensor = self.first(first) + self.second(second)
        return y
