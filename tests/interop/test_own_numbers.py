"""Figures of modules that only an independent hook can judge: the output's axes, inputs unlike the
example, gradients that the module stops, leaks before the blocks.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import ctrans
from solvers import ConfigError

WIDTH, VOCABULARY, TOKENS = 16, 31, 12


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.ffn = nn.Sequential(nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WIDTH))

    def mixed(self, x):
        y = self.n1(x)
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        return self.attention(y, y, y, attn_mask=mask, need_weights=False)[0]

    def forward(self, x):
        x = x + self.mixed(x)
        return x + self.ffn(self.n2(x))


class Language(nn.Module):
    def __init__(self, block=Block):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList([block() for _ in range(3)])
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def embed(self, ids):
        return self.embedding(ids)

    def depth_of(self, x):
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, ids):
        return self.head(self.norm(self.depth_of(self.embed(ids))))


def made(make):
    torch.manual_seed(0)
    return make().eval()


def text(rows=2, seed=0):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(VOCABULARY, (rows, TOKENS + 1), generator=generator)
    return ids[:, :-1], ids[:, 1:]


def own_loss(model, tokens, targets):
    return F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())


class TurnedEncoder(nn.Module):
    """Sequences first outside, tokens first in its encoder: the usual way in tutorials."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 32, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids):
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1])
        return self.head(self.encoder(self.embedding(ids).transpose(0, 1), mask).transpose(0, 1))


@pytest.mark.parametrize("rows", [2, TOKENS])
def test_the_loss_is_that_of_the_modules_output_and_not_of_its_transpose(rows):
    model = made(TurnedEncoder)
    tokens, targets = text(rows)
    expected = float(own_loss(model, tokens, targets).detach())
    assert ctrans.costate(model, tokens, targets).loss == pytest.approx(expected, rel=1e-5)
    opened = ctrans.open_model(model, example=tokens)
    assert torch.allclose(opened(tokens)[0], model(tokens), atol=1e-5)


class ScaledByLength(Block):
    def forward(self, x, factor):
        x = x + factor * self.mixed(x)
        return x + self.ffn(self.n2(x))


class GivesAFactor(Language):
    """log(n) of the number of tokens, given to its blocks as a number."""

    def __init__(self):
        super().__init__(ScaledByLength)

    def depth_of(self, x):
        for block in self.blocks:
            x = block(x, float(torch.tensor(x.shape[1]).float().log()))
        return x


class Switches(Block):
    """Another branch in long sequences."""

    def forward(self, x):
        x = x + self.mixed(x)
        if x.shape[1] > 8:
            return x + self.ffn(self.n2(x))
        return x + 0.5 * self.ffn(self.n2(x))


@pytest.mark.parametrize("make", [GivesAFactor, lambda: Language(Switches)])
def test_inputs_for_which_a_module_computes_otherwise_are_refused(make):
    model = made(make)
    opened = ctrans.open_model(model, example=text()[0])
    tokens, targets = (each[:, :5] for each in text(seed=1))
    with pytest.raises(ConfigError, match="otherwise than for its example"):
        ctrans.costate(opened, tokens, targets)
    expected = float(own_loss(model, tokens, targets).detach())
    assert ctrans.costate(model, tokens, targets).loss == pytest.approx(expected, rel=1e-5)


class Scales(Block):
    """A learned factor, whose number is read when the model is opened."""

    def __init__(self):
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(0.7))

    def forward(self, x):
        x = x + self.mixed(x)
        return x + float(self.factor.detach()) * self.ffn(self.n2(x))


