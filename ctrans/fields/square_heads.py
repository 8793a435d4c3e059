"""What attentions of square matrices share, whatever their rows are: heads of values, side by side, behind one last map."""

from __future__ import annotations

import abc
from collections.abc import Iterator, Mapping
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ctrans.fields.protocols import Matrix
from ctrans.fields.scale import SCALINGS_OF_ATTENTION, scaled_attention
from ctrans.fields.spectral_norm import norm_of_product
from solvers import ConfigError


class SquareHeads(nn.Module, abc.ABC):
    """f(x) = W_O [what each head makes of its values V_h x + b_v,h]_h + b_O, linear in these; W_Q, W_K, W_V, W_O of d x d."""

    def __init__(self, width: int, heads: int, *, causal: bool = True, bias: bool = True):
        super().__init__()
        if heads < 1 or width % heads:
            raise ConfigError(f"width {width} is not divisible by heads {heads}: choose heads that divide the width")
        self.width, self.heads, self.causal = width, heads, causal
        self.qkv = nn.Linear(width, 3 * width, bias=bias)
        self.out = nn.Linear(width, width, bias=bias)

    @abc.abstractmethod
    def mixed(self, x: Float[Tensor, "*batch tokens width"]) -> Float[Tensor, "*batch heads tokens head"]:
        """What each head makes of its values."""

    def forward(self, x: Float[Tensor, "*batch tokens width"]) -> Float[Tensor, "*batch tokens width"]:
        y: Tensor = self.out(self.pre_projection(x))
        return y

    @property
    def output_projection(self) -> nn.Linear:
        """The last linear map: f(x) = output_projection(pre_projection(x))."""
        return self.out

    def pre_projection(self, x: Float[Tensor, "*batch tokens width"]) -> Float[Tensor, "*batch tokens width"]:
        """What the last linear map is applied to: the heads side by side."""
        return self.mixed(x).transpose(-3, -2).flatten(-2)

    def matrices(self) -> Iterator[Matrix]:
        """W_Q, W_K, W_V and W_O, each square."""
        query, key, value = self.qkv.weight.chunk(3)
        yield Matrix(query, "query")
        yield Matrix(key, "key")
        yield Matrix(value, "value")
        yield Matrix(self.out.weight, "out")

    scalings: ClassVar[Mapping[str, bool]] = SCALINGS_OF_ATTENTION

    def scaled(self, name: str, c: float) -> SquareHeads:
        """A copy with V times c, or W and V each times sqrt(c), and the biases that act after them: c f(x)."""
        return scaled_attention(self, name, c, lambda rows: rows.chunk(3)[2])

    def paths(self) -> list[float]:
        """|W_O,h V_h|_2 of each head."""
        value, out = self.qkv.weight.detach().chunk(3)[2].double(), self.out.weight.detach().double()
        heads = zip(out.chunk(self.heads, dim=1), value.chunk(self.heads), strict=True)
        return [norm_of_product(out, value) for out, value in heads]

    def offset(self, shares: Float[Tensor, " heads"] | None = None) -> float:
        """|sum_h s_h W_O,h b_v,h + b_O|, of rows that sum to s_h, 1 where nothing is said."""
        if self.qkv.bias is None:
            return 0.0
        values = self.qkv.bias.detach().chunk(3)[2].double()
        if shares is not None:
            values = (values.unflatten(0, (self.heads, -1)) * shares.detach().double().unsqueeze(-1)).flatten()
        return float(torch.linalg.vector_norm(self.out.weight.detach().double() @ values + self.out.bias.detach().double()))

    def queries_keys_values(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Of each head, (*batch, heads, tokens, head)."""
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(-3, -2) for part in self.qkv(x).chunk(3, dim=-1))
        return q, k, v
