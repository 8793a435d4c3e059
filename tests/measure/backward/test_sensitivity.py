import copy
import math

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from ctrans.dynamics.fields.projected_map import scale_linear
from ctrans.dynamics.norm import NORMS
from ctrans.dynamics.placement import PLACEMENTS
from ctrans.dynamics.sublayer import Sublayer
from ctrans.measure.backward.sensitivity import (
    Sensitivities,
    backward_sensitivity,
    sublayer_sensitivity,
)
from ctrans.measure.backward.weight_slope import sensitivity_slope
from ctrans.measure.forward.carried import GrowthWithWeights
from ctrans.measure.forward.weight_scaling import FACTORS, SCALINGS, scaled, times
from ctrans.measure.walk import observe, states_of, walk
from solvers import ConfigError
from tests.helpers import NAMES, carried, learned, small_model, tokens


def dense(function, x):
    return torch.autograd.functional.jacobian(function, x).reshape(x.numel(), x.numel())


def spectral(matrix):
    return float(torch.linalg.matrix_norm(matrix, 2))


@pytest.mark.slow
@given(
    st.sampled_from(sorted(PLACEMENTS)),
    st.sampled_from(sorted(NORMS)),
    st.sampled_from(["xavier", "large", "gpt2"]),
    st.floats(0, 1),
    st.integers(0, 10_000),
)
@settings(max_examples=25)
def test_sublayer_sensitivity_is_the_dense_jacobians_largest_singular_value(
    placement, norm, initialisation, scale, seed
):
    assume(NORMS[norm](16).has_tangent or not PLACEMENTS[placement].state_norm)
    model = small_model(placement, norm=norm, initialisation=initialisation, scale=scale, depth=1)
    states = states_of(model.depth, model.embed(tokens(seed=seed, batch=2, length=5)))
    for sublayer, x in zip(model.depth.sublayers, states, strict=False):
        found = sublayer_sensitivity(sublayer, x)
        exact = max(spectral(dense(sublayer.velocity, each)) for each in x)
        assert found.value == pytest.approx(exact, rel=1e-3)


@pytest.mark.cases(1)
@pytest.mark.parametrize("placement", NAMES)
def test_blocks_and_products_are_the_dense_ones(placement):
    model = small_model(placement, dt=0.7, width=8)
    x0 = model.embed(tokens(batch=1, length=4))[0]
    found = backward_sensitivity(model.depth, x0)
    states = states_of(model.depth, x0)
    steps = [
        dense(lambda x, s=s: s.step(x, 0.7), x)
        for s, x in zip(model.depth.sublayers, states, strict=False)
    ]
    blocks = [steps[i + 1] @ steps[i] for i in (0, 2, 4)]
    product = torch.eye(x0.numel(), dtype=x0.dtype)
    for i in (2, 1, 0):
        product = product @ blocks[i]
        assert found.blocks[i].value == pytest.approx(spectral(blocks[i]), rel=1e-3)
        assert found.products[i].value == pytest.approx(spectral(product), rel=1e-3)


@pytest.mark.slow
def test_float32_gives_the_float64_figures():
    figures = []
    for dtype in (torch.float32, torch.float64):
        model = small_model("peri", dtype=dtype)
        found = backward_sensitivity(model.depth, model.embed(tokens(batch=1)))
        figures.append([each.value for each in (*found.sublayers, *found.blocks, *found.products)])
    assert figures[0] == pytest.approx(figures[1], rel=2e-3)


def test_progress_counts_every_figure():
    model, seen = small_model("pre"), []
    backward_sensitivity(model.depth, model.embed(tokens(batch=1, length=3)), progress=seen.append)
    assert seen == list(range(1, 6 + 3 + 3 + 1))


def test_what_is_not_finite_is_named_and_the_rest_computed():
    model = small_model("pre")
    model.depth.sublayers[2].field.out.weight.mul_(math.inf)
    found = backward_sensitivity(model.depth, model.embed(tokens(batch=1)))
    assert [each.value is None for each in found.sublayers] == [
        False,
        False,
        True,
        True,
        True,
        True,
    ]
    assert [each.value is None for each in found.blocks] == [False, True, True]
    assert [each.value is None for each in found.products] == [True, True, True]
    assert found.sublayers[2].note == "the Jacobian is not finite"
    assert found.sublayers[3].note == "the state is not finite"


def test_equal_tokens_with_eps_zero_have_no_jacobian_and_with_eps_one():
    for eps, known in ((0.0, False), (1e-5, True)):
        model = small_model("pre", eps=eps)
        found = sublayer_sensitivity(
            model.depth.sublayers[1], torch.ones(1, 4, 16, dtype=torch.float64)
        )
        assert (found.value is not None) is known


