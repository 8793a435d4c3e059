"""Tokens as coloured text: red where a figure is positive, blue where it is negative, on a terminal
and on a page alike.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

RED, BLUE, WHITE = (214, 69, 65), (67, 113, 203), (255, 255, 255)
SHOWN = {"\n": "⏎", "\t": "⇥", "\r": "␍"}
"""Visible marks for characters that move the cursor."""


def colours(values: Sequence[float]) -> list[str]:
    """#rrggbb of each value: white at 0, full at the largest size of a finite one; -inf is grey."""
    largest = max((abs(v) for v in values if math.isfinite(v)), default=0.0) or 1.0
    return [_mixed(v / largest) if math.isfinite(v) else "#bbbbbb" for v in values]


def _mixed(share: float) -> str:
    if share > 0:
        end = RED
    else:
        end = BLUE
    parts = (round(w + abs(share) * (e - w)) for w, e in zip(WHITE, end, strict=True))
    return "#" + "".join(f"{part:02x}" for part in parts)


def visible(word: str) -> str:
    """The token's text in one line: control characters as marks, or as their numbers."""
    made = "".join(SHOWN.get(c, c if c.isprintable() else f"\\x{ord(c):02x}") for c in word)
    return made or "∅"
