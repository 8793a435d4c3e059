"""Verdicts and penalties at large weights, for parts of other classes and models without blocks."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ctrans.control.model_check import check_model
from ctrans.dynamics.fields import FeedForward as OwnFeedForward
from ctrans.interop import open_model
from ctrans.model.config import GPTConfig
from ctrans.model.gpt import GPT
from solvers import ConfigError
from tests.interop.test_factors import (
    TOKENS,
    VOCABULARY,
    WIDTH,
    Attention,
    Block,
    FeedForward,
    Model,
)


class AdaptedLinear(nn.Linear):
    """A low-rank update, which is 0 as yet."""

    def forward(self, x):
        return super().forward(x) + x @ self.A.T @ self.B.T


class ClippedLinear(nn.Linear):
    def forward(self, x):
        return F.linear(x, self.weight.clamp(-1, 1))


class UnitSizedUnits(OwnFeedForward):
    """A plugin that inherits `units()`, and normalises its units."""

    def pre_projection(self, x):
        return F.normalize(super().pre_projection(x), dim=-1)


class OneMoreMap(OwnFeedForward):
    """A plugin that inherits `units()`, and has a third matrix."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        rows = self.up.out_features
        self.middle = nn.Linear(rows, rows, bias=False)

    def pre_projection(self, x):
        return self.middle(super().pre_projection(x)).relu()


def own_model(placement="pre"):
    config = GPTConfig(
        depth=1, width=8, heads=2, context=6, bias=False, placement=placement, activation="relu"
    )
    return GPT(config, seed=0).double()


def text(tokens=6, vocabulary=256):
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, vocabulary, (1, tokens + 1), generator=generator)
    return ids[:, :-1], ids[:, 1:]


def test_a_subclass_of_a_linear_map_leaves_no_number():
    model = own_model()
    up = model.depth.sublayers[1].field.up
    up.__class__ = AdaptedLinear
    up.A = nn.Parameter(torch.randn(2, 8).double())
    up.B = nn.Parameter(torch.zeros(up.out_features, 2).double())
    check = check_model(model, *text())
    assert check.training_threshold is None
    assert "AdaptedLinear" in check.no_threshold


def test_a_chain_in_place_of_a_linear_map_leaves_no_number():
    model = own_model()
    field = model.depth.sublayers[1].field
    field.up = nn.Sequential(nn.Linear(8, 8, bias=False).double(), field.up)
    field.up.weight = field.up[1].weight
    field.up.out_features = field.up[1].out_features
    field.up.bias = None
    check = check_model(model, *text())
    assert check.training_threshold is None
    assert check.no_threshold


def test_clipped_linear_maps_have_no_infinite_h():
    model = own_model()
    for part in model.depth.modules():
        if isinstance(part, nn.Linear):
            part.__class__ = ClippedLinear
    with pytest.raises(ConfigError, match="does not grow with its weights"):
        check_model(model, *text())


@pytest.mark.parametrize("kind", [UnitSizedUnits, OneMoreMap])
def test_a_plugin_that_computes_otherwise_than_its_units_has_no_number(kind):
    model = own_model()
    field = kind(8, 32, activation="relu", bias=False).double()
    model.depth.sublayers[1].field = field
    before = [weight.clone() for weight in field.parameters()]
    check = check_model(model, *text())
    assert check.training_threshold is None
    assert kind.__name__ in check.no_threshold
    assert all(map(torch.equal, before, field.parameters()))


def test_a_plugin_that_computes_its_units_has_a_number():
    class Renamed(OwnFeedForward):
        pass

    model = own_model()
    expected = check_model(model, *text()).training_threshold
    model.depth.sublayers[1].field.__class__ = Renamed
    found = check_model(model, *text()).training_threshold
    # its costate is tested, and the number is as wide as the test is exact
    assert expected.lower * (1 - 1e-3) < found.lower < expected.lower
    assert expected.upper < found.upper < expected.upper * (1 + 1e-3)


