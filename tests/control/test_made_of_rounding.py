"""Numbers of a penalty that are made of rounding are not given: where costates cancel, lose a term
in float32, or where weights share memory. Each model is one for which a wrong number was found.
"""

import copy
from fractions import Fraction

import pytest
import torch
import torch.nn.functional as F
from torch.nn.utils import prune

from ctrans import GPT, GPTConfig
from ctrans.control import model_threshold
from ctrans.control.model_check import check_model
from ctrans.control.regularization import Regularization
from ctrans.interop import open_model
from tests.interop.test_factors import WIDTH, Block, Model

DECAY = Regularization(weight_decay=1.0)
SMALL = {"depth": 1, "bias": False, "placement": "pre", "tied": False, "positions": "none"}


@pytest.mark.parametrize("ffn", ["swiglu", "mlp"])
@pytest.mark.parametrize(
    ("dtype", "size"), [(torch.float32, 1e4), (torch.float64, 1e3), (torch.float64, 1e4)]
)
def test_costates_that_cancel_exactly_leave_no_claim(dtype, size, ffn):
    """All tokens are equal and their costates sum to 0, so that <P, f> = 0 for all weights of the
    FFN: H is 0 for every penalty, also where rounding leaves a sum that is not 0.
    """
    squared = {"activation": "relu2"} if ffn == "mlp" else {}
    config = GPTConfig(
        width=64, heads=2, context=4, vocab_size=2, ffn=ffn, norm="rmsnorm", **SMALL, **squared
    )
    model = GPT(config, seed=0).to(dtype).eval()
    generator = torch.Generator().manual_seed(1)
    y, z = torch.randn(2, 32, generator=generator)
    order = torch.randperm(32, generator=generator)
    x = torch.cat([y, y[order]]).to(dtype)
    orthogonal = torch.cat([z, -z[order]]).to(dtype)
    with torch.no_grad():
        for sublayer in model.depth.sublayers:
            for weight in sublayer.field.parameters():
                weight.zero_()
        model.token_embedding.weight.copy_(x.expand(2, -1))
        model.unembedding.weight[0] = size * orthogonal
        model.unembedding.weight[1] = -size * orthogonal
    head = model.unembedding.weight[0].tolist()
    products = [Fraction(a) * Fraction(b) for a, b in zip(x.tolist(), head, strict=True)]
    assert sum(products) == 0  # so both tokens have probability 1/2, exactly

    check = check_model(model, torch.zeros(1, 4).long(), torch.tensor([[0, 1, 0, 1]]), DECAY)

    assert check.segments[1].step_threshold.lower == 0
    assert check.segments[1].step_verdict != "degenerate"


def needed(model, tokens, targets):
    """|x||p| of each sublayer, in float64: the penalty that a model of one token needs."""
    exact = copy.deepcopy(model).double()
    found = {}

    def keep(k):
        def hook(field, given, output):
            found[k] = (given[0].detach(), output)
            output.retain_grad()

        return hook

    for k, sublayer in enumerate(exact.depth.sublayers):
        sublayer.field.register_forward_hook(keep(k))
    exact(tokens, targets=targets)[1].backward()
    return {k: float(x.norm() * y.grad.norm()) for k, (x, y) in found.items()}


@pytest.mark.parametrize("norm", ["rmsnorm", "layernorm"])
@pytest.mark.parametrize("size", [1e10, 1e15, 1e17])
def test_a_term_that_underflows_leaves_no_number(norm, size):
    config = GPTConfig(width=8, heads=2, context=1, vocab_size=5, norm=norm, **SMALL)
    model = GPT(config, seed=0).eval()
    with torch.no_grad():
        model.token_embedding.weight.copy_(torch.randn(5, 8, generator=torch.manual_seed(0)) * size)
        model.unembedding.weight.mul_(50)
    tokens, targets = torch.tensor([[1]]), torch.tensor([[2]])
    penalties = needed(model, tokens, targets)
    for segment in check_model(model, tokens, targets, DECAY).segments:
        threshold = segment.step_threshold
        assert threshold.lower <= penalties[segment.segment] <= threshold.upper
        assert (threshold.lower > 0) == (norm == "layernorm" or size == 1e10)


