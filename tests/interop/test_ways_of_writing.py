"""One Transformer, written in the ways of many repositories, is read as the same one: its states,
its attention's rows and its norms.
"""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import ctrans
from ctrans.dynamics.fields import ExposesHeads
from ctrans.interop import open_model
from ctrans.interop.attention_reading import NO_ROWS
from solvers import ConfigError

WIDTH = 16
HEADS = 2
HEAD = WIDTH // HEADS
TOKENS = 7
VOCABULARY = 23


def visible(n):
    return torch.ones(n, n).tril().bool()


class Head(nn.Module):
    """A head with linear maps of its own, as in a well-known lecture."""

    def __init__(self):
        super().__init__()
        self.key = nn.Linear(WIDTH, HEAD, bias=False)
        self.query = nn.Linear(WIDTH, HEAD, bias=False)
        self.value = nn.Linear(WIDTH, HEAD, bias=False)

    def forward(self, x):
        k = self.key(x)
        scores = self.query(x) @ k.transpose(-2, -1) * HEAD**-0.5
        scores = scores.masked_fill(~visible(x.shape[1]), -math.inf)
        return F.softmax(scores, dim=-1) @ self.value(x)


class ByHead(nn.Module):
    def __init__(self):
        super().__init__()
        self.heads = nn.ModuleList(Head() for _ in range(HEADS))
        self.project = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.project(torch.cat([head(x) for head in self.heads], -1))


class Attention(nn.Module):
    """Attention whose rows `averages` makes of scores."""

    def __init__(self, averages):
        super().__init__()
        self.averages = averages
        self.maps = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x):
        q, k, v = (
            linear(x).unflatten(-1, (HEADS, HEAD)).transpose(1, 2) for linear in self.maps[:3]
        )
        rows = self.averages(self, q @ k.transpose(-2, -1) / math.sqrt(HEAD), x)
        return self.maps[3]((rows @ v).transpose(1, 2).flatten(-2))


def with_additive_mask(scores, mask):
    return (scores + mask).softmax(-1)


def infinite(n):
    return torch.full((n, n), -math.inf).triu(1)


def mask_to_state(module, scores, x):
    return with_additive_mask(scores, infinite(x.shape[1]).to(x))


def mask_as_state(module, scores, x):
    return with_additive_mask(scores, infinite(x.shape[1]).type_as(x))


def mask_made_new(module, scores, x):
    return with_additive_mask(scores, x.new_full((x.shape[1], x.shape[1]), -1e30).triu(1))


def mask_kept(module, scores, x):
    """A mask that the first forward makes and keeps."""
    if "mask" not in dict(module.named_buffers()):
        module.register_buffer("mask", ~visible(x.shape[1]), persistent=False)
    return scores.masked_fill(module.mask, -math.inf).softmax(-1)


def by_hand(module, scores, x):
    powers = torch.exp(scores - scores.amax(-1, keepdim=True)) * visible(x.shape[1])
    return powers / powers.sum(-1, keepdim=True)


ATTENTIONS = {
    "a head is a module": lambda: ByHead(),
    "a mask by to(x)": lambda: Attention(mask_to_state),
    "a mask by type_as(x)": lambda: Attention(mask_as_state),
    "a mask by new_full": lambda: Attention(mask_made_new),
    "a mask that is kept": lambda: Attention(mask_kept),
    "a softmax by hand": lambda: Attention(by_hand),
}


class Model(nn.Module):
    """Pre-LN, or Post-LN with a factor of the state. With `in_method` the sums are in a method of
    the model, so that it has no blocks.
    """

    def __init__(self, attention, *, factor=None, in_method=True):
        super().__init__()
        self.factor = factor
        self.in_method = in_method
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.attentions = nn.ModuleList(attention() for _ in range(2))
        self.ffns = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WIDTH)) for _ in range(2)
        )
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(4))
        self.last_norm = nn.LayerNorm(WIDTH)
        self.output = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def add(self, x, part, norm):
        if self.factor is None:
            return x + part(norm(x))
        return norm(x * self.factor + part(x))

    def states(self, ids):
        x = self.embedding(ids)
        found = [x]
        for i, (attention, ffn) in enumerate(zip(self.attentions, self.ffns, strict=True)):
            x = self.add(x, attention, self.norms[2 * i])
            found.append(x)
            x = self.add(x, ffn, self.norms[2 * i + 1])
            found.append(x)
        return found

    def forward(self, ids):
        return self.output(self.last_norm(self.states(ids)[-1]))


