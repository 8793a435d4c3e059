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
from torch import Tensor

from ctrans.base.shapes import PerBatch, TokenMask, TokenRows
from ctrans.dynamics.fields import ExposesHeads, ExposesRows, HasLipschitz, spectral_norm, why_not
from ctrans.dynamics.fields.ffn_bounds import length
from ctrans.dynamics.norm import Norm
from ctrans.dynamics.sublayer import Sublayer
from ctrans.measure.attention.balanced_mass import BalancedMass, balanced_mass
from ctrans.measure.forward.moments import token_lengths
from solvers import ConfigError

STEPS = 64
"""Steps of the search for a centre. Any centre gives an enclosing radius, so fewer steps only make
it less sharp.
"""


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
    attention: ExposesRows,
    u: TokenRows,
    padding: TokenMask | None = None,
    *,
    tolerance: float = 1e-9,
) -> BalancedMass:
    """theta of each row (*batch, heads, tokens) of the map's attention at its input U, in float64.

    `padding` is true where a token is padding. No row reads it, and its own row is masked, as is a
    row without any other token to read. Rows of another sequence are all those of no padding.
    """
    p = attention.probabilities(u)
    if padding is None:
        return balanced_mass(p, tolerance=tolerance)
    readable = ~padding[..., None, :, None]
    if p.shape[-1] == p.shape[-2]:  # the tokens that are read are those of the text
        readable = readable & ~padding[..., None, None, :]
    weights = torch.where(readable, p, 0.0)
    sums = weights.sum(-1, keepdim=True)
    return balanced_mass(weights / torch.where(sums > 0, sums, 1.0), tolerance=tolerance)


def largest_theta(attention: ExposesRows, u: TokenRows, *, tolerance: float = 1e-9) -> list[float]:
    """The largest theta of each head's rows, from above."""
    return (
        attention_theta(attention, u, tolerance=tolerance)
        .upper.movedim(-2, 0)
        .flatten(1)
        .amax(1)
        .tolist()
    )


def attention_bound(
    attention: ExposesHeads, b: float, theta: Sequence[float], *, biases: bool = True
) -> Pathways:
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
            "theorem 5.1 does not cover qk_norm, nor other scores that are not bilinear in the"
            f" input{why_not(attention)}"
        )
    value_path = 0.0
    attention_path = 0.0
    outs = []
    for largest, head in zip(theta, attention.head_matrices(), strict=True):
        norm_q = spectral_norm(head.query)
        norm_k = spectral_norm(head.key)
        norm_v = spectral_norm(head.value)
        q_0 = 0.0
        k_0 = 0.0
        if biases:
            q_0 = length(head.query_offset)
            k_0 = length(head.key_offset)
        value_path += norm_v
        scores = b * ((2 * b * norm_q + q_0) * norm_k + norm_q * k_0) / math.sqrt(len(head.query))
        attention_path += largest / attention.temperature * scores * norm_v
        outs.append(head.out)
    out = spectral_norm(torch.cat(outs, 1))
    return Pathways(out * value_path, out * attention_path)


@torch.no_grad()
def local_attention_bound(attention: ExposesHeads, u: TokenRows) -> float:
    """max_i sum_h |W_h V_h| + theta_ih/(tau sqrt(d_h)) rad(W_h v) (|Q_h| rad(k) + |q_i| |K_h|) >=
    the local value of f at U.

    q, k, v are the head's queries, keys and values at U, W_h its columns of W_O, and rad the radius
    of a ball that encloses a sequence's tokens. Changes of attention sum to zero over a row, so W_h
    v may be measured from any centre. An equal change of all scores of a row has no effect, so keys
    may too, unless positions rotate them or a cap bends the scores. In those cases rad(k) is the
    length of the longest key: a rotation keeps a key's length, and a cap has slope at most 1. Emadi
    has 2 B^2 |Q||K||V||W_O| for the second factor, with B the longest token. Raises ConfigError for
    normalised queries and keys, whose scores are not bilinear.
    """
    if attention.normalised_scores:
        raise ConfigError(
            "the local bound does not cover qk_norm: it needs queries and keys that are linear in"
            " the input"
        )
    x = u.double()
    theta = attention_theta(attention, u).upper.double()
    total = torch.zeros(x.shape[:-1], dtype=x.dtype, device=x.device)
    for index, head in enumerate(attention.head_matrices()):
        query = head.query.double()
        key = head.key.double()
        through = head.out.double() @ head.value.double()
        q = x @ query.mT
        if head.query_offset is not None:
            q = q + head.query_offset.double()
        # any centre shifts all scores of a row equally; if the offset counts, only 0 is known to
        k = x @ key.mT
        if head.key_offset is None:
            keys = enclosing_radius(k)
        else:
            keys = token_lengths(k + head.key_offset.double()).amax(-1)
        values = enclosing_radius(x @ through.mT)
        scores = spectral_norm(query) * keys.unsqueeze(-1) + token_lengths(q) * spectral_norm(key)
        scale = attention.temperature * math.sqrt(len(query))
        total = (
            total
            + spectral_norm(through)
            + theta[..., index, :] / scale * values.unsqueeze(-1) * scores
        )
    return float(total.max())


