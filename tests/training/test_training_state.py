"""The state of a run in train.json: values of other types are named, and what is read can be
used.
"""

import json

import pytest

from ctrans.model.sums import SUMS, sums
from ctrans.training.loop import Ending, carry_out
from ctrans.training.settings import TrainConfig
from ctrans.training.training_state import STATE, Progress, State, read_state
from solvers import ConfigError
from tests.training.helpers import resume, start


def written(directory, change):
    State(Progress(3, 2.0, 1.0, 2), TrainConfig(), {"file": None, "bin": None}, "abc").write(
        directory
    )
    content = json.loads((directory / STATE).read_text())
    change(content)
    (directory / STATE).write_text(json.dumps(content))
    return directory


def test_what_is_read_is_what_was_written(tmp_path):
    assert read_state(written(tmp_path, lambda content: None)).progress == Progress(3, 2.0, 1.0, 2)


@pytest.mark.parametrize("name", ["step", "first", "best", "best_step", "above", "good"])
@pytest.mark.parametrize("value", ["x", True, [], -1e400, 10**400])
def test_a_value_of_another_type_is_named(name, value, tmp_path):
    with pytest.raises(ConfigError, match=f"^{name} = "):
        read_state(written(tmp_path, lambda content: content["progress"].update({name: value})))


@pytest.mark.parametrize("source", [[1], {"file": 3}, None, "text"])
def test_a_source_that_is_none_is_named(source, tmp_path):
    with pytest.raises(ConfigError, match=r"^source = "):
        read_state(written(tmp_path, lambda content: content.update(source=source)))


def test_a_run_that_goes_on_with_less_patience_waits_for_an_evaluation(tmp_path):
    carry_out(*start(tmp_path, iterations=4, eval_every=4, patience=3))
    last = tmp_path / "last"
    content = json.loads((last / STATE).read_text())
    content["progress"]["above"] = 2  # as a signal saves it between two evaluations
    (last / STATE).write_text(json.dumps(content))
    (last / SUMS).write_bytes(sums(last.resolve()))
    outcome = carry_out(*resume(tmp_path, iterations=6, eval_every=4, patience=1))
    assert outcome.ending is Ending.FINISHED
