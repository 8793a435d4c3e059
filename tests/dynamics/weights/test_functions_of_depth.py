import copy
import dataclasses
import math
from fractions import Fraction
from itertools import pairwise

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given
from torch.func import functional_call

from ctrans.control.costate import costate
from ctrans.dynamics.weights.functions_of_depth import (
    BASES,
    InDepth,
    blocks_through,
    coefficients_of,
)
from ctrans.measure.forward.simulation import simulate
from ctrans.model.gpt import GPT
from ctrans.model.orders import Convergence
from ctrans.model.size import number_of_weights
from solvers import ConfigError, Segment, solve
from tests.helpers import NAMES, learned, small_config, small_model, tokens

every = pytest.mark.parametrize("name", NAMES)
bases = pytest.mark.parametrize("basis", sorted(BASES))
places = st.fractions(0, 1, max_denominator=997)
counts = st.integers(1, 9)
KNOTS = 3


def model_in_depth(basis, placement="peri", scale=0.2, **changes):
    """A model whose every coefficient is off its initial value."""
    config = small_config(
        placement, **{"depth": 5, "depth_weights": basis, "knots": KNOTS, **changes}
    )
    return learned(GPT(config).double(), scale)


def plain(parameters, name, j):
    """Coefficient c_j of the parameter that a free block calls `name`."""
    head, _, tail = name.rpartition(".")
    return parameters[f"{head}.parametrizations.{tail}.original{j}"]


def theta_by_hand(depth, k, s):
    """Every parameter of sublayer k of a block at the place s, from coefficients and formulas that
    numpy knows.
    """
    sublayer = depth.sublayers[k]
    parameters = dict(sublayer.named_parameters())
    theta = next(part for part in sublayer.modules() if isinstance(part, InDepth))
    phi = {
        "constant": lambda: [
            float(math.floor(s * KNOTS) == j or (s == 1 and j == KNOTS - 1)) for j in range(KNOTS)
        ],
        "linear": lambda: [
            np.interp(float(s), np.linspace(0, 1, KNOTS), np.eye(KNOTS)[j]) for j in range(KNOTS)
        ],
        "chebyshev": (
            lambda: np.polynomial.chebyshev.chebvander(2 * float(s) - 1, KNOTS - 1).ravel()
        ),
        "network": (
            lambda: (
                np.polynomial.chebyshev.chebvander(2 * float(s) - 1, KNOTS - 1).ravel()
                + network_by_hand(theta, s)
            )
        ),
    }[theta.basis]()
    names = {
        n.replace("parametrizations.", "").rpartition(".")[0]
        for n in parameters
        if ".original" in n
    }
    return {
        name: sum(float(phi[j]) * plain(parameters, name, j) for j in range(KNOTS))
        for name in names
    }


def network_by_hand(theta, s):
    """W_2 silu(W_1 e(s) + b_1) of numpy."""
    up, bias, down = (
        getattr(theta.network, name).detach().numpy() for name in ("up", "bias", "down")
    )
    angles = np.pi * float(s) * 2.0 ** np.arange(4)
    hidden = up @ np.stack([np.sin(angles), np.cos(angles)], 1).ravel() + bias
    return down @ (hidden / (1 + np.exp(-hidden)))


def free_copy(model):
    """The same function of free blocks, each with the values that theta has there."""
    free = GPT(dataclasses.replace(model.config, depth_weights="free", knots=None)).double()
    for mine, theirs in zip(free.depth.sublayers, model.depth.sublayers, strict=True):
        for name, parameter in mine.named_parameters():
            head, _, tail = name.rpartition(".")
            parameter.data.copy_(getattr(theirs.get_submodule(head), tail))
    for part in ("token_embedding", "position_embedding", "final_norm"):
        getattr(free, part).load_state_dict(getattr(model, part).state_dict())
    return free


