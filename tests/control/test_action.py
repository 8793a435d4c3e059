"""The action of paths: straight ones attain the least, and no path has less."""

import dataclasses
import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ctrans.base.draw import Draw
from ctrans.base.json_values import plain
from ctrans.control import action as action_module
from ctrans.control.action import ActionByDepth, action_of, path_action
from ctrans.examine.simulated import Simulated, measured, simulated_in
from ctrans.measure.forward.simulation import simulate
from ctrans.measure.walk import walk
from solvers import ConfigError, Segment, solve
from tests.helpers import NAMES, small_model, tokens

LENGTHS = (0.5, 1.0, 0.25, 2.0)


def straight(lengths=LENGTHS, seed=0):
    """Tokens that move straight at constant speed, each in its own direction."""
    x0 = Draw(seed).normal(2, 3, 5)
    velocity = Draw(seed + 100).normal(2, 3, 5)
    times = [0.0, *itertools.accumulate(lengths)]
    return [x0 + t * velocity for t in times]


@given(st.lists(st.floats(0.01, 10), min_size=1, max_size=6), st.integers(0, 1000))
@settings(max_examples=15)
def test_straight_paths_at_constant_speed_attain_one(lengths, seed):
    found = action_of(straight(lengths, seed), lengths)
    assert found.straightness == pytest.approx(1, rel=1e-12)
    assert found.least_straight == pytest.approx(1, rel=1e-12)
    assert found.shares == pytest.approx([h / sum(lengths) for h in lengths], rel=1e-9)
    assert found.opposed is None


@pytest.mark.parametrize("method", ["euler", "rk4"])
def test_the_flow_of_a_constant_field_attains_one(method):
    velocity = Draw(3).normal(2, 3, 5)
    segments = [Segment(t, t + 1, lambda t, x: velocity) for t in range(3)]
    flow = solve(segments, Draw(4).normal(2, 3, 5), method=method, save="segments")
    assert action_of(flow.states, (1.0, 1.0, 1.0)).straightness == pytest.approx(1, rel=1e-12)


def test_a_straight_path_at_another_speed_has_more_action():
    x = torch.tensor([[[0.0]], [[1.0]], [[4.0]]], dtype=torch.float64)
    # 2 (1 + 9) against 16
    found = action_of(list(x), (1.0, 1.0))
    assert found.action == pytest.approx(20)
    assert found.displacement == pytest.approx(16)
    assert found.straightness == pytest.approx(0.8)
    # at constant speed, 1 in 1 and 3 in 3, there is none
    assert action_of(list(x), (1.0, 3.0)).straightness == pytest.approx(1)


@given(st.integers(1, 6), st.integers(1, 5), st.integers(0, 1000))
@settings(max_examples=50)
def test_no_path_has_less_action_than_its_displacement_and_than_the_transport(
    segments, count, seed
):
    lengths = Draw(seed).normal(segments).exp().tolist()
    states = [Draw(seed + k).normal(count, 3) for k in range(segments + 1)]
    found = action_of(states, lengths)
    path = torch.stack(states)
    displacement = (path[-1] - path[0]).square().sum(-1)
    assert (path_action(path, lengths) >= displacement * (1 - 1e-12)).all()
    assert found.action >= found.displacement * (1 - 1e-12)
    assert found.displacement >= found.transport * (1 - 1e-12)
    by_hand = min(
        float((states[-1][list(order)] - states[0]).square().sum(-1).mean())
        for order in itertools.permutations(range(count))
    )
    assert found.transport == pytest.approx(by_hand, rel=1e-10)
    assert sum(found.shares) == pytest.approx(1, abs=1e-8)


def test_the_action_is_the_integral_of_the_velocity_along_the_path():
    """T int |v|^2 dt by a sum over many points of time."""
    states = [Draw(k).normal(1, 2, 3) for k in range(len(LENGTHS) + 1)]
    points = 7
    total = 0.0
    for x, y, h in zip(states, states[1:], LENGTHS, strict=False):
        for i in range(points):
            before = torch.lerp(x, y, i / points)
            after = torch.lerp(x, y, (i + 1) / points)
            speed = (after - before) / (h / points)
            total += float(speed.square().sum(-1).mean()) * h / points
    assert action_of(states, LENGTHS).action == pytest.approx(sum(LENGTHS) * total, rel=1e-12)


def test_sizes_scale_the_action_by_their_square_and_times_do_not_change_it():
    states = [Draw(k).normal(2, 3, 4) for k in range(len(LENGTHS) + 1)]
    once = action_of(states, LENGTHS)
    larger = action_of([3 * x + 1 for x in states], LENGTHS)
    slower = action_of(states, [2 * h for h in LENGTHS])
    for name in ("action", "displacement", "transport"):
        assert getattr(larger, name) == pytest.approx(9 * getattr(once, name), rel=1e-10)
        assert getattr(slower, name) == pytest.approx(getattr(once, name), rel=1e-10)
    assert larger.straightness == pytest.approx(once.straightness, rel=1e-10)
    assert larger.shares == pytest.approx(once.shares, rel=1e-9)
    backwards = action_of(states[::-1], LENGTHS[::-1])
    assert backwards.action == pytest.approx(once.action, rel=1e-12)


