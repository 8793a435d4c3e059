"""What softmax attention can have beside queries, keys and values: positions, groups, a window, a cap, sinks, a gate."""

from __future__ import annotations

import dataclasses
import math

from ctrans.fields.positions import POSITIONS, Positions, turned_entries
from solvers import ConfigError
from solvers.errors import look_up

ROTARY_BASE = 10000.0
"""RoFormer's, and the usual one."""
SOFTCAPS = (1e-12, 1e30)
"""Beyond these scores over c, or c times a tanh, are no numbers of single precision."""


@dataclasses.dataclass(frozen=True)
class AttentionOptions:
    """Checked when it is made: ConfigError names the value and the fix.

    - `positions`: a name of `POSITIONS`; `rotary_base`, `rotary_fraction`: of rotary ones, the base of their angles, and the part
      of each head that is turned
    - `kv_heads`: how many heads of keys and values the query heads share, which divides theirs; None is one for each (1: Shazeer
      2019, multi-query; between: Ainslie et al. 2023, grouped queries)
    - `window`: token i reads the tokens j with i - j < window, and not causally abs(i - j) < window (Longformer, Mistral)
    - `softcap`: c, scores s become c tanh(s/c) before masks and what ALiBi adds (Gemma 2)
    - `sinks`: a learned logit of each head stands in the denominator of its rows (GPT-OSS)
    - `gated_output`: the heads' averages are multiplied by sigmoid(W_G x + b_G), entry by entry (Qiu et al. 2025)
    """

    positions: str = "learned"
    rotary_base: float = ROTARY_BASE
    rotary_fraction: float = 1.0
    kv_heads: int | None = None
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    gated_output: bool = False

    def __post_init__(self) -> None:
        look_up("positions", self.positions, POSITIONS)
        for name in ("kv_heads", "window"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise ConfigError(f"{name} = {value!r}: give a whole number of at least 1, or leave it out")
        for name in ("sinks", "gated_output"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name} = {getattr(self, name)!r}: give True or False")
        lowest, highest = SOFTCAPS
        if self.softcap is not None and not (_positive(self.softcap) and lowest <= self.softcap <= highest):
            raise ConfigError(f"softcap = {self.softcap!r}: give a number from {lowest:g} to {highest:g}, or leave it out")
        if not _positive(self.rotary_base) or self.rotary_base < 1:
            raise ConfigError(
                f"rotary_base = {self.rotary_base!r}: give a finite number of at least 1; {ROTARY_BASE:g} is the usual one"
            )
        if not _positive(self.rotary_fraction) or self.rotary_fraction > 1:
            raise ConfigError(
                f"rotary_fraction = {self.rotary_fraction!r}: give the part of a head that is turned, above 0 and up to 1"
            )
        for name, idle in (("rotary_base", ROTARY_BASE), ("rotary_fraction", 1.0)):
            if not self.places.turned and getattr(self, name) != idle:
                raise ConfigError(
                    f"{name} = {getattr(self, name)!r} has no meaning for positions {self.positions!r}: leave it out, or choose rotary"
                )

    def check_heads(self, width: int, heads: int) -> None:
        """Raises ConfigError unless heads of that width can be shared, and turned, like this."""
        if heads < 1 or width % heads:
            raise ConfigError(f"width {width} is not divisible by heads {heads}: choose heads that divide the width")
        if heads % (self.kv_heads or heads):
            raise ConfigError(f"kv_heads = {self.kv_heads} does not divide the {heads} heads: choose one that does")
        if self.places.turned and not turned_entries(width // heads, self.rotary_fraction):
            raise ConfigError(
                f"rotary positions turn pairs of entries, and {self.rotary_fraction:g} of a head of width {width // heads} is none: "
                "choose wider heads, or a larger rotary_fraction"
            )

    @property
    def idle(self) -> bool:
        """Whether the map is softmax attention as it always was: its options are as they are where nothing is said."""
        return self in (AttentionOptions(), AttentionOptions(positions="none"))

    @property
    def places(self) -> Positions:
        """What the positions are."""
        return POSITIONS[self.positions]


def _positive(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < math.inf
