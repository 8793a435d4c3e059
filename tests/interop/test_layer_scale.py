"""A scale by channel behind a map (LayerScale): all that is read of the map is of the map with that
scale folded into its last weights.
"""

import copy
import math

import pytest
import torch
from torch import nn

import ctrans
from ctrans.control.model_check import check_model
from ctrans.control.regularization import Regularization
from ctrans.dynamics.fields.projected_map import scale_linear
from solvers import ConfigError
from tests.helpers import gradient_norms
from tests.interop.unusual_modules import Block, TiedGPT

TOKENS = torch.arange(14).view(2, 7)


class Scaled(nn.Module):
    """s * f(x)."""

    def __init__(self, inner, scale):
        super().__init__()
        self.inner, self.scale = inner, nn.Parameter(scale)

    def forward(self, x, *args):
        return self.scale * self.inner(x, *args)


class ByModule(Block):
    """X + s * f(N X), the scale a module's own, as DINOv2's."""

    def __init__(self):
        super().__init__()
        self.mix, self.think = (
            Scaled(part, torch.rand(16) + 0.5) for part in (self.mix, self.think)
        )


class InTheBlock(Block):
    """The same, the scale a weight of the block, as BEiT's."""

    def __init__(self):
        super().__init__()
        self.first, self.second = (nn.Parameter(torch.rand(16) + 0.5) for _ in range(2))

    def forward(self, x, bias=None):
        x = x + self.first * self.mix(self.n1(x), bias)
        return x + self.second * self.think(self.n2(x))


def folded(model):
    """The same function without scales."""
    model = copy.deepcopy(model)
    for block in model.blocks:
        if isinstance(block, ByModule):
            scales = [block.mix.scale, block.think.scale]
            block.mix, block.think = block.mix.inner, block.think.inner
        else:
            scales = [block.first.detach().clone(), block.second.detach().clone()]
            block.first.data.fill_(1.0), block.second.data.fill_(1.0)
        for scale, last in zip(scales, (block.mix.o, block.think[-1]), strict=True):
            last.weight.data *= scale.unsqueeze(-1)
            last.bias.data *= scale
    return model


@pytest.mark.cases(1)
@pytest.mark.parametrize("kind", [ByModule, InTheBlock])
def test_a_scaled_map_is_read_as_the_one_with_the_scale_in_its_weights(kind):
    torch.manual_seed(0)
    model = TiedGPT(kind).double().eval()
    scaled, plain = ctrans.open_model(model), ctrans.open_model(folded(model))
    assert torch.allclose(
        scaled.head(scaled.trajectory(TOKENS).x1),
        plain.head(plain.trajectory(TOKENS).x1),
        rtol=1e-12,
    )
    for one, other in zip(scaled.depth.sublayers, plain.depth.sublayers, strict=True):
        assert (one.kind, one.field.why_not) == (other.kind, other.field.why_not) == (one.kind, "")
        assert torch.allclose(
            torch.tensor(one.field.bound()[:2]), torch.tensor(other.field.bound()[:2]), rtol=1e-10
        )
        for mine, theirs in zip(one.field.matrices(), other.field.matrices(), strict=True):
            assert mine.role == theirs.role
            assert torch.allclose(mine.weight, theirs.weight, rtol=1e-14)
        x = torch.randn(2, 7, 16, dtype=torch.float64)
        assert torch.allclose(
            one.field.output_projection.weight, other.field.output_projection.weight, rtol=1e-14
        )
        assert torch.allclose(
            one.field.output_projection(one.field.pre_projection(x)), one.field(x), rtol=1e-12
        )
    assert "the model scales the output of its attention" in scaled.described


@pytest.mark.cases(1)
@pytest.mark.parametrize("kind", [ByModule, InTheBlock])
def test_gradients_by_matrix_are_of_the_weights_and_not_of_their_scaled_ones(kind):
    torch.manual_seed(0)
    model = TiedGPT(kind).double().eval()
    opened = ctrans.open_model(model)
    found = gradient_norms(opened, TOKENS, TOKENS.roll(-1, 1)).sublayers
    model.requires_grad_(True)
    torch.nn.functional.cross_entropy(
        model(TOKENS).flatten(0, 1), TOKENS.roll(-1, 1).flatten()
    ).backward()
    block = model.blocks[0]
    attention, ffn = (getattr(part, "inner", part) for part in (block.mix, block.think))
    expected = float(attention.o.weight.grad.norm()), float(ffn[-1].weight.grad.norm())
    assert (found[0].matrices["W_O"], found[1].matrices["W_2"]) == pytest.approx(
        expected, rel=1e-10
    )


@pytest.mark.slow
@pytest.mark.parametrize("kind", [ByModule, InTheBlock])
def test_its_certificate_is_that_of_the_model_with_the_scale_in_its_weights(kind):
    torch.manual_seed(0)
    model = TiedGPT(kind).double().eval()
    scaled, plain = (
        check_model(ctrans.open_model(m), TOKENS, TOKENS.roll(-1, 1), thorough=True)
        for m in (model, folded(model))
    )
    assert scaled.agrees
    assert not scaled.missing
    assert scaled.verdict == plain.verdict == "degenerate"
    for one, other in zip(scaled.segments, plain.segments, strict=True):
        assert one.certificate.hamiltonian == other.certificate.hamiltonian == math.inf
        assert one.slope == pytest.approx(other.slope, rel=1e-8)
        assert one.training_threshold is None  # the scale is a third factor, which does not decay


@pytest.mark.slow
def test_what_a_scale_of_a_map_leaves_unknown_is_refused():
    torch.manual_seed(0)
    model = TiedGPT(ByModule).double().eval()
    with pytest.raises(
        ConfigError,
        match="followed by a scale by channel, so a decay of that map's weights is none",
    ):
        check_model(
            ctrans.open_model(model),
            TOKENS,
            TOKENS.roll(-1, 1),
            Regularization(last_map_decay=0.1),
            thorough=True,
        )
    with torch.no_grad():
        model.blocks[0].mix.scale[3] = 0.0
    opened = ctrans.open_model(model)
    check = check_model(opened, TOKENS, TOKENS.roll(-1, 1), thorough=True)
    assert list(check.missing) == ["segment 0 (attention)"]
    assert (
        "is 0 in 1 of its entries, so no weights change these channels"
        in check.missing["segment 0 (attention)"]
    )


def test_larger_last_weights_make_a_scaled_map_larger_and_keep_its_scale():
    torch.manual_seed(0)
    model = TiedGPT(ByModule).double().eval()
    field, x = (
        ctrans.open_model(model).depth.sublayers[1].field,
        torch.randn(2, 7, 16, dtype=torch.float64),
    )
    before, scale = field(x), model.blocks[0].think.scale.detach().clone()
    scale_linear(field.output_projection, 3.0)
    assert torch.allclose(field(x), 3 * before, rtol=1e-12)
    assert torch.equal(model.blocks[0].think.scale, scale)
