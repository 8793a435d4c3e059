"""A foreign model's FFN as a map, which says of itself what its modules were seen to compute: a plain FFN, or a gated one."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from ctrans.fields import ACTIVATIONS, Activation, Matrix, TokenBound, Units, spectral_norm
from ctrans.interop.module_chain import Acting, ModuleChain, Projection, acting
from ctrans.interop.rounding import unit

KNOWN: Mapping[str, Activation] = ACTIVATIONS | {
    "gelu_tanh": Activation(partial(F.gelu, approximate="tanh"), 1.129),
    "quick_gelu": Activation(lambda z: z * torch.sigmoid(1.702 * z), 1.09984),
}
"""Activations by which a foreign FFN is recognised; all have abs(phi(z)) <= abs(z)."""
TELLING = 2.0
"""Size of the activations' arguments at which they are told apart."""
AT_ONCE = 2**22
"""Entries of a matrix that are looked at together in float64."""


class Activated(nn.Module):
    """phi(x), phi one of `KNOWN`: where a model's own code applies it as a function."""

    def __init__(self, name: str):
        super().__init__()
        self.name = self.said = name

    def forward(self, x: Tensor) -> Tensor:
        return KNOWN[self.name](x)


class GatedUnits(nn.Module):
    """phi(gate(x)) * up(x), likewise."""

    def __init__(self, gate: nn.Module, up: nn.Module, name: str):
        super().__init__()
        self.gate, self.up, self.name, self.said = gate, up, name, f"{name} gate"

    def forward(self, x: Tensor) -> Tensor:
        gated: Tensor = KNOWN[self.name](self.gate(x)) * self.up(x)
        return gated


@dataclasses.dataclass(frozen=True)
class FeedForwardReading:
    """Where the matrices are: W_d phi(W_u x + b_u) + b_d, or with a gate W_d (phi(W_g x + b_g) * (W_u x + b_u)) + b_d."""

    gate: Projection | None
    up: Projection
    down: Projection
    activation: str


class FeedForwardInModel(ModuleChain):
    """f(x): a model's FFN, given states (batch, tokens, width) as the model would, whatever the leading dimensions of x.

    `why_not` says why it shows no more of itself, if it does not.
    """

    def __init__(self, chain: ModuleChain, why_not: str = ""):
        super().__init__(list(chain.stages), chain.ending)
        self.why_not = why_not

    def forward(self, x: Float[Tensor, "*batch width"], **context: Any) -> Float[Tensor, "*batch width"]:
        return super().forward(x.reshape(-1, *x.shape[-2:]), **context).reshape(x.shape)

    def features(self, x: Float[Tensor, "*batch width"], **context: Any) -> Float[Tensor, "*batch features"]:
        """What the last linear map is applied to. Raises ConfigError as `last` does."""
        return super().features(x, **context).reshape(*x.shape[:-1], -1)


class PlainFeedForward(FeedForwardInModel):
    """f(x) = W_2 phi(W_1 x + b_1) + b_2 on each token, phi one of `KNOWN`."""

    def __init__(self, chain: ModuleChain, reading: FeedForwardReading):
        super().__init__(chain)
        self.reading = reading

    def matrices(self) -> Iterator[Matrix]:
        """W_1 and W_2."""
        yield Matrix(self.reading.up.weight(self), "up")
        yield Matrix(self.reading.down.weight(self), "down")

    def units(self) -> Units:
        """phi(<w, x> + b) for every row w of W_1."""
        return Units(KNOWN[self.reading.activation], len(self.reading.up.weight(self)))

    def bound(self) -> TokenBound:
        """|f(x)_i| <= |W_2|_2 (|W_1|_2 max_j |x_j| + |b_1|) + |b_2|, as abs(phi(z)) <= abs(z)."""
        up, down = self.reading.up, self.reading.down
        outer = spectral_norm(down.weight(self))
        return TokenBound(outer * spectral_norm(up.weight(self)), outer * _length(up.bias(self)) + _length(down.bias(self)))

    def lipschitz(self, radius: float = math.inf, *, printed: bool = False) -> float:
        """L = Lip(phi) |W_2|_2 |W_1|_2, the same at every radius; `printed` takes slope 1."""
        slope = 1.0 if printed else KNOWN[self.reading.activation].slope
        return slope * spectral_norm(self.reading.down.weight(self)) * spectral_norm(self.reading.up.weight(self))


