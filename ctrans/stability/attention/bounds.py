"""Attention sensitivity (Emadi): theta by head and row, the norm of the softmax Jacobian, and
Lipschitz bounds in the block norm.

All bounds are local: they bound the norm of the Jacobian at the given state (theorems 5.1-5.3). The
printed forms have no biases and assume activations of slope 1. The corrected forms here hold for
the model's biases and activations.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from ctrans.fields import ExposesHeads, HasLipschitz, spectral_norm, why_not
from ctrans.norm import Norm
from ctrans.stability.attention.balanced_mass import BalancedMass, balanced_mass
from ctrans.sublayer import Sublayer
from solvers import ConfigError


@dataclasses.dataclass(frozen=True)
class Pathways:
    """L_MHA <= value + attention at a state: theorem 5.1's two terms, |W_O| sum_h |V_h| and |W_O|
    sum_h theta_h/tau Phi_h.
    """

    value: float
    attention: float

    @property
    def bound(self) -> float:
        return self.value + self.attention


@torch.no_grad()
def attention_theta(
    attention: ExposesHeads,
    u: Float[Tensor, "*batch tokens width"],
    padding: Bool[Tensor, "*batch tokens"] | None = None,
    *,
    tolerance: float = 1e-9,
) -> BalancedMass:
    """theta of each row (*batch, heads, tokens) of the map's attention at its input U, in float64.

    `padding` is true where a token is padding. No row reads it, and its own row is masked, as is a
    row without any other token to read.
    """
    p = attention.probabilities(u)
    if padding is None:
        return balanced_mass(p, tolerance=tolerance)
    read = ~padding[..., None, None, :] & ~padding[..., None, :, None]
    kept = torch.where(read, p, 0.0)
    sums = kept.sum(-1, keepdim=True)
    return balanced_mass(kept / torch.where(sums > 0, sums, 1.0), tolerance=tolerance)


def attention_bound(attention: ExposesHeads, b: float, theta: Sequence[float], *, biases: bool = True) -> Pathways:
    """Theorem 5.1: |W_O| sum_h (|V_h| + theta_h/tau B ((2 B |Q_h| + |b_Q,h|) |K_h| + |Q_h| |b_K,h|)
    |V_h| / sqrt(d_h)), theta_h the largest of head h's rows.

    B = max_i |u_i|_2 of the inputs. Theorem 5.1 has no offsets and is false with them;
    `biases=False` gives that form. Offsets of values do not enter, because changes of attention sum
    to zero over a row. Offsets of keys shift a row's scores equally, so they enter only if
    positions rotate the keys or scores are capped (`HeadMatrices`). The theorem holds with
    rotations, which keep the norms of Q and K, and with caps, whose slope is at most 1. Raises
    ConfigError for normalised queries and keys, which it does not cover.
    """
    if attention.normalised_scores:
        raise ConfigError(
            f"theorem 5.1 does not cover qk_norm, nor other scores that are not bilinear in the input{why_not(attention)}"
        )
    value_path = attention_path = 0.0
    outs = []
    for largest, head in zip(theta, attention.head_matrices(), strict=True):
        norm_q, norm_k, norm_v = (spectral_norm(matrix) for matrix in (head.query, head.key, head.value))
        q_0, k_0 = (_length(offset) if biases else 0.0 for offset in (head.query_offset, head.key_offset))
        value_path += norm_v
        scores = b * ((2 * b * norm_q + q_0) * norm_k + norm_q * k_0) / math.sqrt(len(head.query))
        attention_path += largest / attention.temperature * scores * norm_v
        outs.append(head.out)
    out = spectral_norm(torch.cat(outs, 1))
    return Pathways(out * value_path, out * attention_path)


def norm_slope(norm: Norm | None, x: Float[Tensor, "*batch tokens width"]) -> float:
    """max_i |J_N(x_i)|_2 <= max_i slope(x_i), as max|gamma|/min_i sigma(x_i), in the block norm; 1
    without a norm.
    """
    return 1.0 if norm is None else float(norm.slope(x).detach().max())


def norm_slope_anywhere(norm: Norm | None) -> float:
    """Lip(N), of a sphere norm at most max|gamma|/sqrt(eps) (Emadi, lemma A.1); inf for eps = 0."""
    return 1.0 if norm is None else norm.steepest


class BothBounds(NamedTuple):
    """A bound for the model as it is (`own`), and as printed: without biases of queries and with
    activations of slope 1.
    """

    own: float
    printed: float


def step_bound(sublayer: Sublayer, h: float, x: Float[Tensor, "*batch tokens width"]) -> BothBounds:
    """slope(N_state) (1 + h |gain W| slope(N_out) L_f s slope(N_in)) >= |J| of the step X + h r(X),
    each slope at its norm's input.

    The printed bound uses Lip(N) = max|gamma|/sqrt(eps). Raises ConfigError for residuals that are
    not linear in the map's output.
    """
    if sublayer.image is not None or sublayer.streams > 1:
        raise ConfigError("theorems 5.2 and 5.3 need a residual of one stream that is linear in the map's output")
    u = sublayer.given(x)
    maps, after = map_bound_at(sublayer, u), x + h * sublayer(x)
    norms = ((sublayer.input_norm, x), (sublayer.output_norm, sublayer.field(u)), (sublayer.state_norm, after))

    def whole(largest: float, slopes: Sequence[float]) -> float:
        *inner, outer = slopes
        return outer * (1 + h * math.prod([sublayer.largest_gain, sublayer.input_scale, largest, *inner]))

    return BothBounds(
        whole(maps.own, [norm_slope(norm, at) for norm, at in norms]),
        whole(maps.printed, [norm_slope_anywhere(norm) for norm, _ in norms]),
    )


def map_bound_at(sublayer: Sublayer, u: Float[Tensor, "*batch tokens width"]) -> BothBounds:
    """L_f of the sublayer's map at its input U: the map's own constant, as FFNs have, or theorem
    5.1. Parallel branches add.
    """
    each = [(branch.steepest, _steepest(branch.field, branch.given(u))) for branch in sublayer.branches.values()]
    return BothBounds(math.fsum(s * both.own for s, both in each), math.fsum(s * both.printed for s, both in each))


def _steepest(field: object, u: Tensor) -> BothBounds:
    largest = float(torch.linalg.vector_norm(u, dim=-1).max())
    if isinstance(field, HasLipschitz):
        return BothBounds(field.lipschitz(largest), field.lipschitz(largest, printed=True))
    if isinstance(field, ExposesHeads):
        theta = attention_theta(field, u, tolerance=1e-3).upper.movedim(-2, 0).flatten(1).amax(1).tolist()
        own, printed = (attention_bound(field, largest, theta, biases=biases).bound for biases in (True, False))
        return BothBounds(own, printed)
    raise ConfigError(
        f"no Lipschitz bound is known for a field of type {type(field).__name__}: it has no method lipschitz(){why_not(field)}"
    )


def _length(offset: Tensor | None) -> float:
    return 0.0 if offset is None else float(torch.linalg.vector_norm(offset.detach().double()))
