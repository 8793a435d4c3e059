"""Every norm at drawn inputs: its value by numpy, its Jacobian by autograd, its support function by
its own members.
"""

import math

import hypothesis.extra.numpy as arrays
import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch.autograd.functional import jacobian

from ctrans.dynamics.norm import NORMS
from ctrans.dynamics.norm.norm import row_length

WIDTH = 4
each = pytest.mark.parametrize("name", sorted(NORMS))
ROWS = arrays.arrays(
    np.float64,
    st.tuples(st.integers(1, 3), st.just(WIDTH)),
    elements=st.floats(-1e3, 1e3, width=32),
)
GAINS = st.lists(st.floats(0.25, 4), min_size=WIDTH, max_size=WIDTH)


def made(name, gains, eps=1e-5):
    """The norm with drawn gains, as far as it has any."""
    norm = NORMS[name](WIDTH, eps).double().requires_grad_(False)
    if isinstance(getattr(norm, "weight", None), torch.Tensor) and norm.weight.numel() == WIDTH:
        norm.weight.copy_(torch.tensor(gains))
    return norm


def by_numpy(name, x, gains, eps):
    """LN and RMSNorm, from their definitions."""
    x = x - x.mean(-1, keepdims=True) if name == "layernorm" else x
    return np.array(gains) * x / np.sqrt((x**2).mean(-1, keepdims=True) + eps)


@pytest.mark.parametrize("name", ["layernorm", "rmsnorm"])
@settings(max_examples=50)
@given(x=ROWS, gains=GAINS, eps=st.floats(1e-8, 1))
def test_the_value_is_that_of_the_definition(name, x, gains, eps):
    found = made(name, gains, eps)(torch.from_numpy(x)).numpy()
    np.testing.assert_allclose(found, by_numpy(name, x, gains, eps), rtol=1e-7, atol=1e-6)


@pytest.mark.cases(4)
@each
@settings(max_examples=20)
@given(x=ROWS, gains=GAINS)
def test_the_jacobian_is_that_of_autograd(name, x, gains):
    norm, row = (
        made(name, gains),
        torch.from_numpy(x)[0] / 100 + torch.tensor([0.3, -0.1, 0.2, 0.05], dtype=torch.float64),
    )
    if name.startswith("clip"):  # no derivative where it starts to clip
        assume(
            bool((norm(row * (1 + 1e-6)) - norm(row)).abs().max() > 0)
            and float((row.abs() - 1).abs().min()) > 1e-3
        )
        assume(abs(float(row.norm()) - math.sqrt(WIDTH)) > 1e-3)
    dense = jacobian(norm, row)
    torch.testing.assert_close(norm.jacobian(row), dense, rtol=1e-6, atol=1e-7)
    assert float(norm.slope(row)) >= float(torch.linalg.matrix_norm(dense, 2)) * (1 - 1e-9)


@pytest.mark.cases(4)
@each
@settings(max_examples=20)
@given(x=ROWS, p=ROWS, q=ROWS, gains=GAINS, power=st.integers(-30, 30))
def test_the_support_function(name, x, p, q, gains, power):
    norm, x, p, q = (
        made(name, gains),
        torch.from_numpy(x),
        torch.from_numpy(p)[:1],
        torch.from_numpy(q)[:1],
    )
    h, slack = norm.support(p), 1e-9 * (1 + float(p.abs().sum() + q.abs().sum()) * 16)
    members = norm(x)
    assert bool((h + slack >= members @ p[0]).all()), "no member is beyond it"
    assert float((norm.maximizer(p) * p).sum() - h) == pytest.approx(0, abs=slack), (
        "the maximiser reaches it"
    )
    assert torch.equal(norm.support(p * 2.0**power), h * 2.0**power), "homogeneous"
    assert float(norm.support(p + q)) <= float(h + norm.support(q)) + slack, "subadditive"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@settings(max_examples=60)
@given(power=st.floats(-300, 300), entries=st.lists(st.floats(-1, 1), min_size=1, max_size=6))
def test_the_length_of_a_row_at_any_size(dtype, power, entries):
    limits = torch.finfo(dtype)
    size = min(max(10.0**power, limits.tiny * 1e3), limits.max / 8)
    row = torch.tensor([size * entry for entry in entries], dtype=dtype)
    exact = math.hypot(*row.double().tolist())
    assume(exact == 0 or exact > limits.tiny * 1e2)
    assert float(row_length(row)) == pytest.approx(exact, rel=8 * limits.eps, abs=0)
