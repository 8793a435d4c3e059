"""Theory, section 6: forward bounds, printed and corrected. (That no bound is ever exceeded is in
tests/measure; growth by depth is in ctrans/theory.)"""

import math

import pytest

from ctrans.measure.forward.bounds import forward_bounds
from ctrans.measure.forward.moments import moments
from tests.helpers import small_model, tokens


def test_theorem_4_sharper_form_uses_the_start_and_each_segments_own_gain():
    model = small_model("peri", scale=0.5)
    states = model.trajectory(tokens()).states
    bounds = forward_bounds(model.depth, states)
    norms = [s.output_norm for s in model.depth.sublayers]
    expected = moments(states[0]).mean_abs + 0.1 * sum(
        float(n.gamma.abs().max() + n.beta.abs().max()) for n in norms
    )
    assert bounds.mean_abs[-1] == pytest.approx(expected, rel=1e-12)
    gmax, bmax = (
        max(float(getattr(n, part).abs().max()) for n in norms) for part in ("gamma", "beta")
    )
    seed = float(states[0].detach().norm()) / math.sqrt(states[0].numel()) + 2 * 3 * 0.1 * (
        gmax + bmax
    )
    assert bounds.seed_mean_abs[-1] == pytest.approx(seed, rel=1e-12)
    assert moments(states[-1]).mean_abs <= expected < 0.9 * seed
