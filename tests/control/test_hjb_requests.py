"""Requests to the solvers of the HJB equation that cannot be served: one sentence, and at once."""

import math
import time

import pytest
import torch

from ctrans.control import Ellipsoid, FrobeniusBall, KineticCost, WholeSpace
from ctrans.control.hjb import Grid, solve_hjb, speeds
from ctrans.control.hjb.hopf_lax import BallImage, hopf_lax, velocity_ball, velocity_hull
from ctrans.control.hjb.study import pde_study
from ctrans.dynamics.norm import RMSNorm
from solvers import ConfigError

BALL = velocity_ball(1.0, 2)


def goal(x):
    return x.norm(dim=-1)


def grid(**changes):
    return Grid(**{"low": (-1.0, -1.0), "high": (1.0, 1.0), "points": (11, 11), **changes})


def solved(hamiltonian=BALL, terminal=goal, on=None, times=(0.0,), **request):
    if on is None:
        on = grid()
    return solve_hjb(hamiltonian, terminal, on, times, **{"horizon": 1.0, **request})


class Support:
    def __init__(self, support):
        self.support = support


def lengths(P):
    return P.norm(dim=-1).sum(-1)


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        ({"hamiltonian": velocity_ball(1e12, 2)}, r"1\.33e\+13 steps of time on 121 nodes"),
        ({"hamiltonian": velocity_ball(1e300, 2)}, "steps of time"),
        ({"cfl": 1e-9}, r"1e\+10 steps of time"),
        ({"cfl": 5e-324}, "inf steps of time"),
        ({"horizon": 1e300}, "steps of time"),
        ({"times": [k / 10**6 for k in range(10**6)]}, "1,000,000 times: give at most 100,000"),
        ({"times": [0.0] * 10**5, "on": grid(points=(60, 60))}, "100,000 times on 3,600 nodes"),
    ],
)
def test_a_solve_without_an_end_is_refused_at_once(request_, message):
    begun = time.monotonic()
    with pytest.raises(ConfigError, match=message):
        solved(**request_)
    assert time.monotonic() - begun < 10


def test_the_number_of_steps_that_is_refused_is_the_one_that_would_be_taken():
    # dt sum_i a_i/h_i = cfl, a = 1 and h = 0.2 along both axes: 10/cfl steps, rounded up
    assert solved(cfl=0.51).steps == 20
    with pytest.raises(ConfigError, match=r"1e\+07 steps"):
        solved(cfl=1e-6)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"low": (1.0, 1.0), "high": (math.nextafter(1, 2), 2.0)}, "does not resolve"),
        ({"high": (1.0, -1.0 + 1e-7), "dtype": torch.float32}, "does not resolve"),
        ({"low": (-1.7e308, -1.0), "high": (1.7e308, 1.0)}, "longer than"),
        ({"low": (0.0, -1.0), "high": (5e-323, 1.0)}, "does not resolve"),
        ({"low": (0.0, -1.0), "high": (1e39, 1.0), "dtype": torch.float32}, "longer than"),
        ({"points": (10**9, 10**9)}, "give fewer points"),
        ({"points": (10**400, 3)}, "a number of 401 digits"),
        ({"points": (3.5, 3.5)}, r"points = \[3.5, 3.5\]: give a list of whole numbers"),
        ({"points": "11"}, "points = '11'"),
        ({"points": 11}, "points = 11"),
        ({"points": (True, True)}, "points = "),
        ({"low": ("a", "b")}, r"low = \['a', 'b'\]: give a list of numbers"),
        ({"high": 1.0}, "high = 1.0"),
        ({"dtype": torch.int64}, "torch.int64.*give torch.float64"),
        ({"dtype": torch.complex64}, "torch.complex64.*give torch.float64"),
        ({"dtype": "float64"}, "'float64': give torch.float64"),
        ({"device": "nowhere"}, "device = 'nowhere'"),
        ({"device": "meta"}, "device = 'meta'"),
    ],
)
def test_a_grid_that_cannot_be_is_refused_in_a_line(changes, message):
    with pytest.raises(ConfigError, match=message):
        grid(**changes)


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        ({"hamiltonian": None}, "hamiltonian = None"),
        ({"hamiltonian": 1.0}, "hamiltonian = 1.0"),
        ({"hamiltonian": lengths}, r"give an object with a method support\(P\)"),
        ({"hamiltonian": BallImage}, r"give an object with a method support\(P\)"),
        ({"hamiltonian": Support(lambda P: P)}, "must reduce the last axis only"),
        ({"hamiltonian": Support(lambda P: 1.0)}, "returned 1.0: return a tensor"),
        ({"hamiltonian": Support(lambda P: lengths(P) * 1j)}, "returned torch.complex128"),
        ({"hamiltonian": Support(lambda P: lengths(P).long())}, "returned torch.int64"),
        ({"hamiltonian": velocity_ball(1.0, 3)}, "width 2, the admissible set 3"),
        ({"hamiltonian": velocity_ball(1.0, 2, dtype=torch.float32)}, "dtype torch.float64"),
        ({"terminal": None}, "the terminal cost is None"),
        ({"terminal": lambda x: 1.0}, "the terminal cost returned 1.0"),
        ({"terminal": lambda x: goal(x) * 1j}, "the terminal cost returned torch.complex128"),
        ({"terminal": lambda x: goal(x).long()}, "the terminal cost returned torch.int64"),
        ({"on": "grid"}, "grid = 'grid'"),
        ({"times": None}, "times = None"),
        ({"times": 0.0}, "times = 0.0"),
        ({"times": "0"}, "times = '0'"),
        ({"horizon": None}, "horizon = None"),
        ({"cfl": "0.5"}, "cfl = '0.5'"),
        ({"scheme": []}, "unknown scheme"),
        ({"progress": 3}, "progress = 3"),
        ({"compiled": "yes"}, "compiled = 'yes'"),
    ],
)
def test_an_argument_of_another_kind_is_refused_in_a_line(request_, message):
    with pytest.raises(ConfigError, match=message):
        solved(**request_)


