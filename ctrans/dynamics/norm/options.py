"""Options of some norms, besides width and eps."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from ctrans.base.option import COUNT, Range, option

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
    norm_alpha: float | None = option(
        None, "alpha of dyt and derf at the start.", limits=SIZES, default_words="0.5"
    )
    norm_radius: float | None = option(
        None,
        "Largest RMS of a token (clip_length) or entry (clip_entries) after clipping.",
        limits=SIZES,
        default_words="1",
    )


def check_size(name: str, value: float) -> float:
    """The value. Raises ConfigError unless it is a number within `SIZES`."""
    SIZES.check(name, value, hint=", or leave it out")
    return float(value)
