"""The optimal feedback and paths: against differences of the value function, integration of the
feedback, and the verification theorem.
"""

import math

import pytest
import torch

from ctrans.control import admissible_set
from ctrans.control.hjb import Grid
from ctrans.control.hjb.hopf_lax import hopf_lax, hopf_lax_ends, velocity_ball, velocity_hull
from ctrans.control.hjb.study import NearestTarget
from ctrans.control.hjb.synthesis import synthesis, value_slopes
from ctrans.dynamics.norm import RMSNorm
from solvers import ConfigError

REMAINING = 0.6
TARGETS = NearestTarget()
STARTS = 4
"""Two targets make two basins."""
SEARCH = 1e-9
"""The accuracy of a value by the search."""


def numbers(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def ellipse(gamma=(1.0, 0.5), beta=(0.0, 0.0)):
    norm = RMSNorm(2).double().requires_grad_(False)
    norm.weight.copy_(torch.tensor(gamma))
    hull = velocity_hull(norm)
    return type(hull)(hull.centre + torch.tensor(beta).double(), hull.map)


SETS = {
    "ellipse": ellipse(),
    "shifted ellipse": ellipse((0.7, -0.4), (0.3, -0.1)),
    "ball": velocity_ball(1.3, 2),
}
every_set = pytest.mark.parametrize("name", SETS)
NODES = Grid((-1.8, -1.8), (1.8, 1.8), (5, 5)).nodes.reshape(-1, 2)


def value(x, remaining, velocities):
    return hopf_lax(TARGETS, x, remaining, velocities, starts=STARTS)


def admissible_velocities(velocities, count, seed=0):
    w = numbers(count, 2, seed=seed)
    w = w / torch.linalg.vector_norm(w, dim=-1, keepdim=True).clamp(min=1)
    return velocities.centre + w @ velocities.map.mT


@every_set
def test_the_end_of_a_path_is_reachable_and_has_the_value(name):
    V = SETS[name]
    found = hopf_lax_ends(TARGETS, NODES, REMAINING, V, starts=STARTS)
    torch.testing.assert_close(TARGETS(found.ends), found.values)
    assert torch.equal(found.values, value(NODES, REMAINING, V))
    velocities = (found.ends - NODES) / REMAINING
    w = torch.linalg.solve(V.map, (velocities - V.centre).mT).mT
    sizes = torch.linalg.vector_norm(w, dim=-1)
    assert (sizes <= 1 + 1e-12).all()
    assert torch.equal(found.inside, sizes < 1 - 1e-6)


@every_set
def test_the_slope_is_that_of_differences_of_the_value(name):
    V = SETS[name]
    x = 1.5 * numbers(40, 2, seed=3)
    slopes = value_slopes(TARGETS, hopf_lax_ends(TARGETS, x, REMAINING, V, starts=STARTS))
    step = 1e-5 * torch.eye(2, dtype=torch.float64)
    differences = (
        value(x[:, None] + step, REMAINING, V) - value(x[:, None] - step, REMAINING, V)
    ) / 2e-5
    torch.testing.assert_close(slopes, differences, rtol=0, atol=2e-4)
    assert (slopes != 0).any(-1).sum() > 10
    assert (slopes == 0).all(-1).any()


@every_set
def test_the_feedback_at_a_node_points_to_the_end_of_its_path(name):
    V = SETS[name]
    found = synthesis(TARGETS, NODES, NODES, REMAINING, V, starts=STARTS)
    moving = found.feedback.isfinite().all(-1)
    straight = (found.ends - found.starts) / REMAINING
    assert moving.any()
    torch.testing.assert_close(found.feedback[moving], straight[moving], rtol=0, atol=1e-6)


@every_set
def test_the_feedback_attains_the_hamiltonian(name):
    V = SETS[name]
    P = numbers(20, 3, 2)
    best = V.maximizer(P)
    torch.testing.assert_close(-(P * best).sum((-2, -1)), V.support(P))
    for v in admissible_velocities(V, 10):
        assert (-(P @ v).sum(-1) <= V.support(P) + 1e-12).all()
    torch.testing.assert_close(V.maximizer(torch.zeros(1, 2).double())[0], V.centre)


def test_the_hulls_maximizer_is_that_of_the_admissible_set():
    norm = RMSNorm(2).double().requires_grad_(False)
    norm.weight.copy_(torch.tensor([1.2, -0.4]))
    P = numbers(5, 4, 2)
    torch.testing.assert_close(
        velocity_hull(norm).maximizer(P), admissible_set(norm, "peri").maximizer(P)
    )


@every_set
def test_along_an_optimal_path_the_value_is_constant(name):
    V = SETS[name]
    found = synthesis(TARGETS, NODES[:1], NODES, REMAINING, V, starts=STARTS)
    velocities = (found.ends - found.starts) / REMAINING
    at_start = value(found.starts, REMAINING, V)
    for share in (0.3, 0.9):
        time = share * REMAINING
        along = value(found.starts + time * velocities, REMAINING - time, V)
        torch.testing.assert_close(along, at_start, rtol=0, atol=SEARCH)


@every_set
def test_along_any_other_admissible_path_the_value_does_not_fall(name):
    V = SETS[name]
    x = NODES.clone()
    previous = at_start = value(x, REMAINING, V)
    for seed in range(4):
        x = x + 0.25 * REMAINING * admissible_velocities(V, len(x), seed=seed)
        now = value(x, 0.25 * REMAINING * (3 - seed), V)
        assert (now >= previous - SEARCH).all()
        previous = now
    assert (previous > at_start + 0.1).any()


@pytest.mark.slow
@every_set
def test_integrating_the_feedback_leads_to_the_end(name):
    V = SETS[name]
    x = NODES[::2]
    found = synthesis(TARGETS, x, x, REMAINING, V, starts=STARTS)
    moving = found.feedback.isfinite().all(-1)
    x, ends = x[moving], found.ends[moving]
    steps = 6
    h = REMAINING / steps
    for k in range(steps):
        v = synthesis(TARGETS, x, x[:1], REMAINING - k * h, V, starts=STARTS).feedback
        x = x + h * v
    torch.testing.assert_close(x, ends, rtol=0, atol=1e-6)
    assert len(x) > 3


@pytest.mark.slow
def test_where_the_value_is_flat_there_is_no_feedback_and_the_path_goes_to_the_closest_target():
    V = velocity_ball(50.0, 2)
    found = synthesis(TARGETS, NODES, NODES, REMAINING, V, starts=STARTS)
    assert found.feedback.isnan().all()
    targets = torch.tensor(TARGETS.targets, dtype=torch.float64)
    distances = torch.cdist(NODES, targets)
    # up to the levels, 50 * 0.6/16 apart
    near = distances.amin(-1) < distances.amax(-1) - 50 * REMAINING / 16
    assert (distances.amin(-1) < 50 * REMAINING / 16).any()
    torch.testing.assert_close(
        found.speeds[near], distances.amin(-1)[near] / REMAINING, rtol=0, atol=1e-6
    )
    torch.testing.assert_close(TARGETS(found.ends), torch.zeros(len(NODES)).double())


@pytest.mark.slow
def test_of_two_ends_that_are_equally_good_the_closer_one_is_taken():
    V = velocity_ball(8.0, 2)
    x = torch.tensor([[-1.5, 0.5], [1.2, -0.9]], dtype=torch.float64)
    found = synthesis(TARGETS, x, x, 0.5, V, starts=STARTS)
    torch.testing.assert_close(found.ends, torch.tensor(TARGETS.targets).double())
    assert found.speeds.tolist() == pytest.approx([1.2, 2 * math.hypot(0.4, 0.3)])


def test_no_time_has_no_path():
    with pytest.raises(ConfigError, match="no time remains"):
        hopf_lax_ends(TARGETS, NODES, 0.0, velocity_ball(1.0, 2))
