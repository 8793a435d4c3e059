"""Steps whose length is a weight, as ReZero's, against the states that the model computes."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ctrans.training.monitor import Monitor
from ctrans.training.monitor.fitted_lengths import FittedLengths


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x):
        heads = self.qkv(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        return self.out(
            F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(2)
        )


class Block(nn.Module):
    """Both scales begin with the same value, so that it does not tell them apart."""

    def __init__(self, placement):
        super().__init__()
        self.placement = placement
        self.norms = nn.ModuleList(nn.LayerNorm(8) for _ in range(2))
        self.attn = Attention()
        self.mlp = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
        self.scale_of_attention = nn.Parameter(torch.tensor(0.1))
        self.scale_of_ffn = nn.Parameter(torch.tensor(0.1))

    def steps(self, x):
        """The state after each step, and |h r|/|X|."""
        scales = (self.scale_of_attention, self.scale_of_ffn)
        for norm, part, scale in zip(self.norms, (self.attn, self.mlp), scales, strict=True):
            if self.placement == "pre":
                added = scale * part(norm(x))
                after = x + added
            else:
                added = scale * part(x)
                after = norm(x + added)
            yield after, added.norm() / x.norm()
            x = after

    def forward(self, x):
        *_, (x, _) = self.steps(x)
        return x


class Model(nn.Module):
    def __init__(self, placement):
        super().__init__()
        self.table, self.head = nn.Embedding(13, 8), nn.Linear(8, 13)
        self.blocks = nn.ModuleList(Block(placement) for _ in range(2))

    def forward(self, tokens):
        x = self.table(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@pytest.mark.slow
@pytest.mark.parametrize("placement", ["pre", "post"])
def test_a_length_that_is_learned_is_that_of_the_pass(placement):
    """Also where it became negative."""
    torch.manual_seed(0)
    model = Model(placement)
    tokens = torch.randint(0, 13, (3, 7))
    monitor = Monitor(model, every=1, example=tokens[:, :-1])
    with torch.no_grad():
        for block in model.blocks:
            block.scale_of_attention.fill_(0.03)
            block.scale_of_ffn.fill_(-0.7)
    loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
    monitor.step(loss)
    monitor.close()
    figures = monitor.past.reports[-1][1]
    x = model.table(tokens[:, :-1]).detach()
    sizes = [float(x.square().mean().sqrt())]
    shares = []
    for block in model.blocks:
        for after, share in block.steps(x):
            x = after.detach()
            sizes.append(float(x.square().mean().sqrt()))
            shares.append(float(share.detach()))
    assert figures["step_share"] == pytest.approx(shares, rel=1e-4)
    assert figures["rms"] == pytest.approx(sizes, rel=1e-5)


def test_a_length_is_fitted_from_copies_and_none_without_a_velocity():
    lengths = FittedLengths()
    x, r = torch.randn(2, 5, 4), torch.randn(2, 5, 4)
    total = x - 0.3 * r
    lengths.enter(0, x)
    lengths.move(0, r)
    for changed_in_place in (x, r):
        changed_in_place.zero_()
    assert float(lengths.leave(0, total)) == pytest.approx(-0.3, rel=1e-5)
    lengths.enter(1, total)
    assert lengths.leave(1, total) is None
    lengths.enter(2, total)
    lengths.move(2, torch.zeros_like(total))
    assert float(lengths.leave(2, total)) == 0
