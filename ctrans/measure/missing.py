"""What was not measured, and why: `missing` of every result, by measure or part of the model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from solvers import ConfigError, SolveError

Found = TypeVar("Found")
NOT_APPLICABLE = "n/a"
"""What a table of verdicts shows where there is a reason and no verdict."""


def tried(
    missing: dict[str, str],
    name: str,
    function: Callable[..., Found],
    /,
    *arguments: Any,
    **named: Any,
) -> Found | None:
    """The function's value. If it raises ConfigError or SolveError, the result is None and
    `missing[name]` has the message. If there is a reason already, nothing runs.

    >>> missing = {}
    >>> bounds = tried(missing, "bound", forward_bounds, depth, states)
    """
    if name in missing:
        return None
    try:
        return function(*arguments, **named)
    except (ConfigError, SolveError) as error:
        missing[name] = str(error)
        return None
