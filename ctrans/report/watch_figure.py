"""A watched training as a picture: the loss with its alarms, and figures by depth over time."""

from __future__ import annotations

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure

from ctrans.monitor.log import MonitorLog
from ctrans.report.axes import count_in_whole_numbers

PANELS = ("rms", "gradient", "logit", "update", "step_share", "velocity")
"""Which gauges have a panel by depth."""
NAMES = {
    "rms": "rms of the state",
    "gradient": "|gradient| by sublayer",
    "logit": "largest attention score by head",
    "update": "update over weight",
    "step_share": "|h r|/|X|",
    "velocity": "rms of the velocity",
}
MARKED = 6
"""So many of the first alarms are written into the picture."""


def watch_figure(log: MonitorLog) -> Figure:
    """The loss above, with a line for each alarm; below, each gauge's colours by step and depth."""
    shown = [name for name in PANELS if (series := log.series(name)).ndim == 2 and np.isfinite(series).any()]
    rows = 1 + (len(shown) + 2) // 3
    figure = Figure(figsize=(13, 3.4 + 2.3 * (rows - 1)), layout="constrained")
    grid = figure.add_gridspec(rows, 3, height_ratios=[1.5, *([1.0] * (rows - 1))])
    _losses(figure.add_subplot(grid[0, :]), log)
    for i, name in enumerate(shown):
        _by_depth(figure, figure.add_subplot(grid[1 + i // 3, i % 3]), log, name)
    figure.suptitle(
        f"{log.header.model.split(',')[0]}: {len(log.header.places)} sublayers" + (f"; {log.ended}" if log.ended else "")
    )
    return figure


def _losses(axes: Axes, log: MonitorLog) -> None:
    steps = log.steps
    axes.plot(steps, log.series("highest_loss"), color="0.75", linewidth=0.8, label="highest since the last report")
    axes.plot(steps, log.series("loss"), color="C0", label="loss")
    norms = log.series("gradient_norm")
    if np.isfinite(norms).any():
        right = axes.twinx()
        right.plot(steps, norms, color="C3", linewidth=0.7, alpha=0.7)
        right.set(yscale="log", ylabel="|gradient|")
        right.yaxis.label.set_color("C3")
    dangers = [alarm for alarm in log.alarms if alarm["grade"] == "danger"]
    told: dict[str, int] = {}
    for alarm in dangers:
        told.setdefault(alarm["rule"], alarm["step"])
    for i, (rule, step) in enumerate(list(told.items())[:MARKED]):
        colour = f"C{(i + 1) % 10 if i + 1 != 3 else 8}"
        axes.axvline(step, color=colour, linestyle="--", linewidth=1.2, label=f"step {step}: {rule}")
    axes.set(xlabel="step", ylabel="loss")
    axes.grid(alpha=0.25)
    axes.legend(frameon=False, fontsize=8, loc="upper center", ncols=4)
    low, high = axes.get_ylim()
    axes.set_ylim(low, high + 0.25 * (high - low))  # room for the legend


def _by_depth(figure: Figure, axes: Axes, log: MonitorLog, name: str) -> None:
    series = log.series(name)
    positive = series[np.isfinite(series) & (series > 0)]
    norm = LogNorm(positive.min(), max(positive.max(), positive.min() * 1.01)) if len(positive) else None
    image = axes.pcolormesh(log.steps, np.arange(series.shape[1]), np.ma.masked_invalid(series.T), norm=norm, shading="nearest")
    figure.colorbar(image, ax=axes)
    axes.set(title=NAMES[name], xlabel="step", ylabel="head" if name == "logit" else "sublayer")
    axes.title.set_fontsize(9)
    count_in_whole_numbers(axes)
