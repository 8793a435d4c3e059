"""Statements whose objects are wrong are violated: each mutation once stayed unseen, or would be
seen by nothing else.
"""

import dataclasses
import importlib
import math
from contextlib import ExitStack
from unittest.mock import patch

import pytest
import torch

from ctrans.control import KineticCost, LastMapDecay, StepImage
from ctrans.control.controllability import Gramian
from ctrans.control.convex_head import ConvexHead
from ctrans.control.reach import ReachableSet
from ctrans.control.tangent import TangentSpace
from ctrans.examine.comparison import compare
from ctrans.examine.comparison.rounding_noise import RoundingNoise
from ctrans.measure.initialisation.over_seeds import interval
from ctrans.theory import (
    section_04_trained_weights,
    section_05_maximum_principle,
    section_05_turnpike,
    section_07_adjoint,
    section_08_transport,
    section_12_two_models,
)
from ctrans.theory.all_statements import all_statements
from ctrans.theory.statement import at_most, equal
from ctrans.theory.verify import verify


def times(factor, function):
    return lambda *given, **named: factor * function(*given, **named)


def with_random_costates(function):
    def wrong(*given):
        found = function(*given)
        return dataclasses.replace(
            found, costates=tuple(torch.randn_like(p) for p in found.costates)
        )

    return wrong


def without_first_factor(c, s, b, steps):
    return math.log1p(b * steps / s) * c / b


MUTATIONS = {
    "a proven gap times 3": (
        "rank-gap",
        section_04_trained_weights,
        "gap_of_rank",
        times(3, section_04_trained_weights.gap_of_rank),
    ),
    "H of the step times 3": (
        "discrete-hamiltonian-limit",
        StepImage,
        "support",
        times(3, StepImage.support),
    ),
    "H of the step over 3": (
        "discrete-hamiltonian-limit",
        StepImage,
        "support",
        times(1 / 3, StepImage.support),
    ),
    "H of the tangent space is infinite": (
        "discrete-hamiltonian-limit",
        TangentSpace,
        "support",
        lambda space, P: torch.tensor(torch.inf),
    ),
    "H of the tangent space is 0": (
        "discrete-hamiltonian-limit",
        TangentSpace,
        "support",
        lambda space, P: torch.tensor(0.0),
    ),
    "H of the last map times 7": (
        "weight-decay-features",
        LastMapDecay,
        "support",
        times(7, LastMapDecay.support),
    ),
    "what is proven of a head, a tenth more": (
        "convex-head",
        ConvexHead,
        "proven",
        times(1.1, ConvexHead.proven),
    ),
    "what is proven of all weights, twice": (
        "optimality-gap",
        ConvexHead,
        "proven",
        times(2, ConvexHead.proven),
    ),
    "what is within reach by half of the Hamiltonian": (
        "reach-of-segments",
        ReachableSet,
        "hamiltonian",
        times(0.5, ReachableSet.hamiltonian),
    ),
    "random costates": (
        "shared-principle",
        section_05_maximum_principle,
        "costate",
        with_random_costates(section_05_maximum_principle.costate),
    ),
    "free velocities half as large": (
        "kinetic-flat",
        KineticCost,
        "maximizer",
        times(0.5, KineticCost.maximizer),
    ),
    "a turnpike a tenth too fast": (
        "turnpike-linear",
        section_05_turnpike,
        "_slowest",
        times(1.1, section_05_turnpike._slowest),
    ),
    "a turnpike a tenth too slow": (
        "turnpike-linear",
        section_05_turnpike,
        "_slowest",
        times(0.9, section_05_turnpike._slowest),
    ),
    "a Gramian of full rank": (
        "kalman-rank",
        Gramian,
        "rank",
        property(lambda gramian: len(gramian.eigenvalues)),
    ),
    "rounding twice as large": (
        "parting-rounding",
        section_12_two_models,
        "RoundingNoise",
        lambda unit, draws: RoundingNoise(2 * unit, draws),
    ),
    "largest rounding twice as large": (
        "parting-rounding-bound",
        section_12_two_models,
        "RoundingNoise",
        lambda unit, draws: RoundingNoise(2 * unit, draws),
    ),
    "first-order shares from random costates": (
        "parting-first-order",
        compare,
        "costate",
        with_random_costates(compare.costate),
    ),
    "the shares of a model by itself": (
        "parting-shares",
        section_12_two_models,
        "compare",
        lambda a, b, tokens, targets: compare.compare(a, a, tokens, targets),
    ),
    "a Gramian of twice the size": (
        "least-control",
        Gramian,
        "matrix",
        property(lambda gramian: 2 * gramian.parts.sum(0)),
    ),
    "a power law without the first factor": (
        "adjoint-power-law",
        section_07_adjoint,
        "_power_law",
        without_first_factor,
    ),
    "a rate of 1/(k + 1)": (
        "intrinsic-rate",
        section_08_transport,
        "_slope",
        times(0.75, section_08_transport._slope),
    ),
}


@pytest.mark.cases(2)
@pytest.mark.parametrize("name", MUTATIONS)
def test_a_statement_about_something_else_is_violated(name):
    statement, owner, attribute, wrong = MUTATIONS[name]
    with patch.object(owner, attribute, wrong):
        assert not verify(
            dataclasses.replace(all_statements()[statement], seed=None), cases=40
        ).corrected.holds


A_TENTH_OFF = {
    "at_most": lambda measured, bound, words: at_most(measured, 0.9 * bound, words),
    "equal": lambda found, expected, words, scale=None: equal(found, 1.1 * expected, words, scale),
    "interval": lambda samples, together=1: interval([1.1 * each for each in samples], together),
}
"""What statements compare with, each with the constant of what is compared a tenth off."""
TIGHT = [
    *(
        "theorem-2-optimum",
        "eq-127",
        "least-action",
        "remark-b.1",
        "total-variation",
        "remark-b.2",
        "theorem-5.4",
        "theorem-5.5",
        "theorem-6.1",
    ),
    *("xiong-definition-1", "xiong-definition-1-two-sided", "kim-variance"),
    *(
        pytest.param(name, marks=pytest.mark.slow)
        for name in ("xiong-gradients-by-layer", "xiong-theorem-1-scale")
    ),
]
"""Statements whose bounds are attained. Those of exponents, `theorem-6.2-shared` and
`kim-3.1-massive`, are far tighter.
"""


@pytest.mark.cases(4)
@pytest.mark.parametrize("name", TIGHT)
def test_a_constant_that_is_a_tenth_off_is_violated(name):
    statement = dataclasses.replace(all_statements()[name], seed=None)
    module = importlib.import_module(statement.module)
    assert verify(statement, cases=60).corrected.holds
    with ExitStack() as stack:
        for word, wrong in A_TENTH_OFF.items():
            if hasattr(module, word):
                stack.enter_context(patch.object(module, word, wrong))
        assert not verify(statement, cases=60).corrected.holds
