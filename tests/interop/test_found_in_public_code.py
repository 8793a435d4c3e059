"""Kinds of code in public repositories that ctrans read wrongly, or with a reason that was not
true.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import ctrans
from ctrans.dynamics.fields import ExposesHeads, ExposesRows
from ctrans.interop import open_model
from solvers import ConfigError
from tests.interop.test_found_by_strangers import (
    HEADS,
    VOCABULARY,
    WIDTH,
    Blocks,
    OwnAttention,
    WithTorchsAttention,
    assert_states_are_its_own,
    feed_forward,
    ids,
    made,
)


class WithoutMaps(OwnAttention):
    """Attention of the states themselves, without maps of queries, keys and values."""

    def averages(self, x):
        return (x @ x.mT).softmax(-1) @ x


def test_an_attention_without_maps_is_said_to_have_none():
    module = made(WithoutMaps)
    opened = open_model(module, example=ids(), loss="next")
    assert_states_are_its_own(opened, module, ids(1))
    assert "its 0 linear maps before the last are not queries" in opened.described


class OfTorchsFunction(OwnAttention):
    """torch's function in place of its module."""

    def averages(self, x):
        given = [x.transpose(0, 1)] * 3
        y, _ = F.multi_head_attention_forward(
            *given,
            embed_dim_to_check=WIDTH,
            num_heads=HEADS,
            in_proj_weight=self.maps.weight,
            in_proj_bias=self.maps.bias,
            bias_k=None,
            bias_v=None,
            add_zero_attn=False,
            dropout_p=0.0,
            out_proj_weight=self.out.weight,
            out_proj_bias=self.out.bias,
            training=False,
        )
        return y.transpose(0, 1)


def test_torchs_function_of_attention_is_named():
    module = made(OfTorchsFunction)
    opened = open_model(module, example=ids(), loss="next")
    assert_states_are_its_own(opened, module, ids(1))
    assert "F.multi_head_attention_forward, whose rows are not read" in opened.described


class RowsMixed(OwnAttention):
    """Heads are mixed and normalised between the softmax and the values, as DeepViT's."""

    def __init__(self):
        super().__init__()
        self.mix = nn.Parameter(torch.randn(HEADS, HEADS))
        self.norm_of_heads = nn.LayerNorm(HEADS)

    def averages(self, x):
        q, k, v = self.maps(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        rows = torch.einsum("bhij,hg->bgij", (q @ k.mT).softmax(-1), self.mix)
        rows = self.norm_of_heads(rows.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        return (rows @ v).transpose(1, 2).flatten(-2)


def test_rows_that_are_changed_before_they_average_are_no_rows_of_the_attention():
    module = made(RowsMixed)
    opened = open_model(module, example=ids(), loss="next")
    assert_states_are_its_own(opened, module, ids(1))
    assert not isinstance(opened.model.depth.sublayers[0].field, ExposesRows)
    missing = ctrans.diagnose(opened, ids(), ids().roll(-1, 1)).missing
    assert "heads" in missing


class LossAlone(Blocks):
    """It returns its loss, and nothing for each sequence."""

    def forward(self, ids):
        logits = super().forward(ids)
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def test_a_module_that_returns_its_loss_alone_is_said_to_have_no_output():
    torch.manual_seed(0)
    module = LossAlone(lambda: WithTorchsAttention(post=False)).double().eval()
    with pytest.raises(ConfigError, match="returns one number, such as its loss"):
        ctrans.diagnose(module, ids(), ids())


class Backout(Blocks):
    """What an earlier state has is taken away behind the last sum, as in nanochat."""

    def forward(self, ids):
        x = self.embedding(ids)
        self.states = [x]
        for block in self.blocks:
            x = block(x, self.states)
        self.states.append(x - 0.2 * self.states[2])
        return self.head(self.norm(self.states[-1]))


def test_a_skip_behind_the_last_sum_is_in_the_last_part():
    torch.manual_seed(0)
    module = Backout(lambda: WithTorchsAttention(post=False)).double().eval()
    opened = open_model(module, example=ids(), loss="next")
    tokens = ids(1)
    with torch.no_grad():
        states = opened.trajectory(tokens).states
        torch.testing.assert_close(opened.head(states[-1]), module(tokens))
        torch.testing.assert_close(states[-1], module.states[-1])
        for state in states:
            assert any(torch.allclose(state, own) for own in module.states)


class ScaledByRow(nn.Module):
    """LayerScale of shape (1, 1, width)."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.ffn = feed_forward()
        self.scale = nn.Parameter(torch.full((1, 1, WIDTH), 0.3))

    def forward(self, x, states):
        states.append(x + self.scale * self.ffn(self.norm(x)))
        return states[-1]


def test_a_scale_with_axes_of_one_shows_the_last_map():
    module = made(ScaledByRow)
    opened = open_model(module, example=ids(), loss="next")
    assert_states_are_its_own(opened, module, ids(1))
    for part, block in zip(opened.model.depth.sublayers, module.blocks, strict=True):
        weight = part.field.output_projection.weight
        torch.testing.assert_close(weight, block.scale.view(-1, 1) * block.ffn[2].weight)


class CastLinear(nn.Linear):
    """A map with float32 weights that computes in the dtype of its input, as modded-nanogpt's."""

    def forward(self, x):
        return F.linear(x, self.weight.to(x.dtype), self.bias.to(x.dtype))


class OfCastMaps(OwnAttention):
    def __init__(self):
        super().__init__()
        self.maps, self.out = CastLinear(WIDTH, 3 * WIDTH), CastLinear(WIDTH, WIDTH)
        self.ffn = nn.Sequential(
            CastLinear(WIDTH, 2 * WIDTH), nn.GELU(), CastLinear(2 * WIDTH, WIDTH)
        )

    def averages(self, x):
        q, k, v = self.maps(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2)


class InHalfPrecision(Blocks):
    """States in bfloat16 between maps with float32 weights."""

    def __init__(self, block):
        super().__init__(block)
        self.embedding.bfloat16()
        for block in (*self.blocks, self):
            block.norm.bfloat16()
        self.head = CastLinear(WIDTH, VOCABULARY)


def test_rows_of_states_in_another_dtype_than_the_weights_are_read():
    torch.manual_seed(0)
    module = InHalfPrecision(OfCastMaps).eval()
    opened = open_model(module, example=ids(), loss="next")
    assert "does not run" not in opened.described
    assert isinstance(opened.model.depth.sublayers[0].field, ExposesHeads)
