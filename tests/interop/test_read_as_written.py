"""Models that strangers wrote without having seen the reader, in the forms that it once missed."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import ctrans
from ctrans.dynamics.fields import ExposesRows, ExposesWeights
from ctrans.interop import open_model
from ctrans.interop.block_structure import period_of
from tests.interop.test_ways_of_writing import (
    HEAD,
    HEADS,
    TOKENS,
    VOCABULARY,
    WIDTH,
    Attention,
    Model,
    by_hand,
    ids,
)


def causal():
    return Attention(by_hand)


def test_an_activation_in_place_is_read():
    module = Model(causal)
    for ffn in module.ffns:
        ffn[1] = nn.ReLU(inplace=True)
    model = open_model(module.double().eval(), example=ids()).model
    assert model.config.placement == "pre"
    for sublayer in model.depth.sublayers[1::2]:
        assert isinstance(sublayer.field, ExposesWeights)
        assert sublayer.field.reading.activation == "relu"


class DropoutInPlace(Model):
    """Its dropout, which does nothing in evaluation, writes into its input in training."""

    def __init__(self, attention, place):
        super().__init__(attention)
        self.place = place
        self.dropout = nn.Dropout(0.1, inplace=True)

    def add(self, x, part, norm):
        if self.place == "the state":
            return self.dropout(x + norm(part(x)))
        return x + self.dropout(norm(part(x)))


@pytest.mark.parametrize("place", ["the state", "a branch"])
def test_a_dropout_in_place_passes_its_input_on(place):
    module = DropoutInPlace(causal, place).double().eval()
    model = open_model(module, example=ids()).model
    assert model.config.placement == "output"
    assert not model.config.unread


class WithoutModules(Model):
    """Norms by the function that takes the rounding of its dtype as eps."""

    def add(self, x, part, norm):
        return x + part(F.rms_norm(x, (WIDTH,)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_norm_by_its_function_has_the_eps_of_its_dtype(dtype):
    torch.manual_seed(0)
    model = open_model(WithoutModules(causal).to(dtype).eval(), example=ids()).model
    norm = model.depth.sublayers[0].input_norm
    small = 1e-4 * torch.randn(1, 3, WIDTH, dtype=dtype)
    if dtype == torch.float32:
        assert norm.eps == torch.finfo(dtype).eps
    torch.testing.assert_close(norm(small), F.rms_norm(small, (WIDTH,)))


class Windows(nn.Module):
    """Attention within windows of an image, and a norm of what it returns (Swin v2)."""

    def __init__(self):
        super().__init__()
        self.maps = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x):
        batch, height, width, _ = x.shape
        w = x.view(batch, height // 2, 2, width // 2, 2, WIDTH).transpose(2, 3)
        w = w.reshape(-1, 4, WIDTH)
        q, k, v = (m(w).unflatten(-1, (HEADS, HEAD)).transpose(1, 2) for m in self.maps[:3])
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(-2)
        y = self.maps[3](y).view(batch, height // 2, width // 2, 2, 2, WIDTH)
        return y.transpose(2, 3).reshape(batch, height, width, WIDTH)


class Swin(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, WIDTH, 2, 2)
        self.attentions = nn.ModuleList(Windows() for _ in range(2))
        self.ffns = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WIDTH)) for _ in range(2)
        )
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(4))
        self.head = nn.Linear(WIDTH, 5)

    def states(self, images):
        x = self.stem(images).permute(0, 2, 3, 1)
        found = [x]
        for i, (attention, ffn) in enumerate(zip(self.attentions, self.ffns, strict=True)):
            x = x + self.norms[2 * i](attention(x))
            found.append(x)
            x = x + self.norms[2 * i + 1](ffn(x))
            found.append(x)
        return found

    def forward(self, images):
        return self.head(self.states(images)[-1].mean((1, 2)))


def test_windows_of_an_image_are_put_back_in_their_order():
    torch.manual_seed(0)
    module = Swin().double().eval()
    images = torch.randn(2, 3, 8, 8, dtype=torch.float64)
    model = open_model(module, example=images).model
    assert model.config.placement == "output"
    with torch.no_grad():
        states = model.trajectory(images).states
        for state, own in zip(states, module.states(images), strict=True):
            torch.testing.assert_close(state, own.flatten(1, 2))
    attention, ffn = model.depth.sublayers[:2]
    assert isinstance(ffn.field, ExposesWeights)
    assert isinstance(attention.attention.field, ExposesRows)
    given = attention.given(states[0])
    rows = attention.attention.field.probabilities(given)
    q, k = (
        of(given).unflatten(-1, (HEADS, HEAD)).transpose(1, 2)
        for of in module.attentions[0].maps[:2]
    )
    place = torch.arange(4) // 2
    window = (2 * place[:, None] + place).flatten()
    apart = window[:, None] != window
    expected = (q @ k.mT / HEAD**0.5).masked_fill(apart, -torch.inf).softmax(-1)
    torch.testing.assert_close(rows, expected)


class Prefixed(Model):
    """One learnt token before the text, and none of its own in the output."""

    def __init__(self, attention):
        super().__init__(attention)
        self.prefix = nn.Parameter(torch.randn(1, 1, WIDTH))

    def forward(self, ids):
        x = torch.cat([self.prefix.expand(len(ids), -1, -1), self.embedding(ids)], 1)
        for i, (attention, ffn) in enumerate(zip(self.attentions, self.ffns, strict=True)):
            x = self.add(x, attention, self.norms[2 * i])
            x = self.add(x, ffn, self.norms[2 * i + 1])
        return self.output(self.last_norm(x))[:, 1:]


def test_a_model_with_a_token_of_its_own_is_diagnosed():
    torch.manual_seed(0)
    module = Prefixed(causal).double().eval()
    tokens = torch.randint(0, VOCABULARY, (2, TOKENS + 1))
    opened = open_model(module, example=tokens[:, :-1], loss="next")
    diagnosis = ctrans.diagnose(opened, tokens[:, :-1], tokens[:, 1:])
    assert "reads future tokens" not in [finding.check for finding in diagnosis.findings]


class OneBlock(Model):
    """One block several times, which adds the number of the step to the state (universal)."""

    def __init__(self, attention):
        super().__init__(attention)
        self.steps = nn.Embedding(3, WIDTH)

    def forward(self, ids):
        x = self.embedding(ids)
        for step in range(3):
            x = x + self.steps(torch.tensor(step))
            x = self.add(x, self.attentions[0], self.norms[0])
            x = self.add(x, self.ffns[0], self.norms[1])
        return self.output(self.last_norm(x))


def test_what_adds_the_same_to_all_states_is_no_dead_sublayer():
    torch.manual_seed(0)
    opened = open_model(OneBlock(causal).double().eval(), example=ids(), loss="next")
    diagnosis = ctrans.diagnose(opened, ids(), ids().roll(-1, 1))
    assert "dead sublayer" not in [finding.check for finding in diagnosis.findings]


def test_rows_that_a_recipe_sets_are_no_copies():
    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            rates = torch.arange(1.0, 9.0).log().expand(WIDTH, 8)
            self.A_log = nn.Parameter(rates.clone())
            self.maps = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

        def forward(self, x):
            decay = torch.exp(-self.A_log.exp().mean(-1))
            y, h = [], torch.zeros_like(x[:, 0])
            for given in self.maps[0](x).unbind(1):
                h = decay * h + given
                y.append(h)
            return self.maps[1](torch.stack(y, 1))

    torch.manual_seed(0)
    opened = open_model(Model(Recurrent).double().eval(), example=ids(), loss="next")
    diagnosis = ctrans.diagnose(opened, ids(), ids().roll(-1, 1))
    assert "blocks with equal weights" not in [finding.check for finding in diagnosis.findings]


class Stacked(Model):
    """The gains of all blocks as rows of one weight."""

    def __init__(self, attention):
        super().__init__(attention)
        self.gains = nn.Parameter(1 + 0.1 * torch.randn(4, WIDTH))

    def forward(self, ids):
        x = self.embedding(ids)
        for i, (attention, ffn) in enumerate(zip(self.attentions, self.ffns, strict=True)):
            x = x + attention(self.normed(x, 2 * i))
            x = x + ffn(self.normed(x, 2 * i + 1))
        return self.output(self.last_norm(x))

    def normed(self, x, k):
        return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * self.gains[k]


def test_gains_that_are_rows_of_one_weight_are_read():
    torch.manual_seed(0)
    module = Stacked(causal).double().eval()
    opened = open_model(module, example=ids())
    assert opened.model.config.placement == "pre"
    assert "gamma = gains[0] .. gains[3]" in opened.described
    for k, sublayer in enumerate(opened.model.depth.sublayers):
        torch.testing.assert_close(sublayer.input_norm.gamma, module.gains[k])
        assert isinstance(sublayer.field, ExposesWeights)
    with torch.no_grad():
        module.gains[2] *= 2
    torch.testing.assert_close(opened.model.depth.sublayers[2].input_norm.gamma, module.gains[2])


class StackedNorms(Model):
    """Gains and offsets are slices of a weight (block, norm, width) each."""

    def __init__(self, attend, *, is_post):
        super().__init__(attend)
        self.is_post = is_post
        draw = torch.Generator().manual_seed(1)
        self.gains = nn.Parameter(1 + 0.1 * torch.randn(2, 2, WIDTH, generator=draw))
        self.offsets = nn.Parameter(0.1 * torch.randn(2, 2, WIDTH, generator=draw))

    def norm(self, x, i, j):
        return F.layer_norm(x, (WIDTH,), self.gains[i, j], self.offsets[i][j])

    def forward(self, ids):
        x = self.embedding(ids)
        for i, maps in enumerate(zip(self.attentions, self.ffns, strict=True)):
            for j, f in enumerate(maps):
                if self.is_post:
                    x = self.norm(x + f(x), i, j)
                else:
                    x = x + f(self.norm(x, i, j))
        return self.output(self.last_norm(x))


@pytest.mark.parametrize("is_post", [False, True])
def test_gains_and_offsets_in_slices_of_stacked_weights_are_read(is_post):
    torch.manual_seed(0)
    module = StackedNorms(causal, is_post=is_post).double().eval()
    opened = open_model(module, example=ids())
    assert opened.model.config.placement == ("post" if is_post else "pre")
    for k, sublayer in enumerate(opened.model.depth.sublayers):
        norm = sublayer.state_norm if is_post else sublayer.input_norm
        torch.testing.assert_close(norm.gamma, module.gains[k // 2, k % 2])
        torch.testing.assert_close(norm.beta, module.offsets[k // 2, k % 2])


class WithMemory(Model):
    """It reads a memory (layers, tokens, sequences, width), as Transformer-XL does."""

    def forward(self, ids, memory):
        x = torch.cat([self.embedding(ids), memory[0].transpose(0, 1)], 1)[:, : ids.shape[1]]
        for i, (attention, ffn) in enumerate(zip(self.attentions, self.ffns, strict=True)):
            x = self.add(x, attention, self.norms[2 * i])
            x = self.add(x, ffn, self.norms[2 * i + 1])
        return self.output(self.last_norm(x))


def test_a_memory_that_counts_sequences_on_another_axis_is_read_as_it_is():
    module = WithMemory(causal).double().eval()
    memory = torch.randn(3, 5, 2, WIDTH, dtype=torch.float64)
    opened = open_model(module, example={"ids": ids(), "memory": memory})
    with torch.no_grad():
        found, expected = opened.model(ids())[0], module(ids(), memory)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(
    ("kinds", "period"),
    [
        ("af", 2),
        ("afaf", 2),
        ("aafaaf", 3),
        ("aaf", 3),
        ("faaffaaf", 4),
        ("paf", 3),
        ("aff", 3),
        ("fafa", 2),
        ("fa", 1),
        ("afafa", 1),
        ("afaaf", 1),
        ("aaaa", 1),
        ("ff", 1),
        ("a", 1),
    ],
)
def test_blocks_are_the_pattern_that_repeats(kinds, period):
    names = {"a": "attention", "f": "ffn", "p": "part"}
    assert period_of([names[kind] for kind in kinds]) == period


class SequenceFirst(nn.Module):
    """An FFN on rows of tokens before sequences."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)

    def forward(self, x):
        rows = x.transpose(0, 1).flatten(0, 1)
        y = self.down(F.relu(self.up(rows)))
        return y.unflatten(0, (x.shape[1], x.shape[0])).transpose(0, 1)


@pytest.mark.parametrize("sequences", [1, 2])
def test_rows_in_another_order_give_no_features(sequences):
    torch.manual_seed(0)
    module = Model(causal)
    module.ffns = nn.ModuleList(SequenceFirst() for _ in range(2))
    model = open_model(module.double().eval(), example=ids()[:sequences]).model
    field = model.depth.sublayers[1].field
    x = torch.randn(3, TOKENS, WIDTH, dtype=torch.float64)
    if field.output_path is not None:
        features = field.pre_projection(x)
        torch.testing.assert_close(field.output_projection(features), field(x))
