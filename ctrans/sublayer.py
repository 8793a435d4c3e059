"""A sublayer: the map f (attention or FFN) with the norms its placement puts around it."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from ctrans.norm import Norm, RMSNorm
from solvers import ConfigError, Segment
from solvers.errors import look_up
from solvers.segment import Map, Time

Kind = Literal["attention", "ffn"]
Role = Literal["query", "key", "value", "out", "up", "down"]

# Each phi has phi(0) = 0 and abs(phi(z)) <= abs(z), which FeedForward.bound relies on.
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"gelu": F.gelu, "relu": F.relu, "tanh": torch.tanh, "silu": F.silu}


class Matrix(NamedTuple):
    """One weight matrix of a map: a view of its parameter, and which one it is."""

    weight: Float[Tensor, "out in"]
    role: Role

    @property
    def last(self) -> bool:
        """Whether it is the map's last one, which writes to the residual stream."""
        return self.role in ("out", "down")


class AffineBound(NamedTuple):
    """|f(x)_i| <= gain max_j |x_j| + offset for every token i: how large a map's output tokens can be."""

    gain: float
    offset: float


@runtime_checkable
class HasBound(Protocol):
    """A map that knows how large its output can be."""

    def bound(self) -> AffineBound: ...


@runtime_checkable
class HasPlainPath(Protocol):
    """An attention that can do without the fused kernel."""

    plain: bool


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
        self.width, self.heads, self.causal, self.temperature = width, heads, causal, temperature
        self.qkv = nn.Linear(width, 3 * width, bias=bias)
        self.out = nn.Linear(width, width, bias=bias)
        self.query_norm = RMSNorm(width // heads, eps) if qk_norm else nn.Identity()
        self.key_norm = RMSNorm(width // heads, eps) if qk_norm else nn.Identity()
        self.plain = False

    def forward(self, x: Float[Tensor, "*batch tokens width"]) -> Float[Tensor, "*batch tokens width"]:
        return self.out(self.features(x))

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

    def bound(self) -> AffineBound:
        """|f(x)_i| <= sum_h |W_O,h W_V,h|_2 max_j |x_j| + |W_O b_V + b_O|.

        Attention rows are convex weights, so a head's average is no longer than its longest value (theory, section 6).
        """
        value, out = self.qkv.weight.detach().chunk(3)[2].double(), self.out.weight.detach().double()
        heads = zip(out.chunk(self.heads, dim=1), value.chunk(self.heads, dim=0), strict=True)
        # |W_O W_V|_2 = |W_O L|_2 with L L' = W_V W_V', L as small as the head
        gain = sum(spectral_norm(out @ torch.linalg.qr(value.T, mode="r").R.T) for out, value in heads)
        if self.qkv.bias is None:
            return AffineBound(gain, 0.0)
        offset = out @ self.qkv.bias.detach().chunk(3)[2].double() + self.out.bias.detach().double()
        return AffineBound(gain, float(torch.linalg.vector_norm(offset)))

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


class FeedForward(nn.Module):
    """f(x) = W_2 phi(W_1 x + b_1) + b_2 on each token, phi one of `ACTIVATIONS`."""

    def __init__(self, width: int, hidden: int, *, activation: str = "gelu", bias: bool = True):
        super().__init__()
        look_up("activation", activation, ACTIVATIONS)
        self.activation = activation
        self.up = nn.Linear(width, hidden, bias=bias)
        self.down = nn.Linear(hidden, width, bias=bias)

    def forward(self, x: Float[Tensor, "*batch tokens width"]) -> Float[Tensor, "*batch tokens width"]:
        return self.down(self.features(x))

    @property
    def last(self) -> nn.Linear:
        """The last linear map: f(x) = last(features(x))."""
        return self.down

    def features(self, x: Float[Tensor, "*batch tokens width"]) -> Float[Tensor, "*batch tokens hidden"]:
        """What the last linear map is applied to: phi(W_1 x + b_1)."""
        return ACTIVATIONS[self.activation](self.up(x))

    def matrices(self) -> Iterator[Matrix]:
        """W_1 and W_2."""
        yield Matrix(self.up.weight, "up")
        yield Matrix(self.down.weight, "down")

    def bound(self) -> AffineBound:
        """|f(x)_i| <= |W_2|_2 (|W_1|_2 max_j |x_j| + |b_1|) + |b_2|, as abs(phi(z)) <= abs(z)."""
        outer = spectral_norm(self.down.weight)
        return AffineBound(outer * spectral_norm(self.up.weight), outer * _length(self.up.bias) + _length(self.down.bias))


class Sublayer(nn.Module):
    """r(X) = gain * N_out f(N_in X), each norm where it is given: the velocity of one segment, before any tangent projection.

    `field` is any module from (*batch, tokens, width) to the same shape; so an imported model's attention and our own are the
    same thing here. `state_norm` is the norm around the residual sum; `gain` is 1, or DeepNorm's 1/alpha.
    """

    field: Any  # an nn.Module; its own attributes are known to those who ask for them, and mypy takes a module's for tensors

    def __init__(
        self,
        field: nn.Module,
        kind: Kind,
        *,
        input_norm: Norm | None = None,
        output_norm: Norm | None = None,
        state_norm: Norm | None = None,
        gain: float = 1.0,
    ):
        super().__init__()
        self.field, self.kind, self.gain = field, kind, gain
        self.input_norm, self.output_norm, self.state_norm = input_norm, output_norm, state_norm

    def forward(self, x: Float[Tensor, "*batch tokens width"]) -> Float[Tensor, "*batch tokens width"]:
        """The raw velocity r(X)."""
        if self.input_norm is not None:
            x = self.input_norm(x)
        v = self.field(x)
        if self.output_norm is not None:
            v = self.output_norm(v)
        return v if self.gain == 1.0 else self.gain * v

    def velocity(self, x: Float[Tensor, "*batch tokens width"]) -> Float[Tensor, "*batch tokens width"]:
        """The ODE's velocity v(X): r(X), or its part tangent to the state norm's image (Kan, eq. 132)."""
        v = self(x)
        return v if self.state_norm is None else self.state_norm.tangent(x, v)

    def step(self, x: Float[Tensor, "*batch tokens width"], dt: float) -> Float[Tensor, "*batch tokens width"]:
        """The discrete Transformer's step: X + dt r(X), inside the state norm if there is one."""
        x = x + dt * self(x)
        return x if self.state_norm is None else self.state_norm(x)

    def segment(self, t0: Time, t1: Time, *, continuous: bool = False) -> Segment:
        """This sublayer as a segment of depth-time.

        As the model's own step: field r, and the state norm as projection. With `continuous`, as the ODE: field v, the state
        put on the state norm's image on entering. Without a state norm the two are one.
        """
        if self.state_norm is None or not continuous:
            return Segment(t0, t1, lambda t, x: self(x), project=self.state_norm)
        enter: Map = self.state_norm.retract
        return Segment(t0, t1, lambda t, x: self.velocity(x), enter=enter)


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


def spectral_norm(matrix: Float[Tensor, "rows columns"]) -> float:
    """|M|_2 = sqrt(largest eigenvalue of the smaller Gram matrix), in float64: relative error below 1e-8, much faster than
    singular values.
    """
    m = matrix.detach().double()
    if not bool(torch.isfinite(m).all()):
        return math.inf
    gram = m.T @ m if m.shape[0] > m.shape[1] else m @ m.T
    return math.sqrt(max(float(torch.linalg.eigvalsh(gram)[-1]), 0.0))


def _length(bias: Tensor | None) -> float:
    return 0.0 if bias is None else float(torch.linalg.vector_norm(bias.detach().double()))
