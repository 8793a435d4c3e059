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
    BLOCKS,
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
from tests.interop.test_scaled_sums import CausalAttention


class WithoutMaps(OwnAttention):
    """Attention of the states themselves, without maps of queries, keys and values."""

    def averages(self, x):
        return (x @ x.mT).softmax(-1) @ x


def test_an_attention_without_maps_is_said_to_have_none():
    module = made(WithoutMaps)
    opened = open_model(module, example=ids(), loss="next")
    assert_states_are_its_own(opened, module, ids(1))
    assert "its 0 linear maps before the last are not queries" in opened.described


class OfTorchsFunction(nn.Module):
    """Pre-LN around torch's function of attention, in place of its module."""

    def __init__(self, *, apart, **options):
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.maps = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.in_proj_weight = nn.Parameter(torch.randn(3 * WIDTH, WIDTH) / 4)
        self.in_proj_bias = nn.Parameter(torch.randn(3 * WIDTH))
        self.out = nn.Linear(WIDTH, WIDTH)
        self.ffn = feed_forward()
        self.apart = apart
        self.options = options

    def attention(self, x):
        hidden = torch.ones(len(x), len(x), dtype=torch.bool).triu(1)
        weight, bias = self.in_proj_weight, self.in_proj_bias
        separate = {}
        if self.apart:  # as fairseq and ESM call it
            weight = torch.empty([0])
            bias = torch.cat([each.bias for each in self.maps])
            names = [f"{role}_proj_weight" for role in "qkv"]
            separate = dict(zip(names, [each.weight for each in self.maps], strict=True))
        y, self.rows = F.multi_head_attention_forward(
            x,
            x,
            x,
            embed_dim_to_check=WIDTH,
            num_heads=HEADS,
            in_proj_weight=weight,
            in_proj_bias=bias,
            bias_k=None,
            bias_v=None,
            add_zero_attn=False,
            dropout_p=0.0,
            out_proj_weight=self.out.weight,
            out_proj_bias=self.out.bias,
            training=False,
            attn_mask=hidden,
            use_separate_proj_weight=self.apart,
            **separate,
            **self.options,
        )
        return y

    def forward(self, x, states):
        given = self.norms[0](x)
        x = x + self.attention(given.transpose(0, 1)).transpose(0, 1)
        states.append(x)
        x = x + self.ffn(self.norms[1](x))
        states.append(x)
        return x


class TokensFirst(Blocks):
    def forward(self, ids):
        x = self.embedding(ids).transpose(0, 1)
        self.states = [x]
        for block in self.blocks:
            x = x + block.attention(block.norms[0](x))
            self.states.append(x)
            x = x + block.ffn(block.norms[1](x))
            self.states.append(x)
        self.states = [state.transpose(0, 1) for state in self.states]
        return self.head(self.norm(x)).transpose(0, 1)


@pytest.mark.cases(3)
@pytest.mark.parametrize(
    "options", [{"average_attn_weights": False}, {"need_weights": False}, {"is_causal": True}]
)
@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("model", [Blocks, TokensFirst])
def test_torchs_function_of_attention_is_read_whole(options, apart, model):
    torch.manual_seed(0)
    module = model(lambda: OfTorchsFunction(apart=apart, **options)).double().eval()
    opened = open_model(module, example=ids(), loss="next")
    assert_states_are_its_own(opened, module, ids(1))
    assert not opened.model.config.unread
    attention = opened.depth.sublayers[0]
    assert isinstance(attention.field, ExposesHeads)
    rows = attention.field.probabilities(attention.given(opened.embed(ids())))
    module.blocks[0].options = {"average_attn_weights": False}
    module(ids())
    torch.testing.assert_close(rows, module.blocks[0].rows)


class InParallel(nn.Module):
    """Several attentions and then several FFNs, with a norm each, whose outputs are added."""

    def __init__(self, count, scale):
        super().__init__()
        causal = [CausalAttention() for _ in range(count)]
        ffns = [feed_forward() for _ in range(count)]
        self.parts = nn.ModuleList(
            nn.ModuleList(nn.Sequential(nn.LayerNorm(WIDTH), field) for field in fields)
            for fields in (causal, ffns)
        )
        self.scale = scale

    def forward(self, x, states):
        for part in self.parts:
            y, *others = [branch(x) for branch in part]
            for other in others:
                y = y + self.scale * other
            x = y + x
            states.append(x)
        return x