def ids():
    return torch.randint(0, VOCABULARY, (2, TOKENS), generator=torch.Generator().manual_seed(0))


def states_as_read(model, tokens):
    x = model.embed(tokens)
    found = [x]
    for sublayer, length in zip(model.depth.sublayers, model.depth.lengths, strict=True):
        x = sublayer.step(x, length)
        found.append(x)
    return found


@pytest.mark.cases(2)
@pytest.mark.parametrize("factor", [None, 1.0, 1, 1.5])
@pytest.mark.parametrize("name", ATTENTIONS)
def test_every_way_is_read_whole(name, factor):
    torch.manual_seed(0)
    module = Model(ATTENTIONS[name], factor=factor).double().eval()
    opened = open_model(module, example=ids())
    model = opened.model

    placement = {None: "pre", 1.0: "post", 1.5: "deepnorm"}[factor]
    assert opened.model.config.placement == placement
    assert not opened.model.config.unread
    with torch.no_grad():
        expected = module.states(ids())
        for state, own in zip(states_as_read(model, ids()), expected, strict=True):
            torch.testing.assert_close(state, own)
        first = next(iter(model.depth.sublayers))
        assert isinstance(first.field, ExposesHeads)
        assert first.field.heads == HEADS
        given = first.given(first.enter(expected[0]))
        torch.testing.assert_close(first.field.probabilities(given), own_rows(module, given))


def own_rows(module, x):
    """The rows of the first attention, by its scores and torch's softmax."""
    attention = module.attentions[0]
    if isinstance(attention, ByHead):
        q = torch.stack([head.query(x) for head in attention.heads], 1)
        k = torch.stack([head.key(x) for head in attention.heads], 1)
    else:
        q, k = (attention.maps[i](x).unflatten(-1, (HEADS, HEAD)).transpose(1, 2) for i in range(2))
    scores = q @ k.transpose(-2, -1) / math.sqrt(HEAD)
    scores = scores.masked_fill(~visible(x.shape[1]), -math.inf)
    return scores.softmax(-1)


class HeadByHand(Head):
    def forward(self, x):
        scores = self.query(x) @ self.key(x).transpose(-2, -1) * HEAD**-0.5
        return by_hand(self, scores, x) @ self.value(x)


class Untrained(ByHead):
    """All heads have the same rows, as queries begin at 0."""

    def __init__(self, head):
        super().__init__()
        self.heads = nn.ModuleList(head() for _ in range(HEADS))
        for each in self.heads:
            nn.init.zeros_(each.query.weight)


@pytest.mark.cases(2)
@pytest.mark.parametrize("deviation", [0.0, 1.0])
@pytest.mark.parametrize("head", [Head, HeadByHand])
def test_rows_of_heads_are_those_of_one_call_also_at_new_shapes_and_weights(head, deviation):
    torch.manual_seed(0)
    module = Model(lambda: Untrained(head)).double().eval()
    for each in module.attentions[0].heads:
        nn.init.normal_(each.query.weight, std=deviation)
    sublayer = next(iter(open_model(module, example=ids()).model.depth.sublayers))
    for tokens in (TOKENS, TOKENS - 2):
        x = torch.randn(3, tokens, WIDTH, dtype=torch.float64)
        for _ in range(2):
            with torch.no_grad():
                module.attentions[0].heads[0].key.weight.mul_(2)  # its operations are read anew
                found = sublayer.field.probabilities(x)
                torch.testing.assert_close(found, own_rows(module, x))


