"""`open_model` on any module: states and outputs are the module's own, what is not found is asked
for by name.
"""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import ctrans
from ctrans.control import costate
from ctrans.dynamics.fields import ExposesHeads, ExposesWeights, check_map
from ctrans.examine.screening.screen import screen
from ctrans.interop import Imported
from ctrans.measure.forward.simulation import simulate
from solvers import ConfigError
from tests.interop import plain_modules
from tests.interop.plain_modules import HEADS, PLAIN, WIDTH, FusedAttention, ids, numbers, plain
from tests.interop.test_open_model import TINY

BLOCKS = ("stack", "layers", "blocks", "trunk")


def run(module, given):
    return module(**given) if isinstance(given, dict) else module(given)


def main(given):
    return next(iter(given.values())) if isinstance(given, dict) else given


def own_states(module, given):
    """What the module's own blocks put out, seen by hooks, sequences first; and its output."""
    blocks = next(
        part for name, part in module.named_modules() if name.rpartition(".")[2] in BLOCKS
    )
    seen = []
    handles = [
        block.register_forward_hook(
            lambda _, __, output: seen.append(output[0] if isinstance(output, tuple) else output)
        )
        for block in blocks
    ]
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)  # its own rounding
    with torch.no_grad():
        output = run(module, given)
    torch.backends.mha.set_fastpath_enabled(fast)
    for handle in handles:
        handle.remove()
    first = isinstance(module, plain_modules.Encoder) and not module.batch_first
    turned = [state.transpose(0, 1) for state in seen] if first else seen
    return (
        turned,
        (
            output["logits"]
            if isinstance(output, dict)
            else output.transpose(0, 1)
            if first
            else output
        ),
        first,
    )


class TwoMaps(nn.Module):
    def __init__(self, at_once):
        super().__init__()
        self.n, self.m, self.a = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH), FusedAttention(True)
        self.b, self.at_once = (
            nn.Sequential(nn.Linear(WIDTH, 48), nn.GELU(), nn.Linear(48, WIDTH)),
            at_once,
        )

    def forward(self, x):
        if self.at_once:
            return x + self.a(self.n(x)) + self.b(self.m(x))
        x = x + self.a(self.n(x))
        return x + self.b(self.m(x))


@pytest.mark.cases(1)
@pytest.mark.parametrize("name", PLAIN)
def test_states_and_output_are_the_modules_own_on_inputs_it_was_not_opened_with(name):
    module, (_, given, placement) = plain(name), PLAIN[name]
    opened = ctrans.open_model(module, example=given(0))
    states, output, first = own_states(module, given(5))
    tokens = main(given(5)).transpose(0, 1) if first else main(given(5))
    with torch.no_grad():
        found = opened.trajectory(tokens).states
        head = opened.head(found[-1])
    assert opened.config.placement == placement
    for state, expected in zip(found[2::2], states, strict=True):
        assert torch.allclose(state, expected, rtol=1e-5, atol=2e-6)
    assert torch.allclose(head, output, rtol=1e-5, atol=2e-6)


@pytest.mark.cases(1)
@pytest.mark.parametrize("name", ["language", "regression", "images"])
def test_a_module_of_plain_code_is_rebuilt_bit_for_bit(name):
    module, (_, given, _) = plain(name), PLAIN[name]
    opened = ctrans.open_model(module, example=given(0))
    states, output, _ = own_states(module, given(5))
    with torch.no_grad():
        found = opened.trajectory(given(5)).states
        assert all(map(torch.equal, found[2::2], states))
        assert torch.equal(opened.head(found[-1]), output)


@pytest.mark.cases(1)
@pytest.mark.parametrize("name", PLAIN)
def test_maps_say_what_they_are_and_it_is_so(name):
    opened = ctrans.open_model(plain(name).double(), example=_double(PLAIN[name][1](0)))
    causal = name in ("language", "regression", "torch, post, causal", "torch, tokens first")
    assert opened.causal == causal
    x = numbers(2, _imported(opened).adapter.like().shape[0], WIDTH).double()
    for part in opened.depth.sublayers[:2]:
        if not any(word in opened.described for word in ("does not end", "scaled")):
            assert isinstance(part.field, ExposesWeights), opened.described
            assert torch.allclose(
                part.field.output_projection(part.field.pre_projection(x)), part.field(x)
            )
    attention = opened.depth.sublayers[0].field
    if isinstance(attention, ExposesHeads):
        rows = attention.probabilities(x)
        assert rows.shape[1] == HEADS == attention.heads
        assert float(rows.triu(1).abs().max() == 0) == causal
    if name == "language":  # of any number of tokens
        check_map(attention, "attention", WIDTH)


def _imported(opened):
    return opened.model if isinstance(opened.model, Imported) else opened.model.model


