"""Oracle: the state at the end with the weights moved by hand, by central differences."""

import copy
import math

import pytest
import torch

from ctrans.measure.backward.sensitivity import StepGraphs
from ctrans.measure.backward.update_response import UPDATES, UpdateResponse
from ctrans.measure.walk import cross_entropy, walk
from solvers import ConfigError
from tests.helpers import NAMES, small_model, tokens

DIRECTIONS = {"adam": (1e-3, lambda g: g / (g.abs() + 1e-30)), "sgd": (0.1, lambda g: g)}


def responses(model, text, targets, **options):
    graphs = StepGraphs()
    return walk(model, text, targets, [graphs, UpdateResponse(graphs, **options)])[1]


@pytest.mark.cases(1)
@pytest.mark.parametrize("name", NAMES)
def test_responses_are_the_changes_of_the_output_by_central_differences(name):
    model, text, targets = small_model(name, depth=2), tokens(), tokens(seed=1)
    found = responses(model, text, targets)
    end = model.depth(model.embed(text))
    twin = copy.deepcopy(model).requires_grad_(True)
    cross_entropy(twin, twin.depth(twin.embed(text)), targets).backward()
    for optimiser, (rate, direction) in DIRECTIONS.items():
        assert found[optimiser].segments == [0, 1, 2, 3]
        for k, value in enumerate(found[optimiser].values):
            moved = []
            for sign in (1e-4, -1e-4):
                other = copy.deepcopy(model)
                for own, seen in zip(
                    other.depth.sublayers[k].parameters(),
                    twin.depth.sublayers[k].parameters(),
                    strict=True,
                ):
                    if seen.grad is not None:
                        own.sub_(sign * rate * direction(seen.grad))
                moved.append(other.depth(other.embed(text)))
            change = (moved[0] - moved[1]).norm() / 2e-4
            assert value == pytest.approx(float(change / end.norm()), rel=1e-5)


def test_the_spread_is_infinite_where_a_sublayer_cannot_be_moved():
    model = small_model("peri", depth=2)
    assert responses(model, tokens(), tokens(seed=1), segments=[1, 2])["adam"].segments == [1, 2]
    sublayer = model.depth.sublayers[2]
    sublayer.output_norm.weight.zero_()
    sublayer.output_norm.requires_grad_(False)
    # gains and offsets still move; take them away, and nothing does
    found = responses(model, tokens(), tokens(seed=1))
    assert 0 < found["sgd"].spread < float("inf")
    for parameter in model.token_embedding.parameters():
        parameter.zero_()  # the tied head gives equal logits, and its costate is zero
    assert math.isnan(
        responses(model, tokens(), tokens(seed=1))["sgd"].spread
    )  # 0/0: none can be moved


def test_a_response_is_proportional_to_the_learning_rate():
    model = small_model("pre", depth=2)
    update = {"adam": UPDATES["adam"].__class__(5e-3, torch.sign)}
    one, other = (
        responses(model, tokens(), tokens(seed=1), updates=each)["adam"]
        for each in (UPDATES, update)
    )
    assert other.values == pytest.approx([5 * value for value in one.values])


def test_a_model_with_weights_on_demand_is_refused():
    from ctrans.model.gpt import GPT
    from tests.helpers import small_config

    model = GPT(small_config("pre"), on_demand=True).double().requires_grad_(False)
    with pytest.raises(ConfigError, match="needs all weights at once"):
        responses(model, tokens(), tokens(seed=1))
