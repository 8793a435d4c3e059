"""The picture of a screening: what every step measures, by depth."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from ctrans.placement import PLACEMENTS
from ctrans.report.axes import (
    MOST_LINES,
    bound_style,
    bound_styles,
    count_in_whole_numbers,
    legend_below,
    mark_places,
    show_at_least_a_decade,
    title_above,
)
from ctrans.report.placement_style import colour, marker
from ctrans.report.words import SCREENED, Drawn
from ctrans.stability.screening.attention import AttentionStep
from ctrans.stability.screening.backward import BackwardStep
from ctrans.stability.screening.forward import ForwardStep
from ctrans.stability.screening.screen import Screening
from ctrans.stability.screening.updates import UpdateStep

DASHES = ("-", "--", ":", "-.")
"""Models of one placement share its colour and are told apart by these."""
BEYOND = (("v", 0.03, "0, below the axis (hollow)"), ("^", 0.97, "infinite, above the axis (hollow)"))
"""How a logarithmic axis shows 0 and what is infinite: mark, height in the panel, and words."""
SeriesOf = Callable[[Any], tuple[Sequence[float], Sequence[float | None]]]
"""From a step's result to what is shown, and where along the depth."""


def screen_figure(screenings: Mapping[str, Screening], title: str) -> Figure:
    """Hidden states, what the depth adds, tokens' likeness, Jacobians of the rest of the model, updates, attention; a line for each
    model, named by its key, or a row where there are more than `MOST_LINES`. Steps that do not apply leave their panels empty.
    """
    if len(screenings) > MOST_LINES:
        return _heat_maps(screenings, title)
    figure = Figure(figsize=(14, 8.2), layout="constrained")
    panels = figure.subplots(2, 3).flatten()
    used: Counter[str] = Counter()
    forward = [screening.steps["forward"].result for screening in screenings.values()]
    bounds = bound_styles([None if each is None or each.bounds is None else each.bounds.mean_abs for each in forward])
    for i, (name, screening) in enumerate(screenings.items()):
        style = {
            "color": colour(screening.placement),
            "linestyle": DASHES[used[screening.placement] % len(DASHES)],
            "marker": marker(screening.placement),
            "linewidth": 1.3,
            "markersize": 3.5,
            "label": name,
            "bound": bounds[i],
            "place": i,
        }
        used[screening.placement] += 1
        for axes, panel in zip(panels, PANELS, strict=True):
            result = screening.steps[panel.step].result
            if result is not None:
                _line(axes, *panel.series(result), style)
                if panel.series is _growth and result.bounds is not None:
                    bound = {**style, "marker": "", "linestyle": style["bound"], "label": "_bound"}
                    _line(axes, range(len(result.times)), result.bounds.mean_abs[: len(result.times)], bound)
    for axes, panel in zip(panels, PANELS, strict=True):
        axes.set(title=panel.words.title, xlabel=panel.words.x, ylabel=panel.words.y, yscale="log")
        show_at_least_a_decade(axes)
        count_in_whole_numbers(axes)
        axes.grid(alpha=0.25)
        if not axes.has_data():
            axes.set(xticks=[], yticks=[])
            axes.text(0.5, 0.5, "not computed", transform=axes.transAxes, ha="center", color="0.45")
    handles = {
        line.get_label(): line for axes in panels for line in axes.get_lines() if not str(line.get_label()).startswith("_")
    }
    if any(line.get_label() == "_bound" for line in panels[0].get_lines()):
        handles["bound (dashes without marks)"] = Line2D([], [], color="black", linestyle=bound_style(0, 2))
    beyond = {line.get_marker() for axes in panels for line in axes.get_lines() if line.get_label() == "_beyond"}
    for mark, _, says in BEYOND:
        if mark in beyond:
            handles[says] = Line2D([], [], color="black", marker=mark, fillstyle="none", linestyle="")
    legend_below(figure, list(handles.values()), list(map(str, handles)), most=7)
    title_above(figure, title)
    return figure


