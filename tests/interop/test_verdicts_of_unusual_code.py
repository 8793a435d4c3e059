"""Verdicts of code that people write: norms of their own, adapters of a manager, losses of their
own.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ctrans.control.model_check import check_model
from ctrans.interop import open_model
from solvers import ConfigError
from tests.interop.test_factors import VOCABULARY, WIDTH, Block, Model
from tests.interop.test_outside import PeriBlock, text


class Length(nn.Module):
    """3 x/|x|: a norm without a name."""

    def forward(self, x):
        return 3 * F.normalize(x, dim=-1)


class PostBlock(Block):
    def __init__(self, norm):
        super().__init__()
        self.n1, self.n2 = norm(), norm()

    def forward(self, x):
        x = self.n1(x + self.attention(x))
        return self.n2(x + self.ffn(x))


class Squash(nn.Module):
    """DyT, which bounds each entry."""

    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x):
        return self.gain * torch.tanh(0.5 * x)


def checked(module, **options):
    tokens, targets = text()
    model = open_model(module.double().eval(), **{"example": tokens, **options}).model
    return check_model(model, tokens, targets)


@pytest.mark.cases(1)
@pytest.mark.parametrize("norm", [Length, Squash])
def test_a_norm_that_is_not_known_bounds_the_step_before_it(norm):
    torch.manual_seed(0)
    module = Model(PostBlock(norm)).double()
    x = torch.randn(1, 5, WIDTH, dtype=torch.float64)
    block = module.blocks[0]
    with torch.no_grad():
        for size in (1e2, 1e8):  # the state behind the norm is bounded whatever W_O is
            grown = block.n1(x + size * torch.randn_like(x))
            assert grown.norm() < 100

    if norm is Squash:  # nothing is known of the last sublayer's norm either
        with pytest.raises(ConfigError, match="does not grow with its weights"):
            checked(module)
    else:
        assert checked(module).step_verdict == "well-posed"


@pytest.mark.cases(1)
def test_an_adapter_that_a_hook_adds_is_a_part():
    torch.manual_seed(0)
    module = Model(PeriBlock())
    adapter = nn.Linear(WIDTH, WIDTH, bias=False).double()
    nn.init.zeros_(adapter.weight)
    manager = [adapter]  # in no module
    assert checked(Model(PeriBlock())).step_verdict.startswith("well-posed")

    module.blocks[0].register_forward_hook(lambda block, given, y: y + manager[0](y))
    found = checked(module)
    assert [segment.verdict for segment in found.segments][-1] == found.verdict == "degenerate"
    assert not adapter.weight.any()


class WithLoss(Model):
    def __init__(self, loss):
        super().__init__(Block())
        self.loss = loss

    def forward(self, ids, targets=None):
        logits = super().forward(ids)
        if targets is None:
            return logits
        return logits, self.loss(logits.flatten(0, 1), targets.flatten())


LOSSES = {
    "mean": (F.cross_entropy, True),
    "sum": (lambda x, y: F.cross_entropy(x, y, reduction="sum"), False),
    "smoothed": (lambda x, y: F.cross_entropy(x, y, label_smoothing=0.1), False),
    "last token": (lambda x, y: F.cross_entropy(x[-1:], y[-1:]), False),
}


@pytest.mark.cases(2)
@pytest.mark.parametrize("has_targets", [True, False])
@pytest.mark.parametrize("name", LOSSES)
def test_no_penalty_is_proven_for_a_model_with_another_loss(name, has_targets):
    """Also where the example has no targets: their argument is found by its name."""
    tokens, targets = text()
    loss, is_known = LOSSES[name]
    torch.manual_seed(0)
    example = {"ids": tokens, "targets": targets} if has_targets else tokens
    check = checked(WithLoss(loss), example=example)

    assert (check.training_threshold is not None) == is_known
    assert ("loss=" in check.no_threshold) != is_known


class WithItsOwnReturn(WithLoss):
    """Its loss is a sum, and it returns it in another form where it has targets."""

    def __init__(self, form):
        super().__init__(lambda x, y: F.cross_entropy(x, y, reduction="sum"))
        self.form = form

    def forward(self, ids, targets=None):
        if targets is None:
            return super().forward(ids)
        return RETURNS[self.form](*super().forward(ids, targets), targets)


RETURNS = {
    "loss alone": lambda logits, loss, y: loss,
    "nothing beside it": lambda logits, loss, y: (None, loss),
    "by name": lambda logits, loss, y: {"loss": loss},
    "last logits": lambda logits, loss, y: (logits[:, -1:], loss),
    "shifted logits": lambda logits, loss, y: (logits[:, :-1], loss),
    "two losses": lambda logits, loss, y: (
        logits,
        F.cross_entropy(logits.flatten(0, 1), y.flatten()),
        loss,
    ),
    "by token": lambda logits, loss, y: F.cross_entropy(
        logits.flatten(0, 1), y.flatten(), reduction="none"
    ),
}


@pytest.mark.cases(2)
@pytest.mark.parametrize("form", RETURNS)
def test_no_penalty_is_proven_for_another_loss_in_whatever_form_it_is_returned(form):
    torch.manual_seed(0)
    check = checked(WithItsOwnReturn(form))
    assert check.training_threshold is None
    assert "loss=" in check.no_threshold


def shifted(logits, targets):
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), targets[:, 1:].flatten())


class ShiftsItsLabels(Model):
    def __init__(self):
        super().__init__(Block())

    def forward(self, ids, labels=None):
        logits = super().forward(ids)
        return logits if labels is None else (logits, shifted(logits, labels))


@pytest.mark.cases(1)
@pytest.mark.parametrize("labels", ["ids", "next"])
def test_labels_that_were_shifted_before_and_are_shifted_again_leave_no_penalty(labels):
    tokens, targets = text()
    torch.manual_seed(0)
    given = tokens if labels == "ids" else targets
    check = checked(ShiftsItsLabels(), example={"ids": tokens, "labels": given})
    assert (check.training_threshold is not None) == (labels == "ids")


class WithALargerHead(Model):
    """Its head has an entry for an id that it does not read, as of a mask."""

    def __init__(self):
        super().__init__(Block())
        self.head = nn.Linear(WIDTH, VOCABULARY + 1)


@pytest.mark.cases(1)
def test_no_penalty_is_proven_for_a_loss_that_nobody_named():
    torch.manual_seed(0)
    module = WithALargerHead()
    unknown = checked(module)
    assert unknown.training_threshold is None
    assert "give its loss as loss=" in unknown.no_threshold

    def cross_entropy(output, targets):
        return F.cross_entropy(output.flatten(0, 1), targets.flatten())

    assert checked(module, loss=cross_entropy).training_threshold is not None


@pytest.mark.cases(1)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_head_of_zeros_leaves_h_at_0(dtype):
    torch.manual_seed(0)
    module = Model(Block()).to(dtype)
    module.head.weight.data.zero_()
    if module.head.bias is not None:
        module.head.bias.data.zero_()
    tokens, targets = text()
    check = check_model(open_model(module, example=tokens).model, tokens.flip(1), targets)
    assert check.verdict == "open"
    assert all(segment.costate_norm == 0 for segment in check.segments)
