"""Every statement of theory, in the order of its sections."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence

from ctrans.verify import (
    adjoint,
    costates,
    critical,
    dynamics,
    experts,
    geometry,
    growth,
    hamiltonian,
    initial,
    kinetic,
    last_map,
    lipschitz,
    norms,
    projection,
    residuals,
    sensitivity,
    theta,
    trained,
    uncertainty,
    value_function,
    variants,
)
from ctrans.verify.statement import Result, Statement, verify
from solvers import ConfigError

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
    trained,
    variants,
    experts,
    norms,
    value_function,
    costates,
    critical,
    growth,
    sensitivity,
    adjoint,
    uncertainty,
    theta,
    lipschitz,
    initial,
    residuals,
)

STATEMENTS: dict[str, Statement] = {
    statement.name: statement
    for statement in sorted((each for module in MODULES for each in module.STATEMENTS), key=lambda each: each.section)
}


def select(only: Sequence[str] = ()) -> list[Statement]:
    """The statements that the words ask for, in the table's order; all of them for none.

    A word is a section's number, a name, or how names begin: "theorem-4" (or "theorem 4") asks for every "theorem-4-...". Raises
    ConfigError for one that asks for nothing.
    """
    wanted = {statement.name for word in only for statement in _asked(word)}
    return [s for s in STATEMENTS.values() if not only or s.name in wanted]


def _asked(word: str) -> list[Statement]:
    name = word.strip().lower().replace(" ", "-")
    if name in STATEMENTS:
        return [STATEMENTS[name]]
    found = [s for s in STATEMENTS.values() if name == str(s.section) or s.name.startswith(f"{name}-")]
    if not found:
        near = difflib.get_close_matches(name, STATEMENTS, n=5, cutoff=0.3)
        raise ConfigError(
            f"no statement or section is called {word!r}: give a section, {min(SECTIONS)} to {max(SECTIONS)}, or a name such as "
            f"{', '.join(near or list(STATEMENTS)[:3])}; THEORY.md lists all"
        )
    return found


def verify_all(statements: Sequence[Statement], cases: int = 200, seed: int = 0) -> Iterator[Result]:
    """The results of the statements, one after the other. Raises ConfigError for a number of cases below 1."""
    return (verify(statement, cases, seed) for statement in statements)