@pytest.mark.slow
def test_zero_gains_are_zero_sensitivity_behind_an_output_norm_and_no_tangent_space_around_the_state():
    for placement, value, note in (("peri", 0.0, ""), ("post", None, "gamma[0] = 0")):
        model = small_model(placement)
        for sublayer in model.depth.sublayers:
            (sublayer.output_norm or sublayer.state_norm).gamma.zero_()
        found = backward_sensitivity(model.depth, model.embed(tokens(batch=1)))
        assert found.sublayers[0].value == value
        assert note in found.sublayers[0].note
        assert all(each.value is not None for each in found.products)


@pytest.mark.cases(1)
@pytest.mark.parametrize("changes", [{"heads": 1}, {"width": 2, "heads": 1}])
@pytest.mark.parametrize("placement", NAMES)
def test_one_token_one_head_and_width_two(placement, changes):
    model = small_model(placement, **changes)
    found = backward_sensitivity(model.depth, model.embed(tokens(batch=1, length=1)))
    assert all(
        math.isfinite(each.value) for each in (*found.sublayers, *found.blocks, *found.products)
    )


def slope(placement, kind, scaling, **changes):
    model = small_model(placement, **{"depth": 1, "eps": 1e-5, **changes})
    sublayer = model.depth.sublayers[("attention", "ffn").index(kind)]
    x = torch.randn(1, 6, 16, dtype=torch.float64)
    return sensitivity_slope(sublayer, x, scaling, tolerance=1e-6)


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    "norm", sorted(name for name, kind in NORMS.items() if kind(16).degree == 0)
)
@pytest.mark.parametrize(
    ("kind", "scaling"),
    [("attention", "W"), ("attention", "V"), ("attention", "WV"), ("ffn", "W2")],
)
@pytest.mark.parametrize(
    ("placement", "expected"), [("none", 1), ("pre", 1), ("post", 1), ("peri", 0), ("output", 0)]
)
def test_sensitivity_follows_the_activation_before_the_sum_and_not_behind_an_output_norm(
    norm, kind, scaling, placement, expected
):
    found = slope(placement, kind, scaling, norm=norm)
    assert found.slope == pytest.approx(expected, abs=1e-4)
    assert found.factors == list(FACTORS)


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    "norm", sorted(name for name, kind in NORMS.items() if kind(16).degree is None)
)
def test_behind_a_norm_without_degree_the_sensitivity_follows_it_only_before_the_norm(norm):
    assert slope("pre", "ffn", "W2", norm=norm).slope == pytest.approx(1, abs=1e-4)
    sublayer = small_model("peri", depth=1, norm=norm).depth.sublayers[1]
    x = torch.randn(1, 6, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    small = sensitivity_slope(sublayer, x, "W2", factors=(1e-4, 1e-3), eps=None)
    assert small.slope == pytest.approx(1, abs=0.02)  # where it is all but linear


def test_scaling_w1_is_invariant_for_relu_without_bias_only():
    relu = slope("peri", "ffn", "W1", activation="relu", bias=False)
    assert relu.slope == pytest.approx(0, abs=1e-4)
    gelu = slope("peri", "ffn", "W1", activation="gelu", bias=False)
    assert abs(gelu.values[1] / gelu.values[0] - 1) > 1e-2
    assert max(gelu.values) < 2 * min(gelu.values)


def test_with_eps_the_invariance_fails_for_small_activations():
    model = small_model("peri", depth=1, eps=1e-2)
    x = torch.randn(1, 6, 16, dtype=torch.float64)
    small = sensitivity_slope(model.depth.sublayers[1], x, "W2", factors=(1e-4, 1e-3), eps=None)
    assert small.slope == pytest.approx(1, abs=0.02)


@pytest.mark.parametrize("scaling", [name for name, rule in SCALINGS.items() if rule.exact])
def test_exact_scalings_multiply_the_map_by_c_and_leave_the_original_alone(scaling):
    model = small_model("pre", depth=1)
    sublayer = model.depth.sublayers[("attention", "ffn").index(SCALINGS[scaling].kind)]
    x = torch.randn(2, 5, 16, dtype=torch.float64)
    before = sublayer.field(x)
    assert torch.allclose(scaled(sublayer, scaling, 7.0).field(x), 7 * before, rtol=1e-12)
    assert torch.equal(sublayer.field(x), before)


@pytest.mark.parametrize("kind", ["attention", "ffn"])
def test_c_times_a_map_is_the_map_with_its_last_weights_times_c(kind):
    sublayer = small_model("peri", depth=1).depth.sublayers[("attention", "ffn").index(kind)]
    x, twin = torch.randn(2, 5, 16, dtype=torch.float64), copy.deepcopy(sublayer)
    scale_linear(twin.field.output_projection, 7.0)
    assert torch.allclose(times(sublayer, 7.0).step(x, 0.3), twin.step(x, 0.3), rtol=1e-12)


@pytest.mark.parametrize("norm", sorted(name for name, kind in NORMS.items() if kind(6).divides))
def test_another_eps_is_that_norm_with_its_eps_replaced(norm):
    original = learned(NORMS[norm](6, 1e-5)).double()
    x, twin = 1e-3 * torch.randn(4, 6, dtype=torch.float64), copy.deepcopy(original)
    twin.eps = 1e-2
    assert torch.allclose(original.with_eps(1e-2)(x), twin(x), rtol=1e-12)
    assert original.eps == 1e-5


def test_states_are_carried_with_their_own_factor_each():
    model = small_model("output")
    x, y = (model.embed(tokens(seed=seed)) for seed in (0, 1))
    found = carried(model.depth, [(1.0, x), (50.0, x), (1.0, y)])
    twin = copy.deepcopy(model.depth)
    for sublayer in twin.sublayers:
        scale_linear(sublayer.field.output_projection, 50.0)
    for state, expected in zip(found, (model.depth(x), twin(x), model.depth(y)), strict=True):
        assert torch.allclose(state, expected, rtol=1e-12)


def test_maps_of_other_libraries_are_scaled_as_a_whole_and_not_inside():
    sublayer = Sublayer(torch.nn.Linear(4, 4, dtype=torch.float64), "attention")
    x = torch.randn(3, 4, dtype=torch.float64)
    assert torch.equal(scaled(sublayer, "W", 3.0)(x), 3 * sublayer(x))
    with pytest.raises(ConfigError, match="a field of type Linear"):
        scaled(sublayer, "V", 3.0)


def test_a_scaling_for_another_map_is_refused():
    model = small_model("pre", depth=1)
    with pytest.raises(ConfigError, match="W2"):
        scaled(model.depth.sublayers[1], "V", 2.0)
    with pytest.raises(ConfigError, match="unknown scaling"):
        scaled(model.depth.sublayers[1], "V2", 2.0)


@pytest.mark.parametrize(
    ("placement", "expected"), [("pre", 1), ("peri", 0), ("output", 0), ("post", 0)]
)
def test_the_state_follows_the_weights_unless_a_norm_holds_it(placement, expected):
    model = small_model(placement)
    (found,) = walk(model, tokens(), instruments=[GrowthWithWeights()])
    assert found.slope == pytest.approx(expected, abs=0.02)
    own = model.depth(model.embed(tokens())).abs().mean()
    assert found.mean_abs[0] == pytest.approx(float(own), rel=1e-12)


def test_states_that_end_before_the_depth_have_no_products_and_say_so():
    model = small_model("peri")
    states = states_of(model.depth, model.embed(tokens()))
    whole = observe(model.depth, states, [Sensitivities()])[0]
    part = observe(model.depth, states[:4], [Sensitivities()])[0]
    assert [each.value for each in part.products] == [None] * 3
    assert all("end after 1 of 3 blocks" in each.note for each in part.products)
    assert part.condition == [None] * 3
    assert part.sublayers == whole.sublayers[:3]
    assert part.blocks == whole.blocks[:1]


def test_without_starts_no_block_is_looked_at():
    model = small_model("peri")
    found = backward_sensitivity(model.depth, model.embed(tokens()), starts=0)
    assert [(each.value, each.note) for each in (*found.blocks, *found.products)] == [
        (None, "left out")
    ] * 6
    assert all(each.value is not None for each in found.sublayers)
    assert found.condition == [None] * 3


@pytest.mark.slow
def test_what_is_left_out_changes_none_of_the_others():
    model = small_model("peri", depth=6)
    x = model.embed(tokens())
    every, some = (backward_sensitivity(model.depth, x, starts=starts) for starts in (None, 3))
    computed = [i for i, product in enumerate(some.products) if product.value is not None]
    assert computed == [0, 2, 5]
    for i in computed:
        assert some.products[i].value == pytest.approx(every.products[i].value, rel=2e-3)
        assert some.blocks[i] == every.blocks[i]
    for figures in (some.products, some.blocks):
        assert {(each.value, each.note) for i, each in enumerate(figures) if i not in computed} == {
            (None, "left out")
        }
    assert some.sublayers == every.sublayers
