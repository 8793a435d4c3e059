"""Targets of heads that give no logits of tokens: their cross-entropy is the loss, or the result
says why they are not used.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import ctrans
from tests.interop.test_wrong_models import Model

TOKENS = torch.randint(11, (4, 9), generator=torch.Generator().manual_seed(0))


class Headed(nn.Module):
    """A model with another head behind its logits."""

    def __init__(self, head):
        super().__init__()
        torch.manual_seed(0)
        self.model = Model()
        self.head = head

    def forward(self, tokens):
        return self.head(self.model(tokens))


class Pooled(nn.Module):
    def __init__(self):
        super().__init__()
        self.classes = nn.Linear(11, 5)

    def forward(self, x):
        return self.classes(x.mean(1))


class Turned(nn.Module):
    def forward(self, x):
        return x.transpose(1, 2)


HEADS = {
    "fewer classes": (lambda: nn.Linear(11, 7), TOKENS % 7, 2),
    "more classes": (lambda: nn.Linear(11, 13), TOKENS, 2),
    "classes first": (Turned, TOKENS, 1),
    "of a sequence": (Pooled, torch.tensor([0, 1, 4, 2]), 1),
    "some do not count": (
        lambda: nn.Linear(11, 7),
        torch.where(TOKENS > 6, torch.where(TOKENS > 8, -1, -100), TOKENS),
        2,
    ),
}


@pytest.mark.cases(1)
@pytest.mark.parametrize("case", HEADS)
def test_targets_that_are_classes_of_one_axis_give_a_cross_entropy(case):
    head, targets, axis = HEADS[case]
    model = Headed(head()).eval()
    with torch.no_grad():
        logits = model(TOKENS).movedim(axis, 1)
    own = float(F.cross_entropy(logits, torch.where(targets < 0, -100, targets)))
    diagnosis = ctrans.diagnose(model, TOKENS, targets)
    (reading,) = diagnosis.readings["loss on this text"]
    assert reading.value == pytest.approx(own, rel=1e-5)
    assert f"cross-entropy of the targets, as classes along axis {axis}" in reading.figure
    assert ctrans.costate(model, TOKENS, targets).loss == pytest.approx(own, rel=1e-5)


UNUSED = {
    "out of range": (lambda: nn.Linear(11, 7), TOKENS, "classes along no axis"),
    "numbers": (lambda: nn.Linear(11, 7), torch.randn(4, 9), "no class ids"),
    "another shape": (lambda: nn.Linear(11, 7), TOKENS[:, 1:] % 7, "classes along no axis"),
    "none counts": (lambda: nn.Linear(11, 7), torch.full((4, 9), -1), "none of them counts"),
    "two axes": (lambda: nn.Linear(11, 9), TOKENS % 7, "classes along axes [1, 2]"),
}


@pytest.mark.cases(1)
@pytest.mark.parametrize("case", UNUSED)
def test_targets_that_are_not_used_are_said_and_a_stand_in_is_no_loss(case):
    head, targets, why = UNUSED[case]
    model = Headed(head()).eval()
    diagnosis = ctrans.diagnose(model, TOKENS, targets)
    assert why in diagnosis.missing["the targets"]
    assert "targets are not used" in " ".join(str(diagnosis).split())
    for reading in diagnosis.readings["loss on this text"]:
        assert reading.figure.startswith("a stand-in for the loss is")
    with pytest.warns(UserWarning, match="targets are not used"):
        ctrans.costate(model, TOKENS, targets)


def test_states_are_not_taken_for_logits():
    """The ids are below the width, as those of a small text are."""
    model = Model()
    model.head = nn.Identity()
    diagnosis = ctrans.diagnose(model, TOKENS, TOKENS % 8)
    assert "shape of the states" in diagnosis.missing["the targets"]


def test_an_opened_model_keeps_its_own_loss():
    opened = ctrans.open_model(Headed(nn.Linear(11, 7)).eval(), example=TOKENS)
    ctrans.diagnose(opened, TOKENS, TOKENS % 7)
    assert opened.loss == "random"
    assert opened.called == "a stand-in for the loss"


SOFTMAXES = {
    "of tokens": (lambda: nn.Softmax(-1), TOKENS),
    "of classes": (lambda: nn.Sequential(nn.Linear(11, 7), nn.Softmax(-1)), TOKENS % 7),
    "of a sequence": (
        lambda: nn.Sequential(Pooled(), nn.Softmax(-1)),
        torch.tensor([0, 1, 4, 2]),
    ),
}


@pytest.mark.cases(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", SOFTMAXES)
def test_probabilities_are_said_and_their_second_softmax_is_no_loss(case, dtype):
    head, targets = SOFTMAXES[case]
    diagnosis = ctrans.diagnose(Headed(head()).eval().to(dtype), TOKENS, targets)
    assert "they are probabilities" in " ".join(str(diagnosis).split())
    for reading in diagnosis.readings["loss on this text"]:
        assert not reading.figure.startswith("the loss is")


@pytest.mark.parametrize("head", [nn.Identity(), nn.LogSoftmax(-1)])
def test_logits_and_log_probabilities_have_the_loss_of_nll(head):
    model = Headed(head).eval()
    with torch.no_grad():
        own = float(F.nll_loss(model(TOKENS).log_softmax(-1).flatten(0, 1), TOKENS.flatten()))
    diagnosis = ctrans.diagnose(model, TOKENS, TOKENS)
    (reading,) = diagnosis.readings["loss on this text"]
    assert reading.value == pytest.approx(own, rel=1e-5)
    assert reading.figure.startswith("the loss is")
    assert "probabilities" not in str(diagnosis)
