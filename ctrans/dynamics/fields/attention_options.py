"""Options of softmax attention: positions, groups, a window, a cap, sinks, a gate."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from ctrans.base.option import COUNT, LARGEST, SMALLEST, Range, check_options, option
from ctrans.dynamics.fields.positions import POSITIONS, Positions, turned_entries
from solvers import ConfigError

ROTARY_BASE = 10000.0
"""RoFormer's value, the usual one."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionOptions:
    """Options of softmax attention. ConfigError names a wrong value and the fix.

    - `window`: token i reads the tokens j with i - j < window; without causality, abs(i - j) <
      window (Longformer, Mistral)
    - `kv_heads`: 1 is multi-query attention (Shazeer 2019), more are grouped queries (Ainslie et
      al. 2023)
    - `softcap`: acts before masks and ALiBi's addition (Gemma 2)
    - `sinks`: those of GPT-OSS
    - `gated_output`: that of Qiu et al. 2025
    """

    option_group: ClassVar[str] = "Attention"

    positions: str = option("learned", "How positions enter.", choices=POSITIONS)
    rotary_base: float = option(
        ROTARY_BASE,
        "Base of the angles of rotary positions.",
        limits=Range(
            1, LARGEST, f"a finite number of at least 1; {ROTARY_BASE:g} is the usual one"
        ),
    )
    rotary_fraction: float = option(
        1.0,
        "The part of each head that rotary positions turn.",
        limits=Range(SMALLEST, 1, "the part of a head that is turned, above 0 and up to 1"),
    )
    kv_heads: int | None = option(
        None,
        "Heads of keys and values. Query heads share them.",
        limits=COUNT,
        default_words="--heads",
    )
    window: int | None = option(
        None,
        "How many tokens a token reads: itself and those before it.",
        limits=COUNT,
        default_words="all",
    )
    softcap: float | None = option(
        None,
        "Soft cap c: a score s becomes c tanh(s/c).",
        limits=Range(1e-12, 1e30, "a number from 1e-12 to 1e+30"),
        default_words="none",
    )
    """Outside these limits scores over c, or c times a tanh, overflow or underflow in single
    precision.
    """
    sinks: bool = option(
        default=False, help="Add a learned logit of each head to the denominator of its rows."
    )
    gated_output: bool = option(
        default=False,
        help="Multiply the heads' averages by sigmoid(W_G x + b_G), entry by entry.",
    )

    def __post_init__(self) -> None:
        check_options(self)
        for name, idle in (("rotary_base", ROTARY_BASE), ("rotary_fraction", 1.0)):
            if not self.places.turned and getattr(self, name) != idle:
                raise ConfigError(
                    f"{name} = {getattr(self, name)!r} has no meaning for positions"
                    f" {self.positions!r}: leave it out, or choose rotary"
                )

    def check_heads(self, width: int, heads: int) -> None:
        """Raises ConfigError unless the heads divide the width, can be shared, and can be
        rotated.
        """
        if heads < 1 or width % heads:
            raise ConfigError(
                f"width {width} is not divisible by heads {heads}: choose heads that divide the"
                " width"
            )
        if heads % (self.kv_heads or heads):
            raise ConfigError(
                f"kv_heads = {self.kv_heads} does not divide the {heads} heads: choose one that"
                " does"
            )
        if self.places.turned and not turned_entries(width // heads, self.rotary_fraction):
            raise ConfigError(
                f"rotary positions turn pairs of entries, and {self.rotary_fraction:g} of a head of"
                f" width {width // heads} is none: choose wider heads, or a larger rotary_fraction"
            )

    @property
    def idle(self) -> bool:
        """Whether all options have their defaults, so that the map is plain softmax attention."""
        return self in (AttentionOptions(), AttentionOptions(positions="none"))

    @property
    def places(self) -> Positions:
        """The entry of `POSITIONS`."""
        return POSITIONS[self.positions]
