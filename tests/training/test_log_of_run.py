"""Which files beside a run's last checkpoint are of the run: its log, its best checkpoint, its
results.
"""

import json
import os
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from ctrans.model.checkpoint import load
from ctrans.model.config import GPTConfig
from ctrans.model.gpt import GPT
from ctrans.model.sums import STATE, SUMS, sums
from ctrans.training import log
from ctrans.training.compared_runs import parting_of
from ctrans.training.data import from_text
from ctrans.training.loop import carry_out
from ctrans.training.parallel import PARALLEL
from ctrans.training.run_directory import RunDirectory
from ctrans.training.run_start import anew
from ctrans.training.settings import TrainConfig
from ctrans.training.train import train
from ctrans.training.training_state import read_state
from solvers import ConfigError
from tests.training.helpers import ALONE, MODEL, SETTINGS, TEXT, resume, start


def start_from_weights_of(seed, directory):
    """A new run with the same settings, whatever its first weights."""
    config = GPTConfig(**MODEL)
    settings = TrainConfig(**SETTINGS | {"iterations": 3})
    return anew(
        GPT(config, seed=seed),
        settings,
        from_text(TEXT, config.context),
        RunDirectory(directory),
        PARALLEL["none"],
        ALONE,
        source={},
    )


def test_runs_with_equal_settings_have_one_name_only_if_their_first_weights_are_equal(tmp_path):
    names = []
    for number, seed in enumerate((1, 1, 2)):
        place = tmp_path / str(number)
        carry_out(*start_from_weights_of(seed, place))
        names.append(read_state(place / "last").run)
    assert names[0] == names[1] != names[2]
    shutil.copy(tmp_path / "1" / log.LOG, tmp_path / "0" / log.LOG)
    resume(tmp_path / "0", iterations=6)
    shutil.copy(tmp_path / "2" / log.LOG, tmp_path / "1" / log.LOG)
    with pytest.raises(ConfigError, match="is the log of another run than the checkpoint"):
        resume(tmp_path / "1", iterations=6)


def resumed(place, **changes):
    carry_out(*resume(place, **changes))
    return place


@pytest.fixture
def forks(tmp_path):
    """Two copies of a run that went on with other settings, and one that goes on like the first."""
    carry_out(*start(tmp_path / "a", iterations=3))
    for name in ("faster", "like a"):
        shutil.copytree(tmp_path / "a", tmp_path / name, symlinks=True)
    for name in ("a", "like a"):
        resumed(tmp_path / name, iterations=6)
    resumed(tmp_path / "faster", iterations=6, learning_rate=0.1)
    return tmp_path


def test_the_log_of_a_copy_that_went_on_with_other_settings_is_refused(forks):
    own_log = (forks / "a" / log.LOG).read_bytes()
    shutil.copy(forks / "faster" / log.LOG, forks / "a" / log.LOG)
    for refused in (
        lambda: resume(forks / "a", iterations=9),
        lambda: parting_of(forks / "a", forks / "like a"),
    ):
        with pytest.raises(ConfigError, match="one of them went on with other settings"):
            refused()
    (forks / "faster" / log.LOG).write_bytes(own_log)
    with pytest.raises(ConfigError, match="one of them went on with other settings"):
        resume(forks / "faster", iterations=9)


def test_the_log_of_a_copy_that_went_on_alike_is_the_runs_own(forks):
    shutil.copy(forks / "like a" / log.LOG, forks / "a" / log.LOG)
    resumed(forks / "a", iterations=9, learning_rate=1e-3)
    resumed(forks / "a", iterations=12)
    resumed(forks / "a")


def test_a_damaged_row_of_settings_does_not_make_a_log_anothers(forks):
    lines = (forks / "faster" / log.LOG).read_text().splitlines(keepends=True)
    damaged = [line.replace('"settings"', '"sett') for line in lines]
    (forks / "faster" / log.LOG).write_text("".join(damaged))
    resumed(forks / "faster", iterations=9)


def test_a_run_that_an_earlier_version_gave_other_settings_goes_on(forks):
    place = forks / "faster"
    last = (place / "last").resolve()
    state = json.loads((last / STATE).read_text())
    del state["lineage"]
    (last / STATE).write_text(json.dumps(state))
    (last / SUMS).write_bytes(sums(last))
    rows = [json.loads(line) for line in (place / log.LOG).read_text().splitlines()]
    for row in rows:
        row.pop("lineage", None)
    (place / log.LOG).write_text("".join(json.dumps(row) + "\n" for row in rows))
    resumed(place, iterations=9)
    resumed(place, iterations=12, learning_rate=1e-3)
    resumed(place)


