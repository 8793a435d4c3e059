"""A penalty is shown only if the costate is what the model's own loss shows, and has its digits."""

import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ctrans.control import own_pass
from ctrans.control.costate import costate
from ctrans.control.derivatives_agree import SegmentChange
from ctrans.control.model_check import check_model
from ctrans.control.regularization import Regularization
from ctrans.dynamics.fields import ACTIVATIONS, Activation
from ctrans.interop import open_model
from ctrans.model.config import GPTConfig
from ctrans.model.gpt import GPT
from solvers import ConfigError
from tests.interop.test_factors import TOKENS, VOCABULARY, Block, Model

REASON = "than the costate shows"


def gpt(dtype=torch.float64, seed=0, **options):
    defaults = {"depth": 1, "width": 8, "heads": 2, "context": 6, "bias": False, "placement": "pre"}
    return GPT(GPTConfig(**defaults | options), seed=seed).to(dtype)


def text(tokens=6, vocabulary=256, seed=0):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, vocabulary, (1, tokens + 1), generator=generator)
    return ids[:, :-1], ids[:, 1:]


def opened(kind, block=Block, prepare=None):
    torch.manual_seed(0)
    module = kind(block()).double().eval()
    if prepare is not None:
        prepare(module)
    tokens, targets = text(TOKENS, VOCABULARY)
    return open_model(module, example=tokens).model, tokens, targets


class KeepingBlock(Block):
    def forward(self, x):
        x = x + self.attention(self.n1(x))
        self.kept = self.ffn(self.n2(x))
        return x + self.kept


class ReadsWhatABlockKept(Model):
    def forward(self, ids):
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x + 5 * self.blocks[0].kept))


class SixTimes(Block):
    def forward(self, x):
        x = x + self.attention(self.n1(x))
        return x + 6 * self.ffn(self.n2(x))


class ShrinksGradients(Model):
    def forward(self, ids):
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(0.1 * x + 0.9 * x.detach()))


def with_backward_hook(module):
    module.norm.register_full_backward_hook(lambda part, into, out: tuple(g / 100 for g in into))


def with_tied_head(module):
    matrix = nn.Parameter(torch.randn(4 * 16, 16).double() / 4)
    module.blocks[0].ffn.up.weight = matrix
    module.head.weight = matrix


@pytest.mark.parametrize(
    ("kind", "block", "prepare"),
    [
        (ShrinksGradients, Block, None),
        (Model, Block, with_backward_hook),
        (Model, Block, with_tied_head),
    ],
    ids=["detach", "a backward hook", "a tied head"],
)
def test_a_costate_that_is_not_that_of_the_own_loss_leaves_no_number(kind, block, prepare):
    model, tokens, targets = opened(kind, block, prepare)
    check = check_model(model, tokens, targets, Regularization(weight_decay=0.5))
    # what torch's functions show is in the last part, which is then none of the known ones
    reasons = (
        REASON,
        "none of the known parts",
        "give its loss as loss=",
        "with other weights of its parts the output is not that of the states",
    )
    assert any(reason in check.no_threshold for reason in reasons)
    assert check.training_threshold is None
    assert check.step_verdict == "open"


def test_what_a_block_kept_and_its_head_adds_again_is_in_its_sum():
    checks = []
    for kind, block in ((ReadsWhatABlockKept, KeepingBlock), (Model, SixTimes)):
        model, tokens, targets = opened(kind, block)
        assert model.depth.lengths == pytest.approx((1.0, 6.0))
        checks.append(check_model(model, tokens, targets, Regularization(weight_decay=0.5)))
    kept, plain = (check.training_threshold for check in checks)
    assert math.isfinite(kept.upper)
    assert (kept.lower, kept.upper) == pytest.approx((plain.lower, plain.upper), rel=1e-6)


def test_a_plain_model_agrees_with_its_own_pass_and_is_left_as_it_was():
    model, tokens, targets = opened(Model)
    before = [weight.clone() for weight in model.parameters()]
    check = check_model(model, tokens, targets)
    assert check.no_threshold == ""
    assert math.isfinite(check.training_threshold.upper)
    assert all(map(torch.equal, before, model.parameters()))


