"""Tasks that need depth: the rows are what they say, a table of the current token is no better than
a guess, and a model with depth is.
"""

import math
from collections import Counter, defaultdict

import numpy as np
import pytest

from ctrans.model.config import GPTConfig
from ctrans.study.description import PlannedRun
from ctrans.study.training import train_run
from ctrans.training.data import Data, from_text
from ctrans.training.depth_tasks import (
    COUNTED_TO,
    KEYS,
    MODULUS,
    ORDERED,
    PAIRS,
    SUMS,
    SYMBOLS,
    SYMBOLS_OF_ROW,
    VALUES,
    counting,
    modular,
    recall,
    sorting,
)
from ctrans.training.rows import Labelled
from ctrans.training.settings import TrainConfig
from ctrans.training.tasks import TASKS
from tests.cli.test_commands import run, strict

FLOORS = {"recall": math.log(VALUES), "modular": math.log(MODULUS), "digits": math.log(10)}
SMALL = [
    "--width",
    "64",
    "--heads",
    "4",
    "--depth",
    "2",
    "--dt",
    "1",
    "--learning-rate",
    "3e-3",
    "--iterations",
    "800",
]


def rows_of(data):
    """The rows as sequences. Where a row's targets are its next tokens, with the last target."""
    both = np.concatenate([data.train, data.validation])
    rows = both.reshape(-1, data.context + len(data.positions)).astype(int)
    return np.concatenate([rows[:, : data.context], rows[:, -1:]], axis=1)


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


@pytest.mark.parametrize(
    ("make", "places"), [(recall, range(2 * PAIRS, 4 * PAIRS, 2)), (modular, range(2, 4 * SUMS, 4))]
)
def test_the_targets_are_the_answers_and_no_other_token(make, places):
    data = make()
    tokens, targets = data.batch(5, 0, batch=16, seed=2)
    rows = {tuple(row) for row in rows_of(data).tolist()}
    for read, wanted in zip(tokens.tolist(), targets.tolist(), strict=True):
        assert [place for place, target in enumerate(wanted) if target >= 0] == [*places]
        full = [*read, wanted[-1]]
        assert tuple(full) in rows
        assert all(full[place + 1] == wanted[place] for place in places)


def test_each_answer_of_counting_is_how_often_its_symbol_came_before():
    tokens, targets = counting().batch(3, 0, batch=64, seed=1)
    for row, wanted in zip(tokens.tolist(), targets.tolist(), strict=True):
        assert wanted == [
            SYMBOLS + row[:place].count(symbol) % COUNTED_TO for place, symbol in enumerate(row)
        ]


def test_the_answers_of_sorting_are_its_symbols_in_order():
    tokens, targets = sorting().batch(3, 0, batch=64, seed=1)
    for row, wanted in zip(tokens.tolist(), targets.tolist(), strict=True):
        answers = sorted(row[:ORDERED])
        assert wanted == [-1] * (ORDERED - 1) + answers
        assert row[ORDERED:] == answers[:-1]


def test_the_rows_are_the_same_on_every_machine():
    made = [make().fingerprint()[:28] for make in (recall, counting, modular, sorting)]
    begins = ["d47c4d29bbcd329d", "blake2b-256:23bb542117e2d779"]
    begins += ["blake2b-256:e2165455b681364e", "ee356e9cdb72a196"]
    assert all(map(str.startswith, made, begins))


def test_the_depthless_floor_of_counting_is_the_entropy_of_the_count_given_the_place():
    entropies = []
    for place in range(SYMBOLS_OF_ROW):
        p = [0.0] * COUNTED_TO
        for k in range(place + 1):
            p[k % COUNTED_TO] += (
                math.comb(place, k) * (1 / SYMBOLS) ** k * (1 - 1 / SYMBOLS) ** (place - k)
            )
        entropies.append(-sum(q * math.log(q) for q in p if q))
    assert counting().depthless_loss() == pytest.approx(sum(entropies) / SYMBOLS_OF_ROW, abs=4e-3)
    assert counting().guess_loss() == pytest.approx(math.log(COUNTED_TO))


