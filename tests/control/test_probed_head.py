"""Heads that only compute, against the norm and the map that they were made of."""

import pytest
import torch
from torch import nn

import ctrans
from ctrans.control.least_loss import least_loss
from ctrans.control.probed_head import probed_head
from solvers import ConfigError


def numbers(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def head_of(norm, bias=True):
    """A norm with random gains and a linear map to 11 logits."""
    torch.manual_seed(3)
    linear = nn.Linear(6, 11, bias=bias)
    for parameter in norm.parameters():
        nn.init.normal_(parameter, 1.0, 0.3)
    return nn.Sequential(norm, linear).double().requires_grad_(requires_grad=False)


NORMS = {
    "layernorm": lambda: nn.LayerNorm(6, eps=1e-3),
    "rmsnorm": lambda: nn.RMSNorm(6, eps=1e-5),
    "a large eps": lambda: nn.LayerNorm(6, eps=0.3),
    "no eps": lambda: nn.RMSNorm(6, eps=0.0),
}


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("shape", [(1, 2, 6), (2, 5, 6)])
def test_the_norm_and_the_map_are_found(norm, shape):
    module = NORMS[norm]()
    head = head_of(module)
    probed = probed_head(head, numbers(*shape))
    assert probed.norm.centred == isinstance(module, nn.LayerNorm)
    assert probed.norm.eps == pytest.approx(module.eps, rel=1e-3, abs=1e-9)
    assert probed.error < 1e-4
    x = 0.3 * numbers(4, 3, 6, seed=9)
    n = probed.norm.standardize(x) / 6**0.5
    assert torch.allclose(probed.logits(n), head(x), atol=1e-4)


class Capped(nn.Module):
    def __init__(self, head):
        super().__init__()
        self.head = head

    def forward(self, x):
        return 3 * torch.tanh(self.head(x) / 3)


@pytest.mark.parametrize(
    "head",
    [
        Capped(head_of(nn.LayerNorm(6))),
        nn.Sequential(head_of(nn.LayerNorm(6)), nn.GELU()),
        nn.Linear(6, 11).double().requires_grad_(requires_grad=False),
        nn.Sequential(nn.Linear(6, 6).double(), nn.Tanh(), nn.Linear(6, 11).double()),
    ],
)
def test_other_heads_are_refused(head):
    with pytest.raises(ConfigError, match="not one linear map behind a norm"):
        probed_head(head, numbers(1, 3, 6))


@pytest.mark.slow
def test_an_opened_gpt2_has_a_proof_from_below():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(n_layer=2, n_embd=32, n_head=2, vocab_size=50)
    model = ctrans.open_model(transformers.GPT2LMHeadModel(config).double())
    text = torch.randint(0, 50, (1, 9))
    value = least_loss(model, text[:, :-1], text[:, 1:])
    assert value.proven[0] == pytest.approx(value.found[0], rel=5e-3)
    assert value.proven[0] <= value.found[0]
    assert not value.missing
