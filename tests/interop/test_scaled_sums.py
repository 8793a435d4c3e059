"""Sums a x + b f(x) with numbers or weights a and b, however the code writes them."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import ctrans
from ctrans.control.model_check import check_model
from ctrans.control.regularization import Regularization
from ctrans.dynamics.residual import KeptShare
from ctrans.interop import open_model
from ctrans.measure.forward.bounds import BoundsByDepth
from ctrans.measure.walk import walk
from ctrans.training.monitor import Monitor
from tests.interop.test_found_by_strangers import HEADS, VOCABULARY, WIDTH, feed_forward, ids

pytestmark = pytest.mark.cases(2)
SCALES = {
    "numbers": lambda block, x, v: 0.9 * x + 0.5 * v,
    "weights": lambda block, x, v: block.a * x + v * block.b,
    "a weight and its rest": lambda block, x, v: (
        block.b.sigmoid() * x + (1 - block.b.sigmoid()) * v
    ),
    "a scaled sum": lambda block, x, v: (x + v) * math.sqrt(0.5),
    "a divided sum": lambda block, x, v: (x + v) / math.sqrt(2),
    "a sum times a weight": lambda block, x, v: block.a * (x + v),
    "lerp": lambda block, x, v: torch.lerp(x, v, 0.3),
    "lerp by a weight": lambda block, x, v: x.lerp(v, block.b.sigmoid()),
}


class CausalAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.maps = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        q, k, v = self.maps(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        averages = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(averages.transpose(1, 2).flatten(-2))


class Part(nn.Module):
    def __init__(self, field, join):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.field = field
        self.join = join
        self.a = nn.Parameter(torch.tensor(0.8))
        self.b = nn.Parameter(torch.tensor(0.6))

    def forward(self, x):
        return self.join(self, x, self.field(self.norm(x)))


class Model(nn.Module):
    def __init__(self, join):
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, WIDTH)
        fields = [CausalAttention(), feed_forward(), CausalAttention(), feed_forward()]
        self.parts = nn.ModuleList(Part(field, join) for field in fields)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def states(self, tokens):
        states = [self.table(tokens)]
        for part in self.parts:
            states.append(part(states[-1]))
        return states

    def forward(self, tokens):
        return self.head(self.norm(self.states(tokens)[-1]))


@pytest.fixture(params=SCALES.values(), ids=SCALES)
def module(request):
    torch.manual_seed(0)
    return Model(request.param).double().eval()


def shares_of(module, tokens):
    """a and b by dy = a dx + b dv, of the join of each part."""
    zero, one = torch.zeros(WIDTH).double(), torch.ones(WIDTH).double()
    shares = []
    for part in module.parts:
        a, b = part.join(part, one, zero), part.join(part, zero, one)
        shares.append((a[0].item(), b[0].item()))
    return shares


def test_the_parts_are_those_of_the_code(module):
    opened = open_model(module, example=ids(), loss="next")
    parts = opened.depth.sublayers
    assert [part.kind for part in parts] == ["attention", "ffn"] * 2
    assert {part.placement.name for part in parts} == {"pre"}
    assert all(isinstance(part.residual, KeptShare) for part in parts)
    found = [
        (part.residual.share, length)
        for part, length in zip(parts, opened.depth.lengths, strict=True)
    ]
    for pair, expected in zip(found, shares_of(module, ids()), strict=True):
        assert pair == pytest.approx(expected, rel=1e-6)
    assert "its sums are a x + f(x), of which a is 0." in opened.described


def test_states_and_costates_are_the_modules_own(module):
    opened = open_model(module, example=ids(), loss="next")
    targets = ids().roll(-1, 1)
    found = ctrans.costate(opened, ids(), targets)
    states = module.states(ids())
    loss = F.cross_entropy(module.head(module.norm(states[-1])).flatten(0, 1), targets.flatten())
    costates = torch.autograd.grad(loss, states)
    for name, own, of_ctrans in (
        ("states", states, found.states),
        ("costates", costates, found.costates),
    ):
        for k, (expected, x) in enumerate(zip(own, of_ctrans, strict=True)):
            torch.testing.assert_close(x, expected, rtol=1e-9, atol=1e-12, msg=f"{name} {k}")


def test_the_lengths_of_states_are_within_their_bounds(module):
    opened = open_model(module, example=ids(), loss="next")
    (bounds,) = walk(opened, ids(), instruments=[BoundsByDepth()])
    lengths = [float(x.detach().square().mean().sqrt()) for x in module.states(ids())]
    for length, bound in zip(lengths, bounds.rms, strict=True):
        assert length <= bound * (1 + 1e-9)


def test_the_monitors_velocity_is_what_the_map_adds(module):
    monitor = Monitor(module.train(), every=1, example=ids())
    loss = F.cross_entropy(module(ids()).flatten(0, 1), ids().roll(-1, 1).flatten())
    loss.backward()
    monitor.step(loss.detach())
    monitor.close()
    figures = monitor.past.reports[-1][1]
    with torch.no_grad():
        moves = [
            part.field(part.norm(x))
            for part, x in zip(module.parts, module.states(ids()), strict=False)
        ]
    expected = [float(each.square().mean().sqrt()) for each in moves]
    assert figures["velocity"] == pytest.approx(expected, rel=1e-5)


def test_the_monitors_velocity_follows_a_share_that_is_trained(module):
    monitor = Monitor(module.train(), every=1, example=ids())
    for _ in range(2):
        with torch.no_grad():
            for part in module.parts:
                part.a.mul_(0.5)
        loss = F.cross_entropy(module(ids()).flatten(0, 1), ids().roll(-1, 1).flatten())
        loss.backward()
        monitor.step(loss.detach())
    monitor.close()
    figures = monitor.past.reports[-1][1]
    lengths = monitor.sites.model.depth.lengths
    expected = []
    with torch.no_grad():
        for part, x, y, length in zip(
            module.parts, module.states(ids()), module.states(ids())[1:], lengths, strict=False
        ):
            zero, one = torch.zeros_like(x), torch.ones_like(x)
            kept = part.join(part, one, zero) * x
            expected.append(float(((y - kept) / length).square().mean().sqrt()))
    assert figures["velocity"] == pytest.approx(expected, rel=1e-5)


def by_channel(block, x, v):
    return block.norm.weight * x + v


def negative(block, x, v):
    return v - 0.9 * x


@pytest.mark.parametrize("join", [by_channel, negative])
def test_other_factors_are_said(join):
    opened = open_model(Model(join).eval(), example=ids(), loss="next")
    assert "gate, or factor that is no positive number, is not read" in opened.described


class OneBlock(nn.Module):
    """a_k x + b_k f_k(N x) twice, with norms that do not see the size of x."""

    def __init__(self, shares, scales):
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, WIDTH)
        self.fields = nn.ModuleList([CausalAttention(), feed_forward()])
        self.norms = nn.ModuleList(
            nn.LayerNorm(WIDTH, eps=1e-14, elementwise_affine=False) for _ in range(3)
        )
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.shares = shares
        self.scales = scales

    def forward(self, tokens):
        x = self.table(tokens)
        for a, b, norm, field in zip(
            self.shares, self.scales, self.norms, self.fields, strict=False
        ):
            x = a * x + b * field(norm(x))
        return self.head(self.norms[-1](x))


@pytest.mark.slow
def test_the_penalty_is_that_of_the_same_function_without_shares():
    """a x + f(N x) is a (x + f(N x)/a), and norms do not see the factor a."""
    a = 0.8
    checks = []
    for shares, scales in (((a, a), (1.0, 1.0)), ((1.0, 1.0), (1 / a, 1 / a**2))):
        torch.manual_seed(0)
        module = OneBlock(shares, scales).double().eval()
        opened = open_model(module, example=ids()[:1], loss="next")
        decay = Regularization(weight_decay=0.5)
        checks.append(check_model(opened.model, ids()[:1], ids()[:1].roll(-1, 1), decay))
    with_shares, without = (check.training_threshold for check in checks)
    assert math.isfinite(with_shares.upper)
    assert with_shares.lower == pytest.approx(without.lower, rel=1e-6)
    assert with_shares.upper == pytest.approx(without.upper, rel=1e-6)
    assert [each.step_verdict for each in checks] == ["degenerate"] * 2
