"""The colours of maps, of pages and pictures alike.

A healthy figure looks healthy: a map with a limit shows blues within it and orange to red beyond
it, and no map is so narrow that a change of a few percent fills its colours.
"""

from __future__ import annotations

from collections.abc import Sequence

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
"""Colours of a map."""


def span(low: float, high: float, *, log: bool) -> tuple[float, float]:
    """The range from `low` to `high`, widened to half of its largest figure. Of logarithms to base
    10 it is widened to 1, a decade.
    """
    least = 1.0 if log else max(abs(low), abs(high)) / 2 or 1.0
    missing = max(0.0, least - (high - low))
    return low - missing / 2, high + missing / 2


def colour_map(low: float, high: float, limits: Sequence[float | None]) -> Colormap:
    """The colours of the figures from `low` to `high`. Below the first limit and above the second
    they are those of what is outside.
    """
    lowest, highest = limits
    has_limit = lowest is not None or highest is not None
    inside = _ramp("within" if has_limit else "plain")
    beyond = _ramp("beyond")
    colours = []
    for share in np.linspace(0, 1, LEVELS):
        figure = low + share * (high - low)
        if highest is not None and figure > highest:
            colours.append(beyond(share))
        elif lowest is not None and figure < lowest:
            colours.append(beyond(1 - share))
        else:
            colours.append(inside(share))
    return ListedColormap(colours)


def _ramp(name: str) -> Colormap:
    return LinearSegmentedColormap.from_list(name, RAMPS[name])
