"""The colours of maps, of pages and pictures alike.

A healthy figure looks healthy: a map with a limit shows blues within it and orange to red beyond
it, and no map is so narrow that a change of a few percent fills its colours.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache

import numpy as np
from matplotlib.colors import Colormap, LinearSegmentedColormap, ListedColormap

RAMPS = {
    "plain": ["#00224e", "#35456c", "#666970", "#948e77", "#c8b866", "#fee838"],
    "within": ["#0b3c6f", "#2f6fae", "#6ba3d3", "#b3d0ea"],
    "beyond": ["#fdae6b", "#e6550d", "#8f1402"],
}
"""Colours from the least to the largest figure: without limits (matplotlib's "cividis"), within the
limits, and beyond them.
"""
LEVELS = 256
"""Colours of a colour bar."""


def span(low: float, high: float, *, log: bool) -> tuple[float, float]:
    """The range from `low` to `high`, widened to half of its largest figure. Of logarithms to base
    10 it is widened to 1, a decade.
    """
    least = 1.0 if log else max(abs(low), abs(high)) / 2 or 1.0
    missing = max(0.0, least - (high - low))
    return low - missing / 2, high + missing / 2


def colour_of(
    figure: float, low: float, high: float, limits: Sequence[float | None]
) -> Sequence[float]:
    """Red, green, blue and opacity of a figure in a map from `low` to `high`. Below the first limit
    and above the second it is that of what is outside; nan has none.
    """
    if math.isnan(figure):
        return (0.0, 0.0, 0.0, 0.0)
    lowest, highest = limits
    share = (figure - low) / (high - low)
    if highest is not None and figure > highest:
        return _ramp("beyond")(share)
    if lowest is not None and figure < lowest:
        return _ramp("beyond")(1 - share)
    if lowest is None and highest is None:
        return _ramp("plain")(share)
    return _ramp("within")(share)


def colour_map(low: float, high: float, limits: Sequence[float | None]) -> Colormap:
    """The colours from `low` to `high`, for a colour bar."""
    figures = np.linspace(low, high, LEVELS)
    return ListedColormap([colour_of(figure, low, high, limits) for figure in figures])


@cache
def _ramp(name: str) -> Colormap:
    return LinearSegmentedColormap.from_list(name, RAMPS[name])
