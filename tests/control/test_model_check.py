"""Checks of whole models: verdicts by placement, remedies, ties, and evidence that contradicts a
verdict.
"""

import dataclasses
import functools
import math

import pytest
import torch
from torch import nn

from ctrans.control.costate import costate
from ctrans.control.last_map import last_features
from ctrans.control.model_check import ModelCheck, check_model, why_not_applicable
from ctrans.control.regularization import Regularization
from ctrans.dynamics.placement import PLACEMENTS
from ctrans.dynamics.sublayer import Sublayer
from ctrans.model.config import GPTConfig
from ctrans.model.gpt import GPT
from solvers import ConfigError
from tests.helpers import learned

TOKENS = torch.arange(18).reshape(2, 9) % 7


def make(placement, norm="layernorm"):
    config = GPTConfig(
        vocab_size=7, context=8, depth=1, width=20, heads=2, dt=0.1, placement=placement, norm=norm
    )
    return learned(GPT(config, seed=1).double(), 0.2).requires_grad_(False)


@functools.cache
def check(placement, norm="layernorm", regularization=None):
    return check_model(
        make(placement, norm), TOKENS[:, :-1], TOKENS[:, 1:], regularization, thorough=True
    )


every_placement = pytest.mark.parametrize("placement", sorted(PLACEMENTS))
every_norm = pytest.mark.parametrize("norm", ["layernorm", "rmsnorm"])


@pytest.mark.slow
@every_norm
@every_placement
def test_an_output_norm_alone_makes_every_segment_well_posed(placement, norm):
    result = check(placement, norm)
    assert result.agrees, result.failures
    assert result.verdict == (
        "well-posed for bounded gains" if PLACEMENTS[placement].output_norm else "degenerate"
    )
    assert len(result.segments) == 2
    for segment in result.segments:
        assert math.isfinite(segment.certificate.hamiltonian) == PLACEMENTS[placement].output_norm


@pytest.mark.cases(1)
@every_placement
def test_each_segment_is_certified_at_the_models_own_costate_and_features(placement):
    model, result = make(placement), check(placement)
    found = costate(model, TOKENS[:, :-1], TOKENS[:, 1:], form="continuous")
    assert result.loss == found.loss
    for segment, sublayer, (x, p) in zip(
        result.segments, model.depth.sublayers, found.starts, strict=True
    ):
        assert segment.costate_norm == pytest.approx(float(p.norm()), rel=1e-14)
        h, last = last_features(sublayer, x), sublayer.field.output_projection
        W = torch.cat([last.weight, last.bias.unsqueeze(-1)], -1)
        raw = h @ W.mT
        torch.testing.assert_close(
            raw if sublayer.output_norm is None else sublayer.output_norm(raw), sublayer(x)
        )


@pytest.mark.cases(1)
@every_placement
def test_where_h_is_infinite_the_best_under_a_bound_is_its_slope_times_the_bound(placement):
    for segment in check(placement).segments:
        if segment.slope is not None:
            growth = segment.certificate.growth
            bounds = [segment.slope * radius for radius in growth.radii]
            assert growth.values == pytest.approx(bounds, rel=1e-6)
            assert segment.certificate.hamiltonian == math.inf
        else:
            assert PLACEMENTS[placement].output_norm


@pytest.mark.slow
@pytest.mark.parametrize("placement", ["peri", "output"])
def test_kans_printed_value_exceeds_the_corrected_one_for_layernorm_only(placement):
    for segment in check(placement).segments:
        assert segment.ellipsoid > segment.certificate.hamiltonian * (1 + 1e-6)
    assert all(segment.ellipsoid is None for segment in check(placement, "rmsnorm").segments)


@pytest.mark.slow
@every_placement
def test_a_kinetic_cost_makes_every_placement_well_posed(placement):
    result = check(placement, regularization=Regularization(kinetic=0.5))
    assert result.agrees, result.failures
    assert result.verdict == "well-posed"
    assert math.isfinite(result.largest.certificate.hamiltonian)


@pytest.mark.cases(1)
@pytest.mark.parametrize("placement", ["none", "pre"])
def test_weight_decay_gives_the_closed_form_of_the_real_features(placement):
    model, result = (
        make(placement),
        check(placement, regularization=Regularization(last_map_decay=0.3)),
    )
    assert result.agrees, result.failures
    assert result.verdict == "well-posed, the rest fixed"
    found = costate(model, TOKENS[:, :-1], TOKENS[:, 1:], form="continuous")
    for segment, sublayer, (x, p) in zip(
        result.segments, model.depth.sublayers, found.starts, strict=True
    ):
        slope = torch.einsum("btm,btd->md", last_features(sublayer, x), p)
        assert segment.certificate.hamiltonian == pytest.approx(
            float(slope.square().sum() / 0.6), rel=1e-12
        )


def test_under_weight_decay_a_bound_matters_until_it_lets_the_best_weights_in():
    for segment in check("pre", regularization=Regularization(last_map_decay=0.3)).segments:
        H, growth = segment.certificate.hamiltonian, segment.certificate.growth
        slope = math.sqrt(0.6 * H)  # |h'P|, from H = |h'P|^2/(2 lam)
        least = [min(radius, slope / 0.3) for radius in growth.radii]
        assert growth.values == pytest.approx([slope * r - 0.15 * r**2 for r in least], rel=1e-6)
        assert min(growth.radii) < slope / 0.3 < max(growth.radii)


