"""Solves of drawn shapes, dtypes and strides against a closed form, for every method."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from solvers import METHODS, ConfigError, Segment, solve

NAMES = sorted(name for name in METHODS if ":" not in name)
SHAPES = st.lists(st.integers(1, 4), max_size=3).map(tuple)
VIEWS = {
    "dense": lambda x: x,
    "transposed": lambda x: x.transpose(0, -1).contiguous().transpose(0, -1) if x.dim() else x,
    "spread out": lambda x: torch.stack([x, x], -1)[..., 0],
    "expanded": lambda x: x.flatten()[:1].reshape([1] * x.dim()).expand(x.shape),
}
STATES = st.tuples(
    SHAPES,
    st.sampled_from([torch.float32, torch.float64]),
    st.sampled_from(sorted(VIEWS)),
    st.integers(0, 2**31),
)


def state(drawn):
    shape, dtype, view, seed = drawn
    return VIEWS[view](
        torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)
    )


def decay(t, x):
    return -x


@pytest.mark.cases(6)
@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=8)
@given(drawn=STATES)
def test_x_of_a_linear_field_is_x0_over_e_for_every_shape_dtype_and_stride(name, drawn):
    x0 = state(drawn)
    before = x0.clone()
    request = {} if METHODS[name].adaptive else {"steps": 64}
    x1 = solve([Segment(0, 1, decay)], x0, method=name, **request).x1
    assert (x1.shape, x1.dtype, x1.device) == (x0.shape, x0.dtype, x0.device)
    assert torch.equal(x0, before), "the initial state is left alone"
    # (1 - h)^64 differs from 1/e by 0.0029; every other method is nearer
    assert torch.allclose(x1.double(), before.double() * math.exp(-1), rtol=0.01, atol=1e-5)


@pytest.mark.cases(2)
@pytest.mark.parametrize("name", ["euler", "rk4", "tsit5"])
@settings(max_examples=15)
@given(drawn=STATES, cut=st.floats(0.1, 0.9))
def test_two_segments_are_one_solve_after_the_other(name, drawn, cut):
    x0 = state(drawn)
    fields = [lambda t, x: -x, lambda t, x: torch.cos(x)]
    segments = [Segment(0, cut, fields[0]), Segment(cut, 1, fields[1])]
    request = {"rtol": 1e-5, "atol": 1e-6} if METHODS[name].adaptive else {"steps": 3}
    whole = solve(segments, x0, method=name, **request).x1
    first = solve(segments[:1], x0, method=name, **request).x1
    parts = solve(segments[1:], first, method=name, **request).x1
    if METHODS[name].adaptive:
        # One solve goes on with the step size of the segment before, and two choose it anew.
        torch.testing.assert_close(parts, whole, **request)
    else:
        assert torch.equal(parts, whole)


@pytest.mark.cases(2)
@pytest.mark.parametrize("name", ["midpoint", "rk4", "dopri5"])
@settings(max_examples=10)
@given(drawn=STATES, factor=st.floats(-3, 3), power=st.integers(-60, 60))
def test_a_linear_solve_is_homogeneous_to_the_bit_in_powers_of_two(name, drawn, factor, power):
    x0 = state(drawn).double()
    request = {"rtol": 1e-4, "atol": 1e-300} if METHODS[name].adaptive else {"steps": 5}
    segments = [Segment(0, 1, lambda t, x: factor * x)]
    scaled = solve(segments, x0 * 2.0**power, method=name, **request).x1
    assert torch.equal(scaled, solve(segments, x0, method=name, **request).x1 * 2.0**power)


@settings(max_examples=30)
@given(shape=st.lists(st.integers(0, 3), min_size=1, max_size=3).map(tuple))
def test_an_empty_state_is_refused_and_any_other_one_is_solved(shape):
    x0 = torch.ones(shape)
    if x0.numel():
        assert solve([Segment(0, 1, decay)], x0, method="rk4").x1.shape == shape
    else:
        with pytest.raises(ConfigError, match="non-empty"):
            solve([Segment(0, 1, decay)], x0, method="rk4")
