"""The penalty needed by a foreign model is shown only if its blocks compute with their matrices what
was read, at any size of them.
"""

import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ctrans.control.model_check import check_model
from ctrans.control.regularization import Regularization
from ctrans.interop import factors, open_model
from solvers import ConfigError

WIDTH, HEADS, VOCABULARY, TOKENS = 16, 2, 32, 8


class Attention(nn.Module):
    def __init__(self, linear=nn.Linear):
        super().__init__()
        self.q, self.k = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))
        self.v, self.o = (linear(WIDTH, WIDTH, bias=False) for _ in range(2))

    def forward(self, x):
        parts = (part(x).unflatten(-1, (HEADS, -1)).transpose(-2, -3) for part in (self.q, self.k))
        v = self.v(x).unflatten(-1, (HEADS, -1)).transpose(-2, -3)
        mixed = F.scaled_dot_product_attention(*parts, v, is_causal=True)
        return self.o(mixed.transpose(-2, -3).flatten(-2))


class FeedForward(nn.Module):
    def __init__(self, linear=nn.Linear, bias=False):
        super().__init__()
        self.up = linear(WIDTH, 4 * WIDTH, bias=bias)
        self.down = linear(4 * WIDTH, WIDTH, bias=bias)

    def forward(self, x):
        return self.down(F.relu(self.up(x)))


class Block(nn.Module):
    def __init__(self, attention=None, ffn=None):
        super().__init__()
        self.n1, self.n2 = (nn.LayerNorm(WIDTH, elementwise_affine=False) for _ in range(2))
        self.attention = attention or Attention()
        self.ffn = ffn or FeedForward()

    def forward(self, x):
        x = x + self.attention(self.n1(x))
        return x + self.ffn(self.n2(x))


class Model(nn.Module):
    def __init__(self, block):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList([block])
        self.norm = nn.LayerNorm(WIDTH, elementwise_affine=False)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids):
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Equalised(nn.Linear):
    def forward(self, x):
        return F.linear(x, 3 * self.weight)


class Clipped(nn.Linear):
    def forward(self, x):
        return F.linear(x, self.weight.clamp(-1, 1))


class Masked(nn.Linear):
    def forward(self, x):
        return F.linear(x, self.weight.tril())


class Spectral(nn.Linear):
    """Limited relative to its own size, which dense random matrices do not show."""

    def forward(self, x):
        size = self.weight.norm() / torch.linalg.matrix_norm(self.weight, 2)
        return F.linear(x, self.weight * (0.6 * size).clamp(max=1.0))


class LongText(Attention):
    """Other values for more tokens than the model was opened with."""

    def forward(self, x):
        factor = 3.0 if x.shape[1] == TOKENS else 1.0
        return factor * super().forward(x)


class AttentionClipped(Attention):
    def forward(self, x):
        return super().forward(x).clamp(-1e9, 1e9)


class Pruned(Masked):
    """The masked entries are 0 already."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.weight.data = self.weight.data.tril()


class LowRank(nn.Linear):
    def __init__(self, inputs, outputs, bias=False):
        nn.Module.__init__(self)
        self.in_features, self.out_features = inputs, outputs
        self.A = nn.Parameter(torch.randn(4, inputs) / inputs**0.5)
        self.B = nn.Parameter(torch.randn(outputs, 4) / 2)
        self.register_parameter("bias", None)

    @property
    def weight(self):
        return self.B @ self.A

    def forward(self, x):
        return F.linear(x, self.weight)


class OutputClipped(FeedForward):
    def forward(self, x):
        return super().forward(x).clamp(-50, 50)


class HiddenClipped(FeedForward):
    def forward(self, x):
        return self.down(F.relu(self.up(x)).clamp(max=1e4))


class Tanh(nn.Linear):
    def forward(self, x):
        return F.linear(x, 100 * torch.tanh(self.weight / 100))


class Normalised(nn.Linear):
    def forward(self, x):
        return F.linear(x, self.weight / self.weight.norm())


class ClippedFarAway(FeedForward):
    """At float16's largest number, with small weights."""

    def __init__(self):
        super().__init__()
        self.up.weight.data.mul_(0.01)

    def forward(self, x):
        return self.down(F.relu(self.up(x)).clamp(max=65504.0))


