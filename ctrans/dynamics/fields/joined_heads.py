"""The common part of attentions: heads, concatenated, before one output projection."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ctrans.base.option import Count
from ctrans.base.shapes import ByHead, TokenRows
from ctrans.dynamics.fields.projected_map import ProjectedMap, scale_linear
from ctrans.dynamics.fields.protocols import HeadMatrices, Matrix
from ctrans.dynamics.fields.spectral_norm import norm_of_product
from solvers import ConfigError, look_up


class JoinedHeads(ProjectedMap):
    """f(x) = W_O [head h applied to the values V_g x + b_v,g of its group]_h + b_O, linear in the
    values.

    W_Q and W_O are d x d. W_K and W_V have d_h rows for each group of heads. By default each head
    is its own group.
    """

    projection = "out"
    scalings: ClassVar[Mapping[str, bool]] = {"V": True, "WV": True}
    """Kan's V, and W and V together. Both turn f into c f."""

    def __init__(
        self,
        width: Count,
        heads: Count,
        *,
        groups: Count | None = None,
        causal: bool = True,
        bias: bool = True,
    ):
        if heads < 1 or width % heads:
            raise ConfigError(
                f"width {width} is not divisible by heads {heads}: choose heads that divide the"
                " width"
            )
        if groups is None:
            groups = heads
        shared_width = groups * (width // heads)
        super().__init__(2 * width * (width + shared_width))
        self.width = width
        self.heads = heads
        self.causal = causal
        self.groups = groups
        self.qkv = nn.Linear(width, width + 2 * self.groups * self.head, bias=bias)
        self.out = nn.Linear(width, width, bias=bias)

    def mixed(self, x: TokenRows) -> ByHead:
        """The output of each head."""
        raise NotImplementedError

    def pre_projection(self, x: TokenRows) -> TokenRows:
        """The input of the output projection: the heads, concatenated."""
        return self.mixed(x).transpose(-3, -2).flatten(-2)

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

    @torch.no_grad()
    def scaled(self, name: str, c: float) -> JoinedHeads:
        """A copy that computes c f(x): V times c, or W and V each times sqrt(c), and the biases
        accordingly. Raises ConfigError for a name that is not in `scalings`.
        """
        look_up("scaling", name, self.scalings)
        twin = copy.deepcopy(self)
        if name == "V":
            value_factor = c
            out_factor = 1.0
        else:
            value_factor = math.sqrt(c)
            out_factor = math.sqrt(c)
        for parameter in (twin.qkv.weight, twin.qkv.bias):
            if parameter is not None:
                _, _, values = self.split(parameter)
                values.mul_(value_factor)
        if twin.out.bias is not None:
            twin.out.bias.mul_(value_factor)
        scale_linear(twin.out, out_factor)
        return twin

    def split(self, rows: Tensor, dim: int = 0) -> tuple[Tensor, ...]:
        """The rows of W_Q, W_K and W_V, or the parts of their product with x."""
        shared = self.groups * self.head
        parts: tuple[Tensor, ...] = rows.split([self.width, shared, shared], dim=dim)
        return parts

    def offsets(self) -> tuple[Tensor | None, ...]:
        """b_Q, b_K and b_V; None without bias."""
        if self.qkv.bias is None:
            return (None, None, None)
        return self.split(self.qkv.bias)

    def by_head(self, x: Tensor) -> Tensor:
        """(*batch, heads, tokens, head) from concatenated heads."""
        y: Tensor = x.unflatten(-1, (-1, self.head)).transpose(-3, -2)
        return y

    def queries_keys_values(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries of each head and keys and values of each group, (*batch, heads, tokens, head)."""
        q, k, v = (self.by_head(part) for part in self.split(self.qkv(x), -1))
        return q, k, v

    def for_heads(self, shared: Tensor) -> list[Tensor]:
        """The rows of W_K or W_V, or of their offsets, that belong to each head's group."""
        return for_each_head(shared, self.heads, self.groups)

    def heads_with_offsets(self, *, of_keys: bool) -> Iterator[HeadMatrices]:
        """Q_h, K_g, V_g, the columns of W_O and the part of b_Q for each head; the part of b_K if
        it counts.
        """
        query, key, value = self.split(self.qkv.weight)
        b_q, b_k, b_v = self.offsets()
        if not of_keys:
            b_k = None
        elif b_k is None:
            b_k = key.new_zeros(len(key))
        weights = (query, key, value, self.out.weight)
        return matrices_by_head(weights, (b_q, b_k, b_v), self.heads, self.groups)

    def paths(self) -> list[float]:
        """|W_O,h V_g|_2 of each head."""
        outs = self.out.weight.detach().chunk(self.heads, dim=1)
        _, _, value_rows = self.split(self.qkv.weight.detach())
        values = self.for_heads(value_rows)
        return [norm_of_product(out, value) for out, value in zip(outs, values, strict=True)]

    def offset(self, shares: Float[Tensor, " heads"] | None = None) -> float:
        """|sum_h s_h W_O,h b_v,g + b_O|, for rows that sum to s_h (1 by default)."""
        if self.qkv.bias is None:
            return 0.0
        _, _, b_v = self.split(self.qkv.bias.detach())
        values = torch.stack(self.for_heads(b_v.double()))
        if shares is not None:
            values = values * shares.detach().double().unsqueeze(-1)
        out = self.out.weight.detach().double()
        b_o = self.out.bias.detach().double()
        return float(torch.linalg.vector_norm(out @ values.flatten() + b_o))


def for_each_head(shared: Tensor, heads: int, groups: int) -> list[Tensor]:
    """The rows of each head's group."""
    return [part for part in shared.chunk(groups) for _ in range(heads // groups)]


def matrices_by_head(
    weights: Sequence[Tensor],
    offsets: Sequence[Tensor | None],
    heads: int,
    groups: int,
) -> Iterator[HeadMatrices]:
    """W_Q, W_K, W_V and W_O, cut into the matrices of each head with its parts of the offsets b_Q,
    b_K and b_V.
    """
    query, key, value, out = weights
    query_offsets, key_offsets, value_offsets = offsets
    none: Sequence[Tensor | None] = [None] * heads
    b_q = none if query_offsets is None else query_offsets.chunk(heads)
    b_k = none if key_offsets is None else for_each_head(key_offsets, heads, groups)
    b_v = none if value_offsets is None else for_each_head(value_offsets, heads, groups)
    by_head = zip(
        query.chunk(heads),
        for_each_head(key, heads, groups),
        for_each_head(value, heads, groups),
        out.chunk(heads, dim=1),
        b_q,
        b_k,
        b_v,
        strict=True,
    )
    return (HeadMatrices(*matrices) for matrices in by_head)
