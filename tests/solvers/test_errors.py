"""Values in messages: short, on one line, and without an error of their own."""

import pytest
import torch

from ctrans.base.option import COUNT
from solvers import ConfigError, Segment, odeint, solve
from solvers.errors import shown


def looped():
    """A list and a dictionary that contain themselves."""
    entries, named = [1], {}
    entries.append(entries)
    named["x"] = named
    return entries, named


def test_a_list_that_contains_itself_is_shown_to_a_depth():
    entries, _ = looped()
    assert shown(entries) == "[1, [1, [1, [...]]]]"
    assert shown([[1, [2]], [3]]) == "[[1, [2]], [3]]"
    with pytest.raises(ConfigError, match=r"depth = \[1, \[1"):
        COUNT.check("depth", entries, whole=True)


@pytest.mark.parametrize("state", looped())
def test_a_state_that_contains_itself_is_refused(state):
    with pytest.raises(ConfigError, match="the initial state contains itself"):
        solve([Segment(0, 1, lambda t, x: x)], state)
    with pytest.raises(ConfigError, match="y0 contains itself"):
        odeint(lambda t, y: y, state, torch.tensor([0.0, 1.0]))
