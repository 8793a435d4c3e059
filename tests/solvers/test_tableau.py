import dataclasses

import pytest

from solvers import METHODS, ConfigError, RungeKutta, Tableau, tableau
from solvers.tableau import DOPRI5, EULER, RK4, TSIT5, density, trees

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
