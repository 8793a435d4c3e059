"""The Gramian's figures as rows of `ctrans hjb-check --principle`."""

import math

import pytest
import torch

from ctrans.control.controllability import controllability
from ctrans.examine import controllable
from ctrans.examine.principled import measured, principled
from ctrans.report.view import view
from tests.helpers import small_model, tokens

TEXT = tokens(1, 6)
READ, TARGETS = TEXT[:, :-1], TEXT[:, 1:]


@pytest.fixture(scope="module")
def model():
    return small_model("peri", depth=2)


@pytest.fixture(scope="module")
def table(model):
    return measured({"peri": principled(model, READ, TARGETS)})


def of(table, measure):
    (value,) = table.of(measure, "peri")
    return value


def test_the_rows_are_those_of_the_gramian(model, table):
    found = controllability(model, READ, TARGETS)
    shares = table.series("controllability by weights", "peri")
    assert shares == pytest.approx(found.tokens.weights.shares)
    assert sum(shares) == pytest.approx(1)
    assert table.series("controllability by free velocities", "peri") == pytest.approx(
        found.tokens.velocities.shares
    )
    assert of(table, "rank of token losses by weights").words == "5 of 5"
    assert of(table, "rank of logits by free velocities").words == "8 of 8"
    values = found.classes.velocities.eigenvalues
    assert of(table, "smallest eigenvalue of logits by free velocities").value == pytest.approx(
        float(values[0])
    )
    assert of(table, "condition of logits by free velocities").value == pytest.approx(
        float(values[-1] / values[0])
    )


def test_below_full_rank_the_condition_is_infinite():
    read = TEXT[:1, :1].expand(2, 1)
    found = controllability(small_model("pre"), read, TARGETS[:1, :1].expand(2, 1))
    rows = {value.measure: value for value in controllable.values_of("pre", found)}
    assert rows["rank of token losses by weights"].words == "1 of 2"
    assert rows["condition of token losses by weights"].value == math.inf
    assert rows["condition of token losses by free velocities"].value < math.inf
    assert "can move 1 of 2 tokens' losses" in controllable.note_of(found)


def test_the_page_has_the_ranks_in_a_sentence_and_the_shares_by_depth(table):
    page = str(view(table, "hjb-check"))
    assert "can move 5 of 5 tokens' losses independently" in page
    assert "Controllability by weights" in page


def test_the_flatness_of_costate_and_velocity_is_that_of_the_kind_that_varies_more(model, table):
    sizes = table.series("size of the velocity", "peri")
    expected = max(max(pair) / min(pair) for pair in (sizes[::2], sizes[1::2]))
    assert of(table, "flatness of the velocity").value == pytest.approx(expected)
    assert of(table, "flatness of the costate").value >= 1


def test_a_model_without_such_a_loss_says_why(model):
    class Squares(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.depth = model.depth
            self.embed = model.embed
            self.head = model.head

        def terminal_loss(self, x, targets):
            return x.square().mean()

    found = principled(Squares(), READ, TARGETS)
    assert found.controllability is None
    assert "another loss" in found.missing[controllable.CONTROLLABILITY]
