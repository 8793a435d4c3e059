import dataclasses
import json
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog

from ctrans.base.draw import Draw
from ctrans.dynamics.norm import NORMS
from ctrans.measure.transport.generalisation import generalisation_radius
from ctrans.measure.transport.perturbations import PERTURBATIONS, adversarial_direction, perturbed
from ctrans.measure.transport.transport import (
    distances,
    printed_transport_bound,
    token_spreads,
    transport_bound,
)
from ctrans.measure.transport.wasserstein import wasserstein
from ctrans.theory.transport import diverging
from solvers import ConfigError, SolveError
from tests.helpers import NAMES, carried, small_model, tokens, transport


def linear_programme(a, b, p):
    """min over plans with uniform marginals of sum plan * cost: no assignment is assumed."""
    a, b = a.flatten(1).numpy(), b.flatten(1).numpy()
    count = len(a)
    cost = (np.abs(a[:, None] - b[None]) ** p).sum(-1)
    rows, columns = np.kron(np.eye(count), np.ones(count)), np.kron(np.ones(count), np.eye(count))
    found = linprog(
        cost.ravel(),
        A_eq=np.vstack([rows, columns]),
        b_eq=np.full(2 * count, 1 / count),
        method="highs",
    )
    return found.fun ** (1 / p)


@given(
    st.integers(1, 9),
    st.integers(1, 4),
    st.integers(1, 3),
    st.sampled_from([1, 2]),
    st.integers(0, 10_000),
)
@settings(max_examples=60)
def test_wasserstein_is_the_linear_programmes_value(samples, tokens, width, p, seed):
    generator = torch.Generator().manual_seed(seed)
    a, b = (
        torch.randn(samples, tokens, width, generator=generator, dtype=torch.float64)
        for _ in range(2)
    )
    assert wasserstein(a, b, p) == pytest.approx(linear_programme(a, b, p), rel=1e-10, abs=1e-10)


@given(st.integers(1, 20), st.sampled_from([1, 2]), st.integers(0, 10_000))
@settings(max_examples=40)
def test_wasserstein_forgets_order_and_knows_a_shift(samples, p, seed):
    generator = torch.Generator().manual_seed(seed)
    a = torch.randn(samples, 3, 2, generator=generator, dtype=torch.float64)
    shift = torch.randn(3, 2, generator=generator, dtype=torch.float64)
    mixed = a[torch.randperm(samples, generator=generator)]
    assert wasserstein(a, mixed, p) == pytest.approx(0, abs=1e-12)
    assert wasserstein(a, mixed + 1e-9 * shift, p) == pytest.approx(
        1e-9 * float(shift.abs().pow(p).sum() ** (1 / p)), rel=1e-6
    )


@pytest.mark.parametrize(
    ("a", "b", "message"),
    [
        (torch.zeros(3, 2), torch.zeros(4, 2), "same number"),
        (torch.zeros(0, 2), torch.zeros(0, 2), "at least one"),
        (torch.zeros(2, 2), torch.full((2, 2), torch.nan), "not finite"),
    ],
)
def test_samples_that_cannot_be_compared_are_refused(a, b, message):
    with pytest.raises(ConfigError, match=message):
        wasserstein(a, b)


def test_other_orders_are_refused():
    with pytest.raises(ConfigError, match="choose 1 or 2"):
        wasserstein(torch.zeros(1, 1), torch.zeros(1, 1), 3)


@pytest.mark.slow
@given(
    st.sampled_from(NAMES),
    st.sampled_from(sorted(NORMS)),
    st.floats(0.01, 3),
    st.floats(0, 2),
    st.floats(1e-3, 10),
    st.integers(0, 10_000),
)
@settings(max_examples=100)
def test_no_distance_exceeds_its_bound(placement, norm, dt, scale, size, seed):
    model = small_model(placement, norm=norm, dt=dt, scale=scale, width=4, heads=2, depth=2)
    x = torch.randn(6, 3, 4, dtype=torch.float64)
    y = x + size * torch.randn(6, 3, 4, dtype=torch.float64)
    for p in (1, 2):
        bound = transport_bound(model.depth, 3, wasserstein(x, y, p), p)
        assert (bound is None) is (placement == "none")
        if bound is not None:
            assert wasserstein(model.depth(x), model.depth(y), p) <= bound * (1 + 1e-12)


