"""How a sublayer's output joins the state: the table `RESIDUALS`.

With Y = E X the state as it enters a segment, a sublayer's map gives v = N_out f(s N_in R Y), and the state moves with
dY/dt = r(Y) = W v, W linear: in the discrete model X <- Y + dt W v. A residual is which E, R, W and s these are; all are the identity, and
s = 1, where nothing is said (`plain`). What follows from W alone: H(P) of the velocities W v is that of v at the pulled costate W'P.

A new residual is one entry: models, commands and tests pick it up from there.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ctrans.norm import NORMS, Norm
from ctrans.placement import Placement
from solvers import ConfigError
from solvers.errors import look_up


class Residual(nn.Module):
    """r = W v with W = I, of a map that is given s N_in X, s = `input_scale`."""

    input_scale: float = 1.0
    streams: int = 1
    """How many streams of the map's width the state has."""
    image: Norm | None
    """A norm of the residual's own, whose image v is put on first: r = W (N v - X) then, affine and bounded."""

    def __init__(self) -> None:
        super().__init__()
        self.image = None

    @property
    def gains(self) -> Float[Tensor, " entries"] | None:
        """g where W = diag(g), as one entry for all channels or one for each; None where W is the identity or no such matrix."""
        return None

    @property
    def largest(self) -> float:
        """|W|_2, by which velocities can be longer than the map's outputs."""
        return 1.0 if self.gains is None else float(self.gains.detach().abs().max())

    @property
    def stretch(self) -> float | None:
        """c where |W v| = c |v| for every v; None where there is no such number."""
        return self.largest if self.gains is None or self.gains.numel() == 1 else None

    @property
    def words(self) -> str | None:
        """W before a map's output f, for a set in words; None for the identity."""
        if self.gains is None:
            return None
        return f"{float(self.gains):.3g} f" if self.gains.numel() == 1 else f"g f, |g| up to {self.largest:.3g}"

    def enter(self, x: Float[Tensor, "*batch tokens state"]) -> Float[Tensor, "*batch tokens state"]:
        """E X, the state as the segment begins."""
        return x

    def read(self, x: Float[Tensor, "*batch tokens state"]) -> Float[Tensor, "*batch tokens width"]:
        """R X, what an input norm and the map see of the state."""
        return x

    def forward(
        self, v: Float[Tensor, "*batch tokens width"], x: Float[Tensor, "*batch tokens state"]
    ) -> Float[Tensor, "*batch tokens state"]:
        """r = W v, or what else joins a state X."""
        return v if self.gains is None else self.gains * v

    def pull(self, p: Float[Tensor, "*batch tokens state"]) -> Float[Tensor, "*batch tokens width"]:
        """W'p: the costate that v meets where the state's is p."""
        return p if self.gains is None else self.gains * p


class Gain(Residual):
    """dX/dt = g * v, g trained: one entry for every channel (LayerScale), or one for all (ReZero, SkipInit)."""

    def __init__(self, entries: int, start: float):
        super().__init__()
        self.gain = nn.Parameter(torch.full((entries,), float(start)))

    @property
    def gains(self) -> Float[Tensor, " entries"]:
        return self.gain


class DepthScaled(Residual):
    """dX/dt = N_out f(N_in X/sqrt(l)) in block l = 1, 2, ..."""

    def __init__(self, block: int):
        super().__init__()
        self.input_scale = block**-0.5


class TowardsImage(Gain):
    """dX/dt = T_X a * (N v - X), a by channel and T_X the projection of a norm around the state: X goes to where the map points, on the
    norm's image. The discrete step is the retraction with a step, N(X + dt a * (N v - X)).
    """

    def __init__(self, norm: Norm, start: float):
        super().__init__(norm.width, start)
        self.image = norm

    @property
    def words(self) -> str:
        return f"the tangent part of a * (f - X), |a| up to {self.largest:.3g}"

    def forward(self, v: Tensor, x: Tensor) -> Tensor:
        assert self.image is not None, "it is made with a norm"
        r: Tensor = self.gain * (self.image(v) - x)
        return r


