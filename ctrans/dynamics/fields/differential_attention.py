"""Differential attention: its rows are differences of two softmaxes."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ctrans.base.option import Count
from ctrans.base.shapes import AttentionRows, ByHead, TokenRows
from ctrans.dynamics.fields.attention import check_temperature
from ctrans.dynamics.fields.joined_heads import JoinedHeads
from ctrans.dynamics.fields.positions import later_tokens
from ctrans.dynamics.fields.protocols import TokenBound
from solvers import ConfigError

FIRST_SHARE = 0.8
"""The initial lambda, as in the paper's deeper layers."""


class DifferentialAttention(JoinedHeads):
    """f(x)_i = W_O [sum_j (a_hij - l_h a'_hij)(V_h x_j + b_v,h)]_h + b_O, a and a' softmaxes of
    <q_i, k_j>/(tau sqrt(d_h/2)).

    a uses the first halves of head h's queries and keys, a' the second halves. l_h, lambda, is
    learned (Ye et al. 2024; they compute it from four vectors and add a norm after each head, which
    this map omits). Rows sum to 1 - l_h and have entries of both signs. It uses the fused kernel
    unless `use_reference_kernel` is set (see `reference_kernels`).
    """

    why_not = "its rows are differences of two softmaxes and sum to 1 - lambda"

    def __init__(
        self,
        width: Count,
        heads: Count,
        *,
        causal: bool = True,
        temperature: float = 1.0,
        bias: bool = True,
    ):
        super().__init__(width, heads, causal=causal, bias=bias)
        if width // heads % 2:
            raise ConfigError(
                f"heads of width {width // heads} have no halves for differential attention: choose"
                " an even width"
            )
        self.temperature = check_temperature(temperature)
        self.share = nn.Parameter(torch.full((heads,), FIRST_SHARE))
        self.use_reference_kernel = False

    def mixed(self, x: TokenRows) -> ByHead:
        """The differences of each head's two averages."""
        q, k, v = self.queries_keys_values(x)
        first, second = (
            self._average(a, b, v) for a, b in zip(q.chunk(2, -1), k.chunk(2, -1), strict=True)
        )
        return first - self.share.view(-1, 1, 1) * second

    def rows(self, x: TokenRows) -> AttentionRows:
        """a_h - l_h a'_h for each head."""
        q, k, _ = self.queries_keys_values(x)
        first, second = (
            self._rows(a, b) for a, b in zip(q.chunk(2, -1), k.chunk(2, -1), strict=True)
        )
        return first - self.share.view(-1, 1, 1) * second

    def bound(self) -> TokenBound:
        """|f(x)_i| <= sum_h (1 + |l_h|) |W_O,h V_h|_2 max_j |x_j| + |sum_h (1 - l_h) W_O,h b_v,h +
        b_O|.

        The absolute entries of a row sum to at most 1 + |l_h|. The entries sum to 1 - l_h, which
        multiplies the offsets of values.
        """
        shares = self.share.detach().double()
        gain = math.fsum(
            path * (1 + abs(share))
            for path, share in zip(self.paths(), shares.tolist(), strict=True)
        )
        return TokenBound(gain, self.offset(1 - shares))

    def _average(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self.use_reference_kernel:
            return self._rows(q, k) @ v
        return F.scaled_dot_product_attention(q, k, v, is_causal=self.causal, scale=self._scale(q))

    def _rows(self, q: Tensor, k: Tensor) -> Tensor:
        scores = q @ k.mT * self._scale(q)
        if self.causal:
            scores = scores.masked_fill(later_tokens(scores), -math.inf)
        return scores.softmax(-1)

    def _scale(self, q: Tensor) -> float:
        return 1 / (self.temperature * math.sqrt(q.shape[-1]))
