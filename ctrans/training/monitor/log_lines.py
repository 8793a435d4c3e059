"""The lines of a monitor's log: their contents, how they are written, and how they are read and
checked.

In a report, each gauge by depth is one text: bfloat16 (three digits, the range of float32, inf and
nan) in base64, at 2.7 characters a number.
"""

from __future__ import annotations

import base64
import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ctrans.base.json_values import is_number, is_step, plain
from ctrans.base.old_names import OldReasons
from ctrans.measure.findings import SEVERITIES, Finding
from ctrans.training.monitor.training_measures import GAUGES, Figures

LogLine = dict[str, Any]
Test = Callable[[Any], bool]
"""Whether a value of a line is what it should be."""
LONGEST = 2_000
MOST = 1_000
"""Most characters of a text, and most entries of an object, that are shown of a log."""
OLD_MISSING = "unknown"
"""The key of `missing` in logs of version 0.3."""
PLACES = 1 << 18
"""Most figures of a gauge in a report."""


@dataclasses.dataclass(frozen=True)
class Header:
    """The header of a log: the model in one line, the places, kinds and numbers of heads of its
    sublayers, and the steps between reports.

    `total` is the training's number of steps, None if unknown. `unseen` says what is not measured,
    and why.
    """

    model: str
    places: list[str]
    kinds: list[str]
    heads: list[int]
    every: int
    total: int | None = None
    unseen: str = ""


@dataclasses.dataclass(frozen=True, eq=False)
class Report:
    """The figures of one step by gauge (see `GAUGES`). `missing` has the errors of hooks by
    place.
    """

    step: int
    figures: Figures
    missing: Mapping[str, str] = dataclasses.field(default_factory=dict)

    unknown = OldReasons()


def encoded(values: Sequence[float]) -> str:
    """Rounds to the nearest bfloat16, and returns base64. nan stays nan."""
    with np.errstate(over="ignore"):
        bits = np.asarray(values, dtype=np.float32).view(np.uint32)
    finite = (bits & 0x7F800000) != 0x7F800000
    nearest_even = bits + 0x7FFF + ((bits >> 16) & 1)
    # a nan whose bits are all in the lower half would become inf
    quiet_nan = bits | np.uint32(0x400000)
    not_finite = np.where((bits & 0xFFFF) != 0, quiet_nan, bits)
    rounded = np.where(finite, nearest_even, not_finite)
    return base64.b64encode((rounded >> 16).astype("<u2").tobytes()).decode()


def decoded(text: str) -> list[float]:
    """The inverse of `encoded`. Raises ValueError for a text that it does not write."""
    if len(text) > 3 * PLACES:
        raise ValueError(f"more than {PLACES:,} figures")
    bits = np.frombuffer(base64.b64decode(text, validate=True), dtype="<u2").astype(np.uint32) << 16
    values: list[float] = bits.view(np.float32).tolist()
    return values


def line_of(report: Report) -> LogLine:
    """The line of a report; `report_of` reads it."""
    run = {}
    by = {}
    for name, value in report.figures.items():
        if isinstance(value, list):
            by[name] = encoded(value)
        else:
            run[name] = float(f"{value:.6g}")
    line: LogLine = {"step": report.step, "run": plain(run), "by": by}
    if report.missing:
        line["missing"] = dict(report.missing)
    return line


def header_of(line: LogLine) -> Header | None:
    """The header in a line; None for other lines, and for an invalid header."""
    content = line.get("header")
    if not isinstance(content, dict):
        return None
    values = {name: _shown(content[name]) for name in HEADER if name in content}
    needed = {
        field.name for field in dataclasses.fields(Header) if field.default is dataclasses.MISSING
    }
    if not needed <= values.keys():
        return None
    if not all(HEADER[name](value) for name, value in values.items()):
        return None
    return Header(**values)


def report_of(line: LogLine) -> Report | None:
    """The report in a line, without figures that are not in `GAUGES`; None for other lines, and for
    an invalid report.
    """
    run = line.get("run", {})
    by = line.get("by")
    missing = _missing(line)
    step = line.get("step")
    if not isinstance(run, dict) or not isinstance(by, dict) or not isinstance(missing, dict):
        return None
    if not isinstance(step, int) or isinstance(step, bool):
        return None
    figures: Figures = {}
    try:
        for name, value in _with_new_names(run).items():
            if name in GAUGES and GAUGES[name].scope == "run":
                figures[name] = float(value)
        for name, text in _with_new_names(by).items():
            if name in GAUGES and GAUGES[name].scope != "run":
                figures[name] = decoded(text)
    except (TypeError, ValueError, OverflowError):
        return None
    errors = {name: str(why) for name, why in _shown(missing).items()}
    return Report(step, figures, errors)


RENAMED = {"surprise": "adam_gradient_ratio", "surprise_outside": "adam_gradient_ratio_outside"}
"""Measures by their names in logs of version 0.2."""


