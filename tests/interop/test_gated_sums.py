"""Sublayers that a gate mixes with the state are parts of the depth, wherever they stand in it."""

import pytest
import torch
import torch.nn.functional as F

import ctrans
from tests.interop.test_read_by_operations import (
    LAYERS,
    TOKENS,
    WIDTH,
    MethodOfTheBlock,
    made,
)


class GatedFeedForward(MethodOfTheBlock):
    """y = (1 - q) x + q f(x), with a gate q that the state sets."""

    def mixed(self, i, x, f):
        q = torch.sigmoid(x @ self.qkv[i].weight[:1].T)
        return (1 - q) * x + q * f

    def after_attention(self, i, x):
        return x + self.attend(i, self.n1[i](x))

    def of_ffn(self, i, x):
        return self.down[i](F.gelu(self.up[i](self.n2[i](x))))

    def layer(self, i, x):
        x = self.after_attention(i, x)
        return self.mixed(i, x, self.of_ffn(i, x))


class Interpolated(GatedFeedForward):
    def mixed(self, i, x, f):
        return torch.lerp(x, f, torch.sigmoid(x @ self.qkv[i].weight[:1].T))


class GatedAttention(GatedFeedForward):
    """The first sum of the model is gated."""

    def after_attention(self, i, x):
        return self.mixed(i, x, self.attend(i, self.n1[i](x)))

    def layer(self, i, x):
        x = self.after_attention(i, x)
        return x + self.of_ffn(i, x)


@pytest.mark.parametrize("kind", [GatedFeedForward, Interpolated, GatedAttention])
def test_the_first_and_the_last_gated_sum_are_in_the_depth(kind):
    model = made(kind)
    opened = ctrans.open_model(model, example=TOKENS)
    states = opened.trajectory(TOKENS).states
    wanted = model.states(TOKENS)
    assert len(states) == 2 * LAYERS + 1
    for state, own in zip(states[::2], wanted, strict=True):
        assert torch.allclose(state, own, atol=1e-6)


def test_a_norm_behind_the_last_sum_is_no_gated_sum():
    """It multiplies the state by a function of it, too."""

    class NormByHand(MethodOfTheBlock):
        def forward(self, ids):
            x = self.states(ids)[-1]
            mean = x.mean(-1, keepdim=True)
            deviation = (x - mean).square().mean(-1, keepdim=True).add(1e-5).sqrt()
            return (
                (x - mean) / deviation * self.final.weight + self.final.bias
            ) @ self.table.weight.T

    model = made(NormByHand)
    states = ctrans.open_model(model, example=TOKENS).trajectory(TOKENS).states
    assert torch.allclose(states[-1], model.states(TOKENS)[-1], atol=1e-6)
    assert len(states) == 2 * LAYERS + 1


def unit(x):
    return x / x.norm(dim=-1, keepdim=True)


class OnTheSphere(MethodOfTheBlock):
    """y = unit(a + r (unit(f(x)) - a)), a = unit(x), with a rate r for each channel, as nGPT."""

    def moved(self, i, x, f):
        rate = (0.1 * self.n1[i].weight).abs()
        a = unit(x)
        return unit(a + rate * (unit(f) - a))

    def layer(self, i, x):
        x = self.moved(i, x, self.attend(i, x))
        return self.moved(i, x, self.down[i](F.gelu(self.up[i](x))))


class GatedAlone(GatedFeedForward):
    """All sums are gated, and the model ends in a norm."""

    def after_attention(self, i, x):
        return self.mixed(i, x, self.attend(i, self.n1[i](x)))


@pytest.mark.parametrize("kind", [OnTheSphere, GatedAlone])
def test_a_stream_of_gated_sums_alone_is_read_without_the_models_last_norm(kind):
    model = made(kind)
    opened = ctrans.open_model(model, example=TOKENS)
    states = opened.trajectory(TOKENS).states
    wanted = model.states(TOKENS)
    assert len(states) == 2 * LAYERS + 1
    for state, own in zip(states[::2], wanted, strict=True):
        assert torch.allclose(state, own, atol=1e-6)
    assert torch.allclose(opened.head(states[-1]), model(TOKENS), atol=1e-5)
    assert "gated sum" in opened.described


class Recurrent(MethodOfTheBlock):
    """A gated recurrence over tokens, whose states follow one another in time, not in depth."""

    def forward(self, ids):
        x = F.embedding(ids, self.table.weight)
        h = torch.zeros_like(x[:, 0])
        for t in range(x.shape[1]):
            q = torch.sigmoid(self.down[0](self.up[0](x[:, t] + h)))
            h = (1 - q) * h + q * torch.tanh(self.down[1](self.up[1](h)))
        return h @ self.table.weight.T


def test_a_recurrence_over_tokens_is_no_depth():
    with pytest.raises(ctrans.ConfigError):
        ctrans.open_model(made(Recurrent), example=TOKENS)


class GateOfBoth(GatedAttention):
    """The gate reads the branch, too, as a highway's may."""

    def mixed(self, i, x, f):
        q = torch.sigmoid(x @ self.qkv[i].weight[:WIDTH].T + f @ self.qkv[i].weight[WIDTH:][:WIDTH])
        return q * f + (1 - q) * x


def test_the_state_of_a_gate_of_both_is_the_streams():
    model = made(GateOfBoth)
    states = ctrans.open_model(model, example=TOKENS).trajectory(TOKENS).states
    assert len(states) == 2 * LAYERS + 1
    for state, own in zip(states[::2], model.states(TOKENS), strict=True):
        assert torch.allclose(state, own, atol=1e-6)


class BehindBatchNorms(MethodOfTheBlock):
    """Post-LN's places with batch norms, which act on (batch, width, tokens)."""

    def make(self):
        super().make()
        self.batch_norms = torch.nn.ModuleList(
            torch.nn.BatchNorm1d(WIDTH) for _ in range(2 * LAYERS)
        )

    def layer(self, i, x):
        for j, f in enumerate((lambda x: self.attend(i, x), lambda x: self.down[i](self.up[i](x)))):
            x = self.batch_norms[2 * i + j]((x + f(x)).transpose(1, 2)).transpose(1, 2)
        return x


def test_a_batch_norm_between_sums_is_called_one():
    described = ctrans.open_model(made(BehindBatchNorms), example=TOKENS).described
    assert "it is a batch norm: a scale and an offset of each channel" in described
