import dataclasses
import functools
import json
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ctrans.report.files import to_json
from ctrans.stability.screening.case import Finding, StepPlan, spread
from ctrans.stability.screening.score import decades, geometric_mean, ingredient_score, overall, step_score
from ctrans.stability.screening.screen import EFFORTS, STEPS, screen, visits
from ctrans.walk import Instrument, states_of
from solvers import ConfigError, SolveError
from tests.helpers import NAMES, small_model, tokens, unchecked

TINY = dataclasses.replace(EFFORTS["quick"], tokens=6, certified=2, layers=2)


def tiny(name, **changes):
    return small_model(name, **{"depth": 2, **changes})


def screening(model, effort=TINY, **inputs):
    text = tokens(2, 9)
    return screen(model, text[:, :-1], text[:, 1:], effort, **inputs)


@functools.cache
def of_placement(name):
    """The screening of that placement's model, and how often it told its progress."""
    done = []
    return screening(tiny(name), other=tokens(2, 8, seed=5), progress=done.append), len(done)


@pytest.mark.parametrize("name", NAMES)
def test_every_step_answers_for_every_placement(name):
    result, done = of_placement(name)
    assert done == visits(tiny(name))
    assert list(result.findings) == list(STEPS)
    assert all(finding.verdict not in ("n/a", "unknown") for finding in result.findings.values())
    assert result.score.missing == []
    assert 0 < result.score.value <= 1
    assert result.broken is None
    json.loads(to_json(result), parse_constant=pytest.fail)


def test_theorys_verdicts_tell_placements_apart():
    findings = {name: of_placement(name)[0].findings for name in ("none", "pre", "peri", "post")}
    assert {name: f["well-posedness"].verdict for name, f in findings.items()} == {
        "none": "degenerate",
        "pre": "degenerate",
        "peri": "well-posed for bounded gains",
        "post": "degenerate",
    }
    assert findings["peri"]["forward"].verdict == findings["post"]["forward"].verdict == "held"
    assert findings["pre"]["forward"].verdict == "follows weights"
    assert findings["none"]["forward"].verdict == "outruns weights"
    slopes = {name: f["backward"].ingredients["|dv/dX| in weights"] for name, f in findings.items()}
    assert slopes["pre"] == pytest.approx(1, abs=0.02)
    assert slopes["peri"] == pytest.approx(0, abs=0.02)


def test_condition_numbers_are_those_of_the_dense_jacobian():
    model = tiny("peri")
    text = tokens(1, 7)
    effort = dataclasses.replace(TINY, tolerance=1e-4)
    result = screen(model, text[:, :-1], text[:, 1:], effort).findings["backward"].result
    states = states_of(model.depth, model.embed(text[:, :-1]))
    x = states[0]
    jacobian = torch.autograd.functional.jacobian(model.depth, x).reshape(x.numel(), x.numel())
    exact = float(torch.linalg.matrix_norm(jacobian, 2) * x.norm() / states[-1].norm())
    assert result.condition[0] == pytest.approx(exact, rel=2e-3)
    assert len(result.condition) == model.depth.blocks


def test_the_score_falls_with_every_ingredient_and_is_their_geometric_mean():
    finding = Finding("held", "", "", {"a": 1.0, "b": 0.0, "c": math.nan})
    assert finding.score == pytest.approx(math.sqrt(0.5))
    score = overall({"one": {"a": 0.0}, "two": {"b": 3.0, "c": math.nan}, "three": {}})
    assert score.value == pytest.approx(0.5)
    assert score.missing == ["three", "two: c"]
    assert overall({"one": {"a": math.nan}}).value is None
    assert overall({"one": {"a": math.inf}, "two": {"a": 0.0}}).value == 0


@given(st.lists(st.floats(0, 1e300), min_size=1, max_size=6), st.integers(0, 5), st.floats(0, 1e3))
def test_scores_lie_between_0_and_1_and_never_rise_with_an_ingredient(ks, place, more):
    named = {str(i): k for i, k in enumerate(ks)}
    worse = {**named, str(place % len(ks)): ks[place % len(ks)] + more}
    assert 0 <= step_score(worse) <= step_score(named) <= 1


def test_ingredients_at_their_ends():
    assert [ingredient_score(k) for k in (-3.0, 0.0, 1.0, math.inf)] == [1, 1, 0.5, 0]
    assert [decades(ratio) for ratio in (100.0, 1.0, 0.0, math.inf, math.nan)] == [2, 0, -math.inf, math.inf, math.inf]
    assert step_score({"a": math.nan}) is None
    assert geometric_mean([]) is None


def test_larger_weights_lower_the_score_of_pre_but_hardly_that_of_peri():
    def with_larger(name):
        model = tiny(name)
        for sublayer in model.depth.sublayers:
            sublayer.field.last.weight.mul_(1000)
        return screening(model).score.value

    lost = {name: of_placement(name)[0].score.value - with_larger(name) for name in ("pre", "peri")}
    assert lost["pre"] > 0.1
    assert abs(lost["peri"]) < 0.05


