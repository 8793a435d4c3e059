"""What all pictures do with their axes."""

from __future__ import annotations

import math

from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator


def show_at_least_a_decade(axes: Axes) -> None:
    """Widens a logarithmic axis that spans less, so that a change in the fifth digit does not look like a leap."""
    low, high = axes.get_ylim()
    if 0 < low < high < 10 * low:
        centre = math.sqrt(low * high)
        axes.set_ylim(centre / math.sqrt(10), centre * math.sqrt(10))


DASH = 2.5
"""Length of a bound's dashes, in line widths."""


def bound_style(i: int, count: int) -> tuple[float, tuple[float, float]]:
    """The dashes of the i-th of so many models' bounds, opaque: where bounds coincide, each one's lie in the gaps of the others.

    So the colours of two are seen in turn, and never mix to that of a third.
    """
    several = max(2, count)
    return (-DASH * (i % several)) % (DASH * several), (DASH, DASH * (several - 1))


def count_in_whole_numbers(axes: Axes) -> None:
    """Ticks of segments and blocks, of which there is no half."""
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