class StopsALittle(Model):
    """An error of 1.5% in each costate."""

    def forward(self, ids):
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(0.985 * x + 0.015 * x.detach()))


def test_an_error_below_the_noise_of_single_precision_leaves_no_number():
    model, tokens, targets = opened(StopsALittle)
    model.float()
    assert REASON in check_model(model, tokens, targets).no_threshold


class ReadsTheFirstBlockAgain(GPT):
    """Its head also reads what the first block adds."""

    def forward(self, tokens, targets=None):
        x = first = self.embed(tokens)
        for k, sublayer in enumerate(self.depth.sublayers):
            x = sublayer.step(x, self.depth.lengths[k])
            if k == 0:
                first = x - first
        logits = self.head(x + 5 * first)
        loss = None
        if targets is not None:
            loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        return logits, loss


@torch.no_grad()
@pytest.mark.parametrize("scale", [1.0, 0.003])
def test_a_wrong_costate_of_small_weights_is_seen_beside_large_ones(scale):
    """Sublayers are tested several at once, and the first one changes the loss least."""
    config = GPTConfig(depth=5, width=8, heads=2, context=6, bias=False, placement="pre")
    model = ReadsTheFirstBlockAgain(config).double()
    for sublayer in model.depth.sublayers:
        for weight in sublayer.field.parameters():
            weight.mul_(8.0)
    for weight in model.depth.sublayers[0].field.parameters():
        weight.mul_(scale)
    assert REASON in check_model(model, *text()).no_threshold


def test_sublayers_of_like_change_are_tested_at_once():
    sizes = [3.0, 0.0, 100.0, 1.0, 20.0, 4.0, 0.0]
    groups = own_pass._alike([SegmentChange(k, [], size) for k, size in enumerate(sizes)])
    assert [[change.segment for change in group] for group in groups] == [
        [1, 6],
        [3, 0, 5],
        [4],
        [2],
    ]


@pytest.mark.parametrize("rows", [slice(0, 16), slice(16, 32)])
def test_two_parameters_of_one_memory_are_one_weight(rows):
    module = Model(Block()).double().eval()
    block = module.blocks[0]
    block.attention.v.weight = nn.Parameter(block.ffn.up.weight.data[rows])
    opened = open_model(module, embed=module.embedding, head=lambda x: module.head(module.norm(x)))
    tokens = text(TOKENS, VOCABULARY)
    assert "the same weights" in check_model(opened.model, *tokens).no_threshold


class HalfStopped(Model):
    """Half of its channels reach the head without a gradient."""

    def forward(self, ids):
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        kept = x * (torch.arange(x.shape[-1]) % 2)
        return self.head(kept + (x - kept).detach())


@torch.no_grad()
def with_maps_of_zero(module):
    module.blocks[0].attention.o.weight.zero_()
    module.blocks[0].ffn.down.weight.zero_()


def test_an_error_of_the_costate_at_right_angles_to_its_direction_is_seen():
    """Maps of 0: the direction of the largest change is that of the costate alone."""
    model, tokens, targets = opened(HalfStopped, prepare=with_maps_of_zero)
    assert REASON in check_model(model, tokens[:, :1], targets[:, :1]).no_threshold


class FusedNorm(torch.autograd.Function):
    """Its derivative leaves out that of the norm's size."""

    @staticmethod
    def forward(context, x):
        context.save_for_backward(x)
        return F.layer_norm(x, x.shape[-1:])

    @staticmethod
    def backward(context, gradient):
        (x,) = context.saved_tensors
        return gradient / (x.var(-1, unbiased=False, keepdim=True) + 1e-5).sqrt()


class OwnKernel(Model):
    """A kernel for float32 alone."""

    def forward(self, ids):
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        if x.dtype == torch.float64:
            return self.head(self.norm(x))
        return self.head(FusedNorm.apply(x))


def test_a_path_for_single_precision_alone_is_tested_as_it_is():
    torch.manual_seed(0)
    tokens, targets = text(TOKENS, VOCABULARY)
    model = open_model(OwnKernel(Block()).eval(), example=tokens).model
    found = check_model(model, tokens, targets).no_threshold
    assert REASON in found or found == own_pass.OTHER_IN_DOUBLE


