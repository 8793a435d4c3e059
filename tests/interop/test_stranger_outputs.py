"""Modules as strangers write them: several outputs, several widths, contexts, changes in place. The
figures are those of hooks and of plain autograd, or a line says what is not read.
"""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import ctrans
from solvers import ConfigError

D = 16


def maps(count, width=D):
    return nn.ModuleList(
        nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 32), nn.GELU(), nn.Linear(32, width))
        for _ in range(count)
    )


def drawn(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def made(kind, *args):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return kind(*args).double().eval()


class Plain(nn.Module):
    """x = x + f(x), three times. `start` makes the first state, `end` the output of states and
    their sizes.
    """

    def __init__(self, start=lambda x: x, end=lambda y, size, x: y):
        super().__init__()
        self.into, self.f, self.out = nn.Linear(6, D), maps(3), nn.Linear(D, 3)
        self.gru = nn.GRU(D, D, batch_first=True)
        self.start, self.end = start, end

    def forward(self, u):
        x, size = self.into(u), 0.0
        x = self.gru(x)[0] if self.start == "gru" else self.start(x)
        for f in self.f:
            y = f(x)
            x, size = x + y, size + y.pow(2).mean()
        return self.end(self.out(x), size, x)


class Routed(nn.Module):
    """Its block returns the state and an auxiliary loss."""

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.n1, self.n2 = nn.LayerNorm(D), nn.LayerNorm(D)
            self.attention = nn.MultiheadAttention(D, 4, batch_first=True)
            self.ffn = nn.Sequential(nn.Linear(D, 32), nn.GELU(), nn.Linear(32, D))

        def forward(self, x):
            h = self.n1(x)
            x = x + self.attention(h, h, h)[0]
            y = self.ffn(self.n2(x))
            return x + y, y.pow(2).mean()

    def __init__(self):
        super().__init__()
        self.into, self.blocks, self.out = (
            nn.Linear(6, D),
            nn.ModuleList(self.Block() for _ in range(3)),
            nn.Linear(D, 3),
        )

    def forward(self, u):
        x, size = self.into(u), 0.0
        for block in self.blocks:
            x, own = block(x)
            size = size + own
        return self.out(x), size


def first_gradient(module, inputs, targets, loss):
    """dL/dx_0 by plain autograd, where x_0 is the output of `into`."""
    kept = []

    def keep(_, __, x):
        kept.append(x.detach().requires_grad_())
        return kept[0]

    handle = module.into.register_forward_hook(keep)
    loss(module(inputs), targets).backward()
    handle.remove()
    return kept[0].grad


def squared(output, targets):
    return F.mse_loss(output[0], targets)


@pytest.mark.parametrize("kind", [Routed, lambda: Plain(end=lambda y, size, x: (y, size))])
def test_a_loss_of_an_output_that_is_no_function_of_the_last_state_is_refused(kind):
    module, u, y = made(kind), drawn(2, 5, 6), drawn(2, 5, 3)
    opened = ctrans.open_model(module, example=u, loss=lambda o, t: squared(o, t) + 10 * o[1])
    assert "a loss must not read outputs [1]" in opened.described
    with pytest.raises(
        ConfigError, match=r"loss=: it reads an output .* no function of the last state"
    ):
        ctrans.costate(opened, u, y)
    opened = ctrans.open_model(module, example=u, loss=squared)
    assert torch.allclose(
        ctrans.costate(opened, u, y).costates[0], first_gradient(module, u, y, squared), rtol=1e-9
    )


def test_a_loss_may_read_another_output_of_the_last_state():
    def loss(output, targets):
        return squared(output, targets) + output[1]

    module, u, y = (
        made(lambda: Plain(end=lambda y, size, x: (y, x.pow(4).mean()))),
        drawn(2, 5, 6),
        drawn(2, 5, 3),
    )
    opened = ctrans.open_model(module, example=u, loss=loss)
    assert "must not read" not in opened.described
    assert torch.allclose(
        ctrans.costate(opened, u, y).costates[0], first_gradient(module, u, y, loss), rtol=1e-9
    )


class Decoder(nn.Module):
    def __init__(self, causal):
        super().__init__()
        self.e, self.out, self.causal = nn.Embedding(30, D), nn.Linear(D, 30), causal
        self.layers = nn.ModuleList(
            nn.TransformerDecoderLayer(D, 4, 32, batch_first=True, norm_first=True, dropout=0.0)
            for _ in range(2)
        )

    def forward(self, ids, memory):
        x, mask = self.e(ids), torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).triu(1)
        for layer in self.layers:
            x = layer(x, memory, tgt_mask=mask if self.causal else None)
        return self.out(x)


