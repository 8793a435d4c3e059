"""Alarms: the checks of a training, each with a rule over the training's past.

A new alarm is a check of a measure, with a `rule`: a function of the past and the limits as in
`ctrans.training.monitor.past_checks`. `Monitor(..., limits={"attention logits grow": {"limit":
100}})` changes limits for a run.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ctrans.measure.findings import SEVERITIES, Check, Checks, Finding, Reading
from ctrans.measure.measures import MEASURES
from ctrans.training.monitor.past import Past
from ctrans.training.monitor.sightings import Limits, Sighting
from solvers import ConfigError, shown, unknown

REMEMBERED = 3
"""An alarm is raised again after more than this number of reports without it."""
REPORTED_FIRST = (
    "not finite",
    "near the end of float16",
    "loss is raised",
    "softmax twice",
    "targets are not the next tokens",
    "weights in no group",
    "embedding or head in no group",
    "optimizer forgot its past",
    "one token fills the batch",
    "tokens unlike those before",
    "targets unrelated to inputs",
    "gradients are not reset",
    "updates too large",
    "embedding updates too large",
    "attention logits grow",
    "output logits drift",
    "embedding grows",
    "hidden states grow too large",
    "gradients explode by depth",
    "gradients vanish by depth",
    "updates near zero",
    "steps are lost to rounding",
    "targets are smoothed away",
    "weights are forgotten",
    "gains decay",
    "no better than guessing",
    "targets leak",
    "gradient spike",
    "loss stays high",
    "loss spike",
    "Adam's second moments too small",
    "Adam's second moments too large",
    "Adam remembers too long",
    "beyond the edge of stability",
    "held loss rises",
    "attention collapsed",
    "step larger than the state",
    "dead layer",
    "sublayer outgrows its past",
    "frozen layer",
    "router collapse",
)
"""The order of alarms in a report: causes before their consequences. Others come last."""


def _in_order() -> dict[str, Check]:
    """The alarms in the order of reports."""
    checks = MEASURES.checks("training")
    names = [*REPORTED_FIRST, *(name for name in checks if name not in REPORTED_FIRST)]
    return {name: checks[name] for name in names}


ALARMS = Checks("training", _in_order)
"""Alarms by name, in the order of reports: causes before their consequences."""


def check_limits(changes: Mapping[str, Mapping[str, float]]) -> dict[str, Limits]:
    """The limits of all alarms, with these changes of the defaults. Raises ConfigError with the
    nearest name for an unknown one.
    """
    for name, limits in changes.items():
        if name not in ALARMS:
            raise unknown("alarm", name, ALARMS)
        for key, value in limits.items():
            if key not in ALARMS[name].limits:
                raise unknown(f"limit of {name!r}", key, ALARMS[name].limits)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or math.isnan(value):
                raise ConfigError(f"limit {key!r} of {name!r} is {shown(value)}: give a number")
    return {name: {**check.limits, **changes.get(name, {})} for name, check in ALARMS.items()}


class Watch:
    """The alarms of a run. Each is reported when it begins, and again after a pause of `REMEMBERED`
    reports.
    """

    def __init__(self, limits: Mapping[str, Mapping[str, float]] | None = None):
        self.limits = check_limits(limits or {})
        self._last: dict[str, int] = {}
        self._count = 0

    def memory(self) -> dict[str, Any]:
        """The reported alarms and their times, for a resumed run."""
        return {"last": dict(self._last), "count": self._count}

    def remember(self, memory: Mapping[str, Any]) -> None:
        """Continues from a result of `memory`."""
        self._last = dict(memory["last"])
        self._count = int(memory["count"])

    def look(self, past: Past) -> list[Finding]:
        """The new alarms of the last report, with notes last."""
        self._count += 1
        findings = []
        for name, check in ALARMS.items():
            assert check.rule is not None, "an alarm has a rule"
            sighting = check.rule(past, self.limits[name])
            if sighting is None:
                continue
            quiet = self._count - self._last.get(name, -REMEMBERED - 1)
            self._last[name] = self._count
            if quiet > REMEMBERED:
                findings.append(_finding(name, sighting, past.step))
        return sorted(findings, key=lambda finding: finding.severity == SEVERITIES[-1])


def _finding(name: str, sighting: Sighting, step: int) -> Finding:
    figure = f"{ALARMS[name].description} = {sighting.value:.3g}"
    if not math.isfinite(sighting.limit):
        limit = ""
    elif sighting.below:
        limit = f"below {sighting.limit:.3g}"
    else:
        limit = f"above {sighting.limit:.3g}"
    doubling = None
    if sighting.doubling < 1e6:
        doubling = sighting.doubling
    crossing = None
    if sighting.crossing < 1e9:
        crossing = round(sighting.crossing)
    return ALARMS.finding(
        name,
        Reading(sighting.value, sighting.place, figure),
        limit=limit,
        step=step,
        since=sighting.since,
        doubling=doubling,
        crossing=crossing,
    )