@pytest.mark.cases(6)
@every_placement
def test_weight_decay_is_refused_where_a_norm_stands_behind_the_last_map(placement):
    refused = why_not_applicable(PLACEMENTS[placement], Regularization(last_map_decay=0.3))
    assert (refused is None) == (placement in ("none", "pre"))
    if refused is not None:
        assert f"placement {placement!r}" in refused
        assert "kinetic appl" in refused
        with pytest.raises(ConfigError, match="kinetic appl"):
            check(placement, regularization=Regularization(last_map_decay=0.3))


@every_placement
def test_two_running_costs_are_refused_everywhere(placement):
    assert (
        why_not_applicable(PLACEMENTS[placement], Regularization(last_map_decay=0.3, kinetic=0.3))
        is not None
    )
    assert why_not_applicable(PLACEMENTS[placement], Regularization(kinetic=0.3)) is None
    assert why_not_applicable(PLACEMENTS[placement], Regularization()) is None


@pytest.mark.parametrize("value", [0.0, -1.0, math.inf, math.nan, 9e-13, 1.1e12])
def test_a_running_cost_has_a_positive_weight_at_which_evidence_is_more_than_rounding(value):
    for name in ("kinetic", "last_map_decay", "gain_decay"):
        with pytest.raises(ConfigError, match=f"{name} = .*from 1e-12 to 1e"):
            Regularization(**{name: value})


@pytest.mark.parametrize("value", [1e-12, 1e12])
@pytest.mark.parametrize(
    ("name", "placement"),
    [("kinetic", "pre"), ("kinetic", "peri"), ("last_map_decay", "pre"), ("gain_decay", "peri")],
)
def test_evidence_holds_at_the_smallest_and_the_largest_weight(name, placement, value):
    assert check(placement, regularization=Regularization(**{name: value})).agrees


@pytest.mark.cases(5)
@every_placement
def test_a_zero_costate_is_a_tie_with_h_zero(placement):
    model = make(placement)
    # equal logits whatever the hidden state, so the loss does not depend on it
    model.token_embedding.weight.zero_()
    result = check_model(model, TOKENS[:, :-1], TOKENS[:, 1:], thorough=True)
    assert result.agrees, result.failures
    for segment in result.segments:
        assert segment.costate_norm == 0
        assert segment.certificate.hamiltonian == 0
        assert segment.certificate.ties == result.tokens == 16
    # -<P, f> = 0 for every f, so neither placement has an infinite H here
    assert "degenerate" not in (result.verdict, result.step_verdict)


@pytest.mark.slow
def test_evidence_against_a_verdict_is_named_with_its_segment():
    result = check("peri")
    first = result.segments[0]
    wrong = dataclasses.replace(first.certificate, kkt=0.1)
    broken = dataclasses.replace(
        result, segments=(dataclasses.replace(first, certificate=wrong), *result.segments[1:])
    )
    assert isinstance(broken, ModelCheck)
    assert not broken.agrees
    assert broken.evidence["kkt"] == 0.1
    (failure,) = broken.failures
    assert failure.startswith("segment 0 (attention)")
    assert "KKT" in failure


@pytest.mark.slow
def test_one_degenerate_segment_makes_the_model_degenerate():
    good, bad = check("peri"), check("pre")
    assert (
        dataclasses.replace(good, segments=(good.segments[0], bad.segments[1])).verdict
        == "degenerate"
    )


def test_a_map_that_does_not_name_its_last_layer_is_an_error():
    sublayer = Sublayer(nn.Linear(4, 4), "ffn")
    with pytest.raises(ConfigError, match="Linear does not name its last linear map"):
        last_features(sublayer, torch.ones(1, 2, 4))


def test_the_segment_with_the_largest_threshold_has_ascents_on_either_side():
    """Below the threshold a larger bound on the factors pays, and above it nothing does."""
    thresholds = [segment.threshold for segment in check("pre").segments]
    top = max(thresholds, key=lambda each: each.lower)
    assert top.below.values[-1] > 0
    assert top.above.values[-1] == pytest.approx(0.0, abs=1e-9)
    assert [each.below is None for each in thresholds] == [each is not top for each in thresholds]


@every_placement
def test_a_quick_check_has_the_figures_of_a_thorough_one(placement: str) -> None:
    model = make(placement, "layernorm")
    quick = check_model(model, TOKENS[:, :-1], TOKENS[:, 1:])
    thorough = check_model(model, TOKENS[:, :-1], TOKENS[:, 1:], thorough=True)
    assert quick.agrees
    assert (quick.verdict, quick.step_verdict) == (thorough.verdict, thorough.step_verdict)
    assert quick.largest.segment == thorough.largest.segment
    for one, other in zip(quick.segments, thorough.segments, strict=True):
        assert one.certificate.hamiltonian == pytest.approx(other.certificate.hamiltonian, rel=1e-4)
        assert one.costate_norm == pytest.approx(other.costate_norm, rel=1e-4)
        assert one.certificate.gained is None
        searched = one.certificate.weights is not None or one.certificate.growth is not None
        assert searched == (one.segment == quick.largest.segment)
    if thorough.training_threshold is not None:
        assert quick.training_threshold is not None
        assert quick.training_threshold.lower == pytest.approx(
            thorough.training_threshold.lower, rel=1e-4
        )