@pytest.mark.cases(1)
@pytest.mark.parametrize("causal", [True, False])
def test_later_tokens_are_found_where_each_sequence_has_its_own_memory(causal):
    module, text = made(Decoder, causal), torch.arange(20).reshape(2, 10) * 7 % 30
    example = {"ids": text[:, :-1], "memory": drawn(2, 5, D)}
    opened = ctrans.open_model(module, example=example, loss="next")
    found = ctrans.diagnose(opened, text[:, :-1], text[:, 1:])
    assert ("reads future tokens" in [each.check for each in found.findings]) is not causal
    assert "change by a later token" in found.readings


class Towers(nn.Module):
    """Text and image towers. The text's last token is chosen by its id, so the ids are read
    twice.
    """

    def __init__(self, depths):
        super().__init__()
        self.e, self.p = nn.Embedding(30, D), nn.Linear(12, D)
        self.text, self.image = map(maps, depths)

    def forward(self, text, patches):
        x, y = self.e(text), self.p(patches)
        for f in self.text:
            x = x + f(x)
        for f in self.image:
            y = y + f(y)
        return y.mean(1) @ x[torch.arange(len(x)), text.argmax(-1)].T


@pytest.mark.parametrize("depths", [(2, 4), (4, 2)])
def test_the_stream_is_that_of_the_first_argument(depths):
    module, text, patches = made(Towers, depths), torch.arange(16).reshape(2, 8), drawn(2, 5, 12)
    for example, part, count in (
        ({"text": text, "patches": patches}, module.text, depths[0]),
        ({"patches": patches, "text": text}, module.image, depths[1]),
    ):
        inputs = []
        handles = [
            f.register_forward_pre_hook(lambda _, given, kept=inputs: kept.append(given[0]))
            for f in part
        ]
        module(text, patches)
        for handle in handles:
            handle.remove()
        main = next(iter(example.values()))
        states = ctrans.open_model(module, example=example, loss="mean").trajectory(main).states
        assert len(states) == count + 1
        assert all(torch.allclose(*pair) for pair in zip(states, inputs, strict=False))


STARTS = {
    "GRU": "gru",
    "chunk": lambda x: x.repeat(1, 1, 2).chunk(2, -1)[0],
    "unbind": lambda x: torch.stack([x, 2 * x]).unbind()[1],
    "max": lambda x: torch.stack([x, -x]).max(0).values,
    "sort": lambda x: x.sort(-1)[0],
}


@pytest.mark.parametrize("name", STARTS)
def test_a_stream_may_start_at_one_of_several_outputs(name):
    module, u, inputs = made(Plain, STARTS[name]), drawn(2, 5, 6), []
    handles = [
        f.register_forward_pre_hook(lambda _, given: inputs.append(given[0])) for f in module.f
    ]
    module(u)
    for handle in handles:
        handle.remove()
    states = ctrans.open_model(module, example=u, loss="mean").trajectory(u).states
    assert len(states) == 4
    assert all(torch.allclose(*pair) for pair in zip(states, inputs, strict=False))


class Residual(nn.Module):
    def __init__(self, width):
        super().__init__()
        (self.f,) = maps(1, width)

    def forward(self, x):
        return x + self.f(x)


def test_sums_of_another_width_are_counted():
    parts = (
        nn.Linear(6, 8),
        Residual(8),
        Residual(8),
        nn.Linear(8, D),
        *(Residual(D) for _ in range(3)),
        nn.Linear(D, 3),
    )
    u = drawn(2, 5, 6)
    opened = ctrans.open_model(made(nn.Sequential, *parts), example=u, loss=F.mse_loss)
    assert len(opened.depth.sublayers) == 3
    assert "2 of its sums x + f(x)" in opened.described


