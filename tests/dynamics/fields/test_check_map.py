"""Maps that a stranger gets wrong: each is named with what it did and the fix, by `check_map` or
where it is used.
"""

import pytest
import torch
from torch import nn

from ctrans import GPT, GPTConfig
from ctrans.control.model_check import check_model
from ctrans.dynamics.fields import (
    ATTENTIONS,
    FFNS,
    Attention,
    FeedForward,
    Matrix,
    TokenBound,
    check_map,
    check_shape,
    spectral_norm,
)
from ctrans.dynamics.fields.around import AroundMap
from ctrans.dynamics.sublayer import Sublayer
from ctrans.examine.screening.screen import screen
from solvers import ConfigError
from tests.helpers import learned, tokens

WIDTH = 8


class Linear(nn.Module):
    """f(x) = W x: right as it stands; each stranger below breaks one thing."""

    def __init__(self, settings=None):
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH, bias=False)
        nn.init.orthogonal_(self.up.weight)

    def forward(self, x):
        return self.up(x)

    def matrices(self):
        yield Matrix(self.up.weight, "up")


class OneToken(Linear):
    def forward(self, x):
        return self.up(x)[..., :1, :]  # would be added to every token


class Wide(Linear):
    def forward(self, x):
        return torch.cat([self.up(x)] * 2, -1)


class WithRows(Linear):
    def forward(self, x):
        return self.up(x), x  # as a library's attention that gives its rows too


class Dropping(Linear):
    def forward(self, x):
        return nn.functional.dropout(self.up(x), 0.5)


class OverBatch(Linear):
    def forward(self, x):
        return self.up(x - x.mean(0))


class Mixing(Linear):
    def forward(self, x):
        return self.up(x.mean(-2, keepdim=True).expand_as(x))


class WrongFeatures(Linear):
    output_projection = property(lambda self: self.up)

    def pre_projection(self, x):
        return 2 * x


class MadeMatrix(Linear):
    def matrices(self):
        yield Matrix(self.up.weight * 1.0, "up")


class SmallBound(Linear):
    def bound(self):
        return TokenBound(spectral_norm(self.up.weight) / 2, 0.0)


class SmallLipschitz(Linear):
    def lipschitz(self, radius=float("inf"), *, printed=False):
        return spectral_norm(self.up.weight) / 2


class UnevenRows(Linear):
    heads, temperature, normalised_scores = 1, 1.0, False

    def probabilities(self, x):
        return torch.ones(*x.shape[:-2], 1, x.shape[-2], x.shape[-2]).to(x)

    def head_matrices(self):
        yield from ()


class RowsOfOthers(UnevenRows):
    """It shows its heads, and rows of more tokens than it reads."""

    def probabilities(self, x):
        return torch.full((*x.shape[:-2], 1, x.shape[-2], 8), 1 / 8).to(x)


BROKEN = [
    (
        OneToken,
        (
            r"OneToken gave \(2, 1, 8\) for states \(2, 5, 8\): a map returns one tensor of its"
            r" input's shape"
        ),
    ),
    (Wide, r"Wide gave \(2, 5, 16\) for states \(2, 5, 8\)"),
    (WithRows, "WithRows gave a tuple for states"),
    (
        Dropping,
        "Dropping gave two values for the same states, so it draws at random: leave dropout out",
    ),
    (OverBatch, "OverBatch made one sequence depend on another"),
    (
        Mixing,
        (
            "Mixing mixes tokens: a map of an FFN is taken to act on each token alone: give it"
            " `mixes_tokens = True`"
        ),
    ),
    (WrongFeatures, r"WrongFeatures is not output_projection\(pre_projection\(x\)\)"),
    (MadeMatrix, "MadeMatrix yields a matrix of role 'up' that is none of its parameters"),
    (SmallBound, "SmallBound gave a token of length .* above its bound"),
    (SmallLipschitz, "SmallLipschitz moved a token by .* above its Lipschitz constant"),
    (UnevenRows, "UnevenRows gave probabilities of shape"),
    (RowsOfOthers, "RowsOfOthers gave probabilities of shape"),
]


