"""Evidence of a certificate whose costate was scaled by a power of two, at its own size again."""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from typing import Any

from ctrans.control.scales import times_powers

VALUES = frozenset(
    {
        "hamiltonian",
        "scale",
        "best",
        "values",
        "base",
        "limit",
        "ceiling",
        "gain",
        "offset",
        "lower",
        "upper",
    }
)
"""The fields of evidence that are proportional to the costate."""


def scaled_evidence(evidence: Any, exponent: int) -> Any:
    """The evidence with each value of H * 2^exponent."""
    scaled: dict[str, Any] = {}
    for field in fields(evidence):
        value = getattr(evidence, field.name)
        if is_dataclass(value):
            scaled[field.name] = scaled_evidence(value, exponent)
        elif field.name not in VALUES or value is None:
            continue
        elif isinstance(value, tuple):
            scaled[field.name] = times_powers(value, exponent)
        else:
            (scaled[field.name],) = times_powers([value], exponent)
    return replace(evidence, **scaled)
