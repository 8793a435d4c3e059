"""Copies of checkpoints and models that a user keeps in the directory of a run stay."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ctrans.model.checkpoint import save
from ctrans.model.config import GPTConfig
from ctrans.model.gpt import GPT
from ctrans.model.sums import SUMS, sums
from ctrans.training.loop import carry_out
from ctrans.training.removal import remove_checkpoint
from tests.training.helpers import MODEL, resume, start


@pytest.fixture
def backup(tmp_path):
    """A run of 3 iterations, and a copy of its checkpoints under the name of another
    generation.
    """
    carry_out(*start(tmp_path, iterations=3))
    return shutil.copytree(tmp_path / "checkpoints", tmp_path / "checkpoints-2")


def everything(directory):
    return {
        path.relative_to(directory): path.read_bytes()
        for path in directory.rglob("*")
        if path.is_file()
    }


@pytest.mark.slow
def test_a_copy_of_the_checkpoints_stays_when_the_run_goes_on(backup, tmp_path):
    before = everything(backup)
    carry_out(*resume(tmp_path, iterations=6))
    assert everything(backup) == before
    assert (tmp_path / "last").resolve().parent == tmp_path / "checkpoints"


@pytest.mark.slow
def test_a_copy_of_the_checkpoints_stays_when_another_run_overwrites_theirs(
    backup, tmp_path, caplog
):
    before = everything(backup)
    carry_out(*start(tmp_path, iterations=3, overwrite=True))
    kept = tmp_path / "checkpoints-2-others"
    assert everything(kept) == before
    assert f"it is kept as '{kept}'" in caplog.text
    assert not (tmp_path / "checkpoints").exists()
    carry_out(*start(tmp_path, iterations=3, overwrite=True))
    assert everything(kept) == before
    names = {path.name for path in tmp_path.iterdir() if not path.name.startswith("log")}
    assert names == {"checkpoints", kept.name, "last", "best"}


@pytest.mark.slow
def test_a_model_that_a_user_saved_among_the_checkpoints_stays(tmp_path):
    carry_out(*start(tmp_path, iterations=3))
    place = tmp_path / "checkpoints" / "step-00000002"
    save(GPT(GPTConfig(**MODEL)), place)
    before = everything(place)
    carry_out(*resume(tmp_path, iterations=9))
    assert everything(place) == before


def test_a_note_in_a_checkpoint_whose_sums_a_user_made_anew_stays(tmp_path):
    checkpoint = tmp_path / ".step-00000001"
    checkpoint.mkdir()
    for name in ("config.json", "model.safetensors", "notes.md"):
        (checkpoint / name).write_text(name)
    (checkpoint / SUMS).write_bytes(sums(checkpoint))
    assert b"  notes.md" in (checkpoint / SUMS).read_bytes()
    remove_checkpoint(checkpoint)
    assert everything(tmp_path) == {Path("step-00000001-others/notes.md"): b"notes.md"}


WAITS = """
import os, sys
from pathlib import Path
from ctrans.model.checkpoint import ADAPTER, WEIGHTS, save
from ctrans.model.config import GPTConfig
from ctrans.model.gpt import GPT
from ctrans.training.removal import is_checkpoint
from solvers import ConfigError
from tests.training.helpers import MODEL

place = Path(sys.argv[1]) / "step-00000002"
place.mkdir()
(place / "optimiser").mkdir()
for name in (ADAPTER, WEIGHTS):
    os.mkfifo(place / name)
assert not is_checkpoint(place, 2)
try:
    save(GPT(GPTConfig(**MODEL)), place)
except ConfigError as error:
    print(error)
"""


@pytest.mark.slow
def test_a_pipe_in_the_place_of_weights_is_not_waited_for(tmp_path):
    """In a process of its own, since nothing interrupts the library that opens it."""
    done = subprocess.run(
        [sys.executable, "-c", WAITS, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert "adapter.safetensors' was not saved by ctrans" in done.stdout
