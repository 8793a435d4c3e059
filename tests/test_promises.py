"""tests/promises.toml names tests for each promise of docs/why/promises.md, and each test exists.
The promises that no other file tests are tested here.
"""

import ast
import functools
import os
import re
import shutil
import sqlite3
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from ctrans.base import given_files
from ctrans.interop import directory_tokeniser
from ctrans.study.carry_out import carry_out_study, prospect
from ctrans.study.database import FILE, open_store
from ctrans.training.run_directory import KEPT
from solvers import ConfigError
from tests.cases import is_in_slow_place
from tests.study.helpers import one_by_one, small

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs/why/promises.md").read_text()
TESTS = tomllib.loads((ROOT / "tests/promises.toml").read_text())
NAMED = re.compile(r"([\w/]+\.py)::(test_\w+)(?: \((slow|some cases)\))?")
"""A test as the file names it: its file under tests, its function, and how much of it `make test`
leaves out.
"""


def promises():
    """The list items of the page, but for those of its first and its last part."""
    for part in PAGE.split("\n## ")[1:-1]:
        for item in re.findall(r"^- (.*(?:\n  .*)*)", part, re.M):
            yield " ".join(item.split())


@functools.cache
def functions(path):
    tree = ast.parse((ROOT / "tests" / path).read_text())
    return {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}


def left_out(path, function):
    """What `make test` leaves out of a test, as the file says it. A parameter's own mark is some
    cases, as tests/conftest.py has it.
    """
    if is_in_slow_place(path):
        return "slow"
    marks = [ast.unparse(each) for each in function.decorator_list]
    if "pytest.mark.slow" in marks:
        return "slow"
    return (
        "some cases" if any("mark.cases(" in mark or "mark.slow" in mark for mark in marks) else ""
    )


def test_each_promise_of_the_page_has_its_tests():
    assert list(promises()) == list(TESTS)


@pytest.mark.parametrize("tests", TESTS.values(), ids=[promise[:60] for promise in TESTS])
def test_the_tests_of_a_promise_exist_and_slow_ones_say_so(tests):
    assert tests
    for test in tests:
        path, name, said = NAMED.fullmatch(test).groups(default="")
        assert name in functions(path), f"{path} has no {name}"
        assert left_out(path, functions(path)[name]) == said, f"{path}::{name}"


def test_numbers_of_the_page_are_the_codes():
    assert f"at most {given_files.LARGEST_JSON >> 20} MiB" in PAGE
    assert f"header of {given_files.MOST_NAMES >> 20} MiB" in PAGE
    assert f"nested {given_files.DEEPEST_JSON} deep" in PAGE
    limits = f"{directory_tokeniser.SECONDS} processor seconds and {directory_tokeniser.MEMORY >> 30} GiB"
    assert limits in PAGE
    assert f"the newest {KEPT}" in PAGE


def test_a_row_of_a_study_is_on_the_disk_when_its_run_is_done(tmp_path):
    """SQLite flushes each transaction. A copy of the files at that moment, as a kill leaves them,
    has the row.
    """
    study, kept = small(), []

    def engine(jobs):
        for done in one_by_one(jobs):
            yield done
            copy = shutil.copytree(tmp_path / "study", tmp_path / f"killed-{len(kept)}")
            with open_store(copy, write=False) as killed:
                kept.append(len(killed.runs()))

    with open_store(tmp_path / "study") as store:
        modes = [
            store.connection.execute(f"PRAGMA {name}").fetchone()[0]
            for name in ("synchronous", "journal_mode")
        ]
        assert modes == [2, "wal"], "2 is FULL"
        assert carry_out_study(prospect(study, store), store, engine)
    assert kept == [1, 2, 3, 4]


def test_a_full_disk_loses_no_run_of_a_study_that_was_done(tmp_path):
    with open_store(tmp_path) as store:
        carry_out_study(prospect(small(vary={"placement": ["pre"]}), store), store, one_by_one)
        done = [run.key for run in store.runs()]

    def on_a_full_disk():
        with open_store(tmp_path) as store:
            pages = store.connection.execute("PRAGMA page_count").fetchone()[0]
            store.connection.execute(f"PRAGMA max_page_count = {pages}")
            carry_out_study(prospect(small(), store), store, one_by_one)

    with pytest.raises(ConfigError, match=r"is full; its runs are whole"):
        on_a_full_disk()
    with sqlite3.connect(tmp_path / FILE) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    with open_store(tmp_path) as store:
        assert set(done) <= {run.key for run in store.runs()}
        assert carry_out_study(prospect(small(), store), store, one_by_one)
        assert len(store.runs()) == 4


