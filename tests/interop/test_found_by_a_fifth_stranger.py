"""Models like those of a fifth stranger, of kinds that ctrans read wrongly or with a reason that was
not true.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import ctrans
from ctrans.interop import open_model
from tests.interop.test_found_by_strangers import (
    BLOCKS,
    HEADS,
    VOCABULARY,
    WIDTH,
    Blocks,
    OwnAttention,
    assert_states_are_its_own,
    feed_forward,
    ids,
    made,
)


class Masked(OwnAttention):
    """Attention with a mask of pairs that the inputs do not change."""

    def __init__(self, pairs):
        super().__init__()
        self.pairs = pairs

    def averages(self, x):
        q, k, v = self.maps(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        hidden = ~self.pairs(torch.ones(x.shape[1], x.shape[1], dtype=torch.bool))
        self.rows = (q @ k.mT).masked_fill(hidden, -torch.inf).softmax(-1)
        return (self.rows @ v).transpose(1, 2).flatten(-2)


def from_right_to_left(pairs):
    return pairs.triu()


def without_the_class_token(pairs):
    pairs[1:, 0] = False
    return pairs


def of_a_window_to_the_right(pairs):
    return pairs.triu().tril(2)


def of_two_queries(pairs):
    pairs[:, -2:] = False
    return pairs


@pytest.mark.parametrize(
    "pairs",
    [from_right_to_left, without_the_class_token, of_a_window_to_the_right, of_two_queries],
)
def test_a_mask_of_the_code_hides_no_padding(pairs):
    module = made(lambda: Masked(pairs))
    opened = open_model(module, example=ids(), loss="next")
    assert "a padding mask hides" not in opened.described
    tokens = ids().shape[1]
    read = pairs(torch.ones(tokens, tokens, dtype=torch.bool)).fill_diagonal_(False).any(0)
    unread = int((~read).sum()) * len(ids())
    assert f"no others read {unread} of the tokens of its example" in opened.described
    found = ctrans.simulate(opened, ids(), reference=False).mean_abs[-1]
    module(ids())
    assert found == pytest.approx(float(module.states[-1].abs().mean()), rel=1e-6)


def of_a_prefix(pairs):
    pairs = pairs.tril()
    pairs[:, :4] = True
    return pairs


def test_a_prefix_that_reads_itself_is_no_missing_mask():
    opened = open_model(made(lambda: Masked(of_a_prefix)), example=ids())
    assert "its first 4 tokens read each other" in opened.described
    assert opened.loss == "next"
    assert "causal mask is missing" not in opened.described


class OfPadding(Blocks):
    """Tokens of id 0 are hidden from all others, or the last ones, as many as there are of id 0."""

    by_count = False

    def forward(self, ids):
        text = ids.ne(0)
        if self.by_count:
            text = torch.arange(ids.shape[1]) < text.sum(1, keepdim=True)
        seen = text[:, None, None] | torch.eye(ids.shape[1], dtype=torch.bool)
        for block in self.blocks:
            block.pairs = lambda _: seen
        return super().forward(ids)


@pytest.mark.parametrize("by_count", [False, True])
@pytest.mark.parametrize("lengths", [(7, 5), (6, 6)])
def test_a_mask_of_the_inputs_hides_padding_also_of_equal_lengths(lengths, by_count):
    torch.manual_seed(0)
    module = OfPadding(lambda: Masked(None)).double().eval()
    module.by_count = by_count
    tokens = ids() % (VOCABULARY - 1) + 1
    for row, length in zip(tokens, lengths, strict=True):
        row[length:] = 0
    opened = open_model(module, example=tokens)
    hidden = 2 * tokens.shape[1] - sum(lengths)
    assert f"a padding mask hides {hidden} of {tokens.numel()} tokens" in opened.described


class AddNorm(nn.Module):
    """An RMSNorm that may first add a residual, and then returns the sum too, as in vLLM."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(1 + 0.3 * torch.randn(WIDTH))

    def forward(self, x, residual=None):
        if residual is not None:
            x = x + residual
        y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * self.weight
        return y if residual is None else (y, x)


class LayerNormWithResidual(nn.LayerNorm):
    """As in flash-attn."""

    def __init__(self):
        super().__init__(WIDTH)

    def forward(self, x, residual=None):
        if residual is not None:
            x = x + residual
        y = super().forward(x)
        return y if residual is None else (y, x)


class WithResiduals(nn.Module):
    """Pre-LN whose sums are in the norms that follow them."""

    def __init__(self, norm):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.norms = nn.ModuleList(norm() for _ in range(2 * BLOCKS + 1))
        self.ffns = nn.ModuleList(feed_forward() for _ in range(2 * BLOCKS))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens):
        x = self.embedding(tokens)
        self.states = [x]
        y = self.norms[0](x)
        for norm, ffn in zip(self.norms[1:], self.ffns, strict=True):
            y, x = norm(ffn(y), x)
            self.states.append(x)
        return self.head(y)


