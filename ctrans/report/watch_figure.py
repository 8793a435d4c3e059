"""A watched training as a picture: the loss with its alarms, and figures by depth over time."""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from ctrans.monitor.gauge_table import GAUGES
from ctrans.monitor.log import MonitorLog
from ctrans.report.axes import PLAIN, count_in_whole_numbers, show_at_least_a_decade
from ctrans.report.words import ALONG, WATCHED

PANELS = ("rms", "gradient", "logit", "update", "step_share", "velocity")
"""Which gauges have a panel by depth."""
MARKED = 6
"""So many of the first alarms are marked in the picture."""
ALARM_DASHES = ("--", ":", "-.")


def watch_figure(log: MonitorLog) -> Figure:
    """Loss and gradient norm above, with a numbered line for the first alarm of each rule; below, each gauge by step and depth."""
    shown = [name for name in PANELS if (series := log.series(name)).ndim == 2 and np.isfinite(series).any()]
    rows = 1 + (len(shown) + 2) // 3
    figure = Figure(figsize=(13, 3.6 + 2.4 * (rows - 1)), layout="constrained")
    grid = figure.add_gridspec(rows, 6, height_ratios=[1.4, *([1.0] * (rows - 1))])
    losses, norms = figure.add_subplot(grid[0, :4]), figure.add_subplot(grid[0, 4:])
    _losses(losses, log)
    _norms(norms, log)
    marks = _mark_alarms((losses, norms), log)
    for i, name in enumerate(shown):
        _by_depth(figure, figure.add_subplot(grid[1 + i // 3, 2 * (i % 3) : 2 * (i % 3) + 2]), log, name)
    if marks:
        figure.legend(handles=marks, loc="outside lower center", ncols=3, frameon=False)
    figure.suptitle(
        f"{log.header.model.split(',')[0]}: {len(log.header.places)} sublayers" + (f"; {log.ended}" if log.ended else "")
    )
    return figure


def _losses(axes: Axes, log: MonitorLog) -> None:
    axes.plot(log.steps, log.series("highest_loss"), color="0.6", linewidth=0.8, label="highest since the last report")
    axes.plot(log.steps, log.series("loss"), color=PLAIN[0], label="at the report")
    axes.set(xlabel="training step", ylabel="loss (nats a token)")
    axes.set_title("loss", loc="left")
    axes.grid(alpha=0.25)
    axes.legend(frameon=False, fontsize=8)


def _norms(axes: Axes, log: MonitorLog) -> None:
    norms, highest = log.series("gradient_norm"), log.series("highest_gradient_norm")
    axes.set(xlabel="training step", ylabel="|dL/dW|, all weights")
    axes.set_title("gradient", loc="left")
    axes.grid(alpha=0.25)
    if np.isfinite(norms).any():
        if np.isfinite(highest).any():
            axes.plot(log.steps, highest, color="0.6", linewidth=0.8)
        axes.plot(log.steps, norms, color=PLAIN[0])
        axes.set_yscale("log")
        show_at_least_a_decade(axes)
    else:
        axes.text(0.5, 0.5, "not measured", transform=axes.transAxes, ha="center", color="0.45")


def _mark_alarms(panels: tuple[Axes, ...], log: MonitorLog) -> list[Line2D]:
    """A line, numbered at its top, where each rule first saw danger; what the numbers mean as a legend."""
    first: dict[str, int] = {}
    for alarm in log.alarms:
        if alarm["grade"] == "danger":
            first.setdefault(alarm["rule"], alarm["step"])
    marks = []
    for i, (rule, step) in enumerate(list(first.items())[:MARKED]):
        style: dict[str, Any] = {"color": PLAIN[1], "linestyle": ALARM_DASHES[i % len(ALARM_DASHES)], "linewidth": 1.2}
        for axes in panels:
            axes.axvline(step, **style)
            place: dict[str, Any] = {"xycoords": axes.get_xaxis_transform(), "xytext": (0, 2), "textcoords": "offset points"}
            axes.annotate(str(i + 1), (step, 1.0), **place, color=PLAIN[1], ha="center", fontsize=9)
        marks.append(Line2D([], [], **style, label=f"{i + 1}: {rule}, step {step:,}"))
    return marks


def _by_depth(figure: Figure, axes: Axes, log: MonitorLog, name: str) -> None:
    series = log.series(name)
    positive = series[np.isfinite(series) & (series > 0)]
    norm = LogNorm(positive.min(), max(positive.max(), positive.min() * 1.01)) if len(positive) else None
    image = axes.pcolormesh(
        log.steps, np.arange(series.shape[1]), np.ma.masked_invalid(series.T), norm=norm, shading="nearest", cmap="cividis"
    )
    title, unit = WATCHED[name]
    figure.colorbar(image, ax=axes, label=unit)
    axes.set(title=title, xlabel="training step", ylabel=ALONG[GAUGES[name].scope].partition(",")[0])
    count_in_whole_numbers(axes)
