"""Where the bound on the reach of a training ends."""

import torch

from ctrans.model.config import GPTConfig
from ctrans.model.gpt import GPT
from ctrans.theory.section_11_reach import adam_reach


def moved(residual):
    """rms(X_D - X_0) after three steps of AdamW that make the gains of all maps grow, and the bound
    of `reach-of-training`.
    """
    shape = {
        "vocab_size": 16,
        "context": 8,
        "depth": 2,
        "width": 16,
        "heads": 2,
        "dt": 1.0,
        "placement": "peri",
        "eps": 1e-12,
    }
    model = GPT(GPTConfig(**shape, norm="layernorm", residual=residual), seed=1).double()
    signs = torch.tensor([1.0, -1.0], dtype=torch.float64).repeat(8)
    trained = []
    for sublayer in model.depth.sublayers:
        out = sublayer.field.output_projection
        out.weight.data.zero_()
        out.bias.data.copy_(signs)
        sublayer.output_norm.bias.grad = -signs
        gains = [sublayer.output_norm.weight, *sublayer.residual.parameters()]
        for gain in gains:
            gain.grad = -torch.ones_like(gain)
        trained += [sublayer.output_norm.bias, *gains]
    rates = (0.5, 0.5, 0.5)
    adam = torch.optim.AdamW(trained, lr=0.5, betas=(0.9, 0.999), eps=0.0, weight_decay=0.0)
    for _ in rates:
        adam.step()
    with torch.no_grad():
        x = torch.randn(1, 3, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        return float((model.depth(x) - x).square().mean().sqrt()), 4 * (
            1 + 2 * adam_reach(rates, 0.9, 0.999)
        )


def test_the_bound_holds_for_plain_sums_and_not_with_layerscale():
    plain, bound = moved("plain")
    assert plain <= bound * (1 + 1e-9)
    scaled, _ = moved("layerscale")
    assert round(scaled, 1) == 25.6, "THEORY.md has this figure"
    assert round(bound, 1) == 16.0
