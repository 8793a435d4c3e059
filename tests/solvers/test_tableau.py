import dataclasses

import numpy as np
import pytest
import scipy.integrate
import torch
from scipy.integrate._ivp import dop853_coefficients as theirs

from solvers import METHODS, ConfigError, RungeKutta, Segment, Tableau, solve, tableau
from solvers.dop853 import DOP853
from solvers.explicit_tableaus import DOPRI5, EULER, RK4, TSIT5
from solvers.rooted_trees import density, trees
from solvers.run import Run
from solvers.runge_kutta import weighted

OWN = [method.tableau for method in METHODS.values() if isinstance(method, RungeKutta)]


def test_number_of_rooted_trees_is_the_known_sequence():
    assert [len(trees(n)) for n in range(1, 8)] == [1, 1, 2, 4, 9, 20, 48]


def test_densities_of_a_chain_and_a_bush_are_factorial_and_order():
    chain, bush = ((((),),),), ((), (), ())
    assert density(chain) == 24
    assert density(bush) == 4


@pytest.mark.parametrize("scheme", OWN, ids=lambda t: f"order{t.order}stages{len(t.b)}")
def test_no_method_is_of_a_higher_order_than_it_says(scheme):
    with pytest.raises(ConfigError, match="is not of order"):
        dataclasses.replace(scheme, order=scheme.order + 1)


@pytest.mark.parametrize("scheme", OWN, ids=lambda t: f"order{t.order}stages{len(t.b)}")
def test_a_mistyped_coefficient_is_refused(scheme):
    for i, row in enumerate(scheme.a):
        for j in range(len(row)):
            wrong = list(row)
            wrong[j] += 1e-6
            with pytest.raises(ConfigError, match=r"sums to"):
                dataclasses.replace(scheme, a=(*scheme.a[:i], tuple(wrong), *scheme.a[i + 1 :]))
    for j in range(len(scheme.b)):
        weights = [b + 1e-6 * (i == j) for i, b in enumerate(scheme.b)]
        with pytest.raises(ConfigError, match="is not of order"):
            dataclasses.replace(scheme, b=tuple(weights))


def test_coefficients_that_keep_their_row_sum_are_still_checked_by_the_order_conditions():
    rows = list(RK4.a)
    rows[3] = (0.1, -0.1, 1.0)
    with pytest.raises(ConfigError, match="is not of order 4"):
        dataclasses.replace(RK4, a=tuple(rows))


def test_embedded_weights_are_checked_at_their_own_order():
    with pytest.raises(ConfigError, match="embedded is not of order 5"):
        dataclasses.replace(DOPRI5, embedded_order=5)


def test_a_node_outside_the_step_is_refused():
    with pytest.raises(ConfigError, match="outside its segment"):
        tableau(1, [[], [2]], [1, 0])


def test_a_malformed_tableau_is_refused():
    with pytest.raises(ConfigError, match="rows of 0, 1"):
        Tableau(order=1, a=((), ()), b=(0.5, 0.5), c=(0.0, 1.0))
    with pytest.raises(ConfigError, match="must be at least 1"):
        dataclasses.replace(EULER, order=0)


def test_pairs_that_reuse_their_last_stage_are_recognised():
    assert DOPRI5.reuses_last_stage
    assert TSIT5.reuses_last_stage
    assert not RK4.reuses_last_stage
    assert not EULER.reuses_last_stage


def test_the_pair_of_order_8_is_scipys_to_the_last_bit():
    assert all(DOP853.a[i] == tuple(theirs.A[i, :i]) for i in range(12))
    assert DOP853.a[12] == DOP853.b[:12] == tuple(theirs.B)
    assert max(abs(DOP853.c - theirs.C[:13])) < 1e-14
    fine, coarse = DOP853.error_weights
    assert max(abs(fine - theirs.E5)) < 3e-16  # a difference of two weights
    assert max(abs(coarse - theirs.E3)) < 3e-16
    assert DOP853.reuses_last_stage


def test_the_error_of_two_parts_is_scipys_and_of_order_8():
    # err5^2/sqrt(err5^2 + 0.01 err3^2), by scipy's own estimate of the same step
    assert DOP853.error_order == 8

    def field(t, x):
        return np.array([x[1] * np.cos(t), -np.sin(x[0])])

    x0, h = np.array([1.0, -0.5]), 0.4
    peer = scipy.integrate.DOP853(field, 0.0, x0, 1.0, rtol=1e-6, atol=1e-6)
    k = [field(0.0, x0)]
    for row, c in zip(DOP853.a[1:], DOP853.c[1:], strict=True):
        k.append(field(c * h, x0 + h * sum(a * s for a, s in zip(row, k, strict=True))))
    x1 = x0 + h * sum(b * s for b, s in zip(DOP853.b, k, strict=True))
    scale = 1e-6 + 1e-6 * np.maximum(abs(x0), abs(x1))
    right = peer._estimate_error_norm(np.array(k), h, scale)
    stages = [torch.tensor(s) for s in k]
    run = Run(1, 1e-6, 1e-6, max_steps=1)
    states = torch.tensor(x0), torch.tensor(x1)
    ours = DOP853.error(
        [float(run.size(weighted(h, row, stages), *states)) for row in DOP853.error_weights]
    )
    fine, coarse = (np.abs(weights) @ np.abs(k) for weights in DOP853.error_weights)
    rounding = (
        2**-52 * h * float(((fine + coarse) / scale).max())
    )  # of sums that nearly cancel, in another order with another BLAS
    assert ours == pytest.approx(right, abs=rounding)
    assert rounding < 1e-5 * right


def test_coarse_weights_are_checked_too():
    with pytest.raises(ConfigError, match="coarse is not of order 4"):
        dataclasses.replace(DOP853, coarse_order=4)
    with pytest.raises(ConfigError, match="coarse weights go with embedded ones"):
        dataclasses.replace(DOP853, embedded=None)
    with pytest.raises(ConfigError, match="coarse has 1 weights for 13 stages"):
        dataclasses.replace(DOP853, coarse=(1.0,))


def test_the_pair_of_order_8_has_it():
    # a rotation by 10
    right = torch.tensor([np.cos(10), -np.sin(10)])

    def missed(steps):
        segment = Segment(0, 10, lambda t, x: torch.stack([x[1], -x[0]]))
        return float(
            (
                solve(
                    [segment], torch.eye(2)[0].double(), method=RungeKutta(DOP853), steps=steps
                ).x1
                - right
            ).norm()
        )

    assert np.log2(missed(10) / missed(20)) == pytest.approx(8, abs=0.15)
