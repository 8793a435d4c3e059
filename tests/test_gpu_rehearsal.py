"""`make gpu` as it runs where there is no GPU: every part on the CPU, at a small size."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.gpu_parts import PARTS, Part, Request

ROOT = Path(__file__).parents[1]


def script(*args):
    command = [sys.executable, ROOT / "benchmarks" / "gpu.py", "--rehearse", *args]
    return subprocess.run(
        [str(part) for part in command], capture_output=True, text=True, check=False
    )


@pytest.mark.slow
def test_every_part_passes_in_a_rehearsal(tmp_path):
    done = script("--results", tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    (result,) = tmp_path.iterdir()
    text = result.read_text()
    assert [name for name in PARTS if f"\n{name}: {PARTS[name].title}: ok" not in text] == []
    assert f"{len(PARTS)} of {len(PARTS)} parts passed" in text
    assert "Rehearsal" in text


@pytest.mark.slow
def test_a_part_that_fails_is_named_and_the_others_go_on(tmp_path):
    (tmp_path / "model.py").write_text("raise RuntimeError('no such model')")
    done = script(
        "--results",
        tmp_path / "results",
        "--nanogpt",
        tmp_path,
        "--only",
        "training",
        "--only",
        "screening",
    )
    assert done.returncode == 1
    assert done.stderr.strip() == "failed: training (exit code 1)"
    assert "no such model" in done.stdout
    assert "screening: ctrans screen: ok" in done.stdout
    assert "1 of 2 parts passed" in done.stdout


def test_all_parts_fit_into_ten_minutes():
    assert sum(part.seconds for part in PARTS.values()) <= 580


@pytest.mark.slow
def test_a_part_is_ended_with_all_that_it_started_and_one_that_lacks_a_package_says_so(
    tmp_path, monkeypatch
):
    from benchmarks import gpu

    started = tmp_path / "child"
    sleeper = (
        f"import os, time; open({str(started)!r}, 'w').write(str(os.getpid())); time.sleep(600)"
    )
    program = tmp_path / "part.py"
    program.write_text(
        "import subprocess, sys\nprint('begun', flush=True)\nsubprocess.run([sys.executable, '-c',"
        f" {sleeper!r}])\n"
    )
    monkeypatch.setattr(gpu, "__file__", str(program))
    outcome = gpu.run(
        Part("slow", "sleeps", lambda request: [], 600), Request(rehearsal=True), limit=3
    )
    assert outcome.failure == "not done after 3 s"
    assert outcome.lines == ["begun"]
    child, patience = int(started.read_text()), time.monotonic() + 30
    while (
        alive(child) and time.monotonic() < patience
    ):  # it has been killed, and ends when the system comes to it
        time.sleep(0.1)
    assert not alive(child)
    lacking = Part(
        "lacking", "needs what is not there", lambda request: [], 600, ("torch", "no_such_package")
    )
    assert (
        gpu.run(lacking, Request(rehearsal=True), limit=3).failure
        == "missing here: no_such_package"
    )


def alive(process):
    """Whether it runs: an ended child whose parent is gone may stay in the table for a while, as a
    zombie.
    """
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
