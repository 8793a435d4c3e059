"""The figures by depth of a training over time, few enough for a file that a browser opens however
long the run.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ctrans.monitor.gauge_table import GAUGES
from ctrans.monitor.log import MonitorLog

MOMENTS = 200
"""At most so many reports are kept."""
ENTRIES = 120_000
"""At most so many figures are kept in all, but two reports always: about 1 MB of text."""


def history(log: MonitorLog) -> dict[str, Any]:
    """What a log has over time.

    - `over_time`: by gauge of the run, one figure for each of the log's reports
    - `steps`: of the reports whose figures by depth are kept: the first, the last, and others
      evenly between by their place in the log
    - `by_depth`: by gauge, one list for each of these steps; nan where nothing was seen

    Figures by depth are kept to four digits, one more than the log has.
    """
    seen = {name: log.series(name) for name in GAUGES}
    known = {name: series for name, series in seen.items() if series.size and np.isfinite(series).any()}
    deep = {name: series for name, series in known.items() if series.ndim == 2}
    width = sum(series.shape[1] for series in deep.values())
    chosen = kept_reports(len(log.reports), max(2, min(MOMENTS, ENTRIES // max(1, width))))
    return {
        "over_time": {name: series.tolist() for name, series in known.items() if series.ndim == 1},
        "steps": [log.steps[i] for i in chosen],
        "by_depth": {name: [[_short(value) for value in series[i]] for i in chosen] for name, series in deep.items()},
    }


def kept_reports(count: int, most: int) -> list[int]:
    """At most so many of 0 .. count - 1, evenly, both ends among them."""
    if count <= most:
        return list(range(count))
    return [round(i * (count - 1) / (most - 1)) for i in range(most)]


def _short(value: float) -> float:
    return float(f"{value:.4g}") if math.isfinite(value) else float(value)
