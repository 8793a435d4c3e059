"""Modules whose states are not what their blocks make of a state alone: never another state than
their own, whatever is given.
"""

import pytest
import torch
from torch import nn

import ctrans
from solvers import ConfigError
from tests.interop.plain_modules import WIDTH, LanguageModel, PreBlock, SoftmaxAttention, ids

PADDING = 3


class MasksPadding(nn.Module):
    """An encoder that makes the mask of its padding from the tokens."""

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.mix, self.norm = SoftmaxAttention(), nn.LayerNorm(WIDTH)
            self.mlp = nn.Sequential(nn.Linear(WIDTH, 48), nn.GELU(), nn.Linear(48, WIDTH))

        def forward(self, x, mask):
            x = x + self.mix(x, mask)
            return x + self.mlp(self.norm(x))

    def __init__(self):
        super().__init__()
        self.table, self.out = nn.Embedding(31, WIDTH, padding_idx=PADDING), nn.Linear(WIDTH, 31)
        self.blocks = nn.ModuleList([self.Block(), self.Block()])

    def states(self, idx):
        mask = torch.zeros(idx.shape).masked_fill(idx == PADDING, -torch.inf)[:, None, None, :]
        states = [self.table(idx)]
        for block in self.blocks:
            states.append(block(states[-1], mask))
        return states

    def forward(self, idx):
        return self.out(self.states(idx)[-1])


class HalvedBetween(LanguageModel):
    """It changes the state between its blocks, in its place."""

    shift = 0.0

    def forward(self, idx):
        x = self.tok(idx) + self.pos(torch.arange(idx.shape[1]))
        for block in self.stack:
            x = block(x).mul_(0.5)
            if self.shift:
                x = x.add_(self.shift * self.pos.weight[0])
        return self.out(self.ln(x))


class MovedBetween(HalvedBetween):
    shift = 3.0


class Limited(PreBlock):
    """It limits large states: a small one does not show that."""

    def forward(self, x):
        return super().forward(x).clamp(-4, 4)


def of_limited_blocks():
    module = LanguageModel()
    module.stack = nn.ModuleList([Limited(1.0), Limited(1.0)])
    return module


def test_a_mask_that_is_made_of_the_tokens_is_known_for_inputs_like_the_example():
    torch.manual_seed(0)
    module, tokens = MasksPadding().eval(), ids(tokens=5).clamp(4)
    opened = ctrans.open_model(module)
    states = opened.trajectory(tokens).states[::2]
    assert all(
        torch.allclose(found, own, atol=1e-6)
        for found, own in zip(states, module.states(tokens), strict=True)
    )
    assert opened.longest(40) == 40  # what it is tried on has no padding
    padded = tokens.clone()
    padded[0, 3:] = PADDING
    for act in (opened.embed, opened, lambda x: ctrans.diagnose(opened, x)):
        with pytest.raises(
            ConfigError,
            match="MasksPadding does not see these inputs through the states",
        ):
            act(padded)
    again = ctrans.open_model(module, example=padded)
    assert again.config.placement == "none/pre"
    with torch.no_grad():
        assert torch.allclose(again.head(again.trajectory(padded).x1), module(padded), atol=1e-6)


@pytest.mark.cases(1)
def test_a_factor_between_blocks_is_in_the_sum_before_it():
    torch.manual_seed(0)
    module = HalvedBetween().eval()
    opened = ctrans.open_model(module, head=lambda x: module.out(module.ln(x)))
    assert "some of its sums are a x + f(x), of which a is 0.5" in opened.described
    tokens = ids(tokens=5)
    with torch.no_grad():
        x = module.tok(tokens) + module.pos(torch.arange(5))
        own = [x]
        for block in module.stack:
            own.append(0.5 * block(own[-1]))
        states = opened.trajectory(tokens).states
        torch.testing.assert_close(list(states[:: opened.depth.per_block]), own)
        torch.testing.assert_close(opened.head(states[-1]), module(tokens))


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (MovedBetween, "it multiplies the state by numbers"),
        (of_limited_blocks, "it is no single sum"),
    ],
)
def test_a_head_without_what_changes_the_last_state_is_refused(make, said):
    """At the state of the example it may make the module's output."""
    torch.manual_seed(0)
    module = make().eval()
    with torch.no_grad():
        module.tok.weight *= 9
    with pytest.raises(ConfigError, match="head= makes another output"):
        ctrans.open_model(module, head=lambda x: module.out(module.ln(x)))
    opened = ctrans.open_model(module)
    assert said in opened.described
    tokens = ids(tokens=5)
    with torch.no_grad():
        states = opened.trajectory(tokens).states
        torch.testing.assert_close(opened.head(states[-1]), module(tokens))
