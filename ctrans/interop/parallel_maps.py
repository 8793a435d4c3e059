"""Attention and FFN of a foreign block that act at once, X <- X + attention(N_1 X) + ffn(N_2 X): one map, their sum.

No step of one after the other computes that, as the FFN does not see what attention adds; so a block is one segment, of field
f = attention + ffn and length dt (Wang and Komatsuzaki 2021, GPT-J; Chowdhery et al. 2022, PaLM). Where the two have norms of their own
(GPT-NeoX), x_hat is the input norm of both and gains and offsets belong to the maps: N_i X = gamma_i x_hat + beta_i.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ctrans.fields import HasBound, Matrix, ShowsMatrices, TokenBound
from ctrans.interop.ffn_in_model import FeedForwardInModel
from ctrans.interop.module_chain import ModuleChain
from ctrans.interop.norms import AdaptedNorm
from ctrans.norm import Norm


class WithoutGain(Norm):
    """x_hat of another library's norm: gamma = 1, beta = 0."""

    centred = False  # each object has its own

    def __init__(self, norm: AdaptedNorm):
        super().__init__()
        self.width, self.eps, self.centred = norm.width, norm.eps, norm.centred
        self.module, self.shift = norm.module, 0.0
        self.register_buffer("one", torch.ones_like(norm.gamma.detach()), persistent=False)

    @property
    def gamma(self) -> Float[Tensor, " width"]:
        return self.get_buffer("one")

    @property
    def beta(self) -> Float[Tensor, " width"]:
        return torch.zeros_like(self.gamma)

    def forward(self, x: Float[Tensor, "*batch width"]) -> Float[Tensor, "*batch width"]:
        return self.standardize(x)


class Gained(nn.Module):
    """gamma * x + beta, with the gain and offset of a norm that it shares."""

    def __init__(self, norm: AdaptedNorm):
        super().__init__()
        self.norm = norm

    def forward(self, x: Tensor) -> Tensor:
        return self.norm.gamma * x + self.norm.beta

    def bound(self) -> TokenBound:
        """|gamma * x + beta| <= max |gamma_c| |x| + |beta|."""
        return TokenBound(float(self.norm.gamma.abs().max()), float(self.norm.beta.norm()))


class BothMaps(nn.Module):
    """f(x) = attention(A x) + ffn(B x), A and B gains of norms or nothing; `context` is attention's."""

    mixes_tokens = True
    why_not = "attention and FFN act at once, as one map, so that theta, which is attention's alone, is not given"

    def __init__(self, attention: Any, ffn: Any, before: tuple[Gained | None, Gained | None] = (None, None)):
        super().__init__()
        self.attention, self.ffn = attention, ffn
        self.before = nn.ModuleList(nn.Identity() if each is None else each for each in before)

    def forward(self, x: Float[Tensor, "*batch tokens width"], **context: Any) -> Float[Tensor, "*batch tokens width"]:
        first, second = self.before
        both: Tensor = self.attention(first(x), **context) + self.ffn(second(x))
        return both

    @property
    def last(self) -> nn.Linear:
        """[W_1 W_2] and b_1 + b_2 of the two maps' last linear maps, a copy. Raises ConfigError where one does not end in such a map."""
        first, second = self.attention.last, self.ffn.last
        weight = torch.cat([first.weight, second.weight], 1).detach()
        offsets = [each.bias.detach() for each in (first, second) if each.bias is not None]
        last = nn.Linear(weight.shape[1], weight.shape[0], bias=bool(offsets), device="meta")
        last.weight = nn.Parameter(weight, requires_grad=False)
        if offsets:
            last.bias = nn.Parameter(torch.stack(offsets).sum(0), requires_grad=False)
        return last

    def features(self, x: Float[Tensor, "*batch tokens width"]) -> Float[Tensor, "*batch tokens features"]:
        """What that acts on: attention's features and the FFN's, side by side."""
        first, second = self.before
        return torch.cat([self.attention.features(first(x)), self.ffn.features(second(x))], -1)

    @property
    def plain(self) -> bool:
        """Whether attention does without its fused kernel."""
        return bool(self.attention.plain)

    @plain.setter
    def plain(self, wanted: bool) -> None:
        self.attention.plain = wanted

    @property
    def chains(self) -> tuple[ModuleChain, ModuleChain]:
        """The modules of both."""
        return getattr(self.attention, "attention", self.attention), self.ffn


class BothMapsInModel(BothMaps):
    """The same, of maps that say how large they can be and which matrices they have."""

    def matrices(self) -> Iterator[Matrix]:
        """Those of attention and then of the FFN."""
        yield from self.attention.matrices()
        yield from self.ffn.matrices()

    def bound(self) -> TokenBound:
        """The sum of both bounds: |f(x)_i| <= |attention(A x)_i| + |ffn(B x)_i|."""
        gain = offset = curvature = 0.0
        for map_, before in zip((self.attention, self.ffn), self.before, strict=True):
            own = map_.bound()
            a = before.bound() if isinstance(before, Gained) else TokenBound(1.0, 0.0)
            # c (g r + b)^2 + k (g r + b) + o
            curvature += own.curvature * a.gain**2
            gain += own.gain * a.gain + 2 * own.curvature * a.gain * a.offset
            offset += own.at(a.offset) if a.offset else own.offset
        return TokenBound(gain, offset, curvature)


def both_in_model(maps: BothMaps, attention: nn.Module, ffn: FeedForwardInModel) -> BothMaps:
    """The sum of the two as they are known in the model."""
    known = all(isinstance(each, ShowsMatrices) and isinstance(each, HasBound) for each in (attention, ffn))
    made = (BothMapsInModel if known else BothMaps)(attention, ffn)
    made.before = maps.before
    return made
