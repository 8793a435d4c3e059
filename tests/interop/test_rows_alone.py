"""Attention whose matrices cannot be read shows its rows if they are all that averages tokens."""

import math

import pytest
import torch
from torch import nn

import ctrans
from ctrans.dynamics.fields import ExposesHeads, ExposesRows
from ctrans.interop import open_model
from ctrans.measure.attention.balanced_mass import balanced_mass
from ctrans.measure.attention.by_depth import attention_layers
from tests.interop.test_ways_of_writing import HEAD, HEADS, TOKENS, WIDTH, Model, ids, visible


class Attention(nn.Module):
    """Causal attention. It keeps the rows that it averages with."""

    def __init__(self):
        super().__init__()
        self.maps = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(5))
        self.kept = None

    def by_head(self, i, x):
        return self.maps[i](x).unflatten(-1, (HEADS, HEAD)).transpose(1, 2)

    def rows(self, x):
        scores = self.by_head(0, x) @ self.by_head(1, x).mT / math.sqrt(HEAD)
        return scores.masked_fill(~visible(x.shape[1]), -math.inf).softmax(-1)

    def averages(self, x):
        self.kept = self.rows(x)
        return self.joined(self.kept @ self.by_head(2, x))

    def joined(self, by_head):
        return by_head.transpose(1, 2).flatten(-2)

    def forward(self, x):
        return self.maps[3](self.averages(x))


class GatedOutput(Attention):
    def forward(self, x):
        return self.maps[3](self.averages(x) * self.maps[4](x).sigmoid())


class GatedBehind(Attention):
    def forward(self, x):
        return super().forward(x) * self.maps[4](x).sigmoid()


class NormedValues(Attention):
    def by_head(self, i, x):
        parts = super().by_head(i, x)
        return nn.functional.layer_norm(parts, [HEAD]) if i == 2 else parts


class Latent(Attention):
    """Keys and values of a joint map of fewer channels."""

    def by_head(self, i, x):
        if i == 0:
            return super().by_head(i, x)
        return super().by_head(i, nn.functional.pad(self.maps[4](x)[..., :4], (0, WIDTH - 4)))


class HeadsMixedBefore(Attention):
    """Talking heads: each head's scores are a mixture of all."""

    def rows(self, x):
        scores = self.by_head(0, x) @ self.by_head(1, x).mT
        mixture = self.maps[4].weight[:HEADS, :HEADS]
        scores = torch.einsum("gh,bhij->bgij", mixture, scores)
        return scores.masked_fill(~visible(x.shape[1]), -math.inf).softmax(-1)


class HeadsFirst(GatedOutput):
    """Heads before sequences, on one axis."""

    def averages(self, x):
        q, k, v = (self.by_head(i, x).transpose(0, 1).flatten(0, 1) for i in range(3))
        scores = (q @ k.mT).masked_fill(~visible(x.shape[1]), -math.inf)
        rows = scores.softmax(-1)
        self.kept = rows.unflatten(0, (HEADS, -1)).transpose(0, 1)
        return self.joined((rows @ v).unflatten(0, (HEADS, -1)).transpose(0, 1))


SHOWN = {
    "heads first": HeadsFirst,
    "a gate of the averages": GatedOutput,
    "a gate of the output": GatedBehind,
    "values with a norm": NormedValues,
    "latent keys and values": Latent,
    "heads mixed before the softmax": HeadsMixedBefore,
}


