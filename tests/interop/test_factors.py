"""The penalty needed by a foreign model is shown only if its blocks compute with their matrices what
was read, at any size of them.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ctrans.control.model_check import check_model
from ctrans.control.regularization import Regularization
from ctrans.interop import open_model

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
    """With biases of 0 it looks like a residual scale."""

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
    "long text": lambda: Block(attention=LongText()),
    "attention clipped": lambda: Block(attention=AttentionClipped(), ffn=large_ffn()),
    "output clipped": lambda: Block(ffn=OutputClipped()),
    "hidden clipped": lambda: Block(ffn=HiddenClipped()),
    "clipped far away": lambda: Block(ffn=ClippedFarAway()),
    "scaled input": ScaledInput,
    "hooked": hooked,
}


def checked(block, decay=20.0):
    torch.manual_seed(0)
    model = Model(block()).double()
    ids = torch.randint(VOCABULARY, (1, 9), generator=torch.Generator().manual_seed(1))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    found = check_model(
        open_model(model), ids[:, :-1], ids[:, 1:], Regularization(weight_decay=decay)
    )
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
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


def test_a_state_that_is_clipped_has_no_verdict():
    with pytest.raises(Exception, match="its output does not grow with its weights"):
        checked(StateClipped)


def test_a_learnt_scale_is_a_further_factor():
    assert checked(LearntScale).held == ("gains",)
