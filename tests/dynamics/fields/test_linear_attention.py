"""Linear attention and its gated form against their rows written out, and what replaces theta's
companion.
"""

import pytest
import torch

from ctrans.dynamics.fields import GatedLinearAttention, LinearAttention, linear_attention
from ctrans.dynamics.fields.linear_attention import positive_feature
from ctrans.measure.attention.balanced_mass import balanced_mass
from tests.helpers import learned

KINDS = {
    "linear": lambda: LinearAttention(16, 4),
    "two-sided": lambda: LinearAttention(16, 4, causal=False),
    "gated": lambda: GatedLinearAttention(16, 4),
}
each = pytest.mark.parametrize("kind", KINDS)


def made(kind, scale=0.5):
    return learned(KINDS[kind]().double(), scale).requires_grad_(False)


def states(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def by_loops(attention, x):
    """The rows, weight by weight."""
    q, k, _ = (part.unflatten(-1, (4, 4)) for part in attention.qkv(x).chunk(3, -1))
    phi = torch.nn.functional.elu
    rows = torch.zeros(4, len(x), len(x), dtype=x.dtype)
    for h in range(4):
        for i in range(len(x)):
            for j in range(i + 1 if attention.causal else len(x)):
                weight = (phi(q[i, h]) + 1) @ (phi(k[j, h]) + 1)
                for between in range(j + 1, i + 1):
                    if isinstance(attention, GatedLinearAttention):
                        weight = weight * torch.sigmoid(attention.keep(x[between])[h]) ** (1 / 16)
                rows[h, i, j] = weight
    return rows / rows.sum(-1, keepdim=True)


@each
@pytest.mark.parametrize("chunk", [64, 3])
def test_the_scan_is_the_rows_times_the_values(kind, chunk, monkeypatch):
    monkeypatch.setattr(linear_attention, "CHUNK", chunk)
    attention, x = made(kind), states(8, 16)
    rows = by_loops(attention, x)
    assert torch.allclose(attention.probabilities(x), rows, atol=1e-14)
    values = attention.qkv(x).chunk(3, -1)[2].unflatten(-1, (4, 4)).transpose(0, 1)
    assert torch.allclose(
        attention.pre_projection(x), (rows @ values).transpose(0, 1).flatten(-2), atol=1e-12
    )
    batched = attention(x.expand(2, 3, 8, 16))
    assert torch.allclose(batched[1, 2], attention(x), atol=1e-13)


def test_a_long_sequence_needs_no_matrix_of_its_length():
    """2^14 tokens: rows would be 2 GB a head, what is carried a few MB."""
    attention = made("gated")
    assert torch.isfinite(attention(states(2**14, 16))).all()


@each
def test_a_row_is_never_nothing_over_nothing(kind):
    attention = made(kind)
    for size in (1e-6, 1e3, 1e6):
        x = size * states(5, 16)
        rows = attention.probabilities(x)
        assert torch.allclose(rows.sum(-1), torch.ones_like(rows[..., 0]))
        assert torch.isfinite(attention(x)).all()


def test_the_feature_is_elu_plus_one_and_no_steeper_than_it_is_large():
    z = torch.linspace(-40, 40, 100_001, dtype=torch.float64).requires_grad_()
    phi = positive_feature(z)
    (slope,) = torch.autograd.grad(phi.sum(), z)
    inside = z > -30
    assert torch.allclose(phi[inside], torch.where(z > 0, z + 1, z.exp())[inside], rtol=1e-14)
    assert bool((slope <= phi).all())


def test_rows_move_by_theta_times_what_their_logarithms_do():
    """|da|_1 <= theta max |d log w| and |d log w_ij| <= |dq_i| + |dk_j|: what stands in the place of Emadi's factor."""
    attention, x = made("linear"), states(5, 16)

    def rows(x):
        return attention.probabilities(x)[0, -1]

    theta = float(balanced_mass(rows(x)).upper)
    query, key = (part.chunk(4)[0] for part in attention.qkv.weight.chunk(3)[:2])
    for seed in range(20):
        dx = states(5, 16, seed=seed)
        _, moved = torch.func.jvp(rows, (x,), (dx,))
        allowed = (dx[-1] @ query.T).norm() + (dx @ key.T).norm(dim=-1).max()
        assert float(moved.abs().sum()) <= theta * float(allowed) * (1 + 1e-9)


def test_the_lipschitz_constant_holds_between_far_states():
    attention = made("linear")
    for seed in range(40):
        x, y = states(4, 16, seed=seed), states(4, 16, seed=seed + 100)
        radius = float(torch.cat([x, y]).norm(dim=-1).max())
        moved, step = (
            (a - b).norm(dim=-1).max() for a, b in ((attention(x), attention(y)), (x, y))
        )
        assert float(moved) <= attention.lipschitz(radius) * float(step)