@pytest.fixture
def best_of_another(tmp_path):
    """A run with the best checkpoint of another run, which is another one than its last."""
    for seed in (0, 1):
        place = tmp_path / str(seed)
        carry_out(*start(place, iterations=4, seed=seed))
        resumed(place, iterations=9, learning_rate=10.0, margin=1e3)
    best = (tmp_path / "0" / "best").resolve()
    assert best.name == (tmp_path / "1" / "best").resolve().name == "step-00000004"
    assert best.name != (tmp_path / "0" / "last").resolve().name
    shutil.rmtree(best)
    shutil.copytree((tmp_path / "1" / "best").resolve(), best)
    return tmp_path / "0"


def test_the_best_checkpoint_of_another_run_is_not_read(best_of_another, tmp_path):
    with pytest.raises(ConfigError, match="checkpoint of another run"):
        load(best_of_another)
    load(best_of_another / "last")
    load(tmp_path / "1")


def test_a_resumed_run_goes_on_without_the_best_checkpoint_of_another(
    best_of_another, tmp_path, caplog
):
    digest = sums((tmp_path / "1" / "best").resolve())
    resumed(best_of_another, iterations=12)
    assert "is a checkpoint of another run" in caplog.text
    load(best_of_another)
    kept = best_of_another / "checkpoints" / "step-00000004-others"
    assert sums(kept) == digest, "it may be all that is left of the other run"
    caplog.clear()
    resumed(tmp_path / "1", iterations=12)
    assert "another run" not in caplog.text


WATCHED = '{"command": "watch", "options": {}}'
PICTURES = {"ctrans": b"\x89PNG..tEXtSoftware\0ctrans", "user": b"\x89PNG..tEXtSoftware\0GIMP"}


def test_what_watch_wrote_of_a_run_goes_with_it_when_another_overwrites_it(tmp_path):
    carry_out(*start(tmp_path, iterations=2))
    (tmp_path / "watch.json").write_text(WATCHED)
    (tmp_path / "watch.png").write_bytes(PICTURES["ctrans"])
    start(tmp_path, overwrite=True)
    assert not list(tmp_path.glob("watch.*"))
    resumed(tmp_path)
    assert (tmp_path / "watch.json").read_text() == WATCHED
    assert (tmp_path / "watch.png").read_bytes() == PICTURES["ctrans"]
    carry_out(*start(tmp_path, iterations=2, overwrite=True))
    assert not [path for path in tmp_path.rglob("*") if "watch" in path.name]


def test_pictures_of_users_beside_what_watch_wrote_stay(tmp_path):
    carry_out(*start(tmp_path, iterations=2))
    (tmp_path / "watch.json").write_text(WATCHED)
    (tmp_path / "watch.png").write_bytes(PICTURES["user"])
    carry_out(*start(tmp_path, iterations=2, overwrite=True))
    assert not (tmp_path / "watch.json").exists()
    assert (tmp_path / "watch.png").read_bytes() == PICTURES["user"]


def everything(directory):
    return {
        path: path.is_file() and path.read_bytes()
        for path in directory.rglob("*")
        if path.name != ".lock"
    }


@pytest.mark.parametrize("overwrite", [True, False])
@pytest.mark.parametrize("name", ["monitor.jsonl", "train.json", "watch.json", "last/train.json"])
def test_a_run_does_not_remove_the_file_that_it_reads(name, overwrite, tmp_path):
    out = tmp_path / "run"
    carry_out(*start(out, iterations=2))
    (out / "train.json").write_text('{"command": "train", ' + 999 * " " + "}")
    (out / "watch.json").write_text(WATCHED + 999 * " ")
    (out / "monitor.jsonl").write_text('{"header": {"model": "", "places": []}}' + 999 * " ")
    link = tmp_path / "data"
    link.symlink_to(out / name)
    before = everything(out)
    for data in (out / name, link):
        with pytest.raises(ConfigError, match="would remove its data"):
            train(GPTConfig(**MODEL), TrainConfig(), data, out=out, overwrite=overwrite)
    assert everything(out) == before


def test_a_run_does_not_remove_the_tokens_that_it_reads(tmp_path):
    out = tmp_path / "run"
    carry_out(*start(out, iterations=2))
    (out / "monitor.jsonl").write_bytes(np.arange(999, dtype="<u2").tobytes())
    (tmp_path / "train.bin").symlink_to(out / "monitor.jsonl")
    (tmp_path / "val.bin").write_bytes(np.arange(99, dtype="<u2").tobytes())
    model = GPTConfig(**MODEL | {"vocab_size": 1000})
    before = everything(out)
    with pytest.raises(ConfigError, match="would remove its data"):
        train(model, TrainConfig(iterations=2), tmp_path, out=out, overwrite=True)
    assert everything(out) == before


FOREIGN_LOGS = [
    "",
    '{"step": 0, "loss": 3.2}\n',
    '{"step": 1, "epoch": 1}\n',
    '{"step": 0, "loss": 3.2, "learning_rate": 0.1, "gradient_norm": 2.0, "mine": 1}\n',
]
FOREIGN_MONITOR = '{"header": {"model": "of another program"}}\n'
ROW = '{"step": 0, "run": "this", "validation_loss": 5.0}\n'


