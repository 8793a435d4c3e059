"""The search over edits: each fault of a model is undone, and a healthy one has none.

The models are not trained: the targets are what the healthy model predicts, so that its loss is
near 0, and a fault raises it.
"""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import ctrans
from benchmarks.edit_models import RotaryAttention
from ctrans import ConfigError
from ctrans.examine.search.computation import AttentionInstead, table_with_base
from ctrans.examine.search.edit import Subject
from ctrans.examine.search.edit_search import search_edits
from ctrans.examine.search.edits import edits_of
from ctrans.examine.search.sites import WeightSites
from ctrans.interop import open_model

WIDTH, HEADS, GROUPS, BLOCKS, VOCABULARY, TOKENS = 32, 4, 2, 3, 23, 14


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attn = RotaryAttention(WIDTH, HEADS, GROUPS)
        self.gate, self.up = nn.Linear(WIDTH, 48), nn.Linear(WIDTH, 48)
        self.down = nn.Linear(48, WIDTH)

    def forward(self, x):
        x = x + self.attn(self.n1(x))
        y = self.n2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Embedding(2 * TOKENS, WIDTH)
        self.layers = nn.ModuleList([Block() for _ in range(BLOCKS)])
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids):
        x = self.embedding(ids) + self.positions(torch.arange(ids.shape[1]))
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def made(seed=0):
    """A model with weights of which each matters, and sure of what it predicts."""
    torch.manual_seed(seed)
    model = Model().eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() == 2:
                weight.normal_(0, 1.5 / math.sqrt(weight.shape[-1]))
            elif name.endswith("weight"):
                weight.uniform_(0.5, 1.5)
        model.embedding.weight.mul_(2)
        model.norm.weight.mul_(8)
    return model.requires_grad_(False)


def inputs(rows=16):
    return torch.randint(0, VOCABULARY, (rows, TOKENS), generator=torch.Generator().manual_seed(5))


def attentions(model):
    return [layer.attn for layer in model.layers]


def exchange(one, other):
    kept = one.clone()
    one.copy_(other)
    other.copy_(kept)


def of_all(name, value):
    def fault(model):
        for attention in attentions(model):
            setattr(attention, name, value)

    return fault


def exchanged_blocks(model):
    for one, other in zip(model.layers[0].parameters(), model.layers[1].parameters(), strict=True):
        exchange(one, other)


FAULTS = {
    "queries and outputs": (
        lambda m: exchange(m.layers[1].attn.wq.weight, m.layers[1].attn.wo.weight),
        "attn.wq and attn.wo exchanged in layers.1",
    ),
    "keys and values everywhere": (
        lambda m: [exchange(a.wk.weight, a.wv.weight) for a in attentions(m)],
        "attn.wk and attn.wv exchanged in all 3 blocks",
    ),
    "transposed": (
        lambda m: m.layers[2].attn.wo.weight.copy_(m.layers[2].attn.wo.weight.T.clone()),
        "attn.wo transposed in layers.2",
    ),
    "gate and up": (
        lambda m: [
            exchange(one, other)
            for b in m.layers
            for one, other in zip(b.gate.parameters(), b.up.parameters(), strict=True)
        ],
        "gate and up exchanged in all 3 blocks",
    ),
    "blocks": (exchanged_blocks, "layers.0 and layers.1 exchanged"),
    "embedding": (lambda m: m.embedding.weight.mul_(16), "embedding times 0.0625"),
    "positions": (
        lambda m: m.positions.weight[:TOKENS].copy_(m.positions.weight[:TOKENS].flip(0).clone()),
        f"the first {TOKENS} rows of positions in reverse order",
    ),
    "ids": (lambda m: m.embedding.weight.copy_(m.embedding.weight.roll(3, 0)), "token ids +3"),
    "gains less 1": (
        lambda m: [b.n1.weight.sub_(1) for b in m.layers],
        "n1.weight plus 1 in all 3 blocks",
    ),
    "mask": (of_all("causal", value=False), "later tokens masked in all attention"),
    "scale": (of_all("scaled", value=False), "all attention's scores times 0.354"),
    "rotary base": (of_all("base", value=10.0), "rotary positions of base 1000"),
    "rotary halves": (
        of_all("pairs", value=False),
        "the rows of attn.wq and attn.wk in heads of 8 from pairs to halves in all 3",
    ),
    "grouped heads": (
        of_all("neighbours", value=False),
        "the 4 heads of attn.wq in the order 0, 2, 1, 3 in all 3 blocks",
    ),
    "key heads": (
        lambda m: [
            w.copy_(w.view(GROUPS, -1, WIDTH).flip(0).reshape(w.shape).clone())
            for a in attentions(m)
            for w in (a.wk.weight, a.wv.weight)
        ],
        "of attn.wk and attn.wv the 2 heads 0 and 1 exchanged in all 3 blocks",
    ),
}
"""By name: what goes wrong, and the words of the edit that undoes it."""