def test_non_finite_activations_are_reported_with_the_layer_and_the_rest_is_computed():
    model = tiny("pre")
    model.depth.sublayers[3].field.last.weight.fill_(torch.inf)
    result = screening(model)
    assert result.broken == 3
    assert result.score.value == 0
    forward = result.findings["forward"]
    assert (forward.verdict, "segment 3" in forward.why) == ("non-finite", True)
    assert len(forward.result.mean_abs) == 4
    sublayers = result.findings["backward"].result.sensitivity.sublayers
    assert [each.value is not None for each in sublayers] == [True] * 3 + [False] * len(sublayers[3:])
    assert len(result.findings["attention"].result.layers) == 2
    assert result.findings["well-posedness"].verdict == "n/a"
    assert "segment 3" in result.findings["well-posedness"].why


@pytest.mark.parametrize(("name", "where"), [("peri", "output_norm"), ("post", "state_norm")])
def test_a_zero_gain_stops_only_the_steps_that_need_its_inverse(name, where):
    model = tiny(name)
    getattr(model.depth.sublayers[2], where).weight[3] = 0
    result = screening(model)
    findings = result.findings
    assert findings["forward"].score is not None
    assert findings["transport"].score is not None
    assert findings["well-posedness"].score is not None
    if name == "post":
        # the tangent space of segment 2 is not there, so neither is its sensitivity nor the slope of it
        assert "gamma[3] = 0" in findings["backward"].result.sensitivity.sublayers[2].note
        assert any("segment 2 is unknown" in note for note in findings["backward"].notes)


def test_normalised_queries_and_keys_leave_out_the_attention_step_alone():
    result = screening(tiny("peri", qk_norm=True))
    attention = result.findings["attention"]
    assert (attention.verdict, "qk_norm" in attention.why) == ("n/a", True)
    assert result.score.missing == ["attention"]
    assert result.score.value == pytest.approx(geometric_mean(result.score.steps.values()))


@pytest.mark.parametrize("name", ["pre", "post"])
@pytest.mark.parametrize(
    ("changes", "length"),
    [({"heads": 1, "depth": 1}, 4), ({"width": 2, "heads": 1, "depth": 1}, 4), ({"depth": 1}, 1)],
    ids=["one head", "width 2", "one token"],
)
def test_the_smallest_shapes_are_screened(name, changes, length):
    text = tokens(2, length + 1)
    result = screen(tiny(name, **changes), text[:, :-1], text[:, 1:], TINY)
    assert result.score.value is not None
    assert result.findings["forward"].score is not None


def test_tokens_that_are_all_equal_and_constant_have_no_spread_and_are_no_error():
    model = tiny("pre")
    model.token_embedding.weight.fill_(0.5)
    model.position_embedding.weight.zero_()
    result = screening(model)
    assert result.findings["forward"].score is not None
    # equal embeddings cannot be told apart, so substitution moves nothing
    assert "substitution" not in result.findings["transport"].result.relative


def test_one_hot_attention_has_theta_0_and_no_unknown_score():
    model = tiny("pre")
    for sublayer in list(model.depth.sublayers)[::2]:
        sublayer.field.qkv.weight[:32].mul_(1e6)
    attention = screening(model).findings["attention"]
    assert min(min(layer.theta_min) for layer in attention.result.layers) == pytest.approx(0, abs=1e-12)
    assert attention.score is not None


def test_the_same_seed_gives_the_same_screening():
    first, second = (to_json(screening(tiny("peri"), seed=3)) for _ in range(2))
    assert first == second


def test_a_step_that_fails_says_so_and_the_others_run(monkeypatch):
    class Breaks(Instrument):
        def __init__(self, where):
            self.where = where

        def begin(self, depth, x0):
            self.fail("begin")

        def forward(self, at):
            self.fail("forward")

        def backward(self, at):
            self.fail("backward")

        def figures(self):
            self.fail("figures")

        def fail(self, where):
            if where == self.where:
                raise SolveError(f"it broke in {where}")

    def in_plan(case):
        raise SolveError("it broke in plan")

    def plan(where):
        def breaks(case):
            instrument = Breaks(where)
            return StepPlan({"part": [instrument]}, lambda: Finding("fine", str(instrument.figures()), "it is"))

        return breaks

    places = ("begin", "forward", "backward", "figures")
    for where, broken in {"plan": in_plan, **{where: plan(where) for where in places}}.items():
        monkeypatch.setitem(STEPS, "backward", dataclasses.replace(STEPS["backward"], plan=broken))
        result = screening(tiny("peri"))
        assert (result.findings["backward"].verdict, result.findings["backward"].why) == ("n/a", f"it broke in {where}")
        assert result.score.missing == ["backward"]


def test_targets_without_a_loss_stop_only_what_looks_back():
    text = tokens(2, 8)
    findings = screen(tiny("pre"), text, torch.full_like(text, -1), TINY).findings
    assert "every target is -1" in findings["well-posedness"].why
    assert findings["forward"].score is not None
    assert findings["transport"].score is not None
    assert any("every target is -1" in note for note in findings["backward"].notes)


def test_shapes_that_do_not_fit_are_named():
    text = tokens(2, 9)
    with pytest.raises(ConfigError, match="other text has shape"):
        unchecked(screen)(tiny("peri"), text[:, :-1], text[:, 1:], TINY, other=tokens(2, 5))


def test_chosen_segments_are_spread_and_hold_the_ends():
    assert spread(24, 4) == [0, 8, 15, 23]
    assert spread(2, 5) == [0, 1]
    assert spread(1, 3) == [0]
