"""Numbers of a penalty that are made of rounding are not given: where costates cancel, lose a term
in float32, or where weights share memory. Each model is one for which a wrong number was found.
"""

import copy
from fractions import Fraction

import pytest
import torch
import torch.nn.functional as F

from ctrans import GPT, GPTConfig
from ctrans.control.model_check import check_model
from ctrans.control.regularization import Regularization
from ctrans.interop import open_model
from tests.interop.test_factors import Block, Model

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
