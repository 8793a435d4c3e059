"""`ctrans diagnose --weight-decay` has a number where `ctrans hjb-check` has one, and nowhere else."""

import pytest
import torch

from ctrans.control.costate import costate
from ctrans.examine.diagnosis.diagnose import diagnose
from ctrans.interop import open_model
from tests.helpers import small_model, tokens
from tests.interop.test_factors import (
    VOCABULARY,
    Attention,
    Block,
    FeedForward,
    Model,
    Normalised,
    OfModel,
)

QUANTITY = "decay over dt lam*"


def decayed(model, count=11, decay=1e-3):
    """What a diagnosis says of the decay: its readings, and why there are none."""
    text = tokens(1, 9) % count
    found = diagnose(model, text[:, :-1], text[:, 1:], weight_decay=decay)
    return found.readings.get(QUANTITY, []), found.missing.get(QUANTITY, "")


def test_the_number_is_that_of_the_transformers_step_by_hand():
    """One token: dt lam* of values and outputs is dt |N x||p|, p the gradient after the step."""
    model = small_model("pre", context=1, depth=2, bias=False)
    text = tokens(1, 2)
    found = diagnose(model, text[:, :1], text[:, 1:], weight_decay=1e-3)
    point = costate(model, text[:, :1], text[:, 1:])
    for reading in found.readings[QUANTITY]:
        sublayer = model.depth.sublayers[reading.segment]
        if sublayer.kind == "attention":
            x = sublayer.input_norm(point.states[reading.segment])
            p = point.costates[reading.segment + 1]
            needed = 0.1 * float(x.norm() * p.norm())
            assert reading.value == pytest.approx(1e-3 / needed, rel=1e-9)


def test_shared_weights_have_no_number():
    readings, reason = decayed(small_model("pre", depth_weights="constant"))
    assert readings == []
    assert "several segments" in reason


def test_a_gpt_with_a_hook_has_no_number():
    model = small_model("pre")
    model.depth.sublayers[1].field.register_forward_hook(lambda module, args, output: None)
    readings, reason = decayed(model)
    assert readings == []
    assert "has a hook" in reason


FOREIGN = {
    "a normalised matrix": (
        lambda: Model(Block(ffn=FeedForward(Normalised))),
        "does not compute W x",
    ),
    "a matrix of two maps": (lambda: OfModel("a map"), "several segments use the same weights"),
}


@pytest.mark.parametrize("name", FOREIGN)
def test_a_model_without_a_number_in_hjb_check_has_none_here(name):
    make, words = FOREIGN[name]
    torch.manual_seed(0)
    readings, reason = decayed(open_model(make().double()), VOCABULARY)
    assert readings == []
    assert words in reason


def test_a_plain_foreign_model_has_numbers():
    torch.manual_seed(0)
    readings, reason = decayed(open_model(Model(Block(attention=Attention())).double()), VOCABULARY)
    assert {reading.segment for reading in readings} == {0, 1}
    assert reason == ""


def test_sublayers_behind_a_norm_need_none_whatever_their_code():
    model = small_model("peri")
    model.depth.sublayers[1].field.register_forward_hook(lambda module, args, output: None)
    readings, reason = decayed(model)
    assert readings == []
    assert "have a norm behind or around them" in reason
