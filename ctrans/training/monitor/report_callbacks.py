"""The figures of a report for other loggers: plain numbers, and TensorBoard's files."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping
from pathlib import Path

from ctrans.training.monitor.training_measures import Figures

ReportCallback = Callable[[int, Mapping[str, float]], object]
"""Gets the step of a report and its figures as `summarised` gives them."""


def summarised(figures: Figures) -> dict[str, float]:
    """Figures as plain numbers. A figure by depth becomes its least, median and largest finite
    value, such as 'rms/largest'.
    """
    summary: dict[str, float] = {}
    for name, value in figures.items():
        if not isinstance(value, list):
            summary[name] = value
            continue
        finite = sorted(number for number in value if math.isfinite(number))
        if finite:
            summary[f"{name}/least"] = finite[0]
            summary[f"{name}/median"] = statistics.median(finite)
            summary[f"{name}/largest"] = finite[-1]
    return summary


def write_tensorboard(directory: Path, start: int) -> ReportCallback:
    """Returns a function that writes reports as TensorBoard's files. It replaces those after
    `start`.
    """
    from torch.utils.tensorboard import SummaryWriter  # the import takes seconds

    writer = SummaryWriter(str(directory), purge_step=start + 1)

    def write(step: int, figures: Mapping[str, float]) -> None:
        for name, value in figures.items():
            writer.add_scalar(f"monitor/{name}", value, step)
        writer.flush()

    return write