class LongSkip(nn.Module):
    """`before` sums, three sums, a map of the states before and after these, and three more
    sums.
    """

    def __init__(self, before):
        super().__init__()
        self.embed, self.join = nn.Linear(6, D), nn.Linear(2 * D, D)
        self.first, self.down, self.up = (
            nn.ModuleList(Residual(D) for _ in range(count)) for count in (before, 3, 3)
        )

    def forward(self, u):
        x = self.embed(u)
        for each in self.first:
            x = each(x)
        first = x
        for each in self.down:
            x = each(x)
        x = self.join(torch.cat([first, x], -1))
        for each in self.up:
            x = each(x)
        return x.tanh()


class Masked(nn.Module):
    """Its mask has the length of the example."""

    def __init__(self):
        super().__init__()
        self.embed, self.parts = nn.Embedding(7, D), nn.ModuleList(maps(4, D))

    def forward(self, tokens, mask):
        x = self.embed(tokens)
        for each in self.parts:
            x = x + each(x * mask[..., None])
        return x @ self.embed.weight.T


def test_sums_beside_the_parts_are_counted():
    opened = ctrans.open_model(made(LongSkip, 0), example=drawn(2, 5, 6), loss=F.mse_loss)
    kinds = [part.kind for part in opened.depth.sublayers]
    assert kinds == ["part", "ffn", "ffn", "ffn"], "three of the six sums are in one part"
    assert "3 of its sums x + f(x)" in opened.described


def test_sums_inside_a_part_are_counted():
    opened = ctrans.open_model(made(LongSkip, 2), example=drawn(2, 5, 6), loss=F.mse_loss)
    kinds = [part.kind for part in opened.depth.sublayers]
    assert kinds == ["ffn", "ffn", "part", "ffn", "ffn", "ffn"], (
        "three of the eight are in one part"
    )
    assert "3 of its sums x + f(x)" in opened.described


def test_a_model_that_runs_at_its_examples_length_alone_is_screened():
    tokens = torch.arange(10).reshape(2, 5) % 7
    opened = ctrans.open_model(
        made(Masked), example={"tokens": tokens, "mask": torch.ones(2, 5)}, loss="mlm"
    )
    loss = F.cross_entropy(
        opened.head(opened.trajectory(tokens).x1).flatten(0, 1), tokens.flatten()
    )
    found = ctrans.screen(opened, tokens, tokens, "quick").steps["forward"].result
    assert (found.loss, found.guessing) == pytest.approx((float(loss), math.log(7)), rel=1e-6)


class InPlace(nn.Module):
    """As torchvision's ResNet adds."""

    def __init__(self):
        super().__init__()
        self.c1, self.c2 = nn.Conv2d(D, D, 3, padding=1), nn.Conv2d(D, D, 3, padding=1)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x):
        y = self.c2(self.relu(self.c1(x)))
        y += x
        return self.relu(y)


def test_sums_in_place_have_the_states_and_gradients_of_the_module():
    parts = (
        nn.Conv2d(3, D, 3, padding=1),
        InPlace(),
        InPlace(),
        InPlace(),
        nn.Flatten(),
        nn.Linear(D * 16, 5),
    )
    module, x, y = made(nn.Sequential, *parts), drawn(4, 3, 4, 4), torch.tensor([0, 1, 2, 3])
    opened = ctrans.open_model(module, example=x, loss=F.cross_entropy)
    kept = []
    handles = [
        part.register_forward_hook(lambda *seen: kept.append(seen[2]) or seen[2].retain_grad())
        for part in parts[:4]
    ]
    F.cross_entropy(module(x), y).backward()
    for handle in handles:
        handle.remove()
    states, (first, last) = (
        opened.trajectory(x).states,
        (each.flatten(2).mT for each in (kept[0], kept[-1])),
    )
    assert torch.allclose(states[0], first)
    assert torch.allclose(states[-1].relu(), last)  # the last state is the sum before its ReLU
    assert torch.allclose(ctrans.costate(opened, x, y).costates[0], kept[0].grad.flatten(2).mT)
    assert ctrans.diagnose(opened, x, y).readings