@pytest.mark.slow
def test_a_trained_model_without_depth_ends_no_lower_than_the_floor():
    """The floor is of token and place: a floor of tokens alone, 1.28, would not bind."""
    task = TASKS["counting"]
    data = task.data()
    model = GPTConfig(
        width=16,
        heads=2,
        depth=1,
        placement="pre",
        dt=1e-6,
        positions="learned",
        **task.architecture,
    )
    settings = {
        **task.settings,
        "iterations": 200,
        "warmup": 20,
        "eval_every": 200,
        "eval_windows": 500,
        "learning_rate": 1e-2,
    }
    result = train_run(PlannedRun(model, TrainConfig(**settings), {}), data)
    assert (
        data.depthless_loss() - 0.005
        < result.evaluations[-1]["validation_loss"]
        < data.depthless_loss() + 0.1
    )


@pytest.mark.parametrize("name", FLOORS)
def test_a_table_of_the_current_token_is_no_better_than_a_guess(name):
    data = TASKS[name].data()
    assert data.depthless_loss() == pytest.approx(
        FLOORS[name], abs=3e-3 if name != "digits" else 0.03
    )
    assert data.frequencies_loss() == pytest.approx(
        FLOORS[name], abs=3e-3 if name != "digits" else 0.03
    )


def by_dictionary(train, validation, size):
    """The table's loss, pair by pair."""
    after, total = defaultdict(Counter), Counter(target for _, target in train)
    for token, target in train:
        after[token][target] += 1
    p = {v: (total[v] + 1) / (len(train) + size) for v in range(size)}
    loss = [-math.log((after[u][v] + p[v]) / (after[u].total() + 1)) for u, v in validation]
    return sum(loss) / len(loss), -sum(math.log(p[v]) for _, v in validation) / len(validation)


def test_the_floors_are_those_of_tables_counted_by_hand():
    text = (
        bytes(np.random.default_rng(0).choice([65, 66, 67, 90], 3000, p=[0.5, 0.3, 0.15, 0.05]))
        + b"never seen"
    )
    data = from_text(text, 8)
    pairs = [
        [*zip(part[:-1].tolist(), part[1:].tolist(), strict=True)]
        for part in (data.train, data.validation)
    ]
    assert (data.depthless_loss(), data.frequencies_loss()) == pytest.approx(
        by_dictionary(*pairs, 1 + max(text))
    )


def test_the_floors_of_rows_count_their_answers_only():
    rows = np.array([[0, 1, 2], [0, 1, 3], [1, 1, 2], [0, 1, 2]])
    data = Labelled(rows.reshape(-1), rows[:2].reshape(-1), 2, "rows")
    expected = by_dictionary([(1, 2), (1, 3), (1, 2), (1, 2)], [(1, 2), (1, 3)], 4)
    assert (data.depthless_loss(), data.frequencies_loss()) == pytest.approx(expected)
    assert data.guess_loss() == pytest.approx(math.log(2))


def test_the_floor_of_rows_is_that_of_a_table_by_place_and_token():
    rows = np.random.default_rng(1).integers(0, 3, (200, 4 + 2))
    train, validation, asked = rows[:150], rows[150:], (1, 3)
    data = Labelled(train.reshape(-1), validation.reshape(-1), 4, "rows", asked)
    pairs = [
        [
            ((place, row[place]), row[4 + i])
            for row in part.tolist()
            for i, place in enumerate(asked)
        ]
        for part in (train, validation)
    ]
    assert (data.depthless_loss(), data.frequencies_loss()) == pytest.approx(
        by_dictionary(*pairs, 3)
    )


def test_a_large_vocabulary_costs_no_square_of_it():
    tokens = np.arange(60_000) % 50_000
    assert Data(tokens, tokens, 8, "many").depthless_loss() < 1


@pytest.mark.slow
@pytest.mark.parametrize("task", ["recall", "counting", "modular", "sorting"])
def test_depth_passes_the_floor_and_no_depth_does_not(task, tmp_path):
    args = ["train", "--task", task, *SMALL, "--json", "-"]
    deep = strict(run(*args, "--out", tmp_path / "deep").stdout)
    flat = strict(run(*args, "--dt", "1e-6", "--out", tmp_path / "flat").stdout)
    assert deep["best_validation_loss"] < deep["depthless_loss"] - 0.5
    assert flat["best_validation_loss"] > flat["depthless_loss"] - 0.02
