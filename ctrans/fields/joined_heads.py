"""The common part of attentions: heads of values, concatenated, before one output projection."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import ClassVar, Self

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ctrans.fields.projected_map import ProjectedMap
from ctrans.fields.protocols import Matrix
from ctrans.fields.scale import SCALINGS_OF_ATTENTION, scaled_attention
from ctrans.fields.spectral_norm import norm_of_product
from solvers import ConfigError


class JoinedHeads(ProjectedMap):
    """f(x) = W_O [head h applied to the values V_g x + b_v,g of its group]_h + b_O, linear in the
    values.

    W_Q and W_O are d x d. W_K and W_V have d_h rows for each group of heads. By default each head
    is its own group.
    """

    projection = "out"
    scalings: ClassVar[Mapping[str, bool]] = SCALINGS_OF_ATTENTION

    def __init__(self, width: int, heads: int, *, groups: int | None = None, causal: bool = True, bias: bool = True):
        super().__init__()
        if heads < 1 or width % heads:
            raise ConfigError(f"width {width} is not divisible by heads {heads}: choose heads that divide the width")
        self.width, self.heads, self.causal, self.groups = width, heads, causal, groups or heads
        self.qkv = nn.Linear(width, width + 2 * self.groups * self.head, bias=bias)
        self.out = nn.Linear(width, width, bias=bias)

    @property
    def head(self) -> int:
        """d_h, the width of a head."""
        return self.width // self.heads

    def matrices(self) -> Iterator[Matrix]:
        """W_Q, W_K, W_V and W_O. W_K and W_V are smaller if heads share them."""
        query, key, value = self.split(self.qkv.weight)
        yield Matrix(query, "query")
        yield Matrix(key, "key")
        yield Matrix(value, "value")
        yield Matrix(self.out.weight, "out")

    def scaled(self, name: str, c: float) -> Self:
        """A copy that computes c f(x): V times c, or W and V each times sqrt(c), and the biases
        accordingly.
        """
        return scaled_attention(self, name, c, lambda rows: self.split(rows)[2])

    def split(self, rows: Tensor, dim: int = 0) -> tuple[Tensor, ...]:
        """The rows of W_Q, W_K and W_V, or the parts of their product with x."""
        shared = self.groups * self.head
        parts: tuple[Tensor, ...] = rows.split([self.width, shared, shared], dim=dim)
        return parts

    def offsets(self) -> tuple[Tensor | None, ...]:
        """b_Q, b_K and b_V; None without bias."""
        return (None, None, None) if self.qkv.bias is None else self.split(self.qkv.bias)

    def by_head(self, x: Tensor) -> Tensor:
        """(*batch, heads, tokens, head) from concatenated heads."""
        y: Tensor = x.unflatten(-1, (-1, self.head)).transpose(-3, -2)
        return y

    def queries_keys_values(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries of each head and keys and values of each group, (*batch, heads, tokens, head)."""
        q, k, v = (self.by_head(part) for part in self.split(self.qkv(x), -1))
        return q, k, v


class SquareHeads(JoinedHeads):
    """`JoinedHeads` in which each head has its own keys and values."""

    def mixed(self, x: Float[Tensor, "*batch tokens width"]) -> Float[Tensor, "*batch heads tokens head"]:
        """The output of each head."""
        raise NotImplementedError

    def pre_projection(self, x: Float[Tensor, "*batch tokens width"]) -> Float[Tensor, "*batch tokens width"]:
        """The input of the output projection: the heads, concatenated."""
        return self.mixed(x).transpose(-3, -2).flatten(-2)

    def paths(self) -> list[float]:
        """|W_O,h V_h|_2 of each head."""
        value, out = self.split(self.qkv.weight.detach())[2].double(), self.out.weight.detach().double()
        heads = zip(out.chunk(self.heads, dim=1), value.chunk(self.heads), strict=True)
        return [norm_of_product(out, value) for out, value in heads]

    def offset(self, shares: Float[Tensor, " heads"] | None = None) -> float:
        """|sum_h s_h W_O,h b_v,h + b_O|, for rows that sum to s_h (1 by default)."""
        if self.qkv.bias is None:
            return 0.0
        values = self.split(self.qkv.bias.detach())[2].double()
        if shares is not None:
            values = (values.unflatten(0, (self.heads, -1)) * shares.detach().double().unsqueeze(-1)).flatten()
        return float(torch.linalg.vector_norm(self.out.weight.detach().double() @ values + self.out.bias.detach().double()))
