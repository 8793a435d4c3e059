"""Sublayers before or behind the parts that were read are found: nobody examined them."""

import pytest
import torch
from torch import nn

from ctrans.control.model_check import check_model
from ctrans.control.outer_code import BEFORE, BEHIND
from ctrans.interop import from_transformers, open_model
from ctrans.interop.factors import factors_of
from ctrans.interop.outside import CONTEXT, outside_of
from ctrans.interop.stream_adapter import StreamAdapter
from solvers import ConfigError
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


def count(words):
    """The number of maps that a sentence names."""
    return int(words.split(": ")[1].split(".")[0])


def opened(module):
    tokens, _ = text()
    return open_model(module.double().eval(), example=tokens).model


class WithAnother(Model):
    """A part before its blocks or behind them, computed by `part` of its state."""

    def __init__(self, part, *, is_early, block=None):
        super().__init__(block or PeriBlock())
        self.part = part
        self.is_early = is_early
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.matrix = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)

    def f(self, x):
        return self.linear(x).tanh()

    def forward(self, ids):
        x = self.embedding(ids)
        if self.is_early:
            x = self.part(self, x)
        for block in self.blocks:
            x = block(x)
        if not self.is_early:
            x = self.part(self, x)
        return self.head(self.norm(x))


def written_in_place(model, x):
    x = x.clone()
    x[:, -1] += model.f(x)[:, -1]
    return x


def in_a_view_of_a_view(model, x):
    turned = x.clone().transpose(0, 1)
    turned[0].add_(model.f(turned[0]))
    return turned.transpose(0, 1)


def between_two_orders(model, x):
    """A sum that a product of two states comes before, as in a highway."""
    gate = model.f(x).sigmoid()
    return x * (1 - gate) + model.f(x) * gate


def by_an_identity(model, x):
    identity = torch.eye(WIDTH, dtype=x.dtype)
    return torch.cat([x, model.f(x)], -1) @ torch.cat([identity, identity])


class OfItsOwn(torch.autograd.Function):
    """x + tanh(x W), which torch's functions do not see."""

    @staticmethod
    def forward(context, x, w):
        context.save_for_backward(x, w)
        return x + (x @ w).tanh()

    @staticmethod
    def backward(context, slope):
        x, w = context.saved_tensors
        slope_inside = slope * (1 - (x @ w).tanh() ** 2)
        of_w = x.flatten(0, 1).T @ slope_inside.flatten(0, 1)
        return slope + slope_inside @ w.T, of_w


def unseen(function):
    """Code that torch does not show."""
    return lambda *inputs: torch.func.vmap(function, (0, None))(*inputs)


def pooled(model, x):
    """Averages of the tokens by rows of the model's own, as of attention without values."""
    return torch.softmax(model.f(x) @ model.matrix[:, :TOKENS], -1) @ x


def centred(x):
    return (x - x.mean(-1, keepdim=True)) / (x.var(-1, keepdim=True) + 1e-5).sqrt()