@pytest.mark.cases(2)
@pytest.mark.parametrize("name", SHOWN)
def test_rows_are_those_with_which_the_module_averages(name):
    torch.manual_seed(0)
    module = Model(SHOWN[name]).double().eval()
    opened = open_model(module, example=ids())
    model = opened.model
    known = ("rows alone are known", "its scores may depend on weights beside its maps")
    assert any(words in opened.described for words in known)
    with torch.no_grad():
        states = model.trajectory(ids()).states
        layers = attention_layers(model.depth, states)
    module(ids())
    assert len(layers) == len(module.attentions)
    for k, (attention, layer) in enumerate(zip(module.attentions, layers, strict=True)):
        sublayer = model.depth.sublayers[2 * k]
        field = sublayer.attention.field
        assert isinstance(field, ExposesRows)
        assert not isinstance(field, ExposesHeads)
        expected = attention.kept.clone()
        given = sublayer.given(sublayer.enter(states[2 * k]))
        torch.testing.assert_close(field.probabilities(given), expected)
        assert layer.theta_max == pytest.approx(balanced_mass(expected).upper.amax((0, 2)).tolist())
        assert math.isnan(layer.bound)
        assert math.isnan(layer.path)
        assert "matrices" in layer.note


def test_diagnose_and_screen_measure_the_rows():
    torch.manual_seed(0)
    opened = open_model(Model(GatedOutput).double().eval(), example=ids())
    diagnosis = ctrans.diagnose(opened, ids(), ids())
    assert "heads" not in diagnosis.missing
    assert len(diagnosis.readings["least entropy of a head"]) == 2
    step = ctrans.screen(opened, ids(), ids(), "quick").steps["attention"]
    assert "theta is at most" in step.why
    assert "needs the scores and matrices of each head" in step.why
    assert 0 < max(step.result.layers[0].theta_max) <= 1
    assert step.result.growth == {}


class HeadsMixedBehind(Attention):
    """Talking heads: what averages is a mixture of the heads' rows, and may be negative."""

    def rows(self, x):
        return torch.einsum("gh,bhij->bgij", self.maps[4].weight[:HEADS, :HEADS], super().rows(x))


class Difference(Attention):
    def rows(self, x):
        return super().rows(x) - 0.3 * super().rows(x.flip(-1))


class TwoAverages(Attention):
    """Rows that average, beside others that average as well."""

    def averages(self, x):
        return super().averages(x) + super().averages(x.flip(-1))


class Discarded(Attention):
    """Rows whose averages do not reach the output."""

    def forward(self, x):
        return self.maps[3](self.maps[4](x).sigmoid() + 0 * self.averages(x))


class OfChannels(Attention):
    """Rows of channels, of which each head has as many as there are tokens."""

    def averages(self, x):
        q, k, v = (
            self.maps[i](x)[..., : 2 * x.shape[1]].unflatten(-1, (2, -1)).movedim(1, -1)
            for i in range(3)
        )
        self.kept = (q @ k.mT).softmax(-1)
        mixed = (self.kept @ v).movedim(-1, 1).flatten(-2)
        return nn.functional.pad(mixed, (0, WIDTH - mixed.shape[-1])) * self.maps[4](x)


REFUSED = [HeadsMixedBehind, Difference, TwoAverages, Discarded, OfChannels]


@pytest.mark.cases(2)
@pytest.mark.parametrize("attention", REFUSED)
def test_rows_that_are_not_all_that_averages_are_not_shown(attention):
    torch.manual_seed(0)
    module = Model(attention).double().eval()
    model = open_model(module, example=ids()).model
    fields = [sublayer.attention.field for sublayer in model.depth.sublayers[::2]]
    assert not any(isinstance(field, ExposesRows) for field in fields)
    assert all(field.why_not for field in fields)


class Patches(Attention):
    """Sequences of groups of tokens that read only each other."""

    def forward(self, x):
        batch = len(x)
        x = x.unflatten(1, (-1, 4)).flatten(0, 1)
        rows = self.by_head(0, x) @ self.by_head(1, x).mT
        self.kept = rows.softmax(-1)
        y = self.joined(self.kept @ self.by_head(2, x)) * self.maps[4](x).sigmoid()
        return self.maps[3](y).unflatten(0, (batch, -1)).flatten(1, 2)


