"""Tokens as coloured text: red where a figure is positive, blue where it is negative, on a terminal
and on a page alike.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

RED = (214, 69, 65)
BLUE = (67, 113, 203)
WHITE = (255, 255, 255)
GREY = "#bbbbbb"
SHOWN = {"\n": "⏎", "\t": "⇥", "\r": "␍"}
"""Visible marks for characters that move the cursor."""


def colours(values: Sequence[float]) -> list[str]:
    """#rrggbb of each value: white at 0, full at the largest size of a finite one; -inf is grey."""
    largest = max((abs(v) for v in values if math.isfinite(v)), default=0.0) or 1.0
    return [_mixed(v / largest) if math.isfinite(v) else GREY for v in values]


def _mixed(share: float) -> str:
    if share > 0:
        end = RED
    else:
        end = BLUE
    parts = (round(w + abs(share) * (e - w)) for w, e in zip(WHITE, end, strict=True))
    return "#" + "".join(f"{part:02x}" for part in parts)


def visible(word: str) -> str:
    """The token's text in one line: control characters as marks, or as their numbers."""
    return "".join(_visible_character(character) for character in word) or "∅"


def _visible_character(character: str) -> str:
    if character in SHOWN:
        return SHOWN[character]
    if character.isprintable():
        return character
    return f"\\x{ord(character):02x}"