class Sliced(nn.Module):
    """The weights of three parts are one parameter; the map of the part `detached` has no
    gradients.
    """

    def __init__(self, detached=None):
        super().__init__()
        self.into, self.out, self.flat = (
            nn.Linear(6, D),
            nn.Linear(D, 3),
            nn.Parameter(torch.randn(3 * D * D) / 5),
        )
        self.detached = detached

    def forward(self, u):
        x, weights = self.into(u), self.flat.view(3, D, D)
        for i in range(3):
            y = torch.tanh(F.linear(F.layer_norm(x, (D,)), weights[i]))
            x = x + (y.detach() if i == self.detached else y)
        return self.out(x)


@pytest.mark.parametrize("detached", [None, 0])
def test_a_screen_reads_slices_of_one_weight_and_detached_maps(detached):
    module, u, y = made(Sliced, detached), drawn(2, 6, 6), drawn(2, 6, 3)
    opened = ctrans.open_model(module, example=u, loss=F.mse_loss)
    steps = ctrans.screen(opened, u, y, "quick").steps
    found = [part.total for part in steps["backward"].result.gradients.sublayers]
    (expected,) = torch.autograd.grad(F.mse_loss(module(u), y), module.flat)
    assert torch.allclose(torch.tensor(found).double(), expected.view(3, -1).norm(dim=1), rtol=1e-6)
    assert [k for k, r in enumerate(steps["updates"].result.updates["sgd"].values) if r == 0] == (
        [] if detached is None else [detached]
    )


@pytest.mark.slow
def test_a_loss_that_knows_the_size_of_its_batch_is_left_out_by_name():
    def of_two(output, targets):
        return F.ctc_loss(
            output.log_softmax(-1).transpose(0, 1),
            targets,
            torch.tensor([6, 5]),
            torch.tensor([2, 2]),
        )

    module, u, y = made(Plain), drawn(2, 6, 6), torch.tensor([[1, 2], [2, 1]])
    opened = ctrans.open_model(module, example=u, loss=of_two)
    expected = of_two(module(u), y)
    assert torch.allclose(opened(u, y)[1], expected)
    reasons = ctrans.screen(opened, u, y, "quick").missing.values()
    assert any(
        "loss=: of_two does not run on 1 sequences of 6 tokens (RuntimeError: input_lengths" in why
        for why in reasons
    )


class Multiplied(nn.Module):
    def __init__(self, first=False):
        super().__init__()
        self.into, self.f, self.first = nn.Linear(6, D), maps(3), first

    def forward(self, u, c):
        x = self.into(u)
        for f in self.f:
            x = x + f(x) * c
        return x.transpose(0, 1) if self.first else x


def test_a_mapping_of_inputs_is_opened_first():
    inputs = {"u": drawn(2, 5, 6), "c": drawn(2, 1, 1)}
    opened = ctrans.open_model(made(Multiplied), example=inputs, loss="mean")
    for analysed in (opened, made(Multiplied)):
        with pytest.raises(
            ConfigError, match=r"open_model.* then pass the tensor of its first argument alone"
        ):
            ctrans.diagnose(analysed, inputs)
    with pytest.raises(ConfigError, match="give the tensor that is the first argument"):
        opened.model.embed(inputs)
    assert ctrans.diagnose(opened, inputs["u"]).readings


def test_an_output_that_is_not_for_each_sequence_is_named():
    inputs = {"u": drawn(2, 5, 6), "c": drawn(2, 1, 1)}
    opened = ctrans.open_model(made(Multiplied, True), example=inputs, loss="mean")
    with pytest.raises(ConfigError, match=r"the output \(5, 2, 16\) .* is not for 2 sequences"):
        opened(inputs["u"])


def test_a_row_of_ids_is_told_how_to_be_a_batch():
    with pytest.raises(ConfigError, match=r"One sequence is a batch as example\[None\]") as raised:
        ctrans.open_model(made(Decoder, True), example=torch.arange(14))
    assert str(raised.value).count("is no batch of inputs") == 1