def test_groups_of_tokens_that_read_each_other_are_blocks_of_a_row():
    torch.manual_seed(0)
    module = Model(Patches).double().eval()
    tokens = torch.randint(0, 23, (3, 12), generator=torch.Generator().manual_seed(1))
    model = open_model(module, example=tokens).model
    sublayer = model.depth.sublayers[0]
    with torch.no_grad():
        given = sublayer.given(sublayer.enter(model.embed(tokens)))
        rows = sublayer.attention.field.probabilities(given)
        module.attentions[0](given)
    by_group = module.attentions[0].kept.unflatten(0, (3, 3))
    assert rows.shape == (3, HEADS, 12, 12)
    for group in range(3):
        own = slice(4 * group, 4 * group + 4)
        torch.testing.assert_close(rows[:, :, own, own], by_group[:, group])
    torch.testing.assert_close(rows.sum(-1), torch.ones_like(rows[..., 0]))


class Crossing(nn.Module):
    """Pre-LN blocks that read a memory beside the state."""

    def __init__(self, attention):
        super().__init__()
        self.inner = Model(attention)

    def forward(self, ids, memory):
        for part in self.inner.attentions:
            part.memory = memory
        return self.inner(ids)


def with_memory(others):
    generator = torch.Generator().manual_seed(0)
    memory = torch.randn(2, others, WIDTH, generator=generator, dtype=torch.float64)
    return {"ids": ids(), "memory": memory}


class CrossAttention(Attention):
    def rows(self, x):
        return (self.by_head(0, x) @ self.by_head(1, self.memory).mT).softmax(-1)

    def averages(self, x):
        self.kept = self.rows(x)
        return self.joined(self.kept @ self.by_head(2, self.memory))


@pytest.mark.parametrize("others", [5, TOKENS, 11])
def test_rows_of_another_sequence_are_shown(others):
    torch.manual_seed(0)
    module = Crossing(CrossAttention).double().eval()
    opened = open_model(module, example=with_memory(others))
    assert "rows alone are known" in opened.described
    model = opened.model
    layers = attention_layers(model.depth, model.trajectory(ids()).states)
    with torch.no_grad():
        states = model.trajectory(ids()).states
        module(**with_memory(others))
        for k, (attention, layer) in enumerate(zip(module.inner.attentions, layers, strict=True)):
            sublayer = model.depth.sublayers[2 * k]
            given = sublayer.given(sublayer.enter(states[2 * k]))
            expected = attention.kept.clone()
            torch.testing.assert_close(sublayer.attention.field.probabilities(given), expected)
            theta = balanced_mass(expected).upper.amax((0, 2))
            assert layer.theta_max == pytest.approx(theta.tolist())
    diagnosis = ctrans.diagnose(opened, ids(), ids())
    entropy = -(expected * expected.log()).sum(-1).mean((0, 2))
    found = diagnosis.readings["least entropy of a head"][-1]
    assert found.value == pytest.approx(float(entropy.min()), rel=1e-6)


class OfBoth(CrossAttention):
    """Its rows are of another sequence, and the map averages its own tokens as well."""

    def averages(self, x):
        return super().averages(x) + x.cumsum(1)


def test_rows_of_another_sequence_are_not_shown_where_tokens_are_mixed_too():
    torch.manual_seed(0)
    module = Crossing(OfBoth).double().eval()
    model = open_model(module, example=with_memory(5)).model
    assert not isinstance(model.depth.sublayers[0].attention.field, ExposesRows)


def test_our_own_gate_leaves_the_rows():
    model = ctrans.GPT(ctrans.GPTConfig(gated_output=True)).double()
    plain = ctrans.GPT(ctrans.GPTConfig()).double()
    for own, other in zip(model.depth.sublayers, plain.depth.sublayers, strict=True):
        own.load_state_dict(other.state_dict(), strict=False)
    x = torch.randn(2, 6, model.config.width, dtype=torch.float64)
    field = model.depth.sublayers[0].field
    assert isinstance(field, ExposesRows)
    assert not isinstance(field, ExposesHeads)
    torch.testing.assert_close(
        field.probabilities(x), plain.depth.sublayers[0].field.probabilities(x)
    )


