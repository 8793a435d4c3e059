"""A watched training in a terminal: how far it is, its figures by depth and over time, its alarms."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from rich.console import Group
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from ctrans.monitor.gauge_table import GAUGES
from ctrans.monitor.log import MonitorLog
from ctrans.report.progress import duration

BARS = "▁▂▃▄▅▆▇█"
TIME, DEPTH = 20, 16
"""Characters of a sparkline over time, and over depth: with the numbers beside them a table of 80."""
FEW = 8
"""So many of the newest alarms are shown."""
SHOWN = (
    *("rms", "peak", "velocity", "bound_share", "step_share", "costate", "gradient", "update", "surprise"),
    *("logit", "entropy", "routing"),
)
"""Gauges by depth, in the order of the table."""


def page(log: MonitorLog) -> Group:
    """Everything below each other."""
    parts: list[Any] = [Text(heading(log), style="bold"), Text(progress_line(log))]
    if log.header.unseen:
        parts.append(Text(log.header.unseen, style="yellow"))
    if log.reports:
        parts += [Text(f"not seen: {line}", style="yellow") for line in not_seen(log)]
        parts += [_loss_line(log), "", _table(log)]
    parts += ["", *_alarms(log)]
    return Group(*parts)


def heading(log: MonitorLog) -> str:
    """What is watched: the model, how many sublayers, how often."""
    blocks = len(log.header.places)
    return f"{log.header.model.split(',')[0]}: {blocks} sublayers, reported every {log.header.every} steps"


def not_seen(log: MonitorLog) -> list[str]:
    """What the last report and the last probe could not look at, and why."""
    last = [log.reports[-1].unknown if log.reports else {}, log.probes[-1].get("unknown", {}) if log.probes else {}]
    return [f"{where}: {why}" for each in last for where, why in each.items()]


def progress_line(log: MonitorLog) -> str:
    """How far it is, how fast, how long it will take, and how it ended."""
    if not log.reports:
        return "no report yet"
    last, total = log.reports[-1], log.header.total
    parts = [f"step {last.step:,}" + (f" of {total:,} ({100 * last.step / total:.0f}%)" if total else "")]
    seconds = last.figures.get("seconds")
    if isinstance(seconds, float) and seconds > 0:
        parts.append(f"{1 / seconds:.3g} steps/s")
        if total and total > last.step and not log.ended:
            parts.append(f"about {duration(seconds * (total - last.step))} to go")
    parts += [
        f"{name.replace('_', ' ')} {_number(last.figures.get(name))}" for name in ("loss", "learning_rate", "gradient_norm")
    ]
    return ", ".join([*parts, log.ended or "no end yet: it goes on, or was killed"])


def sparkline(values: Sequence[float], width: int, *, logarithmic: bool = True) -> str:
    """The values as bars, each the mean of its stretch, from the least to the largest; x where one is not finite.

    Logarithms are drawn where all are positive and they span more than a factor of 4.
    """
    if not len(values):
        return ""
    array = np.asarray(values, dtype=float)
    parts = [part for part in np.array_split(array, min(width, len(array))) if len(part)]
    means = np.array([part[np.isfinite(part)].mean() if np.isfinite(part).any() else math.nan for part in parts])
    known = means[np.isfinite(means)]
    if not len(known):
        return "x" * len(means)
    if logarithmic and known.min() > 0 and known.max() > 4 * known.min():
        means, known = np.log(means, where=np.isfinite(means), out=np.full_like(means, math.nan)), np.log(known)
    low, span = known.min(), known.max() - known.min()
    levels = [math.nan if not math.isfinite(value) else (value - low) / span if span > 0 else 0.0 for value in means]
    return "".join("x" if math.isnan(level) else BARS[min(len(BARS) - 1, int(level * len(BARS)))] for level in levels)


def _loss_line(log: MonitorLog) -> Text:
    losses = log.series("loss")
    return Text(f"loss {_number(losses[0])} {sparkline(list(losses), 2 * TIME)} {_number(losses[-1])}")


def _table(log: MonitorLog) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0))
    for name in ("figure", "least", "median", "largest"):
        table.add_column(name, justify="left" if name == "figure" else "right", no_wrap=True)
    table.add_column("by depth", no_wrap=True)
    table.add_column("largest over time", no_wrap=True)
    for name in SHOWN:
        series = log.series(name)
        if series.ndim != 2 or not series.size or not np.isfinite(series).any():
            continue
        row = series[-1]
        known = row[np.isfinite(row)]
        three = (known.min(), np.median(known), known.max()) if len(known) else (math.nan,) * 3
        with np.errstate(all="ignore"):
            over_time = [float(each[np.isfinite(each)].max()) if np.isfinite(each).any() else math.nan for each in series]
        deep = row if GAUGES[name].scope == "head" else row[np.isfinite(row)] if name in ("routing", "costate") else row
        table.add_row(name.replace("_", " "), *map(_number, three), sparkline(list(deep), DEPTH), sparkline(over_time, TIME))
    return table


def _alarms(log: MonitorLog) -> list[Text]:
    if not log.alarms:
        return [Text("no alarms")]
    more = f", the newest {FEW}" if len(log.alarms) > FEW else ""
    parts = [Text(f"{len(log.alarms)} alarm{'s' * (len(log.alarms) > 1)}{more}", style="bold")]
    for alarm in log.alarms[-FEW:]:
        style = "red" if alarm["grade"] == "danger" else ""
        parts.append(Text(alarm_words(alarm), style=style))
    return parts


def alarm_words(alarm: dict[str, Any]) -> str:
    """An alarm of a log in two lines."""
    fast = f", doubles every {alarm['doubling']:.0f} steps" if alarm.get("doubling") is not None else ""
    crossing = alarm.get("crossing")
    if crossing is not None and crossing > alarm["step"]:
        fast += f", passes {_number(alarm['limit'])} at about step {crossing}"
    what = f"step {alarm['step']}: {alarm['rule']} ({alarm['grade']}): {alarm['place']}: {_number(alarm['value'])}{fast}"
    return f"{what}\n  helps: {alarm['helps']}"


def _number(value: Any) -> str:
    """Three digits, an exponent without its zeros: 7.88e3."""
    if value is None:
        return "-"
    digits, e, exponent = f"{float(value):.3g}".partition("e")
    return escape(f"{digits}e{int(exponent)}" if e else digits)