def searched(fault, seconds=60.0):
    model = made()
    x = inputs()
    y = model(x).argmax(-1)
    with torch.no_grad():
        fault(model)
    return search_edits(open_model(model, example=x[:2]), x, y, seconds=seconds), model


@pytest.mark.cases(3)
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_undone(name):
    fault, words = FAULTS[name]
    result, _ = searched(fault)
    assert words in result.found[0].edit.words, str(result.found[0])
    assert len(result.found) == 1
    assert result.found[0].confirmed_after < 0.4 * result.found[0].confirmed_before


def test_a_healthy_model_has_no_edit_and_is_left_as_it_was():
    before = {name: weight.clone() for name, weight in made().state_dict().items()}
    result, model = searched(lambda m: None)
    assert result.found == []
    assert result.tried > 100
    assert result.untried == 0
    assert all(torch.equal(before[name], weight) for name, weight in model.state_dict().items())
    (reading,) = result.readings
    assert reading.value == 0
    assert "no edit passes" in reading.figure


@pytest.mark.slow
def test_a_last_norm_that_is_missing_is_not_undone():
    """No edit does more than smaller outputs do, which lower the loss of most broken models."""
    result, _ = searched(lambda m: setattr(m, "norm", nn.Identity()))
    assert result.found == []
    assert result.untried == 0


def test_the_users_weights_are_the_same_objects_after_a_search_that_found():
    model = made()
    names = {name: id(weight) for name, weight in model.named_parameters()}
    x = inputs()
    y = model(x).argmax(-1)
    with torch.no_grad():
        model.embedding.weight.mul_(16)
    faulty = copy.deepcopy(model.state_dict())
    assert search_edits(open_model(model, example=x[:2]), x, y, seconds=60).found
    assert {name: id(weight) for name, weight in model.named_parameters()} == names
    assert all(torch.equal(faulty[name], weight) for name, weight in model.state_dict().items())


def test_a_text_unlike_the_models_own_shows_no_fault():
    """Random targets: each edit that makes it less sure lowers the loss, and so does its rival."""
    model = made()
    x = inputs()
    y = torch.randint(0, VOCABULARY, x.shape, generator=torch.Generator().manual_seed(6))
    result = search_edits(open_model(model, example=x[:2]), x, y, seconds=60)
    assert result.found == []


def test_sequences_that_are_all_the_same_test_nothing():
    x = inputs(1).expand(16, -1)
    with pytest.raises(ConfigError, match="all the same"):
        search_edits(open_model(made(), example=x[:2]), x, x.roll(-1, 1))


def test_a_diagnosis_without_targets_says_why_it_cannot_search():
    diagnosis = ctrans.diagnose(made(), inputs(), search=5)
    assert "no targets" in diagnosis.missing["fall of the loss by an edit"]
    with pytest.raises(ConfigError, match="search = -1"):
        ctrans.diagnose(made(), inputs(), inputs(), search=-1)


def test_each_edit_of_weights_keeps_shapes_and_most_are_their_own_inverse():
    model = made()
    sites = WeightSites(model, [HEADS])
    for edit in edits_of(Subject(sites, inputs(), VOCABULARY)):
        for name, weight in edit.weights().items():
            assert weight.shape == sites.weights[name].shape, edit.words


