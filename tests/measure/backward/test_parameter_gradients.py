import math

import pytest
import torch

from ctrans.dynamics.weights.functions_of_depth import BASES
from ctrans.interop.imported import Imported
from ctrans.measure.backward.parameter_gradients import NAMES as MATRICES
from ctrans.measure.backward.parameter_gradients import ParameterGradients
from ctrans.measure.walk import walk
from ctrans.model.gpt import GPT
from solvers import ConfigError
from tests.helpers import NAMES, gradient_norms, small_config, small_model, tokens
from tests.interop.models import inputs, made


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
        assert each.total == pytest.approx(norm(sublayer.parameters()), rel=1e-12)
        field = sublayer.field
        if each.kind == "attention":
            expected = [
                *(part.norm() for part in field.qkv.weight.grad.chunk(3)),
                field.out.weight.grad.norm(),
            ]
        else:
            expected = [field.up.weight.grad.norm(), field.down.weight.grad.norm()]
        assert list(each.matrices.values()) == pytest.approx(
            [float(value) for value in expected], rel=1e-12
        )
    assert list(found.sublayers[0].matrices) == ["W_Q", "W_K", "W_V", "W_O"]
    assert list(found.sublayers[1].matrices) == ["W_1", "W_2"]
    assert found.rest == pytest.approx(norm(set(model.parameters()) - inside), rel=1e-12)


class Untied(GPT):
    """A GPT with a head of its own."""

    def __init__(self, config):
        super().__init__(config)
        self.readout = torch.nn.Linear(config.width, config.vocab_size, bias=False)

    def head(self, x):
        return self.readout(self.final_norm(x))


def test_of_a_head_of_its_own_nothing_is_held_but_a_norm():
    model = Untied(small_config("pre")).double().requires_grad_(False)
    gradients, held = ParameterGradients(), []
    own = gradients.backward
    gradients.backward = lambda at: (held.append(dict(gradients._tied)), own(at))
    found = walk(model, tokens(), tokens(seed=1), [gradients])[0]
    assert held and not any(held)  # noqa: PT018
    model.requires_grad_()
    x = model.depth(model.embed(tokens()))
    torch.nn.functional.cross_entropy(
        model.head(x).flatten(0, 1), tokens(seed=1).flatten()
    ).backward()
    inside = set(model.depth.parameters())
    rest = math.sqrt(
        sum(float(p.grad.square().sum()) for p in model.parameters() if p not in inside)
    )
    assert found.rest == pytest.approx(rest, rel=1e-12)


@pytest.mark.cases(1)
@pytest.mark.parametrize("basis", sorted(BASES))
def test_weights_that_are_functions_of_depth_have_the_gradients_of_equal_free_ones(basis):
    model = small_model("peri", depth_weights=basis, knots=2)
    free = small_model("peri")
    for path, part in free.named_modules():
        for name, parameter in part.named_parameters(recurse=False):
            parameter.copy_(getattr(model.get_submodule(path), name))
    found, expected = (gradient_norms(each, tokens(), tokens(seed=1)) for each in (model, free))
    assert found.rest == pytest.approx(expected.rest, rel=1e-12)
    for one, other in zip(found.sublayers, expected.sublayers, strict=True):
        assert one.total == pytest.approx(other.total, rel=1e-12)
        assert one.matrices == pytest.approx(other.matrices, rel=1e-12)
    assert not any(parameter.requires_grad for parameter in model.parameters())


# a tied head, norms that are 1 + weight, a head of its own behind a transformation
@pytest.mark.cases(1)
@pytest.mark.parametrize("family", ["gpt2", "gemma3", "olmo2", "bert"])
def test_an_imported_models_norms_are_those_of_autograd_through_all_of_it(family):
    model = Imported(made(family).double())
    x, y = inputs(model.model), inputs(model.model, seed=1)
    frozen = next(model.depth.sublayers[0].parameters()).requires_grad_(False)
    found = gradient_norms(model, x, y)
    assert not frozen.requires_grad
    assert all(parameter.grad is None for parameter in model.parameters())
    frozen.requires_grad_()
    _, loss = model(x, y)
    loss.backward()

    def norm(parameters):
        return math.sqrt(
            sum(float(p.grad.square().sum()) for p in parameters if p.grad is not None)
        )

    inside = {
        parameter for sublayer in model.depth.sublayers for parameter in sublayer.parameters()
    }
    assert found.loss == pytest.approx(float(loss.detach()), rel=1e-12)
    assert found.rest == pytest.approx(norm(set(model.parameters()) - inside), rel=1e-6)
    for each, sublayer in zip(found.sublayers, model.depth.sublayers, strict=True):
        assert each.total == pytest.approx(norm(sublayer.parameters()), rel=1e-6)
        matrices = [p for p in sublayer.parameters() if p.dim() == 2]
        # several matrices may stand in one parameter, as GPT-2's queries, keys and values
        assert math.hypot(*each.matrices.values()) == pytest.approx(norm(matrices), rel=1e-6)
        assert each.matrices.keys() <= set(MATRICES.values())
        alone = {
            MATRICES[m.role]: m.weight
            for m in sublayer.field.matrices()
            if any(m.weight is p for p in matrices)
        }
        assert {name: each.matrices[name] for name in alone} == pytest.approx(
            {n: norm([p]) for n, p in alone.items()}, rel=1e-6
        )


def test_without_targets_there_is_no_gradient():
    with pytest.raises(ConfigError, match="every target is -1"):
        gradient_norms(small_model("pre"), tokens(), torch.full((2, 8), -1))


def test_an_overflow_shows_as_a_norm_that_is_not_finite():
    model = small_model("pre")
    model.depth.sublayers[3].field.down.weight.mul_(math.inf)
    found = gradient_norms(model, tokens(), tokens(seed=1))
    assert not math.isfinite(found.loss)
    assert not math.isfinite(found.sublayers[0].total)
