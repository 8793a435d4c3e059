"""What a module truly computes comes before what is recognised in it. Each test rebuilds a
situation that somebody reported in public, with the right answer computed beside it.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import ctrans
from ctrans.examine.diagnosis.diagnose import diagnose
from ctrans.interop import from_transformers
from ctrans.interop.missing_weights import in_words
from ctrans.measure.backward.sensitivity import closed_by_a_scale
from solvers import ConfigError

WIDTH = 32
VOCABULARY = 40


def ids(sequences=4, tokens=24, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(VOCABULARY, (sequences, tokens), generator=generator)


class Attention(nn.Module):
    """Causal attention of four heads; `dropout` stays on in evaluation, `axis` is the softmax's."""

    def __init__(self, dropout=0.0, axis=-1):
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.dropout = dropout
        self.axis = axis

    def forward(self, x):
        batch, tokens, _ = x.shape
        by_head = (part.view(batch, tokens, 4, -1) for part in self.qkv(x).chunk(3, -1))
        q, k, v = (part.transpose(1, 2) for part in by_head)
        later = torch.ones(tokens, tokens, dtype=torch.bool).triu(1)
        scores = (q @ k.mT / 8**0.5).masked_fill(later, -1e9)
        rows = F.dropout(scores.softmax(self.axis), self.dropout)
        return self.out((rows @ v).transpose(1, 2).reshape(x.shape))


class FeedForward(nn.Module):
    def __init__(self, dropout=0.0):
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        self.dropout = dropout

    def forward(self, x):
        return F.dropout(self.down(F.gelu(self.up(x))), self.dropout)


class Block(nn.Module):
    def __init__(self, attention, ffn):
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention, self.ffn = attention, ffn

    def forward(self, x):
        x = x + self.attention(self.n1(x))
        return x + self.ffn(self.n2(x))


class DeepNormBlock(Block):
    """LN(alpha x + f(x))."""

    alpha = 1.9

    def forward(self, x):
        x = self.n1(self.alpha * x + self.attention(x))
        return self.n2(self.alpha * x + self.ffn(x))


class ReZeroBlock(Block):
    def __init__(self, attention, ffn):
        super().__init__(attention, ffn)
        self.scale = nn.Parameter(torch.zeros(1))

    def forward(self, x):
        x = x + self.scale * self.attention(x)
        return x + self.scale * self.ffn(x)


class OverTime(nn.Module):
    """A norm of each channel over the tokens."""

    def forward(self, x):
        return F.layer_norm(x.mT, x.shape[1:2]).mT


class Net(nn.Module):
    def __init__(self, blocks, before_head=None, noise=0.0):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Parameter(0.5 * torch.randn(64, WIDTH))
        self.blocks = nn.ModuleList(blocks)
        self.before_head = before_head or nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.noise = noise

    def forward(self, tokens):
        x = F.dropout(self.embed(tokens), self.noise) + self.positions[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.before_head(x))


def net(kind=Block, attention=None, ffn=None, **options):
    """Three blocks, of which the second may have another attention or FFN."""
    torch.manual_seed(0)
    attentions = [Attention(), attention or Attention(), Attention()]
    ffns = [FeedForward(), ffn or FeedForward(), FeedForward()]
    blocks = [kind(*parts) for parts in zip(attentions, ffns, strict=True)]
    return Net(blocks, **options).eval()


def found(model, loss="next"):
    text = ids(tokens=25)
    diagnosis = ctrans.diagnose(model, text[:, :-1], text[:, 1:], loss=loss)
    return {finding.check: finding for finding in diagnosis.findings}


def test_a_sound_model_has_none_of_these_findings():
    assert found(net()) == {}


@pytest.mark.parametrize(
    ("options", "place"),
    [
        ({"attention": Attention(dropout=0.1)}, r"blocks\.1\.attention \(Attention\)"),
        ({"ffn": FeedForward(dropout=0.1)}, r"blocks\.1\.ffn \(FeedForward\)"),
        ({"noise": 0.1}, "the module itself"),
        ({"before_head": nn.Sequential(nn.LayerNorm(WIDTH), FeedForward(0.1))}, "before_head.1"),
    ],
)
def test_dropout_that_stays_on_is_named_with_its_place(options, place):
    model = net(**options)
    assert not torch.equal(model(ids()), model(ids()))
    with pytest.raises(ConfigError, match=f"not the same twice.*first in {place}"):
        ctrans.open_model(model, example=ids())


