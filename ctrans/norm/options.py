"""Options of some norms, besides width and eps."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from ctrans.option import COUNT, Range, option
from solvers import ConfigError

SIZES = Range(1e-12, 1e12, "a number from 1e-12 to 1e+12")
"""Outside these limits alpha x, or a token of that size, overflows or underflows in single
precision.
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class NormOptions:
    """Options of some norms. None takes the norm's own default."""

    option_group: ClassVar[str] = "Norms"

    norm_groups: int | None = option(
        None,
        "Groups of channels. group_rmsnorm normalises each by itself.",
        limits=COUNT,
        default_words="--heads",
    )
    norm_alpha: float | None = option(None, "alpha of dyt and derf at the start.", limits=SIZES, default_words="0.5")
    norm_radius: float | None = option(
        None,
        "Largest RMS of a token (clip_length) or entry (clip_entries) after clipping.",
        limits=SIZES,
        default_words="1",
    )


OPTIONS = tuple(field.name for field in dataclasses.fields(NormOptions))


def options_taken(name: str, norms: Mapping[str, Callable[..., Any]], settings: Any, heads: int | None = None) -> dict[str, Any]:
    """The options for the norm with that name, from `settings` with the fields of `NormOptions`.
    The default of its groups is the number of heads.

    Raises ConfigError for an option that the norm does not take, and names the norms that do.
    """
    takes: frozenset[str] = getattr(norms[name], "options", frozenset())
    said = {own: value for own in OPTIONS if (value := getattr(settings, own)) is not None}
    for own, value in said.items():
        if own not in takes:
            others = ", ".join(other for other, kind in norms.items() if own in getattr(kind, "options", ()))
            raise ConfigError(f"{own} = {value!r} has no meaning for norm {name!r}: leave it out, or choose {others}")
    return {"norm_groups": heads, **said} if "norm_groups" in takes and heads is not None else said


def check_groups(groups: int, width: int) -> int:
    """The number of groups. Raises ConfigError unless it is a positive integer that divides the
    width.
    """
    if isinstance(groups, bool) or not isinstance(groups, int) or groups < 1 or width % groups:
        raise ConfigError(f"norm_groups = {groups!r}: give a whole number that divides the width {width}")
    return groups


def check_size(name: str, value: float) -> float:
    """The value. Raises ConfigError unless it is a number within `SIZES`."""
    SIZES.check(name, value, hint=", or leave it out")
    return float(value)


CHECKS: dict[str, Callable[[Any, int], Any]] = {
    "norm_groups": check_groups,
    "norm_alpha": lambda value, width: check_size("norm_alpha", value),
    "norm_radius": lambda value, width: check_size("norm_radius", value),
}
"""For each option: checks the value for a norm of that width, and returns it."""
