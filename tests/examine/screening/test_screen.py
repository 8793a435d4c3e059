import dataclasses
import functools
import json
import math

import pytest
import torch

from ctrans.dynamics.depth import spread
from ctrans.examine.screened import measured as table_of
from ctrans.examine.screening.case import StepPlan, StepVerdict
from ctrans.examine.screening.screen import EFFORTS, STEPS, screen
from ctrans.examine.screening.screening_checks import CHECKS, flags, limits_of, measures_of_steps
from ctrans.measure.walk import Instrument, states_of
from ctrans.model.config import GPTConfig
from ctrans.model.gpt import GPT
from ctrans.report.files import to_json
from solvers import ConfigError, SolveError
from tests.helpers import NAMES, small_model, tokens

TINY = dataclasses.replace(EFFORTS["quick"], tokens=6, certified=2, layers=2)
ALL = dataclasses.replace(TINY, curvature=True, lanczos=8)


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


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_every_step_answers_for_every_placement(name):
    result, done = of_placement(name)
    assert done == 2 * len(tiny(name).depth.sublayers)
    assert list(result.steps) == list(STEPS)
    assert not result.missing
    assert all(finding.verdict != "unknown" for finding in result.steps.values())
    known = {
        what: value
        for finding in result.steps.values()
        for what, value in finding.quantities.items()
    }
    assert set(known) <= set(measures_of_steps())
    assert not any(map(math.isnan, known.values()))
    assert result.broken is None
    json.loads(to_json(result), parse_constant=pytest.fail)


@pytest.mark.slow
def test_theorys_verdicts_tell_placements_apart():
    findings = {name: of_placement(name)[0].steps for name in ("none", "pre", "peri", "post")}
    assert {name: f["well-posedness"].verdict for name, f in findings.items()} == {
        "none": "degenerate",
        "pre": "degenerate",
        "peri": "well-posed for bounded gains",
        "post": "degenerate",
    }
    exponents = {name: f["forward"].quantities["|x| in weights"] for name, f in findings.items()}
    assert exponents["peri"] == pytest.approx(0, abs=0.02)
    assert exponents["post"] == pytest.approx(0, abs=0.25)
    assert exponents["pre"] == pytest.approx(1, abs=0.02)
    assert findings["none"]["forward"].flags["|x| in weights"] == "outruns weights"
    slopes = {name: f["backward"].quantities["|dv/dX| in weights"] for name, f in findings.items()}
    assert slopes["pre"] == pytest.approx(1, abs=0.02)
    assert slopes["peri"] == pytest.approx(0, abs=0.02)


def test_targets_of_which_none_counts_are_an_error():
    text = tokens(2, 8)
    with pytest.raises(ConfigError, match="every target is -1"):
        screen(tiny("pre"), text, torch.full_like(text, -1), TINY)


def test_figures_of_states_and_layers_are_in_the_table_once_at_their_depth():
    model = tiny("peri")
    text = tokens(2, 8)
    screening = screen(model, text, text.roll(-1, 1), TINY)
    table = table_of({"tiny": screening})
    similarities = table.of("token similarity")
    assert [row.depth for row in similarities] == [*range(len(model.depth.sublayers) + 1)]
    last = screening.steps["forward"].quantities["token similarity"]
    assert similarities[-1].value == pytest.approx(last, rel=1e-9)
    assert len(table.of("median entropy of a head")) == 1
    assert len(table.of("least entropy of a head")) == len(model.depth.sublayers) // 2


@pytest.mark.slow
def test_condition_numbers_are_those_of_the_dense_jacobian():
    model = tiny("peri")
    text = tokens(1, 7)
    effort = dataclasses.replace(TINY, tolerance=1e-4)
    result = screen(model, text[:, :-1], text[:, 1:], effort).steps["backward"].result
    states = states_of(model.depth, model.embed(text[:, :-1]))
    x = states[0]
    jacobian = torch.autograd.functional.jacobian(model.depth, x).reshape(x.numel(), x.numel())
    exact = float(torch.linalg.matrix_norm(jacobian, 2) * x.norm() / states[-1].norm())
    assert result.condition[0] == pytest.approx(exact, rel=2e-3)
    assert len(result.condition) == model.depth.blocks


