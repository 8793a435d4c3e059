"""Digits as a task: the images are scikit-learn's, splits do not meet, a short run beats chance,
and resuming is exact.
"""

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits

from ctrans.dynamics.placement import PLACEMENTS
from ctrans.training import log
from ctrans.training.digits import CLASS_TOKEN, CONTEXT, LEVELS, VOCABULARY, digits
from ctrans.training.tasks import TASKS
from tests.cli.test_commands import run, strict

TINY = ["--depth", "1", "--width", "16", "--heads", "2", "--batch", "8", "--eval-windows", "40"]


def test_rows_are_the_images_with_their_classes():
    data = digits()
    rows = np.concatenate([data.train, data.validation]).reshape(-1, CONTEXT + 1)
    own = load_digits()
    expected = {
        (*map(int, x), CLASS_TOKEN, LEVELS + 1 + int(y))
        for x, y in zip(own.data, own.target, strict=True)
    }
    assert {tuple(map(int, row)) for row in rows} == expected
    assert (len(rows), len(data.train) // (CONTEXT + 1)) == (1797, 1438)
    assert rows.max() == VOCABULARY - 1


def test_a_batch_is_a_function_of_the_step_and_has_one_target_a_row():
    data = digits()
    rows = data.train.reshape(-1, CONTEXT + 1)
    tokens, targets = data.batch(3, 0, batch=16, seed=0)
    again = data.batch(3, 0, batch=16, seed=0)
    assert torch.equal(tokens, again[0])
    assert torch.equal(targets, again[1])
    assert not torch.equal(tokens, data.batch(4, 0, batch=16, seed=0)[0])
    assert bool((targets[:, :-1] == -1).all())
    for read, target in zip(tokens.numpy(), targets[:, -1].numpy(), strict=True):
        assert (rows == np.append(read, target)).all(-1).any()
    held, answers = data.validation_windows(10_000)
    assert len(held) == 359
    assert bool((held[:, -1] == CLASS_TOKEN).all())
    assert bool((answers[:, -1] > CLASS_TOKEN).all())


def test_every_start_is_that_of_a_row():
    data = digits()
    for step in range(30):
        tokens, _ = data.batch(step, 0, batch=32, seed=1)
        assert bool((tokens[:, -1] == CLASS_TOKEN).all())
        assert bool((tokens[:, :-1] < LEVELS).all())


@pytest.mark.slow
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_every_placement_trains_on_them(placement, tmp_path):
    result = run(
        "train",
        "--task",
        "digits",
        "--placement",
        placement,
        *TINY,
        "--iterations",
        "2",
        "--out",
        tmp_path,
        "--json",
        "-",
    )
    assert result.exit_code == 0, result.output
    found = strict(result.stdout)
    assert found["model"]["causal"] is False
    assert 0 <= found["accuracy"] <= 1


@pytest.mark.slow
def test_a_short_run_beats_chance_clearly(tmp_path):
    size = ["--depth", "2", "--width", "32", "--iterations", "120", "--eval-every", "60"]
    result = run("train", "--task", "digits", *size, "--out", tmp_path, "--json", "-")
    assert strict(result.stdout)["accuracy"] > 0.5, "a tenth is chance"


@pytest.mark.slow
def test_a_resumed_run_is_the_uninterrupted_one(tmp_path):
    args = [
        "train",
        "--task",
        "digits",
        *TINY,
        "--eval-every",
        "2",
        "--save-every",
        "2",
        "--json",
        "-",
    ]
    whole = strict(
        run(
            *args,
            "--iterations",
            "6",
            "--learning-rate",
            "1e-3",
            "--min-learning-rate",
            "1e-3",
            "--out",
            tmp_path / "a",
        ).stdout
    )
    run(
        *args,
        "--iterations",
        "4",
        "--learning-rate",
        "1e-3",
        "--min-learning-rate",
        "1e-3",
        "--out",
        tmp_path / "b",
    )
    again = run("train", "--resume", "--iterations", "6", "--out", tmp_path / "b", "--json", "-")
    assert again.exit_code == 0, again.output
    assert strict(again.stdout)["accuracy"] == whole["accuracy"]
    rows = [[row["loss"] for row in log.read(tmp_path / name) if "loss" in row] for name in "ab"]
    assert rows[0] == rows[1]


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--task", "letters"], "unknown task 'letters': choose one of"),
        (["--task", "digits", "--file", "book.txt"], "--task digits brings its own file"),
        (["--task", "digits", "--context", "8"], "--task digits brings its own context"),
        (
            ["--task", "digits", "--attention", "gated_linear"],
            "causal = False has no meaning for attention 'gated_linear'",
        ),
    ],
)
def test_what_makes_no_sense_gets_a_line(args, words, tmp_path):
    result = run("train", *args, "--out", tmp_path / "run")
    assert result.exit_code == 2, result.output
    assert words in result.stderr
    assert not (tmp_path / "run").exists()


def test_without_scikit_learn_it_says_what_to_install(tmp_path, monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    result = run("train", "--task", "digits", "--out", tmp_path / "run")
    assert (result.exit_code, "pip install 'ctrans[digits]'" in result.stderr) == (2, True)


def test_a_task_decides_only_what_follows_from_its_data():
    assert TASKS["digits"].architecture.keys() == {"vocab_size", "context", "causal"}
