"""Section 6: growth of hidden states by residuals with scales and streams."""

from __future__ import annotations

import math

from ctrans.base.draw import Draw
from ctrans.dynamics.residual import Streams
from ctrans.measure.walk import states_of
from ctrans.theory.random_models import (
    describe_model,
    random_model,
)
from ctrans.theory.statement import Trial, at_most, equal, not_none, statement

SECTION = 6


@statement(
    "depth-scaled-growth",
    "ctrans, on LayerNorm scaling",
    "pre with s_l = l^(-1/2), maps with |f(x)_i| <= a max_j |x_j|: |x_D| <= |x_0| + 4 dt a g sqrt(d"
    " D), where plain pre has D",
    share=0.2,
)
def scaled_growth(draw: Draw) -> Trial:
    """Tokens of `pre` with LayerNorm scaling, maps without offsets: at most |x_0| + 4 dt a g sqrt(d
    D), a g the largest there.
    """
    depth = 1 + draw.integer(40)
    model = random_model(
        draw, "pre", residual="depth_scaled", depth=depth, bias=False, norm="rmsnorm"
    )
    states = states_of(model.depth, draw.of_any_size(1, 4, 8))
    gains = []
    for part in model.depth.sublayers:
        largest_gamma = float(not_none(part.input_norm).gamma.abs().max())
        gains.append(part.field.bound().gain * largest_gamma)
    gain = max(gains)
    longest = [float(x.norm(dim=-1).max()) for x in (states[0], states[-1])]
    return at_most(
        longest[1],
        longest[0] + 4 * model.config.dt * gain * math.sqrt(8 * depth),
        f"the longest token, {describe_model(model)}",
    )


@statement(
    "mean-stream",
    "ctrans, on mHC",
    "doubly stochastic mixing conserves the mean over the streams: it moves by dt mean(b) v a"
    " segment",
    1e-12,
    0.2,
)
def mean_stream(draw: Draw) -> Trial:
    """After a step of the model the streams' mean is their mean before plus dt mean(b) v."""
    model = random_model(draw, draw.choice(("pre", "peri", "none")), residual="mhc")
    sublayer = draw.choice(model.depth.sublayers)
    streams = model.config.state_streams
    assert isinstance(sublayer.residual, Streams), "it was asked for"
    x = draw.of_any_size(1, 4, 8 * streams)
    v = sublayer.field(sublayer.given(sublayer.enter(x)))
    if sublayer.output_norm is not None:
        v = sublayer.output_norm(v)
    dt = model.config.dt
    before = x.unflatten(-1, (streams, 8)).mean(-2)
    after = sublayer.step(x, dt).unflatten(-1, (streams, 8)).mean(-2)
    return equal(after, before + dt * sublayer.residual.writes.mean() * v, describe_model(model))