@given(places, counts)
def test_constant_and_linear_bases_are_partitions_of_unity(s, count):
    for name in ("constant", "linear"):
        values = BASES[name].functions(s, count)
        assert sum(values) == pytest.approx(1, abs=1e-15)
        assert min(values) >= 0


@given(places, counts)
def test_the_chebyshev_basis_is_numpys(s, count):
    expected = np.polynomial.chebyshev.chebvander(2 * float(s) - 1, count - 1).ravel()
    assert BASES["chebyshev"].functions(s, count) == pytest.approx(expected, abs=1e-12)


@pytest.mark.cases(1)
@bases
@given(places, st.integers(1, 16))
def test_interpolation_keeps_the_variance_of_independent_values_between_a_half_and_a_tenth_more(
    basis, s, count
):
    lagrange = torch.tensor(BASES[basis].functions(s, count), dtype=torch.float64) @ BASES[
        basis
    ].coefficients(count)
    assert 0.5 - 1e-9 <= float(lagrange.square().sum()) <= 1.1
    assert float(lagrange.sum()) == pytest.approx(1, abs=1e-12)


@bases
@pytest.mark.parametrize("knots", [1, 2, 3, 4])
def test_theta_passes_through_the_modules_at_its_knots(basis, knots):
    modules = [learned(torch.nn.Linear(3, 2).double(), seed=j) for j in range(knots)]
    (block,) = blocks_through(modules, basis, 1)
    for module, s in zip(modules, BASES[basis].knots(knots), strict=True):
        for name in ("weight", "bias"):
            block.parametrizations[name][0].move(s)
            assert torch.allclose(getattr(block, name), getattr(module, name), atol=1e-14)


@bases
def test_every_parameter_of_every_block_is_theta_at_the_blocks_middle(basis):
    model = model_in_depth(basis, qk_norm=True)
    for i in range(model.config.depth):
        for k in (0, 1):
            sublayer = model.depth.sublayers[2 * i + k]
            expected = theta_by_hand(model.depth, k, Fraction(2 * i + 1, 2 * model.config.depth))
            assert len(expected) == (10 if k == 0 else 8)
            for name, value in expected.items():
                head, _, tail = name.rpartition(".")
                assert torch.allclose(
                    getattr(sublayer.get_submodule(head), tail), value, atol=1e-14
                ), name


@every
def test_constant_weights_with_a_knot_for_each_block_are_free_weights_bit_for_bit(name):
    free = GPT(small_config(name, depth=4))
    shared = GPT(small_config(name, depth=4, depth_weights="constant", knots=4))
    assert torch.equal(free(tokens())[0], shared(tokens())[0])


@bases
@pytest.mark.parametrize("depth", [3, 4, 9])
def test_the_number_of_parameters_does_not_depend_on_depth(basis, depth):
    model = GPT(small_config("peri", depth=depth, depth_weights=basis, knots=KNOTS))
    own = {name: p for name, p in model.named_parameters() if ".network." not in name}
    assert len(dict(model.named_parameters())) - len(own) == 3 * (
        basis == "network"
    )  # one for all parameters
    assert sum(p.numel() for p in own.values()) == sum(
        p.numel() for p in GPT(small_config("peri", depth=KNOTS)).parameters()
    )
    assert number_of_weights(model.config) == sum(p.numel() for p in own.values() if p.dim() == 2)


@pytest.mark.cases(1)
@pytest.mark.parametrize("name", ["peri", "deepnorm"])
@bases
def test_a_coefficients_gradient_is_the_free_blocks_gradients_weighted_by_its_function(basis, name):
    model = model_in_depth(basis, name)
    free = free_copy(model)
    ids, targets = tokens(), tokens(seed=1)
    loss, expected = model(ids, targets)[1], free(ids, targets)[1]
    assert float(loss) == pytest.approx(float(expected), rel=1e-12)
    loss.backward()
    expected.backward()
    for k in (0, 1):
        coefficients = dict(model.depth.sublayers[k].named_parameters())
        shares = [
            s.field.output_projection.parametrizations.weight[0].shares
            for s in list(model.depth.sublayers)[k::2]
        ]
        gradients = [dict(s.named_parameters()) for s in list(free.depth.sublayers)[k::2]]
        for key in gradients[0]:
            for j in range(KNOTS):
                total = sum(
                    share[j] * block[key].grad
                    for share, block in zip(shares, gradients, strict=True)
                )
                assert torch.allclose(plain(coefficients, key, j).grad, total, atol=1e-12), (key, j)


