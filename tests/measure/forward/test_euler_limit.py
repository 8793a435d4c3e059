"""The discrete model as the first of the Euler solutions that converge to the ODE."""

import dataclasses
import math

import pytest
import torch

from ctrans.base.json_values import plain
from ctrans.examine.simulated import Simulated, measured, simulated_in
from ctrans.measure.forward.euler_limit import FEWEST, MOST
from ctrans.measure.forward.simulation import simulate
from ctrans.model.gpt import GPT
from ctrans.report.charts import charts
from ctrans.report.sections import Plot
from solvers import Status
from tests.helpers import NAMES, small_config, small_model, tokens


def model_of(placement, depth=1, dt=0.1):
    return small_model(placement, depth=depth, dt=dt, width=8)


@pytest.mark.parametrize("placement", NAMES)
def test_the_slope_is_one_with_all_placements(placement):
    model = model_of(placement)
    limit = simulate(model, tokens()).euler_limit
    assert limit.first_point == "this GPT, bit for bit"
    assert limit.apart == 0
    assert limit.slope == pytest.approx(1, abs=0.05), limit


def by_hand(model, inputs, steps):
    """X at the end by Euler steps on the velocities, in a plain loop."""
    x = model.embed(inputs)
    for sublayer, h in zip(model.depth.sublayers, model.depth.lengths, strict=True):
        if sublayer.state_norm is not None:
            x = sublayer.state_norm.retract(x)
        for _ in range(steps):
            x = x + h / steps * sublayer.velocity(x)
    return x


@pytest.mark.slow
@pytest.mark.parametrize("placement", ["peri", "post"])
def test_the_errors_are_those_of_a_plain_loop(placement):
    model = model_of(placement)
    limit = simulate(model, tokens()).euler_limit
    # twice the solution with 2n steps less that with n is of second order
    exact = 2 * by_hand(model, tokens(), 800) - by_hand(model, tokens(), 400)
    expected = [
        float((by_hand(model, tokens(), n) - exact).norm() / exact.norm()) for n in limit.steps
    ]
    expected[0] = float((model.depth(model.embed(tokens())) - exact).norm() / exact.norm())
    assert limit.errors == pytest.approx(expected, rel=1e-3)


@pytest.mark.cases(2)
@pytest.mark.parametrize("placement", NAMES)
def test_the_first_point_is_the_distance_of_the_discrete_model(placement):
    simulation = simulate(model_of(placement), tokens(), method="rk4")
    assert simulation.euler_limit.errors[0] == simulation.discrete_distance[-1]


@pytest.mark.slow
def test_the_doublings_take_no_more_evaluations_than_the_reference():
    model = model_of("peri", dt=1.0)
    limit = simulate(model, tokens()).euler_limit
    assert limit.steps == [2**i for i in range(len(limit.steps))]
    evaluations = simulate(model, tokens(), method="tsit5", rtol=1e-8, atol=1e-8).evaluations
    allowed = evaluations / len(model.depth.sublayers)
    assert FEWEST < limit.steps[-1] < MOST
    assert sum(limit.steps) <= allowed < sum(limit.steps) + 2 * limit.steps[-1]


def test_a_first_point_that_is_not_the_model_says_so():
    class Off(GPT):
        def trajectory(self, tokens, **options):
            found = super().trajectory(tokens, **options)
            return dataclasses.replace(found, x1=found.x1 + 1e-9)

    model = model_of("pre")
    model.__class__ = Off
    limit = simulate(model, tokens()).euler_limit
    assert limit.first_point == "this GPT, to 1e-09 in an entry"
    assert limit.apart == pytest.approx(1e-9, rel=1e-3)


def test_a_model_at_its_ode_has_no_slope_but_errors():
    model = GPT(small_config("none", depth=1)).double()
    with torch.no_grad():
        for sublayer in model.depth.sublayers:
            sublayer.field.output_projection.weight.zero_()
    simulation = simulate(model, tokens())
    assert simulation.euler_limit.errors == [0.0]
    assert simulation.euler_limit.slope is None
    table = measured({"none": Simulated(simulation)})
    assert "only 0 errors are above 1e-08" in table.missing["none"]["slope of the Euler limit"]


def test_without_an_ode_the_limit_is_missing_with_the_reason():
    model = model_of("post")
    with torch.no_grad():
        model.depth.sublayers[0].state_norm.gamma[0] = 0
    simulation = simulate(model, tokens())
    assert simulation.euler_limit is None
    assert simulation.missing["error of more Euler steps"].startswith("there is no ODE: ")
    assert "gain" in simulation.missing["error of more Euler steps"]
    model = model_of("none")
    with torch.no_grad():
        model.depth.sublayers[1].field.output_projection.weight.fill_(math.inf)
    simulation = simulate(model, tokens())
    assert simulation.status is Status.NON_FINITE
    assert simulation.missing["error of more Euler steps"].startswith("the ODE was not solved")
    simulation = simulate(model_of("none"), tokens(), reference=False)
    assert simulation.euler_limit is None
    assert "error of more Euler steps" not in simulation.missing


def test_the_panel_names_its_first_point_and_has_a_line_of_slope_one():
    simulation = simulate(model_of("peri"), tokens())
    table = measured({"peri": Simulated(simulation), "again": Simulated(simulation)})
    (panel,) = [
        chart
        for chart in charts(table, detail=False)
        if isinstance(chart, Plot) and chart.title == "More Euler steps tend to the ODE"
    ]
    assert panel.log
    assert panel.log_x
    assert list(panel.events) == [(1, "this GPT, bit for bit")]
    *lines, reference = panel.lines
    assert [line.model for line in lines] == ["peri", "again"]
    assert list(lines[0].y) == simulation.euler_limit.errors
    assert reference.model == "slope -1"
    assert reference.bound
    products = [x * y for x, y in zip(reference.x, reference.y, strict=True)]
    assert products == pytest.approx([lines[0].x[-1] * lines[0].y[-1]] * len(products))


def test_the_limit_returns_from_its_json():
    simulation = simulate(model_of("pre"), tokens())
    again = simulated_in(plain(vars(simulation)))
    assert again.simulation.euler_limit == simulation.euler_limit
    old = {name: value for name, value in vars(simulation).items() if name != "euler_limit"}
    assert simulated_in(plain(old)).simulation.euler_limit is None


def test_a_slope_far_from_one_is_remarked():
    simulation = simulate(model_of("peri", dt=1.0), tokens())
    wrong = dataclasses.replace(simulation.euler_limit, slope=0.7)
    notes = Simulated(dataclasses.replace(simulation, euler_limit=wrong)).notes
    assert any("slope 0.70, not 1" in note for note in notes)
    right = dataclasses.replace(simulation.euler_limit, slope=1.04)
    notes = Simulated(dataclasses.replace(simulation, euler_limit=right)).notes
    assert not any("slope" in note for note in notes)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_model_of_another_library_is_the_first_point_too(dtype):
    transformers = pytest.importorskip("transformers")
    import ctrans

    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=11, n_embd=16, n_layer=2, n_head=2, n_positions=16)
    library_model = transformers.GPT2LMHeadModel(config).to(dtype).eval()
    limit = ctrans.simulate(library_model, tokens()).euler_limit
    assert limit.first_point == "this model, bit for bit"
    assert limit.slope == pytest.approx(1, abs=0.05)