@pytest.mark.slow
@pytest.mark.parametrize("work", ["quick", "full"])
def test_the_condition_is_the_worst_sequences_in_whatever_order_they_are_given(work):
    """In full |J_{0:D}| of every sequence is what the search for its worst direction found."""
    model = tiny("pre")
    text = tokens(3, 6, seed=4) % 5
    text[2] += 5  # one sequence is unlike the others
    model.token_embedding.weight[5:] *= 0.1
    model.position_embedding.weight.zero_()
    effort = dataclasses.replace({"quick": TINY, "full": ALL}[work], tolerance=1e-6, several=4)
    x = model.embed(text[:, :-1])
    exact = []
    for each in x:
        dense = torch.autograd.functional.jacobian(model.depth, each[None]).reshape(
            each.numel(), each.numel()
        )
        exact.append(
            float(torch.linalg.matrix_norm(dense, 2) * each.norm() / model.depth(each[None]).norm())
        )
    assert max(exact) > 1.5 * min(exact)
    whys = []
    for order in ([0, 1, 2], [2, 0, 1], [1, 2, 0]):
        found = screen(model, text[order, :-1], text[order, 1:], effort).steps["backward"]
        assert found.result.sensitivity.conditions[0] == pytest.approx(
            [exact[i] for i in order], rel=1e-4
        )
        assert found.result.condition[0] == pytest.approx(max(exact), rel=1e-4)
        assert found.quantities["condition"] == max(found.result.condition)
        whys.append(found.why.split(",")[0])
    assert len(set(whys)) == 1
    assert "in the worst of 3 sequences" in whys[0]


@pytest.mark.slow
def test_where_graphs_of_several_sequences_have_no_room_the_first_one_counts_and_it_is_said(
    monkeypatch,
):
    model, text = tiny("pre"), tokens(3, 6, seed=4)
    monkeypatch.setattr("ctrans.examine.screening.case.AT_ONCE", 2 * 5 * model.config.width)
    effort = dataclasses.replace(TINY, tolerance=1e-6, several=4)
    two = screen(model, text[:, :-1], text[:, 1:], effort).steps["backward"]
    one = screen(model, text[:, :-1], text[:, 1:], dataclasses.replace(effort, several=1)).steps[
        "backward"
    ]
    assert "in the worst of 2 sequences" in two.why
    first = [each[0] for each in one.result.sensitivity.conditions]
    assert [each[0] for each in two.result.sensitivity.conditions] == pytest.approx(first, rel=1e-4)
    assert "in the first sequence" in one.why


@pytest.mark.slow
def test_a_full_screening_knows_every_quantity():
    result = screening(tiny("pre"), ALL)
    known = {
        what: value
        for finding in result.steps.values()
        for what, value in finding.quantities.items()
    }
    assert set(known) == set(measures_of_steps())
    assert not any(map(math.isnan, known.values()))
    assert set(result.steps["backward"].errors) == {"log stretch", "log stretch, deviation"}


def test_limits_have_two_sides_and_nan_is_not_known():
    values = (0.099, 0.1, 100.0, 100.1, math.inf, math.nan)
    found = [flags({"condition": value}).get("condition", "") for value in values]
    assert found == ["forgets its input", "", "", "explodes", "explodes", ""]
    assert flags({"condition": 1000.0, "token similarity": 0.5, "of nobody": 3.0}) == {
        "condition": "explodes"
    }
    assert limits_of("condition") == {
        "low": 0.1,
        "below": "forgets its input",
        "high": 100,
        "above": "explodes",
        "mark": "bad",
    }
    assert limits_of("W_2 in weights")["mark"] == "note"
    shown = {name: quantity.shown for name, quantity in measures_of_steps().items()}
    assert [
        shown["condition"](1234.5),
        shown["token similarity"](-1e-9),
        shown["condition"](math.nan),
    ] == [
        "1.23e+03",
        "0.000",
        "unknown",
    ]
    assert shown["log stretch"](1.234, 0.056) == "1.23 ± 0.06"
    assert shown["loss over guessing"](7157443.545) == "7.16e+06"


