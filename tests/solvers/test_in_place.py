"""What fields, projections and observers must not do in silence: change the state in place, return
one buffer again, or narrow the state.
"""

import pytest
import torch

from solvers import ConfigError, Segment, solve
from solvers.methods import get_method

METHODS = ["euler", "rk4", "tsit5", "dop853", "esdirk4"]


def buffered():
    keep = torch.zeros(2, dtype=torch.float64)
    return lambda t, x: torch.neg(x, out=keep)


def in_place(t, x):
    x.mul_(0.5)
    return -x


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    ("field", "words"),
    [(in_place, "the field changed its state x in place"), (buffered(), "a buffer that it")],
)
def test_a_field_that_writes_in_place_is_refused(field, words, method):
    x0 = torch.ones(2, dtype=torch.float64)
    options = {} if get_method(method).adaptive else {"steps": 4}
    with torch.no_grad(), pytest.raises(ConfigError, match=words):
        solve([Segment(0, 1, field)], x0, method=method, **options)


def test_one_constant_tensor_may_be_returned_again():
    constant = torch.full((2,), 3.0)
    x1 = solve([Segment(0, 1, lambda t, x: constant)], torch.ones(2), method="tsit5").x1
    assert torch.allclose(x1, torch.full((2,), 4.0))


def test_the_state_may_be_its_own_velocity():
    x1 = solve([Segment(0, 1, lambda t, x: x)], torch.ones(1).double(), method="tsit5").x1
    assert float(x1) == pytest.approx(2.718281828, rel=1e-6)


def test_an_observer_that_zeroes_the_state_is_refused():
    with torch.no_grad(), pytest.raises(ConfigError, match="changed the state in place"):
        solve(
            [Segment(0, 1, lambda t, x: -x)],
            torch.ones(2),
            method="tsit5",
            on_step=lambda t, x: x.zero_(),
        )


@pytest.mark.parametrize("name", ["project", "enter"])
def test_a_map_that_narrows_the_state_is_refused(name):
    segment = Segment(0, 1, lambda t, x: -x, **{name: lambda x: x.float()})
    with pytest.raises(ConfigError, match=f"the {name} returned float32 for a state of float64"):
        solve([segment], torch.ones(2, dtype=torch.float64), method="tsit5")