class StateClipped(Block):
    def forward(self, x):
        return super().forward(x).clamp(-50, 50)


class ScaledInput(Block):
    """A factor before the second map."""

    def __init__(self):
        super().__init__(ffn=FeedForward(bias=True))
        for part in (self.ffn.up, self.ffn.down):
            part.bias.data.zero_()

    def forward(self, x):
        x = x + 0.02 * self.attention(self.n1(x))
        return x + self.ffn(0.02 * self.n2(x))


class LearntScale(Block):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.3))

    def forward(self, x):
        x = x + self.scale * self.attention(self.n1(x))
        return x + self.scale * self.ffn(self.n2(x))


class ColumnScale(nn.Linear):
    """A scale of each output, 1 at present: a third factor."""

    def __init__(self, *sizes, **options):
        super().__init__(*sizes, **options)
        self.scale = nn.Parameter(torch.ones(self.out_features, 1))

    def forward(self, x):
        return F.linear(x, self.scale * self.weight)


class Mixed(FeedForward):
    """One more matrix, the identity at present."""

    def __init__(self):
        super().__init__()
        self.mix = nn.Parameter(torch.eye(WIDTH))

    def forward(self, x):
        return super().forward(x) @ self.mix


class Convolved(FeedForward):
    """A convolution of each unit over tokens, the identity at present."""

    def __init__(self):
        super().__init__()
        self.taps = nn.Parameter(torch.tensor([0.0, 0.0, 1.0]).repeat(4 * WIDTH, 1, 1))

    def forward(self, x):
        units = F.pad(self.up(x).mT, (2, 0))
        return self.down(F.relu(F.conv1d(units, self.taps, groups=4 * WIDTH).mT))


class TokenGain(FeedForward):
    """A gain for each token and channel, 1 at present."""

    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(TOKENS, WIDTH))

    def forward(self, x):
        return super().forward(x) * self.gain[: x.shape[-2]]


class PositionsBeforeTheNorm(Block):
    """A table of zeros, which is added before the norm."""

    def __init__(self):
        super().__init__()
        self.position_bias = nn.Parameter(torch.zeros(TOKENS, WIDTH))

    def forward(self, x):
        x = x + self.attention(self.n1(x + self.position_bias[: x.shape[-2]]))
        return x + self.ffn(self.n2(x))


class LinearAttention(Attention):
    """Rows that sum to 1 at present, and to 0 where all features of a query vanish."""

    def forward(self, x):
        parts = (part(x).unflatten(-1, (HEADS, -1)).transpose(-2, -3) for part in (self.q, self.k))
        q, k = (F.elu(part) + 1 for part in parts)
        v = self.v(x).unflatten(-1, (HEADS, -1)).transpose(-2, -3)
        rows = (q @ k.mT).tril()
        rows = rows / (rows.sum(-1, keepdim=True) + 1e-6)
        return self.o((rows @ v).transpose(-2, -3).flatten(-2)), rows


class OfRows(Block):
    def forward(self, x):
        x = x + self.attention(self.n1(x))[0]
        return x + self.ffn(self.n2(x))


class SkipAroundTheNorm(Block):
    """LN(f) + f/1000: the second grows without a limit."""

    def __init__(self):
        super().__init__()
        self.n3, self.n4 = (nn.LayerNorm(WIDTH, elementwise_affine=False) for _ in range(2))

    def forward(self, x):
        f = self.attention(self.n1(x))
        x = x + self.n3(f) + 1e-3 * f
        f = self.ffn(self.n2(x))
        return x + self.n4(f) + 1e-3 * f


class NaiveSoftmax(Attention):
    """exp(s)/sum without the largest score: nan at large weights, where nan is no agreement."""

    def forward(self, x):
        parts = (part(x).unflatten(-1, (HEADS, -1)).transpose(-2, -3) for part in (self.q, self.k))
        q, k = parts
        v = self.v(x).unflatten(-1, (HEADS, -1)).transpose(-2, -3)
        rows = (q @ k.mT).exp().tril()
        rows = rows / rows.sum(-1, keepdim=True)
        return self.o((rows @ v).transpose(-2, -3).flatten(-2)), rows


