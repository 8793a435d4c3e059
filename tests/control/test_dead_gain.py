"""A norm around the state with a dead gain: there is no ODE behind it, and what needs none is
certified all the same.
"""

import pytest
import torch

from ctrans.control.costate import continuous_or_discrete, costate
from ctrans.control.maximum_principle import maximum_principle
from ctrans.control.model_check import check_model
from ctrans.measure.forward.simulation import simulate
from solvers import ConfigError
from tests.helpers import small_model, tokens

TINY = 4.8e-33


def dying(*segments, value=TINY):
    model = small_model("post")
    for k in segments:
        model.depth.sublayers[k].state_norm.weight[5] = value
    return model


@pytest.mark.slow
@pytest.mark.parametrize("value", [TINY, 0.0])
def test_the_discrete_costate_serves_and_the_other_segments_are_certified(value):
    model, read = dying(3, value=value), tokens(1, 7)
    x, y = read[:, :-1], read[:, 1:]
    check = check_model(model, x, y, thorough=True)
    assert check.form == "discrete"
    assert "gamma[5]" in str(check.instead)
    assert list(check.missing) == ["segment 3 (ffn)"]
    assert [segment.segment for segment in check.segments] == [0, 1, 2, 4, 5]
    wanted = torch.autograd.grad(
        _loss(model, embedded := model.embed(x).requires_grad_(), y), embedded
    )[0]
    assert check.segments[0].costate_norm == pytest.approx(float(wanted.norm()), rel=1e-12)
    assert check.agrees, check.failures


def _loss(model, x0, y):
    return torch.nn.functional.cross_entropy(
        model.head(model.depth(x0)).flatten(0, -2), y.flatten()
    )


def test_a_model_without_such_a_gain_has_the_continuous_costate():
    read = tokens(1, 7)
    found, why = continuous_or_discrete(small_model("post"), read[:, :-1], read[:, 1:])
    assert (found.form, why) == ("continuous", None)


def test_where_nothing_can_be_certified_the_reason_is_raised():
    with pytest.raises(ConfigError, match=r"gamma\[5\]"):
        check_model(dying(*range(6)), tokens(1, 7)[:, :-1], tokens(1, 7)[:, 1:], thorough=True)


def test_the_maximum_principle_skips_that_segment_by_name():
    model, read = dying(3), tokens(1, 7)
    reading = maximum_principle(model.depth, costate(model, read[:, :-1], read[:, 1:]))
    assert list(reading.missing) == ["segment 3 (ffn)"]
    assert [value is None for value in reading.velocity_norm] == [False] * 3 + [True] + [False] * 2
    assert reading.alignment[3] is None
    assert len(reading.costate_norm) == 6


def test_a_simulation_says_that_there_is_no_ode_to_compare_with():
    found = simulate(dying(3), tokens(1, 7))
    assert found.distance == [None] * 7
    assert "gamma[5]" in found.missing["distance to the ODE"]
    assert not simulate(small_model("post"), tokens(1, 7)).missing


def test_tolerances_that_make_no_sense_are_refused_and_not_answered_by_the_discrete_costate():
    text = tokens(1, 7)
    with pytest.raises(ConfigError, match="rtol = -1"):
        continuous_or_discrete(small_model("peri"), text[:, :-1], text[:, 1:], rtol=-1.0)