def test_dropout_of_training_is_not_said_to_stay_on():
    """The module trains, and is read for another reason in vain."""
    model = nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), nn.Dropout(0.5)).train()
    with pytest.raises(ConfigError) as caught:
        ctrans.open_model(model, example=ids())
    assert "not the same twice" not in str(caught.value)


class MasksARowWhole(nn.Module):
    def forward(self, x):
        scores = torch.zeros(x.shape[1], x.shape[1])
        scores[0] = -torch.inf
        return scores.softmax(-1) @ x


def test_an_output_that_is_not_finite_is_named_with_its_place():
    model = net(attention=MasksARowWhole())
    assert not model(ids()).isfinite().all()
    with pytest.raises(ConfigError, match=r"not finite.*first in blocks\.1"):
        ctrans.open_model(model, example=ids())


class FromTheNorm(nn.Module):
    """n(x) + f(n(x)): no block that ctrans knows, so that it is read by its sums."""

    def __init__(self):
        super().__init__()
        self.norm, self.ffn = nn.LayerNorm(WIDTH), FeedForward()

    def forward(self, x):
        x = self.norm(x)
        return x + self.ffn(x)


def test_a_nan_weight_of_a_model_read_by_its_sums_is_the_finding():
    torch.manual_seed(0)
    model = Net([FromTheNorm() for _ in range(3)])
    assert "not finite" not in found(model)
    with torch.no_grad():
        model.blocks[1].ffn.up.weight[3, 4] = torch.nan
    assert "blocks.1.ffn.up.weight" in found(model)["not finite"].place


def test_a_norm_over_tokens_before_the_head_reads_later_tokens():
    model = net(before_head=OverTime())
    text = ids()
    changed = text.clone()
    changed[:, -1] = (changed[:, -1] + 7) % VOCABULARY
    assert (model(changed) - model(text))[:, :-1].abs().max() > 1e-3
    finding = found(model)["reads future tokens"]
    assert finding.place == "between the depth and the logits"


@pytest.mark.parametrize("alpha", [0.5, 1.9])
def test_a_factor_on_the_state_within_a_norm_is_deepnorm(alpha):
    DeepNormBlock.alpha = alpha
    model = net(DeepNormBlock).double()
    opened = ctrans.open_model(model, example=ids(), loss="next")
    assert "placement deepnorm" in opened.described
    assert opened.depth.sublayers[0].gain == 1 / alpha
    with torch.no_grad():
        states = opened.trajectory(ids()).states
        x = model.embed(ids()) + model.positions[:24]
        for k, block in enumerate(model.blocks, 1):
            x = block(x)
            assert torch.allclose(states[2 * k], x, rtol=1e-12, atol=1e-12)
        assert torch.allclose(opened.head(states[-1]), model(ids()), rtol=1e-12, atol=1e-12)


def test_a_fresh_rezero_trains_and_is_not_dead():
    model = net(ReZeroBlock)
    F.cross_entropy(model(ids()).flatten(0, 1), ids(seed=2).flatten()).backward()
    assert all(block.scale.grad.abs().item() > 1e-5 for block in model.blocks)
    model.zero_grad()
    assert {finding.severity for finding in found(model).values()} <= {"note"}


def test_a_sublayer_of_zeros_is_dead_whatever_its_scales():
    config = ctrans.GPTConfig(depth=2, width=WIDTH, heads=4, context=24, vocab_size=VOCABULARY)
    model = ctrans.GPT(config)
    sublayer = model.depth.sublayers[1]
    x = torch.randn(2, 24, WIDTH)
    assert not closed_by_a_scale(sublayer, x)
    with torch.no_grad():
        for weight in sublayer.field.parameters():
            weight.zero_()
    assert not sublayer.velocity(x).any()
    assert not closed_by_a_scale(sublayer, x)
    text = ids(tokens=25)
    checks = [f.check for f in diagnose(model, text[:, :-1], text[:, 1:]).findings]
    assert {"dead sublayer", "zero weight"} & set(checks)