STATES = torch.zeros(3, 2, dtype=torch.float64)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: hopf_lax(goal, [0.0, 1.0], 1.0, BALL), "the states are"),
        (lambda: hopf_lax(goal, STATES[:0], 1.0, BALL), "non-empty"),
        (lambda: hopf_lax(goal, STATES, None, BALL), "remaining time"),
        (lambda: hopf_lax(goal, STATES, 1.0, None), "velocities = None"),
        (lambda: hopf_lax(goal, STATES, 1.0, BALL, starts=10**9), "give at most 256"),
        (lambda: hopf_lax(lambda x: goal(x) * 1j, STATES, 1.0, BALL), "torch.complex128"),
        (lambda: velocity_ball(None, 2), "radius = None"),
        (lambda: velocity_ball(1.0, 2.5), "width = 2.5"),
        (lambda: velocity_ball(1.0, 10**9), "width = 1,000,000,000"),
        (lambda: velocity_hull(None), "norm = None"),
        (lambda: BallImage(None, None), "the centre None"),
        (lambda: BallImage(STATES[0], STATES.mT * math.nan), "not finite"),
        (lambda: speeds(None, STATES, grid()), "hamiltonian = None"),
        (lambda: pde_study(None), "velocities = None"),
        (lambda: pde_study(BALL, points=10**6), "give at most 1,001"),
        (lambda: pde_study(BALL, radii=5.0), "radii = 5.0"),
    ],
)
def test_calls_next_to_the_solver_are_refused_in_a_line(call, message):
    with pytest.raises(ConfigError, match=message):
        call()


def norm():
    return RMSNorm(2).double().requires_grad_(False)


SETS = {
    "ball of velocities": BALL,
    "ellipsoid": Ellipsoid(norm()),
    "weights in a ball": FrobeniusBall(STATES + 1, 1.0),
    "kinetic": KineticCost(WholeSpace(), 0.5),
    "kinetic ellipsoid": KineticCost(Ellipsoid(norm()), 0.5),
    "whole space": WholeSpace(),
}
NOT_ROWS = {
    "None": None,
    "list": [1.0, 2.0],
    "number": 1.0,
    "text": "P",
    "vector": STATES[0],
    "integers": STATES.long(),
    "complex": STATES * 1j,
    "meta": STATES.to("meta"),
    "sparse": STATES.to_sparse(),
}


@pytest.mark.parametrize("rows", NOT_ROWS)
@pytest.mark.parametrize("name", SETS)
def test_a_set_refuses_what_is_no_costate(name, rows):
    velocities = SETS[name]
    for method in (velocities.support, velocities.maximizer):
        with pytest.raises(ConfigError, match="give"):
            method(NOT_ROWS[rows])