class Streams(Residual, abc.ABC):
    """X of n streams x_1 .. x_n, side by side: x_s <- sum_t M_st x_t on entering a segment, then dx_s/dt = b_s N_out f(N_in sum_t a_t x_t).

    M is the `mixing`, b what is written and a what is read: each stream's own numbers. (Hyper-connections as printed read before they
    mix; these after, so that a segment begins with a jump and is an ODE from there. Where M has an inverse both have the same functions,
    with a' M for a'.)
    """

    def __init__(self, width: int, streams: int):
        super().__init__()
        self.width, self.streams = width, streams

    @property
    @abc.abstractmethod
    def mixing(self) -> Float[Tensor, "streams streams"]:
        """M."""

    @property
    @abc.abstractmethod
    def reads(self) -> Float[Tensor, " streams"]:
        """a."""

    @property
    @abc.abstractmethod
    def writes(self) -> Float[Tensor, " streams"]:
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

    def enter(self, x: Float[Tensor, "*batch tokens state"]) -> Float[Tensor, "*batch tokens state"]:
        # products by entry and no matrix product, which autocast would round the state in
        return (self.mixing.unsqueeze(-1) * self._apart(x).unsqueeze(-3)).sum(-2).flatten(-2)

    def read(self, x: Float[Tensor, "*batch tokens state"]) -> Float[Tensor, "*batch tokens width"]:
        return (self.reads.unsqueeze(-1) * self._apart(x)).sum(-2)

    def forward(
        self, v: Float[Tensor, "*batch tokens width"], x: Float[Tensor, "*batch tokens state"]
    ) -> Float[Tensor, "*batch tokens state"]:
        return (self.writes.unsqueeze(-1) * v.unsqueeze(-2)).flatten(-2)

    def pull(self, p: Float[Tensor, "*batch tokens state"]) -> Float[Tensor, "*batch tokens width"]:
        return (self.writes.unsqueeze(-1) * self._apart(p)).sum(-2)

    def _apart(self, x: Tensor) -> Float[Tensor, "*batch tokens streams width"]:
        apart: Tensor = x.unflatten(-1, (self.streams, self.width))
        return apart


@runtime_checkable
class MixesStreams(Protocol):
    """A residual whose state is of streams: `mixing` is M, `reads` a and `writes` b."""

    @property
    def mixing(self) -> Float[Tensor, "streams streams"]: ...

    @property
    def reads(self) -> Float[Tensor, " streams"]: ...

    @property
    def writes(self) -> Float[Tensor, " streams"]: ...


class HyperConnections(Streams):
    """Free M, a and b, which begin as n copies of the plain residual: M = I, b = 1, and segment k reads stream k mod n."""

    def __init__(self, width: int, streams: int, segment: int):
        super().__init__(width, streams)
        # one row of numbers, since optimisers decay what has two axes, and M is to be near I and not 0
        self.mix = nn.Parameter(torch.eye(streams).flatten())
        self.read_weights = nn.Parameter((torch.arange(streams) == segment % streams).float())
        self.write_weights = nn.Parameter(torch.ones(streams))

    @property
    def mixing(self) -> Float[Tensor, "streams streams"]:
        mixing: Tensor = self.mix.unflatten(0, (self.streams, self.streams))
        return mixing

    @property
    def reads(self) -> Float[Tensor, " streams"]:
        return self.read_weights

    @property
    def writes(self) -> Float[Tensor, " streams"]:
        return self.write_weights


