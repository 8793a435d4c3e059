"""Hyper-connections: a state of several streams that are mixed on entering a segment, read by its
map and written to.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ctrans.base.protocol import AsksTheInstance
from ctrans.base.shapes import StreamRows, TokenRows
from ctrans.dynamics.residual.velocities import Residual

Mixing = Float[Tensor, "streams streams"]
"""A matrix that mixes the streams."""

PerStream = Float[Tensor, " streams"]
"""One number for each stream."""


class Streams(Residual, ABC):
    """X of n streams x_1 .. x_n, concatenated: x_s <- sum_t M_st x_t on entering a segment, then
    dx_s/dt = b_s N_out f(N_in sum_t a_t x_t). M is `mixing`, b `writes` and a `reads`.

    Hyper-connections as printed read before they mix. These read after mixing, so that a segment
    starts with a jump and is an ODE from there. If M is invertible both have the same functions,
    with a' M for a'.
    """

    jumps = True

    def __init__(self, width: int, streams: int):
        super().__init__()
        self.width = width
        self.streams = streams

    @property
    @abstractmethod
    def mixing(self) -> Mixing:
        """M."""

    @property
    @abstractmethod
    def reads(self) -> PerStream:
        """a."""

    @property
    @abstractmethod
    def writes(self) -> PerStream:
        """b."""

    @property
    def largest(self) -> float:
        return float(torch.linalg.vector_norm(self.writes.detach()))

    @property
    def words(self) -> str:
        return f"b f for {self.streams} streams, |b| = {self.largest:.3g}"

    @property
    def stretch(self) -> float:
        return self.largest

    def enter(self, x: StreamRows) -> StreamRows:
        # entry by entry, as autocast would round the state in a matrix product
        return (self.mixing.unsqueeze(-1) * self._apart(x).unsqueeze(-3)).sum(-2).flatten(-2)

    def read(self, x: StreamRows) -> TokenRows:
        return (self.reads.unsqueeze(-1) * self._apart(x)).sum(-2)

    def forward(self, v: TokenRows, x: StreamRows) -> StreamRows:
        return (self.writes.unsqueeze(-1) * v.unsqueeze(-2)).flatten(-2)

    def pull(self, p: StreamRows) -> TokenRows:
        return (self.writes.unsqueeze(-1) * self._apart(p)).sum(-2)

    def _apart(self, x: Tensor) -> Float[Tensor, "*batch tokens streams width"]:
        apart: Tensor = x.unflatten(-1, (self.streams, self.width))
        return apart


@runtime_checkable
class MixesStreams(Protocol, metaclass=AsksTheInstance):
    """A residual of a state with streams: `mixing` is M, `reads` a and `writes` b."""

    mixing: Mixing
    reads: PerStream
    writes: PerStream


class HyperConnections(Streams):
    """Free M, a and b. They start as n copies of the plain residual: M = I, b = 1, and segment k
    reads stream k mod n.
    """

    def __init__(self, width: int, streams: int, segment: int):
        super().__init__(width, streams)
        # one axis, since optimisers decay matrices, and M should stay near I and not 0
        self.mix = nn.Parameter(torch.eye(streams).flatten())
        self.read_weights = nn.Parameter((torch.arange(streams) == segment % streams).float())
        self.write_weights = nn.Parameter(torch.ones(streams))

    @property
    def mixing(self) -> Mixing:
        mixing: Tensor = self.mix.unflatten(0, (self.streams, self.streams))
        return mixing

    @property
    def reads(self) -> PerStream:
        return self.read_weights

    @property
    def writes(self) -> PerStream:
        return self.write_weights


class MadeOfWeights(Protocol):
    """A number that a model's weights make."""

    def of_weights(self) -> Tensor:
        """The number."""


class KeptShare(Streams):
    """One stream of which each segment keeps a share: X <- a X on entering, a > 0, then dX/dt =
    N_out f(N_in X/a). The discrete step is a X + dt N_out f(N_in X), as sums with weights compute.

    a is `factor` times what the `weights` are now, numbers that a model's weights make.
    """

    def __init__(self, width: int, factor: float, weights: tuple[MadeOfWeights, ...] = ()):
        super().__init__(width, 1)
        self.factor = factor
        self.weights = weights  # in a tuple, so that they are no parameters of the residual

    @property
    def share(self) -> float:
        """a."""
        with torch.no_grad():
            return self.factor * math.prod(float(each.of_weights()) for each in self.weights)

    @property
    def mixing(self) -> Mixing:
        return torch.full((1, 1), self.share, dtype=torch.float64)

    @property
    def reads(self) -> PerStream:
        return torch.full((1,), 1 / self.share, dtype=torch.float64)

    @property
    def writes(self) -> PerStream:
        return torch.ones(1, dtype=torch.float64)

    @property
    def words(self) -> None:  # type: ignore[override]  # W = I
        return None

    def enter(self, x: StreamRows) -> StreamRows:
        return self.share * x

    def read(self, x: StreamRows) -> TokenRows:
        return x / self.share

    def forward(self, v: TokenRows, x: StreamRows) -> StreamRows:
        return v

    def pull(self, p: StreamRows) -> TokenRows:
        return p


class ManifoldConnections(Streams):
    """M = Sinkhorn(exp(.)) is doubly stochastic, a = sigmoid(.) and b = 2 sigmoid(.). An exactly
    doubly stochastic M neither lengthens X nor moves the mean of its streams.

    |M|_2 <= 1, since |M|_2^2 <= |M|_1 |M|_inf. Products of such M are doubly stochastic too.
    Columns sum to 1 up to rounding, which keeps the mean over the streams. Rows sum to 1 up to the
    error of the iterations.
    """

    bounded = True
    ITERATIONS = 20
    NEAR_IDENTITY = 4.0
    """Initial logits on the diagonal of M, which is then nearly I."""

    def __init__(self, width: int, streams: int, segment: int):
        super().__init__(width, streams)
        self.mix = nn.Parameter(self.NEAR_IDENTITY * torch.eye(streams).flatten())
        # segments read streams in turn with a share of 2/3; otherwise all streams would stay equal
        share = torch.where(
            torch.arange(streams) == segment % streams, 2 / 3, 1 / 3 / (streams - 1)
        )
        self.read_logits = nn.Parameter(share.logit())
        self.write_logits = nn.Parameter(torch.zeros(streams))

    @property
    def mixing(self) -> Mixing:
        return sinkhorn(self.mix.unflatten(0, (self.streams, self.streams)), self.ITERATIONS)

    @property
    def reads(self) -> PerStream:
        return self.read_logits.sigmoid()

    @property
    def writes(self) -> PerStream:
        return 2 * self.write_logits.sigmoid()


def sinkhorn(logits: Float[Tensor, "*batch n n"], iterations: int) -> Float[Tensor, "*batch n n"]:
    """exp(logits) with rows and columns divided by their sums in turn, columns last (Sinkhorn and
    Knopp 1967).
    """
    for _ in range(iterations):
        logits = logits - logits.logsumexp(-1, keepdim=True)
        logits = logits - logits.logsumexp(-2, keepdim=True)
    return logits.exp()
