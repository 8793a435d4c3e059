"""Softmax attention over the tokens of each sequence."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import ClassVar

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from ctrans.base.option import Count, Range
from ctrans.base.shapes import AttentionRows, ByHead, SequenceRows, TokenRows
from ctrans.dynamics.fields.attention_options import AttentionOptions
from ctrans.dynamics.fields.ffn_bounds import length
from ctrans.dynamics.fields.joined_heads import JoinedHeads
from ctrans.dynamics.fields.positions import falling_scores, turn, turned_entries, turns
from ctrans.dynamics.fields.protocols import HasReferenceKernel, HeadMatrices, Matrix, TokenBound
from ctrans.dynamics.fields.query_key_norm import QK_NORMS
from ctrans.dynamics.fields.spectral_norm import spectral_norm
from solvers import ConfigError, checked, look_up, shown

TEMPERATURES = Range(1e-12, 1e30, "a number from 1e-12 to 1e+30; 1 is the usual one")
"""Outside these limits scores over tau sqrt(d_h), or their derivatives, overflow or underflow in
single precision.
"""
PLAIN = AttentionOptions()


def check_temperature(value: float) -> float:
    """The value. Raises ConfigError unless scores can be divided by it in every precision."""
    TEMPERATURES.check("temperature", value)
    return value


class SoftmaxAttention(JoinedHeads):
    """f(x)_i = W_O [G_hi sum_j a_hij (V_g x_j + b_v,g)]_h + b_O, with concatenated heads, over the
    tokens of each sequence.

    x is (*batch, tokens, width), and a_hij = exp(s_hij)/(e_h + sum_l exp(s_hil)) over the tokens l
    that token i reads, with

        s_hij = c tanh(<R_i N_q(Q_h x_i + b_q,h), R_j N_k(K_g x_j + b_k,g)>/(c tau sqrt(d_h))) - m_h
        abs(i - j).

    tau is `temperature`. `qk_norm` gives the norms N_q, N_k (a name of `QK_NORMS`; true is "rms").
    `options` (`AttentionOptions`) give the rest:

    - R_i: rotations by position
    - c: a soft cap
    - m_h: ALiBi's slopes
    - g: the group of keys and values of head h
    - e_h: exp(sink_h), or 0 without sinks
    - G_hi: sigmoid of the gate, or the identity

    It uses the fused kernel unless a cap, sinks or `use_reference_kernel` are set. Forward-mode and
    second derivatives need the latter (see `reference_kernels`).

    `Attention` exposes its heads. This class does not, because sinks or a gate may be set:
    `why_not`. `lacks` names the options that a class must not have.
    """

    lacks: ClassVar[tuple[str, ...]] = ()

    def __init__(
        self,
        width: Count,
        heads: Count,
        *,
        causal: bool = True,
        temperature: float = 1.0,
        qk_norm: bool | str = False,
        bias: bool = True,
        eps: float = 1e-5,
        options: AttentionOptions = PLAIN,
    ):
        if any(getattr(options, name) for name in self.lacks):
            raise ConfigError(
                f"{type(self).__name__} exposes what {' and '.join(self.lacks)} prevent: use"
                " SoftmaxAttention"
            )
        options.check_heads(width, heads)
        super().__init__(width, heads, groups=options.kv_heads, causal=causal, bias=bias)
        self.options = options
        self.temperature = check_temperature(temperature)
        name = qk_norm_name(qk_norm)
        if isinstance(name, str):
            norms = QK_NORMS[name](heads, self.head, eps)
        else:
            norms = (nn.Identity(), nn.Identity())
        self.query_norm, self.key_norm = norms
        self.gate = nn.Linear(width, width, bias=bias) if options.gated_output else None
        self.sinks = nn.Parameter(torch.zeros(heads)) if options.sinks else None
        self.use_reference_kernel = False

    @property
    def why_not(self) -> str:
        """Why it does not expose its heads, or ""."""
        if self.sinks is not None:
            return "a sink takes part of each row, so that what is left does not sum to 1"
        if self.gate is None:
            return ""
        return "a gate that depends on the input multiplies what its heads average"

    def pre_projection(self, x: TokenRows) -> TokenRows:
        """The input of the output projection: the heads' averages, concatenated, times the gate."""
        mixed = super().pre_projection(x)
        if self.gate is not None:
            mixed = mixed * self.gate(x).sigmoid()
        return mixed

    def mixed(self, x: TokenRows) -> ByHead:
        """The heads' averages."""
        q, k, v = self.queries_keys_values(x)
        if self.use_reference_kernel or self.sinks is not None or self.options.softcap is not None:
            return self._rows(q, k) @ self._for_each_head(v)
        mask = self._mask(q)
        return F.scaled_dot_product_attention(
            *(q, k, v),
            attn_mask=mask,
            is_causal=self.causal and mask is None,
            scale=self._scale,
            enable_gqa=self.groups < self.heads,
        )

    def rows(self, x: TokenRows) -> AttentionRows:
        """The rows a_h of each head. Row i has the weights of the tokens that token i reads. They
        sum to 1, with a sink to less.
        """
        query, key, _ = self.split(self.qkv.weight)
        b_q, b_k, _ = self.offsets()
        q = self.by_head(F.linear(x, query, b_q))
        k = self.by_head(F.linear(x, key, b_k))
        return self._rows(*self._normed_and_turned(q, k))

    def at_tokens(
        self, x: SequenceRows, chosen: Int[Tensor, " batch"]
    ) -> Float[Tensor, "batch width"]:
        """f(x[b]) at the token i = chosen[b].

        It uses <K_g' q_hi, x_j> in place of <q_hi, K_g x_j>, and V_g sum_j a_hij x_j in place of
        sum_j a_hij V_g x_j, so it computes no keys and values. If a norm or rotations act on keys,
        it computes f and selects the token.
        """
        sequences = torch.arange(len(x), device=x.device)
        if self.options.places.turned or not isinstance(self.key_norm, nn.Identity):
            outputs: Tensor = self(x)
            return outputs[sequences, chosen]
        token = x[sequences, chosen].unsqueeze(-2)
        query, key, value = self.split(self.qkv.weight)
        b_q, b_k, b_v = self.offsets()
        key = self._for_each_head(key.unflatten(0, (-1, self.head)))
        value = self._for_each_head(value.unflatten(0, (-1, self.head)))
        q = self.by_head(F.linear(token, query, b_q)) * self._scale
        scores = (q @ key) @ x.unsqueeze(-3).transpose(-1, -2)
        if b_k is not None:
            scores = scores + q @ self._for_each_head(b_k.view(-1, self.head, 1))
        rows = self._weights(scores, chosen)
        mixed = (rows @ x.unsqueeze(-3)) @ value.transpose(-1, -2)
        if b_v is not None:
            value_offset = self._for_each_head(b_v.view(-1, 1, self.head))
            mixed = mixed + rows.sum(-1, keepdim=True) * value_offset
        mixed = mixed.transpose(-3, -2).flatten(-2)
        if self.gate is not None:
            mixed = mixed * self.gate(token).sigmoid()
        y: Tensor = self.out(mixed)
        return y.squeeze(-2)

    def matrices(self) -> Iterator[Matrix]:
        """W_Q, W_K, W_V, W_O, and W_G if there is a gate. W_K and W_V are smaller if heads share
        them.
        """
        yield from super().matrices()
        if self.gate is not None:
            yield Matrix(self.gate.weight, "gate")

    def bound(self) -> TokenBound:
        """|f(x)_i| <= sum_h |W_O,h V_g|_2 max_j |x_j| + |W_O b_V + b_O|, with b_V of every head's
        group.

        Attention rows are convex weights, so a head's average is no longer than its longest value
        (theory, section 6).

        With a sink the rows sum to at most 1. The gain is the same, but each head passes its own
        part of the value offsets: the offset is sum_h |W_O,h b_v,g| + |b_O|.

        A gate's entries lie between 0 and 1, so it cannot lengthen the concatenated heads. The gain
        is the smaller of |W_O|_2 (sum_h |V_g|_2^2)^(1/2) and sum_h |W_O,h|_2 |V_g|_2, and the
        offset |W_O|_2 |b_V| + |b_O|.
        """
        out = self.out.weight.detach()
        outs = out.chunk(self.heads, dim=1)
        b_v = self.offsets()[2]
        if b_v is None:
            offsets = None
        else:
            offsets = self.for_heads(b_v.detach().double())
        if self.gate is not None:
            _, _, value = self.split(self.qkv.weight.detach())
            value_norms = [spectral_norm(part) for part in self.for_heads(value)]
            sum_of_heads = sum(
                spectral_norm(part) * value_norm
                for part, value_norm in zip(outs, value_norms, strict=True)
            )
            gain = min(sum_of_heads, spectral_norm(out) * math.hypot(*value_norms))
            if not offsets:
                return TokenBound(gain, 0.0)
            return TokenBound(
                gain, spectral_norm(out) * length(torch.cat(offsets)) + length(self.out.bias)
            )
        gain = sum(self.paths())
        if self.sinks is None or offsets is None:
            return TokenBound(gain, self.offset())
        passed = sum(length(part.double() @ b) for part, b in zip(outs, offsets, strict=True))
        return TokenBound(gain, passed + length(self.out.bias))

    @property
    def _scale(self) -> float:
        return 1 / (self.temperature * math.sqrt(self.head))

    def queries_keys_values(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """By head; queries and keys are normed and rotated."""
        q, k, v = super().queries_keys_values(x)
        return *self._normed_and_turned(q, k), v

    def _normed_and_turned(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        q = self.query_norm(q)
        k = self.key_norm(k)
        if self.options.places.turned:
            entries = turned_entries(self.head, self.options.rotary_fraction)
            by = turns(q.shape[-2], entries, self.options.rotary_base, q)
            q = turn(q, by)
            k = turn(k, by)
        return q, k

    def _for_each_head(self, shared: Tensor) -> Tensor:
        """Keys or values of the group of each head."""
        if self.groups == self.heads:
            return shared
        return shared.repeat_interleave(self.heads // self.groups, -3)

    def _rows(self, q: Tensor, k: Tensor) -> Tensor:
        return self._weights((q * self._scale) @ self._for_each_head(k).transpose(-1, -2))

    def _weights(self, scores: Tensor, chosen: Tensor | None = None) -> Tensor:
        """The rows for these scores, of all tokens, or of one chosen token in each sequence."""

        def rows_of_chosen(table: Tensor) -> Tensor:
            """The rows of the chosen tokens, from a table (*heads, tokens, tokens)."""
            if chosen is None:
                return table
            return table.expand(self.heads, -1, -1)[:, chosen].transpose(0, 1).unsqueeze(-2)

        cap = self.options.softcap
        if cap is not None:
            scores = cap * torch.tanh(scores / cap)
        tokens = scores.shape[-1]
        if self.options.places.sloped:
            scores = scores + rows_of_chosen(falling_scores(self.heads, tokens, scores))
        hidden = self.causal_window_mask(tokens, scores.device)
        if hidden is not None:
            scores = scores.masked_fill(rows_of_chosen(hidden), -math.inf)
        if self.sinks is None:
            return scores.softmax(-1)
        sinks = self.sinks.view(-1, 1, 1).expand(*scores.shape[:-1], 1)
        return torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]

    def causal_window_mask(
        self, tokens: int, device: torch.device
    ) -> Bool[Tensor, "tokens tokens"] | None:
        """True where token i does not read token j. None if every token reads all."""
        window = min(self.options.window or tokens, tokens)
        if not self.causal and window == tokens:
            return None
        all_pairs = torch.ones(tokens, tokens, dtype=torch.bool, device=device)
        if self.causal:
            hidden = all_pairs.triu(1)
        else:
            hidden = torch.zeros_like(all_pairs)
        if window < tokens:
            hidden = hidden | all_pairs.tril(-window)
            if not self.causal:
                hidden = hidden | all_pairs.triu(window)
        return hidden

    def _mask(self, q: Tensor) -> Tensor | None:
        """The mask for the fused kernel: True where a token may be read, or the numbers to add to
        scores. None if causality is the only mask.
        """
        tokens = q.shape[-2]
        window = self.options.window
        if self.options.places.sloped:
            added = falling_scores(self.heads, tokens, q)
            hidden = self.causal_window_mask(tokens, q.device)
            if hidden is None:
                return added
            return added.masked_fill(hidden, -math.inf)
        if window is None or window >= tokens:
            return None
        hidden = self.causal_window_mask(tokens, q.device)
        if hidden is None:
            return None
        return ~hidden


class AttentionWithoutSinks(SoftmaxAttention):
    """`SoftmaxAttention` without sinks: its rows sum to 1, and it exposes them for theta."""

    lacks: ClassVar[tuple[str, ...]] = ("sinks",)

    def probabilities(self, x: TokenRows) -> AttentionRows:
        """The attention rows softmax(Q_h K_h' / (tau sqrt(d_h))) of each head. Row i has the
        weights of the tokens that token i reads.
        """
        return self.rows(x)


@checked
class Attention(AttentionWithoutSinks):
    """`SoftmaxAttention` without sinks and gate: it exposes its heads for theta and Emadi's
    bounds.
    """

    lacks = ("sinks", "gated_output")

    @property
    def normalised_scores(self) -> bool:
        """Whether a norm acts on queries and keys."""
        return not isinstance(self.query_norm, nn.Identity)

    def head_matrices(self) -> Iterator[HeadMatrices]:
        """Q_h, K_g, V_g, the columns of W_O and the part of b_Q for each head. Also the part of b_K
        if keys are rotated or a cap acts.
        """
        return self.heads_with_offsets(
            of_keys=self.options.places.turned or self.options.softcap is not None
        )


def qk_norm_name(qk_norm: bool | str) -> bool | str:  # noqa: FBT001  # its only argument
    """False for none, or a name of `QK_NORMS`; true is "rms". Raises ConfigError for anything
    else.
    """
    if not isinstance(qk_norm, (bool, str)):
        raise ConfigError(
            f"qk_norm = {shown(qk_norm)}: give False or a name, one of {', '.join(QK_NORMS)}"
        )
    if isinstance(qk_norm, str):
        look_up("qk_norm", qk_norm, QK_NORMS)
    if qk_norm is True:
        return "rms"
    return qk_norm


@contextlib.contextmanager
def reference_kernels(module: nn.Module) -> Iterator[None]:
    """Inside this context every attention within `module` uses the reference kernel, which has
    forward-mode and second derivatives.
    """
    attentions = [part for part in module.modules() if isinstance(part, HasReferenceKernel)]
    previous = [attention.use_reference_kernel for attention in attentions]
    for attention in attentions:
        attention.use_reference_kernel = True
    try:
        yield
    finally:
        for attention, used_reference_kernel in zip(attentions, previous, strict=True):
            attention.use_reference_kernel = used_reference_kernel