Q, K, V = (torch.randn(2, 3, 5, 4, generator=torch.Generator().manual_seed(k)) for k in range(3))
SCORES = Q @ K.transpose(-1, -2) / 2
LATER = torch.ones(5, 5, dtype=torch.bool).triu(1)
ATTENTIONS = {
    "by position": lambda: F.scaled_dot_product_attention(Q, K, V),
    "by name": lambda: F.scaled_dot_product_attention(query=Q, key=K, value=V),
    "with a bool mask": lambda: F.scaled_dot_product_attention(Q, K, V, ~LATER.new_zeros(5, 5)),
    "with numbers as mask": lambda: F.scaled_dot_product_attention(Q, K, V, torch.zeros(5, 5)),
    "softmax": lambda: torch.softmax(SCORES, -1) @ V,
    "softmax by name": lambda: F.softmax(input=SCORES, dim=-1) @ V,
    "softmax of a tensor": lambda: SCORES.softmax(dim=-1) @ V,
    "softmax in a type": lambda: F.softmax(SCORES, -1, 3, torch.float32) @ V,
}


@pytest.mark.parametrize("name", ATTENTIONS)
def test_later_tokens_are_masked_however_attention_is_written(name):
    with AttentionInstead(masked=True):
        masked = ATTENTIONS[name]()
    with AttentionInstead(factor=3.0):
        sharper = ATTENTIONS[name]()
    expected = SCORES.masked_fill(LATER, -math.inf).softmax(-1) @ V
    assert torch.allclose(masked, expected, atol=1e-6)
    assert torch.allclose(sharper, (3 * SCORES).softmax(-1) @ V, atol=1e-6)


def test_rows_are_over_keys_where_the_model_has_columns():
    with AttentionInstead(over_keys=True):
        found = [SCORES.softmax(-2), F.softmax(SCORES, dim=-2)]
    assert all(torch.equal(rows, SCORES.softmax(-1)) for rows in found)


def test_a_loss_that_is_not_finite_is_compared_with_nothing():
    model = made()
    with torch.no_grad():
        model.layers[1].down.weight[0, 0] = math.nan
    diagnosis = ctrans.diagnose(model, inputs(), inputs(), search=5)
    assert "not finite" in diagnosis.missing["fall of the loss by an edit"]


def test_a_search_without_time_says_what_it_did_not_try():
    model = made()
    x = inputs()
    result = search_edits(open_model(model, example=x[:2]), x, model(x).argmax(-1), seconds=1e-9)
    assert (result.tried, result.found) == (0, [])
    assert f"the time ended before {result.untried} others" in result.readings[0].figure


def test_a_configuration_in_a_dictionary_states_heads():
    model = made()
    model.config = {"num_heads": 16}
    assert 16 in WeightSites(model).head_counts()


def test_a_loss_of_the_users_own_has_no_unit_and_one_that_is_no_mean_is_refused():
    model = made()
    x = inputs(40)
    y = model(x).argmax(-1)
    with torch.no_grad():
        model.embedding.weight.mul_(16)
    opened = open_model(
        model, example=x[:2], loss=lambda z, y: F.cross_entropy(z.flatten(0, 1), y.flatten())
    )
    (reading,) = search_edits(opened, x, y, seconds=60).readings
    assert "embedding times 0.0625 the loss falls from" in reading.figure
    assert "nats" not in reading.figure
    summed = open_model(model, example=x[:2], loss=lambda z, y: z.logsumexp(-1).sum())
    with pytest.raises(ConfigError, match="is not the mean of that of each"):
        search_edits(summed, x, y, seconds=60)


@pytest.mark.parametrize("loss", ["mean", "random"])
def test_a_loss_that_stands_in_is_not_lowered(loss):
    x = inputs()
    opened = open_model(made(), example=x[:2], loss=loss)
    with pytest.raises(ConfigError, match="only stands in"):
        search_edits(opened, x, x)


@pytest.mark.parametrize("function", [torch.cos, torch.sin, None])
def test_a_rotary_table_of_another_base_is_that_of_the_base(function):
    def table(base):
        frequencies = base ** (-torch.arange(0, 16, 2).double() / 16)
        if function is None:
            return frequencies
        return function(torch.arange(40).double()[:, None] * frequencies)

    found = table_with_base(table(1e4), 500.0)
    assert torch.allclose(found, table(500.0), atol=1e-9)
    assert table_with_base(torch.randn(40, 8), 500.0) is None
