import math

import numpy as np
import pytest
import torch
from hypothesis import assume, given, reject, settings
from hypothesis import strategies as st

from ctrans.dynamics.fields import ACTIVATIONS
from ctrans.dynamics.fields.protocols import TokenBound
from ctrans.dynamics.norm import NORMS, RMSNorm
from ctrans.dynamics.placement import PLACEMENTS
from ctrans.dynamics.sublayer import Sublayer
from ctrans.measure.forward.bounds import forward_bounds, map_bound, printed_level, token_spread
from ctrans.measure.forward.moments import moments
from solvers import ConfigError, SolveError, solve
from tests.helpers import NAMES, small_model, tokens

models = st.fixed_dictionaries(
    {
        "placement": st.sampled_from(sorted(PLACEMENTS)),
        "norm": st.sampled_from(sorted(NORMS)),
        "activation": st.sampled_from(sorted(ACTIVATIONS)),
        "dt": st.floats(0.01, 3),
        "scale": st.floats(0, 2),
        "seed": st.integers(0, 10_000),
        "size": st.floats(1e-3, 100),
    }
)


def run(placement, norm, activation, dt, scale, seed, size):
    model = small_model(
        placement, norm=norm, activation=activation, dt=dt, scale=scale, embedding_std=size, width=8
    )
    return model, model.trajectory(tokens(seed=seed))


@pytest.mark.slow
@given(models)
@settings(max_examples=200)
def test_no_measured_moment_exceeds_its_bound(case):
    model, solution = run(**case)
    bounds = forward_bounds(model.depth, solution.states)
    for k, x in enumerate(solution.states):
        m = moments(x)
        for measured, bound in [
            (m.mean_abs, bounds.mean_abs),
            (m.rms, bounds.rms),
            (m.variance, bounds.variance),
            (m.mean_abs, bounds.seed_mean_abs),
            (m.variance, bounds.seed_variance),
        ]:
            if bound is not None:
                assert measured <= bound[k] * (1 + 1e-12), (case, k)


@pytest.mark.slow
@given(
    st.sampled_from(sorted(PLACEMENTS)),
    st.sampled_from(sorted(NORMS)),
    st.sampled_from(["xavier", "he", "large"]),
    st.sampled_from([0.1, 0.5, 1.0]),
    st.integers(0, 10_000),
)
@settings(max_examples=40)
def test_the_bounds_hold_along_the_ode_too(placement, norm, initialisation, dt, seed):
    """For its exact solution, so for a convergent method up to its error; where there is an ODE,
    and steps enough to solve it.
    """
    assume(NORMS[norm](8).has_tangent or not PLACEMENTS[placement].state_norm)
    model = small_model(
        placement, norm=norm, initialisation=initialisation, dt=dt, scale=0.2, width=8, depth=2
    )
    try:
        solution = model.trajectory(
            tokens(1, 4, seed=seed), method="tsit5", rtol=1e-4, atol=1e-4, continuous=True
        )
    except SolveError as error:
        if "step limit" not in str(error):
            raise
        reject()  # without norms large weights make it too stiff for an explicit method
    bounds = forward_bounds(model.depth, solution.states, discrete=False)
    assert all(
        moments(x).rms <= bound * 1.001
        for x, bound in zip(solution.states, bounds.rms, strict=True)
    )


def test_without_norms_the_ode_outgrows_the_discrete_models_bound_but_not_its_own():
    model = small_model("none", activation="relu", scale=0.0, bias=False, width=8, dt=1.0, depth=1)
    with torch.no_grad():
        for part in model.depth.sublayers[1].field.parameters():
            part.copy_(torch.eye(*part.shape) * 2)
        model.depth.sublayers[0].field.output_projection.weight.zero_()
        x0 = torch.zeros(1, 1, 8, dtype=torch.float64)
        x0[..., 0] = 1.0
    states = solve(
        model.depth.segments(continuous=True),
        x0,
        method="tsit5",
        rtol=1e-10,
        atol=1e-12,
        save="segments",
    ).states
    # dx/dt = 4 x along the first axis: the state is e^4, Gronwall's bound is attained, 1 + 4 is
    # exceeded
    last = [
        forward_bounds(model.depth, states, discrete=discrete).rms[-1] for discrete in (True, False)
    ]
    assert moments(states[-1]).rms > 10 * last[0]
    assert moments(states[-1]).rms == pytest.approx(last[1], rel=1e-6)


