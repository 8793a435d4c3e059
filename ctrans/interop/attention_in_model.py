"""A foreign model's attention as a map that exposes the matrices, rows and bounds found by
`read_attention`.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from ctrans.base.shapes import AttentionRows, ReadingRows, TokenRows
from ctrans.dynamics.fields import (
    HasReferenceKernel,
    HeadMatrices,
    Matrix,
    Role,
    TokenBound,
    norm_of_product,
    spectral_norm,
)
from ctrans.dynamics.fields.joined_heads import for_each_head, matrices_by_head
from ctrans.interop.attention_reading import NO_ROWS, AttentionReading, RowsReading
from ctrans.interop.attention_rows import LastRows, seeing_rows, showing_rows
from ctrans.interop.model_adapter import ModelAdapter
from ctrans.interop.module_chain import JoinedProjections, MapInModel, ModuleChain, Projection
from solvers import ConfigError

ROLES: tuple[Role, ...] = ("query", "key", "value", "out")


def reference_kernel(field: HasReferenceKernel) -> contextlib.AbstractContextManager[None]:
    """Inside, torch's attention has all derivatives if the map asks for that."""
    if field.use_reference_kernel:
        return sdpa_kernel(SDPBackend.MATH)
    return contextlib.nullcontext()


class AttentionInModel(MapInModel):
    """f(x): a model's attention module, called for any x as the model would call it.

    It uses the fused kernel unless `use_reference_kernel` is set; forward-mode and second
    derivatives need the reference kernel.
    """

    mixes_tokens = True

    def __init__(self, chain: ModuleChain, block: int, adapter: ModelAdapter, why_not: str = ""):
        super().__init__(chain, why_not)
        self.block = block
        self.adapter = adapter
        self.use_reference_kernel = False

    def forward(self, x: TokenRows, **context: Any) -> TokenRows:
        block_context = self.adapter.block_context(self.block, x.reshape(-1, *x.shape[-2:]))
        with reference_kernel(self):
            return super().forward(x, **block_context, **context)


class AttentionWithRows(AttentionInModel):
    """An attention whose rows a_h are known. `heads` is the number of its rows for each token."""

    heads: int

    def rows(self, x: TokenRows) -> ReadingRows:
        """The rows a_h as the library returns them."""
        states = x.reshape(-1, *x.shape[-2:])
        with showing_rows(self.adapter.model):
            # this may run the model, which must not be recorded
            context = self.adapter.block_context(self.block, states)
            with seeing_rows(self.stages[0]) as last_rows:
                self.stages[0](states, **context)
        rows = self.seen(last_rows)
        if rows is None:  # reading the attention has found some at other states
            raise ConfigError("its attention computes no rows at these states")
        return rows.expand(len(states), -1, -1, -1).reshape(*x.shape[:-2], *rows.shape[1:])

    def seen(self, last_rows: LastRows) -> Tensor | None:
        """The rows of this map among those of a pass."""
        return last_rows()

    def whole_rows(self, x: TokenRows) -> ReadingRows:
        """The rows in the model's dtype, each normalised to sum to 1: libraries round them to
        float32.
        """
        rows = self.rows(x).to(x.dtype)
        return rows / rows.sum(-1, keepdim=True)


class AttentionWithRowsAlone(AttentionWithRows):
    """An attention with rows that sum to 1, and with matrices that could not be read."""

    def __init__(self, chain: ModuleChain, block: int, adapter: ModelAdapter, reading: RowsReading):
        super().__init__(chain, block, adapter, reading.why_not)
        self.reading = reading
        self.heads = reading.heads

    def seen(self, last_rows: LastRows) -> Tensor | None:
        """The rows of this map among those of a pass."""
        return self.reading.see(last_rows)

    def probabilities(self, x: TokenRows) -> ReadingRows:
        """The attention rows of each head; row i weighs the tokens that token i reads."""
        return self.whole_rows(x)


