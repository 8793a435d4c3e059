"""Theory of a model before training: the growth of the hidden state by a sublayer (Xiong, lemma 2),
the decay of the last layer's gradient with depth (Xiong, theorem 1), and a bound on it by placement
(Kim, proposition 3.1).
"""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import Tensor

from ctrans.base.shapes import TokenRows
from ctrans.dynamics.fields import HasOutputProjection, Role
from ctrans.dynamics.norm import Norm
from ctrans.dynamics.sublayer import Sublayer
from ctrans.measure.forward.moments import token_lengths
from ctrans.model.initialisation import get_initialisation
from solvers import ConfigError

SLOPES: dict[str, float] = {"post": 0.0, "pre": -0.5, "peri": -0.5}
"""d log|dL/dW_2| / d log(depth) of the last layer: Xiong, theorem 1; `peri` is ours."""


def gains(initialisation: str, depth: int, width: int, hidden: int) -> tuple[float, float]:
    """a = d^2 s_V^2 s_O^2 and f = d d_ff s_1^2 s_2^2 / 2, with s the standard deviations of an
    entry of `INITIALISATIONS`. From an input of |z|^2 = d, attention adds at most a to E|x|^2/d and
    the FFN exactly f (Xavier with d_ff = d: 1 and 1/2). Attention adds a if all tokens are equal,
    and less if its average cancels.
    """
    rule = get_initialisation(initialisation)

    def variance(role: Role, fan_in: int, fan_out: int) -> float:
        return (rule.gain(role, depth) * rule.std(fan_in, fan_out)) ** 2

    attention = width**2 * variance("value", width, width) * variance("out", width, width)
    return (
        attention,
        width * hidden * variance("up", width, hidden) * variance("down", hidden, width) / 2,
    )


@dataclasses.dataclass(frozen=True)
class LastLayer:
    """|dL/dW_2|_F of a last FFN, its bound, and the bound as printed, which lacks the centring of
    LayerNorm.
    """

    measured: float
    bound: float
    printed: float


def last_layer_bound(sublayer: Sublayer, h: float, x: TokenRows, pull: TokenRows) -> LastLayer:
    """Bound |dL/dW_2|_F <= h gain sum_i |h_i| |dL/do_i| slope_i(N_out) slope_i(N_state), h_i the
    hidden features of token i and `pull` dL/do.

    slope_i(N) = max|gamma|/sigma_i <= max|gamma| sqrt(d)/|C v_i| at the norm's input v_i, and 1
    without a norm. So `pre` has 1, `post` sqrt(d)/|C (x + a)| and `peri` sqrt(d)/|C a| (Kim,
    proposition 3.1). The paper prints |v_i| for |C v_i|, which holds for RMSNorm only. Raises
    ConfigError for a map that is no FFN, or does not end in a linear map.
    """
    field = sublayer.field
    if sublayer.kind != "ffn" or not isinstance(field, HasOutputProjection):
        raise ConfigError(
            f"the last map is a {type(field).__name__}: Kim's proposition needs an FFN that ends in"
            " a linear map"
        )
    if sublayer.image is not None or sublayer.residual.jumps:
        raise ConfigError(
            "Kim's proposition needs a residual X + W f of one stream, whose W f is linear in the"
            " map's output"
        )
    with torch.no_grad():
        u = sublayer.given(x)
        features = sublayer.field.pre_projection(u)
        a = sublayer.field(u)
    with torch.enable_grad():
        a.requires_grad_()
        y = x + h * sublayer.raw_velocity(a, x)
        if sublayer.state_norm is None:
            o = y
        else:
            o = sublayer.state_norm(y)
        (at_a,) = torch.autograd.grad((o * pull).sum(), a)
    measured = float(torch.linalg.matrix_norm(at_a.flatten(0, -2).T @ features.flatten(0, -2)))
    with torch.no_grad():
        size = token_lengths(features) * token_lengths(pull)
        norms = []
        if sublayer.output_norm is not None:
            norms.append((sublayer.output_norm, a))
        if sublayer.state_norm is not None:
            norms.append((sublayer.state_norm, y))
        exact = math.prod(norm.slope(v) for norm, v in norms)
        as_printed = math.prod(_printed_slope(norm, v) for norm, v in norms)
        bound = float(h * sublayer.largest_gain * (size * exact).sum())
        printed = float(h * sublayer.largest_gain * (size * as_printed).sum())
    return LastLayer(measured, bound, printed)


def _printed_slope(norm: Norm, v: Tensor) -> Tensor:
    return norm.gamma.abs().max() * math.sqrt(v.shape[-1]) / token_lengths(v)