class KeysAreValues(Attention):
    """One linear map, called twice: its matrix is paid once."""

    def __init__(self):
        super().__init__()
        del self.k

    def forward(self, x):
        q, k, v = (
            part(x).unflatten(-1, (HEADS, -1)).transpose(-2, -3)
            for part in (self.q, self.v, self.v)
        )
        k = F.normalize(k, dim=-1)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(mixed.transpose(-2, -3).flatten(-2))


class TiedUnits(nn.Module):
    """The matrix of the units, and its transpose, in one expression."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH, bias=False)
        self.down = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x):
        return self.down(F.relu(self.up(x))) + 0 * F.linear(x, self.up.weight)


class Outer(Block):
    """What it adds goes through a map of the model, which it gets as an argument."""

    def forward(self, x, outer):
        x = x + outer(self.attention(self.n1(x)))
        return x + outer(self.ffn(self.n2(x)))


class Hidden(Outer):
    """The same, in a list that modules do not search."""

    def __init__(self, outer):
        super().__init__()
        self.kept = [outer]

    def forward(self, x):
        return super().forward(x, self.kept[0])


class Slipped(Outer):
    """The same, as an attribute that modules do not see."""

    def __init__(self, outer):
        super().__init__()
        object.__setattr__(self, "outer", outer)

    def forward(self, x):
        return super().forward(x, self.outer)


class OfModel(Model):
    """A model whose blocks get what it holds: a map, its matrix, or something computed from it."""

    def __init__(self, given):
        super().__init__(None)
        self.outer = nn.Linear(WIDTH, WIDTH, bias=False)
        nn.init.eye_(self.outer.weight)
        self.gain = nn.Parameter(torch.ones(1))
        self.outer.requires_grad_(given != "a frozen map")
        if given == "a list":
            self.blocks = nn.ModuleList([Hidden(self.outer)])
        elif given == "an attribute":
            self.blocks = nn.ModuleList([Slipped(self.outer)])
        else:
            self.blocks = nn.ModuleList([Outer()])
        self.given = given

    def forward(self, ids):
        x = self.embedding(ids)
        (block,) = self.blocks
        weight = self.outer.weight
        if self.given in ("a list", "an attribute"):
            x = block(x)
        elif self.given == "a matrix":
            x = block(x, partial(F.linear, weight=weight))
        elif self.given == "computed":
            x = block(x, partial(F.linear, weight=1.0 * weight))
        elif self.given == "a gain":
            x = block(x, lambda z: self.gain * z)
        else:
            x = block(x, self.outer)
        return self.head(self.norm(x))


class NormOnlyNearby(nn.Module):
    """RMSNorm up to a size, and linear beyond."""

    def __init__(self, limit):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))
        self.limit = limit

    def forward(self, x):
        scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)
        return x * scale.clamp(min=1 / self.limit) * self.weight


class OutputNormNearby(Block):
    def __init__(self, limit, more=False):
        super().__init__()
        self.n1, self.n2 = (NormOnlyNearby(limit) for _ in range(2))
        self.more = nn.Parameter(torch.zeros(2, 3)) if more else None

    def forward(self, x):
        x = x + self.n1(self.attention(x))
        return x + self.n2(self.ffn(x))


class TorchAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.all = nn.MultiheadAttention(WIDTH, HEADS, bias=False, batch_first=True)

    def forward(self, x):
        mask = torch.ones(x.shape[-2], x.shape[-2], dtype=torch.bool).triu(1)
        return self.all(x, x, x, attn_mask=mask, need_weights=False)[0]


class TanhUnits(FeedForward):
    """Offsets of bounded units are harmless, however large."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(WIDTH, 4 * WIDTH)

    def forward(self, x):
        return self.down(torch.tanh(self.up(x)))


def large_ffn():
    ffn = FeedForward()
    for part in (ffn.up, ffn.down):
        part.weight.data.mul_(30)
    return ffn


