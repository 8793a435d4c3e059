"""Linear attention: rows of positive weights that a scan over the tokens sums, and the same with a
gate that forgets.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import ClassVar

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from ctrans.base.option import Count
from ctrans.base.shapes import AttentionRows, ByHead, TokenRows
from ctrans.dynamics.fields.joined_heads import JoinedHeads
from ctrans.dynamics.fields.positions import later_tokens
from ctrans.dynamics.fields.protocols import HeadMatrices, Matrix, TokenBound
from ctrans.dynamics.fields.spectral_norm import spectral_norm

CHUNK = 64
"""Tokens whose weights are multiplied out. The tokens before them are one matrix of d_h x (d_h + 1)
entries.
"""
LOWEST = -30.0
"""z is clamped at this value, so that no row is 0/0: e^-30 squared is positive in every type but
half precision.
"""
FORGETS = 16.0
"""A gate is sigmoid(.)^(1/16), so that an untrained one keeps one half over 16 tokens (Yang et al.
2024).
"""


def positive_feature(z: Tensor) -> Tensor:
    """phi(z) = elu(z) + 1 = 1 + z for z > 0, e^z otherwise, at least e^-30 (Katharopoulos et al.
    2020). phi' <= phi everywhere.
    """
    return z.clamp(LOWEST, 0).exp() + z.relu()


class KernelAttention(JoinedHeads):
    """f(x)_i = W_O [sum_j a_hij (V_h x_j + b_v,h)]_h + b_O, a_hij = w_hij/sum_l w_hil with weights
    w_hij > 0 that a scan can sum.

    w_hij = <phi(q_hi), phi(k_hj)> prod over l = j + 1 .. i of g_hl, phi = elu + 1, q_h = Q_h x +
    b_q,h, k_h = K_h x + b_k,h. If causal, j and l run up to i. `log_keep` are the log g_hl,
    0 without gates.

    Rows are positive and sum to 1, so softmax attention's affine bound holds. a_h is the softmax
    over j of log w_hij, and theta of a row is its sensitivity to these scores. The scores are not
    bilinear in x (`normalised_scores`), so theorem 5.1 does not apply. phi has a continuous
    derivative; its second derivative jumps where an entry of q or k is 0.
    """

    temperature: ClassVar[float] = 1.0
    normalised_scores: ClassVar[bool] = True
    """The scores log w are not bilinear in the input."""
    why_not = (
        "the scores of linear attention are logarithms of kernels, not linear in queries and keys"
    )

    def mixed(self, x: TokenRows) -> ByHead:
        """The heads' averages."""
        q, k, v = self._features_and_values(x)
        # a column of ones after the values also sums the weights
        v_and_ones = F.pad(v, (0, 1), value=1.0)
        summed = weighted_sums(q, k, v_and_ones, self.log_keep(x), causal=self.causal)
        return summed[..., :-1] / summed[..., -1:]

    def log_keep(self, x: TokenRows) -> Float[Tensor, "*batch heads tokens"]:
        """log of the part of the earlier tokens that each head keeps at token i: 0 if it keeps
        all.
        """
        return x.new_zeros(*x.shape[:-2], self.heads, x.shape[-2])

    def probabilities(self, x: TokenRows) -> AttentionRows:
        """The rows a_h of each head, at quadratic cost. Row i has the weights of the tokens that
        token i reads.
        """
        q, k, _ = self._features_and_values(x)
        weights = q @ k.mT
        if self.causal:
            weights = weights * kept(self.log_keep(x))
        return weights / weights.sum(-1, keepdim=True)

    def head_matrices(self) -> Iterator[HeadMatrices]:
        """Q_h, K_h, V_h, the columns of W_O for each head, and the head's parts of b_Q and b_K."""
        return self.heads_with_offsets(of_keys=True)

    def bound(self) -> TokenBound:
        """|f(x)_i| <= sum_h |W_O,h V_h|_2 max_j |x_j| + |W_O b_V + b_O|, because rows are convex
        weights.
        """
        return TokenBound(math.fsum(self.paths()), self.offset())

    def _features_and_values(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = self.queries_keys_values(x)
        return positive_feature(q), positive_feature(k), v


class LinearAttention(KernelAttention):
    """`KernelAttention` without gates, with time and memory linear in the number of tokens
    (Katharopoulos et al. 2020, eq. 9).
    """

    def lipschitz(self, radius: float = math.inf, *, printed: bool = False) -> float:
        """L = sum_h |W_O,h V_h|_2 (1 + r (|Q_h|_2 + |K_h|_2)) for tokens no longer than r.

        log w_hij changes by at most |Q_h||dx_i| + |K_h||dx_j|. The entries of a row then change, in
        sum, by at most theta <= 1 times that. They weigh W_O,h V_h x_j, whose length is at most
        |W_O,h V_h| r. Offsets of values do not count, because the changes sum to zero. For softmax
        attention the second term is 2 r^2 |Q_h||K_h|/(tau sqrt(d_h)).
        """
        query, key, _ = self.qkv.weight.chunk(3)
        by_head = zip(self.paths(), query.chunk(self.heads), key.chunk(self.heads), strict=True)
        slopes = []
        for path, q, k in by_head:
            score_slope = spectral_norm(q) + spectral_norm(k)
            change_of_rows = 0.0
            if score_slope:  # the radius may be infinite
                change_of_rows = radius * score_slope
            slopes.append(path * (1 + change_of_rows))
        return math.fsum(slopes)


class GatedLinearAttention(KernelAttention):
    """`KernelAttention` that forgets: g_h = sigmoid(G_h x + c_h)^(1/16). Always causal.

    It is the recurrence S_i = g_i S_(i-1) + phi(k_i) [v_i, 1]'. The head's output is all but the
    last entry of S_i'phi(q_i), divided by the last. There is one gate for each head, as in Mamba-2
    (Yang et al. 2024 have one for each entry of k). The division keeps rows convex. A gate changes
    the weights of all earlier tokens, so each Lipschitz constant grows with their number.
    """

    def __init__(self, width: Count, heads: Count, *, bias: bool = True):
        super().__init__(width, heads, bias=bias)
        self.keep = nn.Linear(width, heads, bias=bias)

    def log_keep(self, x: TokenRows) -> Float[Tensor, "*batch heads tokens"]:
        """log g_h of each token."""
        return F.logsigmoid(self.keep(x)).transpose(-1, -2) / FORGETS

    def matrices(self) -> Iterator[Matrix]:
        """W_Q, W_K, W_V and W_O, which are square, and the gate's, with a row for each head."""
        yield from super().matrices()
        yield Matrix(self.keep.weight, "gate")


def weighted_sums(
    q: Float[Tensor, "*batch tokens head"],
    k: Float[Tensor, "*batch tokens head"],
    v: Float[Tensor, "*batch tokens values"],
    log_keep: Float[Tensor, "*batch tokens"],
    *,
    causal: bool,
) -> Float[Tensor, "*batch tokens values"]:
    """sum over j <= i of exp(c_i - c_j) <q_i, k_j> v_j, c the running sums of `log_keep`.
    Over all j if not causal.

    Each chunk of `CHUNK` tokens multiplies its weights out. The earlier tokens enter as one matrix
    sum of exp(-c_j) k_j v_j'.
    """
    if not causal:
        return q @ (k.mT @ v)
    tokens = q.shape[-2]
    size = min(CHUNK, tokens)
    short = -tokens % size
    q, k, v = (F.pad(part, (0, 0, 0, short)).unflatten(-2, (-1, size)) for part in (q, k, v))
    keep = F.pad(log_keep, (0, short)).unflatten(-1, (-1, size))
    sums = (q @ k.mT * kept(keep)) @ v
    if tokens > size:
        within = keep.cumsum(-1).unsqueeze(-1)
        total = within[..., -1:, :]
        before = _carried(k.mT @ (v * (total - within).exp()), total.exp())
        sums = sums + (q * within.exp()) @ before
    return sums.flatten(-3, -2)[..., :tokens, :]


def kept(log_keep: Float[Tensor, "*batch tokens"]) -> Float[Tensor, "*batch tokens tokens"]:
    """exp(c_i - c_j) for j <= i, otherwise 0."""
    running = log_keep.cumsum(-1)
    between = running.unsqueeze(-1) - running.unsqueeze(-2)
    return between.masked_fill(later_tokens(log_keep), -math.inf).exp()


def _carried(
    added: Float[Tensor, "*batch chunks head values"], keep: Float[Tensor, "*batch chunks 1 1"]
) -> Float[Tensor, "*batch chunks head values"]:
    """The state before each chunk: S_n = keep_(n-1) S_(n-1) + added_(n-1), S_0 = 0."""
    state = torch.zeros_like(added[..., 0, :, :])
    states = []
    for chunk in range(added.shape[-3]):
        states.append(state)
        state = added[..., chunk, :, :] + keep[..., chunk, :, :] * state
    return torch.stack(states, -3)
