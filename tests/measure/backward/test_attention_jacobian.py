import pytest
import torch

from ctrans.dynamics.fields import Attention
from ctrans.theory.section_07_sensitivity import attention_jacobian
from tests.helpers import learned


def autograd(function, x):
    return torch.autograd.functional.jacobian(function, x)


@pytest.mark.parametrize(
    "settings", [{}, {"causal": False}, {"qk_norm": True}, {"temperature": 2.5}, {"bias": False}]
)
@pytest.mark.parametrize(("width", "heads", "tokens"), [(6, 2, 4), (6, 1, 3), (2, 1, 5), (4, 4, 1)])
def test_proposition_11_entry_by_entry(settings, width, heads, tokens):
    attention = learned(Attention(width, heads, **settings).double(), 0.5).requires_grad_(False)
    x = torch.randn(tokens, width, dtype=torch.float64)
    assert torch.allclose(
        attention_jacobian(attention, x), autograd(attention, x), rtol=1e-10, atol=1e-12
    )


def test_proposition_11_is_linear_in_w_and_v():
    attention = learned(Attention(6, 2).double(), 0.5).requires_grad_(False)
    x = torch.randn(4, 6, dtype=torch.float64)
    before = attention_jacobian(attention, x)
    attention.out.weight.mul_(3)
    attention.qkv.weight.chunk(3)[2].mul_(5)
    attention.qkv.bias.chunk(3)[2].mul_(5)
    assert torch.allclose(attention_jacobian(attention, x), 15 * before, rtol=1e-12)


def test_equal_tokens_leave_only_the_averages():
    """Then every value is the mean value, and the scores' derivatives drop out."""
    attention = learned(Attention(6, 2, causal=False).double(), 0.5).requires_grad_(False)
    x = torch.randn(1, 6, dtype=torch.float64).repeat(4, 1)
    product = attention.out.weight @ attention.qkv.weight.chunk(3)[2]
    assert torch.allclose(
        attention_jacobian(attention, x),
        (product / 4)[None, :, None, :].expand(4, 6, 4, 6),
        atol=1e-12,
    )
