"""Forward stability: moments of the hidden state by depth, and the bounds that theory puts on them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from ctrans.depth import Depth
from ctrans.fields import AffineBound, HasAffineBound
from ctrans.norm import Norm
from ctrans.sublayer import Sublayer
from solvers import ConfigError


@dataclasses.dataclass(frozen=True)
class Moments:
    """Of all entries of a hidden state: mean absolute value, sample variance, root mean square |X|/sqrt(nd)."""

    mean_abs: float
    variance: float
    rms: float


def moments(x: Float[Tensor, "*batch tokens width"]) -> Moments:
    """The moments over every entry, computed in float64 where the device has it."""
    x = x.detach().double() if x.device.type != "mps" else x.detach()
    return Moments(float(x.abs().mean()), float(x.var()) if x.numel() > 1 else 0.0, float(x.square().mean().sqrt()))


@dataclasses.dataclass(frozen=True)
class ForwardBounds:
    """Bounds on the moments at depth-time 0 and at each segment's end.

    `mean_abs` and `rms` are the sharper bounds; `variance` follows from rms as N/(N-1) rms^2 for N entries. `seed_mean_abs` and
    `seed_variance` are the papers' own statements, None where they make none.
    """

    mean_abs: list[float]
    rms: list[float]
    variance: list[float]
    seed_mean_abs: list[float] | None
    seed_variance: list[float] | None


def forward_bounds(
    depth: Depth, states: Sequence[Float[Tensor, "*batch tokens width"]], *, discrete: bool = True
) -> ForwardBounds:
    """What MA, RMS and variance of X_k cannot exceed, from X_0 and the weights (theory, section 6).

    Sharper: MA(X_k) <= MA(X_0) + sum_j h_j rho_j and the same for RMS, with h_j segment j's length and rho_j a bound on the RMS of
    its velocity: g + b behind an output norm; without one |f|/sqrt(d) from the norms of the weights at the largest input, which
    behind an input norm does not depend on X, so that growth is linear. A norm around the state sets the bound to g + b.
    With `none` the input's bound is the state's own r, and |f| <= a r + c compounds: to r + h (a r + c) in the discrete model, to
    e^(ah) r + c (e^(ah) - 1)/a in the ODE (Gronwall). `discrete` says which of the two; where norms stand they are one. The ODE's
    bounds are for its exact solution: an integrator can exceed them by its own error, and a norm around the state then too.

    Seed: Kan, theorem 4 for output norms without state norm; theorem 3 with eq. 82 for `pre`, its D_i taken as sigma of each
    token along the states given (as printed it drops sqrt(d)), with the same step for FFN sublayers. The states are only used
    there, and X_0.
    """
    start = states[0]
    x0, width, entries = moments(start), start.shape[-1], start.numel()
    radius = float(torch.linalg.vector_norm(start.detach().double(), dim=-1).max())
    mean_abs, rms = [x0.mean_abs], [x0.rms]
    for sublayer, span in zip(depth.sublayers, depth.spans, strict=True):
        if sublayer.state_norm is not None:
            level = _level(sublayer.state_norm)
            radius = level * math.sqrt(width)
            mean_abs.append(level)
            rms.append(level)
            continue
        gained = _gained(sublayer, radius, float(span) * depth.dt, width, discrete)
        radius += gained
        mean_abs.append(mean_abs[-1] + gained / math.sqrt(width))
        rms.append(rms[-1] + gained / math.sqrt(width))
    seed = _seed(depth, states)
    return ForwardBounds(
        mean_abs,
        rms,
        [entries / max(entries - 1, 1) * value * value for value in rms],
        None if seed is None else [value / math.sqrt(entries) for value in seed],
        None if seed is None else [value * value / max(entries - 1, 1) for value in seed],
    )


def _gained(sublayer: Sublayer, radius: float, h: float, width: int, discrete: bool) -> float:
    """By how much a token no longer than `radius` can grow over a time h, through a sublayer without state norm."""
    if sublayer.output_norm is not None:
        return h * sublayer.gain * _level(sublayer.output_norm) * math.sqrt(width)
    gain, offset = (sublayer.gain * value for value in map_bound(sublayer))
    if sublayer.input_norm is not None:
        return h * (gain * _level(sublayer.input_norm) * math.sqrt(width) + offset)
    with np.errstate(over="ignore"):
        clock = h if discrete or gain == 0 else float(np.expm1(gain * h)) / gain
    return clock * (gain * radius + offset)


def map_bound(sublayer: Sublayer) -> AffineBound:
    """|f(x)_i| <= gain max_j |x_j| + offset for the sublayer's map; ConfigError where the map does not say (`bound`)."""
    if not isinstance(sublayer.field, HasAffineBound):
        raise ConfigError(
            f"no bound is known: {type(sublayer.field).__name__} does not say how large its output can be, as a method bound() -> "
            "AffineBound would, and no norm acts after it"
        )
    return sublayer.field.bound()


def _seed(depth: Depth, states: Sequence[Tensor]) -> list[float] | None:
    """The papers' bound on |X_k|_F, or None."""
    sublayers = list(depth.sublayers)
    lengths = [float(span) * depth.dt for span in depth.spans]
    start = float(torch.linalg.vector_norm(states[0].detach().double()))
    entries, tokens = states[0].numel(), states[0].shape[-2]
    if any(s.state_norm is not None for s in sublayers):
        return None
    outputs = [s.output_norm for s in sublayers if s.output_norm is not None]
    inputs = [s.input_norm for s in sublayers if s.input_norm is not None]
    if len(outputs) == len(sublayers):
        worst = max(map(_gain, outputs)) + max(map(_offset, outputs))
        times = [0.0, *torch.tensor(lengths, dtype=torch.float64).cumsum(0).tolist()]
        return [start + t * math.sqrt(entries) * worst for t in times]
    if outputs or len(inputs) < len(sublayers):
        return None
    values = [start]
    for sublayer, norm, h, x in zip(sublayers, inputs, lengths, states, strict=False):
        sigma = float(norm.sigma(x.detach().double()).min())
        gain, constant = map_bound(sublayer)
        rows = math.sqrt(tokens) if sublayer.kind == "attention" else 1.0
        offset = math.sqrt(entries) * _offset(norm)
        affine = math.sqrt(entries / x.shape[-1]) * constant + rows * gain * offset
        values.append(values[-1] * (1 + h * rows * gain * _gain(norm) / sigma) + h * affine)
    return values


def _level(norm: Norm) -> float:
    """g + b: no token of the norm's image has a larger RMS, and no larger mean absolute value."""
    return _gain(norm) + _offset(norm)


def _gain(norm: Norm) -> float:
    return float(norm.gamma.detach().abs().max())


def _offset(norm: Norm) -> float:
    return float(norm.beta.detach().abs().max())