@pytest.mark.parametrize("seen", [False, True])
def test_of_weights_that_changed_after_the_opening_it_says_so(seen):
    model = made(lambda: Language(Scales))
    tokens, targets = text()
    opened = ctrans.open_model(model, example=tokens)
    if seen:
        ctrans.costate(opened, tokens, targets)
    with torch.no_grad():
        for block in model.blocks:
            block.factor.mul_(1.5)
    with pytest.raises(ConfigError, match="weights that have changed since it was opened: open it"):
        ctrans.costate(opened, tokens, targets)
    again = ctrans.open_model(model, example=tokens)
    expected = float(own_loss(model, tokens, targets).detach())
    assert ctrans.costate(again, tokens, targets).loss == pytest.approx(expected, rel=1e-5)


class Detached(Language):
    def depth_of(self, x):
        for k, block in enumerate(self.blocks):
            x = block(x)
            if k == 1:
                x = x.detach()
        return x


class HalfDetached(Block):
    def forward(self, x):
        x = x + self.mixed(x).detach()
        return x + self.ffn(self.n2(x))


@pytest.mark.parametrize("make", [Detached, lambda: Language(HalfDetached)])
def test_costates_are_autograds_where_a_module_stops_gradients(make):
    model = made(make)
    tokens, targets = text()
    firsts = []
    hook = model.blocks[0].register_forward_pre_hook(lambda _, args: firsts.append(args[0]))
    loss = own_loss(model, tokens, targets)
    hook.remove()
    (expected,) = torch.autograd.grad(loss, firsts[0], allow_unused=True)
    if expected is None:
        expected = torch.zeros_like(firsts[0])
    found = ctrans.costate(model, tokens, targets).costates[0]
    assert torch.allclose(found, expected, atol=1e-7)


class WithoutGradients(Language):
    @torch.no_grad()
    def forward(self, ids):
        return super().forward(ids)


def test_a_forward_pass_that_turns_gradients_off_is_said_in_a_line():
    tokens, targets = text()
    with pytest.raises(ConfigError, match="has no derivatives"):
        ctrans.costate(made(WithoutGradients), tokens, targets)


class Convolved(Language):
    """A convolution of embeddings that sees the next token."""

    def __init__(self):
        super().__init__()
        self.mix = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)

    def embed(self, ids):
        return self.mix(self.embedding(ids).transpose(1, 2)).transpose(1, 2)


def test_a_leak_before_the_blocks_is_found():
    finding = ctrans.diagnose(made(Convolved), *text()).findings[0]
    assert (finding.check, finding.place) == ("reads future tokens", "before the depth")
    (reading,) = ctrans.diagnose(made(Language), *text()).readings["change by a later token"]
    assert reading.value == 0


class Squashed(Block):
    def forward(self, x):
        x = torch.tanh(x + self.mixed(x))
        return x + self.ffn(self.n2(x))


def test_the_last_norm_is_not_taken_into_the_last_part():
    model = made(lambda: Language(Squashed))
    with torch.no_grad():
        model.norm.weight.uniform_(0.5, 1.5)
    tokens, _ = text()
    lasts = []
    hook = model.blocks[-1].register_forward_hook(lambda *args: lasts.append(args[-1]))
    model(tokens)
    hook.remove()
    expected = float(lasts[0].detach().square().mean().sqrt())
    found = ctrans.simulate(model, tokens, reference=False).rms[-1]
    assert found == pytest.approx(expected, rel=1e-5)


def test_one_token_shows_no_dead_units():
    config = ctrans.GPTConfig(depth=2, width=32, context=16, vocab_size=64)
    token = torch.tensor([[5]])
    diagnosis = ctrans.diagnose(ctrans.GPT(config), token, token)
    assert "dead units" not in [finding.check for finding in diagnosis.findings]


def test_an_embedding_that_is_the_same_for_all_tokens_is_found():
    config = ctrans.GPTConfig(depth=2, width=32, context=16, vocab_size=VOCABULARY, tied=False)
    model = ctrans.GPT(config)
    with torch.no_grad():
        model.token_embedding.weight[:] = model.token_embedding.weight[0].clone()
    checks = [finding.check for finding in ctrans.diagnose(model, *text()).findings]
    assert "positions dominate the text" in checks
