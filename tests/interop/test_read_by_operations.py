"""Models whose code has no module for attention, for the FFN, for norms or for blocks: they are read
from the operations of a forward pass. Each is compared with its own formulas, written by hand.
"""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import ctrans
from ctrans.control.model_check import check_model
from ctrans.control.regularization import Regularization
from ctrans.examine.diagnosis.reading import place_of
from solvers import ConfigError

WIDTH = 16
HEADS = 4
VOCABULARY = 31
LAYERS = 3
TOKENS = torch.randint(0, VOCABULARY, (2, 7), generator=torch.Generator().manual_seed(0))


def drawn(*shape):
    return nn.Parameter(torch.randn(shape) * shape[-1] ** -0.5)


def by_head(x):
    return x.unflatten(-1, (HEADS, -1)).transpose(-2, -3)


def attention(q, k, v):
    mask = torch.ones(q.shape[-2], q.shape[-2], dtype=torch.bool).tril()
    scores = by_head(q) @ by_head(k).mT / (q.shape[-1] // HEADS) ** 0.5
    rows = scores.masked_fill(~mask, -torch.inf).softmax(-1)
    return (rows @ by_head(v)).transpose(-2, -3).flatten(-2)


def rms(x):
    return x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt()


class Stack(nn.Module):
    """A table, layers that `layer(i, x)` computes, a norm and a head. `step(i, x)` is the same by
    hand: the states after attention and after the FFN.
    """

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Embedding(64, WIDTH)
        self.final = nn.LayerNorm(WIDTH)
        self.make()

    def states(self, ids):
        x = self.table(ids) + self.positions(torch.arange(ids.shape[1]))
        states = [x]
        for i in range(LAYERS):
            x = self.layer(i, x)
            states.append(x)
        return states

    def forward(self, ids):
        return self.final(self.states(ids)[-1]) @ self.table.weight.T


class MethodOfTheBlock(Stack):
    """The pre-LN GPT of 15 lines whose attention is a method."""

    placement = "pre"

    def make(self):
        for name, out in (("qkv", 3 * WIDTH), ("out", WIDTH), ("up", 4 * WIDTH)):
            setattr(self, name, nn.ModuleList(nn.Linear(WIDTH, out) for _ in range(LAYERS)))
        self.down = nn.ModuleList(nn.Linear(4 * WIDTH, WIDTH) for _ in range(LAYERS))
        self.n1 = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(LAYERS))
        self.n2 = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(LAYERS))

    def attend(self, i, x):
        return self.out[i](attention(*self.qkv[i](x).chunk(3, -1)))

    def layer(self, i, x):
        x = x + self.attend(i, self.n1[i](x))
        return x + self.down[i](F.gelu(self.up[i](self.n2[i](x))))


class BareMatrices(Stack):
    """Parameters alone, each used as x @ W, with norms by hand, and an offset behind the sum."""

    placement = "pre"

    def make(self):
        self.w = nn.ParameterDict()
        for i in range(LAYERS):
            for name in "qkvo":
                self.w[f"{name}{i}"] = drawn(WIDTH, WIDTH)
            self.w[f"u{i}"] = drawn(WIDTH, 2 * WIDTH)
            self.w[f"d{i}"] = drawn(2 * WIDTH, WIDTH)
            self.w[f"b{i}"] = drawn(WIDTH)
            self.w[f"g{i}"] = nn.Parameter(torch.rand(WIDTH) + 0.5)

    def layer(self, i, x):
        w = self.w
        u = rms(x) * w[f"g{i}"]
        x = x + attention(u @ w[f"q{i}"], u @ w[f"k{i}"], u @ w[f"v{i}"]) @ w[f"o{i}"]
        return x + F.relu(rms(x) @ w[f"u{i}"]) @ w[f"d{i}"] + w[f"b{i}"]