def _missing(content: LogLine) -> Any:
    """What was not measured, also in a log of version 0.3."""
    return content.get("missing", content.get(OLD_MISSING, {}))


def _with_new_names(figures: Mapping[str, Any]) -> dict[str, Any]:
    """The figures by today's names of their gauges."""
    return {RENAMED.get(name, name): value for name, value in figures.items()}


def finding_of(line: LogLine) -> dict[str, Any] | None:
    """The JSON object of the finding in a line; None for other lines, and for an invalid
    finding.
    """
    content = line.get("finding", line.get("alarm"))
    if not isinstance(content, dict):
        return None
    if "finding" not in line:
        content = _from_alarm(content)
    values = {name: _shown(value) for name, value in {"step": line["step"], **content}.items()}
    if not all(fits(values.get(name)) for name, fits in FINDING.items()):
        return None
    return {field.name: values.get(field.name) for field in dataclasses.fields(Finding)}


OLDER_ALARMS = {
    "hidden states outrun their law": "hidden states grow too large",
    "output logits adrift": "output logits drift",
    "second moments lag": "Adam's second moments too small",
    "second moments remember too long": "Adam's second moments too large",
    "edge of stability left": "beyond the edge of stability",
    "gradients die by depth": "gradients vanish by depth",
    "discrete step far from the ODE's": "step larger than the state",
}
"""Alarms by their names in logs of version 0.2."""


def _from_alarm(alarm: Mapping[str, Any]) -> dict[str, Any]:
    """An alarm in a log of version 0.2, as a finding."""
    check = alarm.get("rule")
    if isinstance(check, str):
        check = OLDER_ALARMS.get(check, check)
    says = alarm.get("says")
    value = alarm.get("value")
    if is_finite(value):
        figure = f"{says} = {value:.3g}"
    else:
        figure = str(says or value)
    limit = ""
    if is_finite(alarm.get("limit")):
        limit = f"{alarm['limit']:.3g}"
    unchanged = ("step", "place", "value", "since", "doubling", "crossing")
    return {
        **{name: alarm[name] for name in unchanged if name in alarm},
        "impact": alarm.get("does", ""),
        "remediation": alarm.get("helps"),
        "source": alarm.get("source", ""),
        "check": check,
        "topic": "training",
        "severity": {"danger": "serious", "notice": "note"}.get(str(alarm.get("grade"))),
        "figure": figure,
        "limit": limit,
        "places": [],
    }


def probe_of(line: LogLine) -> dict[str, Any] | None:
    """The figures of a probe with its step; None for other lines."""
    content = line.get("probe")
    if not isinstance(content, dict):
        return None
    missing = _missing(content)
    if not isinstance(missing, dict):
        return None
    figures = {"step": line["step"], **content}
    figures.pop(OLD_MISSING, None)
    if missing:
        figures["missing"] = _shown(missing)
    return figures


def end_of(line: LogLine) -> str | None:
    """How a run ended; None for other lines."""
    end = line.get("end")
    if isinstance(end, str):
        return _shown_text(end)
    return None


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def is_finite(value: Any) -> bool:
    """Whether it is a number, and no bool, that pictures can scale: below 1e300 in size."""
    return type(value) in (int, float) and abs(value) < 1e300


def _list_of(fits: Test) -> Test:
    return lambda value: isinstance(value, list) and all(map(fits, value))


def _or_none(fits: Test) -> Test:
    return lambda value: value is None or fits(value)


HEADER: dict[str, Test] = {
    "model": _is_text,
    "places": _list_of(_is_text),
    "kinds": _list_of(_is_text),
    "heads": _list_of(is_step),
    "every": is_step,
    "total": _or_none(is_step),
    "unseen": _is_text,
}
FINDING: dict[str, Test] = {
    **dict.fromkeys(
        ("check", "topic", "place", "figure", "limit", "source", "impact", "remediation"), _is_text
    ),
    "severity": lambda value: value in SEVERITIES,
    "value": is_number,
    "places": lambda value: value == [],
    "step": is_step,
    "since": _or_none(is_step),
    "doubling": _or_none(is_finite),
    "crossing": _or_none(is_step),
}
"""What a valid header and a valid finding have."""


def _shown(value: Any) -> Any:
    """The value with spaces for characters that could control a terminal, and no longer than anyone
    reads (`LONGEST`, `MOST`).
    """
    if isinstance(value, str):
        return _shown_text(value)
    if isinstance(value, dict):
        entries = itertools.islice(value.items(), MOST)
        return {_shown(name): _shown(entry) for name, entry in entries}
    if isinstance(value, list):
        return [_shown(entry) for entry in value]
    return value


def _shown_text(text: str) -> str:
    if len(text) > LONGEST:
        text = text[:LONGEST] + "..."
    return "".join(character if character.isprintable() else " " for character in text)
