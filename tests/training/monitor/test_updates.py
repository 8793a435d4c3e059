"""Figures of one step of the optimiser, from samples, against sums over all entries."""

import math

import pytest
import torch
from torch import nn

from ctrans.training.monitor.updates import ENTRIES, Updates


def sums_of_all(values):
    return math.sqrt(sum(float(value.detach().double().square().sum()) for value in values))


def gradients(weights, factor_of_matrices):
    for weight in weights:
        weight.grad = torch.randn_like(weight)
        if weight.dim() > 1:
            weight.grad *= factor_of_matrices


def updates_of_gradients(group, optimiser, cut=None):
    return Updates().figures([group, []], optimiser, cut)


def with_a_step_of_adamw(width):
    """A group of vectors and matrices before and after a step, its figures, and the same ones from
    all entries. The gradients of matrices grow, and those of vectors do not.
    """
    torch.manual_seed(0)
    group = [*nn.LayerNorm(width).parameters(), *nn.Linear(width, 2 * width).parameters()]
    decayed = [weight for weight in group if weight.dim() > 1]
    vectors = [weight for weight in group if weight.dim() == 1]
    optimiser = torch.optim.AdamW(
        [
            {"params": decayed, "lr": 1e-2, "weight_decay": 0.3},
            {"params": vectors, "lr": 1e-3, "weight_decay": 0.0},
        ]
    )
    gradients(group, 1.0)
    optimiser.step()
    gradients(group, 30.0)
    updates = Updates()
    updates.remember([group, group])
    before = [weight.detach().clone() for weight in group]
    share_of_rate = [1.0 if weight.dim() > 1 else 0.1 for weight in group]
    squares = [
        0.999 * optimiser.state[weight]["exp_avg_sq"] + 0.001 * weight.grad.square()
        for weight in group
    ]
    ratio_before_the_step = float(updates_of_gradients(group, optimiser)["adam_gradient_ratio", 0])
    optimiser.step()
    figures = updates.figures([group, group], optimiser)
    size = sums_of_all(before)
    ratios = [
        weight.grad / (square / (1 - 0.999**2)).sqrt()
        for weight, square in zip(group, squares, strict=True)
    ]
    expected = {
        ("update", 0): sums_of_all(new - old for new, old in zip(group, before, strict=True))
        / size,
        ("rate_share", 0): sums_of_all(
            share * old.clamp(-1, 1) for share, old in zip(share_of_rate, before, strict=True)
        )
        / size,
        ("decay_share", 0): 0.3 * sums_of_all(old for old in before if old.dim() > 1) / size,
    }
    expected["update_outside", 0] = expected["update", 0]
    count = sum(weight.numel() for weight in group)
    return figures, expected, ratio_before_the_step, sums_of_all(ratios) / math.sqrt(count)


@pytest.mark.parametrize("width", [48, 384])
def test_figures_of_a_sample_are_those_of_all_entries_at_any_width(width):
    """Of the wide group one entry of 37 is sampled, and all of its vectors."""
    figures, expected, ratio, ratio_of_all = with_a_step_of_adamw(width)
    for key, value in expected.items():
        assert float(figures[key]) == pytest.approx(value, rel=0.03), key
    assert ratio == pytest.approx(ratio_of_all, rel=0.03)


def test_a_sample_has_entries_of_all_columns():
    """One of each 64 entries, in rows of 1024: a stride of 64 reads 16 columns."""
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(512, 1024))
    with torch.no_grad():
        weight[:, 0] *= 100
    assert weight.numel() == 64 * ENTRIES
    updates = Updates()
    updates.remember([[weight], []])
    with torch.no_grad():
        weight += 1e-2
    update = float(updates.figures([[weight], []], None)["update", 0])
    assert update == pytest.approx(
        1e-2 * math.sqrt(weight.numel()) / float((weight - 1e-2).detach().norm()), rel=0.05
    )