@pytest.mark.parametrize("seed", [0, 2])
def test_channels_that_round_alike_leave_no_false_number(seed):
    given = {**SMALL, "placement": "none", "positions": "learned"}
    config = GPTConfig(
        width=2, heads=1, context=1, vocab_size=5, norm="layernorm", embedding_std=1e-4, **given
    )
    model = GPT(config, seed=seed).eval()
    with torch.no_grad():
        model.token_embedding.weight.add_(100.0)
    tokens, targets = torch.tensor([[1]]), torch.tensor([[2]])
    penalties = needed(model, tokens, targets)
    for segment in check_model(model, tokens, targets, DECAY).segments:
        threshold = segment.step_threshold
        assert threshold.lower <= penalties[segment.segment] <= threshold.upper


@pytest.mark.parametrize("shared", [True, False])
def test_weights_that_share_columns_are_paid_once(shared):
    config = GPTConfig(width=8, heads=2, context=4, vocab_size=13, **{**SMALL, "depth": 2})
    model = GPT(config, seed=0).eval()
    hidden = model.depth.sublayers[1].field.up.weight.shape[0]
    columns = torch.randn(hidden, 16, generator=torch.Generator().manual_seed(0)) / 3
    model.depth.sublayers[1].field.up.weight.data = columns[:, :8]
    second = columns[:, 1:9] if shared else columns[:, 8:]
    model.depth.sublayers[3].field.up.weight.data = second
    text = torch.randint(0, 13, (1, 5), generator=torch.Generator().manual_seed(1))
    check = check_model(model, text[:, :-1], text[:, 1:], DECAY)
    assert (check.training_threshold is None) == shared
    assert ("use the same weights" in check.no_threshold) == shared


def test_a_residual_gain_of_0_is_the_reason():
    config = GPTConfig(width=8, heads=2, context=8, residual="rezero", **SMALL)
    model = GPT(config, seed=0).eval()
    text = torch.randint(0, 256, (1, 9), generator=torch.Generator().manual_seed(0))
    check = check_model(model, text[:, :-1], text[:, 1:], DECAY)
    assert "its residual gain is 0" in check.no_threshold


def test_a_parametrised_weight_is_named_as_such():
    module = Model(Block()).double().eval()
    first = next(part for part in module.modules() if isinstance(part, torch.nn.Linear))
    torch.nn.utils.parametrizations.weight_norm(first)
    text = torch.randint(0, 7, (1, 7), generator=torch.Generator().manual_seed(0))
    opened = open_model(module, example=text[:, :-1], loss="next")
    check = check_model(opened.model, text[:, :-1], text[:, 1:], DECAY)
    assert "are computed from others, which a loss pays instead" in check.no_threshold


def test_a_loss_that_is_not_the_same_twice_is_said_to_be():
    generator = torch.Generator().manual_seed(0)

    def loss(logits, targets):
        noise = torch.rand((), generator=generator, dtype=logits.dtype)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten()) * (1 + 0.1 * noise)

    text = torch.randint(0, 7, (1, 7), generator=torch.Generator().manual_seed(0))
    opened = open_model(Model(Block()).double().eval(), example=text[:, :-1], loss=loss)
    check = check_model(opened.model, text[:, :-1], text[:, 1:], DECAY)
    assert check.training_threshold is None
    assert "its own loss is not the same from call to call" in check.no_threshold


def test_one_text_without_a_batch_is_a_batch_of_one():
    model = GPT(GPTConfig(width=8, heads=2, context=4, **SMALL), seed=0).eval()
    text = torch.arange(5)
    alone = check_model(model, text[:-1], text[1:], DECAY)
    assert alone == check_model(model, text[None, :-1], text[None, 1:], DECAY)


class Halved(torch.nn.Linear):
    def forward(self, x):
        return super().forward(x) / 8


def pruned(width, out):
    linear = torch.nn.Linear(width, out, bias=False)
    return prune.l1_unstructured(linear, "weight", amount=0.8)


def hooked(width, out):
    linear = torch.nn.Linear(width, out, bias=False)
    linear.register_forward_hook(lambda module, given, output: 2 * output)
    return linear


LAST_MAPS = {
    "plain": lambda *sizes: torch.nn.Linear(*sizes, bias=False),
    "divided": lambda *sizes: Halved(*sizes, bias=False),
    "pruned": pruned,
    "hooked": hooked,
    "normalised": lambda *sizes: torch.nn.utils.parametrizations.spectral_norm(
        torch.nn.Linear(*sizes, bias=False)
    ),
}