class NumberBehindANorm(Block):
    """x + a N(f(x)), with a trained number a."""

    def __init__(self):
        super().__init__()
        self.a = nn.Parameter(torch.tensor([0.5, 0.7]))
        self.m1, self.m2 = (nn.LayerNorm(16, elementwise_affine=False) for _ in range(2))

    def forward(self, x):
        x = x + self.a[0] * self.m1(self.attention(self.n1(x)))
        return x + self.a[1] * self.m2(self.ffn(self.n2(x)))


def test_a_trained_number_behind_a_norm_is_a_gain():
    model, tokens, targets = opened(Model, NumberBehindANorm)
    assert check_model(model, tokens, targets).verdict == "well-posed for bounded gains"


def tens_of_logits(model, targets):
    def hook(part, given, output):
        logits = 10 * output[0]
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    model.register_forward_hook(hook)


@pytest.mark.parametrize("place", ["model", "depth", "before the depth", "tied embedding"])
def test_hooks_and_tied_weights_of_an_own_model_leave_no_number(place):
    tokens, targets = text()
    model = gpt(tied=False, ffn_width=256)
    if place == "model":
        tens_of_logits(model, targets)
    elif place == "depth":
        model.depth.register_forward_hook(lambda part, given, output: 0.1 * output)
    elif place == "before the depth":
        model.depth.register_forward_pre_hook(lambda part, given: (0.1 * given[0],))
    else:
        model.depth.sublayers[1].field.up.weight = model.token_embedding.weight
    assert REASON in check_model(model, tokens, targets).no_threshold


def attained_by_present_rows(model, tokens, targets):
    """The largest |(A X)'P|_2 of the heads, with P from log(1 + sum of exp(l_v - l_target))."""
    attention, ffn = model.depth.sublayers
    x = model.embed(tokens).detach()
    f = attention.field(attention.given(x)).detach().requires_grad_(True)
    logits = model.head(ffn.step(x + f, 1.0))
    others = (logits - logits.gather(-1, targets[..., None])).masked_fill(
        F.one_hot(targets, logits.shape[-1]).bool(), -math.inf
    )
    loss = torch.log1p(others.exp().sum(-1)).mean()
    (p,) = torch.autograd.grad(loss, f)
    given = attention.given(x)
    p = p.detach()
    read = (attention.field.probabilities(given) @ given.unsqueeze(-3))[0]
    return max(float(torch.linalg.matrix_norm(head.mT @ p[0], 2)) for head in read.detach())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("scale", [1800, 5000])
def test_a_confident_model_keeps_the_digits_of_its_costate(dtype, scale):
    model = gpt()
    model.final_norm.weight.data.mul_(scale)
    tokens, _ = text()
    with torch.no_grad():
        targets = model(tokens)[0].argmax(-1)
    upper = check_model(model.to(dtype), tokens, targets).segments[0].step_threshold.upper
    assert upper >= attained_by_present_rows(model.double(), tokens, targets)


@pytest.mark.parametrize(
    "options",
    [
        {"width": 2, "heads": 1, "eps": 0.0, "ffn": "swiglu"},
        {"width": 2, "heads": 1, "eps": 0.0, "ffn": "mlp"},
    ],
)
def test_a_costate_of_rounding_alone_has_no_number(options):
    """LayerNorm of width 2 without eps has the values +-1: its derivative is 0."""
    tokens, targets = text()
    check = check_model(gpt(**options), tokens, targets)
    threshold = check.segments[1].step_threshold
    assert threshold is None or (threshold.lower, threshold.upper) == (0.0, math.inf)


def test_equal_rows_of_the_head_have_no_number():
    model = gpt(ffn="swiglu", tied=True)
    rows = model.token_embedding.weight
    rows.data[:] = rows.data[:1].clone()
    threshold = check_model(model, *text()).segments[1].step_threshold
    assert threshold is None or (threshold.lower, threshold.upper) == (0.0, math.inf)


