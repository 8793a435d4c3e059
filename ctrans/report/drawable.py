"""Figures that a chart can draw, on a page and in a picture."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from ctrans.report.sections import Plot

LARGEST = 1e200
"""What is larger is drawn as infinite, and on a logarithmic axis what is below its inverse as 0:
axes are computed with sums, differences and ratios.
"""


def drawable(chart: Plot) -> Plot:
    """The chart with figures of which sums and ratios can be computed (see `LARGEST`)."""
    least = 1 / LARGEST if chart.log else 0.0

    def figure(value: float | None) -> float | None:
        if value is None or math.isnan(value):
            return value
        if abs(value) < least:
            return 0.0
        if abs(value) > LARGEST:
            return math.copysign(math.inf, value)
        return value

    def figures(values: Sequence[float | None]) -> list[float | None]:
        return [figure(value) for value in values]

    def position(x: float) -> float:
        return max(-LARGEST, min(LARGEST, x))

    lines = [
        replace(
            line,
            x=list(map(position, line.x)),
            y=figures(line.y),
            low=figures(line.low),
            high=figures(line.high),
            shade=list(map(position, line.shade)),
        )
        for line in chart.lines
    ]
    frames = {name: [figures(line) for line in frame] for name, frame in chart.frames.items()}
    events = [(position(x), word) for x, word in chart.events]
    return replace(chart, lines=lines, frames=frames, events=events)
