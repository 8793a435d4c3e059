import pytest
import torch
from torch import nn

from ctrans.fields import ACTIVATIONS, Attention, FeedForward
from ctrans.norm import NORMS
from ctrans.sublayer import Sublayer
from ctrans.verify.jacobians import attention_jacobian, feed_forward_jacobian, step_jacobian, sublayer_jacobian
from solvers import ConfigError
from tests.helpers import NAMES, learned, small_model


def autograd(function, x):
    return torch.autograd.functional.jacobian(function, x)


@pytest.mark.parametrize("settings", [{}, {"causal": False}, {"qk_norm": True}, {"temperature": 2.5}, {"bias": False}])
@pytest.mark.parametrize(("width", "heads", "tokens"), [(6, 2, 4), (6, 1, 3), (2, 1, 5), (4, 4, 1)])
def test_proposition_11_entry_by_entry(settings, width, heads, tokens):
    attention = learned(Attention(width, heads, **settings).double(), 0.5).requires_grad_(False)
    x = torch.randn(tokens, width, dtype=torch.float64)
    assert torch.allclose(attention_jacobian(attention, x), autograd(attention, x), rtol=1e-10, atol=1e-12)


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
    assert torch.allclose(attention_jacobian(attention, x), (product / 4)[None, :, None, :].expand(4, 6, 4, 6), atol=1e-12)


@pytest.mark.parametrize("activation", sorted(ACTIVATIONS))
def test_the_feed_forward_jacobian_token_by_token(activation):
    ffn = learned(FeedForward(5, 7, activation=activation).double(), 0.5).requires_grad_(False)
    x = torch.randn(3, 5, dtype=torch.float64)
    blocks = feed_forward_jacobian(ffn, x)
    for token, block in zip(x, blocks, strict=True):
        assert torch.allclose(block, autograd(ffn, token.unsqueeze(0))[0, :, 0], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("norm", sorted(NORMS))
@pytest.mark.parametrize("placement", NAMES)
def test_sublayers_and_steps_compose_their_factors(placement, norm):
    model = small_model(placement, norm=norm, width=6, depth=1)
    x = torch.randn(4, 6, dtype=torch.float64)
    for sublayer in model.depth.sublayers:
        assert torch.allclose(sublayer_jacobian(sublayer, x), autograd(sublayer, x), rtol=1e-9, atol=1e-11)
        expected = autograd(lambda x, s=sublayer: s.step(x, 0.3), x)
        assert torch.allclose(step_jacobian(sublayer, x, 0.3), expected, rtol=1e-9, atol=1e-11)


def test_other_maps_have_no_closed_form():
    with pytest.raises(ConfigError, match="Identity"):
        sublayer_jacobian(Sublayer(nn.Identity(), "ffn"), torch.zeros(2, 3))
