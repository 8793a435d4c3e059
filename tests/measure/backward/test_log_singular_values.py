"""Oracle: the singular values of a dense matrix, or of the depth's dense Jacobian."""

import math

import pytest
import torch

from ctrans.measure.backward.log_singular_values import (
    FLOOR,
    ONE_SUFFICES,
    depth_spectrum,
    log_singular_values,
)
from ctrans.measure.backward.sensitivity import StepGraphs
from ctrans.measure.backward.singular_values import Linearisation, linearise
from ctrans.measure.walk import walk
from solvers import SolveError
from tests.helpers import NAMES, small_model, tokens


def of_values(values, seed=0):
    """A linear map with those singular values."""
    generator = torch.Generator().manual_seed(seed)
    n = len(values)
    u, v = (
        torch.linalg.qr(torch.randn(n, n, generator=generator, dtype=torch.float64)).Q
        for _ in range(2)
    )
    return linearise(lambda x: x @ (u * values @ v.mT).mT, torch.zeros(n, dtype=torch.float64))


def exact(values):
    logs = values[values > FLOOR * values.max()].log()
    return float(logs.mean()), float(logs.std(correction=0)), 1 - len(logs) / len(values)


SPECTRA = {
    "narrow": torch.linspace(0.5, 1.5, 300, dtype=torch.float64),
    "lognormal": (
        torch.randn(300, generator=torch.Generator().manual_seed(3), dtype=torch.float64).exp()
    ),
    "wide": torch.logspace(-3, 0, 300, dtype=torch.float64),
    "two values": torch.cat([torch.ones(200), 0.1 * torch.ones(100)]).double(),
    "with zeros": torch.cat([torch.linspace(0.5, 1.5, 270), torch.zeros(30)]).double(),
}


@pytest.mark.cases(4)
@pytest.mark.parametrize("name", SPECTRA)
@pytest.mark.parametrize("steps", [12, 24, 48])
def test_mean_and_deviation_are_the_spectrums_within_their_errors(name, steps):
    values = SPECTRA[name]
    mean, deviation, lost = exact(values)
    found = log_singular_values(of_values(values), probes=8, steps=steps)
    assert abs(found.mean - mean) <= 3 * found.mean_error + 1e-6
    assert abs(found.deviation - deviation) <= 3 * found.deviation_error + 1e-6
    if steps == 48:  # by then the zeros are resolved
        assert found.lost == pytest.approx(lost, abs=0.05 if lost else 1e-6)


@pytest.mark.slow
def test_more_steps_bring_them_nearer_on_a_wide_spectrum():
    values = SPECTRA["wide"]
    mean, deviation, _ = exact(values)
    few, many = (
        log_singular_values(of_values(values), probes=8, steps=steps) for steps in (10, 300)
    )
    assert abs(many.mean - mean) < 0.2 < abs(few.mean - mean)
    assert many.deviation == pytest.approx(deviation, rel=0.1)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_the_depths_spectrum_is_that_of_its_dense_jacobian(name):
    model, text = small_model(name, depth=1, eps=1e-12), tokens(1, 6)
    graphs = StepGraphs()
    walk(model, text, instruments=[graphs])
    found = depth_spectrum(model.depth, graphs, probes=12, steps=96)
    x0 = model.embed(text)
    jacobian = torch.autograd.functional.jacobian(model.depth, x0).reshape(x0.numel(), -1)
    mean, deviation, lost = exact(torch.linalg.svdvals(jacobian))
    assert abs(found.mean - mean) <= 3 * found.mean_error + 1e-9
    assert abs(found.deviation - deviation) <= 3 * found.deviation_error + 1e-9
    assert found.lost == pytest.approx(lost, abs=0.03)
    # a norm around the state takes away two directions of sixteen, LayerNorm's mean and its length
    assert (lost > 0.1) == (model.depth.sublayers[0].state_norm is not None)


def test_a_jacobian_that_is_zero_has_no_logarithms():
    with pytest.raises(SolveError, match="no logarithm"):
        log_singular_values(of_values(torch.zeros(5, dtype=torch.float64)))


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    "values",
    [SPECTRA["lognormal"][:48], torch.cat([torch.linspace(0.5, 1.5, 40), torch.zeros(8)]).double()],
)
def test_the_standard_error_is_the_spread_of_many_probes(values):
    """Oracle: the deviation of what 60 probes find, each alone and in as many steps as exhaust the
    spectrum.
    """
    x, generator = torch.zeros_like(values), torch.Generator().manual_seed(1)
    linear = Linearisation(x, x, lambda v: values * v, lambda u: values * u)
    found = [
        log_singular_values(linear, probes=1, steps=48, generator=generator) for _ in range(60)
    ]
    for figure, error in (("mean", "mean_error"), ("deviation", "deviation_error")):
        measured = torch.tensor([getattr(each, figure) for each in found]).std()
        stated = torch.tensor([getattr(each, error) for each in found]).mean()
        assert float(measured) == pytest.approx(float(stated), rel=0.3)


def test_many_dimensions_take_one_probe():
    pushed = []
    linear = linearise(lambda x: 2 * x, torch.zeros(ONE_SUFFICES, dtype=torch.float64))
    counted = Linearisation(
        linear.x, linear.y, lambda v: pushed.append(v) or linear.push(v), linear.pull
    )
    found = log_singular_values(counted, steps=4)
    assert len(pushed) == 1, "the space of an isometry is exhausted by one product"
    assert found.mean == pytest.approx(math.log(2))
    assert found.deviation_error < 1e-6