SUBLAYERS = {
    "lerp": lambda model, x: torch.lerp(x, model.f(x), 0.3),
    "sum of a stack": lambda model, x: torch.stack([x, model.f(x)]).sum(0),
    "mean of a stack": lambda model, x: 2 * torch.stack([x, model.f(x)]).mean(0),
    "addcmul": lambda model, x: torch.addcmul(x, model.f(x), torch.full_like(x, 0.5)),
    "the last token": lambda model, x: torch.cat([x[:, :-1], model.f(x)[:, -1:]], 1),
    "in place": written_in_place,
    "baddbmm": lambda model, x: torch.baddbmm(x, x.relu(), model.matrix.expand(len(x), -1, -1)),
    "baddbmm of the state": lambda model, x: torch.baddbmm(
        x, x, model.matrix.expand(len(x), -1, -1)
    ),
    "einsum": lambda model, x: x + torch.einsum("btd,de->bte", x.relu(), model.matrix),
    "products of entries": lambda model, x: x + (x.unsqueeze(-1) * model.matrix).sum(-2).tanh(),
    "an identity": by_an_identity,
    "attention": lambda model, x: torch.lerp(x, model.attention(x, x, x)[0], 0.5),
    "a view of a view": in_a_view_of_a_view,
    "a highway": between_two_orders,
    "past a gate": lambda model, x: x + x * model.f(x),
    "past a mapped gate": lambda model, x: x + (x * model.f(x)) @ model.matrix,
    "a gate beside a map": lambda model, x: x * model.f(x).sigmoid() + x @ model.matrix,
    "unseen code": lambda model, x: x + unseen(lambda x, w: (x @ w).tanh())(x, model.matrix),
    "an unseen sum": lambda model, x: unseen(lambda x, w: x + (x @ w).tanh())(x, model.matrix),
    "function": lambda model, x: OfItsOwn.apply(x, model.matrix),
}
NO_SUBLAYERS = {
    "two maps": lambda model, x: model.f(model.f(x).relu()),
    "gated": lambda model, x: model.f(x).sigmoid() * (x @ model.matrix),
    "positions": lambda model, x: x + model.matrix[: x.shape[1]],
    "a gate": lambda model, x: x * model.f(x).sigmoid(),
    "a normed gate": lambda model, x: centred(x * model.f(x).sigmoid()),
    "pooled": pooled,
    "cap": lambda model, x: 30 * (x / 30).tanh(),
}


@pytest.mark.parametrize("is_early", [True, False])
@pytest.mark.parametrize("name", [*SUBLAYERS, *NO_SUBLAYERS])
def test_a_map_whose_input_goes_past_it_is_found_however_it_is_written(name, is_early):
    torch.manual_seed(0)
    part = (SUBLAYERS | NO_SUBLAYERS)[name]
    module = WithAnother(part, is_early=is_early)
    if is_early and name == "an unseen sum":  # nor is what its first state is made of
        with pytest.raises(ConfigError, match="no sums x"):
            opened(module)
        return
    model = opened(module)

    where = BEFORE if is_early else BEHIND
    is_a_part = len(model.depth.sublayers) > 2
    is_outside = name in SUBLAYERS and not is_a_part
    assert outside_of(model.adapter).keys() == ({where} if is_outside else set())
    assert not (is_a_part and name in NO_SUBLAYERS)


class WithTwoTables(WithAnother):
    """Its first state chooses by the ids between two tables, one of them behind a map."""

    def __init__(self):
        super().__init__(lambda model, x: x, is_early=True)
        self.other = nn.Embedding(VOCABULARY, WIDTH)

    def forward(self, ids):
        frequent = (ids < 5).unsqueeze(-1)
        x = torch.where(frequent, self.embedding(ids), self.linear(self.other(ids)))
        x = x * (ids != 3).unsqueeze(-1)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class WithASkip(WithAnother):
    """Its head also gets a map of what comes before its positions are added."""

    def __init__(self):
        super().__init__(lambda model, x: x, is_early=True)

    def forward(self, ids):
        tokens = self.embedding(ids)
        x = tokens + self.matrix[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x + self.linear(tokens)))


class Conditioned(PeriBlock):
    def forward(self, x, condition):
        x = x + self.n3(self.attention(self.n1(x) + condition))
        return x + self.n4(self.ffn(self.n2(x) + condition))


class WithContext(WithAnother):
    """Its blocks get a vector that residual maps make."""

    def __init__(self, *, is_residual):
        super().__init__(lambda model, x: x, is_early=True)
        self.is_residual = is_residual
        self.of_condition = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Conditioned() for _ in range(2))

    def forward(self, ids):
        x = self.embedding(ids)
        condition = self.of_condition(ids)
        if self.is_residual:
            condition = condition + self.f(condition)
        else:
            condition = self.f(condition)
        for block in self.blocks:
            x = block(x, condition)
        return self.head(self.norm(x))