class Limited(nn.Module):
    """RMSNorm that stops to bound its input where that is large."""

    def forward(self, x):
        return x / (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt().clamp(max=1e4)


class Lists(nn.Module):
    """A model without modules for its blocks. Its outputs are within 50, or behind norms that do
    not bound large ones.
    """

    def __init__(self, *, normed):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.attentions = nn.ModuleList(Attention() for _ in range(2))
        self.ffns = nn.ModuleList(FeedForward() for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH, elementwise_affine=False)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.outer = nn.ModuleList(Limited() for _ in range(4 if normed else 0))

    def limited(self, f, number):
        if self.outer:
            return self.outer[number](f)
        return f.clamp(-50, 50)

    def forward(self, ids):
        x = self.embedding(ids)
        for i, (attention, ffn) in enumerate(zip(self.attentions, self.ffns, strict=True)):
            x = x + self.limited(attention(self.norm(x)), 2 * i)
            x = x + self.limited(ffn(self.norm(x)), 2 * i + 1)
        return self.head(self.norm(x))


def checked(model):
    torch.manual_seed(0)
    tokens, targets = text(TOKENS, VOCABULARY)
    opened = open_model(model.eval(), example=tokens)
    return check_model(opened.model, tokens, targets)


@pytest.mark.parametrize(
    ("normed", "reason"), [(False, "does not grow"), (True, "does not bound large inputs")]
)
def test_models_without_blocks_are_tested_at_large_weights(normed, reason):
    torch.manual_seed(0)
    with pytest.raises(ConfigError, match=reason):
        checked(Lists(normed=normed).double())


class RefusesLargeNumbers(Block):
    def forward(self, x):
        x = x + self.attention(self.n1(x)).clamp(-50, 50)
        f = self.ffn(self.n2(x))
        if f.abs().max() > 1e5:
            raise ValueError("too large")
        return x + f.clamp(-50, 50)


class WithoutNorms(Block):
    def forward(self, x):
        x = x + self.attention(x).clamp(-50, 50)
        return x + self.ffn(x).clamp(-50, 50)


def test_a_block_that_raises_at_large_weights_has_no_infinite_h():
    torch.manual_seed(0)
    with pytest.raises(ConfigError, match=r"does not grow|does not run"):
        checked(Model(RefusesLargeNumbers()).double())


def test_overflow_is_no_growth():
    torch.manual_seed(0)
    model = Model(WithoutNorms())
    scale = 1e14
    model.embedding.weight.data.mul_(scale)
    block = model.blocks[0]
    for part in (block.ffn.up, block.attention.v, block.attention.q, block.attention.k):
        part.weight.data.div_(scale)
    with pytest.raises(ConfigError, match=r"overflow|does not grow"):
        checked(model)


class Leaks(Block):
    """A sum whose norm is passed by, too little to show at the present weights."""

    def forward(self, x):
        f = self.attention(self.n1(x))
        x = x + self.n2(f) + 1e-12 * f
        f = self.ffn(self.n2(x))
        return x + self.n2(f) + 1e-12 * f


def test_a_leak_past_the_output_norm_leaves_no_finite_h():
    torch.manual_seed(0)
    with pytest.raises(ConfigError, match="a map in parallel has a norm of its output"):
        checked(Model(Leaks()).double())


class LeaksLittle(Block):
    """The same, which shows only at weights of 1e16."""

    def forward(self, x):
        f = self.attention(self.n1(x))
        x = x + self.n2(f) + 1e-20 * f
        f = self.ffn(self.n2(x))
        return x + self.n2(f) + 1e-20 * f


def test_a_smaller_leak_shows_in_its_growth():
    torch.manual_seed(0)
    with pytest.raises(ConfigError, match="a map in parallel has a norm of its output"):
        checked(Model(LeaksLittle()).double())
