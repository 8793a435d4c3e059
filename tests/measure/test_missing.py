"""What was not measured is in `missing` of every result, with the reason."""

import pytest
import torch

from ctrans.measure.missing import tried
from ctrans.measure.walk import Attempt, Instrument, walk
from ctrans.model.config import GPTConfig
from ctrans.model.gpt import GPT
from solvers import ConfigError, SolveError


def fails(error):
    raise error


def test_a_value_is_given_and_nothing_is_missing():
    missing = {}
    assert tried(missing, "quotient", divmod, 7, 2) == (3, 1)
    assert tried(missing, "whole", int, "ff", base=16) == 255
    assert not missing


@pytest.mark.parametrize("kind", [ConfigError, SolveError])
def test_a_failure_is_filed_under_its_name(kind):
    missing = {"other": "before"}
    assert tried(missing, "bound", fails, kind("no map")) is None
    assert missing == {"other": "before", "bound": "no map"}


def test_other_errors_are_no_reasons():
    with pytest.raises(ZeroDivisionError):
        tried({}, "quotient", divmod, 1, 0)


def test_with_a_reason_nothing_runs():
    missing = {"bound": "left out"}
    assert tried(missing, "bound", fails, AssertionError("it ran")) is None
    assert missing == {"bound": "left out"}


class Breaks(Instrument):
    """Fails at the second segment, and counts what it is asked."""

    def __init__(self):
        self.asked = 0
        self.found = "all"

    def forward(self, at):
        self.asked += 1
        if self.asked == 2:
            raise SolveError("it broke")


def test_an_attempt_files_the_first_failure_and_then_measures_nothing():
    missing = {}
    instrument = Breaks()
    attempt = Attempt(instrument, missing, "sizes")
    model = GPT(GPTConfig(vocab_size=5, context=4, depth=2, width=4, heads=1, placement="pre"))
    (figures,) = walk(model, torch.tensor([[1, 2, 3]]), None, [attempt])
    assert (instrument.asked, figures, missing) == (2, None, {"sizes": "it broke"})


def test_the_figures_of_an_attempt_are_computed_once():
    class Counts(Instrument):
        asked = 0

        def figures(self):
            self.asked += 1
            return self.asked

    attempt = Attempt(Counts(), {}, "counts")
    assert (attempt.figures(), attempt.figures()) == (1, 1)


def test_an_attempt_that_is_left_out_says_why():
    missing = {}
    attempt = Attempt(Breaks(), missing, "sizes")
    attempt.leave_out("it takes minutes")
    assert attempt.figures() is None
    assert missing == {"sizes": "it takes minutes"}
    alone = Attempt(Breaks())
    assert (alone.figures(), alone.missing) == ("all", {})
