import math

import pytest
import torch

from ctrans.measure.forward.depth_share import DepthShares, token_similarity
from ctrans.measure.walk import states_of, walk
from tests.helpers import NAMES, small_model, tokens


@pytest.mark.parametrize("name", NAMES)
def test_the_share_is_the_distance_to_the_model_whose_sublayers_are_left_out(name):
    model, text = small_model(name, depth=4), tokens()
    (found,) = walk(model, text, instruments=[DepthShares()])
    x0 = without = model.embed(text)
    states = states_of(model.depth, x0)
    apart = []
    for sublayer, x in zip(model.depth.sublayers, states[1:], strict=True):
        if sublayer.state_norm is not None:
            without = sublayer.state_norm(without)
        apart.append(float((x - without).norm()))
    assert found.added == pytest.approx(
        [0.0, *(a / float(x.norm()) for a, x in zip(apart, states[1:], strict=True))]
    )
    assert found.growth == pytest.approx(math.log(apart[-1] / apart[3]) / math.log(2))


def test_growth_is_one_for_equal_contributions_and_nan_for_one_block_or_none():
    model = small_model("peri", depth=4)
    for sublayer in model.depth.sublayers:
        sublayer.output_norm.weight.zero_()
        sublayer.output_norm.bias.fill_(0.3)
    assert walk(model, tokens(), instruments=[DepthShares()])[0].growth == pytest.approx(1)
    for sublayer in model.depth.sublayers:
        sublayer.output_norm.bias.zero_()
    nothing = walk(model, tokens(), instruments=[DepthShares()])[0]
    assert (nothing.added[-1], math.isnan(nothing.growth)) == (0, True)
    assert math.isnan(
        walk(small_model("pre", depth=1), tokens(), instruments=[DepthShares()])[0].growth
    )


def test_similarity_is_the_mean_cosine_of_two_tokens():
    x = torch.randn(2, 5, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    cosines = torch.nn.functional.cosine_similarity(x.unsqueeze(-2), x.unsqueeze(-3), dim=-1)
    pairs = [
        float(cosines[b, i, j]) for b in range(2) for i in range(5) for j in range(5) if i != j
    ]
    assert token_similarity(x) == pytest.approx(sum(pairs) / len(pairs))
    assert token_similarity(x[:, :1].expand(2, 5, 7)) == pytest.approx(1)
    assert math.isnan(token_similarity(x[:, :1]))
