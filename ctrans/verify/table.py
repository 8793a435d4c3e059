"""Every statement of theory, in the order of its sections."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ctrans.verify import (
    costates,
    dynamics,
    geometry,
    growth,
    hamiltonian,
    initial,
    kinetic,
    last_map,
    lipschitz,
    projection,
    sensitivity,
    theta,
    uncertainty,
    value_function,
)
from ctrans.verify.statement import Result, Statement, verify
from solvers.errors import unknown

SECTIONS: dict[int, str] = {
    1: "dynamics",
    2: "limits",
    3: "norm geometry",
    4: "Hamiltonian",
    5: "costate",
    6: "forward bounds",
    7: "backward sensitivity",
    8: "uncertainty",
    9: "attention sensitivity",
    10: "initialisation",
}

MODULES = (
    dynamics,
    geometry,
    projection,
    hamiltonian,
    kinetic,
    last_map,
    value_function,
    costates,
    growth,
    sensitivity,
    uncertainty,
    theta,
    lipschitz,
    initial,
)

STATEMENTS: dict[str, Statement] = {statement.name: statement for module in MODULES for statement in module.STATEMENTS}


def select(only: Sequence[str] = ()) -> list[Statement]:
    """The statements of those names or section numbers, in the table's order; all of them for none.

    Raises ConfigError for what is neither.
    """
    for word in only:
        if word not in STATEMENTS and not (word.isdecimal() and int(word) in SECTIONS):
            raise unknown("statement or section", word, [*STATEMENTS, *map(str, SECTIONS)])
    return [s for s in STATEMENTS.values() if not only or s.name in only or str(s.section) in only]


def verify_all(statements: Sequence[Statement], cases: int = 200, seed: int = 0) -> Iterator[Result]:
    """The results of the statements, one after the other. Raises ConfigError for a number of cases below 1."""
    return (verify(statement, cases, seed) for statement in statements)