class SlicesOfOneTensor(Stack):
    """All layers in one tensor for each kind, contracted by einsum, as in code from JAX."""

    placement = "peri"

    def make(self):
        self.qkv = drawn(LAYERS, 3, WIDTH, WIDTH)
        self.out = drawn(LAYERS, HEADS, WIDTH // HEADS, WIDTH)
        self.up = drawn(LAYERS, WIDTH, 2 * WIDTH)
        self.down = drawn(LAYERS, 2 * WIDTH, WIDTH)

    def layer(self, i, x):
        u = rms(x)
        q, k, v = (torch.einsum("btd,de->bte", u, self.qkv[i, j]) for j in range(3))
        y = attention(q, k, v).unflatten(-1, (HEADS, -1))
        x = x + rms(torch.einsum("bthk,hkd->btd", y, self.out[i]))
        return x + rms(F.silu(rms(x) @ self.up[i]) @ self.down[i])


class ScaledState(Stack):
    """N(a x + f(x)), as DeepNorm, with functional norms."""

    placement = "deepnorm"

    def make(self):
        self.qkv, self.out = drawn(LAYERS, 3 * WIDTH, WIDTH), drawn(LAYERS, WIDTH, WIDTH)
        self.up, self.down = drawn(LAYERS, WIDTH, WIDTH), drawn(LAYERS, WIDTH, WIDTH)
        self.gain = nn.Parameter(torch.rand(2 * LAYERS, WIDTH) + 0.5)

    def layer(self, i, x):
        y = F.linear(attention(*F.linear(x, self.qkv[i]).chunk(3, -1)), self.out[i])
        x = F.layer_norm(2.5 * x + y, (WIDTH,), self.gain[2 * i], None)
        y = F.linear(F.gelu(F.linear(x, self.up[i])), self.down[i])
        return F.layer_norm(x * 2.5 + y, (WIDTH,), self.gain[2 * i + 1], None)


class InParallel(Stack):
    """Attention and FFN read one norm, and the sum adds both."""

    placement = "pre"

    def make(self):
        self.fused = nn.ModuleList(nn.Linear(WIDTH, 3 * WIDTH) for _ in range(LAYERS))
        self.out = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        self.up = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        self.down = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))

    def layer(self, i, x):
        u = F.layer_norm(x, (WIDTH,))
        y = self.out[i](attention(*self.fused[i](u).chunk(3, -1)))
        return x + y + self.down[i](torch.tanh(self.up[i](u)))


class Routed(MethodOfTheBlock):
    """Experts in a loop that leaves out those without tokens, and that adds in place."""

    def make(self):
        super().make()
        self.router = nn.ModuleList(nn.Linear(WIDTH, 3) for _ in range(LAYERS))
        self.experts = drawn(LAYERS, 3, WIDTH, WIDTH)

    def layer(self, i, x):
        x = x + self.attend(i, self.n1[i](x))
        u = self.n2[i](x)
        flat = u.flatten(0, 1)
        best = self.router[i](flat).argmax(-1)
        result = torch.zeros_like(flat)
        for e in range(3):
            (chosen,) = torch.where(best == e)
            if chosen.numel():
                result.index_add_(0, chosen, torch.tanh(flat[chosen] @ self.experts[i, e]))
        return x + result.view_as(x)


class ChannelsFirst(Stack):
    """States are (batch, width, tokens): maps are convolutions, norms act on axis 1."""

    placement = "pre"

    def make(self):
        self.qkv = nn.ModuleList(nn.Conv1d(WIDTH, 3 * WIDTH, 1) for _ in range(LAYERS))
        self.out = nn.ModuleList(nn.Conv1d(WIDTH, WIDTH, 1) for _ in range(LAYERS))
        self.up = nn.ModuleList(nn.Conv1d(WIDTH, WIDTH, 1) for _ in range(LAYERS))
        self.down = nn.ModuleList(nn.Conv1d(WIDTH, WIDTH, 1) for _ in range(LAYERS))

    def states(self, ids):
        x = (self.table(ids) + self.positions(torch.arange(ids.shape[1]))).mT.contiguous()
        states = [x]
        for i in range(LAYERS):
            x = self.layer(i, x)
            states.append(x)
        return [x.mT for x in states]

    def layer(self, i, x):
        q, k, v = (z.mT for z in self.qkv[i](self.norm(x)).chunk(3, 1))
        x = x + self.out[i](attention(q, k, v).mT)
        return x + self.down[i](F.gelu(self.up[i](self.norm(x))))

    @staticmethod
    def norm(x):
        return (x - x.mean(1, keepdim=True)) / (x.var(1, keepdim=True, correction=0) + 1e-6).sqrt()


