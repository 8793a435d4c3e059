"""Measured orders of convergence in the two limits of a Transformer: more steps per segment, and
more blocks.

The models are small, in float64, with a seeded state of unit size, a smooth activation and eps = 0.
In narrower models a token sometimes comes near the zero of a norm. The asymptotic range of a
fifth-order method is then below rounding.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable, Sequence
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call

from ctrans.base.draw import Draw
from ctrans.base.shapes import SequenceRows
from ctrans.dynamics.depth import Depth
from ctrans.dynamics.sublayer import Sublayer
from ctrans.model.config import GPTConfig
from ctrans.model.gpt import GPT
from solvers import METHODS, HasReversibleForm, Segment
from solvers.methods import fixed_step
from solvers.solve import solve

# Enough steps to be asymptotic, few enough to stay above rounding.
STEPS: dict[int, tuple[int, ...]] = {
    1: (64, 96, 128, 192, 256),
    2: (16, 24, 32, 48, 64),
    3: (16, 24, 32, 48, 64),
    4: (12, 16, 24, 32, 48),
    5: (24, 32, 48, 64, 80),
}
BLOCKS = (12, 16, 24, 32, 48)
KNOTS = 2
"""The number of blocks whose weights the depth limit interpolates."""


@dataclasses.dataclass(frozen=True)
class Convergence:
    """Errors |X - X_exact|/|X_exact| at the end by the number of steps per segment or of blocks,
    and the fitted order.
    """

    limit: str
    method: str
    placement: str
    sizes: tuple[int, ...]
    errors: tuple[float, ...]
    formal: int

    @property
    def order(self) -> float:
        """p of `fitted_order`."""
        return fitted_order(self.sizes, self.errors)


def fitted_order(sizes: Sequence[int], errors: Sequence[float]) -> float:
    """p of the least-squares fit log e = a - p log n + c/n, the logarithm of e = C n^-p (1 + c/n).

    The last term is the next order's share of the error. Without it a fifth-order method with a
    small leading coefficient appears to have order 5.2, even close to rounding. NaN if an error is
    not finite and positive. With fewer than three sizes the fit is not unique.
    """
    n = np.array(sizes)
    e = np.array(errors)
    if not (np.isfinite(e) & (e > 0)).all():
        return math.nan
    basis = np.stack([np.ones(len(n)), -np.log(n), 1 / n], axis=1)
    return float(np.linalg.lstsq(basis, np.log(e), rcond=None)[0][1])


def own_methods() -> list[str]:
    """The names of own explicit methods whose order can be measured in float64 (`STEPS`)."""
    names = []
    for name, method in METHODS.items():
        implicit: bool = getattr(method, "implicit", False)
        if isinstance(method, HasReversibleForm) and method.order in STEPS and not implicit:
            names.append(name)
    return names


def substep_convergence(
    method: str, placement: str, norm: str = "layernorm", seed: int = 0
) -> Convergence:
    """D fixed, M substeps per segment, M to infinity: a method of order p has error O(M^-p)
    (theory, section 2).
    """
    model, x0 = _model_and_state(placement, norm, seed)
    segments = model.depth.segments(continuous=True)
    stepper = fixed_step(method)
    exact = _exact("substeps", placement, norm, seed)
    sizes = STEPS[min(stepper.order, max(STEPS))]
    errors = _errors(exact, (solve(segments, x0, method=stepper, steps=n).x1 for n in sizes))
    return Convergence("substeps", method, placement, sizes, errors, stepper.order)


def depth_convergence(
    placement: str, *, symmetric: bool = False, norm: str = "layernorm", seed: int = 0
) -> Convergence:
    """T fixed, D to infinity, weights smooth in depth: the discrete model tends to dX/dt = (v_attn
    + v_ffn)/2.

    Plain blocks, one Euler step per segment (the discrete Transformer), have order 1 (Lie-Trotter
    splitting). Symmetric blocks with accurate segments (rk4) have order 2 (Strang splitting).
    Weights are linear in depth between `KNOTS` blocks (theory, section 2).
    """
    model, x0 = _model_and_state(placement, norm, seed)
    exact = _exact("depth", placement, norm, seed)

    def end(blocks: int) -> Tensor:
        depth = model.depth.refine(blocks // KNOTS, "linear")
        if symmetric:
            return solve(depth.symmetric().segments(continuous=True), x0, method="rk4").x1
        end: Tensor = depth(x0)
        return end

    errors = _errors(exact, (end(n) for n in BLOCKS))
    if symmetric:
        return Convergence("depth", "symmetric", placement, BLOCKS, errors, formal=2)
    return Convergence("depth", "plain", placement, BLOCKS, errors, formal=1)


def averaged_segments(depth: Depth) -> list[Segment]:
    """The depth limit dX/dt = (v_attn + v_ffn)/2. Weights are linear in t between the blocks'
    midpoints and constant outside the outer midpoints.

    It does not use `Depth.refine`, whose limit it is. Each piece on which the weights are smooth is
    one segment.
    """
    sublayers = list(depth.sublayers)
    attention_weights = [dict(sublayer.named_parameters()) for sublayer in sublayers[0::2]]
    ffn_weights = [dict(sublayer.named_parameters()) for sublayer in sublayers[1::2]]
    depth_time = depth.times[-1]
    blocks = depth.blocks

    def velocity_of(
        sublayer: Sublayer, weights: list[dict[str, nn.Parameter]], t: Tensor, x: Tensor
    ) -> Tensor:
        block = min(max(float(t) / depth_time * blocks - 0.5, 0.0), blocks - 1.0)
        i = min(int(block), max(blocks - 2, 0))
        before = weights[i]
        after = weights[min(i + 1, blocks - 1)]
        between = {name: torch.lerp(before[name], after[name], block - i) for name in before}
        raw: Tensor = functional_call(sublayer, between, (x,))
        if sublayer.state_norm is None:
            return raw
        return sublayer.state_norm.tangent(x, raw)

    def velocity(t: Tensor, x: Tensor) -> Tensor:
        attention_velocity = velocity_of(sublayers[0], attention_weights, t, x)
        ffn_velocity = velocity_of(sublayers[1], ffn_weights, t, x)
        return (attention_velocity + ffn_velocity) / 2

    edges = [0.0, *((i + 0.5) / blocks * depth_time for i in range(blocks)), depth_time]
    state_norm = sublayers[0].state_norm
    enter = None if state_norm is None else state_norm.retract
    segments = []
    for t0, t1 in pairwise(edges):
        segments.append(Segment(t0, t1, velocity, enter=enter))
        enter = None  # only the first: from there the state stays on the image
    return segments


def _model_and_state(placement: str, norm: str, seed: int) -> tuple[GPT, SequenceRows]:
    config = GPTConfig(
        vocab_size=8,
        context=8,
        depth=KNOTS,
        width=96,
        heads=4,
        placement=placement,
        norm=norm,
        ffn_width=192,
        activation="silu",
        eps=0.0,
        initialisation="xavier",
    )
    model = GPT(config, seed=seed).double().requires_grad_(requires_grad=False)
    return model, Draw(seed).normal(1, 4, 96)


@functools.cache
def _exact(limit: str, placement: str, norm: str, seed: int) -> Tensor:
    """X at the end in a limit. It uses many equal steps, as an adaptive method near rounding is not
    more accurate.
    """
    model, x0 = _model_and_state(placement, norm, seed)
    if limit == "substeps":
        segments = model.depth.segments(continuous=True)
        steps = 192
    else:
        segments = averaged_segments(model.depth)
        steps = 24
    return solve(segments, x0, method=fixed_step("tsit5"), steps=steps).x1


@torch.no_grad()
def _errors(exact: Tensor, ends: Iterable[Tensor]) -> tuple[float, ...]:
    size = torch.linalg.vector_norm(exact)
    return tuple(float(torch.linalg.vector_norm(end - exact) / size) for end in ends)
