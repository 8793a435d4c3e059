"""One rule and one finding for every command: a `Check` says what may be wrong, a `Finding` says
that it is, where and by how much.

Each topic has one table of checks:

| topic | table | used by |
| --- | --- | --- |
| diagnosis | `ctrans.stability.diagnosis.diagnostic_checks.CHECKS` | `ctrans diagnose` |
| screening | `ctrans.stability.screening.screening_checks.CHECKS` | `ctrans screen` |
| training | `ctrans.monitor.alarms.ALARMS` | `ctrans.monitor`, `ctrans watch` |
| control | `ctrans.control.control_checks.CHECKS` | `ctrans hjb-check` |
| theory | `ctrans.verify.theory_checks.CHECKS` | `ctrans verify` |
"""

from __future__ import annotations

import dataclasses
import math
import statistics
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from solvers import ConfigError
from solvers.deprecated import old_member

Severity = Literal["broken", "serious", "note"]
SEVERITIES: tuple[Severity, ...] = ("broken", "serious", "note")
"""Most severe first.

- broken: a part computes nothing, a figure is not finite, or the loss means nothing
- serious: it probably costs quality, or breaks a training
- note: worth knowing, and often intended
"""
OURS = "our choice"
PLACES = 6
"""The words of a finding list at most this many places."""


@dataclasses.dataclass(frozen=True)
class Check:
    """A rule: a finding where a reading of `quantity` lies below `low` or above `high`, or where
    `measure` finds something.

    - `quantity`: the name of the figure that it judges; an instrument of its topic offers readings
      of it
    - `description`: that figure as a formula in words
    - `source`: who set the limit
    - `impact`, `remediation`: what it does to the model or the training, and what helps
    - `requires`: what a model must have, or what you must give, for the figure to be measured
    - `near`: a value inside of the limit by less than this factor is close to it; None where there
      is no such ratio
    - `suppresses`: checks that follow from it at the same segment, and are then not reported
    - `verdict`: the word for it in a step's verdict of `ctrans screen`
    - `limits`, `measure`: the own measurement of a training's check, and the limits that it takes
    """

    quantity: str
    description: str
    severity: Severity
    source: str
    impact: str
    remediation: str
    requires: str = ""
    low: float = -math.inf
    high: float = math.inf
    near: float | None = 1.5
    suppresses: tuple[str, ...] = ()
    verdict: str = ""
    limits: Mapping[str, float] = dataclasses.field(default_factory=dict)
    measure: Callable[..., Any] | None = None

    says = old_member("says", "description")
    does = old_member("does", "impact")
    helps = old_member("helps", "remediation")
    needs = old_member("needs", "requires")
    hides = old_member("hides", "suppresses")
    check = old_member("check", "measure")

    def fails(self, value: float) -> bool:
        """Whether a value is outside of its limits; nan, which stands for an unknown value, is not."""
        return value < self.low or value > self.high

    def excess(self, value: float) -> float:
        """How far outside of its limits a value is, in powers of ten where limit and value have a
        ratio; below 0 inside.

        nan stands for an unknown value and counts as inside.
        """
        return -math.inf if math.isnan(value) else max(_decades(self.low, value), _decades(value, self.high))

    def close(self, value: float) -> bool:
        """Whether it is inside of its limits by less than the factor `near`."""
        return self.near is not None and math.isfinite(value) and -math.log10(self.near) <= self.excess(value) <= 0

    @property
    def limit(self) -> str:
        """The limits in words: "below 0.001", "above 1000"; those of a training's check by name."""
        sides = [f"below {self.low:g}"] if self.low > -math.inf else []
        sides += [f"above {self.high:g}"] if self.high < math.inf else []
        return " or ".join(sides) or ", ".join(f"{name} {value:g}" for name, value in self.limits.items())


def _decades(small: float, large: float) -> float:
    """log10(small/large): above 0 where `small` exceeds `large`; the difference where they have no
    ratio.
    """
    if math.isinf(small) or math.isinf(large):
        return -math.inf if small < large else math.inf if small > large else 0.0
    if small > 0 and large > 0:
        return math.log10(small) - math.log10(large)
    return math.inf if small > 0 and large == 0 else small - large


