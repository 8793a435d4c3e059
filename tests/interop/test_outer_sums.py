"""Sublayers before or behind the parts that were read are found: nobody examined them."""

import pytest
import torch
from torch import nn

from ctrans.control.model_check import check_model
from ctrans.interop import from_transformers, open_model
from ctrans.interop.factors import factors_of
from ctrans.interop.outer_sums import BEFORE, BEHIND, outer_sums
from ctrans.interop.stream_adapter import StreamAdapter
from tests.interop.models import FAMILIES, made
from tests.interop.test_factors import TOKENS, VOCABULARY, WIDTH, Block, Model


class PeriBlock(Block):
    def __init__(self):
        super().__init__()
        self.n3 = nn.LayerNorm(WIDTH)
        self.n4 = nn.LayerNorm(WIDTH)

    def forward(self, x):
        x = x + self.n3(self.attention(self.n1(x)))
        return x + self.n4(self.ffn(self.n2(x)))


class WithOwnSublayers(Model):
    """`early` sublayers before its blocks and `late` ones behind them, in its own forward."""

    def __init__(self, block, early=0, late=0):
        super().__init__(block)
        self.early = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(early))
        self.late = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(late))

    def forward(self, ids):
        x = self.embedding(ids)
        for linear in self.early:
            x = x + linear(x).tanh()
        for block in self.blocks:
            x = block(x)
        for linear in self.late:
            x = x + linear(x).relu()
        return self.head(self.norm(x))


class Narrowing(nn.Module):
    """Three sublayers of one width, and two of half of it."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 16)
        self.wide = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.narrowed = nn.Linear(16, 8)
        self.narrow = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.head = nn.Linear(8, VOCABULARY)

    def forward(self, ids):
        x = self.embedding(ids)
        for linear in self.wide:
            x = x + linear(x).tanh()
        x = self.narrowed(x)
        for linear in self.narrow:
            x = x + linear(x).tanh()
        return self.head(x)


def text():
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, VOCABULARY, (1, TOKENS + 1), generator=generator)
    return ids[:, :-1], ids[:, 1:]


def opened(module):
    tokens, _ = text()
    return open_model(module.double().eval(), example=tokens).model


@pytest.mark.parametrize(("early", "late"), [(0, 0), (1, 0), (0, 2), (2, 1)])
def test_sums_outside_of_the_blocks_are_counted(early, late):
    torch.manual_seed(0)
    model = opened(WithOwnSublayers(Block(), early, late))

    expected = {}
    if early:
        expected[BEFORE] = f"sums x + f(x) in it: {early}. It is read as the embedding"
    if late:
        expected[BEHIND] = f"sums x + f(x) in it: {late}. It is read as the head"
    assert outer_sums(model.adapter) == expected


def test_sums_of_another_width_are_behind_the_stream():
    torch.manual_seed(0)
    model = opened(Narrowing())

    assert isinstance(model.adapter, StreamAdapter)
    assert model.adapter.outside.keys() == {BEHIND}
    assert ": 2. " in model.adapter.outside[BEHIND]


@pytest.mark.cases(1)
def test_a_verdict_is_open_where_a_sublayer_is_outside_of_the_blocks():
    tokens, targets = text()
    torch.manual_seed(0)
    whole = check_model(opened(WithOwnSublayers(PeriBlock())), tokens, targets)
    part = check_model(opened(WithOwnSublayers(PeriBlock(), late=1)), tokens, targets)

    assert whole.step_verdict.startswith("well-posed")
    assert not whole.missing
    assert part.step_verdict == "open"
    assert part.missing.keys() == {BEHIND}


@pytest.mark.cases(1)
def test_no_penalty_is_proven_where_a_sublayer_is_outside_of_the_blocks():
    tokens, targets = text()
    torch.manual_seed(0)
    whole = check_model(opened(WithOwnSublayers(Block())), tokens, targets)
    part = check_model(opened(WithOwnSublayers(Block(), early=1)), tokens, targets)

    assert whole.training_threshold.upper < float("inf")
    assert part.verdict == "degenerate"
    assert part.training_threshold.upper == float("inf")


@pytest.mark.cases(1)
@pytest.mark.parametrize("name", FAMILIES)
def test_families_have_none(name):
    assert outer_sums(from_transformers(made(name)).adapter) == {}


def test_weights_on_demand_say_nothing(monkeypatch):
    torch.manual_seed(0)
    model = opened(WithOwnSublayers(Block(), late=1))
    states = [torch.zeros(1, TOKENS, WIDTH, dtype=torch.float64)] * len(model.depth.sublayers)
    arguments = (model.adapter, list(model.depth.sublayers), model.depth.lengths, states)

    assert factors_of(*arguments).outside
    monkeypatch.setattr("ctrans.interop.outer_sums.has_weights_on_demand", lambda _: True)
    assert not factors_of(*arguments).outside