class ValuesOfTheIds(Stack):
    """A second table of the ids adds to the values, and states are mixed with the first one."""

    placement = "pre, mix"

    def make(self):
        MethodOfTheBlock.make(self)
        self.extra = nn.Embedding(VOCABULARY, WIDTH)
        self.mix = nn.Parameter(torch.rand(LAYERS, 2) + 0.5)

    def states(self, ids):
        first = x = rms(self.table(ids))
        states = []
        for i in range(LAYERS):
            x = self.mix[i, 0] * x + self.mix[i, 1] * first
            states.append(x)
            q, k, v = self.qkv[i](self.n1[i](x)).chunk(3, -1)
            x = x + self.out[i](attention(q, k, v + self.extra(ids)))
            x = x + self.down[i](F.relu(self.up[i](self.n2[i](x))).square())
            states.append(x)
        return states


KINDS = {
    MethodOfTheBlock: ["attention", "ffn"] * LAYERS,
    BareMatrices: ["attention", "ffn"] * LAYERS,
    SlicesOfOneTensor: ["attention", "ffn"] * LAYERS,
    ScaledState: ["attention", "ffn"] * LAYERS,
    InParallel: ["parallel"] * LAYERS,
    Routed: ["attention", "ffn"] * LAYERS,
    ChannelsFirst: ["attention", "ffn"] * LAYERS,
    ValuesOfTheIds: ["attention", "ffn", "part"] * (LAYERS - 1) + ["attention", "ffn"],
}
every_kind = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)


def made(kind):
    torch.manual_seed(1)
    return kind().double().eval()


def near(x, y):
    return x.shape == y.shape and torch.allclose(x, y, rtol=1e-10, atol=1e-11)


@pytest.mark.cases(2)
@every_kind
def test_states_placement_and_kinds_are_the_models_own(kind):
    model = made(kind)
    opened = ctrans.open_model(model, example=TOKENS)
    assert [part.kind for part in opened.depth.sublayers] == KINDS[kind]
    assert opened.config.placement == kind.placement
    with torch.no_grad():
        states = opened.trajectory(TOKENS).states
        for own in model.states(TOKENS):
            assert any(near(x, own) for x in states)
        assert near(opened.head(states[-1]), model(TOKENS))


@pytest.mark.cases(2)
@every_kind
def test_maps_are_those_of_the_model_at_other_states_and_lengths(kind):
    """A layer of the model on random states, in the order of its own code."""
    model = made(kind)
    opened = ctrans.open_model(model, example=TOKENS)
    if kind is ValuesOfTheIds:
        return  # its maps read the ids
    generator = torch.Generator().manual_seed(2)
    for length in (7, 4, 9):
        x = torch.randn(3, length, WIDTH, generator=generator, dtype=torch.float64)
        given = x.mT if kind is ChannelsFirst else x
        with torch.no_grad():
            expected = model.layer(1, given)
            found = x
            each = opened.depth.per_block
            for k in range(each, 2 * each):
                found = opened.depth.sublayers[k].step(found, opened.depth.lengths[k])
        assert near(found, expected.mT if kind is ChannelsFirst else expected)


