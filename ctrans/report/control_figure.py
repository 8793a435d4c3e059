"""The picture of the maximum principle by depth: costates, gaps, alignments."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from ctrans.control.maximum_principle import MaximumPrinciple
from ctrans.report.axes import legend_below, show_at_least_a_decade
from ctrans.report.placement_style import colour as line_colour

MARKERS = {"attention": "o", "ffn": "s", "parallel": "D"}
DASHES = ("-", "--", "-.", ":")
"""Models of one placement share its colour and are told apart by these."""
GREY = "0.45"


def control_figure(readings: Mapping[str, MaximumPrinciple]) -> Figure:
    """|P|, the gap H(P) + <P, v>, and the alignment, each at the segments' starts; one line for each model, named by its key.

    The band behind a gap is H(P), the gap of a layer that does nothing. Where H is +inf there is neither, and the alignment is
    cos(-P, v).
    """
    figure = Figure(figsize=(13.5, 4.9), layout="constrained")
    sizes, gaps, alignments = figure.subplots(1, 3)
    used: Counter[str] = Counter()
    for name, reading in readings.items():
        placement = reading.placements[0] if len(set(reading.placements)) == 1 else "mixed"
        colour, dash = line_colour(placement), DASHES[used[placement] % len(DASHES)]
        used[placement] += 1
        gaps.plot(reading.times, _numbers(reading.hamiltonian), color=colour, linewidth=6, alpha=0.2, solid_capstyle="round")
        for axes, values in ((sizes, reading.costate_norm), (gaps, reading.gap), (alignments, reading.alignment)):
            _draw(axes, reading, _numbers(values), colour, dash)
        sizes.plot([], [], dash, color=colour, label=name)
    sizes.set(title="costate", ylabel=r"$|P| = |\partial L/\partial X|$")
    if any(size > 0 for reading in readings.values() for size in reading.costate_norm):
        sizes.set_yscale("log")
        show_at_least_a_decade(sizes)
    gaps.set(title="gap to free velocities, token by token", ylabel=r"$g = H(P) + \langle P, v\rangle$")
    alignments.set(title="alignment with them (0 at a critical point)", ylabel=r"$a$;  $\cos(-P, v)$ where $H = +\infty$")
    _scale_gaps(gaps, readings)
    _centre_on_zero(alignments)
    for axes in (sizes, gaps, alignments):
        axes.set_xlabel("depth-time $t$")
        axes.grid(alpha=0.25)
    handles = sizes.get_legend_handles_labels()[0] + _keys(readings)
    legend_below(figure, handles, [str(handle.get_label()) for handle in handles], most=10)
    return figure


def _draw(axes: Axes, reading: MaximumPrinciple, values: np.ndarray, colour: str, dash: str) -> None:
    axes.plot(reading.times, values, dash, color=colour, linewidth=1.4)
    for kind, marker in MARKERS.items():
        at = [k for k, segment in enumerate(reading.kinds) if segment == kind]
        face = "white" if kind == "ffn" else colour
        axes.plot([reading.times[k] for k in at], values[at], marker, color=colour, markerfacecolor=face, markersize=4.5)


def _numbers(values: Sequence[float | None]) -> np.ndarray:
    """What can be drawn of them."""
    return np.array([np.nan if value is None or not math.isfinite(value) else value for value in values])


def _scale_gaps(axes: Axes, readings: Mapping[str, MaximumPrinciple]) -> None:
    if any(gap is not None and math.isfinite(gap) for reading in readings.values() for gap in reading.gap):
        axes.set_yscale("log")
    else:
        axes.text(0.5, 0.5, r"$H = +\infty$: no output norm", transform=axes.transAxes, ha="center", color=GREY)
        axes.set(xticks=[], yticks=[])


def _centre_on_zero(axes: Axes) -> None:
    """Zero in the middle: descent of the loss above it, ascent below."""
    axes.axhline(0, color=GREY, linewidth=0.8)
    reach = min(1.05, 1.1 * max(abs(limit) for limit in axes.get_ylim()))
    axes.set_ylim(-reach, reach)


def _keys(readings: Mapping[str, MaximumPrinciple]) -> list[Line2D]:
    there = {kind for reading in readings.values() for kind in reading.kinds}
    kinds = {kind: "white" if kind == "ffn" else GREY for kind in MARKERS if kind in there}
    marks = [
        Line2D([], [], color=GREY, marker=MARKERS[kind], markerfacecolor=face, linestyle="none", label=kind)
        for kind, face in kinds.items()
    ]
    return [*marks, Line2D([], [], color=GREY, linewidth=6, alpha=0.3, label="$H(P)$")]
