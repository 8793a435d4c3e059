"""The state of a run in train.json: values of other types are named, and what is read can be
used.
"""

import dataclasses
import json

import pytest

from ctrans.model.sums import SUMS, sums
from ctrans.training.execution import Execution
from ctrans.training.loop import Ending, carry_out
from ctrans.training.settings import TrainConfig
from ctrans.training.training_state import STATE, Progress, State, read_state
from solvers import ConfigError
from tests.training.helpers import resume, start

EXECUTION = Execution(3, 2, "cuda:1", tensorboard=True, eval_depth=(4, 8), plugins=64 * "a")


def written(directory, change):
    state = State(
        Progress(3, 2.0, 1.0, 2), TrainConfig(), {"file": None, "bin": None}, "abc", EXECUTION
    )
    state.write(directory)
    content = json.loads((directory / STATE).read_text())
    change(content)
    (directory / STATE).write_text(json.dumps(content))
    return directory


def test_what_is_read_is_what_was_written(tmp_path):
    state = read_state(written(tmp_path, lambda content: None))
    assert (state.progress, state.execution) == (Progress(3, 2.0, 1.0, 2), EXECUTION)


def test_a_state_from_before_there_was_an_execution_is_read(tmp_path):
    state = read_state(written(tmp_path, lambda content: content.pop("execution")))
    assert state.execution == Execution()


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(Execution)])
@pytest.mark.parametrize("value", ["no device", 0, -1, 1.5, {}, [0], [1e400]])
def test_an_execution_of_another_type_is_named(name, value, tmp_path):
    with pytest.raises(ConfigError, match=f"^{name} = "):
        read_state(written(tmp_path, lambda content: content["execution"].update({name: value})))


def test_an_execution_that_is_none_or_has_more_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"^execution = "):
        read_state(written(tmp_path, lambda content: content.update(execution=[1])))
    with pytest.raises(ConfigError, match="threats"):
        read_state(written(tmp_path, lambda content: content["execution"].update(threats=1)))


@pytest.mark.parametrize(
    ("now", "words"),
    [
        (Execution(2, 1, "cpu"), ["had 1 CPU threads, and goes on with 2"]),
        (Execution(1, 1, "cuda:1"), ["was on device 'cpu', and goes on on 'cuda:1'"]),
        (Execution(2, 2, "cpu"), []),
        (Execution(None, 1, None), []),
        (Execution(1, 1, "cpu", tensorboard=True), []),
        (Execution(1, 1, "cpu", plugins="a"), []),
    ],
)
def test_an_execution_with_other_bits_is_said(now, words, caplog):
    now.warn_if_other_than(Execution(1, 1, "cpu"))
    assert len(caplog.messages) == len(words)
    assert all(word in message for word, message in zip(words, caplog.messages, strict=True))


@pytest.mark.parametrize(
    ("before", "now", "is_said"), [("a", "b", True), ("a", "a", False), (None, "a", False)]
)
def test_plugins_that_were_edited_since_the_checkpoint_are_said(before, now, is_said, caplog):
    Execution(plugins=now).warn_if_other_than(Execution(plugins=before))
    assert ("plugins are not those" in caplog.text) == is_said


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