def enclosing_radius(x: TokenRows) -> PerBatch:
    """The radius of a ball around each sequence's tokens, a few per cent above the smallest (Badoiu
    and Clarkson, 2003).
    """
    centre = x.mean(-2, keepdim=True)
    radius = torch.full(x.shape[:-2], math.inf, dtype=x.dtype, device=x.device)
    for step in range(STEPS):
        apart = token_lengths(x - centre)
        radius = torch.minimum(radius, apart.amax(-1))
        farthest = x.gather(
            -2, apart.argmax(-1)[..., None, None].expand(*x.shape[:-2], 1, x.shape[-1])
        )
        centre = centre + (farthest - centre) / (step + 2)
    return radius


def norm_slope(norm: Norm | None, x: TokenRows) -> float:
    """max_i |J_N(x_i)|_2 <= max_i slope(x_i), as max|gamma|/min_i sigma(x_i), in the block norm; 1
    without a norm.
    """
    if norm is None:
        return 1.0
    return float(norm.slope(x).detach().max())


class BothBounds(NamedTuple):
    """A bound for the model as it is (`corrected`), and as printed: without biases of queries and
    with activations of slope 1.
    """

    corrected: float
    printed: float


def step_bound(sublayer: Sublayer, h: float, x: TokenRows) -> BothBounds:
    """slope(N_state) (1 + h |gain W| slope(N_out) L_f s slope(N_in)) >= |J| of the step X + h r(X),
    each slope at its norm's input.

    The printed bound uses Lip(N), of a sphere norm max|gamma|/sqrt(eps) (Emadi, lemma A.1; inf for
    eps = 0). Raises ConfigError for residuals that are not linear in the map's output.
    """
    if sublayer.image is not None or sublayer.residual.jumps:
        raise ConfigError(
            "theorems 5.2 and 5.3 need a residual X + W f of one stream, whose W f is linear in the"
            " map's output"
        )
    u = sublayer.given(x)
    norms = (
        (sublayer.input_norm, x),
        (sublayer.output_norm, sublayer.field(u)),
        (sublayer.state_norm, x + h * sublayer(x)),
    )
    # parallel branches add
    maps = [
        (branch.steepest, _map_bound(branch.field, branch.given(u)))
        for branch in sublayer.branches.values()
    ]

    def of_step(map_bounds: Sequence[float], slopes: Sequence[float]) -> float:
        *inner, outer = slopes
        factors = [
            sublayer.largest_gain,
            sublayer.input_scale,
            math.fsum(map_bounds),
            *inner,
        ]
        return outer * (1 + h * math.prod(factors))

    printed_slopes = []
    for norm, _ in norms:
        if norm is None:
            printed_slopes.append(1.0)
        else:
            printed_slopes.append(norm.steepest)
    return BothBounds(
        of_step(
            [steepest * bounds.corrected for steepest, bounds in maps],
            [norm_slope(norm, state) for norm, state in norms],
        ),
        of_step([steepest * bounds.printed for steepest, bounds in maps], printed_slopes),
    )


def _map_bound(field: object, u: Tensor) -> BothBounds:
    """L_f of a map at its input U: the map's own constant, as FFNs have, or theorem 5.1."""
    largest = float(token_lengths(u).max())
    if isinstance(field, HasLipschitz):
        return BothBounds(field.lipschitz(largest), field.lipschitz(largest, printed=True))
    if isinstance(field, ExposesHeads):
        theta = largest_theta(field, u, tolerance=1e-3)
        return BothBounds(
            attention_bound(field, largest, theta, biases=True).bound,
            attention_bound(field, largest, theta, biases=False).bound,
        )
    raise ConfigError(
        f"no Lipschitz bound is known for a field of type {type(field).__name__}: it has no method"
        f" lipschitz(){why_not(field)}"
    )
