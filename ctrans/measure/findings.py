"""Checks and findings of all commands. A `Check` is a limit of a measure; a `Finding` is a check
that failed, with place and value. The checks stand in the table `ctrans.measure.measures.MEASURES`.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Severity = Literal["broken", "serious", "note"]
SEVERITIES: tuple[Severity, ...] = ("broken", "serious", "note")
"""Most severe first.

- broken: a part computes nothing, a figure is not finite, or the loss means nothing
- serious: it probably costs quality, or breaks a training
- note: worth knowing, and often intended
"""
Mark = Literal["", "bad", "note", "good"]
"""How a renderer marks a figure or a sentence."""
SEVERITY_MARKS: dict[str, Mark] = {"broken": "bad", "serious": "bad", "note": "note"}
OURS = "our choice"
PLACES = 6
"""The largest number of places in the words of a finding."""


@dataclass(frozen=True, kw_only=True)
class Check:
    """A limit of a measure. It makes a finding if a value lies below `low` or above `high`, or if
    `rule` finds something in a training's past.

    - `severity`: how bad it is
    - `source`: who set the limit
    - `impact`, `remediation`: the effect on the model or the training, and the fix
    - `requires`: what the model must have, or you must give, to measure the figure
    - `near`: a value inside of the limit by less than this factor is close to it; None for no such
      factor
    - `suppresses`: checks that follow from this one at the same segment, and are not reported then
    - `verdict`: its word in a step's verdict of `ctrans screen`
    - `rule`, `limits`: for a training, the rule over its past, and the limits that the rule uses
    - `condition`: the limit in words, where no number says it
    - `quantity`: the measure, which its entry in the table of measures fills in
    - `description`: how the check looks at the measure; empty for the measure's own formula
    - `topics`: the analyses that judge it: diagnosis, screening, training, control, theory,
      weights, change, precision
    - `is_symptom`: whether it says that something is wrong, and not what. Findings of its severity
      that name a cause come first
    """

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
    limits: Mapping[str, float] = field(default_factory=dict)
    rule: Callable[..., Any] | None = None
    condition: str = ""
    quantity: str = ""
    description: str = ""
    topics: tuple[str, ...] = ()
    is_symptom: bool = False

    def fails(self, value: float) -> bool:
        """Whether a value is outside of its limits; False for nan, which is an unknown value."""
        return value < self.low or value > self.high

    def excess(self, value: float) -> float:
        """How far outside of its limits a value is: in powers of ten, or the difference if there is
        no ratio. It is below 0 inside, and for nan.
        """
        if math.isnan(value):
            return -math.inf
        return max(_decades(self.low, value), _decades(value, self.high))

    def close(self, value: float) -> bool:
        """Whether a value is inside of its limits by less than the factor `near`."""
        return (
            self.near is not None
            and math.isfinite(value)
            and -math.log10(self.near) <= self.excess(value) <= 0
        )

    @property
    def limit(self) -> str:
        """The limits in words: "below 0.001", "above 1000"; those of a training's check by name."""
        if self.condition:
            return self.condition
        sides = []
        if self.low > -math.inf:
            sides.append(f"below {self.low:g}")
        if self.high < math.inf:
            sides.append(f"above {self.high:g}")
        if sides:
            return " or ".join(sides)
        return ", ".join(f"{name} {value:g}" for name, value in self.limits.items())


def _decades(small: float, large: float) -> float:
    """log10(small/large), above 0 if `small` exceeds `large`; the difference if they have no
    ratio.
    """
    if math.isinf(small) or math.isinf(large):
        if small < large:
            return -math.inf
        if small > large:
            return math.inf
        return 0.0
    if small > 0 and large > 0:
        return math.log10(small) - math.log10(large)
    if small > 0 and large == 0:
        return math.inf
    return small - large


@dataclass(frozen=True)
class Reading:
    """A value of a quantity at a place, with the figure in words. `segment` is its segment, None
    outside of the depth. That of a state is the segment at whose end it is, None for X_0.
    """

    value: float
    place: str
    figure: str
    segment: int | None = None


Readings = dict[str, list[Reading]]
"""Readings by quantity."""


