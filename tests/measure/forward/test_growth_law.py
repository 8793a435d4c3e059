import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ctrans.measure.forward.bounds import forward_bounds
from ctrans.measure.forward.growth_law import LAWS, growth_law
from ctrans.measure.forward.single_entries import (
    data_variance,
    largest_entry,
    massive_activations,
    variance_over_inputs,
)
from tests.helpers import NAMES, small_model, tokens

TIMES = np.linspace(0, 4.8, 25)


def fitted(times, values):
    return growth_law(list(times), list(values))


SERIES = {
    "constant": 3 + 0 * TIMES,
    "linear": 0.3 + 2.5 * TIMES,
    "quadratic": 0.5 + 0.1 * TIMES + 1.5 * TIMES**2,
    "exponential": 0.2 * np.exp(0.9 * TIMES),
    "power": 0.7 * (1 + 2 * TIMES) ** 0.6,
}


@pytest.mark.parametrize("law", sorted(LAWS))
@pytest.mark.parametrize("noise", [0.0, 0.005])
def test_each_law_is_recognised_in_its_own_data(law, noise):
    found = fitted(
        TIMES, SERIES[law] * np.exp(noise * np.random.default_rng(1).standard_normal(len(TIMES)))
    )
    assert found.law == law
    assert sum(found.weights) == pytest.approx(1)
    assert found.weights == sorted(found.weights, reverse=True)
    assert found.fits[0].misfit == pytest.approx(noise, rel=0.35, abs=1e-6)


def test_parameters_are_those_of_the_data():
    assert fitted(TIMES, SERIES["linear"]).fits[0].parameters == pytest.approx(
        {"start": 0.3, "end": 12.3}, rel=1e-6
    )
    assert fitted(TIMES, SERIES["exponential"]).fits[0].parameters == pytest.approx(
        {"start": 0.2, "rate": 0.9 * 4.8}, rel=1e-6
    )
    expected = {"start": 0.7, "exponent": 0.6, "onset": 0.5 / 4.8}
    assert fitted(TIMES, SERIES["power"]).fits[0].parameters == pytest.approx(expected, rel=1e-3)


@given(st.floats(1e-6, 1e6), st.sampled_from(sorted(SERIES)))
@settings(max_examples=20)
def test_units_do_not_matter(unit, law):
    assert fitted(TIMES, unit * SERIES[law]).law == law


def test_values_without_a_logarithm_are_left_out_and_too_few_make_no_law():
    broken = SERIES["linear"].copy()
    broken[20:] = [np.inf, np.nan, 0.0, -1.0, np.inf]
    assert fitted(TIMES, broken).law == "linear"
    assert fitted(TIMES[:3], SERIES["linear"][:3]) is None
    assert [fit.law for fit in fitted(TIMES[:4], SERIES["linear"][:4]).fits] == ["constant"]


def test_falling_moments_have_laws_too():
    assert fitted(TIMES, 5 - TIMES).law == "linear"
    assert fitted(TIMES, np.exp(-TIMES)).law == "exponential"


def test_massive_activations_are_the_largest_over_the_median_with_their_channel():
    x = torch.ones(2, 3, 4)
    x[1, 0, 2] = -50
    states = [torch.ones(2, 3, 4), x, torch.full((2, 3, 4), torch.inf), torch.zeros(2, 3, 4)]
    found = massive_activations([largest_entry(state) for state in states])
    assert found.ratio[:2] == [1, 50]
    assert found.largest[1] == 50
    assert found.channel[1] == 2
    assert np.isnan(found.ratio[2:]).all()


def over_inputs(model, states):
    return data_variance(
        model.depth,
        states[0],
        [variance_over_inputs(x) for x in states],
        forward_bounds(model.depth, states),
    )


@pytest.mark.slow
@given(
    st.sampled_from(NAMES),
    st.floats(0.01, 3),
    st.floats(0, 2),
    st.floats(1e-3, 30),
    st.integers(0, 10_000),
)
@settings(max_examples=100)
def test_no_variance_across_data_exceeds_its_bounds(placement, dt, scale, size, seed):
    model = small_model(placement, dt=dt, scale=scale, embedding_std=size, width=4, depth=2)
    states = model.trajectory(tokens(5, 3, seed=seed)).states
    found = over_inputs(model, states)
    expected = np.var(torch.stack(states).numpy(), axis=1)
    assert found.largest == pytest.approx(expected.max((1, 2)).tolist(), rel=1e-9, abs=1e-12)
    assert found.mean == pytest.approx(expected.mean((1, 2)).tolist(), rel=1e-9, abs=1e-12)
    assert (found.printed_bound is not None) is (placement in {"peri", "output"})
    for bound in (found.bound, found.printed_bound):
        assert bound is None or all(
            v <= b * (1 + 1e-9) + 1e-12 for v, b in zip(found.largest, bound, strict=True)
        )


def test_the_sharper_bound_across_data_is_far_below_theorem_5():
    model = small_model("peri")
    found = over_inputs(model, model.trajectory(tokens(8)).states)
    assert found.used[-1] > 5 * found.printed_used[-1] > 0


@pytest.mark.filterwarnings("error")
def test_a_model_that_is_trained_is_looked_at_without_a_warning():
    model = small_model("peri").requires_grad_(True)
    with torch.no_grad():
        states = model.trajectory(tokens(8)).states
    assert over_inputs(model, states).printed_bound is not None
