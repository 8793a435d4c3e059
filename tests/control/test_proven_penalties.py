"""What is proven of a penalty holds for code that only looks like what the proof is about."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ctrans.control import derivatives_agree, model_check
from ctrans.control.attention_averages import NO_AVERAGES, why_no_averages
from ctrans.control.decay_paths import ValuePath
from ctrans.control.decay_threshold import decay_threshold
from ctrans.control.in_double import in_double
from ctrans.control.model_check import check_model
from ctrans.control.regularization import Regularization
from ctrans.control.shown_factors import Factors, path_of
from ctrans.dynamics.fields import FeedForward as OwnFeedForward
from ctrans.dynamics.fields.attention import Attention as OwnAttention
from ctrans.examine.certified import measured
from ctrans.interop import open_model
from ctrans.measure.walk import value_and_pullback
from solvers import ConfigError
from tests.control.test_own_pass import gpt, text
from tests.interop.test_factors import HEADS, TOKENS, VOCABULARY, WIDTH, Block, FeedForward, Model

DECAY = Regularization(weight_decay=1.0)


class RowsAttention(nn.Module):
    """Softmax attention whose rows a subclass may change."""

    def __init__(self, width=WIDTH):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))

    def by_head(self, z):
        return z.unflatten(-1, (HEADS, -1)).transpose(1, 2)

    def rows(self, x):
        q, k = self.by_head(self.q(x)), self.by_head(self.k(x))
        later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        scores = q @ k.mT / math.sqrt(q.shape[-1])
        return self.from_scores(scores.masked_fill(later, -math.inf))

    def from_scores(self, scores):
        return scores.softmax(-1)

    def averages(self, rows, x):
        return self.o((rows @ self.by_head(self.v(x))).transpose(1, 2).flatten(-2))

    def forward(self, x):
        return self.averages(self.rows(x), x)


class Sink(RowsAttention):
    """A sink of a constant score: below scores of -15 it takes most of a row."""

    def from_scores(self, scores):
        sink = torch.full_like(scores[..., :1], -15.0)
        return torch.cat([scores, sink], -1).softmax(-1)[..., :-1]


class ReturnsRows(RowsAttention):
    def forward(self, x):
        rows = self.rows(x)
        return self.averages(rows, x), rows


class SinkReturnsRows(Sink):
    def forward(self, x):
        rows = self.rows(x)
        return self.averages(rows, x), rows


class SinkOfTheLastHead(SinkReturnsRows):
    def from_scores(self, scores):
        sink = torch.full_like(scores[..., :1], -math.inf)
        sink[:, -1] = -15.0
        return torch.cat([scores, sink], -1).softmax(-1)[..., :-1]


class TanhUnits(FeedForward):
    def forward(self, x):
        return self.down(torch.tanh(self.up(x)))


def foreign(block, dtype=torch.float64, model=Model, prepare=None, seed=0):
    torch.manual_seed(seed)
    module = model(block()).eval()
    if prepare is not None:
        prepare(module)
    return open_model(module.to(dtype)).model


def foreign_check(block, **options):
    return check_model(foreign(block, **options), *text(TOKENS, VOCABULARY), DECAY)


def is_refused(check):
    return check.training_threshold is None and check.step_verdict == "open"


# 1: segments that nobody looked at


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.router = nn.Linear(WIDTH, 3, bias=False)
        self.experts = nn.ModuleList([FeedForward() for _ in range(3)])

    def forward(self, x):
        shares = self.router(x).softmax(-1)
        return sum(shares[..., k : k + 1] * self.experts[k](x) for k in range(3))


class NormBehindAttention(Block):
    """Attention is bounded, the experts are not."""

    def __init__(self):
        super().__init__(ffn=Experts())
        self.n1 = nn.LayerNorm(WIDTH)

    def forward(self, x):
        x = x + self.n1(self.attention(x))
        return x + self.ffn(self.n2(x))


@pytest.mark.parametrize("decay", [None, DECAY])
def test_segments_that_were_skipped_leave_no_verdict(decay):
    check = check_model(foreign(NormBehindAttention), *text(TOKENS, VOCABULARY), decay)
    assert all(segment.verdict.startswith("well-posed") for segment in check.segments)
    assert check.missing
    assert check.verdict == "open"
    assert check.step_verdict == "open"
    assert not check.finite
    table = measured({"layernorm": {"own": check}}, {})
    assert "Not decided: own" in table.answers[0].text
    assert "Well-posed" not in table.answers[0].text
    assert "were skipped, and may need a penalty too" in table.missing["own"]["penalty needed"]


# 2: rows with negative entries


class Shaped(OwnAttention):
    """Rows 3 softmax - 2 uniform (Noci et al. 2023) sum to 1, with negative entries."""

    def probabilities(self, x):
        rows = super().probabilities(x)
        uniform = torch.ones_like(rows).tril()
        return 3 * rows - 2 * uniform / uniform.sum(-1, keepdim=True)

    def forward(self, x):
        _, _, v = self.queries_keys_values(x)
        return self.out((self.probabilities(x) @ v).transpose(-3, -2).flatten(-2))


def shaped_model():
    model = gpt(activation="tanh")
    model.depth.sublayers[0].field.__class__ = Shaped
    return model


def test_rows_with_negative_entries_leave_no_number():
    check = check_model(shaped_model(), *text(), DECAY)
    assert is_refused(check)
    assert "negative entries" in check.no_threshold


def test_rows_beyond_averages_show_in_a_path_by_numbers_that_contradict():
    tokens = torch.tensor([[1.0, 0.0], [-1.0, 0.0]]).double()
    P = torch.tensor([[0.0, 0.0], [1.0, 0.0]]).double()
    rows = torch.tensor([[[1.0, 0.0], [3.0, -2.0]]]).double()
    path = ValuePath(rows @ tokens, 2, tokens=tokens)
    threshold = decay_threshold(path, P)
    assert threshold.lower == pytest.approx(5.0)
    assert threshold.upper == pytest.approx(1.0)
    assert threshold.contradicts_itself


def test_bounds_that_contradict_each_other_leave_no_number(monkeypatch):
    """As if the test of the rows had seen nothing."""
    monkeypatch.setattr(model_check, "factors_of_model", lambda model, states: Factors())
    check = check_model(shaped_model(), *text(), DECAY)
    assert "contradict each other" in check.no_threshold
    assert is_refused(check)


# 3: a test that rounding leaves empty


class StopsValues(RowsAttention):
    def forward(self, x):
        return self.averages(self.rows(x), x.detach())


class TwoBlocks(Model):
    def __init__(self, block):
        super().__init__(block)
        self.blocks.append(Block(attention=StopsValues()))


def as_trained(module):
    """The first block's weights are small, the values of the last one large."""
    for parameter in module.blocks.parameters():
        parameter.data.normal_().mul_(0.02)
    last = module.blocks[1].attention
    for weight in (last.v.weight, last.o.weight):
        weight.data.normal_().mul_(30.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_stopped_gradient_shows_in_single_precision_too(dtype):
    check = foreign_check(
        lambda: Block(attention=RowsAttention()), dtype=dtype, model=TwoBlocks, prepare=as_trained
    )
    assert is_refused(check)


def test_a_test_that_decides_nothing_leaves_no_number(monkeypatch):
    """A step so small that a difference is rounding alone."""
    steps = {torch.float64: ((1e-16,),), torch.float32: ((1e-16,),)}
    monkeypatch.setattr(derivatives_agree, "STEPS", steps)
    hooked = gpt()
    hooked.register_forward_hook(lambda part, given, output: output)
    for model, tokens in ((hooked, text()), (foreign(Block), text(TOKENS, VOCABULARY))):
        check = check_model(model, *tokens, DECAY)
        assert is_refused(check)
        assert "not tested: rounding" in check.no_threshold


def test_a_buffer_that_a_pass_in_double_replaces_is_put_back():
    """XGLM makes its table of positions anew in a longer pass."""
    module = nn.BatchNorm1d(3)
    table = module.running_mean
    with in_double([module]):
        module.register_buffer("running_mean", torch.zeros(5, dtype=torch.float64))
        module.register_buffer("new", torch.zeros(2, dtype=torch.float64))

    assert module.running_mean is table
    assert table.dtype == torch.float32
    assert "new" not in dict(module.named_buffers())


def test_a_model_in_double_shares_memory_and_is_put_back_to_the_bit():
    module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    module[1].weight.data = module[0].weight.data.t()
    before = [parameter.data.clone() for parameter in module.parameters()]
    with in_double([module]):
        assert all(parameter.dtype == torch.float64 for parameter in module.parameters())
        module[0].weight.data.mul_(2.0)
        assert torch.equal(module[1].weight, module[0].weight.t())
    assert all(map(torch.equal, before, module.parameters()))
    module[0].weight.data.fill_(1.0)
    assert bool((module[1].weight == 1).all())


# 4: a constant sink


class BlockOfRows(Block):
    def __init__(self, kind):
        super().__init__(kind(), TanhUnits())
        self.n1 = nn.LayerNorm(WIDTH)

    def forward(self, x):
        x = x + self.attention(self.n1(x))[0]
        return x + self.ffn(self.n2(x))


@torch.no_grad()
def with_heads_of_their_own_channels(module):
    """Where the scores of one head are low, those of the others are not."""
    size = WIDTH // HEADS
    own = torch.block_diag(*[torch.ones(size, size)] * HEADS)
    for part in (module.blocks[0].attention.q, module.blocks[0].attention.k):
        part.weight.mul_(own)


@torch.no_grad()
def test_a_constant_sink_shows_in_the_rows_before_they_are_normalised():
    tokens, _ = text(TOKENS, VOCABULARY)
    for kind in (ReturnsRows, SinkReturnsRows, SinkOfTheLastHead):
        model = foreign(
            lambda kind=kind: BlockOfRows(kind), prepare=with_heads_of_their_own_channels
        )
        sublayer = model.depth.sublayers[0]
        given = sublayer.given(model.embed(tokens))
        attention = sublayer.field
        sums = attention.probabilities(given).sum(-1)
        assert torch.allclose(sums, torch.ones_like(sums))  # for the sink too
        reason, error = why_no_averages(attention, path_of(attention, given), given, 1e-3)
        if kind is ReturnsRows:
            assert reason == ""
            assert error < 1e-6
        else:
            assert reason == NO_AVERAGES
            assert error > 0.5


def test_a_constant_sink_leaves_no_number():
    plain = foreign_check(lambda: BlockOfRows(ReturnsRows))
    assert math.isfinite(plain.training_threshold.upper)
    for kind in (SinkReturnsRows, SinkOfTheLastHead):
        check = foreign_check(
            lambda kind=kind: BlockOfRows(kind), prepare=with_heads_of_their_own_channels
        )
        assert is_refused(check)


# 5: what a map calls a bias


class Curved(OwnFeedForward):
    """Units z + c z^2, whose c is called a bias."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.curve_bias = nn.Parameter(torch.zeros(self.up.out_features))

    def forward(self, x):
        z = F.relu(self.up(x))
        return self.down(z + self.curve_bias * z * z)


class CurvedByItsBias(OwnFeedForward):
    """The same, with the bias of a linear map for c."""

    def forward(self, x):
        z = F.relu(F.linear(x, self.up.weight))
        return self.down(z + self.up.bias * z * z)


def attained_by_growing_units(model, tokens, targets, decay):
    """-<P, f> - decay/2 |W|^2 of the FFN's own code for weights of growing size."""
    sublayer = model.depth.sublayers[1]
    x = model.depth.sublayers[0].step(model.embed(tokens), 1.0).detach()
    given = sublayer.given(x)
    f = sublayer.field(given).detach().requires_grad_(True)
    loss = F.cross_entropy(model.head(x + f).flatten(0, 1), targets.flatten())
    (p,) = torch.autograd.grad(loss, f)
    ffn = copy.deepcopy(sublayer.field)
    values = []
    with torch.no_grad():
        w = torch.randn(given.shape[-1], dtype=torch.float64)
        a = -(p * F.relu(given @ w).square().unsqueeze(-1)).flatten(0, -2).sum(0)
        for size in (1e2, 1e4, 1e6):
            ffn.up.weight.zero_()
            ffn.down.weight.zero_()
            ffn.up.weight[0] = size * w / w.norm()
            ffn.down.weight[:, 0] = size * a / a.norm()
            cost = ffn.up.weight.square().sum() + ffn.down.weight.square().sum()
            values.append(float(-(p * ffn(given)).sum() - decay / 2 * cost))
    return values


@pytest.mark.parametrize("size", [0.0, 0.01])
def test_a_factor_that_is_called_a_bias_is_none(size):
    model = gpt(activation="relu")
    field = model.depth.sublayers[1].field
    field.__class__ = Curved
    field.curve_bias = nn.Parameter(torch.full((field.up.out_features,), size).double())
    if size:
        values = attained_by_growing_units(model, *text(), decay=5.0)
        assert 0 < 1e4 * values[1] < values[2]  # R^3 against R^2
    assert is_refused(check_model(model, *text(), DECAY))


def test_a_linear_maps_bias_that_scales_is_none():
    model = gpt(activation="relu", bias=True)
    field = model.depth.sublayers[1].field
    field.__class__ = CurvedByItsBias
    field.up.bias.data.zero_()
    assert is_refused(check_model(model, *text(), DECAY))


class ForeignCurved(FeedForward):
    def __init__(self):
        super().__init__(bias=True)
        self.up.bias.data.zero_()

    def forward(self, x):
        z = F.relu(self.up(x) - self.up.bias)
        return self.down(z + self.up.bias * z * z)


def test_a_foreign_bias_that_scales_is_none():
    assert is_refused(foreign_check(lambda: Block(ffn=ForeignCurved())))


# 6: rounded rows


class HalfRows(RowsAttention):
    def from_scores(self, scores):
        return scores.softmax(-1).half().to(scores.dtype)


class TwoWords(Model):
    """All tokens are alike, and gradients cancel over the tokens."""

    def __init__(self, block):
        super().__init__(block)
        self.embedding = nn.Embedding(2, WIDTH)
        self.head = nn.Linear(WIDTH, 2, bias=False)
        table, head = self.embedding.weight.data, self.head.weight.data
        table[1] = table[0] + 1e-5 * torch.randn(WIDTH)
        head[1] = head[0] + 1e-3 * (head[1] - head[0])


def test_rounded_rows_widen_a_number_whose_terms_cancel():
    def block():
        return Block(HalfRows(), TanhUnits())

    ids = torch.tensor([[0, 1] * 25])[:, :49]
    model = foreign(block, model=TwoWords)
    check = check_model(model, ids[:, :-1], ids[:, 1:], DECAY)
    module = model.model.double()
    attention = module.blocks[0].attention
    met = {}

    def keep(part, given, output):
        output.retain_grad()
        met["x"], met["f"] = given[0].detach(), output

    hook = attention.register_forward_hook(keep)
    F.cross_entropy(module(ids[:, :-1])[0], ids[0, 1:]).backward()
    hook.remove()
    x, P = met["x"][0], met["f"].grad[0]
    needed = 0.0
    torch.manual_seed(0)
    with torch.no_grad():
        for _ in range(300):
            size = 10 ** (4 * torch.rand(()) - 2)
            for part in (attention.q, attention.k):
                part.weight.normal_().mul_(size)
            for rows in attention.rows(x[None])[0]:
                needed = max(needed, float(torch.linalg.matrix_norm((rows @ x).mT @ P, 2)))
    threshold = check.training_threshold
    assert threshold is None or needed <= threshold.upper


# 7: code that stops the gradient of the state


class StopsTheState(Block):
    def __init__(self):
        super().__init__()
        self.n1 = nn.LayerNorm(WIDTH)

    def forward(self, x):
        x = x + self.attention(self.n1(x).detach())
        return x + self.ffn(self.n2(x))


class TwoThatStop(Model):
    def __init__(self, block):
        super().__init__(block)
        self.blocks.append(StopsTheState())


def test_a_stopped_gradient_of_the_state_is_said_and_does_not_crash():
    check = foreign_check(StopsTheState, model=TwoThatStop)
    assert "no gradient reaches the state" in (check.instead or "")
    assert is_refused(check)


def test_a_pullback_says_that_no_gradient_passes():
    with pytest.raises(ConfigError, match="no gradient reaches the state"):
        value_and_pullback(lambda x: x.detach() + 1, torch.ones(2), torch.ones(2))