def test_theorem_6_as_printed_is_false_at_p_1_and_the_corrected_form_is_attained():
    d = 8
    depth, x, y = diverging(Draw(0), d)
    out = {p: wasserstein(depth(x), depth(y), p) for p in (1, 2)}
    before = {p: wasserstein(x, y, p) for p in (1, 2)}
    assert out[1] == pytest.approx(32.0, abs=1e-3)
    assert out[2] == pytest.approx(4 * math.sqrt(d), abs=1e-3)
    assert printed_transport_bound(depth, 1, before[1], 1) == pytest.approx(11.31, abs=1e-2)
    for p in (1, 2):
        bound = transport_bound(depth, 1, before[p], p)
        assert out[p] <= bound * (1 + 1e-12)
        assert out[p] == pytest.approx(bound, rel=1e-4)


def test_the_bound_scales_with_dt_and_sums_each_segments_own_gain():
    model = small_model("peri", dt=0.25)
    gains = [float(s.output_norm.gamma.abs().max()) for s in model.depth.sublayers]
    expected = 3.0 + 2 * 0.25 * math.sqrt(5 * 16) * sum(gains)
    assert transport_bound(model.depth, 5, 3.0, 2) == pytest.approx(expected)
    assert transport_bound(model.depth, 5, 3.0, 1) == pytest.approx(
        3.0 + (expected - 3.0) * math.sqrt(5 * 16)
    )
    printed = math.sqrt(2) * (3.0 + 4 * 0.25 * 3 * math.sqrt(5 * 16) * max(gains))
    assert printed_transport_bound(model.depth, 5, 3.0, 2) == pytest.approx(printed)


@pytest.mark.parametrize("norm", sorted(NORMS))
def test_what_all_tokens_have_in_common_is_not_in_the_bound_behind_an_input_norm(norm):
    model = small_model(
        "pre", norm=norm, dt=0.25, activation="relu"
    )  # of slope 1, which is as steep as it is long
    before = transport_bound(model.depth, 5, 3.0, 2)
    for sublayer in model.depth.sublayers:
        field = sublayer.field
        field.output_projection.bias.add_(100)
        if sublayer.kind == "attention":
            field.qkv.bias.add_(100)
        if norm == "layernorm":
            sublayer.input_norm.bias.add_(100)
    assert transport_bound(model.depth, 5, 3.0, 2) == pytest.approx(before)
    x = torch.randn(6, 5, 16, dtype=torch.float64)
    y = x + torch.randn(6, 5, 16, dtype=torch.float64)
    for p in (1, 2):
        assert wasserstein(model.depth(x), model.depth(y), p) <= transport_bound(
            model.depth, 5, wasserstein(x, y, p), p
        )


@pytest.mark.cases(3)
@pytest.mark.parametrize("perturbation", sorted(PERTURBATIONS))
@pytest.mark.parametrize("placement", ["none", "pre", "peri", "post"])
def test_every_perturbation_is_measured_and_bounded(placement, perturbation):
    model = small_model(placement)
    found = transport(model, tokens(4), perturbation, other=tokens(4, seed=3))
    assert [each.p for each in found] == [1, 2]
    for each in found:
        assert each.before > 0
        assert each.amplification == pytest.approx(each.after / each.before)
        assert (each.bound is None) is (placement == "none")
        assert each.bound is None or 0 < each.after <= each.bound
        json.dumps(dataclasses.asdict(each), allow_nan=False)


def test_a_small_adversarial_step_moves_the_end_further_than_noise_of_its_length():
    for placement in ("pre", "peri"):
        model = small_model(placement)
        noise, worst = (
            transport(model, tokens(1), name, size=1e-4)[1] for name in ("noise", "adversarial")
        )
        assert worst.before == pytest.approx(noise.before, rel=0.2)
        assert worst.amplification > 1.2 * noise.amplification