@pytest.mark.parametrize("own_log", [*FOREIGN_LOGS, ROW])
def test_a_run_does_not_replace_a_log_that_no_run_wrote(own_log, tmp_path):
    (tmp_path / log.LOG).write_text(own_log)
    (tmp_path / log.MONITOR).write_text("precious\n")
    before = everything(tmp_path)
    with pytest.raises(ConfigError, match=r"a run would replace .*jsonl': move it away"):
        start(tmp_path, iterations=2)
    assert everything(tmp_path) == before


@pytest.mark.parametrize("own_log", [*FOREIGN_LOGS[1:], ROW])
def test_a_run_that_overwrites_keeps_a_log_that_no_run_wrote_and_says_so(own_log, tmp_path, caplog):
    (tmp_path / log.LOG).write_text(own_log)
    (tmp_path / log.MONITOR).write_text(FOREIGN_MONITOR)
    start(tmp_path, iterations=2, overwrite=True)
    kept = {path.name: path.read_text() for path in tmp_path.glob("*-others")}
    of_another = {f"{log.MONITOR}-others": FOREIGN_MONITOR}
    if own_log != ROW:
        of_another[f"{log.LOG}-others"] = own_log
    assert kept == of_another
    assert caplog.text.count("it is kept as") == len(of_another)
    assert not list(tmp_path.glob(".*monitor.jsonl"))


@pytest.mark.slow
@pytest.mark.parametrize("text", ["precious text\nmore\n", *FOREIGN_LOGS[1:]])
def test_a_resumed_run_keeps_a_log_that_no_run_wrote_and_says_so(text, tmp_path, caplog):
    carry_out(*start(tmp_path, iterations=1))
    users = tmp_path / "users.txt"
    users.write_text(text)
    (tmp_path / log.LOG).unlink()
    (tmp_path / log.LOG).symlink_to(users)
    resumed(tmp_path, iterations=2)
    assert users.read_text() == text
    assert (tmp_path / f"{log.LOG}-others").readlink() == users
    assert f"it is kept as '{tmp_path / log.LOG}-others'" in caplog.text
    assert [row["step"] for row in log.read(tmp_path)] == [1, 2]


@pytest.mark.parametrize("overwrite", [True, False])
@pytest.mark.parametrize("name", [*log.RECORDS, *log.RESULTS])
def test_a_directory_of_a_user_in_the_place_of_a_file_of_a_run_stays(name, overwrite, tmp_path):
    (tmp_path / name).mkdir()
    (tmp_path / name / "mine").write_text("mine")
    with pytest.raises(ConfigError, match="move it away"):
        start(tmp_path, iterations=2, overwrite=overwrite)
    assert everything(tmp_path) == {tmp_path / name: False, tmp_path / name / "mine": b"mine"}


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
@pytest.mark.parametrize("name", [log.MONITOR, *log.RESULTS])
def test_what_is_no_file_in_the_place_of_a_file_of_a_resumed_run_is_named(make, name, tmp_path):
    carry_out(*start(tmp_path, iterations=1))
    make(tmp_path / name)
    with pytest.raises(ConfigError, match=f"{name}' has the name of a file of the run"):
        resume(tmp_path, iterations=2)


@pytest.mark.parametrize("is_copied", [True, False])
def test_a_checkpoint_with_the_name_of_another_step_is_named_and_the_advice_mends_it(
    is_copied, tmp_path
):
    carry_out(*start(tmp_path, iterations=1))
    last = tmp_path / "last"
    place = last.resolve()
    misnamed = place.with_name("step-00000009")
    if is_copied:
        shutil.copytree(place, misnamed)
    else:
        place.rename(misnamed)
    last.unlink()
    last.symlink_to(misnamed.relative_to(tmp_path))
    with pytest.raises(ConfigError, match="step-00000009' has the checkpoint of step 1") as error:
        resume(tmp_path, iterations=3)
    subprocess.run(str(error.value).partition("from step 1: ")[2], shell=True, check=True)
    resume(tmp_path, iterations=3)


def test_a_run_does_not_begin_where_no_checkpoint_can_be_read(tmp_path):
    out = Path(os.fsdecode(os.fsencode(tmp_path) + b"/run-\xff"))
    with pytest.raises(ConfigError, match="is not UTF-8"):
        train(GPTConfig(**MODEL), TrainConfig(iterations=2), TEXT, out=out)
    assert not out.exists()
    carry_out(*start(tmp_path / "run", iterations=2))
    (tmp_path / "run").rename(out)
    with pytest.raises(ConfigError, match="is not UTF-8"):
        resume(out, iterations=4)