def hooked():
    block = Block()
    block.ffn.up.register_forward_hook(lambda module, args, output: output.clamp(-300, 300))
    return block


UNLIKE = {
    **{
        f"{kind.__name__} {where}": lambda kind=kind, where=where: (
            Block(attention=Attention(kind)) if where == "values" else Block(ffn=FeedForward(kind))
        )
        for kind in (Equalised, Clipped, Masked, Spectral, Pruned, LowRank)
        for where in ("values", "units")
    },
    "attention clipped": lambda: Block(attention=AttentionClipped(), ffn=large_ffn()),
    "output clipped": lambda: Block(ffn=OutputClipped()),
    "hidden clipped": lambda: Block(ffn=HiddenClipped()),
    "clipped far away": lambda: Block(ffn=ClippedFarAway()),
    "hooked": hooked,
    "scale by output": lambda: Block(ffn=FeedForward(ColumnScale)),
    "a convolution": lambda: Block(ffn=Convolved()),
    "a gain by token": lambda: Block(ffn=TokenGain()),
    "positions before the norm": PositionsBeforeTheNorm,
    "linear attention": lambda: OfRows(attention=LinearAttention()),
    "keys that are values": lambda: Block(attention=KeysAreValues()),
    "tied units": lambda: Block(ffn=TiedUnits()),
    "naive softmax": lambda: OfRows(attention=NaiveSoftmax()),
}


def checked(block, decay=20.0):
    torch.manual_seed(0)
    model = block()
    if not isinstance(model, Model):
        model = Model(model)
    model = model.double()
    trained = [parameter.requires_grad for parameter in model.parameters()]
    ids = torch.randint(VOCABULARY, (1, 9), generator=torch.Generator().manual_seed(1))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    found = check_model(
        open_model(model), ids[:, :-1], ids[:, 1:], Regularization(weight_decay=decay)
    )
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert trained == [parameter.requires_grad for parameter in model.parameters()]
    return found


def test_a_plain_model_has_a_penalty():
    found = checked(Block)
    assert 0 < found.training_threshold.lower <= found.training_threshold.upper < 20
    assert (found.verdict, found.held) == ("well-posed, the rest fixed", ())


@pytest.mark.parametrize("name", UNLIKE)
def test_a_model_that_computes_with_other_weights_has_none(name):
    found = checked(UNLIKE[name])
    assert found.training_threshold is None
    assert found.verdict == "open"
    assert found.no_threshold


def test_a_map_of_three_matrices_has_no_number():
    found = checked(lambda: Block(ffn=Mixed()))
    assert found.training_threshold.upper == math.inf
    assert found.verdict == "open"
    assert list(found.missing) == ["segment 1 (ffn)"]


def test_other_values_for_a_longer_text_are_refused():
    with pytest.raises(ConfigError, match="8 tokens otherwise than for its example"):
        checked(lambda: Block(attention=LongText()))


class NormOfGains(ScaledInput):
    """The same numbers as gains of its norm."""

    def __init__(self):
        super().__init__()
        self.n2 = nn.LayerNorm(WIDTH, bias=False)
        self.n2.weight.data.fill_(0.02)

    def forward(self, x):
        x = x + 0.02 * self.attention(self.n1(x))
        return x + self.ffn(self.n2(x))


def test_a_factor_before_a_map_is_that_of_its_norm():
    """With biases of 0 it looks like a residual scale, and is none."""
    scaled = checked(ScaledInput)
    gained = checked(NormOfGains)
    assert scaled.held == ("biases",)
    assert gained.held == ("biases", "gains")
    for end in ("lower", "upper"):
        found, expected = (getattr(each.training_threshold, end) for each in (scaled, gained))
        assert found == pytest.approx(expected, rel=1e-5)


class TwoClipped(Model):
    def __init__(self):
        super().__init__(StateClipped())
        self.blocks.append(StateClipped())


def test_a_state_that_is_clipped_is_a_part_of_its_own():
    """It bounds the maps before it; one behind the last state is in the head."""
    found = checked(TwoClipped)
    assert found.missing["segment 1 (ffn)"] == "its output does not grow with its weights"
    assert "no single sum" in found.missing["segment 2 (part)"]
    assert (found.verdict, found.training_threshold) == ("open", None)


