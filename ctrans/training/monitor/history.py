"""The figures of a training over time, few enough for a page in a browser however long the run
is.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np

from ctrans.training.monitor.log import MonitorLog
from ctrans.training.monitor.training_measures import GAUGES

MOMENTS = 200
"""The largest number of reports whose figures by depth are kept."""
ENTRIES = 120_000
"""The largest number of figures by depth, about 1 MB of text. Two reports are always kept."""


def history(log: MonitorLog) -> dict[str, Any]:
    """The figures of a log over time.

    - `over_time`: for each gauge of the run, one figure for each report
    - `steps`: the steps of the reports whose figures by depth are kept: the first, the last, and
      others evenly between
    - `by_depth`: for each other gauge, one list for each of `steps`; nan is unknown. Figures have
      four digits, one more than in the log
    """
    width = sum(log.width(name) for name in GAUGES)
    moments = max(2, min(MOMENTS, ENTRIES // max(1, width)))
    chosen = kept_reports(len(log.reports), moments)
    sparse_log = dataclasses.replace(log, reports=[log.reports[i] for i in chosen])
    over_time = {}
    by_depth = {}
    for name, gauge in GAUGES.items():
        if gauge.scope == "run":
            series = log.series(name)
            if np.isfinite(series).any():
                over_time[name] = series.tolist()
        else:
            series = sparse_log.series(name)
            if np.isfinite(series).any():
                by_depth[name] = [[_short(value) for value in row] for row in series]
    return {"over_time": over_time, "steps": sparse_log.steps, "by_depth": by_depth}


def kept_reports(count: int, most: int) -> list[int]:
    """At most `most` of 0 .. count - 1, evenly, with both ends."""
    if count <= most:
        return list(range(count))
    return [round(i * (count - 1) / (most - 1)) for i in range(most)]


def _short(value: float) -> float:
    if math.isfinite(value):
        return float(f"{value:.4g}")
    return float(value)