def _double(given):
    if isinstance(given, dict):
        return {key: _double(value) for key, value in given.items()}
    return given.double() if given.is_floating_point() else given


@pytest.mark.cases(1)
@pytest.mark.parametrize("length", [1, 4, 13])
@pytest.mark.parametrize("name", ["language", "regression", "audio", "torch, tokens first"])
def test_sequences_of_any_length_and_number_are_read(name, length):
    module, (_, given, _) = plain(name), PLAIN[name]
    opened = ctrans.open_model(module, example=given(0))
    first = name == "torch, tokens first"
    tokens = (
        numbers(3, length, main(given(0)).shape[-1])
        if main(given(0)).is_floating_point()
        else ids(3, length, 3)
    )
    output = run(
        module, {"frames": tokens} if isinstance(given(0), dict) else tokens.T if first else tokens
    )
    expected = (
        output["logits"]
        if isinstance(output, dict)
        else output.transpose(0, 1)
        if first
        else output
    )
    with torch.no_grad():
        assert torch.allclose(
            opened.head(opened.depth(opened.embed(tokens))), expected, rtol=1e-5, atol=2e-6
        )


@pytest.mark.slow
@pytest.mark.parametrize("where", [(0.3, 0.3, 0.3), (0.3, 0.2, 0.1)])
def test_a_scale_of_what_is_added_is_the_length_of_the_segment(where):
    module = learned_language(where)
    opened = ctrans.open_model(module)
    assert opened.depth.lengths == tuple(scale for scale in where for _ in range(2))
    assert f"dt = {', '.join(f'{scale:g}' for scale in dict.fromkeys(where))}," in opened.described
    _, output, _ = own_states(module, ids(seed=4))
    with torch.no_grad():
        assert torch.equal(opened.head(opened.depth(opened.embed(ids(seed=4)))), output)
    halved = ctrans.open_model(module, dt=0.5)
    assert halved.depth.lengths == tuple(scale / 2 for scale in opened.depth.lengths)
    refined = opened.depth.refine(3)
    assert math.isclose(refined.times[-1], opened.depth.times[-1], rel_tol=1e-12)
    assert math.isclose(refined.lengths[0], where[0] / 3, rel_tol=1e-12)


def learned_language(scales):
    torch.manual_seed(0)
    return plain_modules.learned(plain_modules.LanguageModel(scales).eval(), 0.05)


def test_a_number_below_zero_and_one_for_each_channel_are_part_of_the_map():
    opened = ctrans.open_model(learned_language((-0.5, -0.5, -0.5)))
    assert set(opened.depth.lengths) == {1.0}
    assert "the scale is folded into the last weights of that map" in opened.described
    assert (
        "the model scales the output of its FFN"
        in ctrans.open_model(plain("images, by channel"), example=numbers(2, 3, 8, 8)).described
    )


def test_a_loss_of_ones_own_gives_autograds_gradient():
    module = plain("images")
    images, classes = numbers(2, 3, 8, 8), torch.tensor([3, 1])
    opened = ctrans.open_model(module, example=images, loss=F.cross_entropy)
    found = costate(opened, images, classes)
    x = images.clone().requires_grad_()
    start = opened.embed(x)
    (expected,) = torch.autograd.grad(F.cross_entropy(module(x), classes), start, allow_unused=True)
    assert expected is None  # the model makes its own X_0
    x0 = opened.embed(images).detach().requires_grad_()
    (expected,) = torch.autograd.grad(F.cross_entropy(opened.head(opened.depth(x0)), classes), x0)
    assert torch.allclose(found.costates[0], expected, rtol=1e-4, atol=1e-7)
    assert math.isclose(found.loss, float(F.cross_entropy(module(images), classes)), rel_tol=1e-5)


def test_a_loss_gets_all_that_the_module_returns():
    def loss(output, targets):
        assert set(output) == {"scores", "logits"}
        return F.mse_loss(output["scores"], targets)

    frames = numbers(2, 6, 5)
    opened = ctrans.open_model(plain("audio"), example={"frames": frames}, loss=loss)
    assert costate(opened, frames, numbers(2, 3)).loss > 0
    wrong = ctrans.open_model(
        plain("audio"), example={"frames": frames}, loss=lambda y, _: y["scores"]
    )
    with pytest.raises(ConfigError, match=r"loss=: <lambda> returned a tensor \(2, 3\)"):
        costate(wrong, frames, frames)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["images", "regression", "torch, post, causal"])
def test_the_screening_of_any_module_gives_all_but_what_no_module_says(name):
    given = _double(PLAIN[name][1](0))
    opened = ctrans.open_model(plain(name).double(), example=given)
    tokens, other = main(given), main(_double(PLAIN[name][1](1)))
    result = screen(opened, tokens, tokens, TINY, other=other)
    unknown = {step for step, finding in result.steps.items() if finding.verdict == "unknown"}
    lost = unknown | set(result.missing)
    assert not lost, result.missing
    assert len(simulate(opened, tokens).mean_abs) == 5