def test_findings_of_a_screening_are_its_flags_the_most_severe_first():
    result = screening(tiny("none", initialisation="large"))
    assert [CHECKS[each.check].quantity for each in result.findings] != []
    judged_twice = {
        check.quantity for check in CHECKS.values() if "diagnosis" in check.topics
    }  # findings of the diagnosis of the same walk
    assert {
        CHECKS[each.check].quantity: CHECKS[each.check].verdict for each in result.findings
    } == {name: word for name, word in result.flags.items() if name not in judged_twice}
    single = {finding.check for finding in result.diagnosis.findings}
    for name in result.flags.keys() & judged_twice:
        assert single & {word for word, check in CHECKS.items() if check.quantity == name}
    severities = [each.severity for each in result.findings]
    assert severities == sorted(severities, reverse=True)  # serious before note
    assert all(
        each.topic == "screening" and each.impact and each.remediation for each in result.findings
    )


def trained_as_by_default(placement, **changes):
    """What `ctrans train` trains, smaller."""
    sizes = {
        "depth": 4,
        "width": 64,
        "context": 64,
        "dt": 0.1,
        "initialisation": "xavier",
        "embedding_std": 0.1,
    }
    return (
        GPT(GPTConfig(placement=placement, **{**sizes, **changes})).double().requires_grad_(False)
    )


def outside(model):
    text = torch.randint(
        0, model.config.vocab_size, (2, 25), generator=torch.Generator().manual_seed(0)
    )
    return screen(
        model,
        text[:, :-1],
        text[:, 1:],
        dataclasses.replace(EFFORTS["quick"], certified=1, starts=2),
    ).flags


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("changes", [{}, {"dt": 1.0}], ids=["dt 0.1", "dt 1"])
def test_ordinary_networks_are_called_nothing(name, changes):
    found = outside(trained_as_by_default(name, **changes))
    if name == "none":  # without norms every layer multiplies by c what it is given
        assert [found.pop(what) for what in ("|x| in weights", "W_2 in weights")] == [
            "outruns weights"
        ] * 2
    assert found == {}


@pytest.mark.slow
def test_a_network_that_does_nothing_is_called_so():
    assert outside(trained_as_by_default("pre", dt=1e-6)) == {
        "added by depth": "does nothing",
        "Adam, least": "does not learn",
        "SGD, least": "does not learn",
    }
    still = trained_as_by_default("pre")
    for sublayer in still.depth.sublayers:
        for parameter in sublayer.field.output_projection.parameters():
            parameter.zero_()
    assert outside(still)["added by depth"] == "does nothing"
    quiet = trained_as_by_default("peri")
    for sublayer in quiet.depth.sublayers:
        sublayer.output_norm.weight.mul_(1e-3)
    assert outside(quiet)["added by depth"] == "does nothing"


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_embeddings_of_size_one_start_worse_than_guessing_and_are_called_so(name):
    model = trained_as_by_default(name, embedding_std=1.0)
    assert outside(model)["loss over guessing"] == "starts worse than guessing"


@pytest.mark.slow
def test_a_network_that_explodes_is_called_so():
    model = trained_as_by_default("none", initialisation="he", embedding_std=1.0, dt=1.0)
    found = outside(model)
    assert found["growth exponent"] == "explodes"
    assert found["|x| in weights"] == "outruns weights"


@pytest.mark.slow
def test_tokens_that_become_one_are_called_collapsed():
    model = trained_as_by_default("peri")
    for sublayer in model.depth.sublayers:
        sublayer.output_norm.weight.mul_(0.01)
        sublayer.output_norm.bias.fill_(10.0)
    assert outside(model)["token similarity"] == "tokens collapse"


