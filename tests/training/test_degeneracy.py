"""Growth of velocities in a training: laws with closed forms, the bound of an output norm, and H."""

import math

import numpy as np
import pytest
import scipy.special
import torch

from ctrans.report.contents import page_of_table
from ctrans.report.sections import Plot
from ctrans.training import degeneracy as module
from ctrans.training.degeneracy import (
    BOUND,
    CASES,
    HAMILTONIAN,
    LOSS,
    SUP,
    Separable,
    degeneracy,
    one_hot_error,
    separable_task,
    steps_to_measure,
    trained,
)
from ctrans.training.growth_by_step import (
    FIRST_GAIN,
    LOG_FIT,
    POWER,
    POWER_FIT,
    SECOND_GAIN,
    SLOPE,
    growth_of,
)

STEPS = steps_to_measure(4 * 4096)
SHORT = 3


def descended(slope, rate, steps):
    """w by step of w - rate * slope(w) from 0."""
    w = 0.0
    path = {}
    for step in range(1, steps[-1] + 1):
        w -= rate * slope(w)
        path[step] = w
    return [path[step] for step in steps]


def test_logistic_loss_grows_like_log_t():
    """w + exp(w) = t + 1 for dw/dt = -L'(w), L = log(1 + exp(-w)), w(0) = 0."""
    rate = 0.05
    w = descended(lambda w: -1 / (1 + math.exp(w)), rate, STEPS)
    flow = np.log(scipy.special.wrightomega(rate * np.array(STEPS) + 1))
    assert np.abs(np.array(w) - flow).max() < rate
    growth = growth_of(STEPS, w)
    assert abs(growth[SLOPE] - 1) < 0.05
    assert growth[LOG_FIT] > 0.999 > growth[POWER_FIT]
    assert abs(growth[SECOND_GAIN] / growth[FIRST_GAIN] - 1) < 0.02


def test_squared_error_stops():
    """w = 1 - (1 - rate)^t for L = (w - 1)^2/2."""
    growth = growth_of(STEPS, descended(lambda w: w - 1, 0.05, STEPS))
    assert SLOPE not in growth
    assert growth[FIRST_GAIN] == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize("power", [0.1, 0.5, 1.0])
def test_power_law_is_told_from_a_log(power):
    growth = growth_of(STEPS, [3 * step**power for step in STEPS])
    assert growth[POWER] == pytest.approx(power, rel=1e-9)
    assert growth[POWER_FIT] == pytest.approx(1, abs=1e-12)
    assert growth[LOG_FIT] < 1 - 1e-4
    # the steps are exact powers of two at the budgets
    assert growth[SECOND_GAIN] / growth[FIRST_GAIN] == pytest.approx(2**power, rel=1e-9)


def rows_of(name, steps=SHORT, seed=0):
    by_measure = {}
    for measure, step, figure in trained(CASES[name], steps=steps, seed=seed):
        by_measure.setdefault(measure, {})[step] = figure
    return by_measure


@pytest.mark.parametrize("name", ["peri, gains fixed", "peri", "peri, decay"])
def test_output_norm_bounds_the_velocity(name):
    rows = rows_of(name, seed=3)
    assert list(rows[SUP]) == steps_to_measure(4 * SHORT)
    for step, size in rows[SUP].items():
        assert size <= rows[BOUND][step] * (1 + 1e-12)


def test_fixed_gains_keep_the_velocity_at_the_radius():
    """|v| = sqrt(d) at gains of 1, up to the norm's eps."""
    rows = rows_of("peri, gains fixed")
    assert set(rows[BOUND].values()) == {4.0}
    assert 3.99 < rows[SUP][4 * SHORT] <= 4.0


def test_without_output_norm_h_and_the_bound_are_missing():
    table = degeneracy(steps=1, cases={"pre": CASES["pre"]})
    assert set(table.missing["pre"]) >= {BOUND, HAMILTONIAN}
    assert "infinite" in table.missing["pre"][HAMILTONIAN]
    assert not table.of(HAMILTONIAN)


def test_h_is_that_of_the_gradient():
    """sqrt(d) |C(gamma * p)| summed over tokens, at P = dL/dX by autograd."""
    case = CASES["peri"]
    tokens, targets = separable_task(5)
    model = Separable(case, seed=5)
    for sublayer in model.depth.sublayers:
        torch.nn.init.normal_(sublayer.output_norm.gamma)
    states = [model.embed(tokens)]
    for sublayer in model.depth.sublayers:
        states.append(states[-1] + sublayer(states[-1]))
    loss = model.terminal_loss(states[-1], targets)
    values = []
    for sublayer, p in zip(
        model.depth.sublayers, torch.autograd.grad(loss, states[:-1]), strict=True
    ):
        q = sublayer.output_norm.gamma * p
        values.append(4 * (q - q.mean(-1, keepdim=True)).detach().norm(dim=-1).sum().item())
    figures = module.figures_of(model, module.costate(model, tokens, targets))
    assert figures[HAMILTONIAN] == pytest.approx(max(values), rel=1e-12)
    assert figures[LOSS] == pytest.approx(loss.item(), rel=1e-12)


def test_only_the_block_is_trained():
    case = CASES["peri, gains fixed"]
    model = Separable(case, seed=0)
    chosen = {id(parameter) for parameter in model.trained()}
    left = [name for name, parameter in model.named_parameters() if id(parameter) not in chosen]
    assert sorted(left) == [
        *(f"depth.sublayers.{k}.output_norm.{part}" for k in (0, 1) for part in ("bias", "weight")),
        "position_embedding.weight",
        "token_embedding.weight",
        "unembedding.weight",
    ]


def test_prefixes_of_the_task_differ():
    tokens, _ = separable_task(1)
    assert len({tuple(row[:1]) for row in tokens.tolist()}) == len(tokens)


def test_squared_error_is_least_at_one_hot_logits():
    targets = torch.tensor([[0, 2]])
    logits = torch.eye(3, dtype=torch.float64)[targets]
    assert one_hot_error(logits, targets) == 0
    assert one_hot_error(logits + 1.0, targets) == pytest.approx(1.5)


def test_page_has_three_charts_over_log_steps():
    cases = {name: CASES[name] for name in ("pre", "peri")}
    table = degeneracy(steps=1, cases=cases)
    result = {"command": "hjb-check", "options": {}, "environment": {}, "checks": {}}
    page = page_of_table(result, table)
    (chapter,) = [chapter for chapter in page.chapters if chapter.picture == "hjb-train"]
    plots = [part for part in chapter.parts if isinstance(part, Plot)]
    assert [plot.title.lower() for plot in plots] == [SUP.lower(), HAMILTONIAN.lower(), LOSS]
    assert all(plot.log_x for plot in plots)


@pytest.mark.slow
def test_pre_grows_in_both_doublings():
    rows = rows_of("pre", steps=500, seed=1)[SUP]
    growth = growth_of(list(rows), list(rows.values()))
    assert growth[FIRST_GAIN] > 1
    assert growth[SECOND_GAIN] > 1
