"""All statements of theory, in the order of the sections."""

from __future__ import annotations

import difflib
import functools
import importlib
from collections.abc import Iterator, Sequence

from ctrans.theory.run import Result, verify
from ctrans.theory.statement import STATEMENTS, Statement
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
    11: "reach of training",
}

MODULES = (
    "dynamics",
    "geometry",
    "conservation",
    "norm_tables",
    "hamiltonians",
    "trained_weights",
    "weight_decay",
    "architectures",
    "norm_images",
    "values",
    "costates",
    "residual_gains",
    "expert",
    "growth",
    "sensitivity",
    "adjoint",
    "transport",
    "theta",
    "lipschitz",
    "path",
    "initial",
    "reach",
)
"""The modules that register statements, in the order of each section."""


@functools.cache
def all_statements() -> dict[str, Statement]:
    """Every statement by name, in the order of sections, then of `MODULES`, then of definition. A
    plugin's come last in a section.
    """
    places = {
        importlib.import_module(f"ctrans.theory.{module}").__name__: place
        for place, module in enumerate(MODULES)
    }
    ordered = sorted(
        STATEMENTS.values(), key=lambda each: (each.section, places.get(each.module, len(places)))
    )
    return {each.name: each for each in ordered}


def select(only: Sequence[str] = ()) -> list[Statement]:
    """The statements that the words select, in the table's order; all of them for no words.

    A word is a section's number, a name, or the beginning of names: "theorem-4" (or "theorem 4")
    selects every "theorem-4-...". Raises ConfigError for a word that selects nothing.
    """
    wanted = {name for word in only for name in _selected(word)}
    return [each for each in all_statements().values() if not only or each.name in wanted]


def _selected(word: str) -> list[str]:
    name = word.strip().lower().replace(" ", "-")
    table = all_statements()
    if name in table:
        return [name]
    found = [
        each.name
        for each in table.values()
        if name == str(each.section) or each.name.startswith(f"{name}-")
    ]
    if not found:
        near = difflib.get_close_matches(name, table, n=5, cutoff=0.3)
        raise ConfigError(
            f"no statement or section is called {word!r}: give a section, {min(SECTIONS)} to"
            f" {max(SECTIONS)}, or a name such as {', '.join(near or list(table)[:3])}; THEORY.md"
            " lists all"
        )
    return found


def verify_all(
    statements: Sequence[Statement], cases: int = 200, seed: int = 0
) -> Iterator[Result]:
    """The results of the statements in turn. Raises ConfigError for a number of cases below 1."""
    return (verify(each, cases, seed) for each in statements)