@pytest.mark.slow
def test_non_finite_activations_are_reported_with_the_layer_and_the_rest_is_computed():
    model = tiny("pre")
    model.depth.sublayers[3].field.output_projection.weight.fill_(torch.inf)
    result = screening(model)
    assert result.broken == 3
    forward = result.steps["forward"]
    assert (forward.verdict, "segment 3" in forward.why) == ("non-finite", True)
    assert len(forward.result.mean_abs) == 4
    sublayers = result.steps["backward"].result.sensitivity.sublayers
    assert [each.value is not None for each in sublayers] == [True] * 3 + [False] * len(
        sublayers[3:]
    )
    assert len(result.steps["attention"].result.layers) == 2
    assert "well-posedness" not in result.steps
    assert "segment 3" in result.missing["well-posedness"]


@pytest.mark.cases(1)
@pytest.mark.parametrize(("name", "where"), [("peri", "output_norm"), ("post", "state_norm")])
def test_a_zero_gain_stops_only_the_steps_that_need_its_inverse(name, where):
    model = tiny(name)
    getattr(model.depth.sublayers[2], where).weight[3] = 0
    result = screening(model)
    findings = result.steps
    assert findings["forward"].quantities["added by depth"] > 0
    assert findings["transport"].quantities["W_2 growth"] > 0
    assert findings["well-posedness"].quantities
    if name == "post":
        # the tangent space of segment 2 is not there, so neither is its sensitivity nor the slope
        # of it
        assert "gamma[3] = 0" in findings["backward"].result.sensitivity.sublayers[2].note
        reasons = findings["backward"].missing
        assert "segment 2 is unknown" in reasons["|dv/dX| in weights, segment 2"]


@pytest.mark.slow
def test_normalised_queries_and_keys_leave_out_the_theorem_and_keep_what_is_measured():
    attention = screening(tiny("peri", qk_norm=True)).steps["attention"]
    assert "theorem 5.1 does not cover qk_norm" in attention.why
    assert attention.quantities["attention path"] > 0
    for layer in attention.result.layers:
        assert 0 < max(layer.theta_max) <= 1
        assert layer.measured > 0
        assert math.isnan(layer.bound) and math.isnan(layer.printed) and math.isnan(layer.ratio)  # noqa: PT018


@pytest.mark.cases(1)
@pytest.mark.parametrize("name", ["pre", "post"])
@pytest.mark.parametrize(
    ("changes", "length"),
    [({"heads": 1, "depth": 1}, 4), ({"width": 2, "heads": 1, "depth": 1}, 4), ({"depth": 1}, 1)],
    ids=["one head", "width 2", "one token"],
)
def test_the_smallest_shapes_are_screened(name, changes, length):
    text = tokens(2, length + 1)
    result = screen(tiny(name, **changes), text[:, :-1], text[:, 1:], TINY)
    assert result.steps["forward"].quantities["added by depth"] > 0
    assert math.isnan(result.steps["forward"].quantities["growth exponent"])  # of one block


@pytest.mark.slow
def test_tokens_that_are_all_equal_and_constant_have_no_spread_and_are_no_error():
    model = tiny("pre")
    model.token_embedding.weight.fill_(0.5)
    model.position_embedding.weight.zero_()
    result = screening(model)
    assert result.steps["forward"].quantities["token similarity"] == pytest.approx(1)
    # equal embeddings cannot be told apart, so substitution moves nothing
    assert "substitution" not in result.steps["transport"].result.relative


@pytest.mark.slow
def test_one_hot_attention_has_theta_0_and_no_unknown_gain():
    model = tiny("pre")
    for sublayer in list(model.depth.sublayers)[::2]:
        sublayer.field.qkv.weight[:32].mul_(1e6)
    attention = screening(model).steps["attention"]
    assert min(min(layer.theta_min) for layer in attention.result.layers) == pytest.approx(
        0, abs=1e-12
    )
    assert attention.quantities["attention path"] >= 0


