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
from ctrans.measure.findings import SEVERITIES, Finding
from ctrans.training.monitor.training_measures import GAUGES, RENAMED, Figures

LogLine = dict[str, Any]
Test = Callable[[Any], bool]
"""Whether a value of a line is what it should be."""
LONGEST, MOST = 2_000, 1_000
"""Most characters of a text, and most entries of an object, that are shown of a log."""
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
    """The figures of one step by gauge (see `GAUGES`). `unknown` has the errors of hooks by
    place.
    """

    step: int
    figures: Figures
    unknown: Mapping[str, str] = dataclasses.field(default_factory=dict)


def encoded(values: Sequence[float]) -> str:
    """Rounds to the nearest bfloat16, and returns base64. nan stays nan."""
    with np.errstate(over="ignore"):
        bits = np.asarray(values, dtype=np.float32).view(np.uint32)
    finite = (bits & 0x7F800000) != 0x7F800000
    rounded = np.where(
        finite,
        bits + 0x7FFF + ((bits >> 16) & 1),
        bits | ((bits & 0xFFFF) != 0) * np.uint32(0x400000),
    )
    return base64.b64encode((rounded >> 16).astype("<u2").tobytes()).decode()


def decoded(text: str) -> list[float]:
    """The inverse of `encoded`. Raises ValueError for a text that it does not write."""
    if len(text) > 3 * PLACES:
        raise ValueError(f"more than {PLACES:,} figures")
    bits = np.frombuffer(base64.b64decode(text, validate=True), dtype="<u2").astype(np.uint32) << 16
    found: list[float] = bits.view(np.float32).tolist()
    return found


def line_of(report: Report) -> LogLine:
    """The line of a report; `report_of` reads it."""
    run = {
        name: float(f"{value:.6g}")
        for name, value in report.figures.items()
        if not isinstance(value, list)
    }
    return {
        "step": report.step,
        "run": plain(run),
        "by": {
            name: encoded(value)
            for name, value in report.figures.items()
            if isinstance(value, list)
        },
        **({"unknown": dict(report.unknown)} if report.unknown else {}),
    }


def header_of(line: LogLine) -> Header | None:
    """The header in a line; None for other lines, and for an invalid header."""
    given = line.get("header")
    if not isinstance(given, dict):
        return None
    known = {name: _shown(given[name]) for name in HEADER if name in given}
    needed = {
        field.name for field in dataclasses.fields(Header) if field.default is dataclasses.MISSING
    }
    if not needed <= known.keys() or not all(HEADER[name](value) for name, value in known.items()):
        return None
    return Header(**known)


def report_of(line: LogLine) -> Report | None:
    """The report in a line, without figures that are not in `GAUGES`; None for other lines, and for
    an invalid report.
    """
    run, by, unknown = (line.get(name, {}) for name in ("run", "by", "unknown"))
    if "by" not in line or not all(isinstance(each, dict) for each in (run, by, unknown)):
        return None
    try:
        run, by = (
            {RENAMED.get(name, name): value for name, value in each.items()} for each in (run, by)
        )
        figures: Figures = {
            name: float(value) for name, value in run.items() if _is_of(name, run=True)
        }
        figures |= {name: decoded(text) for name, text in by.items() if _is_of(name, run=False)}
    except (TypeError, ValueError, OverflowError):
        return None
    return Report(line["step"], figures, {name: str(why) for name, why in _shown(unknown).items()})


def finding_of(line: LogLine) -> dict[str, Any] | None:
    """The JSON object of the finding in a line; None for other lines, and for an invalid
    finding.
    """
    given = line.get("finding", line.get("alarm"))
    if not isinstance(given, dict):
        return None
    if "finding" in line:
        given = given
    else:
        given = _of_before(given)
    known = {name: _shown(value) for name, value in {"step": line["step"], **given}.items()}
    fields = [field.name for field in dataclasses.fields(Finding)]
    if all(fits(known.get(name)) for name, fits in FINDING.items()):
        return {name: known.get(name) for name in fields}
    return None


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


def _of_before(alarm: Mapping[str, Any]) -> dict[str, Any]:
    """An alarm in a log of version 0.2, as a finding."""
    rule, limit, says = (alarm.get(name) for name in ("rule", "limit", "says"))
    texts = {
        "impact": alarm.get("does", ""),
        "remediation": alarm.get("helps"),
        "source": alarm.get("source", ""),
    }
    return {
        **{
            name: alarm[name]
            for name in ("step", "place", "value", "since", "doubling", "crossing")
            if name in alarm
        },
        **texts,
        "check": OLDER_ALARMS.get(rule, rule) if isinstance(rule, str) else rule,
        "topic": "training",
        "severity": {"danger": "serious", "notice": "note"}.get(str(alarm.get("grade"))),
        "figure": (
            f"{says} = {alarm.get('value'):.3g}"
            if is_finite(alarm.get("value"))
            else str(says or alarm.get("value"))
        ),
        "limit": f"{limit:.3g}" if is_finite(limit) else "",
        "places": [],
    }


def probe_of(line: LogLine) -> dict[str, Any] | None:
    """The figures of a probe with its step; None for other lines."""
    given = line.get("probe")
    if not isinstance(given, dict) or not isinstance(given.get("unknown", {}), dict):
        return None
    return {
        "step": line["step"],
        **given,
        **({"unknown": _shown(given["unknown"])} if "unknown" in given else {}),
    }


def end_of(line: LogLine) -> str | None:
    """How a run ended; None for other lines."""
    return _shown(line["end"]) if isinstance(line.get("end"), str) else None


def _is_of(name: str, *, run: bool) -> bool:
    return name in GAUGES and (GAUGES[name].scope == "run") == run


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
        if len(value) <= LONGEST:
            text = value
        else:
            text = value[:LONGEST] + "..."
        return "".join(each if each.isprintable() else " " for each in text)
    if isinstance(value, dict):
        return {_shown(name): _shown(each) for name, each in itertools.islice(value.items(), MOST)}
    if isinstance(value, list):
        return [_shown(each) for each in value]
    return value
