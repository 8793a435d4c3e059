"""Forward stability: theoretical bounds on the moments of the hidden state."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from ctrans.base.old_names import OldReasons
from ctrans.base.shapes import TokenRows
from ctrans.dynamics.depth import Depth
from ctrans.dynamics.fields import (
    ExposesHeads,
    HasBound,
    HasLipschitz,
    Kind,
    TokenBound,
    mixes_tokens,
    norm_of_product,
    why_not,
)
from ctrans.dynamics.norm import Norm
from ctrans.dynamics.residual import MixesStreams
from ctrans.dynamics.sublayer import Sublayer
from ctrans.measure.forward.moments import moments, token_lengths
from ctrans.measure.walk import Instrument, StepContext, observe
from ctrans.measure.walk.instrument import of_text
from solvers import ConfigError, SolveError

PAPERS = "paper's bound"
"""The measure that the reason is filed under if the papers have no bound."""


@dataclass(frozen=True)
class ForwardBounds:
    """Bounds on the moments at depth-time 0 and at each segment's end.

    `mean_abs` and `rms` are the sharper bounds, and `variance` is N/(N-1) rms^2 for N entries.
    `seed_mean_abs` and `seed_variance` are the papers' own bounds, None if they have none for this
    model: `missing` then has the reason under "paper's bound".
    """

    mean_abs: list[float]
    rms: list[float]
    variance: list[float]
    seed_mean_abs: list[float] | None
    seed_variance: list[float] | None
    missing: dict[str, str] = field(default_factory=dict)

    seed_note = OldReasons(PAPERS, nothing="")


@dataclass(frozen=True)
class _Measured:
    """One segment with the figures that a bound needs: the least sigma of its input norm, its map's
    bound and its difference bound. `why_no_bound` is the reason if the map's bound is needed and
    None.
    """

    sublayer: Sublayer
    h: float
    sigma: float
    bound: TokenBound | None
    why_no_bound: str
    apart: float = math.inf

    def known(self) -> TokenBound:
        if self.bound is None:
            raise ConfigError(self.why_no_bound)
        return self.bound


class BoundsByDepth(Instrument):
    """Bounds on MA (mean absolute value), RMS and variance of X_k, from X_0 and the weights
    (theory, section 6).

    Sharper bound: MA(X_k) <= MA(X_0) + sum_j h_j rho_j, and the same for RMS. h_j is segment j's
    length and rho_j bounds the RMS of its velocity. Behind an output norm rho is g + b. Without one
    it is |f|/sqrt(d) at the largest input, from the norms of the weights; behind an input norm this
    does not depend on X, so growth is linear. A norm around the state sets the bound to g + b.

    Without norms (`none`) the input's bound is the state's own r, and |f| <= a r + c compounds: to
    r + h (a r + c) in the discrete model, to e^(ah) r + c (e^(ah) - 1)/a in the ODE (Gronwall). In
    the ODE a map that grows with r^2, such as a gated FFN, has no bound. `discrete` selects the
    discrete model; with norms both bounds are equal. The ODE's bounds hold for its exact solution,
    so an integrator can exceed them by its own error.

    Papers' bound: Kan, theorem 4 for output norms without a state norm, and theorem 3 with eq. 82
    for `pre`. Its D_i is sigma of each token along the given states (as printed it lacks sqrt(d)),
    and FFN sublayers take the same step. Only this bound uses the states after X_0.
    """

    def __init__(self, *, discrete: bool = True):
        self.discrete = discrete

    def begin(self, depth: Depth, x0: Tensor) -> None:
        self._depth = depth
        self._x0 = of_text(x0.detach(), self.kept)
        self._segments: list[_Measured] = []

    def forward(self, at: StepContext) -> None:
        self._segments.append(_measure(at))

    def figures(self) -> ForwardBounds:
        """Bounds over the whole depth, even if the walk ended early. Raises ConfigError if a map
        has no known bound.
        """
        reached = len(self._segments)
        segments = list(zip(self._depth.sublayers, self._depth.lengths, strict=True))
        unseen = [
            _Measured(sublayer, h, math.nan, *_bound_of(sublayer))
            for sublayer, h in segments[reached:]
        ]
        return _forward_bounds(
            self._x0, [*self._segments, *unseen], reached, discrete=self.discrete
        )

    def spreads(self) -> list[float | None]:
        """s_k: the largest distance between two tokens of segment k's velocity, or of its state if
        a norm acts on the state.

        It is 2 sqrt(d) g behind an output norm or a state norm. Behind an input norm alone it is
        the smaller of twice the bound on a token's length and 2 sqrt(d) g L, with L a Lipschitz
        constant of the map (`difference_bound`). None without norms, or if both bounds of the map
        are unknown.
        """
        return [
            token_spread(segment.sublayer, segment.bound, segment.apart)
            for segment in self._segments
        ]


def forward_bounds(
    depth: Depth, states: Sequence[TokenRows], *, discrete: bool = True
) -> ForwardBounds:
    """`BoundsByDepth` along given states, with its formulas and errors."""
    bounds: ForwardBounds = observe(depth, states, [BoundsByDepth(discrete=discrete)])[0]
    return bounds


def map_bound(sublayer: Sublayer) -> TokenBound:
    """Bound on the length of the map's output tokens. Raises ConfigError if the map has no method
    `bound`.
    """
    if not isinstance(sublayer.field, HasBound):
        raise ConfigError(
            f"no bound is known: {type(sublayer.field).__name__} has no method bound() ->"
            " TokenBound for the size of its output, and no norm acts after"
            f" it{why_not(sublayer.field)}"
        )
    return sublayer.field.bound()


def difference_bound(sublayer: Sublayer) -> float:
    """L with |f(U)_i - f(U')_j| <= L max over tokens of |u_k - u'_l| for inputs behind the
    sublayer's input norm; inf if unknown.

    Attention: with rows a of A and b of A', f(U)_i - f(U')_j = sum_h W_h V_h (sum_k a_hk u_k -
    sum_l b_hl u'_l), because offsets of values and output cancel. A difference of two averages is
    at most the largest difference, so L = sum_h |W_h V_h|_2. FFN: L is its Lipschitz constant over
    tokens in the norm's image.
    """
    norm = sublayer.input_norm
    if norm is None or not needs_map_bound(sublayer):
        return math.inf
    radius = _reach(norm)
    return math.fsum(
        branch.steepest * _difference(branch.field, kind, branch.reach(radius))
        for kind, branch in sublayer.branches.items()
    )


def _difference(field: nn.Module, kind: Kind, radius: float) -> float:
    if isinstance(field, ExposesHeads):
        return math.fsum(norm_of_product(head.out, head.value) for head in field.head_matrices())
    if not mixes_tokens(field, kind) and isinstance(field, HasLipschitz):
        return field.lipschitz(radius)
    return math.inf


def token_spread(
    sublayer: Sublayer, bound: TokenBound | None, apart: float = math.inf
) -> float | None:
    """`BoundsByDepth.spreads` of one sublayer, from its map's bound and `difference_bound` if these
    are known.

    None for a state that is mixed or multiplied on entering, because this also moves tokens apart.
    """
    if sublayer.residual.jumps:
        return None
    if sublayer.state_norm is not None:
        return 2 * math.sqrt(sublayer.state_norm.width) * sublayer.state_norm.half_diameter
    if sublayer.output_norm is not None:
        return (
            2
            * sublayer.largest_gain
            * sublayer.output_norm.half_diameter
            * math.sqrt(sublayer.output_norm.width)
        )
    norm = sublayer.input_norm
    if norm is None or (bound is None and apart == math.inf):
        return None
    s = sublayer.input_scale
    alone = math.inf
    if bound is not None:
        alone = 2 * bound.at(s * norm.level * math.sqrt(norm.width))
    return sublayer.largest_gain * min(
        alone, 2 * s * norm.half_diameter * math.sqrt(norm.width) * apart
    )


def needs_map_bound(sublayer: Sublayer) -> bool:
    """Whether a bound on the sublayer's velocity needs a bound of its map."""
    return sublayer.state_norm is None and sublayer.output_norm is None


def needs_radius(sublayer: Sublayer) -> bool:
    """Whether a bound on the sublayer's velocity depends on the size of the state."""
    return sublayer.image is not None or (
        sublayer.output_norm is None and sublayer.input_norm is None
    )


def velocity_bound(sublayer: Sublayer, radius: float, bound: TokenBound | None) -> float:
    """Bound on the length of a token of r(X) if no token of the entered X is longer than `radius`.

    Behind an output norm it is g sqrt(d) (max|gamma| + max|beta|), with g the largest gain.
    Otherwise it is g times the map's `bound` at its largest input: s sqrt(d) (max|gamma| +
    max|beta|) behind an input norm, |a| times the radius without one. A residual that moves towards
    a norm's image has r = g (N v - X), bounded by g times that length plus the radius. nan if it
    needs a map's bound and that is None.
    """
    if sublayer.image is not None:
        return sublayer.residual.largest * (_reach(sublayer.image) + radius)
    if sublayer.output_norm is not None:
        return sublayer.largest_gain * _reach(sublayer.output_norm)
    if bound is None:
        return math.nan
    norm = sublayer.input_norm
    if norm is None:
        inside = Jump.of(sublayer).reads * radius
    else:
        inside = _reach(norm)
    return sublayer.largest_gain * bound.at(sublayer.input_scale * inside)


def _reach(norm: Norm) -> float:
    """The largest length of a token in the norm's image."""
    return norm.level * math.sqrt(norm.width)


def _measure(at: StepContext) -> _Measured:
    norm = at.sublayer.input_norm
    sigma = math.nan
    if norm is not None and norm.divides:
        sigma = float(norm.sigma(at.x.detach().double()).min())
    return _Measured(
        at.sublayer, at.h, sigma, *_bound_of(at.sublayer), difference_bound(at.sublayer)
    )


def _bound_of(sublayer: Sublayer) -> tuple[TokenBound | None, str]:
    """The map's bound if it is needed, and the reason if there is none."""
    if not needs_map_bound(sublayer):
        return None, ""
    try:
        return map_bound(sublayer), ""
    except (ConfigError, SolveError) as error:
        return None, str(error)


def _forward_bounds(
    start: Tensor, segments: Sequence[_Measured], reached: int, *, discrete: bool
) -> ForwardBounds:
    x0 = moments(start)
    width = start.shape[-1]
    entries = start.numel()
    radius = float(token_lengths(start.double()).max())
    mean_abs = [x0.mean_abs]
    rms = [x0.rms]
    for segment in segments:
        if segment.sublayer.state_norm is not None:
            level = segment.sublayer.state_norm.level
            radius = level * math.sqrt(width)
            mean_abs.append(level)
            rms.append(level)
            continue
        jump = Jump.of(segment.sublayer)
        gained = _gained(segment, jump.length * radius, discrete=discrete)
        radius = jump.length * radius + gained
        mean_abs.append(jump.mean_abs * mean_abs[-1] + gained / math.sqrt(width))
        rms.append(jump.length * rms[-1] + gained / math.sqrt(width))
    variance = [entries / max(entries - 1, 1) * value * value for value in rms]
    seed = _seed(start, segments, reached)
    if isinstance(seed, str):
        return ForwardBounds(mean_abs, rms, variance, None, None, {PAPERS: seed})
    seed_mean_abs = [value / math.sqrt(entries) for value in seed]
    seed_variance = [value * value / max(entries - 1, 1) for value in seed]
    return ForwardBounds(mean_abs, rms, variance, seed_mean_abs, seed_variance)


class Jump(NamedTuple):
    """Factors by which mixing streams can grow a state's length and its mean absolute entry, and
    the length of the weights that read it.
    """

    length: float = 1.0
    mean_abs: float = 1.0
    reads: float = 1.0

    @classmethod
    def of(cls, sublayer: Sublayer) -> Jump:
        """|M|_2, the largest column sum of |M|, and |a|; all 1 for a state of one stream."""
        residual = sublayer.residual
        if not isinstance(residual, MixesStreams):
            return cls()
        mixing = residual.mixing.detach().double()
        reads = residual.reads.detach().double()
        return cls(
            float(torch.linalg.matrix_norm(mixing, 2)),
            float(mixing.abs().sum(0).max()),
            float(reads.norm()),
        )


def _gained(segment: _Measured, radius: float, *, discrete: bool) -> float:
    """Bound on the growth of a token's length in a segment without a state norm, for tokens no
    longer than `radius`.
    """
    sublayer = segment.sublayer
    h = segment.h
    bound: TokenBound | None = None
    if sublayer.output_norm is None:
        bound = segment.known()
    if discrete or bound is None or sublayer.input_norm is not None:
        return h * velocity_bound(sublayer, radius, bound)
    reads = Jump.of(sublayer).reads
    if bound.curvature:
        raise ConfigError(
            f"no bound is known for the ODE: {type(sublayer.field).__name__} grows with the square"
            " of an input that no norm bounds"
        )
    gain = sublayer.largest_gain * bound.gain * reads
    with np.errstate(over="ignore"):
        if gain == 0:
            clock = h
        else:
            clock = float(np.expm1(gain * h)) / gain
    return clock * sublayer.largest_gain * bound.at(reads * radius)


def _seed(x0: Tensor, segments: Sequence[_Measured], reached: int) -> list[float] | str:
    """The papers' bound on |X_k|_F, or the reason why they have none."""
    sublayers = [segment.sublayer for segment in segments]
    start = float(torch.linalg.vector_norm(x0.double()))
    entries = x0.numel()
    tokens = x0.shape[-2]
    width = x0.shape[-1]
    if any(s.state_norm is not None for s in sublayers):
        return "the papers have no bound for a state with a norm around it"
    if any(not s.residual.is_identity for s in sublayers):
        return "the papers' theorems need residuals without gains"
    outputs = [s.output_norm for s in sublayers if s.output_norm is not None]
    inputs = [s.input_norm for s in sublayers if s.input_norm is not None]
    if len(outputs) == len(sublayers):
        level = printed_level(outputs)
        lengths = torch.tensor([segment.h for segment in segments], dtype=torch.float64)
        return [start + t * math.sqrt(entries) * level for t in (0.0, *lengths.cumsum(0).tolist())]
    if outputs or len(inputs) < len(sublayers):
        return "the papers' theorems need one placement, pre, peri or output, in all sublayers"
    if not all(norm.divides for norm in inputs):
        return "the papers' theorem needs input norms that divide a token by its size"
    if any(segment.known().curvature for segment in segments):
        return "the papers' theorem needs maps with an affine bound, and a gated FFN has none"
    values = [start]
    for segment, norm in zip(segments[:reached], inputs, strict=False):
        gain, constant, _ = segment.known()
        rows = 1.0
        if mixes_tokens(segment.sublayer.field, segment.sublayer.kind):
            rows = math.sqrt(tokens)
        offset = _offset(norm)
        affine = math.sqrt(entries / width) * constant + rows * gain * math.sqrt(entries) * offset
        growth = 1 + segment.h * rows * gain * largest_gain(norm) / segment.sigma
        values.append(values[-1] * growth + segment.h * affine)
    return values


def printed_level(norms: Sequence[Norm]) -> float:
    """g_max + b_max of Kan, theorems 4 and 5: the largest gain plus the largest offset of all the
    norms.
    """
    return max(map(largest_gain, norms)) + max(map(_offset, norms))


def largest_gain(norm: Norm) -> float:
    """g = max|gamma|, as printed. `half_diameter` is less where the image is a box."""
    return float(norm.gamma.detach().abs().max())


def _offset(norm: Norm) -> float:
    return float(norm.beta.detach().abs().max())
