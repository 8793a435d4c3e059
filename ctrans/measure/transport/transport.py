"""Transport of uncertainty: distances between samples of inputs and of their terminal states, with
bounds.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from ctrans.base.shapes import SequenceRows
from ctrans.dynamics.depth import Depth
from ctrans.dynamics.fields import HasBound, TokenBound
from ctrans.measure.forward.bounds import (
    difference_bound,
    largest_gain,
    needs_map_bound,
    token_spread,
)
from ctrans.measure.transport.wasserstein import ORDERS, check_order, wasserstein
from solvers.run import finite


@dataclasses.dataclass(frozen=True)
class Transport:
    """W_p between inputs and perturbed inputs (`before`) and between their terminal states
    (`after`), with bounds on `after`.

    `after` is None if a state is not finite. `amplification` is after/before, None if `after` is
    None or `before` is 0. A bound is None if there is none.
    """

    perturbation: str
    p: int
    before: float
    after: float | None
    bound: float | None
    printed_bound: float | None

    @property
    def amplification(self) -> float | None:
        if self.after is None or self.before == 0:
            return None
        return self.after / self.before


Pair = tuple[SequenceRows, SequenceRows]


def distances(
    depth: Depth,
    perturbation: str,
    inputs: Pair,
    ends: Pair,
    *,
    orders: Sequence[int] = ORDERS,
    spreads: Sequence[float | None] | None = None,
) -> list[Transport]:
    """W_p between two samples of inputs and between their terminal states, with bounds, for each p
    of `orders`.

    `spreads` are the depth's `token_spreads`, computed if None.
    """
    if spreads is None:
        spreads = token_spreads(depth)
    ends_are_finite = all(map(finite, ends))
    tokens = inputs[0].shape[1]
    results = []
    for p in orders:
        before = wasserstein(*inputs, p)
        bound = transport_bound(depth, tokens, before, p, spreads)
        printed = printed_transport_bound(depth, tokens, before, p)
        after: float | None = None
        if ends_are_finite:
            after = wasserstein(*ends, p)
        results.append(Transport(perturbation, p, before, after, bound, printed))
    return results


def transport_bound(
    depth: Depth,
    tokens: int,
    distance: float,
    p: int = 2,
    spreads: Sequence[float | None] | None = None,
) -> float | None:
    """W_p(mu_D, nu_D) <= W_p(mu_0, nu_0) + m_p sqrt(n) sum_k h_k s_k, m_p = (nd)^max(0, 1/p - 1/2);
    None if there is no bound.

    s_k bounds the distance between two tokens of segment k's velocity. `spreads` are the s_k, by
    default `token_spreads` (theory, section 8; Kan, theorem 6, corrected by m_p). Behind a norm
    around the state the distance is at most m_p sqrt(n) s_k, whatever it was before, with s_k for
    two tokens behind that norm.
    """
    check_order(p)
    if spreads is None:
        spreads = token_spreads(depth)
    for sublayer, h, spread in zip(depth.sublayers, depth.lengths, spreads, strict=True):
        norm = sublayer.state_norm or sublayer.output_norm or sublayer.input_norm
        if norm is None or spread is None:
            return None
        factor = (tokens * norm.width) ** max(0.0, 1 / p - 1 / 2) * math.sqrt(tokens)
        if sublayer.state_norm is not None:
            distance = factor * spread
        else:
            distance = distance + factor * h * spread
    return distance


def token_spreads(depth: Depth) -> list[float | None]:
    """`BoundsByDepth.spreads` without a walk, from the weights alone. Compute them once."""
    spreads = []
    for sublayer in depth.sublayers:
        bound: TokenBound | None = None
        if (
            needs_map_bound(sublayer)
            and sublayer.input_norm is not None
            and isinstance(sublayer.field, HasBound)
        ):
            bound = sublayer.field.bound()
        spreads.append(token_spread(sublayer, bound, difference_bound(sublayer)))
    return spreads


def printed_transport_bound(depth: Depth, tokens: int, distance: float, p: int = 2) -> float | None:
    """2^((p-1)/p) (C_hat W_p(mu_0, nu_0) + 4 dt D sqrt(nd) g_max): Kan, theorem 6 as printed (eq.
    17); None unless all sublayers have output norms.

    C_hat(p), which the paper does not specify, is 1 for p in {1, 2}, because no entry-wise p-norm
    with p <= 2 is below the Frobenius norm. The bound is false at p = 1, where the entry-wise norm
    can be sqrt(nd) times Frobenius (theory, section 8).
    """
    check_order(p)
    norms = [sublayer.output_norm for sublayer in depth.sublayers if sublayer.state_norm is None]
    outputs = [norm for norm in norms if norm is not None]
    if len(outputs) < len(depth.sublayers):
        return None
    constant = (
        2 * depth.times[-1] * math.sqrt(tokens * outputs[0].width) * max(map(largest_gain, outputs))
    )
    return 2 ** ((p - 1) / p) * (distance + constant)