@pytest.mark.parametrize(
    ("module", "expected"),
    [
        (WithTwoTables, set()),
        (WithASkip, {BEHIND}),
        (lambda: WithContext(is_residual=True), {CONTEXT}),
        (lambda: WithContext(is_residual=False), set()),
    ],
    ids=["tables by id", "skip", "context", "plain context"],
)
def test_what_else_is_outside_of_the_blocks(module, expected):
    torch.manual_seed(0)

    assert outside_of(opened(module()).adapter).keys() == expected


class TwoStacks(nn.Module):
    """An encoder whose states a decoder of known blocks reads."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 32, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        layer = nn.TransformerDecoderLayer(WIDTH, 2, 32, batch_first=True, norm_first=True)
        self.decoder = nn.TransformerDecoder(layer, 2)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, target, source):
        memory = self.encoder(self.embedding(source))
        return self.head(self.decoder(self.embedding(target), memory))


def test_the_other_stack_of_two_is_outside():
    torch.manual_seed(0)
    tokens, targets = text()
    module = TwoStacks().double().eval()
    model = open_model(module, example=[tokens, targets]).model

    found = outside_of(model.adapter)
    assert {where: count(words) for where, words in found.items()} == {CONTEXT: 4}


@pytest.mark.parametrize(("early", "late"), [(0, 0), (1, 0), (0, 2), (2, 1)])
def test_sums_outside_of_the_blocks_are_parts(early, late):
    torch.manual_seed(0)
    model = opened(WithOwnSublayers(Block(), early, late))

    kinds = [sublayer.kind for sublayer in model.depth.sublayers]
    assert kinds == ["ffn"] * early + ["attention", "ffn"] + ["ffn"] * late
    assert not outside_of(model.adapter)


def test_sums_of_another_width_are_behind_the_stream():
    torch.manual_seed(0)
    model = opened(Narrowing())

    assert isinstance(model.adapter, StreamAdapter)
    found = outside_of(model.adapter)
    assert {where: count(words) for where, words in found.items()} == {BEHIND: 2}


@pytest.mark.cases(1)
def test_a_verdict_is_open_where_a_sublayer_is_outside_of_the_stream():
    tokens, targets = text()
    torch.manual_seed(0)
    whole = check_model(opened(WithOwnSublayers(PeriBlock())), tokens, targets)
    stacked = WithAnother(SUBLAYERS["sum of a stack"], is_early=False)
    part = check_model(opened(stacked), tokens, targets)

    assert whole.step_verdict.startswith("well-posed")
    assert not whole.missing
    assert part.step_verdict == "open"
    assert part.missing.keys() == {BEHIND}


@pytest.mark.cases(1)
def test_no_penalty_is_proven_where_a_sublayer_is_outside_of_the_stream():
    tokens, targets = text()
    torch.manual_seed(0)
    whole = check_model(opened(WithOwnSublayers(Block())), tokens, targets)
    stacked = WithAnother(SUBLAYERS["sum of a stack"], is_early=True, block=Block())
    part = check_model(opened(stacked), tokens, targets)

    assert whole.training_threshold.upper < float("inf")
    assert part.verdict == "degenerate"
    assert part.training_threshold.upper == float("inf")


@pytest.mark.cases(1)
@pytest.mark.parametrize("name", FAMILIES)
def test_families_have_none(name):
    assert outside_of(from_transformers(made(name)).adapter) == {}


def test_weights_on_demand_say_nothing(monkeypatch):
    torch.manual_seed(0)
    model = opened(WithAnother(SUBLAYERS["sum of a stack"], is_early=False))
    states = [torch.zeros(1, TOKENS, WIDTH, dtype=torch.float64)] * len(model.depth.sublayers)
    arguments = (model.adapter, list(model.depth.sublayers), model.depth.lengths, states)

    assert factors_of(*arguments).outside
    monkeypatch.setattr("ctrans.interop.outside.has_weights_on_demand", lambda _: True)
    assert not factors_of(*arguments).outside
