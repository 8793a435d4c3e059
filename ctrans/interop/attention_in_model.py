"""A foreign model's attention as a map that exposes the matrices, rows and bounds found by
`read_attention`.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from ctrans.fields import HeadMatrices, Matrix, Role, TokenBound, norm_of_product, spectral_norm
from ctrans.fields.scaled_linear import ScaledLinear
from ctrans.interop.attention_reading import AttentionReading
from ctrans.interop.attention_rows import seeing_rows, showing_rows
from ctrans.interop.model_adapter import Contexts
from ctrans.interop.module_chain import ModuleChain, Projection


class AttentionInModel(nn.Module):
    """f(x): a model's attention module, called for any x as the model would call it.

    It uses the fused kernel unless `use_reference_kernel` is set; forward-mode and second
    derivatives need the reference kernel. `why_not` says why the map exposes nothing more, or is
    "".
    """

    attention: ModuleChain
    mixes_tokens = True

    def __init__(self, attention: ModuleChain, block: int, contexts: Contexts, why_not: str = ""):
        super().__init__()
        self.attention, self.block, self.contexts, self.why_not = attention, block, contexts, why_not
        self.use_reference_kernel = False

    def forward(self, x: Float[Tensor, "*batch tokens width"]) -> Float[Tensor, "*batch tokens width"]:
        return self._given(self.attention, x).reshape(x.shape)

    @property
    def output_projection(self) -> nn.Linear | ScaledLinear:
        """The last linear map: f(x) = output_projection(pre_projection(x)). Raises ConfigError if
        attention does not end in one.
        """
        return self.attention.output_projection

    def pre_projection(self, x: Float[Tensor, "*batch tokens width"]) -> Float[Tensor, "*batch tokens features"]:
        """The input of the last linear map: the heads' averages, concatenated."""
        return self._given(self.attention.pre_projection, x).reshape(*x.shape[:-1], -1)

    def _given(self, function: Callable[..., Tensor], x: Tensor) -> Tensor:
        """The function of the states (batch, tokens, width) in the context that the model gives the
        block.
        """
        states = x.reshape(-1, *x.shape[-2:])
        with sdpa_kernel(SDPBackend.MATH) if self.use_reference_kernel else contextlib.nullcontext():
            return function(states, **self.contexts.of(self.block, states))


class AttentionWithValues(AttentionInModel):
    """f(x)_i = sum_h O_h sum_j a_hij (V_g x_j + b_v,g) + b_o, with known values and rows a_h >= 0;
    g is the group of head h.
    """

    def __init__(self, attention: ModuleChain, block: int, contexts: Contexts, reading: AttentionReading):
        super().__init__(attention, block, contexts, reading.why_not)
        self.reading = reading

    @property
    def heads(self) -> int:
        return self.reading.heads

    def matrices(self) -> Iterator[Matrix]:
        """W_Q, W_K, W_V and W_O. W_K and W_V are smaller than W_Q if heads share keys and values.
        They are views of the module's weights, or copies of some of their rows.
        """
        roles: tuple[Role, ...] = ("query", "key", "value", "out")
        for role in roles:
            projection: Projection = getattr(self.reading, role)
            yield projection.matrix(self.attention, role)

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
        groups = self._groups(self._value.detach())
        values = [spectral_norm(value) for value in groups]
        each, together, offsets = 0.0, 0.0, []
        bias = self.reading.value.bias(self.attention)
        biases = None if bias is None else bias.detach().double().chunk(self.reading.groups)
        for head, out in enumerate(self._out.detach().chunk(self.heads, dim=1)):
            group = self._group(head)
            each += norm_of_product(out, groups[group])
            together += values[group] ** 2
            if biases is not None:
                offsets.append(out.double() @ biases[group])
        gain = min(each, spectral_norm(self._out) * math.sqrt(together))
        last = self.reading.out.bias(self.attention)
        if last is not None:
            offsets.append(last.detach().double())
        if not offsets:
            return TokenBound(gain, 0.0)
        lengths = torch.linalg.vector_norm(torch.stack(offsets), dim=-1)
        whole = torch.linalg.vector_norm(torch.stack(offsets).sum(0))
        return TokenBound(gain, float(whole if self.reading.whole_rows else lengths.sum()))

    def rows(self, x: Float[Tensor, "*batch tokens width"]) -> Float[Tensor, "*batch heads tokens tokens"]:
        """The rows a_h as the library returns them."""
        states = x.reshape(-1, *x.shape[-2:])
        with showing_rows(self.contexts.model):
            context = self.contexts.of(self.block, states)  # may run the model, which must not be recorded
            with seeing_rows(self.attention.stages[0]) as shown:
                self.attention.stages[0](states, **context)
        rows = shown()
        assert rows is not None  # reading the attention has checked this
        return rows.expand(len(states), -1, -1, -1).reshape(*x.shape[:-2], *rows.shape[1:])

    @property
    def _value(self) -> Tensor:
        return self.reading.value.weight(self.attention)

    @property
    def _out(self) -> Tensor:
        return self.reading.out.weight(self.attention)

    def _groups(self, rows: Tensor) -> tuple[Tensor, ...]:
        return rows.chunk(self.reading.groups)

    def _group(self, head: int) -> int:
        return head * self.reading.groups // self.heads


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
        return math.nan if scale is None else 1 / (scale * math.sqrt(self._head))

    @property
    def normalised_scores(self) -> bool:
        """Whether scores are not a number times <Q x, K x>; `why_not` says what they are."""
        return self.reading.scale is None

    def probabilities(self, x: Float[Tensor, "*batch tokens width"]) -> Float[Tensor, "*batch heads tokens tokens"]:
        """The attention rows of each head; row i weighs the tokens that token i reads.

        Libraries round rows to float32. Here each row is normalised to sum to 1 in the model's
        dtype.
        """
        rows = self.rows(x)
        return rows / rows.sum(-1, keepdim=True)

    def head_matrices(self) -> Iterator[HeadMatrices]:
        """For each head Q_h, K_g, V_g, its columns of W_O, its part of b_Q, and its part of b_K if
        the offsets of keys count (0 if it has none).
        """
        reading, chain = self.reading, self.attention
        keys, values = self._groups(reading.key.weight(chain)), self._groups(self._value)
        q_0, k_0 = reading.query.bias(chain), reading.key.bias(chain)
        if not reading.key_offsets:
            k_0 = None
        elif k_0 is None:
            k_0 = keys[0].new_zeros(sum(map(len, keys)))
        query_offsets = [None] * self.heads if q_0 is None else q_0.chunk(self.heads)
        key_offsets = [None] * reading.groups if k_0 is None else k_0.chunk(reading.groups)
        queries, outs = reading.query.weight(chain).chunk(self.heads), self._out.chunk(self.heads, dim=1)
        for head, (query, out, offset) in enumerate(zip(queries, outs, query_offsets, strict=True)):
            group = self._group(head)
            yield HeadMatrices(query, keys[group], values[group], out, offset, key_offsets[group])

    @property
    def _head(self) -> int:
        return self.reading.query.rows // self.heads


def attention_in_model(
    attention: ModuleChain, block: int, contexts: Contexts, reading: AttentionReading | str
) -> AttentionInModel:
    """The map with all that its reading shows. If `reading` is a text, it says why the reading
    failed.
    """
    if isinstance(reading, str):
        return AttentionInModel(attention, block, contexts, reading)
    kind = AttentionWithHeads if reading.whole_rows else AttentionWithValues
    return kind(attention, block, contexts, reading)