class GatedFeedForward(FeedForwardInModel):
    """f(x) = W_d (phi(W_g x + b_g) * (W_u x + b_u)) + b_d on each token, phi one of `KNOWN`: SwiGLU, GeGLU.

    It grows with the square of x, so that how large it can be, and how steep, depends on the radius r of its input. With z = W_g x +
    b_g, w = W_u x + b_u, |a|_r = max over entries k of |(row k of the matrix)| r + |b_k|, and |phi(z)| <= |z| throughout.
    """

    def __init__(self, chain: ModuleChain, reading: FeedForwardReading):
        super().__init__(chain)
        assert reading.gate is not None
        self.reading, self.gate = reading, reading.gate

    def matrices(self) -> Iterator[Matrix]:
        """W_g, W_u and W_d."""
        yield Matrix(self.gate.weight(self), "gate")
        yield Matrix(self.reading.up.weight(self), "up")
        yield Matrix(self.reading.down.weight(self), "down")

    def bound(self) -> TokenBound:
        """|f(x)_i| <= |W_d|_2 |phi(z) * w| + |b_d|, where |phi(z) * w| is at most each of

        - max_k |z_k| |w| <= (max_k |g_k| r + max_k |b_g,k|) (|W_u|_2 r + |b_u|), with g_k, u_k the rows of W_g, W_u,
        - |z| max_k |w_k|, the same with the two exchanged,
        - |q| r^2 + |(|g_k| |b_u,k| + |u_k| |b_g,k|)_k| r + |b_g * b_u|, q_k = (|g_k| |u_k| + |<g_k, u_k>|)/2,

        and the one that grows least is taken. In the third, (g'x)(u'x) = x' S x for S = (g u' + u g')/2, whose eigenvalues are
        (<g, u> +- |g| |u|)/2.
        """
        gates, ups = self._rows(self.gate), self._rows(self.reading.up)
        g_0, u_0 = self._offsets(self.gate), self._offsets(self.reading.up)
        whole_gate = spectral_norm(self.gate.weight(self)), _length(g_0)
        whole_up = spectral_norm(self.reading.up.weight(self)), _length(u_0)
        entry_gate, entry_up = (float(gates.max()), float(g_0.abs().max())), (float(ups.max()), float(u_0.abs().max()))
        mixed = gates * u_0.abs() + ups * g_0.abs()
        inner = min(
            _product(entry_gate, whole_up),
            _product(whole_gate, entry_up),
            TokenBound(_length(mixed), _length(g_0 * u_0), _length((gates * ups + self._overlaps().abs()) / 2)),
            key=lambda bound: (bound.curvature, bound.gain, bound.offset),
        )
        outer, last = spectral_norm(self.reading.down.weight(self)), self.reading.down.bias(self)
        return TokenBound(outer * inner.gain, outer * inner.offset + _length(last), outer * inner.curvature)

    def lipschitz(self, radius: float = math.inf, *, printed: bool = False) -> float:
        """L = |W_d|_2 (Lip(phi) |W_g|_2 |w|_r + |z|_r |W_u|_2) among tokens no longer than r: the Jacobian is
        W_d (diag(w * phi'(z)) W_g + diag(phi(z)) W_u). `printed` takes slope 1.
        """
        slope = 1.0 if printed else KNOWN[self.reading.activation].slope
        entries = [
            (self._rows(each) * radius + self._offsets(each).abs()).max() if radius < math.inf else math.inf
            for each in (self.gate, self.reading.up)
        ]
        gate, up, down = (spectral_norm(matrix.weight) for matrix in self.matrices())
        return down * (slope * gate * float(entries[1]) + float(entries[0]) * up)

    def _rows(self, projection: Projection) -> Tensor:
        """The length of every row of the matrix, in float64."""
        parts = self._parts(projection)
        return torch.cat([torch.linalg.vector_norm(part.double(), dim=-1) for part in parts])

    def _overlaps(self) -> Tensor:
        """<g_k, u_k> for every row."""
        pairs = zip(self._parts(self.gate), self._parts(self.reading.up), strict=True)
        return torch.cat([(gate.double() * up.double()).sum(-1) for gate, up in pairs])

    def _parts(self, projection: Projection) -> tuple[Tensor, ...]:
        weight = projection.weight(self).detach()
        parts: tuple[Tensor, ...] = weight.split(max(AT_ONCE // weight.shape[1], 1))
        return parts

    def _offsets(self, projection: Projection) -> Tensor:
        bias, weight = projection.bias(self), projection.weight(self)
        return weight.new_zeros(len(weight), dtype=torch.float64) if bias is None else bias.detach().double()


def read_ffn(chain: ModuleChain, x: Tensor) -> FeedForwardReading | str:
    """What the FFN computes, seen at those random states, as large as tells activations apart; or why it is not known.

    Of its linear maps the last is W_d, and the others act on x: one is W_u, two are a gate and W_u in either order, and one with
    twice the rows is both. Of these and the known activations, what gives W_d its input is the reading. The model is to be in eval
    mode and the chain's last linear map found.
    """
    if chain.ending is None:
        return "it does not end in one linear map"
    inner, _ = _seen(chain, x)
    if not inner or not all(torch.equal(part.x, x) for part in inner):
        return f"the {len(inner)} linear maps before its last do not all act on its input"
    x = x * TELLING / torch.cat([part.y for part in inner], -1).square().mean().sqrt()
    inner, last = _seen(chain, x)
    fits: list[tuple[float, FeedForwardReading]] = []
    down = Projection(last.path, 0, last.y.shape[-1])
    for gate, up in _candidates(inner, last.x.shape[-1]):
        values = {each: _value(each, inner) for each in (gate, up) if each is not None}
        for name, activation in KNOWN.items():
            found = activation(values[up]) if gate is None else activation(values[gate]) * values[up]
            fits.append((float((found - last.x).norm() / last.x.norm()), FeedForwardReading(gate, up, down, name)))
    miss, reading = min(fits, key=lambda fit: fit[0], default=(math.inf, None))
    if reading is None or not miss <= 64 * unit(x.dtype):
        return f"it is no plain or gated FFN with an activation of {', '.join(KNOWN)}"
    return reading


def ffn_in_model(chain: ModuleChain, reading: FeedForwardReading | str) -> FeedForwardInModel:
    """The map with all that its reading shows; a reading that is a text says why it shows nothing."""
    if isinstance(reading, str):
        return FeedForwardInModel(chain, reading)
    return PlainFeedForward(chain, reading) if reading.gate is None else GatedFeedForward(chain, reading)


def _seen(chain: ModuleChain, x: Tensor) -> tuple[list[Acting], Acting]:
    with acting(chain.linear_maps()) as seen:
        chain(x)
    return seen[:-1], seen[-1]


def _candidates(inner: list[Acting], hidden: int) -> Iterator[tuple[Projection | None, Projection]]:
    """What may be (gate, up) by their shapes."""
    parts = [Projection(part.path, 0, part.y.shape[-1]) for part in inner]
    if len(parts) == 1 and parts[0].stop == 2 * hidden:
        parts = parts[0].cut([hidden, hidden])
    if len(parts) == 1 and parts[0].stop == hidden:
        yield None, parts[0]
    if len(parts) == 2 and all(part.stop - part.start == hidden for part in parts):
        first, second = parts
        yield first, second
        yield second, first


def _value(projection: Projection, inner: list[Acting]) -> Tensor:
    """What came out of the projection."""
    whole: Tensor = next(part.y for part in inner if part.path == projection.path)
    return whole[..., projection.start : projection.stop]


def _product(first: tuple[float, float], second: tuple[float, float]) -> TokenBound:
    """(a r + b) (c r + d)."""
    (a, b), (c, d) = first, second
    return TokenBound(a * d + b * c, b * d, a * c)


def _length(vector: Tensor | None) -> float:
    return 0.0 if vector is None else float(torch.linalg.vector_norm(vector.detach().double()))