@pytest.mark.parametrize("norm", [AddNorm, LayerNormWithResidual])
def test_a_norm_that_adds_a_residual_is_a_sum_and_a_norm(norm):
    torch.manual_seed(0)
    module = WithResiduals(norm).double().eval()
    opened = open_model(module, example=ids(), loss="next")
    assert opened.model.config.placement == "pre"
    assert_states_are_its_own(opened, module, ids(1))
    for part, own in zip(opened.depth.sublayers, module.norms, strict=False):
        torch.testing.assert_close(part.input_norm.gamma, own.weight)


class NormOfASum(AddNorm):
    """norm(f(x), residual=x): Post-LN with one output."""

    def forward(self, x, residual=None):
        y = super().forward(x, residual)
        return y if residual is None else y[0]


class PostWithResiduals(WithResiduals):
    def forward(self, tokens):
        x = self.embedding(tokens)
        self.states = [x]
        for norm, ffn in zip(self.norms, self.ffns, strict=False):
            x = norm(ffn(x), residual=x)
            self.states.append(x)
        return self.head(x)


def test_a_sum_in_a_post_norm_is_read():
    torch.manual_seed(0)
    module = PostWithResiduals(NormOfASum).double().eval()
    opened = open_model(module, example=ids(), loss="next")
    assert opened.model.config.placement == "post"
    assert_states_are_its_own(opened, module, ids(1))


class TokensFirst(Blocks):
    """States (tokens, sequences, width), whose tokens are chosen for an FFN as one axis: no turned
    tensor may be viewed so.
    """

    def forward(self, ids):
        x = self.embedding(ids)
        self.states = [x.transpose(0, 1)]
        for block in self.blocks:
            x = x + block.out(x.cumsum(0))
            self.states.append(x.transpose(0, 1))
            x = x + self.chosen(block, block.norm(x))
            self.states.append(x.transpose(0, 1))
        return self.head(x)

    def chosen(self, block, x):
        flat = x.view(-1, WIDTH)
        y = torch.zeros_like(flat)
        which = flat[:, 0] > 0
        y[which] = block.ffn(flat[which])
        return y.view(x.shape)


def test_states_that_are_turned_for_the_module_may_be_viewed():
    torch.manual_seed(0)
    module = TokensFirst(OwnAttention).double().eval()
    opened = open_model(module, example=ids().T.contiguous())
    assert {part.kind for part in opened.depth.sublayers} == {"attention", "ffn"}
    found = opened.trajectory(ids(1)).states
    module(ids(1).T)
    for x, own in zip(found, module.states, strict=True):
        torch.testing.assert_close(x, own)


class SeveralOutputs(Blocks):
    def forward(self, ids):
        super().forward(ids)
        return {"pooled": self.states[-1].mean(1), "tokens": self.states[-1], "size": 3}


def test_the_first_of_several_named_outputs_is_looked_at():
    torch.manual_seed(0)
    module = SeveralOutputs(lambda: Masked(torch.tril)).double().eval()
    opened = open_model(module, example=ids())
    assert "of its outputs, 'pooled' is looked at" in opened.described
    states = opened.trajectory(ids()).states
    torch.testing.assert_close(opened.head(states[-1]), states[-1].mean(1))


class OfLaterTokens(Blocks):
    """Of the first block, the sum acts on all tokens but the first, as in TimeSformer."""

    def forward(self, ids):
        x = self.embedding(ids)
        later = x[:, 1:]
        later = x[:, 1:] + self.blocks[0].averages(self.blocks[0].norm(later))
        x = torch.cat([x[:, :1], later], 1)
        for block in self.blocks[1:]:
            x = block(x, [])
        return self.head(x)


def test_attentions_before_the_first_state_are_counted():
    torch.manual_seed(0)
    module = OfLaterTokens(lambda: Masked(torch.tril)).double().eval()
    opened = open_model(module, example=ids(), loss="next")
    assert "before its first state there is 1 of its attentions" in opened.described


