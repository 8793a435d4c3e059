"""Parameters that a model keeps in its own ways: the offsets of all blocks in one tensor, and a first
state that is a parameter.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import ctrans

WIDTH = 16
HIDDEN = 32
BLOCKS = 3
VOCABULARY = 23
TOKENS = torch.randint(0, VOCABULARY, (3, 7), generator=torch.Generator().manual_seed(0))


def drawn(*shape):
    return nn.Parameter(torch.randn(shape) * shape[-2] ** -0.5)


class Stacked(nn.Module):
    """FFNs whose weights of all blocks are three tensors. Gains are 1 + g."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, WIDTH)
        self.up = drawn(BLOCKS, WIDTH, HIDDEN)
        self.b = nn.Parameter(torch.zeros(BLOCKS, HIDDEN))
        self.down = drawn(BLOCKS, HIDDEN, WIDTH)
        self.g = nn.Parameter(torch.zeros(BLOCKS, 2, WIDTH))
        self.qkv = drawn(BLOCKS, WIDTH, 3 * WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids):
        x = self.table(ids)
        for i in range(BLOCKS):
            u = F.layer_norm(x, (WIDTH,), 1 + self.g[i, 0])
            q, k, v = (u @ self.qkv[i]).chunk(3, -1)
            x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True)
            u = F.layer_norm(x, (WIDTH,), 1 + self.g[i][1])
            x = x + F.relu(u @ self.up[i] + self.b[i]) @ self.down[i]
        return self.head(x)


def places(module, check):
    found = ctrans.diagnose(module.eval(), TOKENS, TOKENS.roll(-1, 1))
    return [finding.place for finding in found.findings if finding.check == check]


def test_a_stack_of_offsets_or_gains_at_zero_is_no_matrix_of_zeros():
    torch.manual_seed(0)
    assert not places(Stacked(), "zero weight")


@pytest.mark.parametrize("name", ["up", "down"])
def test_a_matrix_of_zeros_in_a_stack_is_named(name):
    torch.manual_seed(0)
    module = Stacked()
    with torch.no_grad():
        getattr(module, name)[1] = 0
    (place,) = places(module, "zero weight")
    assert place.endswith(f"the weight {name}[1]")


def test_offsets_of_experts_are_known_by_their_name():
    torch.manual_seed(0)
    module = Stacked()
    module.experts = nn.Module()
    module.experts.up_bias = nn.Parameter(torch.zeros(4, HIDDEN))
    assert not places(module, "zero weight")


class Latents(nn.Module):
    """Learned latents that read the text by cross-attention; `begin` makes the first state."""

    def __init__(self, begin):
        super().__init__()
        self.begin = begin
        self.table = nn.Embedding(VOCABULARY, WIDTH)
        self.latents = nn.Parameter(torch.randn(5, WIDTH))
        self.reads = nn.ModuleList(
            nn.MultiheadAttention(WIDTH, 2, batch_first=True) for _ in range(2)
        )
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(4))
        self.ffns = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, WIDTH))
            for _ in range(2)
        )
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, ids):
        text = self.table(ids)
        x = self.begin(self, ids)
        for i in range(2):
            x = x + self.reads[i](self.norms[2 * i](x), text, text)[0]
            x = x + self.ffns[i](self.norms[2 * i + 1](x))
        return self.head(x.mean(1))


def learned(model, ids):
    return model.latents.expand(len(ids), -1, -1)


def from_ids(model, ids):
    """A table of zeros: the first state is computed from the text, and does not show it."""
    return 0.0 * model.table(ids) + torch.arange(ids.shape[1]).unsqueeze(-1)


@pytest.mark.parametrize(("begin", "findings"), [(learned, 0), (from_ids, 1)])
def test_learned_latents_are_no_embedding_without_text(begin, findings):
    torch.manual_seed(0)
    module = Latents(begin).eval()
    found = ctrans.diagnose(module, TOKENS, torch.tensor([0, 1, 2]), loss=F.cross_entropy)
    checks = [finding.check for finding in found.findings]
    assert checks.count("positions dominate the text") == findings
