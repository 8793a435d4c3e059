"""Theory, section 6: forward bounds, printed and corrected. (That no bound is ever exceeded is in tests/stability.)"""

import math

import numpy as np
import pytest

from ctrans.stability.forward.bounds import forward_bounds
from ctrans.stability.forward.moments import moments
from tests.helpers import small_model, tokens


def test_theorem_4_sharper_form_uses_the_start_and_each_segments_own_gain():
    model = small_model("peri", scale=0.5)
    states = model.trajectory(tokens()).states
    bounds = forward_bounds(model.depth, states)
    norms = [s.output_norm for s in model.depth.sublayers]
    expected = moments(states[0]).mean_abs + 0.1 * sum(float(n.gamma.abs().max() + n.beta.abs().max()) for n in norms)
    assert bounds.mean_abs[-1] == pytest.approx(expected, rel=1e-12)
    gmax, bmax = (max(float(getattr(n, part).abs().max()) for n in norms) for part in ("gamma", "beta"))
    seed = float(states[0].detach().norm()) / math.sqrt(states[0].numel()) + 2 * 3 * 0.1 * (gmax + bmax)
    assert bounds.seed_mean_abs[-1] == pytest.approx(seed, rel=1e-12)
    assert moments(states[-1]).mean_abs <= expected < 0.9 * seed


def test_pre_ln_with_bounded_weights_grows_at_most_linearly_where_the_seed_is_exponential():
    growth = {}
    for blocks in (8, 16, 32):
        model = small_model("pre", depth=blocks, dt=1.0, scale=0.0)
        states = model.trajectory(tokens()).states
        bounds = forward_bounds(model.depth, states)
        growth[blocks] = (moments(states[-1]).rms, bounds.rms[-1], bounds.seed_mean_abs[-1])
        for kind in (0, 1):  # each attention adds about as much as the first, and each FFN
            increments = np.diff(bounds.rms)[kind::2]
            assert increments == pytest.approx(increments[0], rel=0.5)
    measured, sharp, seed = zip(*growth.values(), strict=True)
    assert sharp[2] / sharp[1] == pytest.approx(2, rel=0.1)
    assert seed[2] / seed[1] > 1e3
    assert measured[2] / measured[1] < 2.2
    # the sharper bound is the one that is closer to what is measured
    assert all(m <= s < e for m, s, e in growth.values())