class AttentionWithValues(AttentionWithRows):
    """f(x)_i = sum_h O_h sum_j a_hij (V_g x_j + b_v,g) + b_o, with known values and rows a_h >= 0;
    g is the group of head h.
    """

    def __init__(
        self, chain: ModuleChain, block: int, adapter: ModelAdapter, reading: AttentionReading
    ):
        super().__init__(chain, block, adapter, reading.why_not)
        self.reading = reading
        self.heads = reading.heads

    def matrices(self) -> Iterator[Matrix]:
        """W_Q, W_K, W_V and W_O. W_K and W_V are smaller than W_Q if heads share keys and values.
        They are views of the module's weights, or copies of some of their rows.
        """
        for role in ROLES:
            projection: Projection | JoinedProjections = getattr(self.reading, role)
            yield from projection.matrices(self, role)

    def bound(self) -> TokenBound:
        """|f(x)_i| <= gain max_j |x_j| + |W_O b_V + b_o|, gain = min(sum_h |O_h V_g|_2, |W_O|_2
        (sum_h |V_g|_2^2)^(1/2)).

        The entries of a row are at least 0 and sum to at most 1, so |y_h| <= r = max_j |x_j| for
        y_h = sum_j a_hij x_j. Then |sum_h O_h V_g y_h| <= sum_h |O_h V_g|_2 r. As the heads are
        concatenated, it is also at most |W_O|_2 times the length of all V_g y_h together. If rows
        sum to 1, the offsets of the values contribute sum_h O_h b_v,g = W_O b_V. If a sink takes
        part of a row, only a part of each head's offset arrives, and the offset of the bound is
        sum_h |O_h b_v,g| + |b_o|.
        """
        reading = self.reading
        value = reading.value.weight(self).detach()
        out = reading.out.weight(self).detach()
        values = for_each_head(value, self.heads, reading.groups)
        outs = out.chunk(self.heads, dim=1)
        sum_over_heads = sum(norm_of_product(*pair) for pair in zip(outs, values, strict=True))
        squares = [spectral_norm(part) ** 2 for part in value.chunk(reading.groups)]
        heads_per_group = self.heads // reading.groups
        sum_of_squares = sum(square for square in squares for _ in range(heads_per_group))
        gain = min(sum_over_heads, spectral_norm(out) * math.sqrt(sum_of_squares))
        offsets = []
        value_bias = reading.value.bias(self)
        if value_bias is not None:
            biases = for_each_head(value_bias.detach().double(), self.heads, reading.groups)
            offsets += [part.double() @ bias for part, bias in zip(outs, biases, strict=True)]
        out_bias = reading.out.bias(self)
        if out_bias is not None:
            offsets.append(out_bias.detach().double())
        if not offsets:
            return TokenBound(gain, 0.0)
        if reading.whole_rows:
            offset = torch.linalg.vector_norm(torch.stack(offsets).sum(0))
        else:
            offset = torch.linalg.vector_norm(torch.stack(offsets), dim=-1).sum()
        return TokenBound(gain, float(offset))


class AttentionWithValuesAndRows(AttentionWithValues):
    """`AttentionWithValues` with rows that sum to 1, of scores that were not read."""

    def probabilities(self, x: TokenRows) -> AttentionRows:
        """The attention rows of each head; row i weighs the tokens that token i reads."""
        return self.whole_rows(x)


class AttentionWithHeads(AttentionWithValues):
    """`AttentionWithValues` with rows that sum to 1: the softmax over j of <q_i, k_j>/(tau
    sqrt(d_h)), q = R_i (Q x + b_q), k = R_j (K x + b_k).

    R_i is a rotation by position or the identity. The scores may pass a soft-cap c tanh(./c). As |R
    Q|_2 = |Q|_2 and a cap has slope at most 1, Emadi's theorem 5.1 holds for Q and K unchanged. The
    offsets of keys then count (`HeadMatrices`).
    """

    @property
    def temperature(self) -> float:
        """tau = 1/(scale sqrt(d_h)), 1 for the usual scale; nan if scores are not bilinear."""
        scale = self.reading.scale
        head = self.reading.query.rows // self.heads
        if scale is None:
            return math.nan
        return 1 / (scale * math.sqrt(head))

    @property
    def normalised_scores(self) -> bool:
        """Whether scores are not a number times <Q x, K x>; `why_not` says what they are."""
        return self.reading.scale is None

    def probabilities(self, x: TokenRows) -> AttentionRows:
        """The attention rows of each head; row i weighs the tokens that token i reads."""
        return self.whole_rows(x)

    def head_matrices(self) -> Iterator[HeadMatrices]:
        """For each head Q_h, K_g, V_g, its columns of W_O, its part of b_Q, and its part of b_K if
        the offsets of keys count (0 if it has none).
        """
        reading = self.reading
        weights = [getattr(reading, role).weight(self) for role in ROLES]
        query_bias = reading.query.bias(self)
        key_bias = reading.key.bias(self)
        if not reading.key_offsets:
            key_bias = None
        elif key_bias is None:
            key_weight = weights[1]
            key_bias = key_weight.new_zeros(len(key_weight))
        offsets = (query_bias, key_bias, reading.value.bias(self))
        return matrices_by_head(weights, offsets, self.heads, reading.groups)


def mixing_without_rows(field: nn.Module) -> str:
    """What mixes tokens in a map without rows, such as "a convolution"; "" if it may be another."""
    if not isinstance(field, AttentionInModel) or not field.why_not.endswith(NO_ROWS):
        return ""
    mixing: str = getattr(field.stages[0], "mixing", "")
    return mixing


def attention_in_model(
    chain: ModuleChain,
    block: int,
    adapter: ModelAdapter,
    reading: AttentionReading | RowsReading | str,
) -> AttentionInModel:
    """The map with all that its reading shows. If `reading` is a text, it says why the reading
    failed.
    """
    if isinstance(reading, str):
        return AttentionInModel(chain, block, adapter, reading)
    if isinstance(reading, RowsReading):
        return AttentionWithRowsAlone(chain, block, adapter, reading)
    if reading.whole_rows:
        return AttentionWithHeads(chain, block, adapter, reading)
    if reading.rows_alone:
        return AttentionWithValuesAndRows(chain, block, adapter, reading)
    return AttentionWithValues(chain, block, adapter, reading)
