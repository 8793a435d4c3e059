"""`ctrans.train` and `resume`: a run from Python has the bits of the command's."""

import json

import numpy as np
import pytest
import torch
from click.testing import CliRunner

from ctrans import GPT, GPTConfig, TrainConfig, load, resume, train
from ctrans.cli import main
from ctrans.training.data import from_text
from ctrans.training.loop import Ending
from solvers import ConfigError
from tests.training.helpers import MODEL, SETTINGS, TEXT, same

ARCHITECTURE, CONFIG = GPTConfig(**MODEL), TrainConfig(**SETTINGS)


def weights(directory):
    return load(directory / "last").state_dict()


@pytest.mark.slow
def test_a_run_has_the_bits_of_the_commands(tmp_path):
    path = tmp_path / "text"
    path.write_bytes(TEXT)
    seen = []
    trained = train(ARCHITECTURE, CONFIG, path, out=tmp_path / "ours", observe=seen.append)
    options = {**{name: value for name, value in MODEL.items() if name != "vocab_size"}, **SETTINGS}
    plain = {"dt": 1.0, "init": "gpt2", "embedding_std": 0.02}
    words = [
        str(part)
        for name, value in {**options, **plain}.items()
        for part in (f"--{name.replace('_', '-')}", value)
    ]
    done = CliRunner().invoke(
        main, ["train", *words, "--file", str(path), "--out", str(tmp_path / "theirs")]
    )
    assert done.exit_code == 0, done.output
    assert same(weights(tmp_path / "ours"), weights(tmp_path / "theirs"))
    assert same(trained.model.state_dict(), weights(tmp_path / "ours"))
    assert (trained.ending, trained.progress.step, trained.directory) == (
        Ending.FINISHED,
        12,
        tmp_path / "ours",
    )
    assert [row["step"] for row in trained.rows] == [row["step"] for row in seen] == list(range(13))
    assert trained.progress.best == min(
        row["validation_loss"] for row in seen if "validation_loss" in row
    )


@pytest.mark.cases(1)
@pytest.mark.parametrize("kind", ["bytes", "Data", "bin"])
def test_data_come_in_every_form(kind, tmp_path):
    if kind == "bin":
        for name, part in (("train.bin", TEXT[:1710]), ("val.bin", TEXT[1710:])):
            np.frombuffer(part, dtype=np.uint8).astype("<u2").tofile(tmp_path / name)
    given = {"bytes": TEXT, "Data": from_text(TEXT, MODEL["context"]), "bin": tmp_path}[kind]
    trained = train(ARCHITECTURE, CONFIG, given, out=tmp_path / "run")
    assert same(
        weights(trained.directory),
        train(ARCHITECTURE, CONFIG, TEXT, out=tmp_path / "again").model.state_dict(),
    )


def test_a_run_is_resumed_with_other_settings_and_its_own_data(tmp_path):
    train(ARCHITECTURE, CONFIG, TEXT, out=tmp_path)
    with pytest.raises(ConfigError, match="a program gave the run its data"):
        resume(tmp_path, iterations=15)
    further = resume(tmp_path, TEXT, iterations=15)
    assert (further.progress.step, further.run.config.iterations) == (15, 15)
    with pytest.raises(ConfigError, match="the data differ from those"):
        resume(tmp_path, TEXT[::-1], iterations=18)
    with pytest.raises(ConfigError, match="batch 2 contradicts the run to resume, which has 4"):
        resume(tmp_path, TEXT, batch=2)
    with pytest.raises(
        ConfigError, match="unknown training setting 'iteration': did you mean 'iterations'"
    ):
        resume(tmp_path, TEXT, iteration=20)


def test_a_model_that_is_there_is_trained_on(tmp_path):
    model = GPT(ARCHITECTURE, seed=7)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    trained = train(model, CONFIG, TEXT, out=tmp_path)
    assert trained.model is model
    assert not torch.equal(model.token_embedding.weight, before["token_embedding.weight"])
    state = json.loads((tmp_path / "last" / "train.json").read_text())
    assert state["source"] == {}


def test_what_cannot_be_is_said_and_leaves_a_run_alone(tmp_path):
    train(ARCHITECTURE, CONFIG, TEXT, out=tmp_path)
    kept = weights(tmp_path)
    for wrong, words in (
        ({}, "has a run already"),
        ({"parallel": "dpp"}, "did you mean 'ddp'"),
        ({"data": tmp_path / "absent"}, "cannot read"),
    ):
        with pytest.raises(ConfigError, match=words):
            train(ARCHITECTURE, CONFIG, **{"data": TEXT, **wrong}, out=tmp_path)
    assert same(weights(tmp_path), kept)
