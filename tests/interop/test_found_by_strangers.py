"""Models like those that people wrote without having seen ctrans, of kinds that it read wrongly."""

import math
import statistics

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import ctrans
from ctrans.dynamics.fields import ExposesHeads
from ctrans.interop import from_transformers, open_model
from ctrans.interop.families import small_model

WIDTH = 16
HEADS = 2
VOCABULARY = 23
BLOCKS = 2


def ids(seed=0):
    return torch.randint(VOCABULARY, (2, 9), generator=torch.Generator().manual_seed(seed))


class Blocks(nn.Module):
    """A language model of blocks, which keeps each of its states."""

    def __init__(self, block, norm=None):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(block() for _ in range(BLOCKS))
        self.norm = norm or nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids):
        x = self.embedding(ids)
        self.states = [x]
        for block in self.blocks:
            x = block(x, self.states)
        return self.head(self.norm(x))


def made(block, norm=None):
    torch.manual_seed(0)
    module = Blocks(block, norm).double().eval()
    with torch.no_grad():
        for weight in module.parameters():
            weight.add_(0.1 * torch.randn_like(weight))
    return module


def assert_states_are_its_own(opened, module, tokens):
    with torch.no_grad():
        states = opened.model.trajectory(tokens).states
        module(tokens)
        for state, own in zip(states, module.states, strict=True):
            torch.testing.assert_close(state, own)


def feed_forward():
    return nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))


class WithTorchsAttention(nn.Module):
    """Pre-LN or Post-LN around torch's attention, called with these options."""

    def __init__(self, post, **options):
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
        self.ffn = feed_forward()
        self.post = post
        self.options = options

    def attend(self, x):
        hidden = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        return self.attention(x, x, x, attn_mask=hidden, **self.options)[0]

    def forward(self, x, states):
        for norm, part in zip(self.norms, (self.attend, self.ffn), strict=True):
            if self.post:
                x = norm(x + part(x))
            else:
                x = x + part(norm(x))
            states.append(x)
        return x


@pytest.mark.cases(2)
@pytest.mark.parametrize("options", [{}, {"average_attn_weights": False}, {"need_weights": False}])
@pytest.mark.parametrize("post", [False, True])
def test_torchs_attention_is_read_with_each_of_its_options(post, options):
    module = made(lambda: WithTorchsAttention(post, **options))
    opened = open_model(module, example=ids(), loss="next")
    assert opened.model.config.placement == ("post" if post else "pre")
    assert opened.model.config.attention == "MultiheadAttention"
    assert not opened.model.config.unread
    assert_states_are_its_own(opened, module, ids(1))
    assert isinstance(opened.model.depth.sublayers[0].field, ExposesHeads)


class NormedAtItsEnd(nn.Module):
    """Three Pre-LN sums, with a norm behind the last of them, as a Conformer's blocks have."""

    def __init__(self):
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(3))
        self.ffns = nn.ModuleList(feed_forward() for _ in range(3))
        self.last_norm = nn.LayerNorm(WIDTH)

    def forward(self, x, states):
        for norm, ffn in zip(self.norms, self.ffns, strict=True):
            x = x + 0.5 * ffn(norm(x))
            states.append(x)
        states[-1] = self.last_norm(x)
        return states[-1]


def test_a_norm_at_the_end_of_each_block_is_one_of_the_last_block_too():
    module = made(NormedAtItsEnd, nn.Identity())
    opened = open_model(module, example=ids(), loss="next")
    placements = [part.placement.name for part in opened.model.depth.sublayers]
    assert placements == ["pre", "pre", "pre_post"] * BLOCKS
    assert_states_are_its_own(opened, module, ids(1))


class StackOfTwo(nn.Module):
    """Pre-LN sums in two stacks, each with a last norm of its own name."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.encoder = nn.ModuleList(feed_forward() for _ in range(3))
        self.encoder_norm = nn.LayerNorm(WIDTH)
        self.decoder = nn.ModuleList(feed_forward() for _ in range(3))
        self.final_norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids):
        x = self.embedding(ids)
        for ffn in self.encoder:
            x = x + ffn(F.layer_norm(x, (WIDTH,)))
        x = self.encoder_norm(x)
        for ffn in self.decoder:
            x = x + ffn(F.layer_norm(x, (WIDTH,)))
        return self.head(self.final_norm(x))


def test_the_last_norm_of_a_stack_is_not_one_of_its_last_block():
    torch.manual_seed(0)
    opened = open_model(StackOfTwo().eval(), example=ids(), loss="next")
    last = opened.model.depth.sublayers[-1]
    assert last.state_norm is None


class OwnAttention(nn.Module):
    """Pre-LN around an attention whose averages a subclass computes."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.maps = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.ffn = feed_forward()

    def forward(self, x, states):
        x = x + self.out(self.averages(self.norm(x)))
        states.append(x)
        x = x + self.ffn(self.norm(x))
        states.append(x)
        return x


class InVmap(OwnAttention):
    """Each head by torch.vmap."""

    def averages(self, x):
        q, k, v = self.maps(x).unflatten(-1, (3, HEADS, -1)).permute(2, 3, 0, 1, 4)
        averages = torch.vmap(lambda q, k, v: (q @ k.mT).softmax(-1) @ v)(q, k, v)
        return averages.permute(1, 2, 0, 3).flatten(-2)


def test_what_a_transform_hides_is_said_and_the_states_around_it_are_its_own():
    module = made(InVmap)
    opened = open_model(module, example=ids(), loss="next")
    assert "code inside of torch.vmap" in opened.described
    tokens = ids(1)
    with torch.no_grad():
        states = opened.trajectory(tokens).states
        torch.testing.assert_close(opened.head(states[-1]), module(tokens))
        for state in states:
            assert any(torch.allclose(state, own) for own in module.states)


