"""Charts as a picture: the same figures as on a page, drawn by matplotlib."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import LogNorm, Normalize
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator, NullLocator

from ctrans.report.axes import (
    MOST_LINES,
    PLAIN,
    bound_style,
    bound_styles,
    legend_below,
    mark_places,
    show_at_least_a_decade,
    title_above,
)
from ctrans.report.drawable import drawable
from ctrans.report.files import png
from ctrans.report.map_colours import colour_map, colour_of, span
from ctrans.report.placement_style import Look, looks_of
from ctrans.report.sections import Line, Page, Plot

DASHES = ("-", "--", ":", "-.")
"""Dashes that distinguish models of one colour."""
BEYOND = (
    ("v", 0.03, "0, below the axis (hollow)"),
    ("^", 0.97, "infinite, above the axis (hollow)"),
)
"""How a logarithmic axis shows 0 and infinity: mark, height in the panel, and words."""
COLUMNS = 3
WIDTH = 4.5
HEIGHT = 4.2
"""Inches of a panel."""


def pictures(page: Page) -> dict[str, Callable[[], bytes]]:
    """What makes each PNG file of the page, by its name; chapters with the same `picture` share
    one.
    """
    plots: dict[str, list[Plot]] = {}
    for chapter in page.chapters:
        if chapter.picture and chapter.charts:
            plots.setdefault(chapter.picture, []).extend(chapter.charts)
    title = page.title
    if page.subject:
        title = f"{title}: {page.subject}"
    return {f"{name}.png": partial(_png, charts, title) for name, charts in plots.items()}


def _png(charts: Sequence[Plot], title: str) -> bytes:
    return png(draw(charts, title))


def draw(charts: Sequence[Plot], title: str) -> Figure:
    """A panel for each chart, with one legend below. More than `MOST_LINES` models are rows of a
    map.
    """
    charts = [drawable(chart) for chart in charts]
    if len(charts) == 4:
        columns = 2
    else:
        columns = min(COLUMNS, len(charts))
    rows = math.ceil(len(charts) / columns)
    tallest = HEIGHT
    for chart in charts:
        if _is_map(chart):
            tallest = max(tallest, 2 + 0.2 * len(_measured(chart)))
    figure = Figure(figsize=(max(7.5, WIDTH * columns), tallest * rows + 0.5), layout="constrained")
    panels = figure.subplots(rows, columns, squeeze=False).flatten()
    looks = looks_of([(line.model, line.placement) for chart in charts for line in chart.lines])
    handles: dict[str, Artist] = {}
    for axes, chart in zip(panels, charts, strict=False):
        axes.set(title=chart.title, xlabel=chart.x)
        if _is_map(chart):
            _rows(figure, axes, chart, looks)
        elif chart.frames and len(chart.lines) == 1:
            _moments(figure, axes, chart)
        else:
            _panel(figure, axes, chart, looks, handles)
    for axes in panels[len(charts) :]:
        axes.set_visible(False)
    if len(handles) > 1:
        legend_below(figure, list(handles.values()), list(handles), most=MOST_LINES)
    title_above(figure, title)
    return figure


def _is_map(chart: Plot) -> bool:
    """Whether it has too many models for one panel, which are then rows of a map."""
    return chart.kind == "lines" and len(_measured(chart)) > MOST_LINES


def _measured(chart: Plot) -> list[Line]:
    return [line for line in chart.lines if not line.bound]


def _panel(
    figure: Figure, axes: Axes, chart: Plot, looks: Mapping[str, Look], handles: dict[str, Artist]
) -> None:
    """Lines, bars or points of one chart; what the legend needs is added to `handles`."""
    measured = _measured(chart)
    bounds = [line for line in chart.lines if line.bound]
    if chart.kind == "points":
        _points(figure, axes, measured)
    elif chart.kind == "bars":
        width = 0.8 / max(1, len(measured))
        for i, line in enumerate(measured):
            at = [x + i * width for x in line.x]
            bars = axes.bar(at, _drawn(line.y, log=False), width, color=looks[line.model].colour)
            handles.setdefault(line.model, bars.patches[0])
        axes.axhline(0, color="0.5", linewidth=0.8)
    else:
        axes.set_xscale("log" if chart.log_x else "linear")
        axes.set_yscale("log" if chart.log else "linear")
        for i, line in enumerate(measured):
            _line(axes, line, chart, looks[line.model], i, handles)
        dashes = bound_styles([[y for y in line.y if y is not None] for line in bounds])
        for line, style in zip(bounds, dashes, strict=True):
            look = looks[line.model]
            axes.plot(
                line.x,
                _drawn(line.y, log=chart.log),
                linestyle=style,
                color=look.colour,
                linewidth=1.2,
            )
            label = "bound (dashes without marks)"
            colour = "black"
            if line.predicted:
                label = line.model
                colour = look.colour
            handles.setdefault(label, Line2D([], [], color=colour, linestyle=bound_style(0, 2)))
        _scale(axes, log=chart.log)
        doublings = sorted({x for line in chart.lines for x in line.x})
        if chart.log_x and all(x >= 1 and math.log2(x).is_integer() for x in doublings):
            axes.set_xticks(doublings, [f"{x:g}" for x in doublings])
            axes.xaxis.set_minor_locator(NullLocator())
        if not chart.log_x and all(float(x).is_integer() for line in chart.lines for x in line.x):
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    _events(axes, chart)
    axes.set_ylabel(chart.y)
    axes.grid(alpha=0.25)


def _line(
    axes: Axes, line: Line, chart: Plot, look: Look, i: int, handles: dict[str, Artist]
) -> None:
    """Measured figures with marks, intervals, and marks at the ends of a logarithmic axis for 0 and
    infinity.
    """
    style: dict[str, Any] = {
        "color": look.colour,
        "linestyle": DASHES[look.repeat % len(DASHES)],
        "marker": look.marker,
    }
    y = _drawn(line.y, log=chart.log)
    (drawn,) = axes.plot(
        line.x, y, **style, linewidth=1.4, markersize=4, markevery=mark_places(i, len(y))
    )
    handles.setdefault(line.model, drawn)
    if len(line.low) and len(line.high):
        axes.fill_between(
            line.x,
            _drawn(line.low, log=chart.log),
            _drawn(line.high, log=chart.log),
            color=look.colour,
            alpha=0.15,
        )
    for (mark, height, label), beyond in zip(BEYOND, (0.0, math.inf), strict=True):
        if beyond == 0 and not chart.log:  # a linear axis has a place for 0
            continue
        places = [x for x, value in zip(line.x, line.y, strict=True) if value == beyond]
        if places:
            hollow: dict[str, Any] = {"marker": mark, "fillstyle": "none", "linestyle": ""}
            axes.plot(
                places,
                [height] * len(places),
                color=look.colour,
                **hollow,
                transform=axes.get_xaxis_transform(),
            )
            handles.setdefault(label, Line2D([], [], color="black", **hollow))


def _drawn(values: Sequence[float | None], *, log: bool) -> list[float]:
    """What the axis has a place for; nan elsewhere."""
    drawn = []
    for value in values:
        has_a_place = value is not None and math.isfinite(value) and not (log and value <= 0)
        drawn.append(value if value is not None and has_a_place else math.nan)
    return drawn


def _scale(axes: Axes, *, log: bool) -> None:
    """No axis is so short that a change of a few percent fills it."""
    if log:
        show_at_least_a_decade(axes)
        return
    low, high = axes.get_ylim()
    least_span = max(abs(low), abs(high)) / 2
    if high - low < least_span:
        centre = (low + high) / 2
        axes.set_ylim(centre - least_span / 2, centre + least_span / 2)


def _events(axes: Axes, chart: Plot) -> None:
    leftmost = min((x for line in chart.lines for x in line.x), default=0.0)
    for i, (position, word) in enumerate(chart.events):
        side = "right"
        offset = -3
        if position <= leftmost:
            side = "left"
            offset = 3
        axes.axvline(position, color=PLAIN[1], linestyle=("--", ":", "-.")[i % 3], linewidth=1.2)
        axes.annotate(
            word,
            (position, 0.02),
            xycoords=axes.get_xaxis_transform(),
            xytext=(offset, 0),
            textcoords="offset points",
            rotation=90,
            va="bottom",
            ha=side,
            fontsize=7,
        )


def _points(figure: Figure, axes: Axes, lines: Sequence[Line]) -> None:
    """Points whose colour is their `shade`."""
    x = [value for line in lines for value in line.x]
    y: list[Any] = [value for line in lines for value in line.y]
    shade = [value for line in lines for value in line.shade]
    drawn = axes.scatter(x, y, c=shade, s=6, vmin=0, cmap="viridis")
    figure.colorbar(drawn, ax=axes, label="segment")
    axes.axvline(0, color="0.7", linewidth=0.8)


def _rows(figure: Figure, axes: Axes, chart: Plot, looks: Mapping[str, Look]) -> None:
    """A row for each model, its name in its colour; along the axis the figure, or its logarithm, as
    a colour.

    The twentieth of the values at either end share the end's colour, unless there is a limit. Then
    the colours show what is beyond it (see `map_colours`). Grey is not measured.
    """
    lines = _measured(chart)
    at = sorted({x for line in lines for x in line.x})
    values = np.full((len(lines), len(at)), np.nan)
    for i, line in enumerate(lines):
        for k, x in enumerate(at):
            nearest = min(range(len(line.x)), key=lambda j: abs(line.x[j] - x), default=None)
            if nearest is None:
                values[i, k] = np.nan
            else:
                values[i, k] = _shade(line.y[nearest], log=chart.log)
    limits = [_limit(limit, log=chart.log) for limit in chart.limits]
    known_limits = [limit for limit in limits if limit is not None]
    finite_values = values[np.isfinite(values)]
    low = 0.0
    high = 1.0
    if finite_values.size:
        low, high = np.quantile(finite_values, (0.05, 0.95))
    if finite_values.size and known_limits:  # no figure beyond a limit is cut off
        low = min([*known_limits, finite_values.min()])
        high = max([*known_limits, finite_values.max()])
    low, high = span(low, high, log=chart.log)
    shown = np.clip(values, low, high)
    colours = [[colour_of(value, low, high, limits) for value in row] for row in shown]
    axes.imshow(colours, aspect="auto", interpolation="nearest")
    axes.set_facecolor("0.85")
    figure.colorbar(
        ScalarMappable(Normalize(low, high), colour_map(low, high, limits)),
        ax=axes,
        orientation="horizontal",
        aspect=30,
        label=f"log10 of {chart.y}" if chart.log else chart.y,
        extend="both",
    )
    ticks = range(0, len(at), max(1, math.ceil(len(at) / 8)))
    axes.set_xticks(list(ticks), [f"{at[k]:.3g}" for k in ticks])
    axes.set_yticks(range(len(lines)), [line.model for line in lines], fontsize=7)
    for label, line in zip(axes.get_yticklabels(), lines, strict=True):
        label.set_color(looks[line.model].colour)


def _shade(value: float | None, *, log: bool) -> float:
    """nan of what is not known; the logarithm of 0 is -inf, which is drawn as the least."""
    if value is None or math.isnan(value):
        return math.nan
    if not log:
        return value
    if value > 0:
        return math.log10(value)
    return -math.inf


def _limit(limit: float | None, *, log: bool) -> float | None:
    """The limit, or its logarithm if there is one."""
    if limit is None or (log and limit <= 0):
        return None
    return _shade(limit, log=log)


def _moments(figure: Figure, axes: Axes, chart: Plot) -> None:
    """Moments along the axis, depth upwards, the figure as a colour."""
    values = np.array(
        [_drawn(frame[0], log=chart.log) for frame in chart.frames.values()], dtype=float
    )
    finite_values = values[np.isfinite(values)]
    scale: Normalize | None = None
    if chart.log and finite_values.size:
        least, most = np.log10(finite_values.min()), np.log10(finite_values.max())
        low, high = span(least, most, log=True)
        scale = LogNorm(10**low, 10**high)
    elif finite_values.size:
        scale = Normalize(*span(finite_values.min(), finite_values.max(), log=False))
    names = list(chart.frames)
    at: Sequence[float]
    if all(name.replace(".", "", 1).replace(",", "").isdigit() for name in names):
        at = [float(name.replace(",", "")) for name in names]
    else:
        at = range(len(names))
    image = axes.pcolormesh(
        at,
        chart.lines[0].x,
        np.ma.masked_invalid(values.T),
        norm=scale,
        shading="nearest",
        cmap="cividis",
    )
    figure.colorbar(image, ax=axes, label=chart.y)
    axes.set(xlabel=chart.over, ylabel=chart.x)
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