@pytest.mark.slow
def test_the_same_seed_gives_the_same_screening():
    first, second = (to_json(screening(tiny("peri"), seed=3)) for _ in range(2))
    assert first == second


@pytest.mark.slow
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
            return StepPlan(
                {"part": [instrument]},
                lambda: StepVerdict("fine", str(instrument.figures()), "it is"),
            )

        return breaks

    places = ("begin", "forward", "backward", "figures")
    for where, broken in {"plan": in_plan, **{where: plan(where) for where in places}}.items():
        monkeypatch.setitem(STEPS, "backward", dataclasses.replace(STEPS["backward"], plan=broken))
        result = screening(tiny("peri"))
        assert "backward" not in result.steps
        assert result.missing["backward"] == f"it broke in {where}"


def without_loss():
    """A model whose loss raises, as one that was opened without a loss."""

    def no_loss(x, targets):
        raise ConfigError("there is no loss")

    model = tiny("pre")
    model.terminal_loss = no_loss
    return model


@pytest.mark.slow
def test_a_model_without_a_loss_stops_only_what_looks_back():
    text = tokens(2, 8)
    result = screen(without_loss(), text, torch.full_like(text, -1), TINY)
    findings = result.steps
    assert result.missing["well-posedness"] == "there is no loss"
    assert findings["forward"].quantities["added by depth"] > 0
    assert findings["transport"].quantities["W_2 growth"] > 0
    assert findings["backward"].missing["gradient of a sublayer"] == "there is no loss"


@pytest.mark.slow
def test_progress_is_told_as_often_without_a_loss():
    text, told = tokens(2, 8), []
    screen(without_loss(), text, torch.full_like(text, -1), TINY, progress=told.append)
    assert len(told) == 2 * len(tiny("pre").depth.sublayers)


@pytest.mark.slow
def test_lanes_of_the_same_tokens_are_one(monkeypatch):
    import ctrans.examine.screening.screen as module

    seen, own = [], module.walk_lanes
    monkeypatch.setattr(
        module,
        "walk_lanes",
        lambda model, lanes, **named: (seen.append(lanes), own(model, lanes, **named)),
    )
    for text in (tokens(1, 7), tokens(1, 9), tokens(2, 9)):
        screen(tiny("pre"), text[:, :-1], text[:, 1:], dataclasses.replace(TINY, several=4))
    assert [len(lanes) for lanes in seen] == [1, 2, 3]
    for lanes in seen:
        shapes = [lane.tokens.shape for lane in lanes]
        assert len(set(shapes)) == len(shapes)


def test_shapes_that_do_not_fit_are_named():
    text = tokens(2, 9)
    with pytest.raises(ConfigError, match="other text has shape"):
        screen(tiny("peri"), text[:, :-1], text[:, 1:], TINY, other=tokens(2, 5))


def test_chosen_segments_are_spread_and_hold_the_ends():
    assert spread(24, 4) == [0, 8, 15, 23]
    assert spread(2, 5) == [0, 1]
    assert spread(1, 3) == [0]


@pytest.mark.slow
def test_a_saturated_head_in_a_layer_that_no_theorem_is_measured_in_is_said_in_the_verdict():
    model = tiny("pre", depth=5)
    # the fourth of five attention layers, and of those two are looked at: the first and the last
    saturated = 6
    model.depth.sublayers[saturated].field.qkv.weight[:32].mul_(1e4)
    attention = screening(model).steps["attention"]
    assert [layer.index for layer in attention.result.layers] == [0, 8]
    assert "in the 2 measured of 5 attention layers (segments 0, 8)" in attention.why
    assert attention.quantities["least entropy of a head"] < 0.05
    assert (attention.verdict, attention.flags) == (
        "heads saturate",
        {"least entropy of a head": "heads saturate"},
    )
    found = screening(tiny("pre", depth=5))
    assert found.steps["attention"].verdict == "held"
    rows = [reading.value for reading in found.diagnosis.readings["least entropy of a head"]]
    assert found.steps["attention"].quantities["least entropy of a head"] == min(rows)
