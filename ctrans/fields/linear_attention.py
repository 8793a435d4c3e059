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

from ctrans.fields.joined_heads import SquareHeads
from ctrans.fields.protocols import HeadMatrices, Matrix, TokenBound
from ctrans.fields.spectral_norm import spectral_norm

CHUNK = 64
"""Tokens whose weights are multiplied out; what came before them is one matrix of d_h x (d_h + 1)
entries.
"""
LOWEST = -30.0
"""Where phi is held, so that no row is 0/0: e^-30 squared is a number in every precision but half.
"""
FORGETS = 16.0
"""A gate is sigmoid(.)^(1/16), so that a fresh one keeps a half for 16 tokens (Yang et al. 2024).
"""


def positive_feature(z: Tensor) -> Tensor:
    """phi(z) = elu(z) + 1 = 1 + z for z > 0, e^z else, held at e^-30 below (Katharopoulos et al.
    2020); phi' <= phi everywhere.
    """
    return z.clamp(LOWEST, 0).exp() + z.relu()


class KernelAttention(SquareHeads):
    """f(x)_i = W_O [sum_j a_hij (V_h x_j + b_v,h)]_h + b_O, a_hij = w_hij/sum_l w_hil of weights
    w_hij > 0 that a scan can sum.

    w_hij = <phi(q_hi), phi(k_hj)> prod over l = j + 1 .. i of g_hl, phi = elu + 1, q_h = Q_h x +
    b_q,h, k_h = K_h x + b_k,h; causally j and l run up to i. `log_keep` are the log g_hl, if any.

    Rows are positive and sum to 1, so that softmax attention's affine bound holds, and a_h is the
    softmax over j of log w_hij: theta of a row is its sensitivity to these. They are not bilinear
    in x (`normalised_scores`), and theorem 5.1 says nothing. phi has a continuous derivative, and a
    jump in the second where an entry of q or k is 0.
    """

    temperature: ClassVar[float] = 1.0
    normalised_scores: ClassVar[bool] = True
    """Its scores log w are not bilinear in the input."""
    why_not = "the scores of linear attention are logarithms of kernels, not linear in queries and keys"

    def mixed(self, x: Float[Tensor, "*batch tokens width"]) -> Float[Tensor, "*batch heads tokens head"]:
        """The heads' averages."""
        q, k, v = self._features_and_values(x)
        # with a column of ones beside the values, sums of weights are one more entry of what is
        # summed
        summed = weighted_sums(q, k, F.pad(v, (0, 1), value=1.0), self.log_keep(x), causal=self.causal)
        return summed[..., :-1] / summed[..., -1:]

    def log_keep(self, x: Float[Tensor, "*batch tokens width"]) -> Float[Tensor, "*batch heads tokens"] | None:
        """log of the part of what came before token i that is kept at i, of each head; None where
        all is.
        """
        return None

    def probabilities(self, x: Float[Tensor, "*batch tokens width"]) -> Float[Tensor, "*batch heads tokens tokens"]:
        """The rows a_h of each head, with the square of the work; row i weighs the tokens that
        token i reads.
        """
        q, k, _ = self._features_and_values(x)
        weights = q @ k.mT
        if self.causal:
            weights = weights * kept(self.log_keep(x), q.shape[-2], q)
        return weights / weights.sum(-1, keepdim=True)

    def head_matrices(self) -> Iterator[HeadMatrices]:
        """Q_h, K_h, V_h, the columns of W_O for each head, and the head's parts of b_Q and b_K."""
        query, key, value = (part.chunk(self.heads) for part in self.qkv.weight.chunk(3))
        bias = self.qkv.weight.new_zeros(3 * self.width) if self.qkv.bias is None else self.qkv.bias
        q_0, k_0 = (part.chunk(self.heads) for part in bias.chunk(3)[:2])
        for each in zip(query, key, value, self.out.weight.chunk(self.heads, dim=1), q_0, k_0, strict=True):
            yield HeadMatrices(*each)

    def bound(self) -> TokenBound:
        """|f(x)_i| <= sum_h |W_O,h V_h|_2 max_j |x_j| + |W_O b_V + b_O|: rows are convex weights,
        as softmax attention's are.
        """
        return TokenBound(math.fsum(self.paths()), self.offset())

    def _features_and_values(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = self.queries_keys_values(x)
        return positive_feature(q), positive_feature(k), v


class LinearAttention(KernelAttention):
    """`KernelAttention` without gates, in the work and memory of the number of tokens
    (Katharopoulos et al. 2020, eq. 9).
    """

    def lipschitz(self, radius: float = math.inf, *, printed: bool = False) -> float:
        """L = sum_h |W_O,h V_h|_2 (1 + r (|Q_h|_2 + |K_h|_2)) among tokens no longer than r.

        With log w_hij moving by at most |Q_h||dx_i| + |K_h||dx_j|, a row moves by theta <= 1 of
        that, summed over its entries, and what they weigh, W_O,h V_h x_j, is no longer than |W_O,h
        V_h| r from the centre 0; offsets of values meet a change that sums to zero. Softmax
        attention has 2 r^2 |Q_h||K_h|/(tau sqrt(d_h)) for the second term.
        """
        query, key = (part.chunk(self.heads) for part in self.qkv.weight.chunk(3)[:2])
        turns = [spectral_norm(q) + spectral_norm(k) for q, k in zip(query, key, strict=True)]
        return math.fsum(path * (1 + (radius * turn if turn else 0.0)) for path, turn in zip(self.paths(), turns, strict=True))


class GatedLinearAttention(KernelAttention):
    """`KernelAttention` that forgets: g_h = sigmoid(G_h x + c_h)^(1/16). Causal alone.

    It is the recurrence S_i = g_i S_(i-1) + phi(k_i) [v_i, 1]' with f from S_i'phi(q_i): its first
    entries over its last. One gate for each head, as in Mamba-2 (Yang et al. 2024, have one for
    each entry of k), and normalised, so that rows stay convex. A gate moves the weights of all
    tokens before it: it has no Lipschitz constant that does not grow with their number.
    """

    def __init__(self, width: int, heads: int, *, bias: bool = True):
        super().__init__(width, heads, bias=bias)
        self.keep = nn.Linear(width, heads, bias=bias)

    def log_keep(self, x: Float[Tensor, "*batch tokens width"]) -> Float[Tensor, "*batch heads tokens"]:
        """log g_h of every token."""
        return F.logsigmoid(self.keep(x)).transpose(-1, -2) / FORGETS

    def matrices(self) -> Iterator[Matrix]:
        """W_Q, W_K, W_V and W_O, each square, and the gate's, a row for each head."""
        yield from super().matrices()
        yield Matrix(self.keep.weight, "gate")


def weighted_sums(
    q: Float[Tensor, "*batch tokens head"],
    k: Float[Tensor, "*batch tokens head"],
    v: Float[Tensor, "*batch tokens values"],
    log_keep: Float[Tensor, "*batch tokens"] | None = None,
    *,
    causal: bool = True,
) -> Float[Tensor, "*batch tokens values"]:
    """sum over j <= i of exp(c_i - c_j) <q_i, k_j> v_j, c the running sums of `log_keep` (0 if
    None); over all j if not causal.

    Chunks of `CHUNK` tokens multiply their weights out; what came before is carried as one matrix
    sum of exp(-c_j) k_j v_j'.
    """
    if not causal:
        return q @ (k.mT @ v)
    tokens = q.shape[-2]
    size = min(CHUNK, tokens)
    short = -tokens % size
    q, k, v = (F.pad(part, (0, 0, 0, short)).unflatten(-2, (-1, size)) for part in (q, k, v))
    keep = None if log_keep is None else F.pad(log_keep, (0, short)).unflatten(-1, (-1, size))
    sums = (q @ k.mT * kept(keep, size, q)) @ v
    if tokens > size:
        within = None if keep is None else keep.cumsum(-1).unsqueeze(-1)
        added = k.mT @ (v if within is None else v * (within[..., -1:, :] - within).exp())
        before = _carried(added, None if within is None else within[..., -1:, :].exp())
        sums = sums + (q if within is None else q * within.exp()) @ before
    return sums.flatten(-3, -2)[..., :tokens, :]


def kept(log_keep: Tensor | None, tokens: int, like: Tensor) -> Float[Tensor, "*batch tokens tokens"]:
    """exp(c_i - c_j) for j <= i, else 0."""
    later = torch.ones(tokens, tokens, dtype=torch.bool, device=like.device).triu(1)
    if log_keep is None:
        return (~later).to(like.dtype)
    running = log_keep.cumsum(-1)
    return (running.unsqueeze(-1) - running.unsqueeze(-2)).masked_fill(later, -math.inf).exp()


def _carried(
    added: Float[Tensor, "*batch chunks head values"], keep: Tensor | None
) -> Float[Tensor, "*batch chunks head values"]:
    """What came before each chunk: S_n = keep_(n-1) S_(n-1) + added_(n-1), S_0 = 0."""
    state, states = torch.zeros_like(added[..., 0, :, :]), []
    for chunk in range(added.shape[-3]):
        states.append(state)
        state = added[..., chunk, :, :] + (state if keep is None else keep[..., chunk, :, :] * state)
    return torch.stack(states, -3)
