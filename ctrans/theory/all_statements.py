"""All statements of theory, in the order of the sections."""

from __future__ import annotations

import difflib
import functools
import importlib
from collections.abc import Iterator, Sequence

from ctrans.base.theory_sections import SECTIONS
from ctrans.theory.statement import STATEMENTS, Statement
from ctrans.theory.verify import Result, verify
from solvers import ConfigError

MODULES = (
    "section_01_dynamics",
    "section_02_limits",
    "section_03_norm_geometry",
    "section_03_conservation",
    "section_03_norm_table",
    "section_04_hamiltonians",
    "section_04_kinetic_cost",
    "section_04_trained_weights",
    "section_04_discrete_step",
    "section_04_weight_decay",
    "section_04_architectures",
    "section_04_norm_images",
    "section_04_values",
    "section_04_least_loss",
    "section_04_residual_gains",
    "section_05_costates",
    "section_05_maximum_principle",
    "section_05_controllability",
    "section_05_turnpike",
    "section_05_residual_gains",
    "section_06_experts",
    "section_06_growth",
    "section_06_maps",
    "section_06_residuals",
    "section_07_experts",
    "section_07_sensitivity",
    "section_07_adjoint",
    "section_08_transport",
    "section_09_experts",
    "section_09_softmax",
    "section_09_lipschitz",
    "section_09_gradient_paths",
    "section_10_xiong",
    "section_10_kim",
    "section_11_reach",
    "section_12_two_models",
)
"""The modules that register statements, in the order of each section."""


@functools.cache
def all_statements() -> dict[str, Statement]:
    """Every statement by name, in the order of sections, then of `MODULES`, then of definition. A
    plugin's come last in a section.
    """
    positions = {}
    for position, name in enumerate(MODULES):
        module = importlib.import_module(f"ctrans.theory.{name}")
        positions[module.__name__] = position

    def section_and_position(statement: Statement) -> tuple[int, int]:
        return statement.section, positions.get(statement.module, len(positions))

    ordered = sorted(STATEMENTS.values(), key=section_and_position)
    return {statement.name: statement for statement in ordered}


def select(only: Sequence[str] = ()) -> list[Statement]:
    """The statements that the words select, in the table's order; all of them for no words.

    A word is a section's number, a name, or the beginning of names: "theorem-4" (or "theorem 4")
    selects every "theorem-4-...". Raises ConfigError for a word that selects nothing.
    """
    statements = list(all_statements().values())
    if not only:
        return statements
    names = {name for word in only for name in _selected(word)}
    return [statement for statement in statements if statement.name in names]


def _selected(word: str) -> list[str]:
    name = word.strip().lower().replace(" ", "-")
    table = all_statements()
    if name in table:
        return [name]
    names = [
        statement.name
        for statement in table.values()
        if name == str(statement.section) or statement.name.startswith(f"{name}-")
    ]
    if not names:
        examples = difflib.get_close_matches(name, table, n=5, cutoff=0.3) or list(table)[:3]
        raise ConfigError(
            f"no statement or section is called {word!r}: give a section, {min(SECTIONS)} to"
            f" {max(SECTIONS)}, or a name such as {', '.join(examples)}; THEORY.md lists all"
        )
    return names


def verify_all(
    statements: Sequence[Statement], cases: int = 200, seed: int = 0
) -> Iterator[Result]:
    """The results of the statements in turn. Raises ConfigError for a number of cases below 1."""
    return (verify(statement, cases, seed) for statement in statements)