class OfCategories(nn.Module):
    """The last column of a table has numbers of categories."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, WIDTH))
        self.categories = nn.Embedding(4, WIDTH)
        self.blocks = nn.ModuleList(Masked(lambda pairs: pairs) for _ in range(2))

    def forward(self, table):
        numbers = table[:, :3, None] * self.weight
        x = torch.cat([numbers, self.categories(table[:, 3].long())[:, None]], 1)
        for block in self.blocks:
            x = block(x, [])
        return x[:, 0]


def test_tables_with_categories_are_tried_with_rows_of_the_example():
    torch.manual_seed(0)
    table = torch.tensor([[-2.0, 0.5, 0.3, 1.0], [0.2, 0.1, -0.4, 3.0], [0.5, 0.6, 0.7, 0.0]])
    opened = open_model(OfCategories().double().eval(), example=table.double())
    assert opened.model.config.placement == "pre"


class HeadsInVmap(OwnAttention):
    """Each head is a function with its own last map; their sum is the attention."""

    def forward(self, x, states):
        maps = self.maps.weight.unflatten(0, (3, HEADS, -1)).unbind(0)
        outs = self.out.weight.unflatten(1, (HEADS, -1)).transpose(0, 1)
        given = self.norm(x)

        def of_head(q, k, v, out):
            return ((given @ q.T) @ (given @ k.T).mT).softmax(-1) @ (given @ v.T) @ out.T

        x = x + torch.vmap(of_head)(*maps, outs).sum(0)
        states.append(x)
        x = x + self.ffn(self.norm(x))
        states.append(x)
        return x


def test_a_part_that_sums_what_vmap_hides_is_not_called_a_scale():
    module = made(HeadsInVmap)
    opened = open_model(module, example=ids(), loss="next")
    assert "scripted code or torch.vmap" in opened.described
    assert "multiplies the state by numbers" not in opened.described
    parts = [part for part in opened.depth.sublayers if part.kind == "part"]
    assert {part.placement.name for part in parts} == {"unknown"}


class ManyGains(nn.Module):
    """Gains in attributes of their own, as in one long function."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.ffns = nn.ModuleList(feed_forward() for _ in range(4))
        for i in range(4):
            setattr(self, f"g{i}", nn.Parameter(torch.randn(WIDTH)))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for i, ffn in enumerate(self.ffns):
            x = x + ffn(F.rms_norm(x, (WIDTH,), getattr(self, f"g{i}"), 1e-6))
        return self.head(x)


def test_of_many_gains_the_first_and_the_last_are_named():
    opened = open_model(ManyGains().double().eval(), example=ids(), loss="next")
    (norm,) = opened.model.config.norms
    assert "gamma = g0 .. g3" in norm


class InLowPrecision(OwnAttention):
    """Its maps compute in bfloat16, and its states are float32."""

    def forward(self, x, states):
        x = x + self.out(self.averages(self.norm(x).bfloat16())).float()
        states.append(x)
        x = x + self.ffn(self.norm(x).bfloat16()).float()
        states.append(x)
        return x

    def averages(self, x):
        q, k, v = self.maps(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2)


def test_maps_of_another_dtype_are_named_so():
    torch.manual_seed(0)
    module = Blocks(InLowPrecision).eval()
    for block in module.blocks:
        for part in (block.maps, block.out, block.ffn):
            part.bfloat16()
    opened = open_model(module, example=ids(), loss="next")
    said = "its linear maps compute in bfloat16 and its states are float32"
    assert f"attention: rows alone are known: {said}" in opened.described
    assert f"FFN: {said}" in opened.described


class ParallelInLowPrecision(InLowPrecision):
    """Attention and FFN of one norm, added up in bfloat16 or in float32."""

    late = False

    def forward(self, x, states):
        given = self.norm(x).bfloat16()
        attention, ffn = self.out(self.averages(given)), self.ffn(given)
        if self.late:
            x = x + attention.float() + ffn.float()
        else:
            x = x + (attention + ffn).float()
        states.append(x)
        return x


@pytest.mark.parametrize("late", [False, True])
def test_attention_and_ffn_in_parallel_are_read_in_low_precision(late):
    torch.manual_seed(0)
    module = Blocks(ParallelInLowPrecision).eval()
    for block in module.blocks:
        block.late = late
        for part in (block.maps, block.out, block.ffn):
            part.bfloat16()
    opened = open_model(module, example=ids(), loss="next")
    assert [part.kind for part in opened.depth.sublayers] == ["parallel"] * BLOCKS
    assert opened.model.config.placement == "pre"


class ConvolutionInLowPrecision(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.maps = nn.ModuleList(nn.Conv1d(WIDTH, WIDTH, 3, padding=1) for _ in range(2))

    def forward(self, x, states):
        for conv in self.maps:
            x = x + 0.01 * conv(self.norm(x).mT).mT
            states.append(x)
        return x


def test_a_convolution_over_tokens_is_no_ffn_in_low_precision():
    torch.manual_seed(0)
    module = Blocks(ConvolutionInLowPrecision).bfloat16().eval()
    opened = open_model(module, example=ids(), loss="next")
    assert {part.kind for part in opened.depth.sublayers} == {"attention"}


class WithoutDerivatives(Blocks):
    @torch.inference_mode()
    def forward(self, ids):
        return super().forward(ids)


def test_a_forward_without_derivatives_is_named_when_it_is_opened():
    torch.manual_seed(0)
    opened = open_model(WithoutDerivatives(OwnSums).double().eval(), example=ids(), loss="next")
    assert "its forward turns derivatives off" in opened.described


class OwnSums(OwnAttention):
    def averages(self, x):
        return x.cumsum(1) / (1 + torch.arange(x.shape[1]))[:, None]
