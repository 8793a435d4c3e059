"""Rows of attention in unusual code: axes in any order, loops, learned queries, tables, sinks."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ctrans.dynamics.fields import ExposesHeads, ExposesRows
from ctrans.interop import open_model
from tests.interop.test_found_by_strangers import (
    HEADS,
    VOCABULARY,
    WIDTH,
    OwnAttention,
    ids,
    made,
)


class Turned(OwnAttention):
    """Causal attention with the axes of its scores in some order."""

    def __init__(self, order, heads=HEADS):
        super().__init__()
        self.order = order
        self.heads = heads

    def averages(self, x):
        q, k, v = self.maps(x).unflatten(-1, (3, self.heads, -1)).unbind(-3)
        scores = torch.einsum(f"bihd,bjhd->{self.order}", q, k)
        later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        shape = [x.shape[1] if axis in "ij" else 1 for axis in self.order]
        later = (later if self.order.index("i") < self.order.index("j") else later.T).view(shape)
        rows = scores.masked_fill(later, -torch.inf).softmax(self.order.index("j"))
        self.rows = rows.permute(*map(self.order.index, "bhij"))
        return torch.einsum(f"{self.order},bjhd->bihd", rows, v).flatten(-2)


@pytest.mark.parametrize("order", ["ijbh", "bijh", "hbij", "bhji", "jbhi"])
def test_rows_are_known_whatever_the_order_of_their_axes(order):
    module = made(lambda: Turned(order))
    opened = open_model(module, example=ids(), loss="next")
    assert "its rows have their axes in an unusual order" in opened.described
    for tokens in (ids(), torch.randint(VOCABULARY, (HEADS, 5)), torch.randint(VOCABULARY, (4, 4))):
        attention = opened.depth.sublayers[0]
        assert isinstance(attention.field, ExposesRows)
        rows = attention.field.probabilities(attention.given(opened.embed(tokens)))
        module(tokens)
        torch.testing.assert_close(rows, module.blocks[0].rows)


@pytest.mark.parametrize("order", ["ijbh", "bijh", "hbij", "bihj"])
def test_rows_are_known_with_as_many_heads_as_tokens(order):
    module = made(lambda: Turned(order, heads=4))
    tokens = torch.randint(VOCABULARY, (3, 4))
    opened = open_model(module, example=tokens, loss="next")
    attention = opened.depth.sublayers[0]
    rows = attention.field.probabilities(attention.given(opened.embed(tokens)))
    module(tokens)
    torch.testing.assert_close(rows, module.blocks[0].rows)


class OverQueries(Turned):
    """The weights of a column sum to 1."""

    def averages(self, x):
        q, k, v = self.maps(x).unflatten(-1, (3, HEADS, -1)).unbind(-3)
        scores = torch.einsum(f"bihd,bjhd->{self.order}", q, k)
        rows = scores.softmax(self.order.index("i"))
        return torch.einsum(f"{self.order},bjhd->bihd", rows, v).flatten(-2)


@pytest.mark.parametrize("order", ["bhij", "ijbh"])
def test_a_softmax_over_queries_has_no_rows(order):
    opened = open_model(made(lambda: OverQueries(order)), example=ids(), loss="next")
    assert not hasattr(opened.depth.sublayers[0].field, "probabilities")


class InALoop(OwnAttention):
    """Each sequence by itself, as in code for packed sequences."""

    def averages(self, x):
        maps = self.maps(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        averages = [
            F.scaled_dot_product_attention(q, k, v, is_causal=True)
            for q, k, v in zip(*maps, strict=True)
        ]
        later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        scores = maps[0] @ maps[1].mT * (WIDTH // HEADS) ** -0.5
        self.rows = scores.masked_fill(later, -torch.inf).softmax(-1)
        return torch.stack(averages).transpose(1, 2).flatten(-2)


@pytest.mark.parametrize("sequences", [HEADS, 3])
def test_rows_in_a_loop_over_sequences_are_known(sequences):
    module = made(InALoop)
    tokens = torch.randint(VOCABULARY, (sequences, 6))
    opened = open_model(module, example=tokens, loss="next")
    assert "it averages in a loop over sequences" in opened.described
    attention = opened.depth.sublayers[0]
    assert isinstance(attention.field, ExposesRows)
    rows = attention.field.probabilities(attention.given(opened.embed(tokens)))
    module(tokens)
    torch.testing.assert_close(rows, module.blocks[0].rows)


class LearnedQueries(nn.Module):
    """The first attention is of learned queries among themselves, as in DETR's decoder."""

    def __init__(self):
        super().__init__()
        self.latents = nn.Parameter(torch.randn(4, WIDTH))
        self.attentions = nn.ModuleList(
            nn.MultiheadAttention(WIDTH, HEADS, batch_first=True) for _ in range(3)
        )
        self.memory = nn.Linear(5, WIDTH)

    def forward(self, data):
        x = self.latents.expand(len(data), -1, -1)
        memory = self.memory(data)
        self.kept = []
        for attention, read in zip(self.attentions, (None, memory, None), strict=True):
            read = x if read is None else read
            y, rows = attention(x, read, read, average_attn_weights=False)
            self.kept.append(rows)
            x = x + y
        return x.mean(1)