def test_the_adversarial_direction_is_the_dense_jacobians_top_right_singular_vector():
    model = small_model("peri", width=8)
    x = model.embed(tokens(2, 4))
    found = adversarial_direction(model.depth, x, tolerance=1e-6)
    for each, direction in zip(x, found, strict=True):
        jacobian = torch.autograd.functional.jacobian(model.depth, each).reshape(32, 32)
        assert abs(float(torch.linalg.svd(jacobian).Vh[0] @ direction.flatten())) == pytest.approx(
            1, abs=1e-3
        )


def test_substitution_changes_its_share_of_tokens_and_no_more():
    model = small_model("pre")
    base = model.embed(tokens(8, 16))
    for size, most in ((0.01, 1), (0.25, 4)):
        changed = transport(model, tokens(8, 16), "substitution", size=size, orders=(2,))[0]
        # W_2 <= root mean square of the rows changed: each by at most the longest embedding
        # difference
        longest = float(
            torch.cdist(model.token_embedding.weight, model.token_embedding.weight).max()
        )
        assert 0 < changed.before <= math.sqrt(most) * longest
    assert torch.isfinite(base).all()


def test_perturbations_carried_together_have_the_distances_that_each_has_alone():
    model, text = small_model("pre"), tokens(4)
    x = model.embed(text)
    inputs = {
        name: perturbed(model, text, name) for name in ("substitution", "noise", "adversarial")
    }
    end, *ends = carried(model.depth, [(1.0, x), *((1.0, y) for y in inputs.values())])
    spreads = token_spreads(model.depth)
    for (name, y), after in zip(inputs.items(), ends, strict=True):
        together = distances(model.depth, name, (x, y), (end, after), spreads=spreads)
        assert together == transport(model, text, name)


def test_a_map_of_which_no_bound_is_known_leaves_the_distance_without_one_behind_an_input_norm_alone():
    for placement in ("pre", "peri", "post"):
        model = small_model(placement)
        model.depth.sublayers[0].field = torch.nn.Tanh()
        assert (transport(model, tokens(), "noise")[1].bound is None) is (placement == "pre")


def test_a_model_that_overflows_is_told_without_a_distance():
    model = small_model("pre")
    model.depth.sublayers[3].field.down.weight.mul_(math.inf)
    found = transport(model, tokens(2), "noise")[1]
    assert found.before > 0
    assert found.after is None
    assert found.amplification is None
    with pytest.raises(SolveError, match="segment 4"):
        adversarial_direction(model.depth, model.embed(tokens(2)))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"perturbation": "nois"}, "did you mean 'noise'"),
        ({"perturbation": "noise", "size": 0.0}, "size"),
        ({"perturbation": "text"}, "other text"),
        ({"perturbation": "text", "other": tokens(3)}, "other text"),
    ],
)
def test_requests_that_make_no_sense_are_refused(wrong, message):
    with pytest.raises(ConfigError, match=message):
        transport(small_model("peri"), tokens(2), **wrong)


def test_one_sample_is_said_in_the_singular():
    assert "1 sample leaves 100.0% of the radius of one" in generalisation_radius(1, 8, 8).verdict


def test_the_generalisation_radius_is_called_vacuous_at_real_sizes():
    found = generalisation_radius(10**9, 64, 128)
    assert found.vacuous
    assert found.verdict.startswith("vacuous")
    assert found.shrinkage == pytest.approx((10**9) ** (-1 / 8192))
    assert found.log10_samples_to_halve == pytest.approx(8192 * math.log10(2))
    small = generalisation_radius(1000, 1, 2)
    assert not small.vacuous
    assert small.shrinkage == pytest.approx(1000**-0.5)
    assert small.deviation == pytest.approx(math.sqrt(math.log(20) / 1000))
    with pytest.raises(ConfigError, match="delta"):
        generalisation_radius(10, 1, 2, 1.0)
