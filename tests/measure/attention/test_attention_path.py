"""Oracle: the dense Jacobian of the whole step, less what the values and the residual pass on,
written out as matrices.
"""

import pytest
import torch

from ctrans.dynamics.fields import reference_kernels
from ctrans.dynamics.norm import LayerNorm
from ctrans.measure.attention.attention_path import attention_path, attention_path_gain
from ctrans.measure.walk import states_of
from tests.helpers import NAMES, small_model, tokens


def block_diagonal(norm, x):
    """The norm's Jacobian over all tokens of one sequence; the identity where there is none."""
    if norm is None:
        return torch.eye(x.numel(), dtype=x.dtype)
    return torch.block_diag(*norm.jacobian(x))


def by_hand(sublayer, h, x):
    """J_state h g J_out (J_f - sum_h A_h x W_h V_h) J_in."""
    u = x if sublayer.input_norm is None else sublayer.input_norm(x)
    with reference_kernels(sublayer):
        whole = torch.autograd.functional.jacobian(sublayer.field, u).reshape(u.numel(), -1)
    rows = sublayer.field.probabilities(u)
    values = sum(
        torch.kron(rows[i], head.out @ head.value)
        for i, head in enumerate(sublayer.field.head_matrices())
    )
    inner = (
        sublayer.gain * block_diagonal(sublayer.output_norm, sublayer.field(u)) @ (whole - values)
    )
    state = block_diagonal(sublayer.state_norm, x + h * sublayer(x))
    return h * state @ inner @ block_diagonal(sublayer.input_norm, x)


@pytest.mark.cases(4)
@pytest.mark.parametrize("qk_norm", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_the_attention_path_is_the_jacobian_less_values_and_residual(name, qk_norm):
    model = small_model(name, qk_norm=qk_norm)
    sublayer, h = model.depth.sublayers[2], model.depth.lengths[2]
    x = states_of(model.depth, model.embed(tokens(1, 6)))[2][0]
    expected = by_hand(sublayer, h, x)
    linear = attention_path(sublayer, h, x)
    v = torch.randn(x.shape, generator=torch.Generator().manual_seed(0), dtype=x.dtype)
    assert torch.allclose(linear.push(v).flatten(), expected @ v.flatten(), atol=1e-12)
    y = sublayer.step(x, h)
    gain = float(torch.linalg.matrix_norm(expected, 2) * x.norm() / y.norm())
    assert attention_path_gain(sublayer, h, x, y, tolerance=1e-6) == pytest.approx(gain, rel=1e-5)


def test_uniform_attention_has_no_attention_path_but_that_of_its_scores():
    model = small_model("pre")
    sublayer = model.depth.sublayers[0]
    sublayer.field.qkv.weight[:32].zero_()
    x = model.embed(tokens(1, 6))
    assert attention_path_gain(sublayer, 0.1, x, sublayer.step(x, 0.1), tolerance=1e-3) == 0


def test_the_largest_of_a_batch_is_given():
    model = small_model("peri")
    sublayer = model.depth.sublayers[0]
    assert isinstance(sublayer.output_norm, LayerNorm)
    x = model.embed(tokens(3, 6))
    each = [
        attention_path_gain(sublayer, 0.1, one, sublayer.step(one, 0.1), tolerance=1e-6)
        for one in x
    ]
    assert attention_path_gain(
        sublayer, 0.1, x, sublayer.step(x, 0.1), tolerance=1e-6
    ) == pytest.approx(max(each), rel=1e-5)
