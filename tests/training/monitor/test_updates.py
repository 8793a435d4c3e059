"""Figures of one step of the optimiser, from samples, against sums over all entries."""

import math

import pytest
import torch
from torch import nn

from ctrans.training.monitor.decay import decay_of
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


OPTIMISERS = {
    "Adam": (torch.optim.Adam, {}),
    "Adam, decoupled": (torch.optim.Adam, {"decoupled_weight_decay": True}),
    "Adam, ascent": (torch.optim.Adam, {"maximize": True}),
    "AdamW": (torch.optim.AdamW, {}),
    "NAdam": (torch.optim.NAdam, {}),
    "NAdam, decoupled": (torch.optim.NAdam, {"decoupled_weight_decay": True}),
    "RAdam": (torch.optim.RAdam, {}),
    "RAdam, decoupled": (torch.optim.RAdam, {"decoupled_weight_decay": True}),
}


@pytest.mark.parametrize("name", OPTIMISERS)
def test_adams_ratio_is_of_what_the_optimiser_takes_for_the_gradient(name):
    """Which its first moments show: m' = beta_1 m + (1 - beta_1) g."""
    kind, options = OPTIMISERS[name]
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(16, 16))
    optimiser = kind([weight], lr=1e-3, betas=(0.9, 0.99), weight_decay=0.5, **options)
    cut = torch.tensor(0.5)
    for _ in range(4):
        weight.grad = 0.02 * torch.randn(16, 16)
        # the loop clips after the monitor has looked
        figures = updates_of_gradients([weight], optimiser, cut)
        moments = torch.zeros(16, 16)
        if optimiser.state[weight]:
            moments = optimiser.state[weight]["exp_avg"].clone()
        weight.grad *= cut
        optimiser.step()
    state = optimiser.state[weight]
    g = (state["exp_avg"] - 0.9 * moments) / 0.1
    root = (state["exp_avg_sq"] / (1 - 0.99 ** float(state["step"]))).sqrt()
    ratio = float((g / root).square().mean().sqrt())
    assert float(figures["adam_gradient_ratio", 0]) == pytest.approx(ratio, rel=1e-3)


@pytest.mark.parametrize(
    ("decay", "mode", "is_known"),
    [(0.0, None, True), (0.5, None, False), (0.5, True, True), (0.5, False, True)],
)
def test_adams_ratio_is_left_out_where_nobody_knows_what_the_moments_are_of(decay, mode, is_known):
    """Of an optimiser of another library; Apex and DeepSpeed say it by `adam_w_mode`."""
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(16, 16))
    optimiser = torch.optim.Adam([weight], weight_decay=decay)
    weight.grad = torch.randn(16, 16)
    optimiser.step()
    optimiser.param_groups[0].pop("decoupled_weight_decay")
    if mode is not None:
        optimiser.adam_w_mode = mode
    figures = updates_of_gradients([weight], optimiser)
    assert (("adam_gradient_ratio", 0) in figures) == is_known


@pytest.mark.parametrize(("kind", "decay_share"), [("Adam", 0.0), ("AdamW", 0.5), ("SGD", 0.5)])
def test_a_decay_within_adams_moments_is_no_part_of_the_step_beside_them(kind, decay_share):
    weight = nn.Parameter(torch.ones(4, 4))
    optimiser = getattr(torch.optim, kind)([weight], lr=1e-3, weight_decay=0.5)
    updates = Updates()
    updates.remember([[weight], []])
    with torch.no_grad():
        weight -= 1e-3
    figures = updates.figures([[weight], []], optimiser)
    assert float(figures.get(("decay_share", 0), 0.0)) == pytest.approx(decay_share)


def test_radams_first_steps_are_shorter_than_its_rate_and_have_no_share_of_it():
    weight = nn.Parameter(torch.ones(4, 4))
    optimiser = torch.optim.RAdam([weight], lr=1e-3)
    updates = Updates()
    updates.remember([[weight], []])
    weight.grad = torch.full((4, 4), 1e-3)
    optimiser.step()
    figures = updates.figures([[weight], []], optimiser)
    assert float(figures["update", 0]) == pytest.approx(1e-6, rel=0.1)
    assert ("rate_share", 0) not in figures


MOMENTA = {
    "plain": {},
    "momentum": {"momentum": 0.9},
    "dampened": {"momentum": 0.9, "dampening": 0.4},
    "nesterov": {"momentum": 0.9, "nesterov": True},
    "raised": {"momentum": 0.9, "maximize": True},
}


@pytest.mark.parametrize("decay", [0.005, 0.02])
@pytest.mark.parametrize("name", MOMENTA)
def test_the_share_of_sgds_decay_is_what_it_takes_of_weights_without_a_gradient(name, decay):
    weight = nn.Parameter(torch.ones(4, 4, dtype=torch.float64))
    weight.grad = torch.zeros_like(weight)
    optimiser = torch.optim.SGD([weight], lr=0.1, weight_decay=decay, **MOMENTA[name])
    for _ in range(200):
        before = float(weight.detach()[0, 0])
        optimiser.step()
    taken = 1 - float(weight.detach()[0, 0]) / before
    model = nn.Linear(4, 4, bias=False)
    model.weight = weight
    assert float(decay_of(model, optimiser)["weight_decay", 0]) == pytest.approx(taken, rel=1e-4)
    updates = Updates()
    updates.remember([[weight], []])
    share = float(updates.figures([[weight], []], optimiser)["decay_share", 0])
    assert 0.1 * share == pytest.approx(taken, rel=1e-4)
