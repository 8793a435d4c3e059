"""Attention sensitivity by depth: theta, Emadi's bounds and S of each attention sublayer, and
Lipschitz bounds of blocks.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Sequence
from functools import partial

import torch
from jaxtyping import Int
from torch import Tensor, nn

from ctrans.base.shapes import SequenceRows, UnbatchedRows
from ctrans.dynamics.depth import Depth, spread
from ctrans.dynamics.fields import (
    ExposesHeads,
    ExposesRows,
    ExposesWeights,
    mixes_tokens,
    reference_kernels,
    spectral_norm,
    why_not,
)
from ctrans.measure.attention.attention_path import attention_path_gain
from ctrans.measure.attention.balanced_mass import BalancedMass
from ctrans.measure.attention.block_norm import gain_of_rows, map_at, one_for_each, step_at
from ctrans.measure.attention.bounds import (
    BothBounds,
    Pathways,
    attention_bound,
    attention_theta,
    largest_theta,
    step_bound,
)
from ctrans.measure.backward.sensitivity import TOLERANCE
from ctrans.measure.backward.singular_values import Linearisation, compose, linearise
from ctrans.measure.forward.moments import token_lengths
from ctrans.measure.walk import Instrument, StepContext, observe
from solvers import ConfigError

ROWS = 8
"""Number of output tokens at which the local value of a map is measured."""


@dataclasses.dataclass(frozen=True)
class AttentionLayer:
    """One attention sublayer at its state. Lists run over heads, and theta is over all rows that
    may read more than one token (`BalancedMass.fixed`); nan without any.

    - `theta_width`: the widest bracket; `masked`: the number of rows that read nothing
    - `softmax_norm`: max theta/tau
    - `bound`: theorem 5.1; `printed`: its form without biases; `measured`: the local value at
      `ROWS` tokens; `ratio`: bound over measured. The bounds and their two terms (`value_path`,
      `attention_path`) are nan if the theorem does not cover the attention, or if its matrices are
      unknown, and `note` gives the reason
    - `path`: |dX_{k+1}/dX_k| |X_k|/|X_{k+1}| through the attention rows alone (`attention_path`)
    - `G` = |W_O||W_Q||W_K||W_V|, `B` = sqrt(d) |U|_{inf,rms} of the map's input U, `S` =
      (theta/tau) B^2 G; `log_sensitivity`: the three logarithms with sum log S (Emadi, E.6)
    - `stream`: B of the hidden state, with which the paper's S grows
    - `finite`: whether the state is finite; if not, figures are nan
    """

    index: int
    finite: bool
    theta_mean: list[float]
    theta_max: list[float]
    theta_min: list[float]
    theta_width: float = math.nan
    masked: int = 0
    softmax_norm: float = math.nan
    value_path: float = math.nan
    attention_path: float = math.nan
    bound: float = math.nan
    printed: float = math.nan
    measured: float = math.nan
    ratio: float = math.nan
    G: float = math.nan
    B: float = math.nan
    stream: float = math.nan
    S: float = math.nan
    log_sensitivity: dict[str, float] = dataclasses.field(default_factory=dict)
    path: float = math.nan
    note: str = ""


@dataclasses.dataclass(frozen=True)
class BlockLayer:
    """One block's step at its state: theorems 5.2 and 5.3 with the norms' slopes at that state
    (`bound`) or with Lip(N) = max|gamma|/sqrt(eps) (`printed`), the `measured` local value, and
    `ratio` = bound/measured.
    """

    index: int
    bound: float
    printed: float
    measured: float
    ratio: float


class AttentionByDepth(Instrument):
    """`AttentionLayer` of each attention sublayer at its input state.

    `segments` limits the segments; None means all. Local values are those of the first sequence.
    Padding affects theta alone. Normalised queries and keys have no bounds, because the theorem
    does not cover them. Attention that exposes its rows alone has theta and no other figure. Raises
    ConfigError for attention that does not expose its rows.
    """

    def __init__(
        self,
        segments: Collection[int] | None = None,
        *,
        seed: int = 0,
        tolerance: float = TOLERANCE,
    ):
        self.segments = segments
        self.seed = seed
        self.tolerance = tolerance

    def begin(self, depth: Depth, x0: Tensor) -> None:
        self._generator = torch.Generator().manual_seed(self.seed)
        self.found: list[AttentionLayer] = []

    def forward(self, at: StepContext) -> None:
        if at.sublayer.attention is not None and (self.segments is None or at.k in self.segments):
            padding: Tensor | None = None
            if self.kept is not None:
                padding = ~self.kept
            self.found.append(_layer(at, padding, self._generator, self.tolerance))


def attention_layers(
    depth: Depth, states: Sequence[SequenceRows], *, seed: int = 0
) -> list[AttentionLayer]:
    """`AttentionByDepth` along given states."""
    layers: list[AttentionLayer] = observe(depth, states, [AttentionByDepth(seed=seed)])[0]
    return layers


class BlockBoundsByDepth(Instrument):
    """Lipschitz bound of each block at its input state, for any placement: the product over its
    sublayers of slope(N_state) (1 + h gain slope(N_out) L_f slope(N_in)). For `pre` it is theorem
    5.2, for `post` theorem 5.3, with step h.

    `blocks` limits the blocks; None means all. It keeps the graph of one block. Raises ConfigError
    for maps without a Lipschitz bound.
    """

    def __init__(self, blocks: Collection[int] | None = None, *, iterations: int = 8, seed: int):
        self.blocks = blocks
        self.iterations = iterations
        self.seed = seed

    def begin(self, depth: Depth, x0: Tensor) -> None:
        self._depth = depth
        self._generator = torch.Generator().manual_seed(self.seed)
        self.found: list[BlockLayer] = []

    def forward(self, at: StepContext) -> None:
        per_block = self._depth.per_block
        block, part = divmod(at.k, per_block)
        if self.blocks is not None and block not in self.blocks:
            return
        if part == 0:
            first, self._rows = _looked_at(at.x.detach())
            state = one_for_each(self._rows, first)
            self._bounds = list[BothBounds]()
            self._graphs = list[Linearisation]()
        else:
            state = self._graphs[-1].y
        self._bounds.append(step_bound(at.sublayer, at.h, at.x.detach()))
        start = at.k - part
        sublayers = [self._depth.sublayers[start + p] for p in range(per_block)]
        mixing = [
            p for p, sublayer in enumerate(sublayers) if mixes_tokens(sublayer.field, sublayer.kind)
        ]
        step = partial(at.sublayer.step, dt=at.h)
        # from the last map on that mixes tokens, the measured tokens alone are enough
        if part == max(mixing, default=0):
            step = partial(step_at, at.sublayer, at.h, rows=self._rows)
        with reference_kernels(at.sublayer):
            self._graphs.append(linearise(step, state))
        if part == per_block - 1:
            measured = gain_of_rows(
                compose(self._graphs), iterations=self.iterations, generator=self._generator
            )
            bound, printed = map(math.prod, zip(*self._bounds, strict=True))
            self.found.append(BlockLayer(block, bound, printed, measured, _ratio(bound, measured)))
            self._graphs = []  # they hold the block's weights


def block_layers(
    depth: Depth, states: Sequence[SequenceRows], *, iterations: int = 8, seed: int = 0
) -> list[BlockLayer]:
    """`BlockBoundsByDepth` along given states."""
    instrument = BlockBoundsByDepth(iterations=iterations, seed=seed)
    layers: list[BlockLayer] = observe(depth, states, [instrument])[0]
    return layers


def sensitivity_growth(layers: Sequence[AttentionLayer]) -> dict[str, float]:
    """Change of each part of log S from the first finite attention layer to the last (Emadi,
    E.6).
    """
    finite = [layer.log_sensitivity for layer in layers if layer.log_sensitivity]
    if finite:
        return {name: finite[-1][name] - finite[0][name] for name in finite[0]}
    return {}


def _layer(
    at: StepContext, padding: Tensor | None, generator: torch.Generator, tolerance: float
) -> AttentionLayer:
    sublayer = at.sublayer
    x = at.x.detach()
    assert sublayer.attention is not None, "asked of attention alone"
    field = sublayer.attention.field
    if not isinstance(field, ExposesRows):
        raise ConfigError(
            "theta and theorem 5.1 need each head's rows, which attention of type"
            f" {type(field).__name__} does not expose{why_not(field)}"
        )
    u = sublayer.attention.given(sublayer.given(sublayer.enter(x)))
    if not torch.isfinite(u).all():
        unknown = [math.nan] * field.heads
        return AttentionLayer(
            index=at.k, finite=False, theta_mean=unknown, theta_max=unknown, theta_min=unknown
        )
    rows = _of_rows(at.k, attention_theta(field, u, padding))
    if not (
        isinstance(field, ExposesHeads)
        and isinstance(field, ExposesWeights)
        and isinstance(field, nn.Module)
    ):
        return dataclasses.replace(
            rows, note=f"theorem 5.1 needs the scores and matrices of each head{why_not(field)}"
        )
    b = float(token_lengths(u).max())
    stream = float(token_lengths(x).max())
    # padding changes which rows count, not the map
    if padding is None:
        theta = rows.theta_max
    else:
        theta = largest_theta(field, u)
    paths = Pathways(math.nan, math.nan)
    printed = math.nan
    note = ""
    try:
        paths = attention_bound(field, b, theta)
        printed = attention_bound(field, b, theta, biases=False).bound
    except ConfigError as error:
        note = str(error)
    first, tokens = _looked_at(u)
    with reference_kernels(sublayer):
        linear = linearise(
            lambda u: map_at(field, "attention", u, tokens), one_for_each(tokens, first)
        )
    measured = gain_of_rows(linear, generator=generator)
    product = math.prod(
        spectral_norm(matrix.weight) for matrix in field.matrices() if matrix.role != "gate"
    )
    softmax_norm = max(rows.theta_max) / field.temperature
    logs = {
        "theta": _log(softmax_norm),
        "B": 2 * _log(b),
        "G": _log(product),
    }
    return dataclasses.replace(
        rows,
        softmax_norm=softmax_norm,
        value_path=paths.value,
        attention_path=paths.attention,
        bound=paths.bound,
        printed=printed,
        measured=measured,
        ratio=_ratio(paths.bound, measured),
        G=product,
        B=b,
        stream=stream,
        S=math.exp(sum(logs.values())),
        log_sensitivity=logs,
        path=attention_path_gain(sublayer, at.h, x, at.y.detach(), tolerance=tolerance),
        note=note,
    )


def _of_rows(k: int, mass: BalancedMass) -> AttentionLayer:
    """The figures of layer k that its rows alone determine."""
    # heads first, then rows
    lower = mass.lower.movedim(-2, 0).flatten(1)
    upper = mass.upper.movedim(-2, 0).flatten(1)
    fixed = mass.fixed.movedim(-2, 0).flatten(1)
    lowest = torch.where(fixed, math.inf, lower).amin(1)
    lowest = torch.where(fixed.all(1), math.nan, lowest)
    mean = lower.sum(1) / (~fixed).sum(1)
    return AttentionLayer(
        index=k,
        finite=True,
        theta_mean=mean.tolist(),
        theta_max=upper.amax(1).tolist(),
        theta_min=lowest.tolist(),
        theta_width=float(mass.width.max()),
        masked=int(mass.masked.sum()),
    )


def _looked_at(x: Tensor) -> tuple[UnbatchedRows, Int[Tensor, " rows"]]:
    """The first sequence, and the indices of the output tokens at which local values are
    measured.
    """
    first = x
    if x.dim() > 2:
        first = x.flatten(0, -3)[0]
    return first, torch.tensor(spread(len(first), ROWS), device=x.device)


def _ratio(bound: float, measured: float) -> float:
    if measured:
        return bound / measured
    return math.inf


def _log(value: float) -> float:
    if value > 0:
        return math.log(value)
    return -math.inf