class ManifoldConnections(Streams):
    """M = Sinkhorn(exp(.)), doubly stochastic, a = sigmoid(.), b = 2 sigmoid(.): mixing neither lengthens X nor moves its mean stream.

    |M|_2 <= 1 as |M|_2^2 <= |M|_1 |M|_inf, and products of such M are such again; columns sum to 1 to rounding, so that the mean over the
    streams comes through, and rows as nearly as the iterations reach.
    """

    ITERATIONS = 20
    NEAR_IDENTITY = 4.0
    """M begins with so large logits on its diagonal: nearly I."""

    def __init__(self, width: int, streams: int, segment: int):
        super().__init__(width, streams)
        self.mix = nn.Parameter(self.NEAR_IDENTITY * torch.eye(streams).flatten())
        # half of what is read is one stream's, by turns, without which all streams would stay equal
        share = torch.where(torch.arange(streams) == segment % streams, 0.5, 0.5 / (streams - 1))
        self.read_logits = nn.Parameter(share.logit())
        self.write_logits = nn.Parameter(torch.zeros(streams))

    @property
    def mixing(self) -> Float[Tensor, "streams streams"]:
        return sinkhorn(self.mix.unflatten(0, (self.streams, self.streams)), self.ITERATIONS)

    @property
    def reads(self) -> Float[Tensor, " streams"]:
        return self.read_logits.sigmoid()

    @property
    def writes(self) -> Float[Tensor, " streams"]:
        return 2 * self.write_logits.sigmoid()


def sinkhorn(logits: Float[Tensor, "*batch n n"], iterations: int) -> Float[Tensor, "*batch n n"]:
    """exp(logits) with rows and columns divided by their sums by turns, the columns last (Sinkhorn and Knopp 1967)."""
    for _ in range(iterations):
        logits = logits - logits.logsumexp(-1, keepdim=True)
        logits = logits - logits.logsumexp(-2, keepdim=True)
    return logits.exp()


@runtime_checkable
class ResidualSettings(Protocol):
    """What a residual is made from: the part of an architecture that concerns it. A `GPTConfig` is one."""

    @property
    def width(self) -> int: ...

    @property
    def norm(self) -> str: ...

    @property
    def eps(self) -> float: ...

    @property
    def bias(self) -> bool: ...

    @property
    def per_block(self) -> int:
        """Sublayers of a block."""

    @property
    def state_streams(self) -> int:
        """Of how many streams the state is."""

    @property
    def residual_start(self) -> float:
        """What its gains begin at."""


@dataclasses.dataclass(frozen=True)
class ResidualEntry:
    """A residual by its ODE.

    - `make`: from the settings and the sublayer's number, from 0, to its residual; None stands for the plain one
    - `ode`, `source`: the equation of a segment, and where it is from
    - `start`: what its gains begin at where nothing is said; None where it has none that can be chosen
    - `refuses`: why a placement makes no sense with it, or None
    - `counts_blocks`: whether another number of blocks over the same depth-time is another model
    - `streams`: of how many streams the state is where nothing is said; None where it is one
    - `unit_weights`: whether matrices are normalised along their embedding dimension, when they are drawn and after every step
    """

    make: Callable[[ResidualSettings, int], Residual | None]
    ode: str
    source: str
    start: float | None = None
    refuses: Callable[[Placement], str | None] = lambda placement: None
    counts_blocks: bool = False
    streams: int | None = None
    unit_weights: bool = False


def _scales_nothing(placement: Placement) -> str | None:
    able = "placement pre, peri or pre_post"
    return None if placement.input_norm else f"scales what an input norm gives, and there is none: choose {able}"


def _leaves_streams(placement: Placement) -> str | None:
    able = "placement pre, peri, output or none"
    return f"would have a norm around all streams: choose {able}" if placement.state_norm else None


def _norm(settings: ResidualSettings) -> Norm:
    kind = NORMS[settings.norm]
    return kind(settings.width, settings.eps, bias=settings.bias and getattr(kind, "has_offset", False))


