"""Blocks that tempt the reading into something false: what is no norm, a window that hides the last
token, a number that a function makes; and code that changes its input, refuses what it was not
written for, or has no weights yet.
"""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import ctrans
from solvers import ConfigError
from tests.interop.unusual_modules import HEADS, VOCABULARY, WIDTH, Block, TiedGPT

TOKENS = torch.randint(0, VOCABULARY, (2, 9), generator=torch.Generator().manual_seed(1))


class Elementwise(nn.Module):
    """0.3 w * x + b, of which every size of x is scaled alike."""

    def __init__(self):
        super().__init__()
        self.weight, self.bias = (
            nn.Parameter(torch.rand(WIDTH) + 0.5),
            nn.Parameter(torch.randn(WIDTH)),
        )

    def forward(self, x):
        return 0.3 * self.weight * x + self.bias


class ChannelsFirst(nn.BatchNorm1d):
    """An elementwise map at evaluation that knows three axes alone."""

    def forward(self, x):
        return super().forward(x.transpose(1, 2)).transpose(1, 2)


class Without(Block):
    """X + f(a(X)), a elementwise."""

    def __init__(self, kind):
        super().__init__()
        self.n1, self.n2 = kind(), kind()


class Window(nn.Module):
    """Each token reads those beside it, on either side."""

    def __init__(self):
        super().__init__()
        self.qkv, self.o = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x, bias=None):
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        place = torch.arange(x.shape[1])
        near = (place.unsqueeze(-1) - place).abs() <= 1
        return self.o(
            F.scaled_dot_product_attention(q, k, v, attn_mask=near).transpose(1, 2).flatten(-2)
        )


class Convolution(nn.Module):
    """A causal convolution of tokens, its module given channels first."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Conv1d(WIDTH, WIDTH, 3, padding=2)

    def forward(self, x, bias=None):
        return self.inner(x.transpose(1, 2))[..., :-2].transpose(1, 2)


class Mixing(Block):
    def __init__(self, kind):
        super().__init__()
        self.mix = kind()


class Gated(Block):
    """X + sigmoid(g) f(N X)."""

    def __init__(self):
        super().__init__()
        self.g = nn.Parameter(torch.tensor(0.3))

    def forward(self, x, bias=None):
        x = x + self.g.sigmoid() * self.mix(self.n1(x), bias)
        return x + self.g.sigmoid() * self.think(self.n2(x))


class InPlace(Block):
    """The state is changed where it is."""

    def forward(self, x, bias=None):
        x += self.mix(self.n1(x), bias)
        x += self.think(self.n2(x))
        return x


class ReZero(Block):
    """X + alpha f(X), alpha = 0 at first."""

    def __init__(self):
        super().__init__()
        self.alpha = nn.Parameter(torch.zeros(1))

    def forward(self, x, bias=None):
        x = x + self.alpha * self.mix(x, bias)
        return x + self.alpha * self.think(x)


class Lazy(Block):
    def __init__(self):
        super().__init__()
        self.think = nn.Sequential(nn.LazyLinear(32), nn.GELU(), nn.LazyLinear(WIDTH))


def made(block):
    torch.manual_seed(0)
    return TiedGPT(block).double()


def states(model, tokens):
    seen = []
    handles = [
        block.register_forward_hook(lambda _, __, y: seen.append(y.clone()))
        for block in model.blocks
    ]
    with torch.no_grad():
        output = model(tokens)
    for handle in handles:
        handle.remove()
    return seen, output


def check_states(opened, model):
    own, output = states(model, TOKENS)
    solution = opened.trajectory(TOKENS)
    for mine, theirs in zip(solution.states[2::2], own, strict=True):
        assert torch.allclose(mine, theirs, rtol=1e-12, atol=1e-13)
    assert torch.allclose(opened.head(solution.x1), output, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize(
    "kind", [Elementwise, lambda: ChannelsFirst(WIDTH)], ids=["scale", "batch norm"]
)
def test_an_elementwise_map_is_no_norm(kind):
    model = made(lambda: Without(kind)).eval()
    opened = ctrans.open_model(model)
    assert opened.config.placement == "none"
    assert ("batch norms" in opened.described) == (kind is not Elementwise)
    check_states(opened, model)


def test_an_elementwise_map_that_is_named_belongs_to_its_map():
    model = made(lambda: Without(Elementwise))
    opened = ctrans.open_model(model, attention=("n1", "mix"), ffn=("n2", "think"))
    assert opened.config.placement == "none"
    check_states(opened, model)


@pytest.mark.cases(1)
@pytest.mark.parametrize(("kind", "causal"), [(Window, False), (Convolution, True)])
def test_what_tokens_read_is_seen_of_all_others(kind, causal):
    model = made(lambda: Mixing(kind))
    opened = ctrans.open_model(model)
    assert (opened.causal, opened.loss) == (causal, "next" if causal else "mlm")
    check_states(opened, model)


def test_a_length_that_a_function_makes_is_as_exact_as_the_fit():
    model = made(Gated)
    opened = ctrans.open_model(model)
    gate = 1 / (1 + math.exp(-float(model.blocks[0].g.detach())))
    assert all(math.isclose(length, gate, rel_tol=1e-13) for length in opened.depth.lengths)
    check_states(opened, model)


def test_a_block_may_add_to_its_input_in_its_place():
    model = made(InPlace)
    check_states(ctrans.open_model(model), model)


def test_a_number_of_0_before_every_map_is_named():
    opened = ctrans.open_model(made(ReZero))
    assert opened.config.placement == "none"
    assert not any(part(opened.embed(TOKENS)).any() for part in opened.depth.sublayers)


def test_weights_that_are_not_there_yet_are_named():
    with pytest.raises(ConfigError, match=r"blocks\.0\.think\.0 is lazy and has no weights yet"):
        ctrans.open_model(TiedGPT(Lazy))


class OwnError(Exception):
    pass


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    "error",
    [AssertionError("eight tokens"), ZeroDivisionError("eight tokens"), OwnError("eight tokens")],
)
def test_whatever_a_module_raises_on_its_example_is_a_line(error):
    class Particular(TiedGPT):
        def forward(self, idx):
            if idx.shape[1] != 8:
                raise error
            return super().forward(idx)

    torch.manual_seed(0)
    with pytest.raises(
        ConfigError,
        match=(
            r"example=: Particular does not run on a tensor \(2, 6\) of int64"
            rf" \({type(error).__name__}"
        ),
    ):
        ctrans.open_model(Particular())
    assert ctrans.open_model(Particular(), example=TOKENS[:, :8]).depth.blocks == 3