@pytest.mark.slow
def test_the_time_of_day_is_read_for_the_end_of_a_studys_runs_alone():
    """All else measures durations, by clocks that do not jump."""
    found = []
    for path in sorted(
        path for package in ("ctrans", "solvers") for path in (ROOT / package).rglob("*.py")
    ):
        for node in ast.walk(ast.parse(path.read_text())):
            said = ast.unparse(node) if isinstance(node, ast.Attribute | ast.ImportFrom) else ""
            if re.search(
                r"\btime\.(time|time_ns|ctime|localtime|gmtime)$|\b(now|utcnow|today)$|^from"
                r" (time|datetime) |st_mtime|getmtime",
                said,
            ):
                found.append(f"{path.relative_to(ROOT)}: {said}")
    assert found == [
        "ctrans/interop/pickled.py: state.st_mtime_ns",  # the key of a cache: any change counts
        "ctrans/study/database.py: datetime.datetime.now",
    ]


def test_a_study_whose_clock_goes_back_keeps_every_run(tmp_path, monkeypatch):
    import datetime as real

    years = iter(range(2030, 1990, -1))

    class Clock(real.datetime):
        @classmethod
        def now(cls, zone=None):
            return cls(next(years), 1, 1, tzinfo=zone)

    monkeypatch.setattr("ctrans.study.database.datetime.datetime", Clock)
    with open_store(tmp_path) as store:
        assert carry_out_study(prospect(small(), store), store, one_by_one)
        assert len(store.runs()) == 4
        assert not prospect(small(), store).left


WATCHED = """
import sys
from pathlib import Path

import torch
from click.testing import CliRunner
from ctrans.cli import main

calls = []
NETWORK = ("socket.connect", "socket.bind", "socket.sendto", "socket.getaddrinfo", "socket.gethostbyname", "urllib.Request")
sys.addaudithook(lambda event, given: calls.append((event, given)) if event in NETWORK else None)

SMALL = "--depth 1 --width 8 --heads 2 --context 4 --batch 1"
Path("model.py").write_text(
    "from torch import nn\\ndef build():\\n"
    "    layer = nn.TransformerEncoderLayer(8, 2, 8, batch_first=True, dropout=0.0)\\n"
    "    return nn.Sequential(nn.Embedding(256, 8), nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(8, 256))\\n"
)
import transformers

sizes = {"n_layer": 1, "n_embd": 8, "n_head": 2, "vocab_size": 256, "n_positions": 8, "bos_token_id": 0, "eos_token_id": 0}
transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes)).save_pretrained("gpt2")
for line in (
    f"simulate --placement peri {SMALL} --no-reference --out a --html a/a.html",
    f"screen --placement pre --quick {SMALL} --out b",
    f"hjb-check --placement peri {SMALL} --out c",
    f"control --placement pre {SMALL} --out d",
    "diagnose --python model.py:build --context 4 --batch 1 --out e",
    "diagnose gpt2 --context 4 --batch 1 --out f",
    f"train {SMALL.replace('--batch 1', '--batch 2')} --iterations 2 --warmup 0 --monitor --every 1 --out g",
    "generate --checkpoint g --tokens 2 --prompt a",
    "watch g --once",
    "report a/simulate.json --out h",
    "verify --only theorem-4 --out i",
):
    found = CliRunner().invoke(main, line.split(), prog_name="ctrans")
    assert found.exit_code == 0, (line, found.output)
made = list(calls)
import socket

socket.getaddrinfo("127.0.0.1", 9)
print(made, len(calls))
"""


@pytest.mark.slow
def test_commands_open_no_connection_and_ask_for_no_address(tmp_path):
    """Python reports each connection and each look-up of a name, whoever makes it in this
    process.
    """
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", WATCHED],
        cwd=tmp_path,
        env={**environment, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[] 1", (
        "the look-up at the end is seen, and it is the only one"
    )
