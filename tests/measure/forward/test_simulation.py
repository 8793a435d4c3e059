import dataclasses

import pytest
import torch

from ctrans.base.json_values import plain
from ctrans.dynamics.placement import PLACEMENTS
from ctrans.measure.forward.bounds import forward_bounds
from ctrans.measure.forward.simulation import simulate
from ctrans.model.config import GPTConfig
from ctrans.model.gpt import GPT
from ctrans.report.contents import page_of
from ctrans.report.sections import Words
from solvers import METHODS, Status, solve
from tests.helpers import NAMES, conservation_drift, small_model, tokens

LAWS = {
    "peri": "grows by",
    "output": "grows by",
    "post": "stays on",
    "pre_post": "stays on",
    "deepnorm": "stays on",
}


@pytest.mark.cases(6)
@pytest.mark.parametrize("name", NAMES)
def test_a_simulation_reports_every_depth(name):
    model = small_model(name)
    result = simulate(model, tokens())
    assert result.status is Status.SUCCESS
    count = 2 * model.config.depth + 1
    for key in ("times", "mean_abs", "variance", "rms", "used", "distance", "discrete_distance"):
        assert len(getattr(result, key)) == count, key
    assert all(len(v) == count for v in vars(result.bounds).values() if isinstance(v, list))
    assert (result.bounds.seed_mean_abs is None) == ("paper's bound" in result.bounds.missing)
    assert result.bounds.missing == forward_bounds(model.depth, [model.embed(tokens())]).missing, (
        "the reason is not cut"
    )
    assert result.law is None if name not in LAWS else LAWS[name] in result.law
    assert result.distance == result.discrete_distance
    assert result.distance[0] == 0
    assert all(0 <= share <= 1 + 1e-12 for share in result.used)


def test_the_method_gets_closer_to_the_ode_than_the_discrete_model():
    result = simulate(small_model("peri"), tokens(), method="rk4", steps=8)
    assert result.distance[-1] < 1e-3 * result.discrete_distance[-1]
    assert result.evaluations == 4 * 8 * 6


def test_a_method_may_be_given_as_an_object():
    model = small_model("peri")
    by_name, by_object = (
        simulate(model, tokens(), method=method, steps=2) for method in ("rk4", METHODS["rk4"])
    )
    assert dataclasses.replace(by_object, seconds=by_name.seconds) == by_name
    own = simulate(
        model, tokens(), method=METHODS["dopri5"].fixed(), steps=2, reference=False
    )  # in no table
    assert own.evaluations > by_name.evaluations


@pytest.mark.slow
def test_the_discrete_distance_is_that_of_an_independent_reference():
    model = small_model("pre")
    result = simulate(model, tokens())
    exact = solve(model.depth.segments(), model.embed(tokens()), method="rk4", steps=40).x1
    x = model.depth(model.embed(tokens()))
    assert result.discrete_distance[-1] == pytest.approx(
        float(((x - exact).norm() / exact.norm()).detach()), rel=1e-5
    )


def test_progress_counts_every_segment_of_every_pass():
    done = []
    simulate(small_model("peri"), tokens(), method="rk4", progress=done.append)
    assert done == list(range(6)) * 3


@pytest.mark.slow
def test_a_run_that_breaks_off_keeps_what_it_had():
    model = small_model("none", dt=1.0)
    with torch.no_grad():
        model.depth.sublayers[3].field.output_projection.weight.fill_(torch.inf)
    result = simulate(model, tokens())
    assert result.status is Status.NON_FINITE
    assert "in segment 3 at t = 4" in result.message
    assert len(result.times) == len(result.mean_abs) == len(result.bounds.mean_abs) == 4
    assert all(value < 1e6 for value in result.mean_abs)


def test_laws_are_found_by_the_norms_and_only_where_all_segments_obey():
    model = small_model("peri")
    states = model.trajectory(tokens()).states
    law, drift = conservation_drift(model.depth, states)
    assert law.name == "mean"
    assert len(drift) == 6
    broken = [states[0], *(x + 0.01 * k for k, x in enumerate(states[1:], 1))]
    assert min(conservation_drift(model.depth, broken)[1]) > 1e-3
    model.depth.sublayers[2].output_norm = None
    assert conservation_drift(model.depth, states) is None
    assert set(LAWS) == {
        name
        for name in PLACEMENTS
        if conservation_drift(
            small_model(name).depth, small_model(name).trajectory(tokens()).states
        )
    }


def test_what_a_solver_warns_of_is_told():
    class Stiff(GPT):
        def trajectory(self, tokens, **options):
            found = super().trajectory(tokens, **options)
            return dataclasses.replace(found, stats=dataclasses.replace(found.stats, stiff_at=0.5))

    model = small_model("peri")
    model.__class__ = Stiff
    found = simulate(model, tokens(), method="tsit5", reference=False)
    assert len(found.warnings) == 1
    assert "esdirk4" in found.warnings[0]
    page = page_of({"simulate": {"command": "simulate", "placements": {"peri": plain(found)}}})
    words = [
        part.text for chapter in page.chapters for part in chapter.parts if isinstance(part, Words)
    ]
    assert found.warnings[0] in words
    assert simulate(small_model("peri"), tokens(), method="tsit5", reference=False).warnings == []


class InFloat32(torch.nn.Module):
    """A map whose kernel knows float32 alone, as those of experts do."""

    def forward(self, x):
        if x.dtype != torch.float32:
            raise RuntimeError("Expected a matrix of Float32")
        return torch.tanh(x)


def test_a_map_that_does_not_run_in_float64_has_no_reference():
    model = GPT(GPTConfig(width=8, heads=2, depth=1, context=4, vocab_size=10), seed=0)
    model.depth.sublayers[1].field = InFloat32()
    found = simulate(model, torch.arange(4).reshape(1, 4))
    assert found.distance[-1] is None
    assert "does not run in float64" in found.missing["distance to the ODE"]