@dataclass(frozen=True)
class Finding:
    """A check that failed. All fields are JSON values.

    - `check`, `topic`, `severity`, `source`, `impact`, `remediation`: from the table of checks
    - `place`, `value`, `figure`: the worst place, the value there, and the figure in words
    - `limit`: the limit in words
    - `places`: all places, worst first; empty for one place
    - `step`, `since`: in a training, the step of the report, and the step at which it began
    - `doubling`, `crossing`: in a training, in how many steps the figure doubles, and the step at
      which it will pass its limit
    - `seen`, `texts`, `values`: for several walks, how many found it, how many there were, and the
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
    places: list[Reading] = field(default_factory=list)
    step: int | None = None
    since: int | None = None
    doubling: float | None = None
    crossing: int | None = None
    seen: int | None = None
    texts: int | None = None
    values: list[float] | None = None

    @property
    def worst(self) -> Reading:
        """The reading at the worst place."""
        return Reading(self.value, self.place, self.figure)

    @property
    def readings(self) -> list[Reading]:
        """All places, worst first."""
        return self.places or [self.worst]

    @property
    def deviation(self) -> float | None:
        """The standard deviation of `values`; None for one walk, or if a value is not finite."""
        values = self.values or []
        if len(values) > 1 and all(map(math.isfinite, values)):
            return statistics.stdev(values)
        return None

    def __str__(self) -> str:
        return in_a_paragraph(asdict(self))


class Checks(Mapping[str, Check]):
    """The checks of a topic by name, in the order of the table of measures.

    - `registered`: gives them as they are now, since a plugin may add measures
    """

    def __init__(self, topic: str, registered: Callable[[], Mapping[str, Check]]):
        self.topic = topic
        self._registered = registered

    def __getitem__(self, name: str) -> Check:
        return self._registered()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._registered())

    def __len__(self) -> int:
        return len(self._registered())

    def finding(self, name: str, reading: Reading, **more: Any) -> Finding:
        """A finding of the check `name` at one place; `more` are further fields."""
        check = self[name]
        fields_of_check = {
            "severity": check.severity,
            "limit": check.limit,
            "source": check.source,
        }
        return Finding(
            check=name,
            topic=self.topic,
            place=reading.place,
            value=reading.value,
            figure=reading.figure,
            impact=check.impact,
            remediation=check.remediation,
            **(fields_of_check | more),
        )

    def judge(self, readings: Mapping[str, Sequence[Reading]]) -> list[Finding]:
        """The findings for readings by quantity: most severe first, then farthest outside of the
        limits first. A check is left out at the segments of another one that suppresses it.
        """
        outside: dict[str, list[Reading]] = {}
        for name, check in self.items():
            failing = _outside(check, readings.get(check.quantity, ()))
            if failing:
                outside[name] = failing
        for name in list(outside):
            segments = {reading.segment for reading in outside.get(name, [])} - {None}
            if not segments:
                continue
            for suppressed in self[name].suppresses:
                elsewhere = [
                    reading
                    for reading in outside.pop(suppressed, [])
                    if reading.segment not in segments
                ]
                if elsewhere:
                    outside[suppressed] = elsewhere
        findings = []
        for name, failing in outside.items():
            places: list[Reading] = []
            if len(failing) > 1:
                places = failing
            findings.append(self.finding(name, failing[0], places=places))
        return self.ordered(findings)

    def near(
        self, readings: Mapping[str, Sequence[Reading]], failed: Sequence[str]
    ) -> dict[str, Reading]:
        """By check, the reading closest to its limit from inside, if within the factor `Check.near`
        of it. Without checks that `failed`, or that these suppress.
        """
        left_out = set(failed)
        for name in failed:
            left_out.update(self[name].suppresses)
        close = {}
        for name, check in self.items():
            candidates = [
                reading
                for reading in readings.get(check.quantity, ())
                if check.close(reading.value)
            ]
            if candidates and name not in left_out:
                close[name] = max(candidates, key=lambda reading: check.excess(reading.value))
        return close

    def ordered(self, findings: Sequence[Finding]) -> list[Finding]:
        """Findings, most severe first, causes before symptoms, then farthest outside of the limits
        first.
        """
        names = list(self)

        def rank(finding: Finding) -> tuple[int, bool, float, int]:
            severity = SEVERITIES.index(finding.severity)
            check = self[finding.check]
            return (
                severity,
                check.is_symptom,
                -check.excess(finding.value),
                names.index(finding.check),
            )

        return sorted(findings, key=rank)


def _outside(check: Check, readings: Sequence[Reading]) -> list[Reading]:
    """The readings outside of the limits, farthest first, equal ones by depth."""
    failing = [reading for reading in readings if check.fails(reading.value)]
    return sorted(failing, key=lambda reading: -check.excess(reading.value))


def in_words(finding: Mapping[str, Any]) -> dict[str, str]:
    """The parts of a finding (its JSON object) in words: where, figure, limit, impact, fix,
    also.
    """
    parts = {
        "where": finding["place"],
        "figure": f"{finding['figure']}{_over_walks(finding)}{_in_time(finding)}",
        "limit": f"{finding['limit']} ({finding['source']})",
        "impact": finding["impact"],
        "fix": finding["remediation"],
    }
    other_places = [str(reading["place"]) for reading in finding["places"][1:]]
    if other_places:
        parts["also"] = "; ".join(other_places[:PLACES])
    if len(other_places) > PLACES:
        parts["also"] += f"; and {len(other_places) - PLACES} more"
    return {word: str(text) for word, text in parts.items() if text}


def in_a_paragraph(finding: Mapping[str, Any]) -> str:
    """A finding (its JSON object) as one paragraph: "step 70: loss spike (serious): the loss:
    ...".
    """
    parts = in_words(finding)
    start = ""
    if finding["step"] is not None:
        start = f"step {finding['step']}: "
    statement = (
        f"{start}{finding['check']} ({finding['severity']}): {parts['where']}: {parts['figure']}."
    )
    return f"{statement} {parts['impact']} Fix: {parts['fix']}"


def _over_walks(finding: Mapping[str, Any]) -> str:
    """How many of several walks found it, with mean and deviation of the value."""
    values = finding["values"] or []
    if (finding["texts"] or 1) == 1:
        return ""
    finite = [value for value in values if math.isfinite(value)]
    mean = "not finite"
    if finite:
        mean = f"{sum(finite) / len(finite):.3g}"
    bar = ""
    if len(values) == len(finite) and len(finite) > 1:
        bar = f" ± {statistics.stdev(finite):.1g}"
    return f"; seen in {finding['seen']} of {finding['texts']} walks, mean {mean}{bar}"


def _in_time(finding: Mapping[str, Any]) -> str:
    """How fast a training's figure grows, when it will pass its limit, and since when it has been
    found.
    """
    parts = []
    if finding["doubling"] is not None:
        parts.append(f"doubles every {finding['doubling']:.0f} steps")
    if finding["crossing"] is not None and finding["crossing"] > finding["step"]:
        parts.append(f"passes its limit at about step {finding['crossing']}")
    if finding["since"] is not None and finding["since"] < finding["step"]:
        parts.append(f"since step {finding['since']}")
    return "".join(f", {part}" for part in parts)


def as_object(check: Check) -> dict[str, Any]:
    """A check for JSON, without its measurement."""
    return {name: value for name, value in vars(check).items() if name != "measure"}


def limits_in_words(checks: Mapping[str, Check]) -> list[str]:
    """A line for each check: the figure, the limit, and who set it."""
    return [
        f"{name} ({c.severity}): {c.description}: {c.limit} ({c.source})"
        for name, c in checks.items()
    ]


def record_of(runs: int, healed: int, harmed: int = 0) -> str:
    """The end of a check's `source`: what its advice did to patients of `benchmarks/clinic` that
    did not heal without it, and of which it was the first finding.
    """
    patients = "1 run"
    if runs != 1:
        patients = f"{runs} runs"
    return (
        f"; its advice, carried out on {patients} of the clinic's open half: healed {healed},"
        f" harmed {harmed}"
    )
