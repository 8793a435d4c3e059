"""Models like those that a third stranger wrote, of kinds that ctrans read in part, or with a reason
that was not true.
"""

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ctrans.dynamics.fields import ExposesHeads, ExposesRows
from ctrans.interop import open_model
from solvers import ConfigError
from tests.interop.test_found_by_strangers import (
    HEADS,
    WIDTH,
    Blocks,
    OwnAttention,
    assert_states_are_its_own,
    feed_forward,
    ids,
    made,
)


class Padded(nn.Module):
    """torch's attention with a padding mask, as True or as what is added to scores."""

    def __init__(self, added):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
        self.ffn = feed_forward()
        self.added = added

    def forward(self, x, states):
        padding = torch.arange(x.shape[1]) >= torch.tensor([[9], [6]])[: len(x)]
        padding = padding.expand(x.shape[:2])
        if self.added:
            padding = torch.zeros(x.shape[:2], dtype=x.dtype).masked_fill(padding, -torch.inf)
        y = self.norm(x)
        y, self.rows = self.attention(y, y, y, key_padding_mask=padding, average_attn_weights=False)
        x = x + y
        states.append(x)
        x = x + self.ffn(x)
        states.append(x)
        return x


@pytest.mark.parametrize("added", [False, True])
def test_the_rows_of_torchs_attention_are_known_under_a_padding_mask(added):
    module = made(lambda: Padded(added))
    opened = open_model(module, example=ids(), loss="next")
    assert_states_are_its_own(opened, module, ids(1))
    attention = opened.depth.sublayers[0]
    assert isinstance(attention.field, ExposesHeads)
    rows = attention.field.probabilities(attention.given(opened.embed(ids())))
    module(ids())
    torch.testing.assert_close(rows, module.blocks[0].rows)