def test_a_softmax_over_the_queries_is_no_sink():
    opened = ctrans.open_model(net(attention=Attention(axis=-2)), example=ids(), loss="next")
    assert "the softmax runs over the queries" in opened.described
    assert "sink" not in opened.described
    assert "softmax" not in ctrans.open_model(net(), example=ids()).described


class Encoder(nn.Module):
    def __init__(self, batch_first):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 4, 64, 0.0, batch_first=batch_first, norm_first=True)
            for _ in range(2)
        )
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def states(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return x

    def forward(self, tokens):
        return self.head(self.states(tokens))


def test_sequences_that_read_each_other_are_said():
    torch.manual_seed(0)
    model = Encoder(batch_first=False).eval()
    other = ids(5, 12)
    other[1:] = (other[1:] + 7) % VOCABULARY
    assert (model(other) - model(ids(5, 12)))[0].abs().max() > 0.1
    text = ids(5, 13)
    with pytest.raises(ConfigError, match="sequences of the batch read each other"):
        ctrans.diagnose(model, text[:, :-1], text[:, 1:], loss="next")
    own = float(model.states(ids(5, 12)).abs().mean())
    assert ctrans.simulate(model, ids(5, 12)).mean_abs[-1] == pytest.approx(own, rel=1e-5)
    assert "its rows read each other" in ctrans.open_model(model, example=ids(5, 12)).described
    right = ctrans.open_model(Encoder(batch_first=True), example=ids(5, 12))
    assert "read each other" not in right.described


@pytest.mark.parametrize("family", ["gpt2", "opt", "llama", "roberta"])
@pytest.mark.parametrize("left", [True, False])
def test_padded_tokens_have_the_logits_of_the_text_alone(family, left):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    common = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "pad_token_id": 0}
    common |= {"num_attention_heads": 4, "max_position_embeddings": 64, "bos_token_id": 1}
    common |= {"eos_token_id": 2, "intermediate_size": 64, "ffn_dim": 64, "word_embed_proj_dim": 32}
    config = transformers.AutoConfig.for_model(family, **common)
    if family == "roberta":
        model = transformers.AutoModelForMaskedLM.from_config(config)
    else:
        model = transformers.AutoModelForCausalLM.from_config(config)
    model = model.double().eval()
    text = torch.tensor([[5, 17, 20, 33, 8]])
    padding = torch.zeros(1, 4, dtype=torch.long)
    ones = torch.ones_like(text)
    if left:
        padded, mask = torch.cat([padding, text], 1), torch.cat([padding, ones], 1)
    else:
        padded, mask = torch.cat([text, padding], 1), torch.cat([ones, padding], 1)
    opened = from_transformers(model)
    with torch.no_grad():
        expected = model(text).logits
        with opened.padded(mask):
            logits = opened.head(opened.trajectory(padded).states[-1])
    assert torch.allclose(logits[mask.bool()], expected[0], atol=1e-6)


NAMES = ["h.0.a.weight", "h.0.b.weight", "h.1.a.weight", "h.1.b.weight", "wte.weight"]


@pytest.mark.parametrize(
    ("missing", "stored", "words"),
    [
        (NAMES, [f"module.{name}" for name in NAMES], "under the prefix 'module.'"),
        (NAMES, [f"module._orig_mod.{name}" for name in NAMES], "prefix 'module._orig_mod.'"),
        (NAMES[2:4], NAMES[:2], "lacks all 2 weights of h.1"),
        (NAMES[2:3], NAMES[:2], "lacks h.1.a.weight"),
        # a prefix of some names only is none
        (NAMES[2:4], [*NAMES[:2], *[f"old.{name}" for name in NAMES[2:4]]], "rename these weights"),
        (NAMES[2:4], [*NAMES[:2], "old.h.1.a.weight"], "lacks all 2 weights of h.1"),
    ],
)
def test_weights_that_are_missing_are_said_by_prefix_or_block(missing, stored, words):
    assert words in in_words(missing, stored, NAMES)