@pytest.mark.cases(4)
@every_kind
def test_the_costate_is_autograds_derivative_by_the_first_state(kind):
    model = made(kind)
    opened = ctrans.open_model(model, example=TOKENS)
    targets = TOKENS.roll(-1, 1)
    found = ctrans.costate(opened, TOKENS, targets)
    seen = []

    def keep(module, args, output):
        x = output.detach().requires_grad_()
        seen.append(x)
        return x

    if kind is ValuesOfTheIds:
        return  # its first state is a mixture, which no module returns
    handle = model.table.register_forward_hook(keep)
    F.cross_entropy(model(TOKENS).flatten(0, 1), targets.flatten()).backward()
    handle.remove()
    assert near(found.costates[0], seen[0].grad)


@pytest.mark.cases(2)
@pytest.mark.parametrize("kind", [MethodOfTheBlock, BareMatrices, SlicesOfOneTensor])
def test_rows_and_matrices_are_the_models_own(kind):
    model = made(kind)
    opened = ctrans.open_model(model, example=TOKENS)
    first = opened.depth.sublayers[0]
    x = opened.embed(TOKENS)
    given = first.given(x)
    mask = torch.ones(7, 7, dtype=torch.bool).tril()
    rows = 0
    for head, weights in enumerate(first.field.head_matrices()):
        q, k = (given @ weight.T for weight in (weights.query, weights.key))
        if weights.query_offset is not None:
            q = q + weights.query_offset
        scores = (q @ k.mT / (WIDTH // HEADS) ** 0.5).masked_fill(~mask, -torch.inf)
        rows = scores.softmax(-1)
        assert near(first.field.probabilities(x=given)[:, head], rows)
    found = {matrix.role for matrix in first.field.matrices()}
    assert found == {"query", "key", "value", "out"}


def test_a_copied_map_has_weights_of_its_own():
    opened = ctrans.open_model(made(BareMatrices), example=TOKENS)
    field = opened.depth.sublayers[1].field
    x = torch.randn(2, 7, WIDTH, dtype=torch.float64)
    before = field(x)
    twin = copy.deepcopy(field)
    with torch.no_grad():
        for weight in twin.parameters():
            weight.zero_()
    assert torch.equal(field(x), before)
    assert not twin(x).any()


@pytest.mark.cases(2)
@every_kind
def test_a_copied_model_computes_with_its_own_weights(kind):
    model = made(kind)
    opened = ctrans.open_model(model, example=TOKENS)
    twin = copy.deepcopy(opened)
    with torch.no_grad():
        for parameter in twin.imported.model.parameters():
            parameter.mul_(1.1)
        for each, own in ((twin, twin.imported.model), (opened, model)):
            assert near(each.head(each.trajectory(TOKENS).states[-1]), own(TOKENS))


class FeedForwardFirst(MethodOfTheBlock):
    """Its attention reads both ways, and stands behind the FFN."""

    def layer(self, i, x):
        x = x + self.down[i](F.gelu(self.up[i](self.n2[i](x))))
        u = self.n1[i](x)
        return x + self.out[i](F.scaled_dot_product_attention(u, u, u))


def test_tokens_that_read_both_ways_are_seen_behind_an_ffn():
    opened = ctrans.open_model(made(FeedForwardFirst), example=TOKENS)
    assert [part.kind for part in opened.depth.sublayers] == ["ffn", "attention"] * LAYERS
    assert not opened.causal
    assert (opened.depth.per_block, opened.config.blocks) == (2, LAYERS)
    assert f": {LAYERS} blocks" in str(opened.config)
    assert place_of(opened.depth, 3) == "block 1, attention (segment 3)"


class OneMore(MethodOfTheBlock):
    """With a residual FFN behind its blocks."""

    def layer(self, i, x):
        x = super().layer(i, x)
        if i == LAYERS - 1:
            x = x + self.down[0](F.gelu(self.up[0](self.n2[0](x))))
        return x


def test_parts_that_are_no_blocks_are_called_parts():
    opened = ctrans.open_model(made(OneMore), example=TOKENS)
    assert opened.depth.per_block == 1
    assert f": {2 * LAYERS + 1} parts" in str(opened.config)
    assert place_of(opened.depth, 3) == "part 3, FFN (segment 3)"


def test_unread_parts_behind_a_read_one_are_named_in_a_diagnosis():
    opened = ctrans.open_model(made(Limited), example=TOKENS)
    assert opened.depth.sublayers[0].kind == "attention"
    assert "decides by the values" in ctrans.diagnose(opened, TOKENS).missing["model"]


def test_changed_weights_are_seen():
    model = made(SlicesOfOneTensor)
    opened = ctrans.open_model(model, example=TOKENS)
    with torch.no_grad():
        model.up.mul_(1.5)
        assert near(opened.head(opened.trajectory(TOKENS).states[-1]), model(TOKENS))


@pytest.mark.cases(3)
def test_no_penalty_is_proven_where_a_map_shows_no_output_projection():
    opened = ctrans.open_model(made(BareMatrices), example=TOKENS)
    found = check_model(opened, TOKENS, TOKENS.roll(-1, 1), Regularization(weight_decay=5.0))
    assert found.training_threshold.upper == math.inf
    assert found.verdict == "open"
    assert list(found.missing) == [f"segment {k} (attention)" for k in (0, 2, 4)]


def test_a_norm_of_torchs_functions_is_no_norm_module():
    """`torch.norm` is called like the kind of module."""

    class ByLength(MethodOfTheBlock):
        def layer(self, i, x):
            x = x + self.attend(i, x / x.norm(dim=-1, keepdim=True) * WIDTH**0.5)
            return x + self.down[i](F.gelu(self.up[i](self.n2[i](x))))

    opened = ctrans.open_model(made(ByLength), example=TOKENS)
    assert opened.config.placement == "pre"
    assert opened.config.norm == "layernorm/rmsnorm"


class LoopOverTokens(MethodOfTheBlock):
    """A decaying sum over tokens in a loop: another length needs other operations."""

    def attend(self, i, x):
        state, seen = 0.0, []
        for t in range(x.shape[1]):
            state = 0.9 * state + x[:, t] @ self.out[i].weight
            seen.append(state)
        return torch.stack(seen, 1)


def test_a_loop_over_tokens_is_read_at_another_length():
    opened = ctrans.open_model(made(LoopOverTokens), example=TOKENS)
    with torch.no_grad():
        for tokens in (TOKENS, torch.cat([TOKENS, TOKENS], 1), TOKENS[:, :3]):
            assert near(opened(tokens)[0], made(LoopOverTokens)(tokens))


class ScaledByLength(LoopOverTokens):
    """Its segments are longer for longer texts."""

    def attend(self, i, x):
        return super().attend(i, x) * (1.0 + math.log(x.shape[1] / TOKENS.shape[1]))


def test_a_segment_whose_length_is_that_of_the_text_is_refused_at_another_one():
    opened = ctrans.open_model(made(ScaledByLength), example=TOKENS)
    longer = torch.cat([TOKENS, TOKENS], 1)
    with torch.no_grad():
        assert near(opened(TOKENS)[0], made(ScaledByLength)(TOKENS))
    for _ in range(2):  # a refusal is no reason to accept it later
        with pytest.raises(
            ConfigError, match="open it again, with inputs of this shape as example="
        ):
            opened(longer)


class WithoutGradients(MethodOfTheBlock):
    """Queries are computed without gradients."""

    def attend(self, i, x):
        q, k, v = self.qkv[i](x).chunk(3, -1)
        with torch.no_grad():
            q = 1.0 * q
        return self.out[i](attention(q, k, v))


@pytest.mark.cases(3)
def test_derivatives_are_the_modules_own_also_where_it_computes_without_gradients():
    model = made(WithoutGradients)
    opened = ctrans.open_model(model, example=TOKENS)
    assert [part.kind for part in opened.depth.sublayers] == ["part", "ffn"] * LAYERS
    targets = TOKENS.roll(-1, 1)
    seen = []

    def keep(module, args, output):
        seen.append(output.detach().requires_grad_())
        return seen[0]

    handle = model.table.register_forward_hook(keep)
    F.cross_entropy(model(TOKENS).flatten(0, 1), targets.flatten()).backward()
    handle.remove()
    assert near(ctrans.costate(opened, TOKENS, targets).costates[0], seen[0].grad)


@pytest.mark.cases(2)
def test_what_maps_read_beside_their_state_follows_the_weights():
    model = made(ValuesOfTheIds)
    opened = ctrans.open_model(model, example=TOKENS)
    with torch.no_grad():
        model.extra.weight.mul_(3)
        assert near(opened.head(opened.trajectory(TOKENS).states[-1]), model(TOKENS))


class OverTokens(MethodOfTheBlock):
    """Its mean square is that of all tokens of a sequence."""

    def layer(self, i, x):
        scale = (x.square().mean((-2, -1), keepdim=True) + 1e-5).rsqrt()
        x = x + self.attend(i, x * scale)
        return x + self.down[i](F.gelu(self.up[i](self.n2[i](x))))


class Limited(MethodOfTheBlock):
    """A branch on the state that the example does not take."""

    def layer(self, i, x):
        x = x + self.attend(i, self.n1[i](x))
        if x.abs().max() > 50:
            x = x * 0.5
        return x + self.down[i](F.gelu(self.up[i](self.n2[i](x))))


@pytest.mark.parametrize(
    ("kind", "kinds"), [(OverTokens, ["part", "ffn"]), (Limited, ["attention", "part"])]
)
def test_what_is_no_norm_of_tokens_or_depends_on_values_is_unknown(kind, kinds):
    model = made(kind)
    opened = ctrans.open_model(model, example=TOKENS)
    assert [part.kind for part in opened.depth.sublayers] == kinds * LAYERS
    given = 100 * torch.randn(2, 7, WIDTH, dtype=torch.float64)
    x = given
    with torch.no_grad():
        for part in opened.depth.sublayers[2:4]:
            x = part.step(x, 1.0)
        assert near(x, model.layer(1, given))


def test_channels_first_is_seen_without_a_vector_of_that_width():
    opened = ctrans.open_model(made(ChannelsFirst), example=TOKENS)
    assert opened.embed(TOKENS).shape == (2, 7, WIDTH)


def test_rows_of_heads_in_the_first_axis_are_told_from_those_of_sequences():
    """With one sequence the order of sequences and heads does not show."""

    class Folded(MethodOfTheBlock):
        def attend(self, i, x):
            q, k, v = (
                by_head(z).transpose(0, 1).flatten(0, 1) for z in self.qkv[i](x).chunk(3, -1)
            )
            self.rows = (q @ k.mT / 2).softmax(-1)
            y = (self.rows @ v).unflatten(0, (HEADS, -1)).transpose(0, 1)
            return self.out[i](y.transpose(-2, -3).flatten(-2))

    model = made(Folded)
    opened = ctrans.open_model(model, example=TOKENS[:1])
    attention = opened.depth.sublayers[0]
    given = attention.given(opened.embed(TOKENS))
    with torch.no_grad():
        model.attend(0, given)
        rows = model.rows.unflatten(0, (HEADS, -1)).transpose(0, 1)
        assert near(attention.field.probabilities(given), rows)


def test_a_sublayer_is_compared_with_its_like():
    """Behind a quiet FFN of its own each loud attention is as loud as the others."""
    model = made(OneMore)
    with torch.no_grad():
        for weight in model.down.parameters():
            weight.mul_(1e-3)
    found = ctrans.diagnose(model, TOKENS, TOKENS.roll(-1, 1)).findings
    assert not [each.place for each in found if each.check == "sublayer output too large"]