@pytest.mark.parametrize("name", LAST_MAPS)
def test_a_decay_of_the_last_map_needs_weights_of_its_own(name):
    model = GPT(GPTConfig(width=8, heads=2, context=4, **SMALL), seed=0).eval()
    field = model.depth.sublayers[1].field
    field.down = LAST_MAPS[name](field.down.in_features, field.down.out_features)
    text = torch.randint(0, 256, (1, 5), generator=torch.Generator().manual_seed(0))
    check = check_model(model, text[:, :-1], text[:, 1:], Regularization(last_map_decay=0.1))
    assert (check.verdict == "open") == (name != "plain")
    assert ("segment 1 (ffn)" in check.missing) == (name != "plain")


@pytest.mark.parametrize("seed", range(3))
def test_rounding_of_small_features_is_no_contradiction(seed):
    model = GPT(GPTConfig(norm="layernorm", **{**SMALL, "depth": 2}), seed=seed).eval()
    text = torch.randint(0, 256, (2, 33), generator=torch.Generator().manual_seed(seed))
    check = check_model(model, text[:, :-1], text[:, 1:], Regularization(last_map_decay=0.1))
    assert check.agrees


def test_a_module_under_two_names_is_one():
    class FeedForward(torch.nn.Module):
        def __init__(self, *, is_named_twice):
            super().__init__()
            self.fc = torch.nn.Linear(WIDTH, 32, bias=False)
            self.proj = torch.nn.Linear(32, WIDTH, bias=False)
            if is_named_twice:
                self.net = torch.nn.Sequential(self.fc, torch.nn.ReLU(), self.proj)

        def forward(self, x):
            return self.proj(F.relu(self.fc(x)))

    text = torch.randint(0, 7, (1, 7), generator=torch.Generator().manual_seed(0))
    found = []
    for is_named_twice in (False, True):
        torch.manual_seed(0)
        block = Block(ffn=FeedForward(is_named_twice=is_named_twice))
        opened = open_model(Model(block).double().eval(), example=text[:, :-1], loss="next")
        check = check_model(opened.model, text[:, :-1], text[:, 1:], DECAY)
        assert check.no_threshold == ""
        found.append((check.training_threshold.lower, check.training_threshold.upper))
    assert found[0] == found[1]


def test_nothing_is_said_where_a_far_weight_acts_past_the_states():
    """At the present weights the penalty in the output is 0, and far away it is large."""

    class Penalised(Model):
        def forward(self, ids):
            logits = super().forward(ids)
            matrices = [weight for weight in self.blocks.parameters() if weight.dim() > 1]
            excess = sum(F.relu(w.square().mean() - w.limit) for w in matrices)
            return logits * (1 - 1e4 * excess)

    torch.manual_seed(0)
    module = Penalised(Block()).double().eval()
    for weight in module.blocks.parameters():
        weight.limit = 1.05 * float(weight.detach().square().mean())
    text = torch.randint(0, 7, (1, 7), generator=torch.Generator().manual_seed(0))
    opened = open_model(module, example=text[:, :-1], loss="next")
    check = check_model(opened.model, text[:, :-1], text[:, 1:], DECAY)
    assert check.training_threshold is None
    assert "with other weights of its parts" in check.no_threshold


def test_a_map_of_our_own_with_one_matrix_for_two_is_named():
    config = GPTConfig(width=8, heads=2, context=4, ffn="swiglu", **SMALL)
    model = GPT(config, seed=0).eval()
    model.depth.sublayers[1].field.gate = model.depth.sublayers[1].field.up
    text = torch.randint(0, 256, (1, 5), generator=torch.Generator().manual_seed(0))
    check = check_model(model, text[:, :-1], text[:, 1:], DECAY)
    assert check.no_threshold == "a map uses a weight twice"


@pytest.mark.parametrize("shift", [0, 3, 8, 16, 19])
@pytest.mark.parametrize("columns", [4, 8])
def test_shared_columns_are_found_as_by_addresses(shift, columns):
    matrix = torch.zeros(6, 16)
    flat = matrix.flatten()
    first = matrix[:, :8]
    second = flat.as_strided((3, columns), (16, 1), shift)
    addresses = [model_threshold._addresses(weight) for weight in (first, second)]
    expected = bool(torch.isin(*addresses).any())
    assert model_threshold._share_an_entry(first, second) == expected