def test_an_attention_of_learned_queries_is_read_like_others():
    torch.manual_seed(0)
    module = LearnedQueries().double().eval()
    data = torch.randn(2, 7, 5, dtype=torch.float64)
    opened = open_model(module, example=data)
    assert all("cross-attention" in reason for reason in opened.model.config.unread[:-1])
    states = opened.trajectory(data).states
    module(data)
    for part, x, own in zip(opened.depth.sublayers, states, module.kept, strict=False):
        assert isinstance(part.field, ExposesRows)
        torch.testing.assert_close(part.field.probabilities(part.given(x)), own)
    assert isinstance(opened.depth.sublayers[0].field, ExposesHeads)


class Latents(nn.Module):
    """A cross-attention reads the input into learned latents, which are the first state."""

    def __init__(self):
        super().__init__()
        self.latents = nn.Parameter(torch.randn(4, WIDTH))
        self.query = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.of_data = nn.ModuleList(nn.Linear(5, 2 * WIDTH) for _ in range(2))
        self.out = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.head = nn.Linear(WIDTH, 3)
        self.kept = []

    def by_head(self, x):
        return x.unflatten(-1, (HEADS, -1)).transpose(1, 2).flatten(0, 1)

    def forward(self, data):
        x = self.latents.expand(len(data), -1, -1)
        self.kept = []
        for query, of_data, out in zip(self.query, self.of_data, self.out, strict=True):
            k, v = of_data(data).chunk(2, -1)
            rows = (self.by_head(query(x)) @ self.by_head(k).mT).softmax(-1)
            self.kept.append(rows.unflatten(0, (len(data), -1)))
            y = rows @ self.by_head(v)
            x = x + out(y.unflatten(0, (len(data), -1)).transpose(1, 2).flatten(-2))
        return self.head(x.mean(1))


def test_rows_that_read_into_learned_latents_are_known():
    torch.manual_seed(0)
    module = Latents().double().eval()
    data = torch.randn(2, 7, 5, dtype=torch.float64)
    opened = open_model(module, example=data)
    states = opened.trajectory(data).states
    module(data)
    for part, x, own in zip(opened.depth.sublayers, states, module.kept, strict=False):
        assert isinstance(part.field, ExposesRows)
        torch.testing.assert_close(part.field.probabilities(part.given(x)), own)


class WithTable(OwnAttention):
    """A parameter has a number for each distance, which is added to the scores."""

    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.randn(HEADS, 40))

    def averages(self, x):
        q, k, v = self.maps(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        places = torch.arange(x.shape[1])
        self.rows = (q @ k.mT + self.table[:, places[:, None] - places + 20]).softmax(-1)
        return (self.rows @ v).transpose(1, 2).flatten(-2)


def test_the_rows_with_a_table_of_positions_are_known():
    module = made(WithTable)
    opened = open_model(module, example=ids(), loss="next")
    assert "positions add a number to its scores" in opened.model.config.attention
    attention = opened.depth.sublayers[0]
    rows = attention.field.probabilities(attention.given(opened.embed(ids())))
    module(ids())
    torch.testing.assert_close(rows, module.blocks[0].rows)


class WithSink(OwnAttention):
    """A learned logit, far below the scores of the example."""

    def __init__(self):
        super().__init__()
        self.sink = nn.Parameter(torch.tensor(-60.0))

    def averages(self, x):
        q, k, v = self.maps(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        scores = q @ k.mT
        sink = self.sink.expand(*scores.shape[:-1], 1)
        rows = torch.cat([scores, sink], -1).softmax(-1)[..., :-1]
        return (rows @ v).transpose(1, 2).flatten(-2)


def test_a_sink_that_takes_nothing_yet_may_take_its_share_later():
    opened = open_model(made(WithSink), example=ids(), loss="next")
    assert "its scores may depend on weights beside its maps" in opened.described
    assert not isinstance(opened.depth.sublayers[0].field, ExposesHeads)
