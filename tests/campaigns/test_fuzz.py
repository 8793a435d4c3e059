"""Each parser on its corpus, the inputs by which coverage-guided fuzzing reached its lines, and on
some that are changed anew.

`make fuzz` looks for more.
"""

import contextlib
import json
import random
import time

import pytest

from solvers import ConfigError
from tests import typecheck
from tests.campaigns import fuzzing
from tests.campaigns.fuzz import TARGETS, Target, database_rows, fault_of, study_row
from tests.campaigns.fuzzing import corpus, flipped, keep_corpus, least, mutated

SECONDS = 0.5
"""Processor time that a test has for changed inputs."""


@pytest.fixture(autouse=True)
def _as_users_call_it():
    """Users check no types at run time."""
    typecheck.allow(False)


@pytest.mark.parametrize("name", TARGETS)
def test_a_parser_reads_its_corpus_or_refuses_it(name, tmp_path):
    inputs, draws = corpus(name), random.Random(0)
    assert (fuzzing.CORPORA / f"{name}.json.z").exists(), (
        "a corpus is kept by: python -m tests.campaigns.fuzzing --only NAME"
    )
    end = time.process_time() + SECONDS
    for data in inputs[: len(inputs) if name != "family" else 1]:
        assert fault_of(name, data, tmp_path) is None, data
    while time.process_time() < end:
        data = mutated(draws.choice(inputs), TARGETS[name].form, draws, flipped(draws))
        assert fault_of(name, data, tmp_path) is None, data


@pytest.mark.slow
def test_a_model_s_config_is_read_or_refused_in_each_family(tmp_path):
    for data in TARGETS["family"].seeds():
        assert fault_of("family", data, tmp_path) is None, data


def reads(data, place):
    """A parser with a fault behind two conditions, a print, and an own check."""
    if data[:1] == b"{":
        if b'"depth": null' in data:
            raise KeyError("x")
        if b"\\u001b" in data:
            print("\x1b[2J")
        assert b"inf" not in data.lower(), "differs"


def test_faults_are_found_and_named_once(tmp_path, monkeypatch):
    monkeypatch.setitem(
        TARGETS, "made", Target(reads, lambda: [b'{"depth": 1, "width": [2, 3]}'], "json")
    )
    draws, found = random.Random(0), set()
    for _ in range(3000):
        data = mutated(b'{"depth": 1, "width": [2, 3]}', "json", draws, flipped(draws))
        found.add(fault_of("made", data, tmp_path))
    assert {None, "control characters are printed"} < found
    assert {words.split(":")[0] for words in found - {None, "control characters are printed"}} == {
        "KeyError",
        "AssertionError",
    }
    assert len(found) == 4


def test_a_corpus_has_the_shortest_inputs_that_reach_all_lines(tmp_path, monkeypatch):
    monkeypatch.setattr(fuzzing, "CORPORA", tmp_path / "corpora")
    inputs = [
        b"{",
        b"{}",
        b'{"x": 1}',
        b"[]",
        b'{"image_mean": 0.5}',
        b'{"image_mean": 0.25}',
        b'{"image_mean": "x"}',
        b"\xff",
    ]
    kept, count = least("prepared", inputs, tmp_path)
    assert b'{"image_mean": 0.25}' not in kept
    assert {b'{"image_mean": 0.5}', b'{"image_mean": "x"}'} <= set(kept)
    assert least("prepared", kept, tmp_path) == (kept, count)
    keep_corpus("prepared", kept)
    assert corpus("prepared") == kept


@pytest.mark.parametrize(
    ("change", "without"),
    [
        ({"model": "{}"}, ()),
        ({"model": '{"nope": 1}'}, ("key",)),
        ({"model": '{"nope": 1}'}, ("environment",)),
        ({"seconds": "x"}, ()),
    ],
)
def test_a_row_of_a_study_of_format_1_that_lacks_something_is_read_or_refused_in_a_line(
    change, without, tmp_path
):
    row = {**json.loads(database_rows()[0]), **change}
    with contextlib.suppress(ConfigError):
        study_row(
            json.dumps(
                {name: value for name, value in row.items() if name not in without}
            ).encode(),
            tmp_path,
        )
