"""How models are drawn and written: a model by its placement's entry in `PLACEMENTS`, anything else
by colours of its own.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable

from ctrans.dynamics.placement import PLACEMENTS

MIXED_COLOUR = "0.4"
"""Grey, for a model whose sublayers differ in their placement."""
MIXED_MARKER = "*"
"""The mark of such a model: a star."""
COLOURS = ("#4477aa", "#ee6677", "#228833", "#b8a400", "#66ccee", "#aa3377", "#777777")
MARKERS = "osD^vPX"
"""For lines that are no models, such as places: colours that all eyes tell apart (after Paul Tol's
"bright"), and marks.
"""


@dataclasses.dataclass(frozen=True)
class Look:
    """Colour and mark. Dashes distinguish models of one look; `repeat` counts them."""

    colour: str
    marker: str
    repeat: int


def looks_of(models: Iterable[tuple[str, str | None]]) -> dict[str, Look]:
    """Each model's look, by its name, from pairs of name and placement; a name keeps its first
    look.
    """
    looks: dict[str, Look] = {}
    used: Counter[str] = Counter()
    unplaced = 0
    for name, placement in models:
        if name in looks:
            continue
        if placement is None:
            looks[name] = Look(
                COLOURS[unplaced % len(COLOURS)],
                MARKERS[unplaced % len(MARKERS)],
                unplaced // len(COLOURS),
            )
            unplaced += 1
        else:
            looks[name] = Look(colour(placement), marker(placement), used[placement])
            used[placement] += 1
    return looks


def colour(placement: str) -> str:
    """The placement's colour, grey for several."""
    if placement in PLACEMENTS:
        return PLACEMENTS[placement].colour
    return MIXED_COLOUR


def marker(placement: str) -> str:
    """The placement's marker, a star for several."""
    if placement in PLACEMENTS:
        return PLACEMENTS[placement].marker
    return MIXED_MARKER