class OneKey(OwnAttention):
    """All heads share a key and a value, which have no axis of heads."""

    def averages(self, x):
        q, k, v = self.maps(x).split([WIDTH, WIDTH, WIDTH], -1)
        q = q.unflatten(-1, (HEADS, -1)).transpose(1, 2)
        k, v = k[..., : WIDTH // HEADS], v[..., : WIDTH // HEADS]
        self.rows = torch.einsum("bhid,bjd->bhij", q, k).softmax(-1)
        y = torch.einsum("bhij,bjd->bhid", self.rows, v)
        return y.transpose(1, 2).flatten(-2)


class ThreeAtOnce(OwnAttention):
    """The averages and the last linear map are one product."""

    def averages(self, x):
        q, k, v = self.maps(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        self.rows = (q @ k.mT).softmax(-1)
        weight = self.out.weight.mT.unflatten(0, (HEADS, -1))
        return torch.einsum("bhij,bhjd,hde->bie", self.rows, v, weight)

    def forward(self, x, states):
        x = x + self.averages(self.norm(x))
        states.append(x)
        x = x + self.ffn(self.norm(x))
        states.append(x)
        return x


class ByHand(OwnAttention):
    """The softmax is written out, and a gate follows the averages."""

    def averages(self, x):
        q, k, v = self.maps(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        scores = q @ k.mT
        scores = (scores - scores.amax(-1, keepdim=True)).exp()
        self.rows = scores / scores.sum(-1, keepdim=True)
        return (self.rows @ v).transpose(1, 2).flatten(-2) * x.sigmoid()


@pytest.mark.parametrize("block", [OneKey, ThreeAtOnce, ByHand])
def test_rows_are_known_however_they_average(block):
    module = made(block)
    opened = open_model(module, example=ids(), loss="next")
    assert_states_are_its_own(opened, module, ids(1))
    attention = opened.depth.sublayers[0]
    assert isinstance(attention.field, ExposesRows)
    rows = attention.field.probabilities(attention.given(opened.embed(ids())))
    module(ids())
    torch.testing.assert_close(rows, module.blocks[0].rows)
    if block is ThreeAtOnce:
        assert "it ends in einsum of 3 tensors, which is not read as" in opened.described


class MixedHeads(OwnAttention):
    def __init__(self):
        super().__init__()
        self.mix = nn.Parameter(torch.randn(HEADS, HEADS))

    def averages(self, x):
        q, k, v = self.maps(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        rows = torch.einsum("bhij,hg->bgij", (q @ k.mT).softmax(-1), self.mix)
        return (rows @ v).transpose(1, 2).flatten(-2)


class Subtracted(OwnAttention):
    """The rows are a difference of two softmaxes."""

    def averages(self, x):
        q, k, v = self.maps(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        rows = (q @ k.mT).softmax(-1)
        rows = rows - 0.3 * (k @ q.mT).softmax(-1)
        return (rows @ v).transpose(1, 2).flatten(-2)


@pytest.mark.parametrize(("block", "change"), [(MixedHeads, "einsum"), (Subtracted, "sub")])
def test_what_changes_the_rows_is_said(block, change):
    module = made(block)
    opened = open_model(module, example=ids(), loss="next")
    assert_states_are_its_own(opened, module, ids(1))
    assert not isinstance(opened.depth.sublayers[0].field, ExposesRows)
    said = f"the rows of its softmax are changed before they average values ({change})"
    assert said in opened.described


class Crossing(OwnAttention):
    """Each token reads a memory, of which a mask hides all from some tokens."""

    def __init__(self):
        super().__init__()
        self.memory = nn.Parameter(torch.randn(5, WIDTH))

    def averages(self, x):
        q = self.maps(x)[..., :WIDTH]
        memory = self.memory.expand(len(x), -1, -1)
        rows = (q @ memory.mT).softmax(-1)
        hidden = torch.arange(x.shape[1])[:, None] < 2
        return rows.masked_fill(hidden, 0.0) @ (memory + 0 * x[:, :1])


def test_a_cross_attention_is_an_attention_where_a_mask_acts_behind_the_softmax():
    module = made(Crossing)
    opened = open_model(module, example=ids(), loss="next")
    assert [part.kind for part in opened.depth.sublayers[:2]] == ["attention", "ffn"]


class Routed(OwnAttention):
    """A softmax weighs the experts of each token."""

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(WIDTH, 3)
        self.experts = nn.Parameter(torch.randn(3, WIDTH, WIDTH) / 4)

    def forward(self, x, states):
        u = self.norm(x)
        made_ = torch.einsum("btd,edf->btef", u, self.experts).tanh()
        x = x + torch.einsum("bte,btef->btf", self.router(u).softmax(-1), made_)
        states.append(x)
        x = x + self.ffn(self.norm(x))
        states.append(x)
        return x


def test_a_softmax_over_experts_is_no_attention():
    module = made(Routed)
    opened = open_model(module, example=ids(), loss="next")
    assert_states_are_its_own(opened, module, ids(1))
    assert {part.kind for part in opened.depth.sublayers} == {"ffn"}


class Summarised(Blocks):
    """An encoder of these tokens, and logits of a shorter sequence."""

    def forward(self, ids):
        return super().forward(ids)[:, :4]


class OfTheLastToken(Blocks):
    def forward(self, ids):
        return super().forward(ids)[:, -1:]


class Bidirectional(OwnAttention):
    def averages(self, x):
        q, k, v = self.maps(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(-2)


def test_logits_of_another_sequence_are_no_predictions_of_these_tokens():
    torch.manual_seed(0)
    opened = open_model(Summarised(Bidirectional).double().eval(), example=ids())
    assert not opened.predicts
    assert "hidden tokens" not in opened.described
    opened = open_model(OfTheLastToken(Bidirectional).double().eval(), example=ids())
    with pytest.raises(ConfigError, match="take a model with logits of every token"):
        opened(ids(), ids())


class Turning(Blocks):
    """Attention has tokens before sequences, and the FFN has sequences before tokens."""

    def states(self, ids):
        x = self.embedding(ids)
        states = []
        for block in self.blocks:
            turned = block.norm(x.transpose(0, 1))
            states.append(turned.transpose(0, 1))
            x = turned + block.out(turned.cumsum(0))
            states.append(block.norm(x.transpose(0, 1)))
            x = states[-1] + block.ffn(states[-1])
        return [*states, x]

    def forward(self, ids):
        return self.head(self.states(ids)[-1])


@pytest.mark.parametrize("sequences", [3, 6])
def test_states_may_turn_from_part_to_part(sequences):
    torch.manual_seed(0)
    module = Turning(OwnAttention).double().eval()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        opened = open_model(module, example=torch.randint(20, (sequences, 6)), loss="next")
    for shape in ((2, 6), (6, 6), (2, 2)):
        tokens = torch.randint(20, shape)
        states = opened.trajectory(tokens).states
        for state in module.states(tokens):
            assert min((state - found).abs().max() for found in states) < 1e-12
        torch.testing.assert_close(opened.head(states[-1]), module(tokens))


class TurningPost(Turning):
    """Norms stand behind the sums, and turns behind the norms."""

    def states(self, ids):
        x = self.embedding(ids)
        states = [x]
        for block in self.blocks:
            turned = x.transpose(0, 1)
            x = block.norm(turned + block.out(turned.cumsum(0))).transpose(0, 1)
            states.append(x)
            x = block.norm(x + block.ffn(x))
            states.append(x)
        return states


def test_a_state_may_turn_behind_its_norm():
    torch.manual_seed(0)
    module = TurningPost(OwnAttention).double().eval()
    opened = open_model(module, example=ids(), loss="next")
    assert opened.model.config.placement == "post"
    for found, own in zip(opened.trajectory(ids(1)).states, module.states(ids(1)), strict=True):
        torch.testing.assert_close(found, own)


class KeysOfUnnormedStates(Blocks):
    """Q + attention(Q, x, x), Q = norm(x), with tokens before sequences, as SASRec."""

    def states(self, ids):
        states = [self.embedding(ids)]
        for block in self.blocks:
            x = states[-1].transpose(0, 1)
            q = block.norm(x)
            rows = (q.transpose(0, 1) @ states[-1].mT).softmax(-1)
            x = q + block.out((rows @ states[-1]).transpose(0, 1))
            states.append(block.norm(x.transpose(0, 1)))
            states.append(states[-1] + block.ffn(states[-1]))
        return states

    def forward(self, ids):
        return self.head(self.states(ids)[-1])


@pytest.mark.parametrize("sequences", [2, 6])
def test_what_the_first_part_reads_beside_the_norm_of_its_state_is_of_its_state(sequences):
    torch.manual_seed(0)
    module = KeysOfUnnormedStates(OwnAttention).double().eval()
    opened = open_model(module, example=ids(), loss="next")
    tokens = torch.randint(20, (sequences, 6))
    states = opened.trajectory(tokens).states
    for state in module.states(tokens):
        assert min((state - found).abs().max() for found in states) < 1e-12
    assert opened.depth.sublayers[0].kind == "part"


class Axial(Blocks):
    """States (batch, 2, 3, width) that are mixed along one axis, or turned along the other."""

    def forward(self, ids):
        x = self.embedding(ids).unflatten(1, (2, 3))
        for block in self.blocks:
            x = block.norm(x)
            x = x + block.out(x.cumsum(1))
            x = block.norm(x.transpose(1, 2))
            x = block.norm((x + block.ffn(x)).transpose(1, 2))
        return self.head(x.flatten(1, 2))


def test_tokens_on_axes_that_turn_from_part_to_part_are_refused():
    module = Axial(OwnAttention).double().eval()
    with pytest.raises(ConfigError, match="axes in two orders"):
        open_model(module, example=torch.randint(20, (4, 6)))


class NormedQueries(OwnAttention):
    def __init__(self):
        super().__init__()
        self.of_queries = nn.LayerNorm(WIDTH // HEADS)
        self.of_keys = nn.LayerNorm(WIDTH // HEADS)

    def averages(self, x):
        q, k, v = self.maps(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        rows = (self.of_queries(q) @ self.of_keys(k).mT).softmax(-1)
        return (rows @ v).transpose(1, 2).flatten(-2)


def test_norms_inside_have_the_names_of_the_model():
    opened = open_model(made(NormedQueries), example=ids(), loss="next")
    assert "norms act on its queries and keys (of_queries, of_keys)" in opened.described


class DeepNormed(OwnAttention):
    def averages(self, x):
        q, k, v = self.maps(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(-2)

    def forward(self, x, states):
        x = self.norm(1.7 * x + self.out(self.averages(x)))
        states.append(x)
        x = self.norm(1.7 * x + self.ffn(x))
        states.append(x)
        return x


def test_the_eps_of_deepnorm_is_that_of_the_module_in_words():
    opened = open_model(made(DeepNormed), example=ids(), loss="next")
    assert opened.model.config.placement == "deepnorm"
    assert f"eps = {nn.LayerNorm(1).eps:g})" in opened.described
    assert opened.depth.sublayers[0].state_norm.eps == pytest.approx(1e-5 / 1.7**2)


class Shared(Blocks):
    def __init__(self, block, norm=None):
        super().__init__(block, norm)
        self.blocks = nn.ModuleList([self.blocks[0]] * 3)


def test_blocks_that_are_one_are_said_to_be():
    torch.manual_seed(0)
    opened = open_model(Shared(Bidirectional).double().eval(), example=ids(), loss="next")
    assert "some of its parts use the weights of earlier ones again" in opened.described
    opened = open_model(made(Bidirectional), example=ids(), loss="next")
    assert "use the weights of earlier ones" not in opened.described


class Around(Blocks):
    """A Transformer of one list of blocks, with a skip around it."""

    def __init__(self, block, norm=None):
        super().__init__(block, norm)
        self.into = nn.Linear(WIDTH, WIDTH)
        self.out_of = nn.Linear(WIDTH, WIDTH)

    def forward(self, ids):
        outer = self.embedding(ids)
        x = self.into(outer)
        self.states = [x]
        for block in self.blocks:
            x = block(x, self.states)
        return self.head(outer + self.out_of(x))


def test_a_stream_within_one_outer_sum_is_read():
    torch.manual_seed(0)
    module = Around(Bidirectional).double().eval()
    opened = open_model(module, example=ids())
    assert opened.model.config.placement == "pre"
    assert [part.kind for part in opened.depth.sublayers] == ["attention", "ffn"] * 2
    assert_states_are_its_own(opened, module, ids())
    states = opened.trajectory(ids()).states
    torch.testing.assert_close(opened.head(states[-1]), module(ids()))


class HeadsFirst(OwnAttention):
    """Heads and sequences share an axis, heads first."""

    def averages(self, x):
        q, k, v = self.maps(x).unflatten(-1, (3, HEADS, -1)).permute(2, 3, 0, 1, 4).flatten(1, 2)
        self.rows = torch.bmm(q, k.mT).softmax(-1)
        y = torch.bmm(self.rows, v).unflatten(0, (HEADS, -1))
        return y.permute(1, 2, 0, 3).flatten(-2)


def test_rows_may_count_heads_before_sequences():
    module = made(HeadsFirst)
    opened = open_model(module, example=ids(), loss="next")
    attention = opened.depth.sublayers[0]
    rows = attention.field.probabilities(attention.given(opened.embed(ids())))
    module(ids())
    expected = module.blocks[0].rows.unflatten(0, (HEADS, -1)).transpose(0, 1)
    torch.testing.assert_close(rows, expected)
    assert "its rows count heads before sequences" in opened.described


class Masked(Bidirectional):
    """Padded tokens are set to 0 behind each norm of a sum."""

    def forward(self, x, states):
        padding = (torch.arange(x.shape[1]) > 6)[:, None]
        x = self.norm(x + self.out(self.averages(x))).masked_fill(padding, 0)
        return self.norm(x + self.ffn(x)).masked_fill(padding, 0)


def test_what_masks_the_state_is_said():
    opened = open_model(made(Masked), example=ids())
    assert opened.model.config.placement == "post, mix"
    assert [part.kind for part in opened.depth.sublayers[:4]] == [
        "attention",
        "part",
        "ffn",
        "part",
    ]
    assert "it sets tokens to a number where a mask hides them" in opened.described


class ReturnsDetections(Blocks):
    def forward(self, ids):
        logits = super().forward(ids)
        return {"pred_boxes": logits[..., :4].sigmoid(), "pred_logits": logits}


def test_the_only_output_of_logits_is_the_output():
    torch.manual_seed(0)
    module = ReturnsDetections(Bidirectional).double().eval()
    opened = open_model(module, example=ids())
    expected = module(ids())["pred_logits"]
    torch.testing.assert_close(opened(ids())[0], expected)


class ConvolutionsOfSequences(Bidirectional):
    """The states are (tokens, sequences, width), and a part turns them for itself."""

    def __init__(self):
        super().__init__()
        self.convolutions = nn.Sequential(
            nn.Conv1d(WIDTH, 2 * WIDTH, 1),
            nn.GLU(1),
            nn.Conv1d(WIDTH, WIDTH, 3, padding=1, groups=WIDTH),
            nn.Conv1d(WIDTH, WIDTH, 1),
        )

    def forward(self, x, states):
        y = self.norm(x.transpose(0, 1)).transpose(1, 2)
        x = x + self.convolutions(y).transpose(1, 2).transpose(0, 1)
        states.append(x)
        x = x + self.ffn(self.norm(x))
        states.append(x)
        return x


class TokensBeforeSequences(Blocks):
    def forward(self, ids):
        x = self.embedding(ids).transpose(0, 1)
        self.states = [x]
        for block in self.blocks:
            x = block(x, self.states)
        self.states = [state.transpose(0, 1) for state in self.states]
        return self.head(self.norm(x)).transpose(0, 1)


def test_a_part_may_turn_the_states_for_itself():
    torch.manual_seed(0)
    module = TokensBeforeSequences(ConvolutionsOfSequences).double().eval()
    opened = open_model(module, example=ids(), loss="next")
    assert opened.model.config.placement == "pre"
    assert opened.model.config.attention == "a convolution"
    assert_states_are_its_own(opened, module, ids(1))


class PaddedHeadsFirst(HeadsFirst):
    """A padding mask of each sequence, for all heads of the first before those of the second."""

    def averages(self, x):
        q, k, v = self.maps(x).unflatten(-1, (3, HEADS, -1)).permute(2, 3, 0, 1, 4).flatten(1, 2)
        lengths = torch.tensor([[9], [4]])[: len(x)]
        hidden = (torch.arange(x.shape[1]) >= lengths).unsqueeze(1).repeat(HEADS, 1, 1)
        rows = torch.bmm(q, k.mT).masked_fill(hidden, -torch.inf).softmax(-1)
        return torch.bmm(rows, v).unflatten(0, (HEADS, -1)).permute(1, 2, 0, 3).flatten(-2)


def test_a_mask_of_heads_before_sequences_hides_the_padding_of_each_sequence():
    opened = open_model(made(PaddedHeadsFirst), example=ids())
    assert "a padding mask hides 5 of 18 tokens of its example" in opened.described


class WithQueries(nn.Module):
    """An encoder, and a decoder whose learned queries are added to its states."""

    def __init__(self):
        super().__init__()
        self.encoder = Blocks(DeepNormed)
        self.queries = nn.Parameter(torch.randn(5, WIDTH))
        self.decoder = nn.ModuleList(
            nn.MultiheadAttention(WIDTH, HEADS, batch_first=True) for _ in range(2)
        )
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))

    def forward(self, ids):
        x = self.encoder.embedding(ids)
        states = [x]
        for block in self.encoder.blocks:
            x = block(x, states)
        queries = self.queries.unsqueeze(0).repeat(len(ids), 1, 1)
        target = torch.zeros_like(queries)
        for attention, norm in zip(self.decoder, self.norms, strict=True):
            target = norm(target + attention(target + queries, x, x)[0])
        return target


def test_positions_that_are_added_to_states_are_no_sums_of_the_stream():
    torch.manual_seed(0)
    opened = open_model(WithQueries().double().eval(), example=ids())
    assert opened.model.config.blocks == 2
    assert "2 of its sums x + f(x)" in opened.described


class WithUsualNames(Bidirectional):
    """Its linear maps have names that maps of ctrans use too."""

    def __init__(self):
        super().__init__()
        self.adapter = nn.Linear(WIDTH, 2 * WIDTH)
        self.rows = nn.Linear(2 * WIDTH, WIDTH)
        self.graph = nn.LayerNorm(WIDTH)

    def forward(self, x, states):
        x = x + self.out(self.averages(self.norm(x)))
        states.append(x)
        x = x + self.rows(F.gelu(self.adapter(self.graph(x))))
        states.append(x)
        return x


def test_maps_may_have_any_name():
    module = made(WithUsualNames)
    opened = open_model(module, example=ids(), loss="next")
    assert_states_are_its_own(opened, module, ids(1))
    assert not opened.model.config.unread
