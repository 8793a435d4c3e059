import math

import pytest
import torch

from ctrans.stability.gradients import gradient_norms
from solvers import ConfigError
from tests.helpers import NAMES, small_model, tokens


@pytest.mark.parametrize("placement", NAMES)
def test_norms_are_those_of_the_gradients_that_training_sees(placement):
    model = small_model(placement)
    found = gradient_norms(model, tokens(), tokens(seed=1))
    assert all(parameter.grad is None for parameter in model.parameters())
    model.requires_grad_()
    _, loss = model(tokens(), tokens(seed=1))
    loss.backward()
    assert found.loss == pytest.approx(float(loss.detach()))
    norm = lambda parameters: math.sqrt(sum(float(p.grad.square().sum()) for p in parameters))  # noqa: E731
    inside = set()
    for each, sublayer in zip(found.sublayers, model.depth.sublayers, strict=True):
        inside |= set(sublayer.parameters())
        assert each.kind == sublayer.kind
        assert each.total == pytest.approx(norm(sublayer.parameters()), rel=1e-10)
        field = sublayer.field
        if each.kind == "attention":
            expected = [*(part.norm() for part in field.qkv.weight.grad.chunk(3)), field.out.weight.grad.norm()]
        else:
            expected = [field.up.weight.grad.norm(), field.down.weight.grad.norm()]
        assert list(each.matrices.values()) == pytest.approx([float(value) for value in expected], rel=1e-10)
    assert list(found.sublayers[0].matrices) == ["W_Q", "W_K", "W_V", "W_O"]
    assert list(found.sublayers[1].matrices) == ["W_1", "W_2"]
    assert found.rest == pytest.approx(norm(set(model.parameters()) - inside), rel=1e-10)


def test_without_targets_there_is_no_gradient():
    with pytest.raises(ConfigError, match="every target is -1"):
        gradient_norms(small_model("pre"), tokens(), torch.full((2, 8), -1))


def test_an_overflow_shows_as_a_norm_that_is_not_finite():
    model = small_model("pre")
    model.depth.sublayers[3].field.down.weight.mul_(math.inf)
    found = gradient_norms(model, tokens(), tokens(seed=1))
    assert not math.isfinite(found.loss)
    assert not math.isfinite(found.sublayers[0].total)