@pytest.mark.parametrize("offset", [1e3, 1e5])
@pytest.mark.parametrize("seed", [0, 3])
def test_states_that_lose_digits_in_their_norm_widen_the_number(offset, seed):
    found = []
    for dtype in (torch.float32, torch.float64):
        model = gpt(context=1, seed=seed, embedding_std=1.0)
        model.token_embedding.weight.data.add_(offset)
        tokens, targets = text(1, seed=seed)
        check = check_model(model.float().to(dtype), tokens, targets)
        found.append(check.segments[0].step_threshold)
    single, double = found
    if single is not None:
        assert single.upper >= double.lower
        assert single.lower <= double.upper


def test_the_precise_gradient_is_that_of_the_cross_entropy():
    model = gpt()
    tokens, targets = text()
    targets = targets.clone()
    targets[0, 2] = -1
    found = costate(model, tokens, targets)
    x = found.states[-1].clone().requires_grad_(True)
    logits = model.head(x)
    loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1)
    (expected,) = torch.autograd.grad(loss, x)
    assert found.loss == pytest.approx(float(loss), rel=1e-14)
    assert torch.allclose(found.costates[-1], expected, rtol=1e-10, atol=1e-15)


def test_an_ode_of_states_whose_squares_are_lost_has_no_number():
    tokens, targets = text(2)
    options = {"placement": "post", "width": 4, "heads": 1, "context": 3, "embedding_std": 1e-20}
    check = check_model(
        gpt(torch.float32, **options), tokens, targets, Regularization(weight_decay=0.1)
    )
    assert check.training_threshold.lower == 0
    assert check.training_threshold.upper == math.inf


@pytest.mark.parametrize(("ffn", "scale"), [("mlp", 1e6), ("swiglu", 1e4)])
def test_a_costate_that_only_single_precision_has_as_0_leaves_no_number(ffn, scale):
    """The final norm's squares overflow, and dL/dX underflows to 0."""
    tokens, targets = text()
    options = {"placement": "none", "norm": "rmsnorm", "initialisation": "he", "ffn": ffn}
    model = gpt(torch.float32, width=16, heads=2, **options)
    with torch.no_grad():
        for sublayer in model.depth.sublayers:
            for weight in sublayer.parameters():
                weight.mul_(scale)
        assert float(costate(model, tokens, targets).costates[-1].abs().amax()) == 0
        with pytest.raises(ConfigError, match="dL/dX is 0 in float32 and not in float64"):
            check_model(model, tokens, targets)
        assert costate(model.double(), tokens, targets).costates[-1].any()


def test_a_costate_that_is_0_is_0_in_single_precision_too():
    tokens, targets = text()
    model = gpt(torch.float32)
    model.final_norm.gamma.data.zero_()
    check = check_model(model, tokens, targets)
    assert check.verdict == "open"


@pytest.mark.parametrize(
    "function", [torch.abs, partial(F.leaky_relu, negative_slope=0.9), F.elu, torch.asinh]
)
def test_an_activation_without_the_limit_that_it_names_leaves_no_number(function, monkeypatch):
    monkeypatch.setitem(ACTIVATIONS, "another", Activation(function, 1.0, homogeneous=True))
    has_limit = function is F.elu
    assert ACTIVATIONS["another"].has_its_limit() == has_limit
    check = check_model(gpt(placement="peri/pre", activation="another"), *text())
    assert (check.training_threshold is not None) == has_limit


@pytest.mark.parametrize("name", sorted(ACTIVATIONS))
def test_every_activation_has_the_limit_that_it_names(name):
    assert ACTIVATIONS[name].has_its_limit()


def test_a_map_without_factors_says_why_it_has_no_number():
    check = check_model(gpt(parallel_blocks=True), *text())
    assert check.training_threshold is None
    assert "segment 0 (parallel)" in check.no_threshold
    assert "attention and FFN act in parallel" in check.no_threshold
    assert not check_model(gpt(), *text()).no_threshold


def test_a_matrix_whose_entries_share_memory_is_named():
    config = GPTConfig(
        depth=1, width=8, heads=2, context=4, vocab_size=13, placement="pre", bias=False
    )
    model = GPT(config, seed=0).eval()
    up = model.depth.sublayers[1].field.up
    up.weight.data = torch.ones(1, 8).expand(32, 8)
    tokens = torch.tensor([[1, 2, 3, 4]])
    reason = check_model(model, tokens, tokens).no_threshold
    assert "the entries of up.weight of segment 1 share memory" in reason