@dataclasses.dataclass(frozen=True)
class Reading:
    """A value of a quantity at a place, with the figure in words. `segment` is its index along the
    depth, None outside of it.
    """

    value: float
    place: str
    figure: str
    segment: int | None = None

    said = old_member("said", "figure")


Readings = dict[str, list[Reading]]
"""Readings by quantity."""


@dataclasses.dataclass(frozen=True)
class Finding:
    """A check that a figure broke. Every field suits JSON.

    - `check`, `topic`, `severity`, `source`, `impact`, `remediation`: as the check's table has them
    - `place`, `value`, `figure`: where it is worst, the value there, and the figure in words
    - `limit`: the limit in words
    - `places`: all places, worst first; empty where there is only one
    - `step`, `since`: of a training: the step at which it was reported, and at which it began
    - `doubling`, `crossing`: of a training: in how many steps the figure doubles, and the step at
      which it will pass its limit
    - `seen`, `texts`, `values`: of several walks: how many found it, how many there were, and the
      worst value of each one
    """

    check: str
    topic: str
    severity: Severity
    place: str
    value: float
    figure: str
    limit: str
    source: str
    impact: str
    remediation: str
    places: list[Reading] = dataclasses.field(default_factory=list)
    step: int | None = None
    since: int | None = None
    doubling: float | None = None
    crossing: int | None = None
    seen: int | None = None
    texts: int | None = None
    values: list[float] | None = None

    ailment = old_member("ailment", "check")
    rule = old_member("rule", "check")
    does = old_member("does", "impact")
    helps = old_member("helps", "remediation")
    says = old_member("says", "figure")

    @property
    def grade(self) -> str:
        """The severity in the words of the version before: danger or notice."""
        return "notice" if self.severity == "note" else "danger"

    @property
    def worst(self) -> Reading:
        """Where it is worst."""
        return Reading(self.value, self.place, self.figure)

    @property
    def readings(self) -> list[Reading]:
        """All places, worst first."""
        return self.places or [self.worst]

    @property
    def deviation(self) -> float | None:
        """The standard deviation of `values`; None for one walk, or where one is not finite."""
        values = self.values or []
        return statistics.stdev(values) if len(values) > 1 and all(map(math.isfinite, values)) else None

    def __str__(self) -> str:
        return in_a_paragraph(dataclasses.asdict(self))


class Checks(dict[str, Check]):
    """The checks of a topic by name. Each must have a measurement: a new one without is an error.

    - `measured`: whether something of this topic offers the quantity of a check
    - `renamed`: checks' names of the version before, which still find them
    """

    def __init__(
        self,
        topic: str,
        checks: Mapping[str, Check],
        measured: Callable[[Check], bool] = lambda check: True,
        renamed: Mapping[str, str] | None = None,
    ):
        super().__init__(checks)
        self.topic, self.measured, self.renamed = topic, measured, dict(renamed or {})

    def __setitem__(self, name: str, check: Check) -> None:
        if not self.measured(check):
            raise ConfigError(
                f"nothing measures {check.quantity!r}, which the check {name!r} of the topic {self.topic} judges: register what "
                "measures it first, and name the quantity as it does"
            )
        super().__setitem__(name, check)

    def __missing__(self, old: str) -> Check:
        return self[self.name_now(old)]

    def name_now(self, name: str) -> str:
        """The name of a check by its name now or in the version before, with a warning for the
        latter. KeyError for neither.
        """
        if name not in self and name not in self.renamed:
            raise KeyError(name)
        if name not in self:
            now = self.renamed[name]
            warnings.warn(f"the check {name!r} is now {now!r}; the old name works until the next version", DeprecationWarning, 3)
            return now
        return name

    def finding(self, name: str, reading: Reading, **more: Any) -> Finding:
        """The check `name` as a finding at one place; `more` are further fields."""
        check = self[name]
        known = {"severity": check.severity, "limit": check.limit, "source": check.source} | more
        return Finding(
            check=name,
            topic=self.topic,
            place=reading.place,
            value=reading.value,
            figure=reading.figure,
            impact=check.impact,
            remediation=check.remediation,
            **known,
        )

    def judge(self, readings: Mapping[str, Sequence[Reading]]) -> list[Finding]:
        """The findings of readings by quantity: the most severe first, and then the farthest
        outside of its limits.

        A check that another one suppresses is left out at that one's segments.
        """
        outside = {name: found for name, check in self.items() if (found := _outside(check, readings.get(check.quantity, ())))}
        for name in list(outside):
            segments = {reading.segment for reading in outside.get(name, [])} - {None}
            for suppressed in self[name].suppresses if segments else ():
                left = [reading for reading in outside.pop(suppressed, []) if reading.segment not in segments]
                outside |= {suppressed: left} if left else {}
        findings = [self.finding(name, each[0], places=each if len(each) > 1 else []) for name, each in outside.items()]
        return self.ordered(findings)

    def ordered(self, findings: Sequence[Finding]) -> list[Finding]:
        """The most severe first, and then the farthest outside of its limits."""
        names = list(self)
        found = sorted(findings, key=lambda each: names.index(each.check))
        return sorted(found, key=lambda each: (SEVERITIES.index(each.severity), -self[each.check].excess(each.value)))


