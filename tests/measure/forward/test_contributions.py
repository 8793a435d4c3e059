"""Contributions of sublayers against the model's own states and logits, which they sum to."""

import pytest
import torch

from ctrans.measure.forward.contributions import (
    Contributions,
    contributions_by_depth,
    logit_contributions,
)
from ctrans.measure.walk import walk
from tests.cases import RESIDUAL_CASES
from tests.helpers import NAMES, small_model, tokens


@pytest.mark.parametrize("norm", ["layernorm", "rmsnorm"])
@pytest.mark.parametrize("placement", NAMES)
def test_contributions_sum_to_the_last_state_and_to_the_logits(placement, norm):
    model, ids, targets = small_model(placement, norm=norm), tokens(), tokens(seed=1)
    found = Contributions()
    walk(model, ids, None, [found])
    parts = found.figures()
    last = model.depth(model.embed(ids))
    assert torch.allclose(parts.parts.sum(0) + parts.offsets, last, atol=1e-10)
    assert len(parts.parts) == 1 + len(model.depth.sublayers)
    logits = model(ids)[0]
    expected = logits.gather(-1, targets.unsqueeze(-1))[..., 0] - logits.mean(-1)
    each, offset = logit_contributions(model, parts, targets)
    assert torch.allclose(each.sum(0) + offset, expected, atol=1e-10)


def test_without_norms_around_the_state_a_part_is_what_the_sublayer_wrote():
    model, ids = small_model("pre"), tokens()
    found = Contributions()
    walk(model, ids, None, [found])
    x = model.embed(ids)
    for sublayer, part in zip(model.depth.sublayers, found.figures().parts[1:], strict=True):
        assert torch.allclose(part, model.depth.dt * sublayer(x), atol=1e-12)
        x = sublayer.step(x, model.depth.dt)


def test_a_sublayer_that_is_turned_off_contributes_nothing():
    model, ids = small_model("peri"), tokens()
    model.depth.sublayers[3].output_norm.gamma.zero_()
    model.depth.sublayers[3].output_norm.beta.zero_()
    (parts,) = walk(model, ids, None, [Contributions()])
    each, _ = logit_contributions(model, parts, ids)
    assert not each[4].any()
    assert each[3].any()


@pytest.mark.cases(14)
@pytest.mark.parametrize("name", RESIDUAL_CASES)
def test_with_every_residual_they_sum_to_the_last_state_and_to_the_logits(name):
    placement, changes = RESIDUAL_CASES[name]
    model, ids, targets = small_model(placement, tied=False, **changes), tokens(), tokens(seed=1)
    found = Contributions()
    walk(model, ids, None, [found])
    parts = found.figures()
    last = model.depth(model.embed(ids))
    largest = float(parts.parts.abs().max())
    assert float((parts.parts.sum(0) + parts.offsets - last).abs().max()) <= 1e-12 * largest
    logits = model(ids)[0]
    expected = logits.gather(-1, targets.unsqueeze(-1))[..., 0] - logits.mean(-1)
    each, offset = logit_contributions(model, parts, targets)
    assert float((each.sum(0) + offset - expected).abs().max()) <= 1e-12 * float(each.abs().max())
    summed = contributions_by_depth(model, ids, targets)
    assert sum(summed.state) == pytest.approx(1, abs=1e-12)
    assert sum(summed.logit) == pytest.approx(
        float(expected.mean()), abs=1e-12 * float(each.abs().max())
    )


def test_what_a_stream_carries_is_mixed_in_every_part():
    """A sublayer that writes nothing contributes nothing, though the streams are mixed before
    it.
    """
    model, ids = small_model("pre", residual="hyper_connections", streams=2), tokens()
    for parameter in model.depth.sublayers[3].field.parameters():
        parameter.zero_()
    found = Contributions()
    walk(model, ids, None, [found])
    assert float(found.figures().parts[4].abs().max()) < 1e-12