GIVEN = ["a map", "a frozen map", "a matrix", "computed", "a list", "an attribute"]


@pytest.mark.parametrize("given", GIVEN)
def test_a_matrix_outside_of_a_block_leaves_no_number(given):
    """At 1 it is harmless; at R it makes a third factor of R."""
    found = checked(lambda: OfModel(given))
    assert found.training_threshold is None
    assert found.verdict == "open"
    assert "several segments use the same weights" in found.no_threshold


def test_a_gain_outside_of_a_block_is_held_fixed():
    found = checked(lambda: OfModel("a gain"))
    assert (found.verdict, found.held) == ("well-posed, the rest fixed", ("gains",))


@pytest.mark.parametrize("decay", [None, 20.0])
@pytest.mark.parametrize("kind", [Clipped, Tanh, Normalised])
def test_maps_that_stay_bounded_have_no_infinite_h(kind, decay):
    """|W| <= 100 by entry: the output is bounded whatever the weights."""

    class Bounded(Attention):
        def __init__(self):
            super().__init__(kind)

    with pytest.raises(ConfigError, match="its output does not grow with its weights"):
        checked(lambda: Block(attention=Bounded(), ffn=FeedForward(kind)), decay)


@pytest.mark.parametrize("kind", [Clipped, Tanh, Normalised])
def test_growth_is_judged_by_segment(kind):
    """The other sublayer of the block grows."""
    found = checked(lambda: Block(ffn=FeedForward(kind)), decay=None)
    assert list(found.missing) == ["segment 1 (ffn)"]
    assert [segment.verdict for segment in found.segments] == ["degenerate"]
    assert found.verdict == "degenerate"
    only = checked(lambda: Block(attention=Attention(kind)), decay=None)
    assert list(only.missing) == ["segment 0 (attention)"]


@pytest.mark.parametrize("kind", [Equalised, Masked, Pruned])
def test_other_weights_that_grow_leave_h_infinite(kind):
    found = checked(lambda: Block(ffn=FeedForward(kind)), decay=None)
    assert (found.verdict, found.missing) == ("degenerate", {})


@pytest.mark.parametrize("more", [False, True])
@pytest.mark.parametrize("limit", [1e3, 1e5, 1e8, 1e12])
def test_a_norm_that_bounds_only_nearby_leaves_no_verdict(limit, more):
    """With `more`, the block has a further matrix, for which the large weights need not be tried."""
    with pytest.raises(ConfigError, match="its norm does not bound large inputs"):
        checked(lambda: OutputNormNearby(limit, more), decay=None)


def test_a_learnt_scale_is_a_further_factor():
    assert checked(LearntScale).held == ("gains",)


def test_a_block_whose_output_norm_is_passed_by_has_no_verdict():
    """At the present weights it looks well-posed: f/1000 shows at large ones."""
    with pytest.raises(ConfigError, match="a map in parallel has a norm of its output"):
        checked(SkipAroundTheNorm)


def test_nan_agrees_with_nothing():
    nan = torch.full((2, 3), torch.nan)
    assert not factors._agree(nan, nan)


@pytest.mark.parametrize("kind", ["attention of torch", "tanh units"])
def test_what_is_no_further_factor_is_not_held_fixed(kind):
    def block():
        if kind == "tanh units":
            return Block(ffn=TanhUnits())
        return Block(attention=TorchAttention())

    found = checked(block)
    assert (found.verdict, found.held) == ("well-posed, the rest fixed", ())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_norms_without_parameters_have_the_dtype_of_the_model(dtype):
    class Peri(SkipAroundTheNorm):
        def forward(self, x):
            x = x + self.n3(self.attention(self.n1(x)))
            return x + self.n4(self.ffn(self.n2(x)))

    torch.manual_seed(0)
    opened = open_model(Model(Peri()), dtype)
    ids = torch.randint(VOCABULARY, (1, 9), generator=torch.Generator().manual_seed(1))
    assert check_model(opened, ids[:, :-1], ids[:, 1:]).verdict != "degenerate"
