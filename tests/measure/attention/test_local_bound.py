"""Theorem 5.1 with radii: never below the dense Jacobian's block norm, exact for one token, and a
ball that encloses.
"""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ctrans.dynamics.fields import Attention, reference_kernels
from ctrans.measure.attention.bounds import enclosing_radius, local_attention_bound
from solvers import ConfigError
from tests.helpers import learned


def numbers(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.slow
@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    tokens=st.integers(1, 5),
    heads=st.sampled_from([1, 2]),
    causal=st.booleans(),
    size=st.floats(-1, 1),
    temperature=st.floats(0.3, 3),
)
def test_no_perturbation_of_unit_tokens_moves_an_output_further(
    seed, tokens, heads, causal, size, temperature
):
    """sup of |sum_j J_ij h_j| over |h_j| <= 1 for the dense Jacobian: by alternating ascents from
    many signs, a bound from below.
    """
    module = learned(
        Attention(4, heads, causal=causal, temperature=temperature).double(), 0.5, seed=seed
    ).requires_grad_(False)
    x = 10**size * numbers(tokens, 4, seed=seed)
    with reference_kernels(module):
        J = torch.func.jacrev(lambda u: module(u))(x)  # tokens, width, tokens, width
    best = 0.0
    for row, start in itertools.product(range(tokens), range(6)):
        y = numbers(4, seed=start)
        for _ in range(30):
            h = torch.einsum("ojw,o->jw", J[row], y)
            h = h / h.norm(dim=-1, keepdim=True).clamp_min(1e-300)
            moved = torch.einsum("ojw,jw->o", J[row], h)
            best, y = max(best, float(moved.norm())), moved
    assert best <= local_attention_bound(module, x.unsqueeze(0)) * (1 + 1e-9)


def test_one_token_moves_by_the_value_path_alone():
    """One token reads itself: f = W V x, and the bound is sum_h |W_h V_h|, attained by one head."""
    module = Attention(4, 1).double().requires_grad_(False)
    exact = torch.linalg.matrix_norm(module.out.weight @ module.qkv.weight[8:], 2)
    assert local_attention_bound(module, numbers(1, 1, 4)) == pytest.approx(float(exact), rel=1e-12)


def test_a_common_shift_of_all_keys_and_values_changes_nothing():
    module = learned(Attention(4, 2).double()).requires_grad_(False)
    x = numbers(1, 5, 4)
    before = local_attention_bound(module, x)
    module.qkv.bias[4:] += 7
    assert local_attention_bound(module, x) == pytest.approx(before, rel=1e-12)


@given(seed=st.integers(0, 10**6), count=st.integers(1, 12))
@settings(max_examples=40)
def test_the_radius_encloses_and_is_nearly_least(seed, count):
    """In the plane the least circle goes through two or three of the points: all are tried."""
    x = numbers(count, 2, seed=seed)
    least = 0.0 if count == 1 else math.inf
    for size in (2, 3):
        for chosen in itertools.combinations(range(count), size):
            p = x[list(chosen)]
            rows, right = 2 * (p[1:] - p[0]), (p[1:].square() - p[0].square()).sum(-1)
            centre = (
                p.mean(0)
                if size == 2
                else torch.linalg.lstsq(rows, right.unsqueeze(-1)).solution.squeeze(-1)
            )
            radius = float((p - centre).norm(dim=-1).max())
            if float((x - centre).norm(dim=-1).max()) <= radius * (1 + 1e-9):
                least = min(least, radius)
    found = float(enclosing_radius(x))
    assert least * (1 - 1e-6) <= found <= 1.05 * least + 1e-12


def test_normalised_queries_are_refused():
    with pytest.raises(ConfigError, match="qk_norm"):
        local_attention_bound(Attention(4, 1, qk_norm=True).double(), numbers(1, 3, 4))
