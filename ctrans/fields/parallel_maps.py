"""Attention and FFN at once: one map that is their sum, as GPT-J, PaLM, Phi and Cohere have it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from ctrans.fields.protocols import (
    EndsLinear,
    HasBound,
    Kind,
    Matrix,
    SaysWhyNot,
    ShowsMatrices,
    TokenBound,
    why_not,
)
from solvers import ConfigError


class ParallelMaps(nn.Module):
    """f(x) = f_attention(x) + f_ffn(x), both given the same x: X + dt (attention(N X) + FFN(N X)) behind one input norm.

    One map and not two that act in one segment: a segment is one smooth field, so that whatever is asked of a sublayer is asked of the
    sum, and an output norm acts on it. It ends in one linear map, [W_O W_2] of both features. What only an attention says, its
    rows and heads, is asked of `parts`.
    """

    mixes_tokens = True

    def __init__(self, attention: nn.Module, ffn: nn.Module):
        super().__init__()
        self.attention, self.ffn = attention, ffn

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.attention(x) + self.ffn(x)
        return y

    @property
    def parts(self) -> Mapping[Kind, nn.Module]:
        return {"attention": self.attention, "ffn": self.ffn}

    def matrices(self) -> Iterator[Matrix]:
        for part in self.parts.values():
            if not isinstance(part, ShowsMatrices):
                raise ConfigError(f"{type(part).__name__} does not show its weight matrices by `matrices()`")
            yield from part.matrices()

    def bound(self) -> TokenBound:
        """The sum of both bounds. Raises ConfigError for a part that has none."""
        each = []
        for part in self.parts.values():
            if not isinstance(part, HasBound):
                raise ConfigError(f"{type(part).__name__} does not say how large its output can be{why_not(part)}")
            each.append(part.bound())
        return TokenBound(*(sum(values) for values in zip(*each, strict=True)))

    @property
    def last(self) -> LinearMaps:
        """[W_O W_2] of the features side by side; not there where a part names no last map."""
        return LinearMaps(*(part.last for part in self._ending()))

    def features(self, x: Tensor) -> Tensor:
        """[h_attention(x) h_ffn(x)]."""
        return torch.cat([part.features(x) for part in self._ending()], -1)

    @property
    def why_not(self) -> str:
        return next((part.why_not for part in self.parts.values() if isinstance(part, SaysWhyNot) and part.why_not), "")

    def _ending(self) -> list[EndsLinear]:
        ending: list[EndsLinear] = [part for part in self.parts.values() if isinstance(part, EndsLinear)]
        if len(ending) < len(self.parts):
            raise AttributeError("a part does not name its last linear map")
        return ending


class LinearMaps(nn.Module):
    """h -> W_1 h_1 + W_2 h_2 + b_1 + b_2, h = [h_1 h_2]: what `nn.Linear` is to [W_1 W_2], by the parameters of two."""

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
