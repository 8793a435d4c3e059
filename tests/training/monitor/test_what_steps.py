"""What a step takes: the loss with the sign of the optimiser, and the passes since gradients were
reset.
"""

import copy

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


def gradients(model):
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def perturbed(optimizer, model, x, *, set_to_none):
    """SAM: the gradient of the step is that at perturbed weights. Foret et al. 2021."""
    per_token(model, x).mean().backward()
    moves = [0.05 * p.grad for p in model.parameters()]
    with torch.no_grad():
        torch._foreach_add_(list(model.parameters()), moves)
    optimizer.zero_grad(set_to_none=set_to_none)
    loss = per_token(model, x).mean()
    loss.backward()
    twin = copy.deepcopy(model)
    own = torch.autograd.grad(per_token(twin, x).mean(), list(twin.parameters()))
    with torch.no_grad():
        torch._foreach_sub_(list(model.parameters()), moves)
    return loss, own


@pytest.mark.parametrize("set_to_none", [True, False])
def test_passes_before_gradients_are_reset_are_no_accumulation(set_to_none):
    """The gradient of the step is that of one mean loss, as autograd computes it."""
    torch.manual_seed(0)
    model, generator = Model(), torch.Generator().manual_seed(0)
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    monitor = Monitor(model, every=1, example=chain(generator)[:, :-1])
    for _ in range(4):
        loss, own = perturbed(optimizer, model, chain(generator), set_to_none=set_to_none)
        assert all(map(torch.allclose, gradients(model), own))
        monitor.step(loss.detach(), optimizer)
        optimizer.step()
        optimizer.zero_grad(set_to_none=set_to_none)
    monitor.close()
    figures = monitor.past.reports[-1][1]
    assert figures["target_weight"] == pytest.approx(1.0, rel=1e-4)
    assert figures["backward_passes"] == 1
    assert said(monitor) == set()


def test_weights_that_the_optimiser_lacks_do_not_make_an_accumulation():
    """Their gradients stay where `optimizer.zero_grad` resets the others'."""
    torch.manual_seed(0)
    model, generator = Model(), torch.Generator().manual_seed(0)
    optimizer = torch.optim.SGD(list(model.parameters())[2:], 0.05)
    monitor = Monitor(model, every=1, example=chain(generator)[:, :-1])
    for _ in range(4):
        loss, _ = perturbed(optimizer, model, chain(generator), set_to_none=True)
        monitor.step(loss.detach(), optimizer)
        optimizer.step()
        optimizer.zero_grad()
    monitor.close()
    figures = monitor.past.reports[-1][1]
    assert figures["target_weight"] == pytest.approx(1.0, rel=1e-4)
    assert figures["backward_passes"] == 1
    assert "accumulation is not divided" not in said(monitor)


def test_closures_of_lbfgs_are_no_accumulation():
    torch.manual_seed(0)
    model, generator = Model(), torch.Generator().manual_seed(0)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
    monitor = Monitor(model, every=1, example=chain(generator)[:, :-1])
    for _ in range(4):
        x = chain(generator)

        def closure(x=x):
            optimizer.zero_grad()
            loss = per_token(model, x).mean()
            loss.backward()
            return loss

        monitor.step(closure().detach(), optimizer)
        optimizer.step(closure)
    monitor.close()
    assert monitor.past.reports[-1][1]["target_weight"] == pytest.approx(1.0, rel=1e-4)
    assert "accumulation is not divided" not in said(monitor)


def test_two_outputs_of_one_backward_pass_both_count():
    """No gradient of a weight is there yet when the second output's comes."""
    monitor = watched(
        Model(), lambda model, x: [per_token(model, x[:4]).mean() + per_token(model, x[4:]).mean()]
    )
    assert monitor.past.reports[-1][1]["target_weight"] == pytest.approx(2.0, rel=1e-4)


@pytest.mark.parametrize("skipped", [0, 1])
def test_accumulation_counts_all_passes_whatever_they_count(skipped):
    """A micro-batch without any target has the gradient 0, and resets nothing."""

    def accumulated(model, x):
        for i in range(3):
            yield per_token(model, x).mean() * (i != skipped)

    monitor = watched(Model(), accumulated)
    assert monitor.past.reports[-1][1]["target_weight"] == pytest.approx(2.0, rel=1e-4)
    assert "accumulation is not divided" in said(monitor)
