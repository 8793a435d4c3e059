"""The two errors of the package: an invalid request, and a computation that failed."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Mapping
from numbers import Real
from typing import TypeVar


class ConfigError(ValueError):
    """An invalid request. The message names the value, the allowed values and the fix."""


class SolveError(RuntimeError):
    """A computation that started and failed. The message says where, why and what to try.

    `solution` holds the results before the failure (a `Solution`), or None.
    """

    def __init__(self, message: str, solution: object = None):
        super().__init__(message)
        self.solution = solution


def check_positive(name: str, value: object, what: str = "a positive finite number") -> None:
    """Raises ConfigError unless the value is a positive finite number; `what` says what to give."""
    if isinstance(value, bool) or not isinstance(value, Real) or not 0 < float(value) < math.inf:
        raise ConfigError(f"{name} = {value!r}: give {what}")


Entry = TypeVar("Entry")


def look_up(what: str, name: object, table: Mapping[str, Entry]) -> Entry:
    """The table's entry of that name. Raises ConfigError with the nearest name if there is none."""
    if not isinstance(name, str) or name not in table:
        raise unknown(what, name, table)
    return table[name]


def unknown(what: str, value: object, allowed: Iterable[str]) -> ConfigError:
    """The error for a name that is in no table: the nearest allowed name first, then all names."""
    names = sorted(allowed)
    near = difflib.get_close_matches(str(value).lower(), names, n=1, cutoff=0.4)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return ConfigError(f"unknown {what} {value!r}: {hint}choose one of {', '.join(_listed(names))}")


MANY = 12
"""Longer lists of names show one entry for each family ("torchdiffeq:NAME")."""


def _listed(names: list[str]) -> list[str]:
    """The names. In a long list, a family is one entry: "torchdiffeq:NAME (14, as
    torchdiffeq:rk4)".
    """
    families: dict[str, list[str]] = {}
    for name in names:
        families.setdefault(name.partition(":")[0] if len(names) > MANY and ":" in name else name, []).append(name)
    return [own[0] if len(own) == 1 else f"{family}:NAME ({len(own)}, as {own[-1]})" for family, own in families.items()]