def test_the_opposed_pair_is_the_one_that_undoes_most():
    moves = torch.tensor([[3.0, 0], [0, 1], [-2, 0], [0, -0.5], [1, 1]], dtype=torch.float64)
    path = torch.cat([torch.zeros(1, 2, dtype=torch.float64), moves.cumsum(0)]).unsqueeze(1)
    found = action_of(list(path), (1.0,) * 5, names=["a", "b", "c", "d", "e"])
    assert found.opposed == [0, 2]
    assert found.cosine == pytest.approx(-1)
    # the end is (2, 1.5)
    expected = [6 / 6.25, 1.5 / 6.25, -4 / 6.25, -0.75 / 6.25, 3.5 / 6.25]
    assert found.shares == pytest.approx(expected)


@pytest.mark.parametrize("placement", NAMES)
def test_models_obey_the_inequalities(placement):
    model = small_model(placement)
    (found,) = walk(model, tokens(), None, [ActionByDepth()])
    assert found.action >= found.displacement
    assert found.displacement >= found.transport * (1 - 1e-12)
    assert 0 < found.least_straight <= found.straightness < 1
    assert sum(found.shares) == pytest.approx(1)
    if model.depth.sublayers[0].state_norm is None:
        # T sum h |v|^2 of the model's own velocities
        x = model.embed(tokens())
        total = 0.0
        for sublayer, h in zip(model.depth.sublayers, model.depth.lengths, strict=True):
            velocity = sublayer(x)
            total += h * float(velocity.square().sum(-1).mean())
            x = x + h * velocity
        assert found.action == pytest.approx(model.depth.times[-1] * total, rel=1e-9)


def test_padding_is_no_token():
    states = [Draw(k).normal(2, 3, 4) for k in range(3)]
    kept = torch.tensor([[True, True, False], [True, False, False]])
    of_text = action_of([x[kept] for x in states], (1.0, 2.0))
    found = action_of(states, (1.0, 2.0), kept=kept)
    assert dataclasses.replace(found) == of_text


def test_chunks_of_tokens_give_the_same(monkeypatch):
    states = [Draw(k).normal(2, 3, 4) for k in range(4)]
    whole = action_of(states, (1.0, 2.0, 1.0))
    monkeypatch.setattr(action_module, "ROWS", 2)
    in_parts = action_of(states, (1.0, 2.0, 1.0))
    assert in_parts.action == pytest.approx(whole.action, rel=1e-12)
    assert in_parts.shares == pytest.approx(whole.shares, rel=1e-10)
    monkeypatch.setattr(action_module, "MOST_TOKENS", 5)
    found = action_of(states, (1.0, 2.0, 1.0))
    assert found.transport is None
    assert "at most 5" in found.missing["W_2^2 of the tokens"]


def test_what_cannot_be_measured_has_its_reason():
    x = Draw(0).normal(2, 3)
    still = action_of([x, x, x], (1.0, 1.0))
    assert (still.action, still.straightness, still.shares) == (0, None, [])
    assert still.missing["straightness"] == "no token moves"
    back = action_of([x, x + 1, x], (1.0, 1.0))
    assert back.straightness == 0
    assert back.shares == []
    assert "end where they began" in back.missing["share of the displacement"]
    broken = action_of([x, x / 0], (1.0,))
    assert broken.action is None
    assert "not finite" in broken.missing["action"]
    with pytest.raises(ConfigError, match="3 states and 1 lengths"):
        action_of([x, x, x], (1.0,))


def test_the_table_has_it_and_the_json_keeps_it():
    instrument = ActionByDepth()
    simulation = simulate(small_model("pre"), tokens(), reference=False, instruments=[instrument])
    simulated = Simulated(simulation, action=instrument.figures())
    table = measured({"pre": simulated})
    assert len(table.of("share of the displacement")) == 6
    assert {"straightness", "action", "squared displacement"} <= set(table.measures)
    again = simulated_in(plain({**vars(simulation), "action": simulated.action}))
    assert again.action == simulated.action
    opposed = dataclasses.replace(simulated.action, opposed=[1, 4], cosine=-0.5)
    notes = dataclasses.replace(simulated, action=opposed).reasons
    assert (
        "sublayers 1 ffn and 4 attention undo each other most: the cosine of their displacements is"
        " -0.50"
    ) in notes


def test_a_path_that_breaks_off_has_no_action():
    model = small_model("none", dt=1.0)
    with torch.no_grad():
        model.depth.sublayers[3].field.output_projection.weight.fill_(torch.inf)
    instrument = ActionByDepth()
    simulate(model, tokens(), reference=False, instruments=[instrument])
    assert instrument.figures().missing == {"action": "the path ends at segment 3 of 6"}
