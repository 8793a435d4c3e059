"""How a placement is drawn and written, wherever one is shown: all of it from its entry in `PLACEMENTS`."""

from __future__ import annotations

from ctrans.placement import PLACEMENTS

MIXED_COLOUR, MIXED_MARKER = "0.4", "*"
"""Grey and a star, for a model whose sublayers differ in their placement."""


def colour(placement: str) -> str:
    """The placement's colour, grey for several."""
    return PLACEMENTS[placement].colour if placement in PLACEMENTS else MIXED_COLOUR


def marker(placement: str) -> str:
    """The placement's marker, a star for several."""
    return PLACEMENTS[placement].marker if placement in PLACEMENTS else MIXED_MARKER


def equation(placement: str) -> str:
    """The placement's step and velocity by equation."""
    known = PLACEMENTS.get(placement)
    return "sublayers differ in their placement" if known is None else f"{known.step}, v = {known.velocity}"