class Mixing(nn.Module):
    """A causal convolution in place of attention."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3, groups=WIDTH)
        self.project = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        y = self.conv(F.pad(x.transpose(1, 2), (2, 0)))
        return self.project(y.transpose(1, 2))


def test_what_has_no_rows_is_called_no_attention():
    torch.manual_seed(0)
    opened = open_model(Model(Mixing).double().eval(), example=ids())
    config = opened.model.config

    assert config.attention == "a convolution"
    assert any(NO_ROWS in reason for reason in config.unread)
    missing = ctrans.diagnose(opened, ids(), ids()).missing["heads"]
    assert missing == "its tokens are mixed by a convolution: no rows of a softmax are seen"


class ByGroup(Attention):
    """Attention of the first and of the second half of the tokens, each as a sequence."""

    def forward(self, x):
        groups = x.reshape(2 * len(x), -1, WIDTH)
        return super().forward(groups).reshape(x.shape)


def test_groups_of_tokens_that_are_sequences_of_their_own_are_called_so():
    torch.manual_seed(0)
    example = torch.cat([ids(), ids()[:, :1]], 1)
    config = open_model(
        Model(lambda: ByGroup(by_hand)).double().eval(), example=example
    ).model.config
    (reason,) = config.unread
    assert "a sequence is several groups of tokens" in reason


class Crossing(nn.Module):
    """Attention to a memory that is given beside the tokens, with the decoder's tokens second."""

    def __init__(self):
        super().__init__()
        self.memory = nn.Linear(5, WIDTH)
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(6))
        self.own = nn.ModuleList(Attention(mask_to_state) for _ in range(2))
        self.maps = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(8))
        self.output = nn.Linear(WIDTH, VOCABULARY)

    def cross(self, i, x, memory):
        q, k, v, o = self.maps[4 * i : 4 * i + 4]
        rows = (q(x) @ k(memory).transpose(1, 2) / math.sqrt(WIDTH)).softmax(-1)
        return o(rows @ v(memory))

    def forward(self, features, ids):
        memory = self.memory(features)
        x = self.embedding(ids)
        for i in range(2):
            x = x + self.own[i](self.norms[3 * i](x))
            x = x + self.cross(i, self.norms[3 * i + 1](x), memory)
        return self.output(x)


def test_a_decoder_is_read_whole_whichever_input_is_first():
    torch.manual_seed(0)
    features = torch.randn(2, 4, 5, dtype=torch.float64)
    module = Crossing().double().eval()
    for example in ([features, ids()], {"ids": ids(), "features": features}):
        config = open_model(module, example=example).model.config
        assert config.blocks == 4
        assert config.placement == "pre"
        assert any("cross-attention" in reason for reason in config.unread)


def test_an_example_may_be_a_list_and_too_many_values_are_named():
    module = Crossing().double().eval()
    with pytest.raises(ConfigError, match=r"example= has 3 values.*features, ids"):
        open_model(module, example=[ids(), ids(), ids()])


class Mixed(Model):
    """Pre-LN where each layer begins with a x + b x_0, or Post-LN with coordinates before each."""

    def states(self, ids):
        x = self.embedding(ids)
        first = x
        for i, (attention, ffn) in enumerate(zip(self.attentions, self.ffns, strict=True)):
            if self.factor is None:
                x = 0.9 * x + 0.2 * first
            else:
                x = x + torch.linspace(0, 1, WIDTH, dtype=x.dtype)
            x = self.add(x, attention, self.norms[2 * i])
            x = self.add(x, ffn, self.norms[2 * i + 1])
        return [first, x]


@pytest.mark.parametrize(("factor", "placement"), [(None, "pre"), (1.0, "post")])
def test_mixes_of_states_between_the_sublayers_are_called_so(factor, placement):
    torch.manual_seed(0)
    module = Mixed(lambda: Attention(by_hand), factor=factor).double().eval()
    model = open_model(module, example=ids()).model

    assert set(model.config.placement.split(", ")) == {placement, "mix"}
    with torch.no_grad():
        torch.testing.assert_close(states_as_read(model, ids())[-1], module.states(ids())[-1])
        torch.testing.assert_close(model.head(module.states(ids())[-1]), module(ids()))


def test_inputs_other_than_the_example_of_a_mix_are_refused_by_what_is_known_of_it():
    torch.manual_seed(0)
    module = Mixed(lambda: Attention(by_hand)).double().eval()
    model = open_model(module, example=ids()).model
    with pytest.raises(ConfigError, match="an earlier state that is added"):
        model.embed(ids().flip(1))
