"""Tasks that need depth: the rows are what they say, a table of the current token is no better than a guess, and a model with depth is."""

import math
from collections import Counter, defaultdict

import numpy as np
import pytest

from ctrans.training.data import Data, from_text
from ctrans.training.depth_tasks import COUNTED_TO, KEYS, MODULUS, PAIRS, SUMS, SYMBOLS, SYMBOLS_OF_ROW, VALUES, counting, modular, recall
from ctrans.training.rows import Labelled
from ctrans.training.tasks import TASKS
from tests.cli.test_commands import run, strict

FLOORS = {"recall": math.log(VALUES), "modular": math.log(MODULUS), "digits": math.log(10)}
SMALL = ["--width", "64", "--heads", "4", "--depth", "2", "--dt", "1", "--learning-rate", "3e-3", "--iterations", "800"]


def rows_of(data):
    return np.concatenate([data.train, data.validation]).reshape(-1, data.context + 1).astype(int)


def test_each_answer_of_recall_is_the_value_that_its_key_had():
    data = recall()
    for row in rows_of(data)[::37]:
        told = dict(row[: 2 * PAIRS].reshape(PAIRS, 2))
        asked = row[2 * PAIRS :].reshape(PAIRS, 2)
        assert len(told) == PAIRS
        assert dict(asked) == told
        assert max(told) < KEYS <= min(told.values())
        assert max(told.values()) < KEYS + VALUES


def test_each_sum_is_right():
    a, b, equals, c = rows_of(modular()).reshape(-1, 4).T
    assert (c == (a + b) % MODULUS).all()
    assert set(equals) == {MODULUS}
    assert len({*zip(a, b, strict=True)}) == MODULUS**2


@pytest.mark.parametrize(("make", "places"), [(recall, range(2 * PAIRS, 4 * PAIRS, 2)), (modular, range(2, 4 * SUMS, 4))])
def test_the_targets_are_the_answers_and_no_other_token(make, places):
    data = make()
    tokens, targets = data.batch(5, 0, batch=16, seed=2)
    rows = {tuple(row) for row in data.train.reshape(-1, data.context + 1).tolist()}
    for read, wanted in zip(tokens.tolist(), targets.tolist(), strict=True):
        assert [place for place, target in enumerate(wanted) if target >= 0] == [*places]
        full = [*read, wanted[-1]]
        assert tuple(full) in rows
        assert all(full[place + 1] == wanted[place] for place in places)


def test_the_rows_are_the_same_on_every_machine():
    assert [recall().fingerprint()[:16], modular().fingerprint()[:16]] == ["12306e8021ad46fa", "a9640be3c426c8c4"]


@pytest.mark.parametrize("name", FLOORS)
def test_a_table_of_the_current_token_is_no_better_than_a_guess(name):
    data = TASKS[name].data()
    assert data.depthless_loss() == pytest.approx(FLOORS[name], abs=3e-3 if name != "digits" else 0.03)
    assert data.frequencies_loss() == pytest.approx(FLOORS[name], abs=3e-3 if name != "digits" else 0.03)


def by_dictionary(train, validation, size):
    """The table's loss, pair by pair."""
    after, total = defaultdict(Counter), Counter(target for _, target in train)
    for token, target in train:
        after[token][target] += 1
    p = {v: (total[v] + 1) / (len(train) + size) for v in range(size)}
    loss = [-math.log((after[u][v] + p[v]) / (after[u].total() + 1)) for u, v in validation]
    return sum(loss) / len(loss), -sum(math.log(p[v]) for _, v in validation) / len(validation)


def test_the_floors_are_those_of_tables_counted_by_hand():
    text = bytes(np.random.default_rng(0).choice([65, 66, 67, 90], 3000, p=[0.5, 0.3, 0.15, 0.05])) + b"never seen"
    data = from_text(text, 8)
    pairs = [[*zip(part[:-1].tolist(), part[1:].tolist(), strict=True)] for part in (data.train, data.validation)]
    assert (data.depthless_loss(), data.frequencies_loss()) == pytest.approx(by_dictionary(*pairs, 1 + max(text)))


def test_the_floors_of_rows_count_their_answers_only():
    rows = np.array([[0, 1, 2], [0, 1, 3], [1, 1, 2], [0, 1, 2]])
    data = Labelled(rows.reshape(-1), rows[:2].reshape(-1), 2, "rows")
    expected = by_dictionary([(1, 2), (1, 3), (1, 2), (1, 2)], [(1, 2), (1, 3)], 4)
    assert (data.depthless_loss(), data.frequencies_loss()) == pytest.approx(expected)


def test_a_large_vocabulary_costs_no_square_of_it():
    tokens = np.arange(60_000) % 50_000
    assert Data(tokens, tokens, 8, "many").depthless_loss() < 1


@pytest.mark.slow
@pytest.mark.parametrize("task", ["recall", "modular"])
def test_depth_passes_the_floor_and_no_depth_does_not(task, tmp_path):
    args = ["train", "--task", task, *SMALL, "--json", "-"]
    deep = strict(run(*args, "--out", tmp_path / "deep").stdout)
    flat = strict(run(*args, "--dt", "1e-6", "--out", tmp_path / "flat").stdout)
    assert deep["best_validation_loss"] < deep["depthless_loss"] - 0.5
    assert flat["best_validation_loss"] > flat["depthless_loss"] - 0.02
