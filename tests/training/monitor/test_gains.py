"""The size of gains is that of the numbers by which norms multiply."""

import pytest
import torch
from torch import nn

from ctrans.training.monitor import Monitor
from tests.interop.test_wrong_models import Model
from tests.training.monitor.test_loop import chain, per_token


class FromOneNorm(nn.Module):
    """x/rms(x) times 1 + weight, as Gemma's."""

    def __init__(self, width, weight):
        super().__init__()
        self.weight = nn.Parameter(torch.full((width,), weight))

    def forward(self, x):
        return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * (1 + self.weight)


class FromZeroNorm(FromOneNorm):
    def forward(self, x):
        return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * self.weight


def with_norms(kind, weight):
    torch.manual_seed(0)
    model = Model()
    for module in list(model.modules()):
        for name, part in list(module.named_children()):
            if "norm" in type(part).__name__.lower():
                setattr(module, name, kind(part.weight.numel(), weight))
    return model


@pytest.mark.parametrize(
    ("kind", "weight", "gain"),
    [(FromOneNorm, 0.0, 1.0), (FromOneNorm, -1.5, 0.5), (FromZeroNorm, 0.7, 0.7)],
)
def test_the_size_of_a_gain_is_the_number_that_its_norm_multiplies_by(kind, weight, gain):
    x = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
    unit = x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    measured = float((kind(8, weight)(x) / unit).abs().median().detach())
    assert measured == pytest.approx(gain, rel=1e-5)
    model = with_norms(kind, weight)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-5, weight_decay=0.1)
    drawn = torch.get_rng_state()
    monitor = Monitor(model, every=1, example=chain(torch.Generator())[:, :-1])
    assert torch.equal(torch.get_rng_state(), drawn)
    per_token(model, chain(torch.Generator())).mean().backward()
    monitor.step(None, optimizer)
    monitor.close()
    assert monitor.past.reports[-1][1]["gain_size"] == pytest.approx(measured, rel=1e-4)