def _heat_maps(screenings: Mapping[str, Screening], title: str) -> Figure:
    """A row for each model, in the order given, its name in its placement's colour; along the depth the logarithm as a colour that
    grows lighter, on a scale that a colour-blind eye reads. The twentieth of the values at either end share the end's colour.
    """
    names = list(screenings)
    figure = Figure(figsize=(18, 2.2 + 0.2 * len(names)), layout="constrained")
    panels = figure.subplots(1, len(PANELS), sharey=True)
    for axes, panel in zip(panels, PANELS, strict=True):
        results = {name: screenings[name].steps[panel.step].result for name in names}
        rows = {name: panel.series(result) for name, result in results.items() if result is not None}
        axes.set(xlabel=panel.words.x, facecolor="0.85")
        axes.set_title(panel.words.title, fontsize=9)
        axes.tick_params(left=False)
        if not rows:
            continue
        depth = int(max(max(x, default=0) for x, _ in rows.values())) + 1
        values = np.full((len(names), depth), np.nan)
        for i, name in enumerate(names):
            for place, value in zip(*_filled(*rows.get(name, ((), ())), depth), strict=True):
                values[i, place] = _log10(value)
        known = values[np.isfinite(values)]
        low, high = np.quantile(known, (0.05, 0.95)) if known.size else (0.0, 1.0)
        high = max(high, low + 0.1)
        image = axes.imshow(
            np.clip(values, low, high),
            aspect="auto",
            interpolation="nearest",
            cmap="cividis",
            vmin=low,
            vmax=high,
            extent=(-0.5, depth - 0.5, len(names) - 0.5, -0.5),
        )
        bar = figure.colorbar(image, ax=axes, orientation="horizontal", pad=0.01, aspect=12, extend="both")
        bar.ax.tick_params(labelsize=7)
        bar.ax.set_xlabel(f"log10 of {panel.words.y}", fontsize=7)
        count_in_whole_numbers(axes)
    panels[0].set_yticks(range(len(names)), names, fontsize=8)
    for label, screening in zip(panels[0].get_yticklabels(), screenings.values(), strict=True):
        label.set_color(colour(screening.placement))
    used = {screening.placement: colour(screening.placement) for screening in screenings.values()}
    named = {name if name in PLACEMENTS else "several placements": hue for name, hue in used.items()}
    marks = [Line2D([], [], color=hue, marker="s", linestyle="", label=name) for name, hue in named.items()]
    legend_below(figure, marks, list(named), most=9)
    title_above(figure, f"{title}; grey is not measured")
    return figure


def _log10(value: float | None) -> float:
    """nan of what is not known, and of 0 -inf, which is drawn as the least."""
    return math.nan if value is None or math.isnan(value) else math.log10(value) if value > 0 else -math.inf


def _filled(x: Sequence[float], y: Sequence[float | None], depth: int) -> tuple[Sequence[int], Sequence[float | None]]:
    """Every place along the depth with the value that was measured nearest to it."""
    if not len(x):
        return (), ()
    places = range(depth)
    nearest = [min(range(len(x)), key=lambda i: abs(x[i] - place)) for place in places]
    return places, [y[i] for i in nearest]


def _growth(step: ForwardStep) -> tuple[Sequence[float], Sequence[float | None]]:
    return range(len(step.times)), step.mean_abs


def _added(step: ForwardStep) -> tuple[Sequence[float], Sequence[float | None]]:
    return range(len(step.share.added)), step.share.added


def _similarity(step: ForwardStep) -> tuple[Sequence[float], Sequence[float | None]]:
    return range(len(step.share.similarity)), [1 - value for value in step.share.similarity]


def _condition(step: BackwardStep) -> tuple[Sequence[float], Sequence[float | None]]:
    return range(len(step.condition)), step.condition


def _updates(step: UpdateStep) -> tuple[Sequence[float], Sequence[float | None]]:
    adam = step.updates["adam"]
    return adam.segments, adam.values


def _attention(step: AttentionStep) -> tuple[Sequence[float], Sequence[float | None]]:
    return [layer.index for layer in step.layers], [layer.path for layer in step.layers]


def _line(axes: Axes, x: Sequence[float], y: Sequence[float | None], style: dict[str, Any]) -> None:
    """What a logarithmic axis has a place for, and marks at its ends for zeros and what is infinite."""
    known = [(a, b) for a, b in zip(x, y, strict=True) if b is not None and 0 < b < math.inf]
    if known:
        line = {name: value for name, value in style.items() if name not in ("bound", "place")}
        axes.plot(*zip(*known, strict=True), **line, markevery=mark_places(style["place"], len(known)))
    for (mark, height, _), beyond in zip(BEYOND, (0.0, math.inf), strict=True):
        places = [a for a, b in zip(x, y, strict=True) if b == beyond]
        if places:
            at_the_edge = axes.get_xaxis_transform()  # heights are shares of the panel's
            look = {"color": style["color"], "marker": mark, "fillstyle": "none", "linestyle": "", "label": "_beyond"}
            axes.plot(places, [height] * len(places), **look, transform=at_the_edge)


@dataclasses.dataclass(frozen=True)
class Panel:
    """What a panel shows: whose result, its words, and where the figures are."""

    step: str
    words: Drawn
    series: SeriesOf


PANELS = (
    Panel("forward", SCREENED["growth"], _growth),
    Panel("forward", SCREENED["added"], _added),
    Panel("forward", SCREENED["apart"], _similarity),
    Panel("backward", SCREENED["condition"], _condition),
    Panel("updates", SCREENED["updates"], _updates),
    Panel("attention", SCREENED["attention"], _attention),
)
