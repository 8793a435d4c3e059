"""The table of the least loss within reach."""

import pytest

from ctrans.examine.valued import answers, measured, valued
from tests.helpers import small_model, tokens

TARGETS = tokens(seed=5)
WORDS = tuple("abcdefgh")


@pytest.fixture(scope="module")
def models():
    """A model of each of some placements. The peri one has words."""
    names = ("none", "pre", "peri", "output", "post")
    return {
        name: valued(
            small_model(name, depth=1),
            tokens(),
            TARGETS,
            placement=name,
            words=WORDS if name == "peri" else (),
        )
        for name in names
    }


def some(models, *names):
    return {name: models[name] for name in names}


def test_the_rises_of_sublayers_sum_to_the_gap(models):
    table = measured(some(models, "peri"))
    rises = [value.value for value in table.of("optimality gap of a sublayer", "peri")]
    (gap,) = table.of("optimality gap", "peri")
    assert abs(sum(rises) - gap.value) < 1e-12
    assert len(table.of("least loss within reach", "peri")) == 3


def test_the_gaps_of_all_tokens_sum_to_that_of_the_model(models):
    """Those of the first sequence are shown, with their texts."""
    reached = models["peri"].reached
    per_token = reached.by_token[-1] - reached.by_token[0]
    assert float(per_token.sum()) == pytest.approx(reached.found[-1] - reached.found[0])
    shown = measured(some(models, "peri")).of("optimality gap of a token", "peri")
    assert [value.place for value in shown] == list(WORDS)
    assert [value.value for value in shown] == pytest.approx(per_token[0].tolist())


def test_the_answer_names_the_segment_and_the_flat_ones(models):
    (answer,) = answers(some(models, "pre", "peri"))
    reached = models["peri"].reached
    gap = reached.found[-1] - reached.found[0]
    assert f"he optimality gap of peri is {gap:.3g} of its loss" in answer.text
    assert "before the last segment of pre, as free velocities" in answer.text


def test_of_many_models_pre_and_peri_are_drawn(models):
    table = measured(models)
    assert {value.model for value in table.values if value.measure == "least loss"} == set(models)
    curves = {value.model for value in table.values if value.measure == "least loss within reach"}
    assert curves == {"pre", "peri"}


def test_a_kinetic_cost_is_another_problem():
    model = valued(small_model("peri"), tokens(), TARGETS, placement="peri", kinetic=0.1)
    table = measured({"peri": model})
    assert model.reached is None
    assert "--kinetic adds one" in table.missing["peri"]["least loss within reach"]
    assert table.answers == ()
