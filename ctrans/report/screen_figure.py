"""The picture of a screening: what every step measures, by depth."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ctrans.report.axes import bound_style, count_in_whole_numbers, show_at_least_a_decade
from ctrans.report.placement_style import colour, marker
from ctrans.stability.screening.attention import AttentionStep
from ctrans.stability.screening.backward import BackwardStep
from ctrans.stability.screening.forward import ForwardStep
from ctrans.stability.screening.screen import Screening
from ctrans.stability.screening.updates import UpdateStep

DASHES = ("-", "--", ":", "-.")
"""Models of one placement share its colour and are told apart by these."""
Draw = Callable[[Axes, Any, dict[str, Any]], None]


def screen_figure(screenings: Mapping[str, Screening], title: str) -> Figure:
    """Hidden states, what the depth adds, tokens' likeness, Jacobians of the rest of the model, updates, attention; a line for each
    model, named by its key. Steps that do not apply leave their panels empty.
    """
    figure = Figure(figsize=(14, 8.2), layout="constrained")
    panels = figure.subplots(2, 3).flatten()
    used: Counter[str] = Counter()
    for i, (name, screening) in enumerate(screenings.items()):
        style = {
            "color": colour(screening.placement),
            "linestyle": DASHES[used[screening.placement] % len(DASHES)],
            "marker": marker(screening.placement),
            "linewidth": 1.3,
            "markersize": 3.5,
            "label": name,
            "bound": bound_style(i, len(screenings)),
        }
        used[screening.placement] += 1
        for axes, (step, _, _, draw) in zip(panels, PANELS, strict=True):
            result = screening.findings[step].result
            if result is not None:
                draw(axes, result, style)
    for axes, (_, heading, unit, _) in zip(panels, PANELS, strict=True):
        axes.set(title=heading, xlabel=unit, yscale="log")
        show_at_least_a_decade(axes)
        count_in_whole_numbers(axes)
        axes.grid(alpha=0.25)
        if not axes.has_data():
            axes.set(xticks=[], yticks=[])
            axes.text(0.5, 0.5, "not computed", transform=axes.transAxes, ha="center", color="0.45")
    handles = {
        line.get_label(): line for axes in panels for line in axes.get_lines() if not str(line.get_label()).startswith("_")
    }
    figure.legend(list(handles.values()), list(handles), loc="outside lower center", ncols=7, frameon=False)
    figure.suptitle(title)
    return figure


def _growth(axes: Axes, step: ForwardStep, style: dict[str, Any]) -> None:
    _line(axes, range(len(step.times)), step.mean_abs, style)
    if step.bounds is not None:
        bound = {**style, "marker": "", "linestyle": style["bound"], "label": "_bound"}
        _line(axes, range(len(step.times)), step.bounds.mean_abs[: len(step.times)], bound)


def _added(axes: Axes, step: ForwardStep, style: dict[str, Any]) -> None:
    _line(axes, range(len(step.share.added)), step.share.added, style)


def _similarity(axes: Axes, step: ForwardStep, style: dict[str, Any]) -> None:
    apart = [1 - value for value in step.share.similarity]
    _line(axes, range(len(apart)), apart, style)


def _condition(axes: Axes, step: BackwardStep, style: dict[str, Any]) -> None:
    _line(axes, range(len(step.condition)), step.condition, style)


def _updates(axes: Axes, step: UpdateStep, style: dict[str, Any]) -> None:
    adam = step.updates["adam"]
    _line(axes, adam.segments, adam.values, style)


def _attention(axes: Axes, step: AttentionStep, style: dict[str, Any]) -> None:
    _line(axes, [layer.index for layer in step.layers], [layer.path for layer in step.layers], style)


def _line(axes: Axes, x: Sequence[float], y: Sequence[float | None], style: dict[str, Any]) -> None:
    """What a logarithmic axis can show of it."""
    known = [(a, b) for a, b in zip(x, y, strict=True) if b is not None and 0 < b < math.inf]
    if known:
        line = {name: value for name, value in style.items() if name != "bound"}
        axes.plot(*zip(*known, strict=True), **line, markevery=max(1, len(known) // 8))


PANELS: tuple[tuple[str, str, str, Draw], ...] = (
    ("forward", "mean |x|, and its bound (dashes without marks)", "segments done", _growth),
    ("forward", "added by the depth, of the state", "segments done", _added),
    ("forward", "1 - similarity of tokens", "segments done", _similarity),
    ("backward", r"condition $|J_{i:D}||X_i|/|X_D|$", "block i", _condition),
    ("updates", "output moved by a step of Adam, lr 0.001", "segment k", _updates),
    ("attention", "gain through attention rows alone", "segment k", _attention),
)