class Translator(nn.Module):
    """An encoder inside of the forward pass, whose own rows are none of the decoder's."""

    def __init__(self):
        super().__init__()
        self.encoder = Model(Attention)
        self.crossing = Crossing(CrossAttention)

    def forward(self, ids, source):
        return self.crossing(ids, self.encoder.states(source)[-1])


@pytest.mark.parametrize("others", [5, TOKENS])
def test_rows_of_an_encoder_in_the_same_pass_do_not_count(others):
    torch.manual_seed(0)
    module = Translator().double().eval()
    source = torch.randint(0, 23, (2, others), generator=torch.Generator().manual_seed(1))
    model = open_model(module, example={"ids": ids(), "source": source}).model
    with torch.no_grad():
        states = model.trajectory(ids()).states
        module(ids(), source)
        for k, attention in enumerate(module.crossing.inner.attentions):
            sublayer = model.depth.sublayers[2 * k]
            given = sublayer.given(sublayer.enter(states[2 * k]))
            rows = sublayer.attention.field.probabilities(given)
            torch.testing.assert_close(rows, attention.kept)


class TwoAttentions(nn.Module):
    """Blocks of two attentions of unlike weights and an FFN."""

    def __init__(self):
        super().__init__()
        self.inner = Model(Attention)
        self.second = nn.ModuleList(Attention() for _ in range(2))
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))

    def forward(self, ids):
        x = self.inner.embedding(ids)
        for k in range(2):
            x = self.inner.add(x, self.inner.attentions[k], self.inner.norms[2 * k])
            x = self.inner.add(x, self.second[k], self.norms[k])
            x = self.inner.add(x, self.inner.ffns[k], self.inner.norms[2 * k + 1])
        return self.inner.output(self.inner.last_norm(x))


def test_each_attention_of_a_block_has_its_own_matrices():
    torch.manual_seed(0)
    module = TwoAttentions().double().eval()
    model = open_model(module, example=ids()).model
    assert model.depth.per_block == 3
    for k in range(2):
        for part, own in enumerate((module.inner.attentions[k], module.second[k])):
            field = model.depth.sublayers[3 * k + part].attention.field
            assert isinstance(field, ExposesHeads)
            found = torch.cat([head.query for head in field.head_matrices()])
            torch.testing.assert_close(found, own.maps[0].weight)


class HeadsBehindTokens(Attention):
    """The softmax has (batch, tokens, heads, read), as code with einsum may write it."""

    def forward(self, x):
        q, k, v = (linear(x).unflatten(-1, (HEADS, -1)) for linear in self.maps[:3])
        scores = torch.einsum("bshd,bthd->bsht", q, k) / q.shape[-1] ** 0.5
        later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        self.kept = scores.masked_fill(later[:, None], -torch.inf).softmax(-1)
        return self.maps[3](torch.einsum("bsht,bthd->bshd", self.kept, v).flatten(2))


def test_rows_with_heads_behind_tokens_are_read():
    torch.manual_seed(0)
    module = Model(HeadsBehindTokens).double().eval()
    model = open_model(module, example=ids()).model
    x = model.embed(ids())
    for k, sublayer in enumerate(model.depth.sublayers):
        if k % 2 == 0:
            rows = sublayer.attention.field.probabilities(sublayer.given(sublayer.enter(x)))
            module(ids())
            expected = module.attentions[k // 2].kept.transpose(1, 2)
            torch.testing.assert_close(rows, expected)
        x = sublayer.step(x, model.depth.lengths[k])


@pytest.mark.parametrize("windows", [{"ids": ids()}, torch.randn(2, 4, 8, 8), ids()[0]])
def test_pairs_are_made_of_ids_alone(windows):
    opened = open_model(Model(Attention).double().eval(), example=ids())
    with pytest.raises(ctrans.ConfigError, match="give ids"):
        opened.pairs(windows)
