"""Which heads share their values is read off the parameters, not off their present values."""

import torch
import torch.nn.functional as F
from torch import nn

from ctrans.control.costate import costate
from ctrans.control.model_check import check_model
from ctrans.interop import open_model
from tests.interop.test_factors import TOKENS, VOCABULARY, Attention, Block, FeedForward, Model

WIDTH, HEADS = 16, 4


class Interleaved(nn.Module):
    """Queries, keys and values of each head lie next to each other in one matrix."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.o = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x):
        by_head = self.qkv(x).view(*x.shape[:2], HEADS, 3, WIDTH // HEADS)
        q, k, v = by_head.permute(3, 0, 2, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(mixed.transpose(1, 2).flatten(-2))


def test_separate_values_that_are_equal_do_not_count_as_one():
    torch.manual_seed(0)
    block = Block(Interleaved())
    by_head = block.attention.qkv.weight.data.view(HEADS, 3, WIDTH // HEADS, WIDTH)
    by_head[:, 2] = by_head[:1, 2].clone()
    ids = torch.randint(0, VOCABULARY, (2, TOKENS + 1))
    model = open_model(Model(block).double().eval(), example=ids[:, :-1]).model
    # with one token the rows are fixed, and lam* of one head is |x||p|
    tokens, targets = ids[:1, :1], ids[:1, 1:2]
    threshold = check_model(model, tokens, targets).segments[0].step_threshold
    found = costate(model, tokens, targets)
    x = model.depth.sublayers[0].given(found.states[0])
    expected = float(x.norm() * found.costates[1].norm())
    assert threshold is not None
    assert threshold.lower <= expected * (1 + 1e-9)
    assert expected <= threshold.upper <= 1.01 * expected


def test_a_map_in_another_dtype_leaves_its_segment_out():
    class HalfFeedForward(FeedForward):
        def forward(self, x):
            return super().forward(x.bfloat16()).float()

    torch.manual_seed(0)
    half = HalfFeedForward().bfloat16()
    ids = torch.randint(0, VOCABULARY, (2, TOKENS + 1))
    model = open_model(Model(Block(ffn=half)).eval(), example=ids[:, :-1]).model
    check = check_model(model, ids[:, :-1], ids[:, 1:])
    assert "bfloat16" in check.missing["segment 1 (ffn)"]


class ScaledLinear(nn.Linear):
    """Its weights differ from what it computes by less than a reading tolerates."""

    def forward(self, x):
        return F.linear(x, 1.0003 * self.weight)


def test_the_number_is_raised_by_what_a_reading_tolerates():
    torch.manual_seed(0)
    module = Model(Block(Attention(ScaledLinear))).double().eval()
    ids = torch.randint(0, VOCABULARY, (2, TOKENS + 1))
    model = open_model(module, example=ids[:, :-1]).model
    tokens, targets = ids[:1, :1], ids[:1, 1:2]
    threshold = check_model(model, tokens, targets).segments[0].step_threshold
    found = costate(model, tokens, targets)
    x = model.depth.sublayers[0].given(found.states[0])
    attained = 1.0003**2 * float(x.norm() * found.costates[1].norm())
    assert threshold.lower < attained < threshold.upper


class RankOne(nn.Module):
    """x + b (a x): a row and a column, which are no gains of a norm."""

    def __init__(self):
        super().__init__()
        self.a = nn.Parameter(torch.randn(1, WIDTH))
        self.b = nn.Parameter(torch.zeros(WIDTH, 1))

    def forward(self, x):
        return x + (x @ self.a.T) @ self.b.T


class AdaptedBlock(Block):
    def __init__(self):
        super().__init__()
        self.adapter = RankOne()

    def forward(self, x):
        x = x + self.attention(self.n1(x))
        return x + self.ffn(self.adapter(self.n2(x)))


def test_an_adapter_of_rank_one_is_no_norm():
    """Opening such a model raised an error of torch."""
    torch.manual_seed(0)
    ids = torch.randint(0, VOCABULARY, (2, TOKENS + 1))
    module = Model(AdaptedBlock()).double().eval()
    model = open_model(module, example=ids[:, :-1]).model
    assert check_model(model, ids[:, :-1], ids[:, 1:]).training_threshold is None
