"""Edits that explain where two models part: each named one is what was changed, and none is named
for a change that is no edit.
"""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import ctrans
from ctrans.examine.compared import answer
from ctrans.examine.comparison.attention_variants import (
    AttentionVariant,
    capped,
    narrower_window,
    one_later,
    one_less,
    scaled,
    uncapped,
    wider_window,
)
from ctrans.examine.comparison.compare import compare
from tests.examine.comparison.test_compare import gpt, matrix_name, moved, text
from tests.examine.comparison.test_recording import recorded

WIDTH, TOKENS, IDS = 16, 8, 50


class Attention(nn.Module):
    """Rotary attention with the settings that people get wrong."""

    def __init__(self):
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.base = 1e4
        self.window = 5
        self.factor = 8**-0.5
        self.last = 0
        self.cap = None
        self.pairs = False

    def heads(self, x):
        return x.unflatten(-1, (2, 8)).transpose(1, 2)

    def turned(self, x):
        rates = self.base ** (-torch.arange(0, 8, 2, dtype=x.dtype) / 8)
        angles = torch.arange(x.shape[-2], dtype=x.dtype)[:, None] * rates
        cos, sin = angles.cos(), angles.sin()
        if self.pairs:
            a, b = x[..., 0::2], x[..., 1::2]
            return torch.stack([a * cos - b * sin, b * cos + a * sin], -1).flatten(-2)
        a, b = x.chunk(2, -1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

    def forward(self, x):
        q, k, v = (self.heads(part(x)) for part in (self.query, self.key, self.value))
        scores = self.factor * (self.turned(q) @ self.turned(k).transpose(-2, -1))
        if self.cap is not None:
            scores = self.cap * torch.tanh(scores / self.cap)
        i = torch.arange(x.shape[1])
        gap = i[:, None] - i
        hidden = (gap < -self.last) | (gap >= self.window)
        rows = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        return self.out((rows @ v).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1 = nn.LayerNorm(WIDTH)
        self.attention = Attention()
        self.norm2 = nn.LayerNorm(WIDTH)
        self.gate, self.up = nn.Linear(WIDTH, 32), nn.Linear(WIDTH, 32)
        self.down = nn.Linear(32, WIDTH)

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        y = self.norm2(x)
        return x + self.down(F.gelu(self.gate(y)) * self.up(y))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(IDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, IDS)

    def forward(self, ids):
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def other_norm(block):
    block.norm1.eps = 1e-3


def exchanged(block):
    block.gate, block.up = block.up, block.gate


def permuted(block):
    for part in (block.attention.query, block.attention.key):
        part.weight.copy_(part.weight.unflatten(0, (2, 2, 4)).transpose(1, 2).flatten(0, 2))
        part.bias.copy_(part.bias.unflatten(0, (2, 2, 4)).transpose(1, 2).flatten(0, 2))


def of_attention(name, value):
    return lambda block: setattr(block.attention, name, value)


PORTS = {
    "rotary base": (of_attention("base", 5e5), "base 500000 in place of 10000"),
    "rotary pairs": (of_attention("pairs", True), "pairs True in place of False"),
    "halves as pairs": (permuted, "in heads of 8 from halves to pairs"),
    "window": (of_attention("window", 4), "window 4 in place of 5"),
    "eps": (other_norm, "norm1.eps 0.001 in place of 1e-05"),
    "gate and up": (exchanged, "gate and up exchanged in blocks.1"),
    "bias": (lambda block: block.down.bias.zero_(), "no bias of down in blocks.1"),
    "gain": (lambda block: block.norm2.weight.zero_(), "norm2.weight set to 0"),
    "transposed": (
        lambda block: block.attention.out.weight.copy_(block.attention.out.weight.t().clone()),
        "attention.out transposed in blocks.1",
    ),
    "a factor of its own": (of_attention("factor", 0.123), "factor 0.123 in place of 0.353553"),
    "weights of its own": (
        lambda block: block.down.weight.add_(block.up.weight.t() / 9),
        "the second model's blocks.1.down.weight",
    ),
}


@pytest.mark.cases(1)
@pytest.mark.parametrize("kind", PORTS)
def test_the_edit_that_was_made_is_named(kind):
    change, words = PORTS[kind]
    model = Model().eval()
    port = copy.deepcopy(model)
    with torch.no_grad():
        change(port.blocks[1])
    before = {name: value.clone() for name, value in model.state_dict().items()}
    options = dict(vars(model.blocks[1].attention))
    ids = torch.randint(0, IDS, (2, TOKENS), generator=torch.Generator().manual_seed(0))

    found = ctrans.compare(model, port, ids)

    assert any(words in explanation.words for explanation in found.explanations), found.explanations
    first = found.explanations[0]
    assert first.before == pytest.approx(found.changed[0].defect)
    assert first.after < 1e-5 < first.before
    assert "the defect falls from" in answer("a", "b", found).text
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert vars(model.blocks[1].attention) == options


@pytest.mark.cases(1)
def test_of_two_edits_the_one_of_a_weight_that_differs_comes_first():
    """The opposite sign of the map before does the same, and would leave two wrong weights."""
    model = Model().eval()
    with torch.no_grad():
        for block in model.blocks:
            block.up.bias.zero_()
            block.down.bias.zero_()
    port = copy.deepcopy(model)
    with torch.no_grad():
        port.blocks[1].down.weight.neg_()
    ids = torch.randint(0, IDS, (2, TOKENS), generator=torch.Generator().manual_seed(0))

    found = ctrans.compare(model, port, ids)

    words = [explanation.words for explanation in found.explanations]
    assert words[0].startswith("the sign of down turned"), words


def test_what_a_recording_has_is_explained_by_an_edit_of_the_model(tmp_path):
    model = gpt()
    port = copy.deepcopy(model)
    with torch.no_grad():
        weight = port.depth.sublayers[2].field.output_projection.weight
        weight.copy_(weight.t().clone())
    tokens, _ = text()

    found = ctrans.compare(recorded(port, tokens, tmp_path / "port.safetensors"), model)

    assert "transposed" in found.explanations[0].words


@pytest.mark.cases(1)
def test_no_edit_is_named_for_other_weights_that_a_recording_has(tmp_path):
    model = gpt()
    tokens, _ = text()
    path = recorded(moved(model, 1, 0.1, matrix_name(model)), tokens, tmp_path / "a.safetensors")

    assert ctrans.compare(path, model).explanations == ()


@pytest.mark.cases(1)
def test_rounding_is_not_explained_by_edits():
    model = gpt()
    assert compare(model, copy.deepcopy(model).float(), text()[0]).explanations == ()


def attend(q, k, v, reads, *, factor=8**-0.5, act=lambda scores: scores):
    scores = act(factor * (q @ k.transpose(-2, -1)))
    return scores.masked_fill(~reads, -torch.inf).softmax(-1) @ v


def band(first, last):
    """Token i reads i - first to i + last."""
    i = torch.arange(6)
    gap = i[:, None] - i
    return (gap <= first) & (gap >= -last)


CAUSAL = band(9, 0)
VARIANTS = {
    "one later": ({"mask": one_later}, CAUSAL, band(9, 1), {}),
    "one less": ({"mask": one_less}, band(9, 1), CAUSAL, {}),
    "wider": ({"mask": wider_window}, band(2, 0), band(3, 0), {}),
    "narrower": ({"mask": narrower_window}, band(2, 0), band(1, 0), {}),
    "scaled": ({"scores": scaled(2.0)}, CAUSAL, CAUSAL, {"factor": 2 * 8**-0.5}),
    "capped": ({"scores": capped(0.5)}, CAUSAL, CAUSAL, {"act": capped(0.5)}),
}


@pytest.mark.parametrize("form", ["product", "additive", "softmax"])
@pytest.mark.parametrize("kind", VARIANTS)
def test_attention_computes_the_variant(kind, form):
    changes, reads, expected, options = VARIANTS[kind]
    generator = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 2, 2, 6, 8, dtype=torch.float64, generator=generator)
    with AttentionVariant(**changes):
        if form == "softmax":
            found = attend(q, k, v, reads)
        else:
            mask = reads
            if form == "additive":
                mask = torch.zeros(6, 6, dtype=q.dtype).masked_fill(~reads, -torch.inf)
            found = F.scaled_dot_product_attention(q, k, v, mask)
    if form == "softmax" and kind in ("one later", "wider"):
        expected = reads  # their scores are lost
    torch.testing.assert_close(found, attend(q, k, v, expected, **options))


def test_a_soft_cap_is_undone():
    scores = torch.linspace(-60, 60, 99, dtype=torch.float64)
    torch.testing.assert_close(uncapped(50.0)(capped(50.0)(scores)), scores)


def test_grouped_keys_and_no_change_are_those_of_torch():
    generator = torch.Generator().manual_seed(0)
    q, k = (
        torch.randn(1, 4, 6, 8, generator=generator),
        torch.randn(1, 2, 6, 8, generator=generator),
    )
    options = {"is_causal": True, "enable_gqa": True, "scale": 0.3}
    expected = F.scaled_dot_product_attention(q, k, k, **options)
    with AttentionVariant():
        found = F.scaled_dot_product_attention(q, k, k, **options)
    torch.testing.assert_close(found, expected)