def test_weights_keep_their_objects_and_a_copy_asks_its_own_module():
    module = plain("language")
    opened = ctrans.open_model(module)
    assert {id(p) for p in opened.depth.parameters()} <= {id(p) for p in module.parameters()}
    copied = copy.deepcopy(opened.model)
    assert copied.depth.sublayers[0].field.adapter.model is copied.model
    with torch.no_grad():
        assert torch.equal(copied.head(copied.depth(copied.embed(ids()))), module(ids()))


def test_embed_and_head_take_the_place_of_the_modules():
    module = plain("language")
    opened = ctrans.open_model(
        module, embed=lambda idx: module.tok(idx), head=lambda x: x.sum(-1, keepdim=True)
    )
    assert torch.equal(opened.embed(ids()), module.tok(ids()))
    assert opened.head(numbers(2, 7, WIDTH)).shape == (2, 7, 1)


class Parallel(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln, self.attn, self.mlp = (
            nn.LayerNorm(WIDTH),
            plain_modules.FusedAttention(True),
            nn.Linear(WIDTH, WIDTH),
        )

    def forward(self, x):
        u = self.ln(x)
        return x + self.attn(u) + self.mlp(u)


class TwoAttentions(plain_modules.PreBlock):
    def __init__(self):
        super().__init__(1.0)
        self.again = plain_modules.FusedAttention(True)

    def forward(self, x):
        return super().forward(x + self.again(x))


class InTheBlock(nn.Module):
    """Attention by the block's own code."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 48), nn.Linear(48, WIDTH)

    def forward(self, x):
        x = x + self.o(F.scaled_dot_product_attention(self.q(x), self.k(x), self.v(x)))
        return x + self.down(self.up(x).relu())


class OddActivation(plain_modules.PreBlock):
    def __init__(self):
        super().__init__(1.0)

    def forward(self, x):
        x = x + self.mix(self.ln_a(x))
        return x + self.shrink(torch.sin(self.grow(self.ln_b(x))))


class Of(nn.Module):
    """An embedding, blocks of that kind, and a head."""

    def __init__(self, kind, *others):
        super().__init__()
        self.table, self.stack = nn.Embedding(31, WIDTH), nn.ModuleList([kind(), kind()])
        self.others = nn.ModuleList(others)

    def forward(self, idx):
        x = self.table(idx)
        for block in [*self.stack, *self.others]:
            x = block(x)
        return x


class ReadsTheInputAgain(plain_modules.LanguageModel):
    def forward(self, idx):
        return super().forward(idx) * idx.unsqueeze(-1)


class Apart(nn.Module):
    """No list of blocks."""

    def __init__(self):
        super().__init__()
        self.table, self.one, self.two = (
            nn.Embedding(31, WIDTH),
            plain_modules.PreBlock(1.0),
            plain_modules.PreBlock(1.0),
        )

    def forward(self, idx):
        return self.two(self.one(self.table(idx)))


class TwoStacks(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = (
            Of(lambda: plain_modules.PreBlock(1.0)),
            Of(lambda: plain_modules.PreBlock(1.0)),
        )

    def forward(self, idx):
        return self.first(idx) + self.second(idx)


@pytest.mark.cases(10)
@pytest.mark.parametrize(
    ("module", "options", "words"),
    [
        (
            plain("language"),
            {"blocks": "stacks"},
            "no list of modules 'stacks': it has stack: 3 PreBlock",
        ),
        (plain("language"), {"ffn": "mlp"}, "no FFN found in PreBlock, which has ln_a"),
        (plain("images"), {}, "example=: ImageClassifier embeds no tokens"),
        (
            plain("images"),
            {"example": numbers(2, 3)},
            r"example=: ImageClassifier does not run on a tensor \(2, 3\)",
        ),
        (plain("language"), {"loss": "mse"}, "loss 'mse' is not known"),
        (
            plain("images"),
            {"example": numbers(2, 3, 8, 8), "loss": "next"},
            "embeds no tokens, so it cannot predict any",
        ),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else None,
)
def test_what_is_not_found_is_asked_for_by_name_in_a_line(module, options, words):
    with pytest.raises(ConfigError, match=words) as caught:
        ctrans.open_model(module.eval(), **options)
    assert "\n" not in str(caught.value)


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    ("module", "example", "placement", "kinds"),
    [
        (Of(TwoAttentions), None, "none/pre", "attention attention ffn"),
        (Apart(), None, "pre", "attention ffn"),
        (Of(InTheBlock), None, "none", "attention ffn"),
        (Of(OddActivation), None, "pre", "attention ffn"),
        (ReadsTheInputAgain(), None, "pre", "attention ffn"),
        (TwoStacks(), None, "pre", "attention ffn"),
        (
            nn.TransformerDecoder(nn.TransformerDecoderLayer(WIDTH, 4, 48, batch_first=True), 2),
            {"tgt": numbers(2, 5, WIDTH), "memory": numbers(2, 4, WIDTH)},
            "post",
            "attention attention ffn",
        ),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else None,
)
def test_blocks_that_are_not_read_by_their_modules_are_read_by_operations(
    module, example, placement, kinds
):
    opened = ctrans.open_model(module.eval(), example=example)
    assert opened.config.placement == placement
    of_a_block = kinds.split()
    found = [part.kind for part in opened.depth.sublayers]
    assert found == of_a_block * (len(found) // len(of_a_block))


@pytest.mark.cases(1)
@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize(
    ("names", "words"),
    [
        (
            {"attention": "b", "ffn": "a"},
            "are swapped: in .* 'a' mixes tokens and 'b' does not; give attention='a', ffn='b'",
        ),
        ({"attention": "b"}, "'b' of .* mixes no tokens, but a does: give attention='a'"),
        ({"ffn": "a"}, "'a' of .* mixes tokens, as attention does: pass it as attention="),
    ],
)
def test_names_that_are_swapped_are_told_by_what_mixes_tokens(names, words, at_once):
    """Where both are added at once nothing else would tell: their sum is one and the same."""
    model = plain("language")
    model.stack = nn.ModuleList([TwoMaps(at_once) for _ in range(2)])
    with pytest.raises(ConfigError, match=words):
        ctrans.open_model(model, **names)
    assert ctrans.open_model(model, attention="a", ffn="b").config.placement == "pre"


def test_attention_and_ffn_at_once_are_one_segment():
    module = Of(Parallel).eval()
    opened = ctrans.open_model(module)
    assert (opened.config.parallel, opened.config.placement, opened.depth.per_block) == (
        True,
        "pre",
        1,
    )
    tokens = torch.arange(1, 7).unsqueeze(0)
    assert torch.allclose(opened(tokens)[0], module(tokens), atol=1e-5)


def test_names_lead_where_several_lists_could_be():
    module = TwoStacks().first.eval()
    opened = ctrans.open_model(module, blocks="stack", attention="mix", ffn=("grow", "shrink"))
    assert opened.config.attention == "FusedAttention"


def test_a_gpt_without_its_mask_is_said_to_read_both_ways():
    class Unmasked(nn.Module):
        def __init__(self):
            super().__init__()
            self.tokens = nn.Embedding(40, 16)
            layer = nn.TransformerEncoderLayer(
                16, 2, 32, dropout=0.0, norm_first=True, batch_first=True
            )
            self.blocks = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
            self.head = nn.Linear(16, 40, bias=False)

        def forward(self, ids):
            return self.head(self.blocks(self.tokens(ids)))

    opened = ctrans.open_model(Unmasked())
    assert not opened.causal
    assert "causal mask is missing" in opened.described


def test_a_loss_that_stands_before_the_logits_is_no_logits():
    class LossFirst(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = plain("language")

        def forward(self, ids):
            logits = self.inner(ids)
            return logits.mean(), logits

    torch.manual_seed(0)
    model = LossFirst()
    opened, bare = (
        ctrans.open_model(model, loss="next"),
        ctrans.open_model(model.inner, loss="next"),
    )
    tokens = torch.randint(0, bare.vocabulary, (2, 6))
    assert opened.predicts
    assert torch.equal(
        opened.model.head(opened.model.embed(tokens)), bare.model.head(bare.model.embed(tokens))
    )


def test_a_block_whose_residual_sum_is_missing_is_named():
    class Block(nn.Module):
        def __init__(self, whole):
            super().__init__()
            self.whole, self.n1, self.n2 = whole, nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
            self.attn = FusedAttention(False)
            self.mlp = nn.Sequential(nn.Linear(WIDTH, 24), nn.GELU(), nn.Linear(24, WIDTH))

        def forward(self, x):
            x = x + self.attn(self.n1(x))
            return self.whole * x + self.mlp(self.n2(x))

    class Forgetful(nn.Module):
        def __init__(self):
            super().__init__()
            self.tokens, self.blocks = (
                nn.Embedding(40, WIDTH),
                nn.ModuleList(Block(i != 1) for i in range(3)),
            )

        def forward(self, ids):
            x = self.tokens(ids)
            for block in self.blocks:
                x = block(x)
            return x @ self.tokens.weight.T

    opened = ctrans.open_model(Forgetful())
    assert opened.config.placement == "pre, unknown"
    assert "part: it is no single sum x + f(x)" in opened.described
