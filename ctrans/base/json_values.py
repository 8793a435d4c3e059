"""Values in JSON's own types."""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Mapping
from typing import Any

LAST_STEP = 2**53
"""The limit of steps: a float64 counts no further."""


def plain(value: Any) -> Any:
    """The value in JSON's own types. Dataclasses become objects, enums their names, and numbers
    that JSON lacks the texts "inf", "-inf", "nan".
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value)]
        return {name: plain(getattr(value, name)) for name in names}
    if isinstance(value, enum.Enum):
        return value.name.lower()
    if isinstance(value, Mapping):
        return {str(key): plain(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(entry) for entry in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def is_step(value: Any) -> bool:
    """Whether it is an int from 0 to `LAST_STEP`, and not a bool."""
    return type(value) is int and 0 <= value < LAST_STEP


def is_number(value: Any) -> bool:
    """Whether it is a number that a float can hold, as `plain` writes it."""
    if type(value) is int:
        return abs(value) < 1e300
    return type(value) is float or value in ("nan", "inf", "-inf")
