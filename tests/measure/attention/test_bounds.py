import copy
import dataclasses
import math
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from ctrans.dynamics.fields import ACTIVATIONS, Attention, FeedForward, reference_kernels
from ctrans.dynamics.norm import LayerNorm
from ctrans.dynamics.sublayer import Sublayer
from ctrans.measure.attention.balanced_mass import balanced_mass
from ctrans.measure.attention.block_norm import (
    block_gain,
    block_norm,
    chosen,
    gain_of_rows,
    map_at,
    one_for_each,
    step_at,
)
from ctrans.measure.attention.bounds import attention_bound, attention_theta, norm_slope, step_bound
from ctrans.measure.attention.by_depth import attention_layers, block_layers, sensitivity_growth
from ctrans.measure.backward.singular_values import linearise
from ctrans.measure.walk import states_of
from ctrans.theory.all_statements import all_statements
from ctrans.theory.verify import verify
from solvers import ConfigError
from tests.helpers import NAMES, small_model, tokens


def noise(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def attention(width=4, heads=1, seed=0, **settings):
    module = Attention(width, heads, **settings).double().requires_grad_(False)
    for k, parameter in enumerate(module.parameters()):
        parameter.copy_(noise(*parameter.shape, seed=seed + k))
    return module


def states(placement="pre", **changes):
    model = small_model(placement, **changes)
    return model, model.trajectory(tokens()).states


STATED = [
    "theorem-4.2",
    "theta-bracket",
    "corollary-4.3-peaked",
    "mixing",
    "norm-reset",
    "lemma-a1",
]
STATED += ["theorem-5.1", "block-bound", "kim-3.1"]


@pytest.mark.cases(5)
@pytest.mark.parametrize("name", STATED)
def test_no_bound_is_violated(name):
    assert verify(all_statements()[name], cases=50, seed=1).corrected.holds


def test_the_block_norm_is_the_rms_of_the_largest_token():
    x = torch.zeros(2, 3, 4)
    x[0, 1] = 2.0
    x[1, 2, 0] = 6.0
    assert block_norm(x).tolist() == [2.0, 3.0]


@pytest.mark.slow
@given(st.integers(1, 3), st.integers(1, 4), st.integers(0, 1000))
@settings(max_examples=25)
def test_the_local_value_of_a_linear_map_lies_between_sampled_and_dense_norms(count, width, seed):
    """x_i -> sum_j M_ij x_j: no sampled direction does better, sum_j |M_ij|_2 does."""
    m = noise(count, count, width, width, seed=seed)

    def linear(x):
        return torch.einsum("ijab,...jb->...ia", m, x)

    found = block_gain(
        linear, noise(count, width), iterations=30, generator=torch.Generator().manual_seed(seed)
    )
    directions = nn.functional.normalize(noise(3000, count, width, seed=seed + 1), dim=-1)
    sampled = torch.linalg.vector_norm(linear(directions), dim=-1).max()
    assert found <= float(torch.linalg.matrix_norm(m, ord=2).sum(1).max()) * (1 + 1e-12)
    assert found >= 0.98 * float(sampled)
    if count == 1:
        assert found == pytest.approx(float(torch.linalg.matrix_norm(m[0, 0], ord=2)), rel=0.02)


def test_more_rows_never_lower_the_local_value():
    module = attention()
    x = noise(5, 4)
    with reference_kernels(module):
        each = [block_gain(module, x, rows=torch.tensor([i])) for i in range(5)]
        assert block_gain(module, x) >= 0.9 * max(each)


@pytest.mark.cases(6)
@pytest.mark.parametrize(
    "changes",
    [{}, {"parallel_blocks": True}, {"attention": "linear"}],
    ids=["two", "parallel", "linear"],
)
@pytest.mark.parametrize("placement", NAMES)
def test_a_step_and_a_map_at_tokens_looked_at_alone(placement, changes):
    """Against all tokens of both."""
    model, rows = small_model(placement, **changes), torch.tensor([0, 3, 5])
    x = noise(6, model.config.width)
    for sublayer in model.depth.sublayers[: model.depth.per_block]:
        each = x.expand(3, -1, -1)
        assert torch.allclose(
            step_at(sublayer, 0.5, each, rows), chosen(sublayer.step(each, 0.5), rows), atol=1e-13
        )
        generators = [torch.Generator().manual_seed(0) for _ in range(2)]
        with reference_kernels(sublayer):
            at_rows = linearise(
                partial(map_at, sublayer.field, sublayer.kind, rows=rows), one_for_each(rows, x)
            )
            local = gain_of_rows(at_rows, generator=generators[0])
            assert local == pytest.approx(
                block_gain(sublayer.field, x, rows=rows, generator=generators[1]), rel=1e-11
            )


@pytest.mark.cases(1)
@pytest.mark.parametrize("placement", NAMES)
def test_a_blocks_local_value_is_that_of_its_steps_on_all_tokens(placement):
    model, trajectory = states(placement)
    first = model.depth.sublayers[: model.depth.per_block]
    h, x = model.depth.lengths[0], trajectory[0][0]
    with reference_kernels(model):
        found = block_gain(
            lambda x: first[1].step(first[0].step(x, h), h),
            x,
            generator=torch.Generator().manual_seed(0),
        )
    assert block_layers(model.depth, trajectory)[0].measured == pytest.approx(found, rel=1e-11)


def test_theta_of_full_causal_and_padded_rows():
    x = noise(1, 6, 4)
    full, causal = attention(causal=False), attention(causal=True)
    assert torch.equal(attention_theta(full, x).lower, balanced_mass(full.probabilities(x)).lower)
    found = attention_theta(causal, x)
    assert found.lower.shape == (1, 1, 6)
    assert float(found.lower[0, 0, 0]) == 0  # the first token reads itself alone
    # padding at the end is a shorter sequence; at the start of a causal one, rows without anything
    # to read
    tail = torch.tensor([[False] * 4 + [True] * 2])
    padded = attention_theta(full, x, tail)
    assert torch.allclose(
        padded.lower[..., :4], attention_theta(full, x[:, :4]).lower, rtol=0, atol=1e-14
    )
    assert padded.masked[0, 0].tolist() == [False] * 4 + [True] * 2
    assert attention_theta(causal, x, ~tail).masked[0, 0].tolist() == [True] * 4 + [False] * 2


@pytest.mark.cases(1)
@pytest.mark.parametrize("placement", NAMES)
def test_every_attention_layer_is_described(placement):
    model, trajectory = states(placement)
    layers = attention_layers(model.depth, trajectory)
    assert [layer.index for layer in layers] == [0, 2, 4]
    for layer in layers:
        assert layer.finite
        assert layer.measured <= layer.bound
        assert layer.ratio == layer.bound / layer.measured
        assert layer.value_path + layer.attention_path == pytest.approx(layer.bound)
        assert all(
            low <= mean <= high
            for low, mean, high in zip(
                layer.theta_min, layer.theta_mean, layer.theta_max, strict=True
            )
        )
        assert math.exp(sum(layer.log_sensitivity.values())) == pytest.approx(layer.S)
        assert pytest.approx(layer.softmax_norm * layer.B**2 * layer.G) == layer.S
    assert sensitivity_growth(layers).keys() == {"theta", "B", "G"}
    for layer in block_layers(model.depth, trajectory):
        assert layer.measured <= layer.bound


@pytest.mark.parametrize("count", [2, 7])
def test_theta_is_over_the_rows_that_may_read_more_than_one_token(count):
    """Uniform rows of n tokens have theta = 4 floor(n/2) ceil(n/2)/n^2; the first row has 0 whatever
    is learned, and does not count.
    """
    model = small_model("pre", heads=2)
    field = model.depth.sublayers[0].field
    for head in field.head_matrices():
        head.query.zero_()
    field.qkv.bias.zero_()
    layer = attention_layers(model.depth, model.trajectory(tokens(1, count)).states)[0]
    thetas = [4 * (n // 2) * (n - n // 2) / n**2 for n in range(2, count + 1)]
    assert layer.theta_mean == pytest.approx([sum(thetas) / len(thetas)] * 2)
    assert layer.theta_min == pytest.approx([min(thetas)] * 2)


def test_the_figures_of_a_layer_are_those_of_its_definition():
    model, trajectory = states("pre", heads=1)
    layer = attention_layers(model.depth, trajectory)[1]
    u = model.depth.sublayers[2].input_norm(trajectory[2])
    weights = [matrix.weight for matrix in model.depth.sublayers[2].field.matrices()]
    assert (
        pytest.approx(
            math.prod(float(torch.linalg.matrix_norm(w, ord=2)) for w in weights), rel=1e-8
        )
        == layer.G
    )
    assert pytest.approx(math.sqrt(16) * float(block_norm(u).max())) == layer.B
    assert layer.stream == pytest.approx(math.sqrt(16) * float(block_norm(trajectory[2]).max()))


def test_under_pre_the_stream_grows_and_the_maps_input_does_not():
    """Emadi's E.6 attributes the growth of S to B; theorem 5.1's B is of the normalised input,
    which stays.
    """
    model, trajectory = states("pre", scale=0.0, depth=8, dt=1.0)
    layers = attention_layers(model.depth, trajectory)
    assert layers[-1].stream > 2 * layers[0].stream
    assert pytest.approx(layers[0].B, rel=0.01) == layers[-1].B


def test_theorem_5_1_is_loose():
    model, trajectory = states("pre", width=32, heads=2, scale=0.0)
    assert attention_layers(model.depth, trajectory)[0].ratio > 10


def test_theorem_5_1_needs_the_bias_of_queries():
    """W_Q = 0 leaves the printed bound with the value path alone; b_Q still makes attention depend
    on the keys.
    """
    module = attention(2, causal=False)
    module.qkv.weight.copy_(torch.tensor([[0.0, 0], [0, 0], [1, 0], [0, 1], [1, 0], [0, 1]]))
    module.qkv.bias.copy_(torch.tensor([20.0, 0, 0, 0, 0, 0]))
    module.out.weight.copy_(torch.eye(2))
    x = torch.tensor([[0.5, 4.0], [0.5, -4.0]], dtype=torch.float64)
    b = float(torch.linalg.vector_norm(x, dim=-1).max())
    theta = attention_theta(module, x).upper.amax(-1).tolist()
    with reference_kernels(module):
        measured = block_gain(module, x)
    assert attention_bound(module, b, theta, biases=False).bound == pytest.approx(1.0)
    assert measured > 10
    assert measured <= attention_bound(module, b, theta).bound


def test_theorem_5_2_needs_the_slope_of_the_activation():
    """GELU's slope is 1.13 at sqrt(2): the printed |W_2||W_1| is exceeded."""
    ffn = FeedForward(1, 1, bias=False).double().requires_grad_(False)
    for matrix in ffn.matrices():
        matrix.weight.fill_(1.0)
    measured = block_gain(ffn, torch.full((1, 1), math.sqrt(2), dtype=torch.float64))
    assert 1.0 < measured <= ffn.lipschitz()
    assert ffn.lipschitz() == pytest.approx(measured, rel=1e-5)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_slopes_of_activations_are_their_largest(name):
    z = torch.linspace(-10, 10, 400_001, dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad(ACTIVATIONS[name](z).sum(), z)
    largest = slope.abs() if ACTIVATIONS[name].degree == 1 else (slope.abs() / z.abs())[z != 0]
    assert float(largest.max()) == pytest.approx(ACTIVATIONS[name].slope, rel=1e-5)
    assert float(largest.max()) <= ACTIVATIONS[name].slope


def test_the_local_slope_of_a_norm_is_the_norm_of_its_jacobian_for_unit_gain():
    norm = LayerNorm(6).double()
    x = noise(5, 6)
    dense = torch.linalg.matrix_norm(norm.jacobian(x).detach(), ord=2).max()
    assert norm_slope(norm, x) == pytest.approx(float(dense), rel=1e-12)
    assert norm_slope(None, x) == 1.0


def test_the_printed_block_bound_is_weaker_than_the_local_one():
    model, trajectory = states("pre")
    for layer in block_layers(model.depth, trajectory):
        assert layer.printed > layer.bound


def test_without_eps_the_printed_bound_is_infinite_and_the_local_one_is_not():
    model, trajectory = states("pre", eps=0.0)
    layer = block_layers(model.depth, trajectory)[0]
    assert layer.printed == math.inf
    assert math.isfinite(layer.bound)


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    "changes", [{"heads": 1}, {"width": 2, "heads": 1}, {"width": 2, "heads": 2}]
)
def test_small_models_are_described(changes):
    model = small_model("pre", **changes)
    for text in (tokens(1, 1), tokens(2, 3)):
        trajectory = model.trajectory(text).states
        assert all(layer.finite for layer in attention_layers(model.depth, trajectory))
        assert all(math.isfinite(layer.bound) for layer in block_layers(model.depth, trajectory))


def test_one_token_has_no_attention_path():
    model = small_model("pre")
    layer = attention_layers(model.depth, model.trajectory(tokens(1, 1)).states)[0]
    assert layer.attention_path == layer.softmax_norm == layer.S == 0
    assert layer.log_sensitivity["theta"] == -math.inf


@pytest.mark.slow
def test_equal_tokens_read_each_other_evenly():
    model = small_model("pre", causal=False)
    x = noise(16).expand(1, 35, 16)
    layer = attention_layers(model.depth, states_of(model.depth, x))[0]
    assert layer.theta_max == pytest.approx([1 - 1 / 35**2] * 2, abs=1e-12)
    assert layer.theta_width <= 1e-12


def test_a_state_that_is_not_finite_is_reported_and_the_others_are_computed():
    model, trajectory = states("pre")
    broken = [*trajectory[:2], torch.full_like(trajectory[2], math.nan), *trajectory[3:]]
    layers = attention_layers(model.depth, broken)
    assert [layer.finite for layer in layers] == [True, False, True]
    assert math.isnan(layers[1].bound)
    assert len(layers[1].theta_mean) == 2
    assert {field.name for field in dataclasses.fields(layers[1])} == set(vars(layers[0]))


def test_the_same_seed_gives_the_same_figures():
    model, trajectory = states("peri")
    assert attention_layers(model.depth, trajectory, seed=3) == attention_layers(
        model.depth, trajectory, seed=3
    )


def test_what_the_theorems_do_not_cover_is_refused():
    model, trajectory = states("pre", qk_norm=True)
    for layer in attention_layers(model.depth, trajectory):
        assert math.isnan(layer.bound)
        assert "qk_norm" in layer.note
        assert 0 <= max(layer.theta_max) <= 1
        assert layer.measured > 0
    foreign = Sublayer(nn.Linear(4, 4).double(), "attention")
    with pytest.raises(ConfigError, match="type Linear"):
        step_bound(foreign, 1.0, noise(1, 3, 4))


def test_float32_rows_are_distributions_up_to_float32():
    x = torch.randn(2, 64, 32, generator=torch.Generator().manual_seed(0))
    attention = Attention(32, 4)
    single, double = (
        attention_theta(attention, x),
        attention_theta(copy.deepcopy(attention).double(), x.double()),
    )
    assert torch.allclose(single.lower, double.lower, atol=1e-5)
    assert single.lower.dtype == torch.float64