@pytest.mark.slow
@given(models)
@settings(max_examples=100)
def test_the_sharper_bound_is_never_above_the_seeds(case):
    model, solution = run(**{**case, "placement": "output" if case["placement"] < "o" else "peri"})
    bounds = forward_bounds(model.depth, solution.states)
    assert all(
        a <= b * (1 + 1e-12) for a, b in zip(bounds.mean_abs, bounds.seed_mean_abs, strict=True)
    )
    assert all(
        a <= b * (1 + 1e-12) for a, b in zip(bounds.variance, bounds.seed_variance, strict=True)
    )


def test_the_bound_behind_an_output_norm_is_attained_by_a_constant_velocity():
    """One token per sequence and maps whose output is a fixed sign vector: every step adds dt to
    every entry.
    """
    model = small_model("peri", scale=0.0, dt=0.25, norm="rmsnorm", eps=0.0)
    signs = torch.ones(16, dtype=torch.float64)
    with torch.no_grad():
        for sublayer in model.depth.sublayers:
            sublayer.field.output_projection.weight.zero_()
            sublayer.field.output_projection.bias.copy_(signs)
        x0 = torch.full((1, 1, 16), 0.5, dtype=torch.float64)
        x1 = model.depth(x0)
    bounds = forward_bounds(model.depth, [x0] * 7)
    assert (
        moments(x1).mean_abs
        == pytest.approx(bounds.mean_abs[-1], rel=1e-14)
        == pytest.approx(0.5 + 6 * 0.25, rel=1e-14)
    )


@pytest.mark.parametrize(
    ("norms", "bound", "apart"),
    [
        (("state_norm",), None, math.inf),
        (("output_norm",), None, math.inf),
        (("input_norm",), TokenBound(2.0, 0.0), math.inf),
        (("input_norm",), None, 2.0),
    ],
)
def test_the_token_spread_is_attained_by_two_opposite_tokens(norms, bound, apart):
    """Tokens +-e_1, along which the gain of the norm and the map diag(2, 1, 1, 1) are largest."""
    norm, field = RMSNorm(4, 0.0).double(), torch.nn.Linear(4, 4, bias=False).double()
    with torch.no_grad():
        norm.weight.copy_(torch.tensor([3.0, 1.0, 1.0, 1.0]))
        field.weight.copy_(torch.diag(torch.tensor([2.0, 1.0, 1.0, 1.0])))
    sublayer = Sublayer(field, "ffn", **dict.fromkeys(norms, norm))
    x = torch.tensor([[[1.0, 0, 0, 0], [-1.0, 0, 0, 0]]], dtype=torch.float64)
    with torch.no_grad():
        found = norm(x + sublayer(x)) if sublayer.state_norm is not None else sublayer(x)
    assert token_spread(sublayer, bound, apart) == pytest.approx(
        float((found[0, 0] - found[0, 1]).norm()), rel=1e-12
    )


def test_moments_are_numpys():
    x = torch.randn(3, 4, 5)
    a = x.double().numpy()
    m = moments(x)
    assert (m.mean_abs, m.variance, m.rms) == pytest.approx(
        (np.abs(a).mean(), a.var(ddof=1), math.sqrt((a**2).mean())), rel=1e-12
    )
    assert moments(torch.ones(1, 1, 1)).variance == 0


def test_the_common_share_is_that_of_the_mean_over_tokens():
    common, own = torch.tensor([3.0, 0.0]), torch.tensor([[0.0, 4.0], [0.0, -4.0]])
    assert moments(common + own).common == pytest.approx(9 / 25)
    assert moments(own).common == 0
    assert moments(torch.zeros(2, 3)).common == 0
    x = torch.randn(5, 7, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    spread = sum(float((row - x.mean((0, 1))).square().sum()) for row in x.reshape(-1, 3)) / float(
        x.square().sum()
    )
    assert moments(x).common == pytest.approx(1 - spread)


def test_seeds_exist_where_the_papers_state_them():
    for name in NAMES:
        model = small_model(name)
        bounds = forward_bounds(model.depth, model.trajectory(tokens()).states)
        assert (bounds.seed_mean_abs is not None) == (name in ("pre", "peri", "output"))


def test_a_map_that_states_no_bound_is_named():
    with pytest.raises(ConfigError, match="no bound is known: Linear has no method"):
        map_bound(Sublayer(torch.nn.Linear(4, 4), "ffn"))


def test_what_is_printed_has_the_largest_gain_of_a_box_too():
    """The diameter of a box of unequal gains is less than that of a ball with the largest one."""
    norm = NORMS["dyt"](4).double().requires_grad_(False)
    norm.weight.copy_(torch.tensor([1.0, 3.0, 1.0, 1.0]))
    assert printed_level([norm]) == pytest.approx(3.0)
    assert norm.half_diameter == pytest.approx(math.sqrt(3))
