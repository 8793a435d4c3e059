"""What a step takes: the loss with the sign of the optimiser, and the passes since gradients were
reset.
"""

import pytest
import torch

from ctrans.training.monitor import Monitor
from tests.interop.test_wrong_models import Model
from tests.training.monitor.test_loop import chain, per_token, said, watched

OPTIMIZERS = [torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD]


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("sign", [1, -1])
def test_the_step_and_not_the_loss_says_whether_targets_are_raised(sign, kind):
    """`maximize=True` raises the loss. The cross-entropy of one batch shows it."""
    losses = []

    def signed(model, x):
        losses.append(per_token(model, chain(torch.Generator())).mean())
        yield sign * losses[-1]

    model = Model()
    optimizer = kind(model.parameters(), 1e-2, maximize=True)
    monitor = watched(model, signed, optimizer=optimizer, steps=6)
    rises = bool(losses[-1] > losses[0])
    assert rises == (sign == 1)
    assert ("loss is raised" in said(monitor)) == rises
    assert monitor.past.reports[-1][1]["target_weight"] == pytest.approx(-sign, rel=1e-4)


def test_groups_that_step_in_two_directions_say_nothing_of_a_raised_loss():
    model = Model()
    first, *others = model.parameters()
    groups = [{"params": [first], "maximize": True}, {"params": others}]
    monitor = watched(
        model,
        lambda model, x: [-per_token(model, x).mean()],
        optimizer=torch.optim.AdamW(groups, 1e-3),
        steps=6,
    )
    assert "raised_targets" not in monitor.past.reports[-1][1]
    assert "loss is raised" not in said(monitor)