@pytest.mark.cases(2)
@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("scale", [1.0, 0.3])
def test_maps_of_one_kind_in_parallel_have_a_norm_each(count, scale):
    module = made(lambda: InParallel(count, scale))
    opened = open_model(module, example=ids(), loss="next")
    assert_states_are_its_own(opened, module, ids(1))
    parts = opened.depth.sublayers
    assert [part.kind for part in parts] == ["attention", "ffn"] * BLOCKS
    assert {part.placement.name for part in parts} == {"pre"}
    assert opened.causal
    assert opened.model.config.attention == " + ".join(["CausalAttention"] * count)
    assert f"gamma = one for each map, eps = {nn.LayerNorm(1).eps:g}" in opened.described
    found = ctrans.costate(opened, ids(), ids().roll(-1, 1))
    module(ids())
    states = module.states
    logits = module.head(module.norm(states[-1]))
    loss = F.cross_entropy(logits.flatten(0, 1), ids().roll(-1, 1).flatten())
    own = torch.autograd.grad(loss, states)
    torch.testing.assert_close(list(found.costates), list(own))


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


class AsManyAsTokens(nn.Module):
    """torch's attention, in either order of its axes."""

    def __init__(self, batch_first):
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=batch_first)
        self.ffn = feed_forward()
        self.batch_first = batch_first

    def forward(self, x, states):
        given = self.norms[0](x)
        if not self.batch_first:
            given = given.transpose(0, 1)
        y, self.rows = self.attention(given, given, given, average_attn_weights=False)
        x = x + (y if self.batch_first else y.transpose(0, 1))
        states.append(x)
        x = x + self.ffn(self.norms[1](x))
        states.append(x)
        return x


@pytest.mark.cases(2)
@pytest.mark.parametrize("count", [2, 3, 5])
@pytest.mark.parametrize("batch_first", [False, True])
def test_an_example_may_have_as_many_sequences_as_tokens(count, batch_first):
    module = made(lambda: AsManyAsTokens(batch_first))
    example = torch.randint(VOCABULARY, (count, count))
    opened = open_model(module, example=example, loss="next")
    assert not opened.model.config.unread
    assert_states_are_its_own(opened, module, ids(1))
    assert_states_are_its_own(opened, module, example)
    attention = opened.depth.sublayers[0]
    rows = attention.field.probabilities(attention.given(opened.embed(example)))
    module(example)
    torch.testing.assert_close(rows, module.blocks[0].rows)


@pytest.mark.parametrize("option", ["add_bias_kv", "add_zero_attn"])
def test_a_key_that_torchs_attention_adds_is_the_reason_for_no_rows(option):
    def block():
        with_a_key = AsManyAsTokens(batch_first=True)
        with_a_key.attention = nn.MultiheadAttention(
            WIDTH, HEADS, batch_first=True, **{option: True}
        )
        return with_a_key

    module = made(block)
    opened = open_model(module, example=ids(), loss="next")
    assert_states_are_its_own(opened, module, ids(1))
    assert "with keys of its own beside those of the tokens" in opened.described


def test_as_many_sequences_as_tokens_of_many_sizes():
    """Each size needs a pass of another one too, and few passes are kept."""
    module = made(lambda: AsManyAsTokens(batch_first=True))
    opened = open_model(module, example=ids(), loss="next")
    for count in range(2, 8):
        assert_states_are_its_own(opened, module, torch.randint(VOCABULARY, (count, count)))


class SubNorm(OwnAttention):
    """Norms act on the averages and between the maps of the FFN, as in Magneto and torchscale."""

    def __init__(self):
        super().__init__()
        self.of_averages = nn.LayerNorm(WIDTH)
        self.ffn = nn.Sequential()
        for name, part in (
            ("up", nn.Linear(WIDTH, 32)),
            ("activation", nn.GELU()),
            ("of_hidden", nn.LayerNorm(32)),
            ("down", nn.Linear(32, WIDTH)),
        ):
            self.ffn.add_module(name, part)

    def averages(self, x):
        q, k, v = self.maps(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        averages = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.of_averages(averages.transpose(1, 2).flatten(-2))


def test_norms_between_the_maps_are_named():
    opened = open_model(made(SubNorm), example=ids(), loss="next")
    assert "such as a norm (of_averages), follows them" in opened.described
    assert "norms act between its maps (of_hidden)" in opened.described
