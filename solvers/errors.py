"""The two errors a user can meet: a wrong request, and a computation that failed."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import TypeVar


class ConfigError(ValueError):
    """A request that cannot be carried out: its message names the value, the allowed ones and the
    fix.
    """


class SolveError(RuntimeError):
    """A computation that started and failed: its message says where, why and what to try.

    `solution` holds what was computed before the failure (a `Solution`), or None.
    """

    def __init__(self, message: str, solution: object = None):
        super().__init__(message)
        self.solution = solution


Entry = TypeVar("Entry")


def look_up(what: str, name: object, table: Mapping[str, Entry]) -> Entry:
    """The table's entry of that name; ConfigError with the nearest name where there is none."""
    if not isinstance(name, str) or name not in table:
        raise unknown(what, name, table)
    return table[name]


def unknown(what: str, value: object, allowed: Iterable[str]) -> ConfigError:
    """The error for a name that is in no table: the nearest allowed name first, then all of them."""
    names = sorted(allowed)
    near = difflib.get_close_matches(str(value).lower(), names, n=1, cutoff=0.4)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return ConfigError(f"unknown {what} {value!r}: {hint}choose one of {', '.join(_listed(names))}")


MANY = 12
"""More names than that are shown by family where they have one."""


def _listed(names: list[str]) -> list[str]:
    """The names; of many, those of a family as one: "torchdiffeq:NAME (14, as torchdiffeq:rk4)"."""
    families: dict[str, list[str]] = {}
    for name in names:
        families.setdefault(name.partition(":")[0] if len(names) > MANY and ":" in name else name, []).append(name)
    return [own[0] if len(own) == 1 else f"{family}:NAME ({len(own)}, as {own[-1]})" for family, own in families.items()]