class InLoop(OwnAttention):
    """Attention of one token after the other."""

    def averages(self, x):
        keys, values, averages = [], [], []
        for token in x.unbind(1):
            q, k, v = self.maps(token).unflatten(-1, (3, HEADS, -1)).unbind(1)
            keys.append(k)
            values.append(v)
            rows = (torch.stack(keys, 2) * q.unsqueeze(2)).sum(-1).softmax(-1)
            averages.append((rows.unsqueeze(-1) * torch.stack(values, 2)).sum(2).flatten(-2))
        return torch.stack(averages, 1)


def test_an_attention_of_one_token_after_the_other_is_said_to_be_a_loop():
    module = made(InLoop)
    opened = open_model(module, example=ids(), loss="next")
    assert_states_are_its_own(opened, module, ids(1))
    unread = "; ".join(opened.model.config.unread)
    assert f"its linear map maps is called {ids().shape[1]} times in a pass" in unread


class StateSpace(nn.Module):
    """A causal convolution of 3 tokens, with a recurrence behind it or not."""

    def __init__(self, decay):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.convolution = nn.Conv1d(WIDTH, WIDTH, 3, groups=WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.decay = decay

    def forward(self, x, states):
        y = self.convolution(F.pad(self.norm(x).mT, (2, 0)))
        if self.decay:
            state, scanned = torch.zeros_like(y[..., 0]), []
            for each in y.unbind(-1):
                state = self.decay * state + each
                scanned.append(state)
            y = torch.stack(scanned, -1)
        states.append(x + self.out(y.mT))
        return states[-1]


@pytest.mark.parametrize(
    ("decay", "said"),
    [(0, "a convolution"), (0.9, "operations without rows, a convolution among them")],
)
def test_a_recurrence_behind_a_convolution_is_no_convolution(decay, said):
    module = made(lambda: StateSpace(decay))
    opened = open_model(module, example=ids(), loss="next")
    assert opened.model.config.attention == said
    assert_states_are_its_own(opened, module, ids(1))


def test_eps_of_a_norm_around_the_state_is_measured_at_the_sum():
    module = made(lambda: WithTorchsAttention(post=True))
    opened = open_model(module, example=ids(), loss="next")
    targets = ids().roll(-1, 1)
    readings = ctrans.diagnose(opened, ids(), targets).readings["eps over mean square"]
    with torch.no_grad():
        module(ids())
        for k, reading in enumerate(readings):
            block = module.blocks[k // 2]
            part = (block.attend, block.ffn)[k % 2]
            summed = module.states[k] + part(module.states[k])
            of_tokens = summed.var(-1, correction=0).flatten().tolist()
            assert math.isclose(reading.value, 1e-5 / statistics.median(of_tokens))
    assert len(readings) == 2 * BLOCKS


class AddsTheFirstState(nn.Module):
    """Blocks that add the first state again, which later passes hold fixed."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.ffn = feed_forward()

    def forward(self, x, states):
        x = 0.9 * x + 0.1 * states[0]
        return x + self.ffn(self.norm(x))


def test_what_an_instrument_could_not_measure_is_not_said_to_need_what_is_there():
    opened = open_model(made(AddsTheFirstState), example=ids(), loss="next")
    diagnosis = ctrans.diagnose(opened, ids(), ids().roll(-1, 1))
    said = " ".join(str(diagnosis).split())
    for check in ("reads future tokens", "not the same twice"):
        assert diagnosis.stopped_by(check) == "what tokens read"
        assert f"{check} (needs" not in said
    assert "not measured: what tokens read (for reads future tokens," in said


class TokensFirst(nn.Module):
    """(tokens, sequences) as in torch's tutorials, which leave out batch_first=True."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 2 * WIDTH, dropout=0.0)
        self.encoder = nn.TransformerEncoder(layer, BLOCKS, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids):
        mask = nn.Transformer.generate_square_subsequent_mask(len(ids), dtype=torch.float64)
        return self.head(self.encoder(self.embedding(ids), mask=mask))


@pytest.mark.parametrize("tokens", [9, 2])
def test_a_loss_of_ones_own_gets_targets_in_the_axes_of_the_modules_output(tokens):
    torch.manual_seed(0)
    module = TokensFirst().double().eval()
    x = torch.randint(VOCABULARY, (tokens, 2))
    y = torch.randint(VOCABULARY, (tokens, 2))

    def loss(outputs, targets):
        return F.cross_entropy(outputs.flatten(0, 1), targets.flatten())

    expected = float(loss(module(x), y))
    opened = open_model(module, example=x, loss=loss)
    assert float(opened(x.T, y.T)[1]) == pytest.approx(expected)
    found = ctrans.diagnose(module, x, y, loss=loss).readings["loss on this text"]
    assert found[0].value == pytest.approx(expected)


@pytest.mark.slow
def test_several_streams_beside_one_sequence_are_not_counted_as_sequences():
    """Gemma 3n's states are (streams, sequences, tokens, width), and an example of one sequence
    has as many tokens as there are streams.
    """
    torch.manual_seed(0)
    model = small_model("gemma3n_text").eval()
    imported = from_transformers(model)
    tokens = torch.randint(3, 31, (3, 4))
    with torch.no_grad():
        together = imported.trajectory(tokens).states
        torch.testing.assert_close(
            imported.head(together[-1]), model(tokens).logits, rtol=1e-4, atol=1e-5
        )
        for i in range(3):
            alone = imported.trajectory(tokens[i : i + 1]).states
            for state, own in zip(together, alone, strict=True):
                torch.testing.assert_close(state[i : i + 1], own, rtol=1e-4, atol=1e-5)
