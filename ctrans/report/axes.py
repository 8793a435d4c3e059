"""Axes, legends and dashes that all pictures share."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.legend import Legend

LETTER = 6.6
"""Points that a letter of 10 points takes at most in the mean."""
HANDLE = 52.0
"""Points that a legend's entry takes beside its label."""
BREAKS = re.compile(r"(?<=[-+/,\s])")
"""Places where a line may break."""


def show_at_least_a_decade(axes: Axes) -> None:
    """Widens a logarithmic axis that spans less, so that a change in the fifth digit does not look
    like a leap.
    """
    low, high = axes.get_ylim()
    if 0 < low < high < 10 * low:
        centre = math.sqrt(low * high)
        axes.set_ylim(centre / math.sqrt(10), centre * math.sqrt(10))


PLAIN = ("#004488", "#bb5566", "#ddaa33")
"""Colours of what is no placement's, which all eyes tell apart, also in grey (Paul Tol's "high
contrast").
"""
MOST_LINES = 7
"""Most lines of one panel; more models are rows of a heat map."""
DASH = 3.0
"""Length of a bound's dashes, in line widths."""
NEAR = 0.02
"""Bounds coincide if they differ by at most this share everywhere."""


def bound_style(i: int, count: int) -> tuple[float, tuple[float, float]]:
    """The dashes of the i-th of so many models' bounds, opaque: where bounds coincide, each one's
    lie in the gaps of the others.

    So the colours of two are seen in turn, and never mix to that of a third.
    """
    several = max(2, count)
    return (-DASH * (i % several)) % (DASH * several), (DASH, DASH * (several - 1))


def legend_below(
    figure: Figure, handles: Sequence[Artist], labels: Sequence[str], *, most: int = 8
) -> Legend:
    """A legend below all panels, of at most so many columns and as many as its labels leave room
    for; long ones in several lines.
    """
    room = 72 * figure.get_figwidth()
    lines = [broken(label, int((room - HANDLE) / LETTER)) for label in labels]
    longest = max((len(line) for label in lines for line in label.splitlines()), default=1)
    columns = max(1, min(most, int(room / (HANDLE + LETTER * longest))))
    rows = math.ceil(len(lines) / columns)  # filled evenly: no column of two beside columns of one
    return figure.legend(
        list(handles),
        lines,
        loc="outside lower center",
        ncols=math.ceil(len(lines) / max(1, rows)),
        frameon=False,
    )


def broken(text: str, width: int) -> str:
    """The text in lines of at most so many letters, broken behind spaces and signs, and within a
    word that is longer.
    """
    lines = [""]
    for part in BREAKS.split(text):
        if len(lines[-1]) + len(part.rstrip()) > width and lines[-1]:
            lines.append("")
        lines[-1] += part
        while len(lines[-1].rstrip()) > width:
            lines[-1:] = [lines[-1][:width], lines[-1][width:]]
    return "\n".join(line.rstrip() for line in lines)


def title_above(figure: Figure, title: str) -> None:
    """A title above all panels, in as many lines as it needs."""
    figure.suptitle(broken(title, int(72 * figure.get_figwidth() / (1.2 * LETTER))))


def bound_styles(bounds: Sequence[Sequence[float]]) -> list[tuple[float, tuple[float, float]]]:
    """The dashes of each bound. Those that lie upon each other take turns, others need not wait."""
    alike: list[list[int]] = []
    for i, bound in enumerate(bounds):
        for group in alike:
            if _coincide(bounds[group[0]], bound):
                group.append(i)
                break
        else:
            alike.append([i])
    styles = {i: bound_style(turn, len(group)) for group in alike for turn, i in enumerate(group)}
    return [styles[i] for i in sorted(styles)]


def _coincide(first: Sequence[float], second: Sequence[float]) -> bool:
    return len(first) == len(second) and all(
        math.isclose(a, b, rel_tol=NEAR) for a, b in zip(first, second, strict=True)
    )


def mark_places(i: int, count: int) -> tuple[int, int]:
    """Where the i-th line of a panel has its marks: the first, and then every so many of its
    points, about 8 in all.

    Where lines coincide, their marks take turns, so that each is seen.
    """
    every = max(1, count // 8)
    return i % every, every
