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
    run = [name for name, gauge in GAUGES.items() if gauge.scope == "run"]
    width = sum(log.width(name) for name in GAUGES)
    chosen = kept_reports(len(log.reports), max(2, min(MOMENTS, ENTRIES // max(1, width))))
    kept = dataclasses.replace(log, reports=[log.reports[i] for i in chosen])
    seen = {name: (log if name in run else kept).series(name) for name in GAUGES}
    known = {
        name: series for name, series in seen.items() if series.size and np.isfinite(series).any()
    }
    return {
        "over_time": {name: series.tolist() for name, series in known.items() if name in run},
        "steps": kept.steps,
        "by_depth": {
            name: [[_short(value) for value in row] for row in series]
            for name, series in known.items()
            if name not in run
        },
    }


def kept_reports(count: int, most: int) -> list[int]:
    """At most `most` of 0 .. count - 1, evenly, with both ends."""
    if count <= most:
        return list(range(count))
    return [round(i * (count - 1) / (most - 1)) for i in range(most)]


def _short(value: float) -> float:
    if math.isfinite(value):
        return float(f"{value:.4g}")
    return float(value)
