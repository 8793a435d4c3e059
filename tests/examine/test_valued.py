"""The table of the least loss within reach."""

from ctrans.control.least_loss import least_loss
from ctrans.examine.valued import answers, measured
from tests.helpers import small_model, tokens

TARGETS = tokens(seed=5)


def reached(*placements):
    return {
        placement: least_loss(small_model(placement, depth=1), tokens(), TARGETS, sweeps=3)
        for placement in placements
    }


def kinds(models):
    return {name: ["attention", "ffn"] for name in models}


def test_the_rises_of_sublayers_sum_to_the_gap():
    models = reached("peri")
    table = measured(models, kinds(models))
    rises = [value.value for value in table.of("optimality gap of a sublayer", "peri")]
    (gap,) = table.of("optimality gap", "peri")
    assert abs(sum(rises) - gap.value) < 1e-12
    assert len(table.of("least loss within reach", "peri")) == 3


def test_the_answer_names_the_segment_and_the_flat_ones():
    models = reached("pre", "peri")
    (answer,) = answers(models, kinds(models))
    gap = models["peri"].found[-1] - models["peri"].found[0]
    assert f"The optimality gap of peri is {gap:.3g} of its loss" in answer.text
    assert "before the last segment of pre, as free velocities" in answer.text


def test_of_many_models_pre_and_peri_are_drawn():
    models = reached("none", "pre", "peri", "output", "post")
    table = measured(models, kinds(models))
    assert {value.model for value in table.values if value.measure == "least loss"} == set(models)
    curves = {value.model for value in table.values if value.measure == "least loss within reach"}
    assert curves == {"pre", "peri"}
