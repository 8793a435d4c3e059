"""What all pictures do with their axes."""

from __future__ import annotations

import math
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator


def show_at_least_a_decade(axes: Axes) -> None:
    """Widens a logarithmic axis that spans less, so that a change in the fifth digit does not look like a leap."""
    low, high = axes.get_ylim()
    if 0 < low < high < 10 * low:
        centre = math.sqrt(low * high)
        axes.set_ylim(centre / math.sqrt(10), centre * math.sqrt(10))


PLAIN = ("#004488", "#bb5566", "#ddaa33")
"""Colours of what is no placement's, which all eyes tell apart, also in grey (Paul Tol's "high contrast")."""
MOST_LINES = 7
"""So many lines of one panel can be told apart; more are rows of a heat map."""
DASH = 3.0
"""Length of a bound's dashes, in line widths."""
NEAR = 0.02
"""Bounds that nowhere differ by more than this share lie upon each other."""


def bound_style(i: int, count: int) -> tuple[float, tuple[float, float]]:
    """The dashes of the i-th of so many models' bounds, opaque: where bounds coincide, each one's lie in the gaps of the others.

    So the colours of two are seen in turn, and never mix to that of a third.
    """
    several = max(2, count)
    return (-DASH * (i % several)) % (DASH * several), (DASH, DASH * (several - 1))


def bound_styles(bounds: Sequence[Sequence[float] | None]) -> list[tuple[float, tuple[float, float]]]:
    """The dashes of each bound, None where a model has none: those that lie upon each other take turns, others need not wait."""
    alike: list[list[int]] = []
    for i, bound in enumerate(bounds):
        group = next((each for each in alike if _coincide(bounds[each[0]], bound)), None)
        if group is None:
            alike.append([i])
        else:
            group.append(i)
    styles = {i: bound_style(place, len(group)) for group in alike for place, i in enumerate(group)}
    return [styles[i] for i in range(len(bounds))]


def _coincide(one: Sequence[float] | None, other: Sequence[float] | None) -> bool:
    if one is None or other is None or len(one) != len(other):
        return False
    return all(math.isclose(a, b, rel_tol=NEAR) for a, b in zip(one, other, strict=True))


def mark_places(i: int, count: int) -> tuple[int, int]:
    """Where the i-th line of a panel has its marks: the first, and then every so many of its points, about 8 in all.

    Where lines coincide, their marks take turns, so that each is seen.
    """
    every = max(1, count // 8)
    return i % every, every


def count_in_whole_numbers(axes: Axes) -> None:
    """Ticks of segments and blocks, of which there is no half."""
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
