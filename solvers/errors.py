"""The two errors of the package: an invalid request, and a computation that failed."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Mapping
from numbers import Real
from pathlib import PurePath
from typing import Any, TypeVar

import torch
from torch import Tensor


class ConfigError(ValueError):
    """An invalid request. The message names the value, the allowed values and the fix."""


class SolveError(RuntimeError):
    """A computation that started and failed. The message says where, why and what to try.

    `solution` holds the results before the failure (a `Solution`), or None.
    """

    def __init__(self, message: str, solution: object = None):
        super().__init__(message)
        self.solution = solution


SHOWN = 100
"""The most characters of a value in a message."""


def is_class(name: str, value: type) -> ConfigError:
    """The error for a class in place of one of its instances."""
    kind = getattr(value, "__name__", None) or shown(value)
    return ConfigError(f"{name} is the class {kind}: give an instance, such as {kind}(...)")


def shown(value: object) -> str:
    """The value for a message: numbers and texts as Python writes them, but shortened, and the kind
    of anything else. Lists in lists are shown to a depth of 3, as a list may contain itself.
    """
    return _shown(value, 3)


def _shown(value: object, depth: int) -> str:
    if isinstance(value, Tensor):
        return _shown_tensor(value)
    if isinstance(value, int) and value.bit_length() > 128:
        return f"a number of {int(value.bit_length() * math.log10(2)) + 1} digits"
    if isinstance(value, (Real, str, bytes, PurePath)) or value is None:
        text = repr(value)
        if len(text) <= SHOWN:
            return text
        return text[:SHOWN] + "..."
    if isinstance(value, (list, tuple)):
        if depth == 0:
            return "[...]"
        entries = [_shown(entry, depth - 1) for entry in value[:3]]
        if len(value) > 3:
            entries.append("...")
        return f"[{', '.join(entries)}]"
    if type(value).__name__ == "ndarray":
        array: Any = value
        return f"an array of shape {array.shape} and {array.dtype}"
    return with_article(type(value).__name__)


def _shown_tensor(x: Tensor) -> str:
    shape = "?"
    if not x.is_nested:
        shape = str(tuple(x.shape))
    text = f"a tensor of shape {shape} and {x.dtype}"
    if x.is_meta:
        text += " on meta"
    if x.layout is not torch.strided or x.is_nested:
        text += " that is not dense"
    return text


def with_article(kind: str) -> str:
    """The name of a type with "a" or "an"."""
    if kind[:1] in "AEIOUaeiou":
        return f"an {kind}"
    return f"a {kind}"


def check_positive(name: str, value: object, what: str = "a positive finite number") -> None:
    """Raises ConfigError unless the value is a positive finite number; `what` says what to give."""
    number = 0.0
    if isinstance(value, Real) and not isinstance(value, bool):
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
    if not 0 < number < math.inf:
        raise ConfigError(f"{name} = {shown(value)}: give {what}")


Entry = TypeVar("Entry")


def look_up(what: str, name: object, table: Mapping[str, Entry]) -> Entry:
    """The table's entry of that name. Raises ConfigError with the nearest name if there is none."""
    if not isinstance(name, str) or name not in table:
        raise unknown(what, name, table)
    return table[name]


def unknown(what: str, value: object, allowed: Iterable[str]) -> ConfigError:
    """The error for a name that is in no table: the nearest allowed name first, then all names."""
    names = sorted(allowed)
    hint = ""
    if isinstance(value, str):
        nearest = difflib.get_close_matches(value.lower(), names, n=1, cutoff=0.4)
        if nearest:
            hint = f"did you mean {nearest[0]!r}? "
    return ConfigError(
        f"unknown {what} {shown(value)}: {hint}choose one of {', '.join(_listed(names))}"
    )


MANY = 12
"""Longer lists of names show one entry for each family ("torchdiffeq:NAME")."""


def _listed(names: list[str]) -> list[str]:
    """The names. In a long list, a family is one entry: "torchdiffeq:NAME (14, as
    torchdiffeq:rk4)".
    """
    if len(names) <= MANY:
        return names
    families: dict[str, list[str]] = {}
    for name in names:
        family, _, _ = name.partition(":")
        families.setdefault(family, []).append(name)
    entries = []
    for family, members in families.items():
        if len(members) == 1:
            entries.append(members[0])
        else:
            entries.append(f"{family}:NAME ({len(members)}, as {members[-1]})")
    return entries