def _needs_image(placement: Placement) -> str | None:
    able = "placement post or pre_post"
    bare = placement.state_norm and not placement.output_norm and not placement.residual_gain
    return None if bare else f"moves on the image of a norm around the state, with a step of its own: choose {able}"


RESIDUALS: dict[str, ResidualEntry] = {
    "plain": ResidualEntry(lambda settings, k: None, "dX/dt = v", "He et al. 2015"),
    "layerscale": ResidualEntry(
        lambda settings, k: Gain(settings.width, settings.residual_start),
        "dX/dt = g * v, g by channel",
        "LayerScale, arXiv 2103.17239: 0.1 up to 18 blocks, 1e-5 up to 24, 1e-6 beyond",
        start=0.1,
    ),
    "rezero": ResidualEntry(
        lambda settings, k: Gain(1, settings.residual_start),
        "dX/dt = a v, a from 0",
        "ReZero, arXiv 2003.04887, whose Transformer shares a in a block; SkipInit, arXiv 2002.10444, as here one a sublayer",
        start=0.0,
    ),
    "depth_scaled": ResidualEntry(
        lambda settings, k: DepthScaled(k // settings.per_block + 1),
        "dX/dt = N_out f(N_in X/sqrt(l)) in block l",
        "LayerNorm scaling, arXiv 2502.05795",
        refuses=_scales_nothing,
        counts_blocks=True,
    ),
    "ngpt": ResidualEntry(
        lambda settings, k: TowardsImage(_norm(settings), settings.residual_start),
        "dX/dt = T_X a * (N v - X), a by channel, T_X the projection on the norm's image",
        "nGPT, arXiv 2410.01131, on the sphere where the norm has no gain",
        start=0.05,
        refuses=_needs_image,
        unit_weights=True,
    ),
    "hyper_connections": ResidualEntry(
        lambda settings, k: HyperConnections(settings.width, settings.state_streams, k),
        "X <- (M x I) X, then dX/dt = b x N_out f(N_in (a' x I) X), n streams",
        "hyper-connections, arXiv 2409.19606, the static ones",
        refuses=_leaves_streams,
        counts_blocks=True,
        streams=4,
    ),
    "mhc": ResidualEntry(
        lambda settings, k: ManifoldConnections(settings.width, settings.state_streams, k),
        "the same, M doubly stochastic, a and b positive",
        "manifold-constrained hyper-connections, arXiv 2512.24880, the static ones",
        refuses=_leaves_streams,
        counts_blocks=True,
        streams=4,
    ),
}
"""From name to residual. `plain` is what was there before there were others, bit for bit."""

ALIASES = {"skipinit": "rezero", "layernorm_scaling": "depth_scaled"}
"""Other names, which differ in nothing but words from an entry."""


def residual_name(name: str) -> str:
    """The entry's name of that name or alias; ConfigError with the nearest otherwise."""
    look_up("residual", name, {**RESIDUALS, **ALIASES})
    return ALIASES.get(name, name)


def check_residual(name: str, placements: Sequence[Placement], start: float | None, streams: int | None) -> None:
    """Raises ConfigError, in one line and by name, for a residual that makes no sense with a placement, or options that it has not."""
    entry = RESIDUALS[name]
    for placement in placements:
        if (why := entry.refuses(placement)) is not None:
            raise ConfigError(f"residual {name!r} with placement {placement.name!r} {why}")
    if start is not None and entry.start is None:
        able = ", ".join(other for other, each in RESIDUALS.items() if each.start is not None)
        raise ConfigError(f"residual_init = {start!r} has no meaning for residual {name!r}: leave it out, or choose {able}")
    if streams is not None and entry.streams is None:
        able = ", ".join(other for other, each in RESIDUALS.items() if each.streams is not None)
        raise ConfigError(f"streams = {streams!r} has no meaning for residual {name!r}: leave it out, or choose {able}")
    if streams == 1:
        raise ConfigError(f"streams = 1 for residual {name!r}: give at least 2, or choose residual plain")