@pytest.mark.parametrize(
    ("broken", "words"), BROKEN, ids=lambda value: getattr(value, "__name__", "")
)
def test_a_broken_map_is_named_with_what_it_did(broken, words):
    check_map(Linear().double(), "ffn", WIDTH)
    with pytest.raises(ConfigError, match=words):
        check_map(broken().double(), "ffn", WIDTH)


def test_our_own_maps_are_what_they_say():
    for dtype in (torch.float32, torch.float64):
        for causal in (True, False):
            check_map(learned(Attention(WIDTH, 2, causal=causal).to(dtype)), "attention", WIDTH)
        for activation in ("gelu", "relu", "tanh", "silu"):
            check_map(
                learned(FeedForward(WIDTH, 12, activation=activation).to(dtype)), "ffn", WIDTH
            )
    for kind, table in (("attention", ATTENTIONS), ("ffn", FFNS)):
        for make in table.values():
            check_map(make(GPTConfig(width=WIDTH, heads=2)), kind, WIDTH)


@pytest.mark.parametrize(
    ("broken", "words"), BROKEN[:3], ids=lambda value: getattr(value, "__name__", "")
)
def test_a_wrong_shape_is_named_wherever_the_map_is_evaluated(broken, words, monkeypatch):
    """Torch would say nothing of one token, which it adds to all, and speak of matrices of the wide
    one.
    """
    monkeypatch.setitem(ATTENTIONS, "broken", broken)
    model = GPT(
        GPTConfig(
            vocab_size=11,
            context=8,
            depth=1,
            width=WIDTH,
            heads=2,
            placement="pre",
            attention="broken",
        )
    )
    text = tokens(2, 5)
    for use in (
        model,
        model.trajectory,
        lambda ids: model.trajectory(ids, method="rk4", gradient="adjoint"),
    ):
        with pytest.raises(ConfigError, match=f"the attention map {words}"):
            use(text)
    with pytest.raises(ConfigError, match=words):
        Sublayer(AroundThis(broken()), "attention")(torch.zeros(2, 5, 8))


class AroundThis(AroundMap):
    def forward(self, x):
        return self.field(x)


@pytest.mark.slow
def test_a_map_without_a_last_layer_is_looked_at_as_far_as_it_goes(monkeypatch):
    monkeypatch.setitem(FFNS, "linear", Linear)
    model = GPT(
        GPTConfig(
            vocab_size=11, context=8, depth=1, width=WIDTH, heads=2, placement="pre", ffn="linear"
        )
    ).double()
    text = tokens(2, 6)
    findings = screen(model.requires_grad_(False), text[:, :-1], text[:, 1:], "quick").steps
    assert findings["backward"].result is not None
    words = "does not name its last linear map: give it `pre_projection(x)` and `output_projection`"
    assert words in findings["well-posedness"].missing["segment 1 (ffn)"]
    check = check_model(model, text[:, :-1], text[:, 1:], thorough=True)
    assert [segment.kind for segment in check.segments] == ["attention"]
    assert words in check.missing["segment 1 (ffn)"]


def test_a_map_that_does_not_show_its_matrices_cannot_be_drawn_and_says_so(monkeypatch):
    class Silent(nn.Linear):
        def __init__(self, settings):
            super().__init__(settings.width, settings.width)

    monkeypatch.setitem(FFNS, "silent", Silent)
    with pytest.raises(
        ConfigError, match=r"cannot initialise a field of type Silent: .* `matrices\(\)`"
    ):
        GPT(GPTConfig(width=WIDTH, heads=2, ffn="silent"))


def test_a_nested_tensor_is_no_value_of_a_map():
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    with pytest.raises(ConfigError, match="gave a tensor of shape"):
        check_shape(nn.Identity(), "ffn", torch.ones(3, 8), nested)
