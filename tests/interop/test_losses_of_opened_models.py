"""Which loss an opened model has for what is said about its penalties."""

import pytest
import torch
import torch.nn.functional as F

import ctrans
from ctrans.control.model_check import check_model
from tests.interop.test_read_by_operations import TOKENS, MethodOfTheBlock, made

TARGETS = TOKENS.roll(-1, 1)
OTHER = "the loss that the model returns"


class TwiceTheLoss(MethodOfTheBlock):
    """A language model that returns 2 times the cross-entropy of its logits."""

    def forward(self, ids, targets=None):
        logits = super().forward(ids)
        if targets is None:
            return logits, None
        return logits, 2 * F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def once(outputs, targets):
    return F.cross_entropy(outputs[0].flatten(0, 1), targets.flatten())


def twice(outputs, targets):
    return 2 * once(outputs, targets)


def test_a_loss_that_the_module_returns_is_compared_with_that_of_the_logits():
    module = made(TwiceTheLoss)
    opened = ctrans.open_model(module, example=TOKENS)
    assert OTHER in check_model(opened, TOKENS, TARGETS).no_threshold
    given = ctrans.open_model(module, example=TOKENS, loss=twice)
    check = check_model(given, TOKENS, TARGETS)
    inside = check_model(given.model, TOKENS, TARGETS)
    assert check.no_threshold == inside.no_threshold == ""
    assert check.largest.training_threshold == inside.largest.training_threshold


def test_a_decay_is_not_compared_with_the_penalty_of_another_loss():
    module = made(TwiceTheLoss)
    alone = ctrans.diagnose(module, TOKENS, TARGETS, weight_decay=9.0)
    assert "decay over dt lam*" not in alone.readings
    assert OTHER in alone.missing["decay over dt lam*"]
    given = ctrans.diagnose(module, TOKENS, TARGETS, loss=twice, weight_decay=9.0)
    of_half = ctrans.diagnose(module, TOKENS, TARGETS, loss=once, weight_decay=9.0)
    shares = [reading.value for reading in given.readings["decay over dt lam*"]]
    of_half_shares = [reading.value for reading in of_half.readings["decay over dt lam*"]]
    assert shares
    assert of_half_shares == pytest.approx([2 * share for share in shares], rel=1e-4)


class Tagger(MethodOfTheBlock):
    """Three classes for each token."""

    def forward(self, ids):
        return F.linear(self.states(ids)[-1], self.table.weight[:3])


def test_targets_that_are_classes_are_the_loss_of_an_opened_model():
    module = made(Tagger)
    opened = ctrans.open_model(module, example=TOKENS)
    for seed in range(2):
        targets = torch.randint(3, TOKENS.shape, generator=torch.Generator().manual_seed(seed))
        with torch.no_grad():
            expected = F.cross_entropy(module(TOKENS).mT, targets)
            loss = opened(TOKENS, targets)[1]
        torch.testing.assert_close(loss, expected)
        found = check_model(opened, TOKENS, targets)
        assert found.no_threshold == ""
        if found.form == "discrete":
            assert found.loss == pytest.approx(float(expected), rel=1e-5)


def test_targets_that_are_no_classes_are_said_to_be_unused():
    opened = ctrans.open_model(made(Tagger), example=TOKENS)
    with pytest.warns(UserWarning, match="are classes along no axis"):
        check_model(opened, TOKENS, torch.full_like(TOKENS, 7))