def _outside(check: Check, readings: Sequence[Reading]) -> list[Reading]:
    """The readings outside of the limits, the farthest first, and of equal ones the first along the
    depth.
    """
    found = [reading for reading in readings if check.fails(reading.value)]
    return sorted(found, key=lambda reading: -check.excess(reading.value))


def in_words(finding: Mapping[str, Any]) -> dict[str, str]:
    """A finding (its JSON object) in words, by what each part says: where, figure, limit, impact,
    fix, also.
    """
    found = {
        "where": finding["place"],
        "figure": f"{finding['figure']}{_over_walks(finding)}{_in_time(finding)}",
        "limit": f"{finding['limit']} ({finding['source']})",
        "impact": finding["impact"],
        "fix": finding["remediation"],
    }
    others = [reading["place"] for reading in finding["places"][1:]]
    if others:
        more = f"; and {len(others) - PLACES} more" if len(others) > PLACES else ""
        found["also"] = "; ".join(others[:PLACES]) + more
    return {word: text for word, text in found.items() if text}


def in_a_paragraph(finding: Mapping[str, Any]) -> str:
    """A finding (its JSON object) as one paragraph: "step 70: loss spike (serious): the loss: ..."."""
    words = in_words(finding)
    start = "" if finding["step"] is None else f"step {finding['step']}: "
    said = f"{start}{finding['check']} ({finding['severity']}): {words['where']}: {words['figure']}."
    return f"{said} {words['impact']} Fix: {words['fix']}"


def _over_walks(finding: Mapping[str, Any]) -> str:
    """How many of several walks found it, with the mean value and its deviation."""
    values = finding["values"] or []
    if (finding["texts"] or 1) == 1:
        return ""
    known = [value for value in values if math.isfinite(value)]
    mean = f"{sum(known) / len(known):.3g}" if known else "not finite"
    bar = f" ± {statistics.stdev(known):.1g}" if len(values) == len(known) > 1 else ""
    return f"; seen in {finding['seen']} of {finding['texts']} walks, mean {mean}{bar}"


def _in_time(finding: Mapping[str, Any]) -> str:
    """How fast a training's figure grows, when it will pass its limit, and since when it is so."""
    parts = []
    if finding["doubling"] is not None:
        parts.append(f"doubles every {finding['doubling']:.0f} steps")
    if finding["crossing"] is not None and finding["crossing"] > finding["step"]:
        parts.append(f"passes its limit at about step {finding['crossing']}")
    if finding["since"] is not None and finding["since"] < finding["step"]:
        parts.append(f"since step {finding['since']}")
    return "".join(f", {part}" for part in parts)


def as_object(check: Check) -> dict[str, Any]:
    """A check for JSON: all but its measurement."""
    return {name: value for name, value in vars(check).items() if name != "measure"}


def limits_in_words(checks: Mapping[str, Check]) -> list[str]:
    """A line for each check: what is measured, the limit, and who set it."""
    return [f"{name} ({c.severity}): {c.description}: {c.limit} ({c.source})" for name, c in checks.items()]


def limits_table(checks: Mapping[str, Check]) -> str:
    """The checks as a table in Markdown."""
    cells = [[name, c.severity, c.description, c.limit, c.source] for name, c in checks.items()]
    rows = ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in cells]
    return "\n".join(["| finding | severity | what is measured | limit | source |", "| --- | --- | --- | --- | --- |", *rows])