@pytest.mark.cases(1)
@bases
def test_resampling_takes_theta_exactly_with_coefficients_of_its_own(basis):
    depth = model_in_depth(basis).depth
    for finer in (
        depth.refine(3),
        depth.refine(3, "linear"),
        depth.resample(7),
        depth.resample(2),
        depth.resample(depth.blocks // 5),
    ):
        for i in range(finer.blocks):
            for k in (0, 1):
                expected = theta_by_hand(depth, k, Fraction(2 * i + 1, 2 * finer.blocks))[
                    "field." + ("qkv", "up")[k] + ".weight"
                ]
                field = finer.sublayers[2 * i + k].field
                assert torch.allclose(
                    field.up.weight if k else field.qkv.weight, expected, atol=1e-14
                )
        mine, theirs = coefficients_of([depth]), coefficients_of([finer])
        assert len(mine) == len(theirs) == len(list(finer.parameters()))
        assert not mine.keys() & theirs.keys()
        assert finer.times[-1] == pytest.approx(depth.times[-1], rel=1e-15)


@pytest.mark.cases(1)
@bases
def test_coarsening_undoes_refining_bit_for_bit(basis):
    depth = model_in_depth(basis).depth
    back = depth.refine(3).resample(depth.blocks)
    x = torch.randn(1, 4, 16, dtype=torch.float64)
    assert torch.equal(back(x), depth(x))


@pytest.mark.slow
@bases
def test_symmetric_blocks_share_theta(basis):
    depth = model_in_depth(basis).depth
    macaron = depth.symmetric()
    assert macaron.sublayers[0] is macaron.sublayers[2] is depth.sublayers[1]
    finer = macaron.refine(2)
    assert finer.sublayers[0] is finer.sublayers[2]
    assert torch.equal(
        finer.sublayers[4].field.qkv.weight, depth.refine(2).sublayers[2].field.qkv.weight
    )


@pytest.mark.cases(1)
@bases
def test_a_copy_a_change_of_dtype_and_a_state_dict_keep_what_is_shared(basis):
    model = model_in_depth(basis)
    other = model_in_depth(basis)
    learned(other, seed=9)
    other.load_state_dict(model.state_dict())
    count = len(list(model.parameters()))
    for again in (copy.deepcopy(model), other, copy.deepcopy(model).float().double()):
        assert len(list(again.parameters())) == count
        assert torch.allclose(again(tokens())[0], model(tokens())[0], atol=1e-5)
    assert all(p.dtype == torch.float32 for p in copy.deepcopy(model).float().parameters())
    frozen = copy.deepcopy(model).requires_grad_(False)
    assert not frozen.depth.sublayers[0].field.qkv.weight.requires_grad
    assert model.depth.sublayers[0].field.qkv.weight.requires_grad


def test_setting_a_parameter_sets_theta_there():
    field = model_in_depth("chebyshev").depth.sublayers[4].field
    value = torch.randn(16, 16, dtype=torch.float64)
    field.out.weight = value
    assert torch.allclose(field.out.weight, value, atol=1e-14)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("basis", "placement"), [*((basis, "peri") for basis in sorted(BASES)), ("linear", "post")]
)
def test_more_blocks_converge_at_order_one_to_the_averaged_ode(basis, placement):
    """The limit is integrated by itself: (v_attn + v_ffn)/2 with theta(t/T) from the coefficients,
    in pieces on which it is smooth.
    """
    # a norm around the state keeps gain 1: an image that moves with depth moves the state with it
    scale = 0.0 if placement == "post" else 0.2
    model = model_in_depth(
        basis, placement, scale, depth=4, dt=0.25, activation="silu"
    ).requires_grad_(False)
    depth = model.depth
    x = model.embed(tokens())
    x = x if placement != "post" else depth.sublayers[0].state_norm.retract(x)
    total = depth.times[-1]
    twins = [Velocity(sublayer) for sublayer in list(free_copy(model).depth.sublayers)[:2]]

    def field(low, high):
        def velocity(t, x):
            s = min(
                max(Fraction(float(t) / total), low), high - Fraction(1, 10**9)
            )  # the end belongs to the next stretch
            theta = [
                {f"sublayer.{name}": value for name, value in theta_by_hand(depth, k, s).items()}
                for k in (0, 1)
            ]
            return (
                sum(
                    functional_call(twin, now, (x,)) for twin, now in zip(twins, theta, strict=True)
                )
                / 2
            )

        return velocity

    pieces = {"constant": KNOTS, "linear": KNOTS - 1}.get(basis, 1)
    edges = [Fraction(i, pieces) for i in range(pieces + 1)]
    segments = [
        Segment(float(a) * total, float(b) * total, field(a, b)) for a, b in pairwise(edges)
    ]
    exact = solve(segments, x, method="rk4", steps=(60 if basis == "network" else 12) // pieces).x1
    finer = 4 if basis == "network" else 1  # it turns several times over the depth
    sizes = tuple(finer * n for n in (6, 12, 18, 24, 30))  # whole blocks on every stretch
    ends = [
        solve(depth.resample(n).segments(continuous=True), x, method="midpoint").x1 for n in sizes
    ]
    errors = tuple(float((end - exact).norm() / exact.norm()) for end in ends)
    assert Convergence("depth", "plain", placement, sizes, errors, 1).order == pytest.approx(
        1, abs=0.15
    )


@pytest.mark.slow
@pytest.mark.parametrize(("method", "order"), [("euler", 1), ("midpoint", 2)])
@pytest.mark.parametrize("basis", ["chebyshev", "network"])
def test_with_one_segment_a_block_refinement_in_depth_converges_at_the_methods_order(
    basis, method, order
):
    """theta frozen at the middle of a block is a midpoint rule in depth-time: of order 2 where the
    method is of no less.
    """
    model = model_in_depth(
        basis, "pre", 0.1, depth=4, dt=0.5, activation="silu", parallel_blocks=True
    ).requires_grad_(False)
    depth, x = model.depth, model.embed(tokens())
    total = depth.times[-1]
    twin = Velocity(next(iter(free_copy(model).depth.sublayers)))

    def velocity(t, x):
        theta = theta_by_hand(depth, 0, Fraction(float(t) / total))
        return functional_call(
            twin, {f"sublayer.{name}": value for name, value in theta.items()}, (x,)
        )

    exact = solve([Segment(0.0, total, velocity)], x, method="rk4", steps=120).x1
    sizes = (32, 64, 128)
    ends = [solve(depth.resample(n).segments(), x, method=method).x1 for n in sizes]
    errors = tuple(float((end - exact).norm() / exact.norm()) for end in ends)
    assert Convergence("depth", "plain", "pre", sizes, errors, order).order == pytest.approx(
        order, abs=0.15
    )


def test_the_network_and_the_coefficients_are_trained_and_begin_as_polynomials():
    model = GPT(small_config("peri", depth=5, depth_weights="network", knots=KNOTS))
    polynomials = GPT(small_config("peri", depth=5, depth_weights="chebyshev", knots=KNOTS))
    torch.testing.assert_close(model(tokens())[0], polynomials(tokens())[0], rtol=0, atol=1e-5)
    model(tokens(), tokens(seed=1))[1].backward()
    named = dict(model.named_parameters())
    assert all(named[name].grad.any() for name in named if name.endswith(".network.down"))
    with torch.no_grad():
        for name, parameter in named.items():
            if name.endswith(".network.down"):
                parameter -= 0.1 * parameter.grad
    model.zero_grad()
    model(tokens(), tokens(seed=1))[1].backward()
    assert all(p.grad is not None and p.grad.any() for p in named.values() if p.dim() == 2)


@pytest.mark.cases(1)
@bases
def test_a_discretisation_is_the_gpt_with_the_sampled_weights_bit_for_bit(basis):
    model = model_in_depth(basis).at_depth(7)
    assert torch.equal(free_copy(model)(tokens())[0], model(tokens())[0])


class Velocity(torch.nn.Module):
    def __init__(self, sublayer):
        super().__init__()
        self.sublayer = sublayer

    def forward(self, x):
        return self.sublayer.velocity(x)


@every
def test_an_evaluation_at_another_depth_keeps_depth_time_and_alpha(name):
    model = small_model(name, depth=2)
    for blocks in (1, 2, 3, 8):
        other = model.at_depth(blocks)
        assert other.config.depth == other.depth.blocks == blocks
        assert other.config.dt == other.depth.dt
        assert other.depth.times[-1] == pytest.approx(model.depth.times[-1], rel=1e-15)
        assert other.depth.sublayers[0].gain == model.depth.sublayers[0].gain
    assert torch.equal(model.at_depth(2)(tokens())[0], model(tokens())[0])


@pytest.mark.cases(1)
@pytest.mark.parametrize("name", ["peri", "post"])
def test_twice_the_blocks_halve_the_distance_to_the_limit(name):
    """Free weights: theta is linear between the blocks' midpoints. Norms keep gain 1 (theory,
    section 3).
    """
    model = GPT(small_config(name, depth=2)).double().requires_grad_(False)
    logits = [model.at_depth(blocks)(tokens())[0] for blocks in (16, 32, 64)]
    assert float((logits[1] - logits[0]).norm() / (logits[2] - logits[1]).norm()) == pytest.approx(
        2, rel=0.05
    )


def test_an_evaluation_at_another_depth_leaves_the_model_alone():
    model = model_in_depth("linear")
    before, gradient = model(tokens())[0], next(model.parameters()).requires_grad
    learned(model.at_depth(7))
    assert torch.equal(model(tokens())[0], before)
    assert next(model.parameters()).requires_grad == gradient
    assert model.config.depth == 5
    with pytest.raises(ConfigError, match="blocks = 0"):
        model.at_depth(0)
    with pytest.raises(ConfigError, match="did you mean 'linear'"):
        model.at_depth(2, "linaer")


@pytest.mark.cases(1)
@bases
def test_what_looks_at_models_takes_functions_of_depth_for_weights(basis):
    """Growth bounds, costates and velocities are those of the free model with the same values."""
    model = model_in_depth(basis).requires_grad_(False)
    free = free_copy(model).requires_grad_(False)
    ours, theirs = simulate(model, tokens()), simulate(free, tokens())
    assert ours.bounds.rms == pytest.approx(theirs.bounds.rms, rel=1e-12)
    assert ours.rms == pytest.approx(theirs.rms, rel=1e-12)
    p, q = (costate(m, tokens(), tokens(seed=1)).costates for m in (model, free))
    assert all(torch.allclose(a, b, atol=1e-13) for a, b in zip(p, q, strict=True))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"depth_weights": "chebyshv"}, "did you mean 'chebyshev'"),
        ({"depth_weights": "linear", "knots": 0}, "knots = 0"),
        ({"knots": 4}, "no meaning for free weights"),
    ],
)
def test_functions_of_depth_that_cannot_be_are_refused(changes, words):
    with pytest.raises(ConfigError, match=words):
        small_config("peri", **changes)


def test_an_unknown_basis_is_named():
    with pytest.raises(ConfigError, match="did you mean 'linear'"):
        blocks_through([torch.nn.Linear(2, 2)], "lineer", 3)
