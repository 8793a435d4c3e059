"""Softmax attention over the tokens of each sequence."""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Iterator, Mapping
from typing import ClassVar

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from ctrans.fields.protocols import HasPlainPath, HeadMatrices, Matrix, TokenBound
from ctrans.fields.scale import scale_linear
from ctrans.fields.spectral_norm import norm_of_product
from ctrans.norm import RMSNorm
from solvers import ConfigError
from solvers.errors import look_up

TEMPERATURES = (1e-12, 1e30)
"""Beyond these scores over tau sqrt(d_h), or their derivatives, are no numbers of single precision."""


def check_temperature(value: float) -> float:
    """The value. Raises ConfigError unless it is a number that scores can be divided by in every precision."""
    lowest, highest = TEMPERATURES
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not lowest <= value <= highest:
        raise ConfigError(f"temperature = {value!r}: give a number from {lowest:g} to {highest:g}; 1 is the usual one")
    return value


class Attention(nn.Module):
    """f(x) = [softmax(Q_h K_h' / (tau sqrt(d_h))) V_h]_h W_O' + b_O, heads side by side, over the tokens of each sequence.

    x is (*batch, tokens, width); tau is `temperature`. With `qk_norm`, queries and keys pass an RMSNorm over the head first.
    The fused kernel is used unless `plain` is set, which forward-mode and second derivatives need (see `plain_attention`).
    """

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        causal: bool = True,
        temperature: float = 1.0,
        qk_norm: bool = False,
        bias: bool = True,
        eps: float = 1e-5,
    ):
        super().__init__()
        if heads < 1 or width % heads:
            raise ConfigError(f"width {width} is not divisible by heads {heads}: choose heads that divide the width")
        self.width, self.heads, self.causal, self.temperature = width, heads, causal, check_temperature(temperature)
        self.qkv = nn.Linear(width, 3 * width, bias=bias)
        self.out = nn.Linear(width, width, bias=bias)
        self.query_norm = RMSNorm(width // heads, eps) if qk_norm else nn.Identity()
        self.key_norm = RMSNorm(width // heads, eps) if qk_norm else nn.Identity()
        self.plain = False

    def forward(self, x: Float[Tensor, "*batch tokens width"]) -> Float[Tensor, "*batch tokens width"]:
        y: Tensor = self.out(self.features(x))
        return y

    @property
    def last(self) -> nn.Linear:
        """The last linear map: f(x) = last(features(x))."""
        return self.out

    def features(self, x: Float[Tensor, "*batch tokens width"]) -> Float[Tensor, "*batch tokens width"]:
        """What the last linear map is applied to: the heads' averages, side by side."""
        q, k, v = self._queries_keys_values(x)
        if self.plain:
            mixed = self._probabilities(q, k) @ v
        else:
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal, scale=self._scale)
        return mixed.transpose(-3, -2).flatten(-2)

    def probabilities(self, x: Float[Tensor, "*batch tokens width"]) -> Float[Tensor, "*batch heads tokens tokens"]:
        """The attention rows softmax(Q_h K_h' / (tau sqrt(d_h))) of each head; row i weighs the tokens that token i reads."""
        q, k, _ = self._queries_keys_values(x)
        return self._probabilities(q, k)

    def matrices(self) -> Iterator[Matrix]:
        """W_Q, W_K, W_V and W_O, each square."""
        query, key, value = self.qkv.weight.chunk(3)
        yield Matrix(query, "query")
        yield Matrix(key, "key")
        yield Matrix(value, "value")
        yield Matrix(self.out.weight, "out")

    def bound(self) -> TokenBound:
        """|f(x)_i| <= sum_h |W_O,h W_V,h|_2 max_j |x_j| + |W_O b_V + b_O|.

        Attention rows are convex weights, so a head's average is no longer than its longest value (theory, section 6).
        """
        value, out = self.qkv.weight.detach().chunk(3)[2].double(), self.out.weight.detach().double()
        heads = zip(out.chunk(self.heads, dim=1), value.chunk(self.heads, dim=0), strict=True)
        gain = sum(norm_of_product(out, value) for out, value in heads)
        if self.qkv.bias is None:
            return TokenBound(gain, 0.0)
        offset = out @ self.qkv.bias.detach().chunk(3)[2].double() + self.out.bias.detach().double()
        return TokenBound(gain, float(torch.linalg.vector_norm(offset)))

    @property
    def normalised_scores(self) -> bool:
        """Whether queries and keys pass a norm."""
        return not isinstance(self.query_norm, nn.Identity)

    def head_matrices(self) -> Iterator[HeadMatrices]:
        """Q_h, K_h, V_h, the columns of W_O for each head, and the head's part of b_Q."""
        query, key, value = (part.chunk(self.heads) for part in self.qkv.weight.chunk(3))
        offsets = [None] * self.heads if self.qkv.bias is None else self.qkv.bias.chunk(3)[0].chunk(self.heads)
        for each in zip(query, key, value, self.out.weight.chunk(self.heads, dim=1), offsets, strict=True):
            yield HeadMatrices(*each)

    scalings: ClassVar[Mapping[str, bool]] = {"V": True, "WV": True}
    """Kan's V, and W and V together: f becomes c f."""

    def scaled(self, name: str, c: float) -> Attention:
        """A copy with V times c, or W and V each times sqrt(c), and the biases that act after them: c f(x)."""
        look_up("scaling", name, self.scalings)
        twin = copy.deepcopy(self)
        values, last = (c, 1.0) if name == "V" else (math.sqrt(c), math.sqrt(c))
        with torch.no_grad():
            for parameter in (twin.qkv.weight, twin.qkv.bias):
                if parameter is not None:
                    parameter.chunk(3)[2].mul_(values)
            if twin.out.bias is not None:
                twin.out.bias.mul_(values)
        scale_linear(twin.out, last)
        return twin

    @property
    def _scale(self) -> float:
        return 1 / (self.temperature * math.sqrt(self.width // self.heads))

    def _queries_keys_values(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(-3, -2) for part in self.qkv(x).chunk(3, dim=-1))
        return self.query_norm(q), self.key_norm(k), v

    def _probabilities(self, q: Tensor, k: Tensor) -> Tensor:
        scores = q @ k.transpose(-1, -2) * self._scale
        if self.causal:
            tokens = scores.shape[-1]
            later = torch.ones(tokens, tokens, dtype=torch.bool, device=scores.device).triu(1)
            scores = scores.masked_fill(later, -math.inf)
        return scores.softmax(-1)


@contextlib.contextmanager
def plain_attention(module: nn.Module) -> Iterator[None]:
    """Inside, every attention within `module` takes the plain path, which has forward-mode and second derivatives."""
    attentions = [part for part in module.modules() if isinstance(part, HasPlainPath)]
    before = [part.plain for part in attentions]
    for part in attentions:
        part.plain = True
    try:
        yield
    finally:
        for part, plain in zip(attentions, before, strict=True):
            part.plain = plain
